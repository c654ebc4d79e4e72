"""The page ``docs/benchmarks.md``, made of what was measured; nothing of it is written by hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchpage.contenders import CONTENDERS, FIRST, GUARANTEES, Contender

Results = Mapping[str, Any]

#: Functions of a profile that are listed.
_LISTED = 10

HEAD = """\
# Benchmarks

Made by `scripts/benchmarks` from `docs/benchmarks.json`; do not edit it. MB are 10**6 octets, rates
are medians, and every process of a measurement is on the same machine, over loopback. Where all
ends share a few cores, an end has not a core of its own: judge ratios, and what costs less.
"""


def render(results: Results) -> str:
    """Return the page.

    Args:
        results: What ``docs/benchmarks.json`` holds: ``machine``, ``date`` and ``runs``.
    """
    runs = {run["name"]: run for run in results["runs"]}
    parts = [
        HEAD,
        *_machine(results),
        *_comparison(runs),
        *_cases(runs),
        *_profiles(runs),
        *_skipped(runs),
        *_again(runs),
    ]
    return "\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return a Markdown table; ``right`` has an ``r`` for each column that is set to the right."""
    marks = ["---:" if mark == "r" else "---" for mark in right.ljust(len(head))]
    lines = [head, marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# -- the machine -----------------------------------------------------------------------------------


def _machine(results: Results) -> Iterator[str]:
    found = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    busy = sorted(run["busy_cores_before"] for run in results["runs"])
    yield (
        f"Measured on {results['date']} at commit {found['commit'] or 'unknown'}: "
        f"{found['cores']} cores ({found['processor']}), {found['memory_gib']} GiB, Linux "
        f"{found['kernel']}, Python {found['python']}; {versions}.\n"
    )
    if busy:
        yield (
            f"Just before each measurement other work kept {busy[len(busy) // 2]:.2f} cores busy "
            f"in the median, {busy[-1]:.2f} at most.\n"
        )
    if results.get("sizes"):
        yield (
            f"**Not to be quoted**: made with `{results['sizes']}`, to see that the script works.\n"
        )


# -- the comparison --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """A contender, and what it carried."""

    contender: Contender
    mb_per_s: float


def _comparison(runs: Mapping[str, Any]) -> Iterator[str]:
    entries = [
        _Entry(contender, rate)
        for contender in CONTENDERS
        if (rate := rate_of(contender, runs)) is not None
    ]
    yield "## What carries how much, and what it promises\n"
    if not entries:
        yield "Nothing of it was measured.\n"
        return
    first = next((entry for entry in entries if entry.contender is FIRST), None)
    rows = [
        [
            entry.contender.what,
            f"{entry.mb_per_s:,.1f}",
            "" if first is None else f"{entry.mb_per_s / first.mb_per_s:.2f}",
            *(entry.contender.guarantees[name] for name in GUARANTEES),
            entry.contender.lacks,
        ]
        for entry in entries
    ]
    head = ["what", "MB/s", "to the first", *(f"{name}?" for name in GUARANTEES), "what it lacks"]
    yield table(head, rows, " rr")
    yield "\n".join(f"- **{name}**: {text}" for name, text in GUARANTEES.items()) + "\n"
    if first is not None:
        yield _others(first, entries)


def rate_of(contender: Contender, runs: Mapping[str, Any]) -> float | None:
    """Return the MB/s of a contender, if they were measured: the best of the figures named."""
    for name, *paths in contender.sources:
        result = runs.get(name, {}).get("result")
        if result is None:
            continue
        rates = [rate for path in paths if (rate := _at(result, path)) is not None]
        if rates:
            return max(rates)
    return None


def _at(result: Mapping[str, Any], path: str) -> float | None:
    found: Any = result
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _others(first: _Entry, entries: Sequence[_Entry]) -> str:
    """Say who is faster, and by how much."""
    ahead = sorted(
        (
            entry
            for entry in entries
            if entry.mb_per_s > first.mb_per_s and not entry.contender.ours
        ),
        key=lambda entry: -entry.mb_per_s,
    )
    lines = ["### Where others win\n"]
    if ahead:
        lines.append(
            "More octets a second than kvcs with its default engine, on this machine: "
            + "; ".join(
                f"{entry.contender.what}, {entry.mb_per_s / first.mb_per_s:.1f} times as many"
                for entry in ahead
            )
            + ".\n"
        )
    lines.append(
        "Between two hosts that trust each other and the network between them, with one consumer "
        "for each cache, a store over TCP or RDMA moves more for less processor time, and prefill "
        "on a fast accelerator may beat all of them: `kvcs advise` does that sum. What is compared "
        "here promises less; the columns say what. What kvcs is for is the other case: caches that "
        "many consumers want, that begin to be used before they are whole, over networks and "
        "through relays that nobody has to trust with their integrity.\n"
    )
    return "\n".join(lines)


# -- the cases -------------------------------------------------------------------------------------


def _cases(runs: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, run in runs.items():
        result = run.get("result", {})
        if "ratios" not in result:  # it is no case of scripts/bench
            continue
        figures, ratios = result["figures"], result["ratios"]
        shown = [f"{figures['mb_per_s']:,.1f} MB/s"] if "mb_per_s" in figures else []
        shown += [f"{key} {value:g}" for key, value in ratios.items() if value is not None]
        targets = [
            f"{key} {' and '.join(f'{word} {bound:g}' for word, bound in _bounds(target))}"
            for key, target in result["target"].items()
        ]
        rows.append(
            [
                f"`{name}`",
                result["what"],
                "; ".join(shown),
                "; ".join(targets),
                {True: "yes", False: "**no**", None: "cannot be told"}[result["met"]],
            ]
        )
    if rows:
        yield "## The cases of scripts/bench\n"
        yield "`scripts/bench --help` says what a figure, a ratio and a target is.\n"
        yield table(["case", "what", "found", "target", "met"], rows)


def _bounds(target: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, bound in target.items():
        yield name.replace("_", " "), bound


# -- profiles --------------------------------------------------------------------------------------


def _profiles(runs: Mapping[str, Any]) -> Iterator[str]:
    found = {
        what: runs[name]["result"]
        for name, what in (("profile-stock", "stock aioquic"), ("profile-kvcs", "kvcs"))
        if "result" in runs.get(name, {})
    }
    if not found:
        return
    yield "## Where the time goes\n"
    yield (
        "Processor seconds for each GB, by the Python function that was running or had called "
        "what was: before, one raw stream between two stock aioquic shells; after, kvcs with its "
        "default engine, every object verified. Sampled, which slows both down a little.\n"
    )
    for end in ("receiver", "sender"):
        for what, result in found.items():
            rows = result[end]
            whole = sum(row["cpu_s"] for row in rows) or 1.0
            yield f"### {end.capitalize()}, {what}: {whole / result['gb']:.2f} s for each GB\n"
            shown = [
                [
                    f"`{row['module']}`",
                    f"`{row['function']}`",
                    f"{row['cpu_s'] / result['gb']:.2f}",
                    f"{row['cpu_s'] / whole:.0%}",
                ]
                for row in rows[:_LISTED]
            ]
            rest = sum(row["cpu_s"] for row in rows[_LISTED:])
            shown.append(["all others", "", f"{rest / result['gb']:.2f}", f"{rest / whole:.0%}"])
            yield table(["module", "function", "s for each GB", "share"], shown, "  rr")


# -- what is missing, and how to do it again -------------------------------------------------------


def _skipped(runs: Mapping[str, Any]) -> Iterator[str]:
    missing = [(name, run["skipped"]) for name, run in runs.items() if "skipped" in run]
    if missing:
        yield "## What was left out\n"
        yield "\n".join(f"- `{name}`: {why}" for name, why in missing) + "\n"


def _again(runs: Mapping[str, Any]) -> Iterator[str]:
    yield "## How to repeat it\n"
    yield (
        "`scripts/benchmarks` on a machine that does nothing else: it takes about "
        f"{max(1, round(sum(run['took_s'] for run in runs.values()) / 60))} minutes, writes "
        "`docs/benchmarks.json`, and this page from it (`--render` does that alone). One by one:\n"
    )
    yield "```sh\n" + "\n".join(run["how"] for run in runs.values()) + "\n```\n"
