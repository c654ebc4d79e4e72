"""scripts/bench: its cases, the form of its results, and a run of a few MB."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CASES = [
    "goodput-1452", "goodput-8900", "goodput-found", "objects-6k", "objects-32k", "first-layer",
    "memory", "soak-objects", "soak-publications", "slow-consumer", "relayed-1", "relayed-4",
    "relayed-16", "first-layer-relayed", "relay-slow", "relay-soak",
]  # fmt: skip


#: For a run of many processes, on a machine that has other work.
LIMIT_S = 240


def bench(
    *arguments: str, baseline: str = "", limit_s: float = 55
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench"), *arguments],
        env=os.environ | {"KVCS_BENCH_BASELINE": baseline},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def result_of(done: subprocess.CompletedProcess[str], *, missing: int = 0) -> dict[str, Any]:
    """Return what a case printed; with ``missing`` 1 a run too short for its targets will do."""
    assert done.returncode in (0, missing), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found)[:5] == ["case", "figures", "ratios", "target", "met"]
    return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchcases.figures")


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchcases.relayed")


def test_without_arguments_it_lists_its_cases() -> None:
    lines = bench("--json").stdout.splitlines()

    assert [json.loads(line)["case"] for line in lines] == CASES


def test_help_explains_the_targets_of_every_case() -> None:
    text = bench("--help").stdout

    assert all(case in text for case in CASES)
    assert "vs_aioquic at least 0.7" in text


def test_an_unknown_case_is_refused_with_the_names_of_the_others() -> None:
    done = bench("goodput-9000")

    assert done.returncode == 2
    assert "goodput-8900" in done.stderr


@pytest.mark.network
def test_a_short_run_without_the_baseline_has_figures_and_says_what_is_missing() -> None:
    found = result_of(bench("objects-32k", "--mb", "2", "--pairs", "1", baseline="/nowhere"))

    assert found["figures"]["objects"] >= 2_000_000 // 32768
    assert found["figures"]["mb_per_s"] > 0
    assert set(found["ratios"].values()) == {None}
    assert found["met"] is None
    assert "KVCS_BENCH_BASELINE" in found["reason"]


@pytest.mark.network
def test_a_short_run_is_divided_by_what_the_baseline_prints(tmp_path: Path) -> None:
    script = tmp_path / "baseline.py"
    figures = {"mb": 2.0, "mb_per_s": 0.001, "receiver_cpu_s": 1.0}
    script.write_text(f"print({json.dumps(figures)!r})")

    found = result_of(bench("goodput-1452", "--mb", "2", "--pairs", "1", baseline=str(script)))

    rate = found["figures"]["mb_per_s"]
    assert found["ratios"]["vs_aioquic"] == pytest.approx(rate / 0.001, rel=0.1)
    assert found["met"] is True


@pytest.mark.network
def test_a_baseline_that_fails_leaves_the_figures_and_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "baseline.py"
    script.write_text("raise SystemExit('no such stack')")

    found = result_of(bench("goodput-8900", "--mb", "2", "--pairs", "1", baseline=str(script)))

    assert found["figures"]["mb_per_s"] > 0
    assert found["met"] is None
    assert "no such stack" in found["reason"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(LIMIT_S + 10)
def test_consumers_at_a_relay_cost_their_producer_one_copy_and_those_beside_it_one_each() -> None:
    found = result_of(bench("relayed-4", "--mb", "4", "--pairs", "1", limit_s=LIMIT_S))

    figures = found["figures"]
    assert figures["copies"] == figures["relayed"]["copies"] == pytest.approx(1, abs=0.02)
    assert figures["direct"]["copies"] == pytest.approx(4, abs=0.1)
    assert figures["direct"]["relay_cpu_s"] == 0 < figures["relayed"]["relay_cpu_s"]
    assert found["ratios"]["total_vs_direct"] == figures["total_vs_direct_runs"][0] > 0
    assert found["met"] is True


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_first_layer_is_timed_through_no_relay_through_one_and_through_two() -> None:
    found = result_of(bench("first-layer-relayed", "--mb", "2", "--pairs", "1", limit_s=LIMIT_S))

    for hops in ("direct", "one_relay", "two_relays"):
        figures = found["figures"][hops]
        assert 0 < figures["manifest_s"] <= figures["first_layer_s"] <= figures["complete_s"]
        assert figures["live_delay_s"] > 0
    assert found["ratios"].keys() == {"one_relay_vs_direct", "two_relays_vs_direct"}


@pytest.mark.skipif("KVCS_BENCH_LONG" not in os.environ, reason="asks for KVCS_BENCH_LONG=yes")
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(LIMIT_S + 10)
def test_those_who_stand_still_at_a_relay_stay_there_and_another_is_measured_beside_them() -> None:
    found = result_of(bench("relay-slow", "--mb", "64", "--pairs", "1", limit_s=LIMIT_S), missing=1)

    many, one = found["figures"]["many"], found["figures"]["one"]
    assert many["cache_held_mib"] < 2 * many["cache_mib"] < many["mb"] / 3
    assert one["stalled_ended"] == []
    assert many["stalled_still_connected"] is one["stalled_still_connected"] is True
    assert found["ratios"]["many_beside_vs_alone"] == many["beside_vs_alone_runs"][0] > 0


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_short_soak_of_a_relay_counts_what_it_asks_for_and_what_it_holds() -> None:
    run = bench("relay-soak", "--visits", "40", "--publications", "10", limit_s=LIMIT_S)
    figures = result_of(run, missing=1)["figures"]

    assert figures["visits"] == 40
    assert 1 <= figures["beside_one_upstream_subscriptions"] <= 3
    assert 0 < figures["alone_upstream_per_pause"] <= 2
    assert figures["upstream_per_publication"] == 3
    assert 10 * figures["publication_octets"] == pytest.approx(figures["cache_held_octets"])
    assert figures["upstream_left"] == 0
    assert figures["visits_objects_short"] == figures["last_objects_short"] == 0


def test_many_publications_are_eight_times_what_a_relay_may_hold_and_one_is_all_of_it(
    relayed: ModuleType,
) -> None:
    many, one = relayed.Load.of_many(2.0**31), relayed.Load.of_one(2.0**31)

    assert many.octets == one.octets == 1 << 31
    assert len({cache.seed for cache in many.caches}) == len(many.caches) == 64
    assert many.octets == 8 * many.cache_octets
    assert sum(cache.octets for cache in many.caches[: many.frozen]) == many.cache_octets // 2
    assert one.cache_octets == one.octets == 8 * one.max_behind_octets


def test_a_missed_target_is_not_met_and_an_unknown_one_is_not_known(figures: ModuleType) -> None:
    def result(value: float | None) -> Any:
        other = figures.Target("other", at_most=1)
        target = figures.Target("ratio", at_least=0.7)
        return figures.Result("case", {"other": 0}, {"ratio": value}, (target, other))

    assert [result(value).met for value in (0.7, 0.69, None)] == [True, False, None]
    assert json.loads(result(0.7).to_json())["target"] == {
        "ratio": {"at_least": 0.7},
        "other": {"at_most": 1},
    }


def test_the_slope_of_a_run_leaves_out_its_warm_up(figures: ModuleType) -> None:
    warming_up = [(0.0, 0.0), (1.0, 50.0)]
    steady = [(float(x), 100.0 + 2 * x) for x in range(2, 10)]

    assert figures.slope(figures.settled(warming_up + steady)) == pytest.approx(2.0)
