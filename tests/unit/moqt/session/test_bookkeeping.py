"""The small tables of a session: timers, Request IDs, stream IDs, token aliases, turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import (
    AuthTokenCacheOverflow,
    DuplicateAuthTokenAlias,
    InvalidRequestId,
)
from moqt.names import TrackNamespace
from moqt.session.commands import StreamId
from moqt.session.config import Role
from moqt.session.context import Timers
from moqt.session.requests import RequestIds, overlaps, shortened
from moqt.session.sendqueue import Admission, Flow, Rank, SendQueue
from moqt.session.streams import StreamIds, is_opened_by, is_unidirectional
from moqt.session.tokens import TokenCache, UnknownTokenAlias, Wallet
from moqt.wire.token import AuthorizationToken as Token

# -- Timers ----------------------------------------------------------------------------------------


def test_a_timer_that_was_started_when_another_was_due_is_waited_for() -> None:
    timers = Timers()
    timers.start("a", 5.0)
    timers.fix(100.0)
    assert timers.expired(105.0) == ["a"]

    timers.start("b", 5.0)
    timers.fix(105.0)
    assert timers.next_deadline() == 110.0


def test_a_timer_runs_from_the_next_time_that_is_told() -> None:
    timers = Timers()
    timers.start("a", 5.0)
    assert timers.next_deadline() is None

    assert timers.expired(100.0) == []
    assert timers.next_deadline() == 105.0
    assert timers.expired(104.9) == []
    assert timers.expired(105.0) == ["a"]
    assert timers.expired(200.0) == []
    assert timers.next_deadline() is None


def test_a_timer_that_is_started_again_runs_anew_and_a_stopped_one_not_at_all() -> None:
    timers = Timers()
    timers.start("a", 5.0)
    timers.start("b", 1.0)
    timers.expired(0.0)
    timers.start("a", 5.0)
    timers.stop("b")
    timers.stop("never started")

    assert timers.expired(4.0) == []
    assert timers.next_deadline() == 9.0
    timers.stop("a")
    assert timers.expired(100.0) == []


# -- IDs -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1))
def test_a_request_id_is_taken_once_in_whatever_order(numbers: list[int]) -> None:
    ids = RequestIds(Role.SERVER)
    used: set[int] = set()
    for number in numbers:
        if number % 2 or number in used:
            with pytest.raises(InvalidRequestId):
                ids.take(number)
        else:
            assert ids.take(number) == number
            used.add(number)


def test_request_ids_in_order_take_no_memory() -> None:
    ids = RequestIds(Role.CLIENT)
    for number in range(1, 2001, 2):
        ids.take(number)

    assert ids._seen == set()
    with pytest.raises(InvalidRequestId, match="used twice"):
        ids.take(1999)


@pytest.mark.parametrize(("role", "bidi", "uni"), [(Role.CLIENT, 0, 2), (Role.SERVER, 1, 3)])
def test_stream_ids_say_who_opened_them_and_how(role: Role, bidi: int, uni: int) -> None:
    ids = StreamIds(role)

    assert [ids.bidi(), ids.bidi()] == [bidi, bidi + 4]
    assert ids.next_uni() == uni
    assert [ids.uni(), ids.uni()] == [uni, uni + 4]
    assert is_opened_by(StreamId(bidi), role)
    assert is_unidirectional(StreamId(uni))
    assert not is_unidirectional(StreamId(bidi))
    other = Role.SERVER if role is Role.CLIENT else Role.CLIENT
    assert not is_opened_by(StreamId(uni), other)


def test_a_reason_is_cut_between_characters() -> None:
    assert shortened("é" * 600) == "é" * 512
    assert shortened("xé" * 600, 4) == "xéx"
    assert shortened("short") == "short"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("a",), ("a", "b"), True),
        (("a", "b"), ("a", "b"), True),
        ((), ("z",), True),
        (("a", "b"), ("a", "c"), False),
        (("a",), ("ab",), False),
    ],
)
def test_namespaces_overlap_if_one_begins_with_the_other(
    one: tuple[str, ...], other: tuple[str, ...], expected: bool
) -> None:
    first, second = TrackNamespace.of(*one), TrackNamespace.of(*other)

    assert overlaps(first, second) is expected
    assert overlaps(second, first) is expected


# -- tokens ----------------------------------------------------------------------------------------


def test_a_registered_token_can_be_used_by_its_alias_until_it_is_deleted() -> None:
    cache = TokenCache(100)
    registered = Token.register(7, 1, b"secret")

    assert cache.resolve([registered]) == (registered,)
    assert cache.resolve([Token.use_alias(7)]) == (registered,)
    assert cache.resolve([Token.delete(7)]) == ()
    with pytest.raises(UnknownTokenAlias, match="alias 7"):
        cache.resolve([Token.use_alias(7)])


def test_each_token_costs_16_octets_and_its_value() -> None:
    cache = TokenCache(40)
    cache.resolve([Token.register(1, 0, b"1234")])
    cache.resolve([Token.register(2, 0, b"1234")])
    with pytest.raises(AuthTokenCacheOverflow):
        cache.resolve([Token.register(3, 0, b"")])
    cache.resolve([Token.delete(1), Token.register(3, 0, b"1234")])

    with pytest.raises(DuplicateAuthTokenAlias):
        cache.resolve([Token.register(3, 0, b"")])


def test_what_a_setup_registers_beyond_the_limit_is_used_once() -> None:
    cache = TokenCache(20)
    token = Token.register(1, 0, b"x" * 50)

    assert cache.resolve([token], in_setup=True) == (token,)
    with pytest.raises(UnknownTokenAlias):
        cache.resolve([Token.use_alias(1)])


def test_a_registration_takes_effect_although_its_message_is_refused() -> None:
    cache = TokenCache(100)
    with pytest.raises(UnknownTokenAlias):
        cache.resolve([Token.use_alias(9), Token.register(1, 0, b"x")])

    assert len(cache.resolve([Token.use_alias(1)])) == 1


def test_a_value_that_is_used_once_is_not_kept() -> None:
    cache = TokenCache(0)

    assert cache.resolve([Token.use_value(0, b"x")] * 2) == (Token.use_value(0, b"x"),) * 2


# -- turns -----------------------------------------------------------------------------------------


class Stub:
    """A request with one flow, and the flow."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name = name
        self.priority = priority
        self.has_waiting = True
        self.sent_octets = 0
        self.blocked = False
        self.stream_id: StreamId | None = StreamId(3)
        self.finished = False
        self.serves_past = False

    def rank(self) -> Rank:
        return (self.priority, 0, 0, 0, 0, 0)

    def has_data(self) -> bool:
        return self.has_waiting

    def pull(self, limit: int) -> tuple[list[object], int]:
        return [], 0

    def candidate(self, admit: Admission) -> Flow | None:
        return self if self.has_waiting and admit(self) else None  # type: ignore[arg-type,return-value]

    def stream_stopped(self, flow: Flow) -> None:
        self.finished = True


