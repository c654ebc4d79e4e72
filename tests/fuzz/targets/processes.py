"""Targets of :mod:`kvcs.consumer`: what comes out of the socket of a process of a retrieval."""

from collections.abc import Iterable

from kvcs.consumer.errands import (
    LENGTH_OCTETS,
    Bad,
    BadErrand,
    Brought,
    Dial,
    Ended,
    Errand,
    How,
    Message,
    NotDialled,
    Ping,
    Placed,
    Placing,
    Run,
    Shown,
    pack,
    unpack,
)
from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.sessions import ConnectionSpec
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.spreading import Rectangle
from kvcs.errors import Rejection
from kvcs.profile.naming import DataTrack
from moqt.codepoints import ParameterType
from moqt.names import FullTrackName
from moqt.session.config import SessionConfig
from moqt.wire.filters import LocationFilter, RangeFilter
from tests.fuzz.target import Target
from tests.fuzz.targets.profile import COMPAT

ERRAND = Errand(
    track=FullTrackName.of("kvcs-1", "scope", "v.raw.s3"),
    past=LocationFilter.group_end(1, 2, 3),
    range_filters=(RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((2, 4), (6, None))),),
    timeout_s=5.0,
    placing=Placing(
        track=DataTrack.parse("v.raw.s3"),
        file="/somewhere",
        descriptor=COMPAT.to_json(),
        first_block=7,
        blocks=5,
        position=-2,
        places=3,
        missing=(Rectangle(range(1, 4), range(2, 5)),),
        max_data_octets=1 << 20,
    ),
)


def message(data: bytes) -> None:
    """Whatever is read is a message, and goes through the socket as the same one."""
    found = unpack(data)
    assert isinstance(found, Message)
    repr(found)
    # What is inside of a field may be of a type that a message of ours would not have.
    assert unpack(pack(found)[LENGTH_OCTETS:]) == found or "nan" in repr(found)


def seeds() -> Iterable[bytes]:
    for value in (
        Ping(),
        Run(4, ERRAND),
        Dial(
            spec=ConnectionSpec(uri="moqt://relay/", config=SessionConfig(tokens=Shown())),
            uri="moqt://other/",
            timeout_s=1.0,
            settings=RetrievalSettings(connections=3, processes=True),
        ),
        NotDialled(Failure(FailureReason.UNREACHABLE, "nobody listens", again=True)),
        Brought(4, (Placed(1, 2, bytes(32), 4096), Bad(1, 3, Rejection.DIGEST, "why"))),
        Ended(4, How.REFUSED, 3, "why"),
    ):
        yield pack(value)[LENGTH_OCTETS:]


TARGETS = (
    Target(name="errand", run=message, documented=(BadErrand,), seeds=seeds, max_octets=2048),
)
