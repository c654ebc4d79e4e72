from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.door import BARRED_S, Door, Verdict
from moqt.aio.settings import QuicSettings

ACCEPT, RETRY, REFUSE = Verdict.ACCEPT, Verdict.RETRY, Verdict.REFUSE


def test_addresses_must_be_proved_while_many_handshakes_are_under_way() -> None:
    door = Door(QuicSettings(retry_above=2))

    assert [door.asked(f"p{n}", 0.0, proved=False) for n in range(3)] == [ACCEPT, ACCEPT, RETRY]
    assert door.asked("p2", 0.0, proved=True) is ACCEPT
    for peer in ("p0", "p1"):
        door.established(peer)
    assert door.asked("p3", 0.0, proved=False) is ACCEPT


def test_addresses_are_always_proved_if_that_is_asked_for() -> None:
    door = Door(QuicSettings(retry=True))

    assert door.asked("a", 0.0, proved=False) is RETRY
    assert door.asked("a", 0.0, proved=True) is ACCEPT


def test_one_peer_has_a_quarter_of_the_handshakes() -> None:
    door = Door(QuicSettings(max_handshakes=8))

    assert [door.asked("a", 0.0, proved=True) for _ in range(3)] == [ACCEPT, ACCEPT, REFUSE]
    assert door.asked("b", 0.0, proved=True) is ACCEPT
    door.left("a", established=False)
    assert door.asked("a", 0.0, proved=True) is ACCEPT


def test_more_handshakes_than_the_limit_are_refused_whoever_comes() -> None:
    door = Door(QuicSettings(max_handshakes=4))

    verdicts = [door.asked(f"p{n}", 0.0, proved=True) for n in range(5)]
    assert verdicts == [ACCEPT] * 4 + [REFUSE]
    door.established("p0")
    assert door.asked("p4", 0.0, proved=True) is ACCEPT


def test_one_peer_begins_no_more_handshakes_than_its_rate() -> None:
    door = Door(QuicSettings(max_handshakes_per_s_of_peer=1.0))
    for _ in range(4):
        assert door.asked("a", 0.0, proved=True) is ACCEPT
        door.left("a", established=False)

    assert door.asked("a", 0.5, proved=True) is REFUSE
    assert door.asked("b", 0.5, proved=True) is ACCEPT
    assert door.asked("a", 1.0, proved=True) is ACCEPT


def test_who_did_not_stop_asking_is_refused_for_a_while_and_nobody_else() -> None:
    door = Door(QuicSettings())
    door.bar("a", 100.0)

    assert door.asked("a", 100.0 + 0.9 * BARRED_S, proved=True) is REFUSE
    assert door.asked("b", 100.0 + 0.9 * BARRED_S, proved=True) is ACCEPT
    assert door.asked("a", 100.0 + BARRED_S, proved=True) is ACCEPT
    assert not door._barred


def test_it_is_forgotten_who_was_refused_for_a_while_also_if_they_never_come_again() -> None:
    door = Door(QuicSettings())
    for number in range(10):
        door.bar(f"p{number}", float(number))
        door.bar("again and again", float(number))

    late = [f"p{number}" for number in range(5, 10)]
    assert [peer for peer in door._barred if peer != "again and again"] == late


def test_one_peer_has_no_more_connections_than_its_limit() -> None:
    door = Door(QuicSettings(max_connections_of_peer=2))
    for _ in range(2):
        assert door.asked("a", 0.0, proved=True) is ACCEPT
        door.established("a")

    assert door.asked("a", 0.0, proved=True) is REFUSE
    assert door.handshakes == 0
    assert door.asked("b", 0.0, proved=True) is ACCEPT
    door.left("a", established=True)
    assert door.asked("a", 0.0, proved=True) is ACCEPT


def test_no_more_connections_than_the_limit_are_let_in() -> None:
    door = Door(QuicSettings(max_connections=1))

    assert door.asked("a", 0.0, proved=False) is ACCEPT
    assert door.asked("b", 0.0, proved=True) is REFUSE
    assert door.asked("b", 0.0, proved=False) is REFUSE, "it costs no round trip to be refused"


@dataclass
class Model:
    handshakes: list[str] = field(default_factory=list)
    connections: list[str] = field(default_factory=list)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "prove", "complete", "leave", "drop"]),
            st.sampled_from("abc"),
            st.floats(0, 1),
        )
    )
)
def test_whoever_comes_and_goes_the_limits_hold_and_no_place_is_lost(
    steps: list[tuple[str, str, float]],
) -> None:
    settings = QuicSettings(
        max_connections=6,
        max_connections_of_peer=3,
        max_handshakes=8,
        retry_above=2,
        max_handshakes_per_s_of_peer=4.0,
    )
    door, model, now = Door(settings), Model(), 0.0
    for step, peer, pause_s in steps:
        now += pause_s
        match step:
            case "ask" | "prove":
                if door.asked(peer, now, proved=step == "prove") is ACCEPT:
                    assert step == "prove" or len(model.handshakes) < 2
                    model.handshakes.append(peer)
            case "complete" if peer in model.handshakes:
                door.established(peer)
                model.handshakes.remove(peer)
                model.connections.append(peer)
            case "drop" if peer in model.handshakes:
                door.left(peer, established=False)
                model.handshakes.remove(peer)
            case "leave" if peer in model.connections:
                door.left(peer, established=True)
                model.connections.remove(peer)
        everybody = model.handshakes + model.connections
        assert door.handshakes == len(model.handshakes)
        assert len(everybody) <= 6
        assert all(everybody.count(p) <= 3 and model.handshakes.count(p) <= 2 for p in "abc")
    for peer in model.handshakes:
        door.left(peer, established=False)
    for peer in model.connections:
        door.left(peer, established=True)
    for peer in "aabbcc":
        assert door.asked(peer, now + 100.0, proved=True) is ACCEPT


@pytest.mark.parametrize("source", ["a", "b"])
def test_who_is_refused_takes_no_place(source: str) -> None:
    door = Door(QuicSettings(max_handshakes=4, max_handshakes_per_s_of_peer=1000.0))
    assert door.asked("a", 0.0, proved=True) is ACCEPT
    for _ in range(100):
        door.asked("a", 0.0, proved=True)
    door.left("a", established=False)

    assert door.handshakes == 0
    assert door.asked(source, 0.0, proved=True) is ACCEPT
