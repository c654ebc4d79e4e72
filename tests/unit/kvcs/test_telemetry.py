import io
import json
from collections.abc import Iterator

import pytest
import structlog

from kvcs.telemetry import Counter, Counters, LogEvent, set_up_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_lines_for_machines_are_json_with_a_fixed_text_and_named_values() -> None:
    out = io.StringIO()
    set_up_logging(stream=out)
    structlog.get_logger().info(LogEvent.LISTENING, host="::1", publication=bytes(range(32)))

    line = json.loads(out.getvalue())
    assert (line["event"], line["level"], line["host"]) == ("listening", "info", "::1")
    assert line["publication"] == "00010203"
    assert line["timestamp"].endswith("Z")


def test_lines_for_people_are_text() -> None:
    out = io.StringIO()
    set_up_logging(log_format="text", stream=out)
    structlog.get_logger().warning(LogEvent.RELAY_LOST, relay="moqt://r:1")

    assert "relay lost" in out.getvalue()
    assert "relay=moqt://r:1" in out.getvalue()


def test_what_is_below_the_level_is_not_written() -> None:
    out = io.StringIO()
    set_up_logging(level="warning", stream=out)
    structlog.get_logger().info(LogEvent.LISTENING)

    assert out.getvalue() == ""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    out = io.StringIO()
    set_up_logging(log_format=log_format, stream=out)  # type: ignore[arg-type]  # from the list
    secret = "hush" + "-hush"
    try:
        raise RuntimeError("failed")
    except RuntimeError:
        structlog.get_logger().exception("something failed")

    assert "RuntimeError: failed" in out.getvalue()
    assert secret not in out.getvalue()


def test_every_counter_is_there_from_the_start() -> None:
    counters = Counters()

    assert set(counters) == set(Counter)
    assert not any(counters.values())


def test_counters_count_and_each_owner_has_its_own() -> None:
    counters, others = Counters(), Counters()
    counters.add(Counter.LAYERS_PUBLISHED)
    counters.add(Counter.OCTETS_PUBLISHED, 100)

    assert counters[Counter.LAYERS_PUBLISHED] == 1
    assert counters[Counter.OCTETS_PUBLISHED] == 100
    assert not any(others.values())
    assert repr(counters) == (
        "Counters(kvcs_layers_published_total=1, kvcs_published_bytes_total=100)"
    )


def test_names_of_counters_follow_the_habits_of_prometheus() -> None:
    assert all(c.value.startswith("kvcs_") and c.value.endswith("_total") for c in Counter)
