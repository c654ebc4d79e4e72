"""What is on its way is neither absent nor lost, whatever else is found out meanwhile."""

from moqt.location import Location
from moqt.relay.awaited import Awaited
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge


def at(number: int) -> Location:
    return Location(0, number)


def known(awaited: Awaited, upto: int) -> str:
    """Return what is known of Objects 0 to ``upto``, a letter for each."""
    return "".join(awaited.coverage[at(number)].name[0] for number in range(upto + 1))


def test_what_is_settled_is_all_but_what_was_asked_for() -> None:
    awaited = Awaited(Coverage(Knowledge.PENDING))
    awaited.ask(at(2), at(3))
    awaited.ask(at(3), at(5))
    awaited.ask(at(8), at(8))
    awaited.settle(FIRST, at(9), Knowledge.COMPLETE)

    assert known(awaited, 10) == "CCPPPPCCPCP"
    assert awaited.may_bring(at(0), at(2))
    assert not awaited.may_bring(at(6), at(7))


def test_a_request_that_passes_says_what_is_absent() -> None:
    awaited = Awaited(Coverage(Knowledge.PENDING))
    asked = awaited.ask(FIRST, at(6))
    awaited.passed(asked, at(2), Knowledge.COMPLETE)
    awaited.passed(asked, at(4), Knowledge.UNKNOWN)
    assert not awaited.may_bring(FIRST, at(4))
    awaited.over(asked, Knowledge.COMPLETE)

    assert known(awaited, 7) == "CCCUUCCP"


def test_what_one_could_not_tell_may_be_told_by_another_that_was_asked_too() -> None:
    awaited = Awaited(Coverage(Knowledge.PENDING))
    one, two = awaited.ask(FIRST, at(5)), awaited.ask(at(3), at(4))
    awaited.passed(one, at(3), Knowledge.UNKNOWN)
    awaited.over(one, Knowledge.UNKNOWN)
    assert known(awaited, 5) == "UUUPPU"
    awaited.over(two, Knowledge.COMPLETE)
    assert known(awaited, 5) == "UUUCCU"


def test_what_a_live_source_brings_is_not_lost_with_the_fill_of_another() -> None:
    awaited = Awaited(Coverage(Knowledge.PENDING))
    awaited.live[0] = at(3)
    awaited.over(awaited.ask(FIRST, at(6)), Knowledge.UNKNOWN)
    assert known(awaited, 6) == "UUUPPPP"
    awaited.over(awaited.ask(at(4), at(6)), Knowledge.UNKNOWN)
    assert known(awaited, 6) == "UUUPPPP"


def test_asking_again_makes_pending_what_was_not_to_be_had() -> None:
    awaited = Awaited(Coverage(Knowledge.UNKNOWN))
    awaited.coverage.mark(at(1), at(1), Knowledge.COMPLETE)
    awaited.coverage.mark(at(2), at(2), Knowledge.TIMED_OUT)
    asked = awaited.ask(FIRST, at(2))
    assert known(awaited, 3) == "PCPU"
    awaited.over(asked, None)
    assert known(awaited, 3) == "PCPU"


def test_nothing_is_awaited_past_the_last_location() -> None:
    awaited = Awaited(Coverage(Knowledge.PENDING))
    awaited.over(awaited.ask(at(4), LAST), Knowledge.COMPLETE)
    awaited.settle(FIRST, LAST, Knowledge.UNKNOWN)
    assert known(awaited, 4) == "UUUUC"
