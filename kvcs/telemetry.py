"""Names of log events and counters, and how log lines are written.

A log line is a fixed text and named values. Identifiers are shortened (decision 14); payloads,
tokens, prompts and keys never appear. Counters belong to the object that counts: there is no
state of the process here.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, TextIO

import structlog

LogFormat = Literal["auto", "text", "json"]


class LogEvent(StrEnum):
    """The fixed texts of log lines."""

    LISTENING = "listening"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CERTIFICATE_TAKEN = "certificate taken"
    CERTIFICATE_REFUSED = "certificate refused"
    SESSION_BEGAN = "session began"
    SESSION_ENDED = "session ended"
    REQUEST_REFUSED = "request refused"
    ANNOUNCED = "namespace announced"
    WITHDRAWN = "namespace withdrawn"
    ANNOUNCE_FAILED = "namespace not announced"
    RELAY_CONNECTED = "relay connected"
    RELAY_LOST = "relay lost"
    RELAY_SILENT = "relay silent"
    RELAY_GOES_AWAY = "relay goes away"
    RELAY_MOVE_REFUSED = "relay may not send us there"
    RELAY_LEFT = "relay left"
    RELAY_UNREACHABLE = "relay unreachable"
    PUBLICATION_OPENED = "publication opened"
    SEGMENT_OPENED = "segment opened"
    LAYER_PUBLISHED = "layer published"
    MANIFEST_PUBLISHED = "manifest published"
    PUBLICATION_FINISHED = "publication finished"
    PUBLICATION_ABANDONED = "publication abandoned"
    PUBLICATION_EXPIRED = "publication expired"
    PUBLICATION_EVICTED = "publication evicted"
    PUBLICATION_FOUND = "publication found"
    SCOPE_WITHOUT = "not in this scope"
    MANIFEST_ACCEPTED = "manifest accepted"
    OBJECT_UNOPENED = "object not opened"
    OBJECT_REJECTED = "object rejected"
    LAYER_READY = "layer ready"
    WAY_IN_DOUBT = "connection in doubt"
    WAY_TAKEN = "another connection taken"
    INDEX_FAILED = "index not used"
    INDEX_REFUSED = "index entry not used"
    LANES_MISSING = "fewer connections than wanted"
    LANE_LOST = "one of several connections lost"
    PUBLICATION_KEPT = "publication kept"
    PUBLICATION_PARTIAL = "publication kept in part"
    PUBLICATION_DROPPED = "publication dropped"
    OBJECT_DAMAGED = "object damaged on disk"
    DISK_FULL = "disk full"
    STORE_FAILED = "store failed"
    UPSTREAM_CONNECTED = "followed"
    UPSTREAM_UNREACHABLE = "cannot be followed"
    UPSTREAM_LOST = "followed no more"
    PUBLICATION_JOINED = "another publication goes on"
    PUBLICATION_BAD = "publication is bad"
    BLOCKS_FULL = "no room to find blocks by their keys"
    BLOCKS_MISSED = "block service did not help"
    RETRIEVAL_COMPLETE = "retrieval complete"
    RETRIEVAL_FAILED = "retrieval failed"
    HTTP_LISTENING = "listening over http"
    HTTP_BROKEN = "request failed by a mistake of ours"
    HTTP_CUT = "answer cut off"
    TOKEN_REFUSED = "token file not usable"
    OPEN_TO_EVERYBODY = "anybody may do everything here"
    TOKENS_TAKEN = "tokens taken"
    TOKENS_REFUSED = "tokens refused"
    ISSUERS_TAKEN = "issuers taken"
    ISSUERS_REFUSED = "issuers refused"
    INDEX_LOST = "index does not answer"
    INDEX_BACK = "index answers again"
    HOLDER_REFUSED = "index does not take a holder"
    GARBAGE_COLLECTED = "garbage collected"


class Counter(StrEnum):
    """What is counted. Names follow the habits of Prometheus: base units, ``_total``."""

    SESSIONS = "kvcs_sessions_total"
    REQUESTS = "kvcs_requests_total"
    REQUESTS_REFUSED = "kvcs_requests_refused_total"
    PUBLICATIONS = "kvcs_publications_total"
    PUBLICATIONS_FINISHED = "kvcs_publications_finished_total"
    PUBLICATIONS_ABANDONED = "kvcs_publications_abandoned_total"
    PUBLICATIONS_EXPIRED = "kvcs_publications_expired_total"
    PUBLICATIONS_EVICTED = "kvcs_publications_evicted_total"
    LAYERS_PUBLISHED = "kvcs_layers_published_total"
    OBJECTS_PUBLISHED = "kvcs_objects_published_total"
    OCTETS_PUBLISHED = "kvcs_published_bytes_total"
    MANIFESTS_PUBLISHED = "kvcs_manifests_published_total"
    BUDGET_WAITS = "kvcs_budget_waits_total"
    BUDGET_WAITS_EXPIRED = "kvcs_budget_waits_expired_total"
    RELAY_CONNECTS = "kvcs_relay_connects_total"
    RELAY_FAILURES = "kvcs_relay_failures_total"
    RELAY_GOAWAYS = "kvcs_relay_goaways_total"
    OBJECTS_VERIFIED = "kvcs_objects_verified_total"
    OBJECTS_REJECTED = "kvcs_objects_rejected_total"
    OBJECTS_UNOPENED = "kvcs_objects_unopened_total"
    OBJECTS_DUPLICATE = "kvcs_objects_duplicate_total"
    OCTETS_VERIFIED = "kvcs_verified_bytes_total"
    PUBLICATIONS_KEPT = "kvcs_publications_kept_total"
    PUBLICATIONS_REFUSED = "kvcs_publications_refused_total"
    OBJECTS_KEPT = "kvcs_objects_kept_total"
    OCTETS_KEPT = "kvcs_kept_bytes_total"
    OBJECTS_DAMAGED = "kvcs_objects_damaged_total"
    DISK_FULL = "kvcs_disk_full_total"
    WAITS_EXPIRED = "kvcs_waits_expired_total"
    HTTP_REQUESTS = "kvcs_http_requests_total"
    HTTP_REQUESTS_REFUSED = "kvcs_http_requests_refused_total"
    HTTP_ANSWERS_CUT = "kvcs_http_answers_cut_total"
    HTTP_OCTETS = "kvcs_http_sent_bytes_total"
    HOLDERS_REGISTERED = "kvcs_index_holders_registered_total"
    HOLDERS_EXPIRED = "kvcs_index_holders_expired_total"
    INDEX_FAILURES = "kvcs_index_failures_total"


class Counters(Mapping[Counter, int]):
    """Numbers that only grow, all present from the start at zero."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(Counter, 0)

    def add(self, counter: Counter, amount: int = 1) -> None:
        """Count."""
        self._values[counter] += amount

    def __getitem__(self, counter: Counter) -> int:
        return self._values[counter]

    def __iter__(self) -> Iterator[Counter]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self._values.items() if value)
        return f"Counters({shown})"


def set_up_logging(
    *, log_format: LogFormat = "auto", level: str = "info", stream: TextIO | None = None
) -> None:
    """Decide how log lines of this process are written. For programs, not for libraries.

    Args:
        log_format: Lines for people, JSON lines, or whichever suits the stream: people read
            terminals.
        level: ``debug``, ``info``, ``warning`` or ``error``; what is below is not written.
        stream: Where to; standard error by default. Standard output is for results.
    """
    out = sys.stderr if stream is None else stream
    as_json = log_format == "json" or (log_format == "auto" and not out.isatty())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        # Not the default formatter: it prints local variables, keys among them.
        else structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _plain,
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def _plain(
    logger: Any, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Write identifiers as hex and enum members as their text, in both formats alike."""
    for name, value in event.items():
        if isinstance(value, bytes):
            event[name] = value[:4].hex()
        elif isinstance(value, StrEnum):
            event[name] = value.value
    return event
