"""Whatever octets come, parsers return, or raise what they document.

A few hundred spoilt inputs for each target here, the same ones in every run. ``scripts/fuzz`` goes
on from the same seeds by itself, guided by what is reached.
"""

import random
import subprocess
import sys

import pytest

from moqt.wire.framing import MESSAGES, MessageBuffer
from tests.fuzz.catalogue import CORPUS, corpus_of, found_for, targets
from tests.fuzz.target import MAX_TEXT, Target, spoilt
from tests.fuzz.targets.wire import CONTEXTS, control_seeds

TARGETS = targets()
#: Spoilt inputs of each target.
TRIES = 300
#: Octets of what fuzzing has found, of each target.
MAX_FOUND = 64 << 10

each = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


@each
def test_octets_of_any_kind_are_refused_as_documented_or_read(target: Target) -> None:
    rng, corpus = random.Random(target.name), corpus_of(target)
    outcomes = [target.outcome(data) for data in corpus]
    assert None in outcomes, "no seed is valid"

    for _ in range(TRIES):
        data = spoilt(corpus, rng)[: target.max_octets]
        try:
            outcomes.append(target.outcome(data))
        except Exception as exc:
            raise AssertionError(f"{target.name}: {data.hex()}") from exc

    if target.documented:
        assert any(outcomes), "nothing is ever refused"


@each
def test_what_fuzzing_has_found_stays_small_enough_to_be_read_by_people(target: Target) -> None:
    found = found_for(target)

    assert len(set(found)) == len(found)
    assert sum(map(len, found)) <= MAX_FOUND
    assert max(map(len, found), default=0) <= target.max_octets


@each
def test_no_seed_is_longer_than_what_is_tried(target: Target) -> None:
    assert max(map(len, corpus_of(target))) <= target.max_octets


#: Each target, and twenty spoilt inputs.
WITHOUT_ASSERTS = """
import random
from tests.fuzz.catalogue import corpus_of, targets
from tests.fuzz.target import spoilt
assert False, "asserts are on"
for target in targets().values():
    corpus, rng = corpus_of(target), random.Random(target.name)
    for data in [*corpus[:40], *(spoilt(corpus, rng) for _ in range(20))]:
        target.outcome(data[: target.max_octets])
"""


def test_no_parser_relies_on_an_assert() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT_ASSERTS],
        cwd=CORPUS.parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2_000:]


def test_nothing_was_found_for_a_target_that_is_gone() -> None:
    assert {path.stem for path in CORPUS.glob("*")} <= set(TARGETS)


def test_the_seeds_have_every_message_on_every_stream() -> None:
    said = set()
    for data in control_seeds():
        buffer = MessageBuffer()
        context = CONTEXTS[data[0]]
        buffer.feed(data[1:])
        try:
            said |= {(context, message.type) for message in buffer.messages(context)}
        except Exception:  # what is invalid says nothing
            continue
    assert {kind for _, kind in said} == set(MESSAGES)


class Refused(Exception):
    """What the target of these tests documents."""


def of_text(text: str) -> Target:
    def run(data: bytes) -> None:
        raise (Refused if data else KeyError)(text)

    return Target(name="made up", run=run, documented=(Refused,), seeds=lambda: [b"a"])


def test_an_exception_that_is_not_documented_is_a_finding() -> None:
    assert of_text("why").outcome(b"a") is Refused
    with pytest.raises(KeyError):
        of_text("why").outcome(b"")


def test_a_refusal_that_could_fill_a_log_is_a_finding() -> None:
    with pytest.raises(AssertionError, match="a refusal of 2001 characters"):
        of_text("x" * (MAX_TEXT + 1)).outcome(b"a")
