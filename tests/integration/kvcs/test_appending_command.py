"""``kvcs produce --append``, ``kvcs consume --follow``: a context grows between processes."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kvcs.cli import demo_model
from kvcs.cli.main import main
from kvcs.connectors import transformers as adapter
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    PATIENCE_S,
    TOKENS,
    tensors,
)

pytestmark = pytest.mark.network


@pytest.mark.slow
@pytest.mark.parametrize("knows", ["prefix", "everything"])
async def test_what_is_appended_is_followed_and_written_to_a_file(
    desk: Desk, tmp_path: Path, knows: str
) -> None:
    out = tmp_path / "out.safetensors"
    tokens = TOKENS if knows == "everything" else TOKENS[: 2 * BLOCK_TOKENS]
    prompt = desk.write("prompt.json", desk.side(tokens=tokens))
    appending = ["--segment-blocks", "1", "--append", "3", "--append-interval-ms", "20"]
    async with started([*desk.produce(*appending, "--after-sessions", "1"), "--json"]) as producer:
        port = (await event_of(producer, "listening"))["port"]
        command = desk.consume(
            "--follow", "--prefixes", "any", "--json", "--out", str(out),
            prompt=prompt, port=port,
        )  # fmt: skip
        async with started(command) as consumer, asyncio.timeout(PATIENCE_S):
            said, complaint = await consumer.communicate()
        producer.send_signal(signal.SIGTERM)

    events = [json.loads(line) for line in said.splitlines()]
    assert consumer.returncode == 0, complaint.decode()
    assert events[-1]["event"] == "publication-complete"
    assert events[-1]["token_end"] == BLOCKS * BLOCK_TOKENS
    confirmed = [event["segment"] for event in events if event["event"] == "segment-confirmed"]
    told = [event for event in events if event["event"] == "layer-ready"]
    assert sorted({(event["segment"], event["layer"]) for event in told}) == [
        (segment, layer) for segment in range(5) for layer in range(LAYERS)
    ]
    if knows == "everything":
        assert confirmed == [2, 3, 4]
        assert json.loads(out.with_suffix(".json").read_text())["tokens"] == TOKENS[:20]
    else:
        assert confirmed == []
        assert {event["segment"] for event in told if event["confirmed"]} == {0, 1}
        assert "tokens" not in json.loads(out.with_suffix(".json").read_text())
    found = load_file(out)
    for layer in range(LAYERS):
        k, v = tensors(layer)
        assert found[f"k.{layer}"].tobytes() == k.tobytes()
        assert found[f"v.{layer}"].tobytes() == v.tobytes()


def test_the_prompt_of_what_is_appended_to_is_the_prefix(desk: Desk, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"

    assert main(desk.produce("--append", "2", "--prompt-to", str(prompt))) == 0

    assert json.loads(prompt.read_text())["tokens"] == TOKENS[: 3 * BLOCK_TOKENS]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--append", "5"], "--append is 5, expected 0 to 4 of 5 blocks"),
        (["--append", "2", "--segments", "4"], "--segments is 4, expected 1 to 3"),
        (["--segments", "0"], "--segments is 0"),
    ],
)
def test_a_demonstration_that_cannot_be_is_refused(
    desk: Desk, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert main(["demo", desk["cache.safetensors"], *flags]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("segments", "append"), [(1, 0), (3, 2)])
async def test_a_model_goes_on_elsewhere_from_what_it_said_here(segments: int, append: int) -> None:
    for needed in ("torch", "transformers", "gguf"):
        pytest.importorskip(needed, reason=f"needs the extra `transformers`: {needed} is missing")
    flags = ["--segments", str(segments), "--append", str(append)]
    async with started(["demo", "--model", "--json", *flags]) as demo, asyncio.timeout(500):
        assert demo.stdout is not None
        events = [json.loads(line) async for line in demo.stdout]
        assert await demo.wait() == 0

    last = events[-1]
    assert (last["event"], last["identical"], last["appended"]) == ("demo-complete", True, append)
    assert (last["tokens_compared"], last["duplicates"]) == (32, 0)


def test_a_model_appends_no_more_blocks_than_it_may(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Words:
        """Stands for a tokenizer: a token for each word."""

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text.split())))}

    monkeypatch.setattr(demo_model, "_model_folder", lambda _: tmp_path)
    monkeypatch.setattr(adapter, "load_model", lambda _: (Words(), None))
    for flags, named in (
        (["--append", "65"], "--append is 65, expected 0 to 64"),
        (["--segments", "6"], "--segments is 6, expected 1 to 4, a block each"),
    ):
        assert main(["demo", "--model", *flags]) == 2
        assert named in capsys.readouterr().err
