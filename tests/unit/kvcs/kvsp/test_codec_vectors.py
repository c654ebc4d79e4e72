"""The codecs against Data that was made without them: tests/vectors/codecs.json says how."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.kvsp.layout import numpy_dtype
from kvcs.kvsp.standard import STANDARD, standard_codecs

ALL: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "vectors" / "codecs.json").read_text(encoding="utf-8")
)
CODECS = standard_codecs()


def label(case: dict[str, Any]) -> str:
    return f"{case['codec']}-{case['dtype']}-{case['of']}"


def tensor(case: dict[str, Any], octets: str) -> NDArray[Any]:
    flat = np.frombuffer(bytes.fromhex(octets), numpy_dtype(case["dtype"]))
    return flat.reshape(case["shape"])


def test_every_codec_has_vectors() -> None:
    assert set(ALL) == {"about", "cases"}
    assert {case["codec"] for case in ALL["cases"]} == set(STANDARD)
    assert len(ALL["cases"]) >= 20


@pytest.mark.parametrize("case", ALL["cases"], ids=label)
def test_decodes_what_others_encoded(case: dict[str, Any]) -> None:
    codec = CODECS[case["codec"]]

    found = codec.decode(
        bytes.fromhex(case["data"]), tuple(case["shape"]), numpy_dtype(case["dtype"])
    )
    expected = tensor(case, case["tensor" if codec.lossless else "decoded"])
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "case", [case for case in ALL["cases"] if not CODECS[case["codec"]].lossless], ids=label
)
def test_rounds_to_the_same_octets(case: dict[str, Any]) -> None:
    # Of the others only the form is fixed: compressors differ in what they find.
    assert CODECS[case["codec"]].encode(tensor(case, case["tensor"])).hex() == case["data"]
