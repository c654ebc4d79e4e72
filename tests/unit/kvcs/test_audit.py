import asyncio
import json
import stat
from pathlib import Path

import pytest
import structlog

from kvcs.audit import Audit, AuditEvent, Outcome, Subject, scope_of
from kvcs.errors import ConfigError
from kvcs.profile.naming import PROFILE
from moqt.authority import Action
from moqt.names import TrackNamespace

SCOPE = bytes(range(32))
WHO = Subject(iss="issuer.example", sub="team-7", cti=bytes(range(16)), address="192.0.2.7")


def refuse(audit: Audit, *, who: Subject = WHO, reason: str = "expired", count: int = 1) -> None:
    audit.note(
        AuditEvent.ACCESS,
        Outcome.REFUSED,
        who=who,
        action=Action.FETCH,
        scope=SCOPE,
        reason=reason,
        count=count,
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_in_which_scope_and_what_became_of_it(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with audit.to_file(path):
        refuse(audit)

    [line] = lines(path)
    assert str(line.pop("timestamp")).endswith("Z")
    assert line == {
        "event": "access",
        "outcome": "refused",
        "action": "FETCH",
        "scope": "00010203",
        "iss": "issuer.example",
        "sub": "team-7",
        "cti": "00010203",
        "peer": "192.0.2.7",
        "reason": "expired",
        "count": 1,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_identifier_is_written_whole(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with audit.to_file(path):
        refuse(audit)

    assert SCOPE.hex() not in path.read_text()
    assert WHO.cti.hex() not in path.read_text()


def test_a_flood_is_two_lines(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with audit.to_file(path):
        for _ in range(1000):
            refuse(audit)

    assert [line["count"] for line in lines(path)] == [1, 999]


def test_what_happened_before_is_not_in_the_file(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            refuse(audit)
        with audit.to_file(path):
            pass

    assert [line["count"] for line in logged] == [1, 2]
    assert path.read_text() == ""


def test_who_comes_from_many_places_writes_no_more_than_a_bound(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with audit.to_file(path):
        for number in range(5000):
            refuse(audit, who=Subject(address=f"2001:db8::{number:x}"))

    written = lines(path)
    assert len(written) < 1100
    assert sum(int(str(line["count"])) for line in written) == 5000


async def test_a_burst_is_told_although_nothing_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit, counts = Audit(window_s=0.01), asyncio.Queue[int]()
    monkeypatch.setattr(audit, "_write", lambda line, count: counts.put_nowait(count))
    for _ in range(3):
        refuse(audit)

    async with asyncio.timeout(10):
        assert [await counts.get(), await counts.get()] == [1, 2]


def test_what_others_chose_stays_on_its_line_and_is_cut(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with audit.to_file(path):
        refuse(audit, who=Subject(sub="a\nb\x1b[0m" + "x" * 1000))

    [line] = lines(path)
    assert str(line["sub"]).startswith("a?b?[0mxx")
    assert len(str(line["sub"])) == 256


def test_without_a_file_it_goes_to_the_log() -> None:
    audit = Audit()
    with structlog.testing.capture_logs() as log:
        refuse(audit)

    [line] = log
    assert (line["event"], line["outcome"], line["reason"]) == ("access", "refused", "expired")


def test_lines_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        audit = Audit()
        with audit.to_file(path):
            refuse(audit)

    assert len(lines(path)) == 2


def test_what_was_counted_before_is_not_written_to_the_file(tmp_path: Path) -> None:
    audit, path = Audit(), tmp_path / "audit.jsonl"
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            refuse(audit)
        with audit.to_file(path):
            refuse(audit)

    assert [line["count"] for line in log] == [1, 2]
    assert [line["count"] for line in lines(path)] == [1]


def test_a_file_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "audit.jsonl"
    with (
        pytest.raises(ConfigError, match=r"audit_file .*audit\.jsonl: No such file"),
        Audit().to_file(path),
    ):
        pass


def test_a_full_disk_is_said_once_and_ends_nothing() -> None:
    audit = Audit()
    with structlog.testing.capture_logs() as log, audit.to_file(Path("/dev/full")):
        refuse(audit, reason="one")
        refuse(audit, reason="two")

    assert [line["event"] for line in log] == ["audit file cannot be written"]


def test_the_scope_is_the_second_field_of_our_namespaces() -> None:
    assert scope_of(TrackNamespace((PROFILE, SCOPE, bytes(32)))) == SCOPE
    assert scope_of(TrackNamespace((PROFILE,))) == b""
    assert scope_of(TrackNamespace((b"live", SCOPE))) == b""
    assert scope_of(None) == b""
