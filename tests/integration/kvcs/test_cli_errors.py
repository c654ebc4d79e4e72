"""Bad input and signals: one line that names what is wrong, an exit code, an end in time."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from safetensors.numpy import save_file

from kvcs.cli.main import main
from kvcs.profile.signing import ProducerKey
from moqt.aio import MoqtConnection, QuicSettings, connect
from moqt.aio.tls import ClientTls, make_certificates
from moqt.codepoints import PublishDoneCode
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import FillEnded, ObjectReceived
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    COMPAT,
    LAYERS,
    PATIENCE_S,
    TOKENS,
    filled,
    on_stage,
    tensors,
)

pytestmark = pytest.mark.network

UNUSABLE = 2  # a flag, a setting or a file; see EXIT_CODES


def refusal(command: Sequence[str], capsys: pytest.CaptureFixture[str], status: int) -> str:
    """Run a command that must fail, and return the one line that it says."""
    try:
        found = main(command)
    except SystemExit as exc:  # the parser's way
        found = int(exc.code or 0)
    out, err = capsys.readouterr()
    assert found == status, err
    assert out == ""
    complaint = [line for line in err.splitlines() if line.startswith("kvcs")]
    assert len(complaint) == 1, err
    assert "Traceback" not in err
    return complaint[0]


# -- files ---------------------------------------------------------------------------------------


def _cut(desk: Desk) -> str:
    whole = (desk.folder / "cache.safetensors").read_bytes()
    return desk.write("cut.safetensors", whole[: len(whole) // 2])


def _contradicting(**members: Any) -> Callable[[Desk], str]:
    def make(desk: Desk) -> str:
        desk.write("cache.json", desk.side(descriptor=COMPAT.members() | members))
        return desk["cache.safetensors"]

    return make


def _without_side(desk: Desk) -> str:
    os.remove(desk["cache.json"])
    return desk["cache.safetensors"]


def _without_a_layer(desk: Desk) -> str:
    arrays = desk.arrays()
    del arrays["v.3"]
    save_file(arrays, desk["cache.safetensors"])
    return desk["cache.safetensors"]


def _with_a_short_prompt(desk: Desk) -> str:
    desk.write("cache.json", desk.side(tokens=TOKENS[:-1]))
    return desk["cache.safetensors"]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(lambda desk: desk["missing.safetensors"], "missing.safetensors", id="missing"),
        pytest.param(lambda desk: str(desk.folder), "", id="a folder"),
        pytest.param(_cut, "cut.safetensors", id="cut"),
        pytest.param(lambda d: d.write("no.safetensors", "not one"), "no.safetensors", id="text"),
        pytest.param(_without_side, "cache.json", id="no side file"),
        pytest.param(_without_a_layer, "v.3", id="a layer too few"),
        pytest.param(_with_a_short_prompt, "k.0", id="other tokens"),
        pytest.param(_contradicting(layers=LAYERS + 1), f"k.{LAYERS}", id="other layers"),
        pytest.param(_contradicting(dtype="bfloat16"), "k.0", id="other type"),
        pytest.param(_contradicting(k_shape=[4, 4]), "k.0", id="other shape of k"),
        pytest.param(_contradicting(v_shape=[2, 8]), "v.0", id="other shape of v"),
    ],
)
def test_a_cache_that_cannot_be_published_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], make: Callable[[Desk], str], named: str
) -> None:
    cache = make(desk)

    line = refusal(desk.produce(cache=cache), capsys, UNUSABLE)

    assert (named or cache) in line


@pytest.mark.parametrize(
    ("content", "status", "named"),
    [
        pytest.param(None, UNUSABLE, "prompt.json", id="missing"),
        pytest.param("{", UNUSABLE, "prompt.json", id="not JSON"),
        pytest.param('{"tokens": [1]}', 6, "prompt.json", id="no descriptor"),
        pytest.param(
            json.dumps({"descriptor": COMPAT.members() | {"layers": 0}, "tokens": TOKENS}),
            6, "layers is 0", id="bad descriptor",
        ),
        pytest.param(
            json.dumps({"descriptor": COMPAT.members() | {"theta": 0.5}, "tokens": TOKENS}),
            6, "theta", id="a float",
        ),
        pytest.param(json.dumps(COMPAT.members()), UNUSABLE, "--tokens", id="no tokens"),
        pytest.param(
            json.dumps({"descriptor": COMPAT.members(), "tokens": [1, 2]}),
            UNUSABLE, "fewer than a block", id="a short prompt",
        ),
        pytest.param(
            json.dumps({"descriptor": COMPAT.members(), "tokens": [1, -2, 3, 4]}),
            UNUSABLE, "token 1 is -2", id="a bad token",
        ),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_used_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], content: str | None, status: int, named: str
) -> None:
    if content is not None:
        desk.write("prompt.json", content)

    line = refusal(desk.consume(prompt=desk["prompt.json"]), capsys, status)

    assert named in line


@pytest.mark.parametrize("command", ["produce", "consume"])
@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param(None, "scope.key", id="missing"),
        pytest.param(bytes(range(31)), "31", id="31 octets"),
        pytest.param(bytes(range(31)).hex(), "31", id="31 octets in hex"),
        pytest.param(b"", "scope.key", id="empty"),
    ],
)
def test_a_scope_key_that_is_too_short_is_named_with_its_length_and_never_shown(
    desk: Desk,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: bytes | str | None,
    named: str,
) -> None:
    os.remove(desk["scope.key"])
    if content is not None:
        desk.write("scope.key", content)

    line = refusal(getattr(desk, command)(), capsys, UNUSABLE)

    assert "scope.key" in line
    assert named in line
    assert bytes(range(8)).hex() not in line


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_no_scope_key_is_told_with_how_to_give_one(
    desk: Desk, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = refusal(desk.without(getattr(desk, command)(), "--scope-key-file"), capsys, UNUSABLE)

    assert "--scope-key-file" in line
    assert "KVCS_SCOPE_KEY_FILE" in line


@pytest.mark.parametrize("flag", ["--certificate-file", "--key-file"])
@pytest.mark.parametrize(
    "content", [None, "not PEM", b"\xff\x00"], ids=["missing", "text", "octets"]
)
def test_a_certificate_or_key_that_cannot_be_used_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], flag: str, content: str | bytes | None
) -> None:
    path = desk["unusable.pem"] if content is None else desk.write("unusable.pem", content)

    line = refusal(desk.produce(flag, path), capsys, UNUSABLE)

    assert "unusable.pem" in line


def test_a_key_of_another_certificate_and_an_expired_certificate_are_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_certificates(desk.folder / "other")
    expired = make_certificates(desk.folder / "expired", days=0.01)

    key = refusal(desk.produce("--key-file", str(other.key_file)), capsys, UNUSABLE)
    old = refusal(
        desk.produce(
            "--certificate-file", str(expired.certificate_file),
            "--key-file", str(expired.key_file),
        ), capsys, UNUSABLE,
    )  # fmt: skip

    assert str(other.key_file) in key
    assert "does not belong" in key
    assert str(expired.certificate_file) in old
    assert "expired" in old


@pytest.mark.parametrize("flag", ["--certificate-file", "--key-file"])
def test_listening_needs_a_certificate_and_its_key(
    desk: Desk, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    line = refusal(desk.without(desk.produce(), flag), capsys, UNUSABLE)

    assert flag.removeprefix("--").replace("-", "_") in line


def test_a_producer_key_that_cannot_be_used_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    path = desk.write("producer.pem", "not PEM")

    assert path in refusal(desk.produce("--producer-key-file", path), capsys, UNUSABLE)
    assert path in refusal(desk.consume("--trust", path), capsys, UNUSABLE)
    assert "trust" in refusal(desk.consume("--require-signature"), capsys, UNUSABLE)


@pytest.mark.parametrize("content", [None, "not PEM"], ids=["missing", "text"])
def test_a_ca_file_that_cannot_be_used_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = desk["ca.pem"] if content is None else desk.write("ca.pem", content)
    relay = desk.without(desk.produce("--connect", "moqt://127.0.0.1:9/"), "--listen")

    assert path in refusal([*relay, "--ca-file", path], capsys, UNUSABLE)
    assert path in refusal(desk.consume("--ca-file", path), capsys, UNUSABLE)


def test_a_file_that_cannot_be_written_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    path = desk["no-such-folder/cache.safetensors"]

    assert "no-such-folder" in refusal(desk.consume("--out", path), capsys, UNUSABLE)


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["produce", "consume"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_an_unknown_setting_is_named_wherever_it_comes_from(
    desk: Desk,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    source: str,
) -> None:
    arguments: list[str] = getattr(desk, command)()
    match source:
        case "flag":
            arguments.append("--idle-timeuot-s=3")
        case "environment":
            monkeypatch.setenv("KVCS_IDLE_TIMEUOT_S", "3")
        case _:
            arguments += ["--config", desk.write("kvcs.toml", "idle_timeuot_s = 3\n")]

    line = refusal(arguments, capsys, UNUSABLE)

    assert "timeuot" in line.lower()
    if source != "flag":
        assert "idle_timeout_s" in line.lower()  # what was meant, perhaps
    if source == "file":
        assert "kvcs.toml" in line


@pytest.mark.parametrize("command", ["produce", "consume"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_wrong_value_is_named_with_what_was_found_and_expected(
    desk: Desk,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    source: str,
) -> None:
    arguments: list[str] = getattr(desk, command)()
    match source:
        case "flag":
            arguments += ["--max-datagram-octets", "100"]
        case "environment":
            monkeypatch.setenv("KVCS_MAX_DATAGRAM_OCTETS", "100")
        case _:
            arguments += ["--config", desk.write("kvcs.toml", "max_datagram_octets = 100\n")]

    line = refusal(arguments, capsys, UNUSABLE)

    assert "max_datagram_octets is " in line
    assert "100" in line
    assert "1200" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen", "4443"], "listen"),
        (["--listen", "127.0.0.1:66000"], "listen"),
        (["--connect", "https://relay/"], "connect"),
        (["--encodings", "zip"], "zip"),
        (["--segment-blocks", "0"], "--segment-blocks"),
        (["--layer-interval-ms", "-1"], "--layer-interval-ms"),
        (["--append", "5"], "--append is 5, expected 0 to 4: the cache has 5 blocks"),
        (["--append", "-1"], "--append"),
        (["--append", "1", "--append-blocks", "0"], "--append-blocks"),
        (["--append", "1", "--append-interval-ms", "nan"], "--append-interval-ms"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_what_produce_cannot_use_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(desk.produce(*arguments), capsys, UNUSABLE)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--connect", "relay:4443"], "connect"),
        (["--encodings", "zip"], "zip"),
        (["--layers", "4-9"], "--layers"),
        (["--layers", "x"], "--layers"),
        (["--prefixes", "some"], "prefixes"),
        (["--deadline-s", "0"], "deadline_s"),
        (["--recompute-tokens-per-s", "0"], "recompute_tokens_per_s"),
        (["--follow", "--processes", "--out", "f.safetensors"], "--follow --out"),
        (["--connections", "0"], "connections is '0'"),
        (["--connections", "17"], "connections is '17'"),
    ],
)
def test_what_consume_cannot_use_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(desk.consume(*arguments), capsys, UNUSABLE)


def test_a_cache_that_does_not_fit_the_store_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = failure(desk.produce("--store-octets", "10"), capsys)

    assert code == UNUSABLE
    assert "store_octets is 10" in line


def test_an_unknown_model_is_named_with_those_that_are_known(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    command = desk.produce("--synthetic", "llama-9")
    del command[1]

    line = refusal(command, capsys, UNUSABLE)

    assert "llama-9" in line
    assert "llama-3.1-8b" in line


# -- the network ---------------------------------------------------------------------------------


def test_a_port_in_use_is_named(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        line = refusal(desk.produce("--listen", f"127.0.0.1:{port}"), capsys, UNUSABLE)

    assert str(port) in line
    assert "in use" in line.lower()


def test_nobody_there_is_told_within_the_time_to_connect(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        port = hole.getsockname()[1]

        command = desk.consume("--connect-timeout-s", "0.3", port=port)
        code, line = failure(command, capsys)

    assert code == 11
    assert f"127.0.0.1:{port}" in line


def test_what_is_left_to_be_computed_is_said_in_words_and_in_json(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    # A line for people, who are told of nothing that is not there, and one for programs.
    assert main(desk.consume("--layers", "2-4")) == 11
    line = capsys.readouterr().out
    assert "recompute=tokens 0-19 from layer 2 " in line.replace("\n", " ")
    assert "missing=" not in line
    assert main(desk.consume("--layers", "2-4", "--json")) == 11
    failed = json.loads(capsys.readouterr().out)
    assert failed["recompute"] == [{"token_start": 0, "token_end": 20, "first_layer": 2}]
    assert failed["ready"] == []


def failure(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(command)
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("kvcs: ")]
    return code, line


async def _consume(command: list[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Run ``kvcs consume --json`` in a process; return exit code, events and standard error."""
    async with started([*command, "--json"]) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()


