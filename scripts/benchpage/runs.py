"""What is run for the page: the cases of ``scripts/bench``, and what they are compared with."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchpage import machine, profiles

#: Cases that take long and say nothing of speed, and one that needs a model and gigabytes for it.
ENDURANCE = (
    "memory", "soak-objects", "soak-publications", "slow-consumer", "relay-slow", "relay-soak",
    "first-layer-ways",
)  # fmt: skip
#: Seconds that one run may take.
LIMIT_S = 3600.0


class Skipped(Exception):
    """Something cannot be measured here. The message says why."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    checkout: Path
    cases: tuple[str, ...] = ()
    """Only these; all but those of endurance if there are none."""

    endurance: bool = False
    mb: int | None = None
    pairs: int | None = None
    mooncake: str | None = None
    """A Python that has that package."""

    profile: bool = True

    def sizes(self) -> list[str]:
        """Return what ``scripts/bench`` is told."""
        flags: list[str] = []
        for flag, value in (("--mb", self.mb), ("--pairs", self.pairs)):
            if value is not None:
                flags += [flag, str(value)]
        return flags


@dataclass(frozen=True)
class Run:
    """One measurement of the page."""

    name: str
    how: str
    """The command, for whoever wants to do it again."""

    measure: Callable[[], dict[str, Any]]


def plan(options: Options) -> list[Run]:
    """Return what is to be run, in order.

    Raises:
        ValueError: If there is no such case; the message names those there are.
    """
    return [*_cases(options), *_compared(options), *_profiles(options)]


def carry_out(runs: Sequence[Run], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run one after the other, and yield what is kept of each."""
    for number, run in enumerate(runs, start=1):
        say(f"{number} of {len(runs)}: {run.name}")
        kept: dict[str, Any] = {"name": run.name, "how": run.how}
        kept["busy_cores_before"] = machine.busy_cores()
        began = time.monotonic()
        try:
            kept["result"] = run.measure()
        except Skipped as exc:
            say(f"{run.name}: skipped: {exc}")
            kept["skipped"] = str(exc)
        kept["took_s"] = round(time.monotonic() - began, 1)
        yield kept


# -- scripts/bench ---------------------------------------------------------------------------------


def _cases(options: Options) -> Iterator[Run]:
    listed = {
        case["case"]: case["what"]
        for case in map(json.loads, _output(_bench(options, "--json")).splitlines())
    }
    if unknown := [name for name in options.cases if name not in listed]:
        raise ValueError(f"no case {unknown[0]!r}, there are: {', '.join(listed)}")
    for name, what in listed.items():
        if name in options.cases or not (options.cases or name in ENDURANCE) or options.endurance:
            yield _case(options, name, what)
            if name == "goodput-1452":
                yield _case(options, name, f"{what}, engine picoquic", "--engine", "picoquic")


def _case(options: Options, name: str, what: str, *flags: str) -> Run:
    arguments = [name, *flags, *options.sizes()]

    def measure() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(_output(_bench(options, *arguments)))
        return found | {"what": what}

    return Run("-".join([name, *flags[1:]]), f"scripts/bench {' '.join(arguments)}", measure)


def _bench(options: Options, *arguments: str) -> list[str]:
    return [sys.executable, str(options.checkout / "scripts" / "bench"), *arguments]


# -- what it is compared with ----------------------------------------------------------------------


def _compared(options: Options) -> Iterator[Run]:
    if options.cases:
        return
    mb, times = options.mb or 500, options.pairs or 3
    baseline = baseline_script(options.checkout)

    def raw(*arguments: str) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            if baseline is None:
                raise Skipped("no raw_quic.py: expected it where scripts/bench looks for it")
            return _median_of([sys.executable, str(baseline), *arguments], times)

        return measure

    yield Run("tls", f"raw_quic.py tls --mb {mb}", raw("tls", "--mb", str(mb)))
    stored = options.checkout / "scripts" / "benchpage" / "objectstore.py"
    for name, flags in (("mooncake", ()), ("mooncake-32k", ("--object", str(32 << 10)))):
        arguments = ["--mb", str(mb), *flags]

        def measure(arguments: list[str] = arguments) -> dict[str, Any]:
            python = mooncake_python(options.mooncake)
            return _median_of([python, str(stored), *arguments], times)

        yield Run(name, f"scripts/benchpage/objectstore.py {' '.join(arguments)}", measure)


def baseline_script(checkout: Path) -> Path | None:
    """Return where the baseline's script is, or None: as ``scripts/bench`` looks for it."""
    told = os.environ.get("KVCS_BENCH_BASELINE")
    path = Path(told) if told else checkout.parent / "shared" / "bench" / "raw_quic.py"
    return path if path.is_file() else None


def mooncake_python(told: str | None) -> str:
    """Return a Python that can import the transfer engine.

    Raises:
        Skipped: If there is none.
    """
    python = told or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", "import mooncake.engine, numpy"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Skipped(f"the Python of --mooncake cannot be run: {type(exc).__name__}") from None
    if done.returncode:
        raise Skipped(
            f"the transfer engine of Mooncake is not installed ({_last_line(done.stderr)}); "
            "--mooncake names a Python that has mooncake-transfer-engine-non-cuda"
        )
    return python


def _median_of(command: list[str], times: int) -> dict[str, Any]:
    """Run a command that prints one JSON object, and return the run of median speed."""
    found = [json.loads(_output(command)) for _ in range(times)]
    found.sort(key=lambda one: one["mb_per_s"])
    middle: dict[str, Any] = found[len(found) // 2]
    return middle | {
        "mb_per_s": median(one["mb_per_s"] for one in found),
        "runs": [one["mb_per_s"] for one in found],
    }


# -- where time goes -------------------------------------------------------------------------------


def _profiles(options: Options) -> Iterator[Run]:
    if not options.profile or options.cases:
        return
    mb = options.mb or 500

    def before() -> dict[str, Any]:
        script = baseline_script(options.checkout)
        if script is None:
            raise Skipped("no raw_quic.py: expected it where scripts/bench looks for it")
        return _profiled(lambda: profiles.of_stock(script, mb))

    yield Run("profile-stock", f"raw_quic.py aioquic --mb {mb}, sampled", before)
    yield Run(
        "profile-kvcs",
        f"kvcs bench, both ends sampled, --mb {mb} --max-datagram-octets {profiles.DATAGRAM}",
        lambda: _profiled(lambda: profiles.of_kvcs(options.checkout, mb)),
    )


def _profiled(profile: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return profile()
    except profiles.ProfileFailed as exc:
        raise Skipped(str(exc)) from None


# -- processes -------------------------------------------------------------------------------------


def _output(command: Sequence[str]) -> str:
    """Return what a program prints; it may say that a target was missed.

    Raises:
        Skipped: If it fails or takes too long, with the last line that it wrote.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Skipped(f"it did not end within {LIMIT_S:g} s") from None
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise Skipped(_last_line(done.stderr))
    return done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1].strip()
