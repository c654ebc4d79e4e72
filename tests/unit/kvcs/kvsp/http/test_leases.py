"""What a holder tells an index, and when, whatever becomes of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcs.errors import ConfigError
from kvcs.kvsp.http.leases import Errand, Leases, Task
from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.uris import ServiceUri

A, B = (b"c" * 32, b"a" * 16), (b"c" * 32, b"b" * 16)


def holding(name: str = "host") -> Holding:
    return Holding(ServiceUri(f"https://{name}"), (b"k" * 32,), Runs(((0, 1),)))


def asked(leases: Leases, now: float) -> tuple[Task, tuple[bytes, bytes]] | None:
    errand = leases.next_errand(now)
    return None if errand is None else (errand.task, errand.ref)


def settle(leases: Leases, now: float, lease_s: float | None = 60.0) -> list[Task]:
    """Do everything that is due; return what it was."""
    done = []
    while (errand := leases.next_errand(now)) is not None:
        leases.done(errand, now, lease_s)
        done.append(errand.task)
        assert len(done) < 100
    return done


def test_a_holder_is_registered_renewed_in_time_and_withdrawn() -> None:
    leases = Leases(60.0)
    leases.hold(A, holding())

    assert leases.is_behind
    assert settle(leases, 0.0) == [Task.REGISTER]
    assert not leases.is_behind
    assert leases.next_deadline() == 20.0
    assert settle(leases, 19.9) == []
    assert settle(leases, 20.0) == [Task.RENEW]
    leases.release(A)
    assert settle(leases, 21.0) == [Task.WITHDRAW]
    assert len(leases) == 0
    assert leases.next_errand(1e9) is None


def test_what_was_said_first_is_told_first() -> None:
    leases = Leases()
    leases.hold(B, holding())
    leases.hold(A, holding())

    assert asked(leases, 0.0) == (Task.REGISTER, B)


def test_the_same_said_again_asks_nothing() -> None:
    leases = Leases()
    leases.hold(A, holding())
    settle(leases, 0.0)
    leases.hold(A, holding())

    assert settle(leases, 1.0) == []
    leases.hold(A, holding("another"))
    assert settle(leases, 1.0) == [Task.REGISTER]


def test_what_changes_while_it_is_told_is_told_again() -> None:
    leases = Leases()
    leases.hold(A, holding("first"))
    errand = leases.next_errand(0.0)
    assert errand is not None
    leases.hold(A, holding("second"))
    leases.done(errand, 0.0, 60.0)

    again = leases.next_errand(0.0)
    assert again == Errand(Task.REGISTER, A, holding("second"))


def test_an_index_that_has_forgotten_is_told_anew() -> None:
    leases = Leases(60.0)
    leases.hold(A, holding())
    settle(leases, 0.0)
    errand = leases.next_errand(20.0)
    assert errand == Errand(Task.RENEW, A)
    assert errand is not None
    leases.done(errand, 20.0, None)

    assert settle(leases, 20.0) == [Task.REGISTER]


def test_a_lease_that_is_over_is_asked_for_anew() -> None:
    leases = Leases(60.0)
    leases.hold(A, holding())
    settle(leases, 0.0)

    assert asked(leases, 60.0) == (Task.REGISTER, A)


def test_after_a_failure_nothing_is_asked_for_a_while_by_nobody() -> None:
    leases = Leases()
    leases.hold(A, holding())
    assert leases.next_errand(0.0) is not None
    leases.failed(0.0, 5.0)
    leases.hold(B, holding())

    assert leases.next_errand(4.9) is None
    assert leases.next_deadline() == 5.0
    assert settle(leases, 5.0) == [Task.REGISTER, Task.REGISTER]


def test_what_the_index_never_heard_of_need_not_be_withdrawn() -> None:
    leases = Leases()
    leases.hold(A, holding())
    leases.release(A)

    assert len(leases) == 0
    assert leases.next_errand(0.0) is None


def test_what_the_index_may_have_heard_of_is_withdrawn_as_long_as_it_may_be_listed() -> None:
    leases = Leases(60.0)
    leases.hold(A, holding())
    assert asked(leases, 0.0) == (Task.REGISTER, A)
    leases.failed(0.0, 1.0)
    leases.release_all()

    assert asked(leases, 1.0) == (Task.WITHDRAW, A)
    leases.failed(1.0, 100.0)
    assert leases.next_errand(101.0) is None
    assert len(leases) == 0


def test_what_the_index_never_takes_is_not_asked_again_until_it_is_said_anew() -> None:
    leases = Leases()
    leases.hold(A, holding())
    errand = leases.next_errand(0.0)
    assert errand is not None
    leases.refused(errand)

    assert leases.next_errand(0.0) is None
    leases.hold(A, holding())
    assert asked(leases, 0.0) == (Task.REGISTER, A)


def test_a_refused_renewal_is_tried_as_a_registration() -> None:
    leases = Leases(60.0)
    leases.hold(A, holding())
    settle(leases, 0.0)
    errand = leases.next_errand(30.0)
    assert errand == Errand(Task.RENEW, A)
    assert errand is not None
    leases.refused(errand)

    assert asked(leases, 30.0) == (Task.REGISTER, A)


def test_no_more_are_kept_listed_than_may_be() -> None:
    leases = Leases(max_holders=1)
    leases.hold(A, holding())

    with pytest.raises(ConfigError, match="more than 1 holders"):
        leases.hold(B, holding())
    leases.hold(A, holding("another"))


class AnIndexThatFails(RuleBasedStateMachine):
    """An index that fails as it likes; once it is well, it lists what was said and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(10.0)
        self.said: dict[tuple[bytes, bytes], Holding] = {}
        self.listed: dict[tuple[bytes, bytes], tuple[Holding, float]] = {}
        self.now = 0.0

    @rule(ref=st.sampled_from([A, B]), name=st.sampled_from(["one", "two"]))
    def hold(self, ref: tuple[bytes, bytes], name: str) -> None:
        self.said[ref] = holding(name)
        self.leases.hold(ref, self.said[ref])

    @rule(ref=st.sampled_from([A, B]))
    def release(self, ref: tuple[bytes, bytes]) -> None:
        self.said.pop(ref, None)
        self.leases.release(ref)

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.listed = {ref: row for ref, row in self.listed.items() if row[1] > self.now}

    @rule(is_heard=st.booleans(), is_answered=st.booleans())
    def ask(self, is_heard: bool, is_answered: bool) -> None:
        errand = self.leases.next_errand(self.now)
        if errand is None:
            return
        lease_s = self._carry_out(errand) if is_heard else None
        if is_heard and is_answered:
            self.leases.done(errand, self.now, lease_s)
        else:
            self.leases.failed(self.now, 1.0)

    def _carry_out(self, errand: Errand) -> float | None:
        match errand.task:
            case Task.REGISTER:
                assert errand.holding is not None
                self.listed[errand.ref] = errand.holding, self.now + 10.0
            case Task.RENEW:
                if errand.ref not in self.listed:
                    return None
                self.listed[errand.ref] = self.listed[errand.ref][0], self.now + 10.0
            case Task.WITHDRAW:
                self.listed.pop(errand.ref, None)
        return 10.0

    @rule()
    def forget(self) -> None:
        """The index is started anew."""
        self.listed.clear()

    @rule()
    def be_well(self) -> None:
        """Two rounds of renewals without a fault, and the index knows what was said."""
        for _ in range(8):
            self.wait(2.0)
            for _ in range(20):
                errand = self.leases.next_errand(self.now)
                if errand is None:
                    break
                self.leases.done(errand, self.now, self._carry_out(errand))
            else:
                raise AssertionError("the errands never end")
        assert {ref: row[0] for ref, row in self.listed.items()} == self.said

    @invariant()
    def there_is_a_time_to_ask_while_anything_is_said(self) -> None:
        deadline = self.leases.next_deadline()
        assert (deadline is not None) or not self.said
        if deadline is not None and self.leases.next_errand(self.now) is not None:
            assert deadline <= self.now


TestAnIndexThatFails = AnIndexThatFails.TestCase
TestAnIndexThatFails.settings = settings(max_examples=100, stateful_step_count=30)
