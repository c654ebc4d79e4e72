import json
from typing import Any

import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    Gap,
    LayerReady,
    ManifestAccepted,
    ObjectRejected,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
    ReadyLayers,
    Rejection,
    SegmentComplete,
    SegmentConfirmed,
    SegmentDiffers,
    Summary,
    TokenRange,
    Trust,
)
from kvcs.profile.naming import DataTrack, PublicationName

NAME = PublicationName(b"\x01" * 32, b"\x02" * 32, b"\x03" * 32, b"\x04" * 16)
K0 = DataTrack.parse("k.raw.s0")
NAME_JSON = {
    "scope": "01" * 32,
    "compatibility": "02" * 32,
    "anchor": "03" * 32,
    "publication": "04" * 16,
}
SUMMARY = Summary(objects=3, octets=300, first_layer_s=0.5, last_layer_s=1.5)
SUMMARY_JSON = {
    "objects": 3,
    "octets": 300,
    "attested": 0,
    "duplicates": 0,
    "unwanted": 0,
    "rejected": 0,
    "unopened": 0,
    "first_layer_s": 0.5,
    "last_layer_s": 1.5,
}
GAP = Gap(segment=0, track=K0, first_layer=1, last_layer=2, first_block=3, last_block=3)

#: What scripts read: a change here is a change of the command line's interface.
LINES: list[tuple[Event, dict[str, Any]]] = [
    (
        PublicationFound(publication=NAME, blocks=7),
        {"event": "publication-found", "publication": NAME_JSON, "blocks": 7},
    ),
    (
        PublicationRefused(publication=NAME, text="why"),
        {"event": "publication-refused", "publication": NAME_JSON, "text": "why"},
    ),
    (
        ManifestAccepted(
            publication=NAME, version=4, signed=True, layers=2, segments=1, complete=False
        ),
        {
            "event": "manifest-accepted",
            "publication": NAME_JSON,
            "version": 4,
            "signed": True,
            "layers": 2,
            "segments": 1,
            "complete": False,
        },
    ),
    (
        LayerReady(
            segment=1,
            layer=2,
            token_start=16,
            token_end=32,
            trust=Trust.ATTESTED,
            codec="int8",
            lossless=False,
            confirmed=True,
        ),
        {
            "event": "layer-ready",
            "segment": 1,
            "layer": 2,
            "token_start": 16,
            "token_end": 32,
            "trust": "attested",
            "codec": "int8",
            "lossless": False,
            "confirmed": True,
        },
    ),
    (
        ObjectRejected(track=K0, layer=1, block=2, reason=Rejection.TOKEN_START, text="why"),
        {
            "event": "object-rejected",
            "track": "k.raw.s0",
            "layer": 1,
            "block": 2,
            "reason": "token-start",
            "text": "why",
        },
    ),
    (
        SegmentComplete(segment=0, layers=2, token_start=0, token_end=16),
        {"event": "segment-complete", "segment": 0, "layers": 2, "token_start": 0, "token_end": 16},
    ),
    (
        SegmentConfirmed(segment=1, token_start=16, token_end=32),
        {"event": "segment-confirmed", "segment": 1, "token_start": 16, "token_end": 32},
    ),
    (
        SegmentDiffers(segment=1, token_start=16, token_end=32),
        {"event": "segment-differs", "segment": 1, "token_start": 16, "token_end": 32},
    ),
    (
        PublicationComplete(publication=NAME, token_end=16, summary=SUMMARY),
        {
            "event": "publication-complete",
            "publication": NAME_JSON,
            "token_end": 16,
            "summary": SUMMARY_JSON,
            "codecs": ["raw"],
            "lossless": True,
            "recompute": [],
        },
    ),
    (
        Failed(
            reason=FailureReason.INCOMPLETE,
            text="why",
            publication=None,
            missing=(GAP,),
            unlisted=(4, 5),
            unattested=(),
            summary=SUMMARY,
            ready=(ReadyLayers(segment=0, first_layer=0, last_layer=1),),
            recompute=(TokenRange(token_start=16, token_end=48, first_layer=2),),
        ),
        {
            "event": "failed",
            "reason": "incomplete",
            "text": "why",
            "publication": None,
            "missing": [{"segment": 0, "track": "k.raw.s0", "layers": [1, 2], "blocks": [3, 3]}],
            "unlisted": [4, 5],
            "unattested": [],
            "summary": SUMMARY_JSON,
            "ready": [{"segment": 0, "layers": [0, 1]}],
            "recompute": [{"token_start": 16, "token_end": 48, "first_layer": 2}],
        },
    ),
]


@pytest.mark.parametrize(("event", "line"), LINES, ids=lambda v: getattr(v, "name", ""))
def test_every_event_has_the_line_that_scripts_read(event: Event, line: dict[str, Any]) -> None:
    assert event.to_json() == line
    assert json.loads(json.dumps(event.to_json())) == line


def test_no_event_is_left_out_here() -> None:
    # By name, since a class with slots is made twice.
    kinds = {kind.__name__ for kind in Event.__subclasses__()}

    assert {type(event).__name__ for event, _ in LINES} == kinds


def test_ready_layers_read_as_people_count() -> None:
    assert str(ReadyLayers(segment=1, first_layer=0, last_layer=3)) == "segment 1 layers 0-3"


def test_a_gap_reads_as_people_count() -> None:
    assert str(GAP) == "k.raw.s0 layers 1-2 block 3"
    assert GAP.objects == 2