@pytest.mark.slow
async def test_the_exit_code_of_consume_says_what_became_of_it(desk: Desk) -> None:
    key = ProducerKey.generate()
    public = desk.write("public.pem", key.public_pem())

    async with on_stage(desk.certificates) as scene:
        port = int(scene.spec.uri.rsplit(":", 1)[1].rstrip("/"))
        quick = ["--discovery-timeout-s", "0.2"]
        nothing = await _consume(desk.consume(*quick, port=port))
        handle = scene.open()
        await filled(handle)
        good = await _consume(desk.consume("--out", desk["out.safetensors"], port=port))
        unsigned = await _consume(desk.consume("--trust", public, "--require-signature", port=port))
        late = await _consume(desk.consume(*quick, "--deadline-s", "0.001", port=port))

    assert [code for code, _, _ in (nothing, good, unsigned, late)] == [3, 0, 4, 10]
    assert good[1][-1]["event"] == "publication-complete"
    for code, events, err in (nothing, unsigned, late):
        assert events[-1]["event"] == "failed", code
        assert len([line for line in err.splitlines() if line.startswith("kvcs: ")]) == 1
    assert (desk.folder / "out.safetensors").exists()


# -- signals -------------------------------------------------------------------------------------


async def line_of(process: asyncio.subprocess.Process, text: str) -> None:
    """Return when a process has logged something."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := await process.stderr.readline():
            if text in line.decode():
                return
    raise AssertionError(f"the process ended before {text!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_producer_that_nobody_reads_from_with_exit_0(
    desk: Desk, number: signal.Signals
) -> None:
    async with started([*desk.produce(), "--json"]) as process:
        await event_of(process, "publication-finished")
        process.send_signal(number)
        await event_of(process, "stopped")
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


async def test_a_signal_in_the_middle_of_production_ends_it_with_exit_0(desk: Desk) -> None:
    command = desk.produce("--layer-interval-ms", "60000", "--json", "--drain-s", "1")

    async with started(command) as process:
        await event_of(process, "publication-opened")
        process.send_signal(signal.SIGTERM)
        stopped = await event_of(process, "stopped")
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0

    assert stopped["kvcs_publications_abandoned_total"] == 1


#: Of the model that is read from, one Object of 64 KiB each.
LARGE_LAYERS = 32


@asynccontextmanager
async def reading(
    desk: Desk, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, tuple[MoqtConnection, TrackNamespace]]]:
    """Have a producer of a larger cache, and a session with small windows that knows its name."""
    command = desk.produce(
        "--synthetic", "llama-3.1-8b", "--tokens", "32", "--block-tokens", "32", *flags,
        "--json", "--log-format", "json",
    )  # fmt: skip
    del command[1]  # no cache file
    async with started(command) as process:
        port = (await event_of(process, "listening"))["port"]
        opened = await event_of(process, "publication-opened")
        await event_of(process, "publication-finished")
        fields = (opened[name] for name in ("scope", "compatibility", "anchor", "publication"))
        namespace = TrackNamespace((b"kvcs-1", *map(bytes.fromhex, fields)))
        async with connect(
            f"moqt://127.0.0.1:{port}/",
            tls=ClientTls(ca_file=desk.certificates.ca_file),
            quic=QuicSettings(stream_window=1 << 16, connection_window=1 << 17),
        ) as connection:
            try:
                yield process, (connection, namespace)
            finally:
                await connection.close(drain_s=0.0)


async def test_a_consumer_that_reads_when_the_signal_comes_gets_everything(desk: Desk) -> None:
    async with reading(desk, "--drain-s", "15") as (process, (connection, namespace)):
        subscription = await connection.subscribe(
            FullTrackName(namespace, b"k.raw.s0"), fill=LocationFilter.absolute_start(0, 0)
        )
        items = aiter(subscription)
        first = await anext(items)
        # Its windows hold one of LARGE_LAYERS layers, so the producer has most of them still.
        process.send_signal(signal.SIGTERM)
        await line_of(process, "stopping")
        async with asyncio.timeout(PATIENCE_S):
            rest = [item async for item in items]
        objects = [item for item in (first, *rest) if isinstance(item, ObjectReceived)]

        assert len({item.location for item in objects}) == len(objects) == LARGE_LAYERS
        assert [item.complete for item in rest if isinstance(item, FillEnded)] == [True]
        assert subscription.ended is not None
        assert subscription.ended.code == PublishDoneCode.TRACK_ENDED
        assert connection.going_away is not None
        await connection.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


async def test_a_consumer_that_does_not_leave_is_left_after_the_time_to_drain(desk: Desk) -> None:
    async with reading(desk, "--drain-s", "0.5") as (process, (connection, _)):
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await connection.wait_closed()
            assert await process.wait() == 0


async def test_a_second_signal_ends_a_producer_at_once(desk: Desk) -> None:
    async with reading(desk, "--drain-s", "600") as (process, _):
        process.send_signal(signal.SIGTERM)
        await line_of(process, "stopping")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == -signal.SIGTERM


async def test_an_interrupted_consumer_leaves_no_file_behind(desk: Desk) -> None:
    async with on_stage(desk.certificates) as scene:
        port = int(scene.spec.uri.rsplit(":", 1)[1].rstrip("/"))
        handle = scene.open()
        await handle.add_segment()
        k, v = tensors(0)
        await handle.add_layer(0, k, v)
        os.mkdir(desk["out"])
        command = desk.consume("--out", desk["out/cache.safetensors"], "--json", port=port)
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            async with started(command) as process:
                await event_of(process, "layer-ready")
                process.send_signal(number)
                async with asyncio.timeout(PATIENCE_S):
                    found = await process.wait()

            assert found == status
            assert os.listdir(desk["out"]) == []
