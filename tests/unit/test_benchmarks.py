"""scripts/benchmarks: the page that it makes of results, and what it samples."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: For a program that is started, on a machine that has other work.
LIMIT_S = 55


def benchmarks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchmarks"), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a module of the script."""
    monkeypatch.syspath_prepend(ROOT / "scripts")

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"benchpage.{name}")

    return load


def case(name: str, met: bool | None = True, **figures: Any) -> dict[str, Any]:
    """What is kept of a case of scripts/bench."""
    return kept(
        name,
        case=name,
        what=f"what {name} is",
        figures=figures,
        ratios={"vs_aioquic": 1.5, "unknown": None},
        target={"vs_aioquic": {"at_least": 2.0}},
        met=met,
    )


def kept(name: str, **result: Any) -> dict[str, Any]:
    return {
        "name": name, "how": f"scripts/bench {name}", "busy_cores_before": 0.25, "took_s": 60.0,
        "result": result,
    }  # fmt: skip


def results(*runs: dict[str, Any], **others: Any) -> dict[str, Any]:
    machine = {
        "commit": "abc123", "cores": 2, "processor": "A processor", "memory_gib": 16,
        "kernel": "6.1", "python": "3.12.1", "packages": {"aioquic": "1.7.2"},
    }  # fmt: skip
    return {"date": "2026-11-30", "machine": machine, "sizes": "", "runs": list(runs), **others}


OURS = case("goodput-1452", mb_per_s=50.0, baseline_mb_per_s=25.0)
TLS = kept("tls", mb_per_s=500.0)


def lines_of(page: str, begin: str) -> list[list[str]]:
    """Return the cells of the rows that begin so."""
    rows = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_compares_what_was_measured_with_the_first_and_with_what_it_promises(
    part: Any,
) -> None:
    page = part("page").render(results(OURS, TLS))

    [ours] = lines_of(page, "kvcs, engine aioquic, datagrams of 1,452")
    [stock] = lines_of(page, "stock aioquic, one raw stream, datagrams of 1,452")
    [tls] = lines_of(page, "TLS 1.3")
    assert ours[1:8] == ["50.0", "1.00", "yes", "yes", "yes", "yes, by relays", "yes, at a relay"]
    assert stock[1:5] == ["25.0", "0.50", "yes", "no"]
    assert tls[1:3] == ["500.0", "10.00"]
    assert not lines_of(page, "Mooncake")


def test_who_is_faster_is_named_and_who_is_not_is_not(part: Any) -> None:
    page = part("page").render(results(OURS, TLS))

    won = page.partition("### Where others win")[2].partition("##")[0]
    assert "TLS 1.3 over TCP in asyncio, one stream, 10.0 times as many" in won
    assert "stock aioquic" not in won


def test_the_page_says_the_machine_its_load_and_how_to_do_it_again(part: Any) -> None:
    page = part("page").render(results(OURS, TLS))

    for words in ("abc123", "2 cores (A processor)", "aioquic 1.7.2", "0.25 cores busy", "6.1"):
        assert words in page
    assert "about 2 minutes" in page
    assert "\nscripts/bench goodput-1452\n" in page


def test_a_look_with_small_sizes_says_that_it_is_one(part: Any) -> None:
    assert "Not to be quoted" in part("page").render(results(OURS, sizes="--mb 5"))
    assert "Not to be quoted" not in part("page").render(results(OURS))


def test_what_was_left_out_is_said_with_the_reason(part: Any) -> None:
    left_out = {
        "name": "mooncake", "how": "objectstore.py", "busy_cores_before": 0.0, "took_s": 0.1,
        "skipped": "it is not installed",
    }  # fmt: skip

    page = part("page").render(results(OURS, left_out))

    assert "- `mooncake`: it is not installed" in page


def test_cases_are_told_with_their_targets(part: Any) -> None:
    page = part("page").render(results(OURS, case("other", met=False), case("third", met=None)))

    [ours], [other], [third] = (
        lines_of(page, f"`{name}`") for name in ("goodput-1452", "other", "third")
    )
    assert ours == [
        "`goodput-1452`", "what goodput-1452 is", "50.0 MB/s; vs_aioquic 1.5",
        "vs_aioquic at least 2", "yes",
    ]  # fmt: skip
    assert (other[-1], third[-1]) == ("**no**", "cannot be told")


def test_profiles_are_told_for_each_gb_the_most_first(part: Any) -> None:
    rows = [
        {"module": "moqt.aio.udp", "function": "UdpEndpoint.send", "cpu_s": 3.0},
        *({"module": "m", "function": f"f{n}", "cpu_s": 0.1} for n in range(10)),
    ]

    page = part("page").render(
        results(kept("profile-kvcs", gb=0.5, receiver=rows, sender=rows[:1]))
    )

    assert "### Receiver, kvcs: 8.00 s for each GB" in page
    assert lines_of(page, "`moqt.aio.udp`")[0] == [
        "`moqt.aio.udp`", "`UdpEndpoint.send`", "6.00", "75%",
    ]  # fmt: skip
    assert lines_of(page, "all others")[0][2:] == ["0.20", "2%"]


def test_nothing_at_all_is_still_a_page(part: Any) -> None:
    assert "Nothing of it was measured" in part("page").render(results())


