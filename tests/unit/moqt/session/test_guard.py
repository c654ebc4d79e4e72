"""What was granted goes on as long as it may, and no longer, whatever happens meanwhile."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.authority import Denial
from moqt.codepoints import MessageType as M
from moqt.names import FullTrackName
from moqt.session.events import RequestId
from moqt.session.guard import Guard, Question
from tests.authorities import SCOPE, Pass, Table, token

NAME = FullTrackName(SCOPE, b"track")
ASKED = Question.about(M.SUBSCRIBE, NAME)
#: Seconds by which a timer may be late, since two looks are so far apart at least.
LATE_S = 0.06
VALUES = [b"0", b"1", b"2"]


@dataclass
class Shell:
    """A guard, its clock and its timer."""

    table: Table
    now: float = 1000.0
    timer_at: float | None = None
    lost: dict[RequestId, Denial] = field(default_factory=dict)
    farewells: list[tuple[float, Denial]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = Guard(self.table, lambda: self.now, self._set_timer)

    def _set_timer(self, seconds: float) -> None:
        assert seconds > 0
        self.timer_at = self.now + seconds

    def look(self, *, everything: bool = False) -> None:
        self.timer_at = None if not everything else self.timer_at
        lost = self.guard.look(everything=everything)
        assert not self.lost.keys() & dict(lost.requests).keys()
        self.lost.update(lost.requests)
        if lost.farewell is not None:
            self.farewells.append((self.now + lost.farewell[0], lost.farewell[1]))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timer_at is not None and self.timer_at <= until:
            self.now = self.timer_at
            self.look()
        self.now = until


passes = st.builds(
    Pass,
    expires_at=st.none() | st.floats(1001.0, 1100.0),
    check_every_s=st.none() | st.floats(0.5, 40.0),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from(VALUES)),
        st.tuples(st.just("revoke"), st.sampled_from(VALUES)),
        st.tuples(st.just("renew"), st.sampled_from(VALUES)),
        st.tuples(st.just("advance"), st.floats(0.0, 30.0)),
        st.tuples(st.just("forget"), st.integers(0, 5)),
        st.tuples(st.just("ask again"), st.none()),
    ),
    max_size=25,
)


@given(st.lists(passes, min_size=3, max_size=3), steps)
def test_what_goes_on_has_a_right_to(granted: list[Pass], done: list[tuple[str, object]]) -> None:
    table = Table(dict(zip(VALUES, granted, strict=True)))
    shell, held = Shell(table), dict[RequestId, bytes]()
    revoked_at: dict[bytes, float] = {}
    for number, (what, argument) in enumerate(done):
        request_id = RequestId(2 * number)
        match what, argument:
            case "admit", bytes(value):
                may = _may(table.passes[value], shell.now)
                denied = shell.guard.admit(request_id, ASKED, (token(value),))
                assert (denied is None) is may
                if may:
                    held[request_id] = value
            case "renew", bytes(value) if live := held.keys() - shell.lost.keys():
                [first, *_] = sorted(live)
                if shell.guard.admit_update(first, (token(value),), None) is None:
                    held[first] = value
            case "revoke", bytes(value):
                table.passes[value].revoked = True
                revoked_at.setdefault(value, shell.now)
            case "advance", float(seconds):
                shell.advance(seconds)
            case "forget", int(index) if index < len(held):
                gone = sorted(held)[index]
                del held[gone]
                shell.guard.forget(gone)
            case "ask again", _:
                shell.look(everything=True)
                assert not [
                    value
                    for request_id, value in held.items()
                    if request_id not in shell.lost and table.passes[value].revoked
                ]
        for request_id, value in held.items():
            _check(shell, request_id, table.passes[value], revoked_at.get(value))


def _may(known: Pass, now: float) -> bool:
    return not known.revoked and (known.expires_at is None or now < known.expires_at)


def _check(shell: Shell, request_id: RequestId, known: Pass, revoked_at: float | None) -> None:
    """Check that what should have ended has, and that nothing else has."""
    now, every, until = shell.now, known.check_every_s, known.expires_at
    if request_id in shell.lost:
        assert not _may(known, now)
        return
    if until is not None:
        assert now < until + LATE_S
    if revoked_at is not None and every is not None:
        assert now < revoked_at + every + LATE_S


@given(st.floats(1.0, 500.0), st.none() | st.floats(0.5, 50.0))
def test_a_session_is_told_to_go_in_time_and_once(lives_s: float, every: float | None) -> None:
    table = Table({b"0": Pass(expires_at=1000.0 + lives_s, check_every_s=every)})
    shell = Shell(table)
    assert shell.guard.setup((token(b"0"),), asked=True) is None

    shell.advance(2 * lives_s)
    [(ends_at, why)] = shell.farewells
    assert why is Denial.EXPIRED
    assert ends_at == pytest.approx(1000.0 + lives_s)


def test_an_update_of_what_was_never_granted_is_refused() -> None:
    shell = Shell(Table({b"0": Pass()}))

    denied = shell.guard.admit_update(RequestId(0), (token(b"0"),), None)
    assert denied is not None
    assert denied.why is Denial.UNAUTHORIZED


def test_of_very_many_that_are_due_some_are_asked_about_at_a_time_and_none_is_left_out() -> None:
    table = Table({b"0": Pass(check_every_s=10.0), b"1": Pass(check_every_s=10.0)})
    shell = Shell(table)
    for number in range(1000):
        shell.guard.admit(RequestId(number), ASKED, (token(VALUES[number % 2]),))
    table.passes[b"1"].revoked = True
    table.asked.clear()

    shell.advance(10.0)
    assert 0 < len(table.asked) < 500
    shell.advance(1.0)
    assert set(shell.lost) == set(range(1, 1000, 2))
    assert len(table.asked) == 1000
