"""Whom to believe, as the files say it while a program runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvcs.telemetry import LogEvent
from kvcs.trust import watching
from kvcs.trust.authority import RECHECK_S, TokenAuthority
from kvcs.trust.policy import PolicyFiles
from kvcs.trust.watching import LOOK_S, PolicyKeeper
from moqt.authority import Action, Bearer, Granted
from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken
from tests.unit.kvcs.trust.test_policy import ISSUERS, later
from tests.unit.kvcs.trust.vectors import ALL, AUDIENCE, NOW, valid

PREFIX = TrackNamespace.of("kvcs-1", bytes.fromhex(ALL["decisions"][1]["namespace"][1]))
SHOWN = Bearer((AuthorizationToken.use_value(1, valid("consumer, EdDSA")),))
REVOKED = "cti 00112233445566778899aabbccddeeff\n"


class Watched:
    """A keeper at work on files of its own, and the lines that it logs."""

    def __init__(self, folder: Path, look_s: float) -> None:
        self.issuers, self.revocations = folder / "issuers.toml", folder / "revoked"
        self.issuers.write_text(ISSUERS)
        self.revocations.write_text("")
        files = PolicyFiles(self.issuers, self.revocations)
        self.authority = TokenAuthority(files.read(), [AUDIENCE])
        self.keeper = PolicyKeeper(files, self.authority, look_s=look_s)
        self._lines: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    def info(self, event: str, **values: Any) -> None:
        self._lines.put_nowait((event, values))

    warning = info

    async def told(self, event: LogEvent) -> dict[str, Any]:
        """Wait for the next line, which must be this one."""
        async with asyncio.timeout(10):
            found, values = await self._lines.get()
        assert found == event, values
        return values

    def allows(self) -> bool:
        return isinstance(
            self.authority.decide(Action.SUBSCRIBE, PREFIX, b"t", SHOWN, NOW), Granted
        )


@pytest.fixture
async def watched(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Watched]:
    found = Watched(tmp_path, getattr(request, "param", 0.01))
    monkeypatch.setattr(watching, "log", found)
    stopping = asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(found.keeper.run(stopping))
        yield found
        stopping.set()


async def test_what_is_revoked_is_refused_as_soon_as_the_file_says_so(watched: Watched) -> None:
    assert watched.allows()

    later(watched.revocations, REVOKED)
    assert (await watched.told(LogEvent.ISSUERS_TAKEN))["revoked"] == 1
    assert not watched.allows()

    later(watched.revocations, "# nothing any more\n")
    assert (await watched.told(LogEvent.ISSUERS_TAKEN))["revoked"] == 0
    assert watched.allows()


async def test_a_file_that_is_wrong_changes_nothing_until_it_is_right(watched: Watched) -> None:
    later(watched.issuers, "[[issuers]]\nissuer = 5\n")
    refused = await watched.told(LogEvent.ISSUERS_REFUSED)
    assert "issuers.toml: issuers 1: " in refused["error"]
    assert watched.allows()

    # Said once: what comes next is said of the next change.
    later(watched.issuers, ISSUERS)
    assert (await watched.told(LogEvent.ISSUERS_TAKEN))["issuers"] == 1
    assert watched.allows()


@pytest.mark.parametrize("watched", [3600.0], indirect=True)
async def test_who_asks_for_it_has_the_files_read_at_once(watched: Watched) -> None:
    later(watched.revocations, REVOKED)

    watched.keeper.reload()

    await watched.told(LogEvent.ISSUERS_TAKEN)
    assert not watched.allows()


def test_a_revocation_counts_within_five_seconds() -> None:
    """The look at the file, and the next question about what runs."""
    assert LOOK_S + RECHECK_S < 5.0
