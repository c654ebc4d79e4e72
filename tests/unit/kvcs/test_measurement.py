"""What several retrievals say together, and their way through JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvcs.errors import ConfigError
from kvcs.measurement import Measurement, Retrieved, Setting

SETTING = Setting(
    uri="moqt://far:4443/",
    engine="aioquic",
    codec="raw",
    lossless=True,
    model="32,8,128",
    layers=10,
    tokens=1000,
    cache_octets=100_000_000,
    object_octets=32_768,
    datagram_octets=1000,
)
RUN = Retrieved(
    seconds=2.0,
    first_layer_s=0.2,
    data_octets=100_000_000,
    cpu_s=1.5,
    datagrams=104_000,
    datagrams_sent=110_000,
    datagrams_lost=1100,
)


def measured(*runs: Retrieved, setting: Setting = SETTING, **others: Any) -> Measurement:
    return Measurement.of(setting, runs or (RUN,), rtt_s=0.01, **others)


def test_one_retrieval_is_its_own_median() -> None:
    found = measured(producer_cpu_s=1.0)

    assert (found.mb_per_s, found.retrievals) == (50.0, 1)
    assert found.per_layer_s == pytest.approx(0.2)
    assert found.steady_mb_per_s == pytest.approx(50.0)
    assert found.data_to_cache == 1.0
    assert found.wire_to_cache == pytest.approx(1.1)
    assert found.cpu_s_per_gb == pytest.approx(15.0)
    assert found.producer_cpu_s_per_gb == pytest.approx(10.0)
    assert found.loss == pytest.approx(0.01)


def test_rates_are_medians_and_costs_are_sums() -> None:
    slow, fast = replace(RUN, seconds=10.0, cpu_s=4.5), replace(RUN, seconds=1.0)

    found = measured(RUN, slow, fast)

    assert (found.mb_per_s_least, found.mb_per_s, found.mb_per_s_most) == (10.0, 50.0, 100.0)
    assert found.cpu_s_per_gb == pytest.approx(25.0)


def test_what_nobody_tells_is_none_and_not_nothing() -> None:
    found = measured(replace(RUN, datagrams=0, datagrams_sent=0, datagrams_lost=0))

    assert (found.wire_to_cache, found.loss, found.producer_cpu_s_per_gb) == (None, None, None)
    # Who does not count what comes does not know how large it was either.
    assert measured(replace(RUN, datagrams=0)).wire_to_cache is None


def test_layers_that_are_there_at_once_have_the_rate_of_the_whole() -> None:
    at_once = measured(replace(RUN, first_layer_s=2.0))
    only = measured(replace(RUN, first_layer_s=2.0), setting=replace(SETTING, layers=1))

    assert at_once.steady_mb_per_s == only.steady_mb_per_s == 50.0


def test_the_start_is_what_the_first_layer_took_beyond_its_octets() -> None:
    assert measured(replace(RUN, first_layer_s=0.5, seconds=2.3)).start_s == pytest.approx(0.3)
    # A first layer that came faster than the others says that there was none.
    assert measured(replace(RUN, first_layer_s=0.01)).start_s == 0.0


def test_json_brings_back_what_was_measured_to_six_digits() -> None:
    found = measured(replace(RUN, seconds=1.23456789), producer_cpu_s=1.0)

    line = json.loads(json.dumps(found.to_json()))
    back = Measurement.from_json(line, "far.json")

    assert line["event"] == "measured"
    assert back.mb_per_s == 81.0
    assert back.to_json() == line
    assert replace(back, mb_per_s=0.0) != back


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"event": "served"}, "far.json: expected the object"),
        ({"layers": None}, "layers is None, expected a whole number above 0"),
        ({"layers": True}, "layers is True"),
        ({"tokens": 0}, "tokens is 0"),
        ({"cache_octets": 999}, "cache_octets is less than one for each token"),
        ({"steady_mb_per_s": 0}, "steady_mb_per_s is 0"),
        ({"mb_per_s": "60"}, "mb_per_s is '60', expected a number"),
        ({"rtt_s": -1}, "rtt_s is -1"),
        ({"first_layer_s": 1e999}, "first_layer_s is inf"),
        ({"first_layer_s": False}, "first_layer_s is False"),
        ({"loss": "none"}, "loss is 'none', expected a number, 0 or more, or null"),
        ({"lossless": 1}, "lossless is 1, expected true or false"),
        ({"codec": 7}, "codec is 7, expected text"),
    ],
)
def test_a_file_that_is_not_one_is_named_with_what_is_wrong(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=r"^far\.json: ") as caught:
        Measurement.from_json(measured().to_json() | change, "far.json")

    assert named in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "measured", 7])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="expected the object that kvcs bench --json prints"):
        Measurement.from_json(value, "far.json")


def test_every_member_is_asked_for() -> None:
    line = measured().to_json()

    for name in set(line) - {"event"}:
        with pytest.raises(ConfigError, match=f"no member '{name}'"):
            Measurement.from_json({k: v for k, v in line.items() if k != name}, "far.json")


def test_no_loss_and_no_round_trip_are_figures() -> None:
    line = measured().to_json() | {"loss": 0, "rtt_s": 0, "per_layer_s": 0.0}

    assert Measurement.from_json(line, "far.json").loss == 0
