"""On what two ends spend their processors' time: stock aioquic, and kvcs; see ``sampler``."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAMPLER = Path(__file__).with_name("sampler.py")
#: UDP payload of both.
DATAGRAM = 1452
LIMIT_S = 600.0
#: Seconds until a producer must serve, and until it must have ended.
_START_S = 120.0
_STOP_S = 20.0


class ProfileFailed(Exception):
    """No profile could be had. The message says why."""


def of_stock(script: Path, mb: int) -> dict[str, Any]:
    """Sample both ends of one raw QUIC stream between aioquic's own shells.

    Raises:
        ProfileFailed: If the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvcs-profile-") as folder:
        out = Path(folder) / "samples.json"
        arguments = ["aioquic", "--mb", str(mb), "--datagram", str(DATAGRAM)]
        told = _run([_sampled(out, script), *arguments, "--limit", str(int(LIMIT_S))])
        # Its receiver is the process that was started; it forks the sender.
        sender = out.with_name(f"{out.name}.child")
        return {
            "gb": told["mb"] / 1e3,
            "receiver": summed(_samples(out)),
            "sender": summed(_samples(sender)),
        }


def of_kvcs(checkout: Path, mb: int) -> dict[str, Any]:
    """Sample both ends of one retrieval, every Object verified.

    Raises:
        ProfileFailed: If the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvcs-profile-") as name:
        folder = Path(name)
        producer, consumer = folder / "producer.json", folder / "consumer.json"
        cache = ["--mb", str(mb), "--max-datagram-octets", str(DATAGRAM), "--json"]
        serve = ["bench", "--serve", "--listen", "127.0.0.1:0", "--files", str(folder / "files")]
        with _process([_sampled(producer, "kvcs"), *serve, *cache], checkout) as started:
            listening = _event(started, "listening")
            started.send_signal(signal.SIGUSR1)  # what it took to make the cache is forgotten
            files = Path(listening["files"])
            told = _run(
                [
                    _sampled(consumer, "kvcs"),
                    *("bench", f"moqt://127.0.0.1:{listening['port']}/", "--seconds", "0"),
                    *("--ca-file", str(files / "ca.pem"), "--deadline-s", str(LIMIT_S)),
                    *("--scope-key-file", str(files / "scope.key"), *cache),
                ],
                checkout,
            )
            started.terminate()
            started.wait(_STOP_S)
        return {
            "gb": told["cache_octets"] / 1e9,
            "receiver": summed(_samples(consumer)),
            "sender": summed(_samples(producer)),
        }


def summed(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return processor seconds by module and function, the most first.

    Args:
        samples: What the sampler wrote.

    Returns:
        ``{"module", "function", "cpu_s"}`` each; modules as they are imported, other files by
        their name alone.
    """
    seconds: dict[tuple[str, str], float] = {}
    for sample in samples:
        key = module_of(sample["file"]), sample["function"]
        seconds[key] = seconds.get(key, 0.0) + sample["cpu_s"]
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    return [
        {"module": module, "function": function, "cpu_s": round(cpu_s, 4)}
        for (module, function), cpu_s in rows
    ]


def module_of(file: str) -> str:
    """Return what people call a source file: ``moqt.aio.udp``, ``aioquic.quic.packet``."""
    if file.startswith("<"):  # <frozen importlib._bootstrap>, or what dataclasses write: <string>
        return file.strip("<>").replace("string", "generated")
    path = Path(file)
    parts = list(path.with_suffix("").parts)
    for home in ("site-packages", *(part for part in parts if part.startswith("python3."))):
        if home in parts:
            return ".".join(parts[parts.index(home) + 1 :])
    for top in ("moqt", "kvcs"):
        if top in parts:
            return ".".join(parts[len(parts) - 1 - parts[::-1].index(top) :])
    return path.stem


def _sampled(out: Path, program: str | Path) -> list[str]:
    return [sys.executable, str(SAMPLER), str(out), str(program)]


def _samples(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ProfileFailed(f"{path.name} has no samples: {exc}") from None
    return found


def _run(command: list[Any], checkout: Path | None = None) -> dict[str, Any]:
    """Run a program that prints one JSON object, and return it."""
    try:
        done = subprocess.run(
            _flat(command), env=_environment(checkout), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProfileFailed(f"it did not end within {LIMIT_S:g} s") from None
    if done.returncode:
        raise ProfileFailed((done.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _process(command: list[Any], checkout: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        _flat(command), env=_environment(checkout), stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        except subprocess.TimeoutExpired:
            raise ProfileFailed("the producer did not end when it was told to") from None
        finally:
            started.kill()


def _event(started: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Return the next event of a name."""
    assert started.stdout is not None
    patience = threading.Timer(_START_S, started.kill)  # which ends its output
    patience.start()
    try:
        for line in started.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
    finally:
        patience.cancel()
    raise ProfileFailed(f"the producer ended before it was {name}, or took over {_START_S:g} s")


def _flat(command: list[Any]) -> list[str]:
    return [word for part in command for word in (part if isinstance(part, list) else [part])]


def _environment(checkout: Path | None) -> Mapping[str, str]:
    return os.environ | ({} if checkout is None else {"PYTHONPATH": str(checkout)})
