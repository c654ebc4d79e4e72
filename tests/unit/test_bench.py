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
    "goodput-1452", "goodput-8900", "objects-6k", "objects-32k", "first-layer", "memory",
    "soak-objects", "soak-publications", "slow-consumer",
]  # fmt: skip


def bench(*arguments: str, baseline: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench"), *arguments],
        env=os.environ | {"KVCS_BENCH_BASELINE": baseline},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found)[:5] == ["case", "figures", "ratios", "target", "met"]
    return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchcases.figures")


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