class Scan:
    """What the queue decides, as plainly as it can be said: every source is asked every time."""

    def __init__(self) -> None:
        self.active: dict[Stub, int] = {}
        self.turn = 0

    def wake(self, stub: Stub) -> None:
        self.active.setdefault(stub, self.turn)

    def next(self) -> Stub | None:
        for stub in [stub for stub in self.active if not stub.has_waiting]:
            del self.active[stub]
        ready = [(s.rank()[:2], t, s) for s, t in self.active.items() if not s.blocked]
        if not ready:
            return None
        self.turn += 1
        chosen = min(ready, key=lambda entry: entry[:2])[2]
        self.active[chosen] = self.turn
        return chosen


@given(st.data())
def test_the_order_is_that_of_asking_every_request_for_every_write(data: st.DataObject) -> None:
    queue, scan = SendQueue(), Scan()
    stubs = [Stub(str(n), data.draw(st.integers(0, 2))) for n in range(5)]
    for stub in stubs:
        queue.wake(stub)
        scan.wake(stub)
    for _ in range(data.draw(st.integers(1, 30))):
        stub = data.draw(st.sampled_from(stubs))
        match data.draw(st.sampled_from(["blocked", "idle", "more", "urgency"])):
            case "blocked":  # by credit, of which nobody is told
                stub.blocked = not stub.blocked
            case "idle":
                stub.has_waiting = False
                queue.wake(stub)
                scan.wake(stub)
            case "more":
                stub.has_waiting = True
                queue.wake(stub)
                scan.wake(stub)
            case "urgency":
                stub.priority = data.draw(st.integers(0, 2))
                if stub.has_waiting:
                    queue.wake(stub)
                    scan.wake(stub)
        for _ in range(data.draw(st.integers(0, 4))):
            expected = scan.next()
            assert turns(queue, 1) == (expected.name if expected is not None else "-")


