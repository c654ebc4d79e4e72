"""``kvcs bench``: two processes measure each other, and say so when they cannot."""

import asyncio
import json
import os
import shlex
import socket

import pytest

from kvcs.cli.main import main
from kvcs.measurement import Measurement
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import PATIENCE_S

pytestmark = pytest.mark.network

#: A cache of a moment: 4 layers, 1 MB.
SMALL = ("--model", "4,2,64", "--mb", "1")
SERVE = ("bench", "--serve", "--listen", "127.0.0.1:0", "--json")


async def bench(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return exit status, standard output and standard error."""
    async with started(["bench", *arguments]) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_alone_it_measures_a_producer_of_its_own_and_leaves_nothing_behind(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = desk.folder / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))

    status, out, err = await bench(*SMALL, "--seconds", "0.2", "--json")

    assert status == 0, err
    [line] = out.splitlines()
    found = Measurement.from_json(json.loads(line), "bench")
    assert (found.layers, found.codec, found.lossless) == (4, "raw", True)
    assert found.cache_octets >= 1_000_000
    assert found.retrievals >= 1
    assert found.data_to_cache == 1.0
    assert found.producer_cpu_s_per_gb is not None
    assert found.first_layer_s > 0
    assert f"retrieval {found.retrievals}: 1.0 MB in" in err
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["shuffle-zstd", "int8"])
async def test_a_codec_is_measured_in_octets_of_the_cache(desk: Desk, codec: str) -> None:
    status, out, err = await bench(*SMALL, "--seconds", "0", "--codec", codec, "--json")

    assert status == 0, err
    found = Measurement.from_json(json.loads(out), "bench")
    assert (found.codec, found.lossless) == (codec, codec != "int8")
    assert found.retrievals == 1
    assert 0.5 < found.data_to_cache < 0.8


@pytest.mark.slow
async def test_people_get_lines_and_the_next_command(desk: Desk) -> None:
    status, out, err = await bench(*SMALL, "--seconds", "0")

    assert status == 0, err
    labels = [line[:12].strip() for line in out.splitlines()]
    assert labels == [
        "link", "cache", "goodput", "first layer", "per layer", "on the way", "processor",
        "round trip", "lost",
    ]  # fmt: skip
    assert "kvcs advise --bench" in err


@pytest.mark.slow
async def test_the_line_that_the_far_end_prints_works_at_the_other_one_as_it_is(
    desk: Desk,
) -> None:
    async with started([*SERVE, *SMALL]) as far:
        listening = await event_of(far, "listening")
        program, command, *words = shlex.split(listening["command"])
        status, out, err = await bench(*words, "--seconds", "0", "--json")
        served = await event_of(far, "served")
        far.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await far.wait()

    assert (program, command, status) == ("kvcs", "bench", 0), err
    assert far.returncode == 0
    found = Measurement.from_json(json.loads(out), "bench")
    assert found.uri == words[0]
    assert found.producer_cpu_s_per_gb is None  # nobody to ask over a link
    assert served["datagrams"] > 0
    assert not os.path.exists(listening["files"])  # noqa: ASYNC240  # nothing else runs


@pytest.mark.slow
@pytest.mark.aioquic
async def test_loss_over_a_link_is_told_by_this_end_alone(desk: Desk) -> None:
    async with started([*SERVE, *SMALL]) as far:
        listening = await event_of(far, "listening")
        _, _, *words = shlex.split(listening["command"])
        _, out, _ = await bench(*words, "--seconds", "0", "--json")

    found = Measurement.from_json(json.loads(out), "bench")
    assert found.loss is not None
    assert found.loss < 0.05
    assert 1.0 < (found.wire_to_cache or 0) < 2.0


@pytest.mark.slow
async def test_who_shows_no_token_of_the_far_end_is_served_nothing(desk: Desk) -> None:
    async with started([*SERVE, *SMALL]) as far:
        listening = await event_of(far, "listening")
        _, _, *words = shlex.split(listening["command"])
        at = words.index("--token-file")
        status, out, err = await bench(*words[:at], *words[at + 2 :], "--request-timeout-s", "0.5")

    assert (status, out) == (11, "")
    assert "UNAUTHORIZED" in err


@pytest.mark.slow
async def test_a_cache_that_the_far_end_does_not_have_is_told_with_the_flags_to_compare(
    desk: Desk,
) -> None:
    async with started([*SERVE, *SMALL]) as far:
        listening = await event_of(far, "listening")
        _, _, *words = shlex.split(listening["command"])
        status, out, err = await bench(*words, "--mb", "2", "--request-timeout-s", "0.5")

    assert (status, out) == (3, "")
    assert "--model, --mb, --block-tokens" in err


@pytest.mark.slow
async def test_a_deadline_ends_it(desk: Desk) -> None:
    status, out, err = await bench(
        "--model", "8,8,128", "--mb", "20", "--seconds", "0", "--deadline-s", "0.05",
    )  # fmt: skip

    assert (status, out) == (10, ""), err


@pytest.mark.slow
async def test_who_is_not_believed_is_not_measured(desk: Desk) -> None:
    async with started([*SERVE, *SMALL]) as far:
        listening = await event_of(far, "listening")
        uri = f"moqt://127.0.0.1:{listening['port']}/"
        key = f"{listening['files']}/scope.key"
        status, out, err = await bench(uri, "--scope-key-file", key, *SMALL)

    assert (status, out) == (11, "")
    assert "TLS with 127.0.0.1" in err


def test_nobody_there_is_told_within_the_time_to_connect(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        uri = f"moqt://127.0.0.1:{hole.getsockname()[1]}/"

        status = main(
            ["bench", uri, "--scope-key-file", desk["scope.key"], "--connect-timeout-s", "0.3",
             *SMALL]
        )  # fmt: skip

    assert status == 11
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--serve"], "listen is not set"),
        (["--serve", "moqt://far:1/"], "--serve and a URI are both given"),
        (["--name", "far"], "--files and --name go with --serve"),
        (["--seconds", "-1"], "--seconds is -1"),
        (["--mb", "0"], "--mb is 0"),
        (["--model", "gpt-9"], "gpt-9"),
        (["moqt://far:1/"], "scope key"),
        (["https://far/", "--scope-key-file", "scope.key"], "https://far/"),
        (["moqt://far:1/", "--scope-key-file", "scope.key", "--max-cache-octets", "1"], "--mb"),
    ],
)
def test_what_cannot_be_used_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["bench", *arguments]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert named in err


def test_tls_is_verified_whatever_the_environment_says(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCS_INSECURE_SKIP_VERIFY", "1")

    assert main(["bench", *SMALL]) == 2
    assert "bench verifies TLS" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--insecure-skip-verify"])
