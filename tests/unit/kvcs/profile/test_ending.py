"""How the end of a subscription is read."""

import pytest

from kvcs.profile.ending import End, abandoned
from moqt.codepoints import PublishDoneCode


def test_what_its_producer_gave_up_is_told_by_the_reason() -> None:
    reason = abandoned("the engine failed")

    assert End.of(PublishDoneCode.INTERNAL_ERROR, reason) is End.ABANDONED
    assert "the engine failed" in reason


@pytest.mark.parametrize(
    "reason", ["", "its publisher was lost", "not all of it came", "an abandoned session"]
)
def test_an_error_for_any_other_reason_is_a_loss(reason: str) -> None:
    assert End.of(PublishDoneCode.INTERNAL_ERROR, reason) is End.LOST


@pytest.mark.parametrize("code", [*PublishDoneCode, 0x7FFF])
def test_every_code_but_the_end_of_the_track_is_a_loss_whatever_the_reason(code: int) -> None:
    expected = {
        PublishDoneCode.TRACK_ENDED: End.ENDED,
        PublishDoneCode.INTERNAL_ERROR: End.ABANDONED,
    }

    assert End.of(code, abandoned("")) is expected.get(code, End.LOST)  # type: ignore[call-overload]
