"""``kvcs produce``: again and again, and what consumers take as their prompt."""

import json
import signal
from pathlib import Path

import pytest

from kvcs.cli.main import main
from kvcs.store.source import SyntheticSource
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import COMPAT, TOKENS

pytestmark = pytest.mark.network


async def test_a_cache_is_published_again_under_another_id_until_it_is_told_to_stop(
    desk: Desk,
) -> None:
    async with started([*desk.produce("--repeat-s", "0"), "--json"]) as process:
        opened, finished = [], []
        for _ in range(3):
            opened.append(await event_of(process, "publication-opened"))
            finished.append(await event_of(process, "publication-finished"))
        process.send_signal(signal.SIGTERM)
        await event_of(process, "stopped")

        assert await process.wait() == 0

    ids = [event["publication"] for event in opened]
    assert len(set(ids)) == 3
    assert [event["publication"] for event in finished] == ids
    assert len({event["anchor"] for event in opened}) == 1
    assert {tuple(event["encodings"]) for event in opened} == {("raw",)}


async def test_a_producer_that_waits_to_publish_again_stops_at_once(desk: Desk) -> None:
    async with started([*desk.produce("--repeat-s", "600"), "--json"]) as process:
        await event_of(process, "publication-finished")
        process.send_signal(signal.SIGTERM)
        stopped = await event_of(process, "stopped")

        assert await process.wait() == 0

    assert stopped["kvcs_publications_total"] == 1


@pytest.mark.parametrize("value", ["-1", "nan"])
def test_a_pause_that_is_none_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert main(desk.produce("--repeat-s", value)) == 2
    assert "--repeat-s" in capsys.readouterr().err


def test_the_prompt_of_a_cache_and_of_noise_is_written_for_consumers(
    desk: Desk, tmp_path: Path
) -> None:
    of_cache, of_noise = tmp_path / "cache-prompt.json", tmp_path / "noise-prompt.json"

    assert main(["produce", desk["cache.safetensors"], "--prompt-to", str(of_cache)]) == 0
    noise = ["produce", "--synthetic", "phi-4", "--tokens", "40", "--seed", "7"]
    assert main([*noise, "--prompt-to", str(of_noise)]) == 0

    assert json.loads(of_cache.read_text()) == {"descriptor": COMPAT.members(), "tokens": TOKENS}
    source = SyntheticSource.of_model("phi-4", 40, seed=7)
    written = json.loads(of_noise.read_text())
    assert written["descriptor"] == source.descriptor.members()
    assert written["tokens"] == list(source.tokens)


def test_a_prompt_that_cannot_be_written_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = desk["no-such-folder/prompt.json"]

    assert main(["produce", desk["cache.safetensors"], "--prompt-to", missing]) == 2
    assert missing in capsys.readouterr().err