def test_the_best_of_a_contenders_figures_counts_and_the_first_run_that_was_made(
    part: Any,
) -> None:
    contenders, rate_of = part("contenders").CONTENDERS, part("page").rate_of
    [peer] = [one for one in contenders if one.what.startswith("aiomoqt")]
    [picoquic] = [one for one in contenders if "picoquic" in one.what]
    figures: dict[str, Any] = {
        "peer_in_one_process_mb_per_s": 80.0,
        "peer_in_two_processes_mb_per_s": 90.0,
    }
    runs = {"vs-peer": case("vs-peer", None, mb_per_s=100.0, **figures)}

    assert rate_of(peer, runs) == 90.0
    assert rate_of(picoquic, runs) == 100.0
    assert rate_of(picoquic, {}) is None


def test_each_contender_says_something_of_each_guarantee(part: Any) -> None:
    module = part("contenders")

    for contender in module.CONTENDERS:
        assert list(contender.guarantees) == list(module.GUARANTEES)
        assert contender.lacks


def test_files_are_called_as_they_are_imported(part: Any) -> None:
    module_of = part("profiles").module_of

    assert module_of("/somewhere/moqt/checkout/moqt/aio/udp.py") == "moqt.aio.udp"
    assert module_of("/v/lib/python3.12/site-packages/aioquic/quic/packet.py") == (
        "aioquic.quic.packet"
    )
    assert module_of("/usr/lib/python3.11/hmac.py") == "hmac"
    assert module_of("/some/where/raw_quic.py") == "raw_quic"
    assert module_of("/v/kvcs/.venv/lib/python3.12/site-packages/numpy/a.py") == "numpy.a"
    assert module_of("<frozen importlib._bootstrap>") == "frozen importlib._bootstrap"
    assert module_of("<string>") == "generated"


def test_functions_are_summed_and_sorted(part: Any) -> None:
    rows = [
        {"file": "/x/moqt/a.py", "function": "f", "cpu_s": 0.1},
        {"file": "/y/moqt/a.py", "function": "f", "cpu_s": 0.2},
        {"file": "/x/moqt/b.py", "function": "g", "cpu_s": 0.2},
    ]

    assert part("profiles").summed(rows) == [
        {"module": "moqt.a", "function": "f", "cpu_s": 0.3},
        {"module": "moqt.b", "function": "g", "cpu_s": 0.2},
    ]


BUSY = """
import asyncio, os, time
def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))
def before_there_is_a_loop():
    spin(0.2)
async def main(seconds):
    spin(seconds)
"""
FORKING = """
before_there_is_a_loop()
child = os.fork()
if child:
    asyncio.run(main(0.3))
    os.kill(child, 15)
    os.waitpid(child, 0)
else:
    asyncio.run(main(60))
"""


def test_a_program_and_what_it_forks_are_sampled_where_they_spend_their_time(
    tmp_path: Path,
) -> None:
    program, out = tmp_path / "busy.py", tmp_path / "out.json"
    program.write_text(BUSY + FORKING)

    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchpage" / "sampler.py"), out, program],
        timeout=LIMIT_S, check=True,
    )  # fmt: skip

    for path in (out, tmp_path / "out.json.child"):
        first = json.loads(path.read_text())[0]
        assert (first["function"], Path(first["file"]).name) == ("spin", "busy.py")
        assert first["cpu_s"] > 0.05
    # What came before the loop took as long again.
    assert sum(row["cpu_s"] for row in json.loads(out.read_text())) < 0.4


def test_what_was_sampled_before_a_signal_is_forgotten(tmp_path: Path) -> None:
    program, out = tmp_path / "busy.py", tmp_path / "out.json"
    program.write_text(
        BUSY
        + "asyncio.run(main(0.3))\n"
        + f"os.kill(os.getpid(), {int(signal.SIGUSR1)})\n"
        + "asyncio.run(main(0.1))\n"
    )

    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchpage" / "sampler.py"), out, program],
        timeout=LIMIT_S, check=True,
    )  # fmt: skip

    assert sum(row["cpu_s"] for row in json.loads(out.read_text())) < 0.25


# -- the script ----------------------------------------------------------------------------------


def test_an_unknown_case_is_refused_with_the_names_of_the_others(tmp_path: Path) -> None:
    done = benchmarks("--case", "goodput-9000", "--out", str(tmp_path))

    assert done.returncode == 2
    assert "goodput-8900" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_rendered_from_what_was_kept(tmp_path: Path, part: Any) -> None:
    (tmp_path / "benchmarks.json").write_text(json.dumps(results(OURS, TLS)))

    done = benchmarks("--render", "--out", str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "benchmarks.md").read_text() == part("page").render(results(OURS, TLS))


def test_without_results_nothing_is_rendered(tmp_path: Path) -> None:
    done = benchmarks("--render", "--out", str(tmp_path))

    assert done.returncode == 2
    assert "benchmarks.json" in done.stderr


@pytest.mark.slow
@pytest.mark.network
def test_a_short_run_of_one_case_makes_a_page(tmp_path: Path) -> None:
    done = benchmarks(
        "--case", "objects-32k", "--mb", "1", "--pairs", "1", "--out", str(tmp_path),
        KVCS_BENCH_BASELINE="",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "benchmarks.md").read_text()
    assert lines_of(page, "`objects-32k`")
    assert "Not to be quoted" in page


def test_a_transfer_engine_that_is_not_there_is_skipped_by_name(part: Any) -> None:
    runs = part("runs")

    with pytest.raises(runs.Skipped, match="cannot be run"):
        runs.mooncake_python("/nowhere/python")


def test_the_page_that_is_kept_is_the_one_that_its_results_make(part: Any) -> None:
    kept_results = ROOT / "docs" / "benchmarks.json"
    if not kept_results.exists():
        pytest.skip("no results are kept")

    page = part("page").render(json.loads(kept_results.read_text()))

    assert (ROOT / "docs" / "benchmarks.md").read_text() == page
