"""``kvcs advise``: what it says, what it reads, what it refuses."""

import json
from typing import Any

import pytest

from kvcs.cli.advise import LENGTHS
from kvcs.cli.main import main
from kvcs.measurement import Measurement, Retrieved, Setting
from tests.unit.kvcs.cli.samples import Folder

Out = pytest.CaptureFixture[str]
#: 131,072 octets a token: 1,000 MB/s bring 7,629 tokens a second.
FAST = ["--model", "llama-3.1-8b", "--mb-per-s", "1000"]


def measured(codec: str = "raw") -> dict[str, Any]:
    """Return what ``kvcs bench`` found: 1,000 octets a token, 1,000 tokens/s after a second."""
    setting = Setting(
        uri="moqt://far:4443/", engine="aioquic", codec=codec, lossless=codec == "raw",
        model="10,5,10,uint8", layers=10, tokens=4000, cache_octets=4_000_000,
        object_octets=800, datagram_octets=1200,
    )  # fmt: skip
    run = Retrieved(seconds=5.0, first_layer_s=1.4, data_octets=4_000_000, cpu_s=1.0)
    return Measurement.of(setting, [run], rtt_s=0.01).to_json()


def advice(capsys: Out, *arguments: str) -> dict[str, Any]:
    assert main(["advise", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_measured_link_says_at_which_length_fetching_wins(folder: Folder, capsys: Out) -> None:
    found = advice(capsys, "--bench", folder.json("far.json", measured()), "--prefill", "500")

    assert found["model"] == "10,5,10,uint8"
    assert found["break_even_tokens"] == 1001
    assert [row["tokens"] for row in found["lengths"]] == list(LENGTHS)
    assert [row["faster"] for row in found["lengths"]] == [True] * 5
    assert found["advice"].startswith("Fetch prefixes of 1,001 tokens or more")
    assert "1.00 MB/s" in found["advice"]


def test_a_length_that_is_asked_about_is_in_the_table_and_in_the_sentence(
    folder: Folder, capsys: Out
) -> None:
    far = folder.json("far.json", measured())

    few = advice(capsys, "--bench", far, "--prefill", "500", "--tokens", "900")
    many = advice(capsys, "--bench", far, "--prefill", "500", "--tokens", "2000")

    assert [row["tokens"] for row in few["lengths"]] == sorted([900, *LENGTHS])
    assert few["advice"].startswith("Recompute 900 tokens: it is there after 1.90 s, computed")
    assert "wins from 1,001 tokens on" in few["advice"]
    assert many["advice"].startswith("Fetch 2,000 tokens: it is there after 3.00 s, computed after")


def test_computing_that_is_always_faster_is_said_with_what_a_link_must_bring(capsys: Out) -> None:
    found = advice(capsys, *FAST, "--prefill", "8000")
    asked = advice(capsys, *FAST, "--prefill", "8000", "--tokens", "16384", "--new-tokens", "0")

    assert found["break_even_tokens"] is None
    assert found["advice"] == (
        "Recompute, whatever the length: prefill makes 1,049 MB/s of this cache and the link "
        "brings 1,000 MB/s."
    )
    assert asked["advice"].endswith("for this one it would above 1,054 MB/s.")


def test_layers_computed_as_they_come_may_change_the_advice(capsys: Out) -> None:
    flags = [*FAST, "--prefill", "8000", "--tokens", "16384"]

    assert (
        "layer is computed as soon as it is there"
        not in advice(capsys, *flags, "--new-tokens", "1")["advice"]
    )
    found = advice(capsys, *flags, "--new-tokens", "4096")
    assert "4,096 tokens behind it are computed after" in found["advice"]
    row = next(row for row in found["lengths"] if row["tokens"] == 16384)
    assert (row["faster"], row["overlapped_faster"]) == (False, True)


def test_a_codec_and_a_round_trip_are_counted(capsys: Out) -> None:
    plain = advice(capsys, *FAST, "--prefill", "8000")
    quick = advice(capsys, "--model", "llama-3.1-8b", "--mb-per-s", "70", "--prefill", "500",
                   "--codec", "shuffle-zstd", "--rtt-ms", "20")  # fmt: skip
    known = advice(capsys, *FAST, "--prefill", "8000", "--codec-ratio", "0.5")

    assert plain["start_s"] == pytest.approx(0.01)
    assert quick["link_mb_per_s"] == pytest.approx(100)
    assert quick["start_s"] == pytest.approx(0.13)
    assert known["link_mb_per_s"] == pytest.approx(2000)


def test_the_shape_may_come_from_a_descriptor(folder: Folder, capsys: Out) -> None:
    flags = ("--mb-per-s", "60", "--prefill", "100")

    found = advice(capsys, "--descriptor", folder.side, *flags)

    assert (found["model"], found["layers"], found["octets_per_token"]) == ("m", 2, 16)
    assert advice(capsys, "--model", "2,1,2,float16", *flags)["octets_per_token"] == 16


def test_people_get_a_table_and_a_sentence(capsys: Out) -> None:
    assert main(["advise", *FAST, "--prefill", "100", "--tokens", "5000"]) == 0

    out = capsys.readouterr().out
    assert "131,072 octets a token" in out
    for tokens in (*LENGTHS, 5000):
        assert f"{tokens:,}" in out
    assert out.splitlines()[-1].startswith("Fetch 5,000 tokens")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prefill", "1"], "expected either --bench FILE or --mb-per-s MB"),
        ([*FAST, "--prefill", "0"], "prefill is 0.0"),
        ([*FAST, "--prefill", "1", "--tokens", "0"], "--tokens is 0"),
        ([*FAST, "--prefill", "1", "--tokens", "9" * 400], "--tokens is 999"),
        ([*FAST, "--prefill", "1", "--new-tokens", "-1"], "new_tokens is -1"),
        ([*FAST, "--prefill", "1", "--rtt-ms", "-1"], "--rtt-ms is -1"),
        ([*FAST, "--prefill", "1", "--codec-ratio", "0"], "--codec-ratio is 0"),
        (["--model", "m", "--mb-per-s", "1", "--prefill", "1"], "LAYERS,HEADS,DIM"),
        (["--model", "m", "--mb-per-s", "0", "--prefill", "1"], "no shape of model 'm'"),
        (["--model", "1,1,1", "--mb-per-s", "0", "--prefill", "1"], "--mb-per-s is 0.0"),
        (["--mb-per-s", "1", "--prefill", "1"], "expected --model MODEL or --descriptor FILE"),
        ([*FAST, "--descriptor", "x.json", "--prefill", "1"], "are both given"),
        (["--bench", "missing.json", "--prefill", "1"], "missing.json: No such file"),
    ],
)
def test_what_cannot_be_used_is_named(
    folder: Folder, capsys: Out, arguments: list[str], named: str
) -> None:
    assert main(["advise", *arguments]) == 2

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--codec", "int8"], "was measured with raw: run kvcs bench --codec int8"),
        (["--rtt-ms", "1"], "--rtt-ms goes with --mb-per-s"),
        (["--mb-per-s", "1"], "expected either"),
    ],
)
def test_what_was_measured_is_not_told_otherwise(
    folder: Folder, capsys: Out, flags: list[str], named: str
) -> None:
    far = folder.json("far.json", measured())

    assert main(["advise", "--bench", far, "--prefill", "1", *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_descriptor_that_is_none_has_its_own_exit_status(folder: Folder, capsys: Out) -> None:
    flags = ["--mb-per-s", "1", "--prefill", "1"]

    assert main(["advise", "--descriptor", folder.json("d.json", {"kvsp": 1}), *flags]) == 6
    assert main(["advise", "--model", "0,1,1", *flags]) == 6
    assert "layers is 0" in capsys.readouterr().err
