"""The state diagram of a subscription, by its shape."""

import pytest

from moqt.errors import ProtocolError
from moqt.session.subscription import TRANSITIONS, Input, State, advance


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Input)
def test_what_is_not_a_row_is_a_violation(state: State, event: Input) -> None:
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(ProtocolError, match=f"{event.name} is not allowed in {state.name}"):
            advance(state, event)


def test_every_state_but_the_first_can_be_reached_and_the_last_cannot_be_left() -> None:
    assert set(TRANSITIONS.values()) == set(State) - {State.IDLE}
    assert not [row for row in TRANSITIONS if row[0] is State.TERMINATED]


def test_every_state_but_the_last_can_be_left_for_the_last() -> None:
    reaching = {State.TERMINATED}
    while more := {s for (s, _), to in TRANSITIONS.items() if to in reaching} - reaching:
        reaching |= more

    assert reaching == set(State)


def test_the_arrows_of_the_draft_are_there() -> None:
    drawn = {
        (State.IDLE, Input.SUBSCRIBE, State.PENDING_SUBSCRIBER),
        (State.IDLE, Input.PUBLISH, State.PENDING_PUBLISHER),
        (State.PENDING_SUBSCRIBER, Input.ACCEPTED, State.ESTABLISHED),
        (State.PENDING_PUBLISHER, Input.ACCEPTED, State.ESTABLISHED),
        (State.PENDING_SUBSCRIBER, Input.REJECTED, State.TERMINATED),
        (State.PENDING_PUBLISHER, Input.REJECTED, State.TERMINATED),
        (State.PENDING_SUBSCRIBER, Input.CANCELLED, State.TERMINATED),
        (State.PENDING_PUBLISHER, Input.DONE, State.TERMINATED),
        (State.ESTABLISHED, Input.DONE, State.TERMINATED),
        (State.ESTABLISHED, Input.CANCELLED, State.TERMINATED),
    }

    assert drawn <= {(state, event, to) for (state, event), to in TRANSITIONS.items()}