def test_a_write_does_not_cost_a_look_at_every_request() -> None:
    queue = SendQueue()
    looks = [0]

    class Counted(Stub):
        def candidate(self, admit: Admission) -> Flow | None:
            looks[0] += 1
            return super().candidate(admit)

    for number in range(100):
        queue.wake(Counted(str(number)))

    def admit(flow: Flow) -> bool:
        return True

    for _ in range(1000):
        assert queue.next(admit) is not None
    assert looks[0] <= 100 + 1000


def turns(queue: SendQueue, count: int) -> str:
    names = ""
    for _ in range(count):
        turn = queue.next(lambda flow: not flow.blocked)  # type: ignore[attr-defined]
        names += turn[0].name if turn is not None else "-"  # type: ignore[attr-defined]
    return names


def test_equals_take_turns_and_the_urgent_go_first() -> None:
    queue = SendQueue()
    urgent, *equals = Stub("u", 0), Stub("a", 5), Stub("b", 5), Stub("c", 5)
    for stub in equals:
        queue.wake(stub)
    assert turns(queue, 7) == "abcabca"

    queue.wake(urgent)
    assert turns(queue, 3) == "uuu"
    urgent.has_waiting = False
    assert turns(queue, 3) == "bca"


def test_the_blocked_are_passed_over_and_stay_and_the_idle_leave() -> None:
    queue = SendQueue()
    one, two = Stub("1", 0), Stub("2", 5)
    for stub in (one, two):
        queue.wake(stub)
    one.blocked = True
    assert turns(queue, 2) == "22"
    two.has_waiting = False
    assert turns(queue, 1) == "-"
    assert not queue.is_idle

    one.blocked = one.has_waiting = False
    assert turns(queue, 1) == "-"
    assert queue.is_idle
    queue.forget(one)


class Asked:
    """A request of ours, answered or not."""

    answered = False


def test_a_token_is_named_by_its_alias_once_the_request_that_registered_it_was_answered() -> None:
    wallet, asked = Wallet(), Asked()
    wallet.peer_keeps(100)
    secret = Token.use_value(1, b"secret")

    first = wallet.to_show([secret])
    assert first == (Token.register(0, 1, b"secret"),)
    assert wallet.to_show([secret]) == first  # nothing went out yet
    wallet.shown(first, asked)
    assert wallet.to_show([secret]) == (secret,)
    asked.answered = True
    assert wallet.to_show([secret]) == (Token.use_alias(0),)


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.lists(st.binary(max_size=30), max_size=4), st.booleans()), max_size=20),
)
def test_whatever_is_shown_the_peer_can_keep_and_resolve(
    room: int, messages: list[tuple[list[bytes], bool]]
) -> None:
    wallet, cache = Wallet(), TokenCache(room)
    wallet.peer_keeps(room)
    for values, is_answered in messages:
        asked = Asked()
        shown = wallet.to_show([Token.use_value(0, value) for value in values])
        wallet.shown(shown, asked)
        assert [token.value for token in cache.resolve(shown)] == list(dict.fromkeys(values))
        asked.answered = is_answered
