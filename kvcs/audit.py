"""Audit: who was let do what, who was not, and what of keys and publications changed. Shell.

One line for each, with the same members in the same order, in a stream of its own if there is one
(``audit_file``), else among the log lines of the logger ``kvcs.audit``. Never what was published,
never a token, never a key; identifiers are shortened (decision 14).

What happens again and again is written once, and how often it happened within ten seconds
afterwards, so that nobody fills a disk by being refused.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import structlog

from kvcs.errors import ConfigError
from kvcs.profile.naming import PROFILE, PublicationName
from kvcs.repeats import Repeats
from moqt.authority import Action, Denied, Granted
from moqt.names import TrackNamespace

log = structlog.get_logger("kvcs.audit")

#: Seconds in which the same line is counted and not written again.
WINDOW_S = 10.0
#: Characters of a text that others chose.
MAX_TEXT = 256


class AuditEvent(StrEnum):
    """What a line is about."""

    ACCESS = "access"
    LIMIT = "limit"
    PUBLICATION = "publication"
    OBJECTS = "objects"
    KEY = "key"
    CERTIFICATE = "certificate"
    AUDIT = "audit"


class Outcome(StrEnum):
    """What became of it."""

    GRANTED = "granted"
    REFUSED = "refused"
    PUBLISHED = "published"
    FINISHED = "finished"
    WITHDRAWN = "withdrawn"
    REJECTED = "rejected"
    TAKEN = "taken"
    BEGAN = "began"


@dataclass(frozen=True, slots=True)
class Subject:
    """Who did it, as far as that is known."""

    iss: str = ""
    """Issuer of the token."""

    sub: str = ""
    """Whom it was issued to."""

    cti: bytes = b""
    """Its number; four octets are written."""

    address: str = ""
    """Host it came from."""


class _Line(NamedTuple):
    event: AuditEvent
    outcome: Outcome
    action: str
    scope: str
    iss: str
    sub: str
    cti: str
    peer: str
    reason: str


_NOBODY = Subject()
_REST = _Line(AuditEvent.AUDIT, Outcome.REFUSED, "", "", "", "", "", "", "many kinds at once")


def scope_of(namespace: TrackNamespace | None) -> bytes:
    """Return the Scope ID of a namespace or prefix; nothing if it names none of ours."""
    fields = namespace.fields if namespace is not None else ()
    return fields[1] if len(fields) > 1 and fields[0] == PROFILE else b""


class Audit:
    """Writes lines. There is one of a process, which :func:`note` writes to; others are for tests.

    Args:
        window_s: Seconds in which the same line is counted and not written again.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._repeats: Repeats[_Line] = Repeats(window_s, rest=_REST)
        self._fd: int | None = None
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None

    def note(
        self,
        event: AuditEvent,
        outcome: Outcome,
        *,
        who: Subject = _NOBODY,
        action: Action | None = None,
        scope: bytes = b"",
        reason: str = "",
        count: int = 1,
    ) -> None:
        """Write that something happened, or count it if the same was written just now.

        Args:
            event: What it is about.
            outcome: What became of it.
            who: Who did it.
            action: What was asked for.
            scope: Scope ID that it concerns; four octets are written.
            reason: For people; without content.
            count: How often it happened.
        """
        line = _Line(
            event=event,
            outcome=outcome,
            action="" if action is None else action.name,
            scope=scope[:4].hex(),
            iss=_plain(who.iss),
            sub=_plain(who.sub),
            cti=who.cti[:4].hex(),
            peer=_plain(who.address),
            reason=_plain(reason),
        )
        now = time.monotonic()
        self._tell_over(now)
        told = self._repeats.add(line, now, count)
        if told is not None:
            self._write(told, count)
        self._set_timer(now)

    def flush(self) -> None:
        """Write what was counted and not written yet."""
        self._tell_over(None)

    @contextmanager
    def to_file(self, path: Path | None) -> Iterator[None]:
        """Write to a file while the block runs, at its end, one JSON object a line.

        Args:
            path: The file, made with mode 0600 if it does not exist; ``None``: among log lines.

        Raises:
            ConfigError: If it cannot be written to; the message names it.
        """
        self.flush()  # what was counted before is not of this file
        if path is not None:
            try:
                self._fd = os.open(
                    path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
            except OSError as exc:
                raise ConfigError(f"audit_file {path}: {exc.strerror}") from None
            self._failed = False
        try:
            yield
        finally:
            self.flush()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _tell_over(self, now: float | None) -> None:
        for line, count in self._repeats.over(now).items():
            self._write(line, count)

    def _set_timer(self, now: float) -> None:
        """See to it that a burst is told although nothing follows it, where there is a loop."""
        at = self._repeats.next_end
        if self._timer is not None or at is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer = loop.call_later(max(0.0, at - now), self._timer_due)

    def _timer_due(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._tell_over(now)
        self._set_timer(now)

    def _write(self, line: _Line, count: int) -> None:
        values = {name: str(value) for name, value in line._asdict().items()}
        event = values.pop("event")
        if self._fd is None:
            log.info(event, **{k: v for k, v in values.items() if v}, count=count)
            return
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        text = json.dumps({"timestamp": stamp, "event": event, **values, "count": count})
        try:
            # One write, so that lines of several processes in one file do not mix.
            os.write(self._fd, text.encode() + b"\n")
        except OSError as exc:
            if not self._failed:  # a full disk must not end the service; the log says it once
                log.error("audit file cannot be written", error=exc.strerror)
            self._failed = True
        else:
            self._failed = False


def _plain(text: str) -> str:
    """Cut a text that others chose, and keep it on its line."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


#: The one of this process. Like the log, it is one for all that runs here.
_process = Audit()
note = _process.note
auditing = _process.to_file


def note_access(
    address: str, action: Action, namespace: TrackNamespace | None, answer: Granted | Denied
) -> None:
    """Write that an authority let somebody do something, or did not.

    Args:
        address: Host that was asked from.
        action: What was asked for.
        namespace: Where; None for a SETUP.
        answer: What was said; the reason is written of a refusal alone.
    """
    granted = isinstance(answer, Granted)
    note(
        AuditEvent.ACCESS,
        Outcome.GRANTED if granted else Outcome.REFUSED,
        who=Subject(sub=answer.who, cti=bytes.fromhex(answer.token), address=address),
        action=action,
        scope=scope_of(namespace),
        reason="" if isinstance(answer, Granted) else f"{answer.why.value}: {answer.reason}",
    )


def note_publication(
    name: PublicationName,
    outcome: Outcome,
    reason: str = "",
    *,
    event: AuditEvent = AuditEvent.PUBLICATION,
) -> None:
    """Write what became of a publication, or of Objects of it; four octets of its ID are named."""
    text = f"publication {name.publication_id[:4].hex()}"
    note(event, outcome, scope=name.scope_id, reason=f"{text}: {reason}" if reason else text)
