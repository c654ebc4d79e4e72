"""Producers, a relay and a store under attack, and a consumer that wants nothing but its cache.

``python -m tests.attack.siege --seconds 120`` runs it and prints what came of it: how fast the
consumer was with and without the attacker, how much memory each target took on, which answers the
attacker got that are documented nowhere, and what the targets logged that nobody should see.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.consumer.retrieval import ConnectionSpec, consume
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.naming import PROFILE
from kvcs.store.sink import ArraySink
from kvcs.store.source import SyntheticSource
from kvcs.trust.claims import Claims
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.keys import default_kid
from kvcs.trust.tokens import CAT_TOKEN_TYPE, SigningKey, issue
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.session.config import SessionConfig
from moqt.wire.token import AuthorizationToken
from tests.attack.attacks import ATTACKS, undocumented

MIB = 1 << 20
#: What of its speed the consumer keeps, and what a target may take on beyond its limits.
WANTED_SPEED, MEMORY_BEYOND = 0.70, 64 * MIB
#: Limits of the targets, so that what an attacker can fill is small and known.
CONNECTIONS, WINDOW, CACHE = 32, 1 * MIB, 64 * MIB
SHAPE, TOKENS = "8,4,64", 512
SCOPE = ScopeKey(bytes(range(32)))
#: Whom to attack: a producer, a relay, a store, and a producer that asks everybody for a token.
TARGETS = ("producer", "relay", "store", "guarded")
AUDIENCE = "moqt://siege"


@dataclass
class Report:
    """What came of it, for one target."""

    target: str
    seconds: float
    calm_mb_per_s: float = 0.0
    attacked_mb_per_s: float = 0.0
    retrievals: int = 0
    failed: list[str] = field(default_factory=list)
    memory_calm_mib: float = 0.0
    memory_peak_mib: float = 0.0
    memory_allowed_mib: float = 0.0
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    undocumented: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """What the consumer kept of its speed."""
        return self.attacked_mb_per_s / self.calm_mb_per_s if self.calm_mb_per_s else 0.0

    @property
    def findings(self) -> list[str]:
        """What is not as it should be, speed aside, which says more of a busy machine."""
        found = [*self.failed, *self.crashes, *(f"undocumented: {u}" for u in self.undocumented)]
        if self.memory_peak_mib > self.memory_allowed_mib:
            found.append(
                f"{self.memory_peak_mib:.0f} MiB, allowed are {self.memory_allowed_mib:.0f}"
            )
        return found


class Process:
    """A command of kvcs that is attacked."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.log: list[str] = []
        assert process.stderr is not None
        self._reading = asyncio.create_task(self._read(process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.log.append(line.decode(errors="replace"))

    @property
    def memory(self) -> int:
        """Octets that it occupies."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10

    @property
    def failures(self) -> list[str]:
        """What it logged that nobody may cause from outside."""
        wrong = ("Traceback", "receiver failed", "QUIC engine failed", '"level": "error"')
        found = [line.strip()[:300] for line in self.log if any(w in line for w in wrong)]
        if self.process.returncode is not None:
            found.append(f"ended with status {self.process.returncode}")
        return found


@asynccontextmanager
async def running(folder: Path, *command: str) -> AsyncIterator[Process]:
    """Run a command of kvcs until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvcs", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 22, cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port, wanted = 0, {"listening"}
        if command[0] == "produce":
            wanted.add("publication-finished")
        if command[0] == "store":
            wanted.add("publication-kept")
        async with asyncio.timeout(60):
            while wanted:
                line = await process.stdout.readline()
                if not line:
                    assert process.stderr is not None
                    raise RuntimeError((await process.stderr.read()).decode())
                event = json.loads(line)
                wanted.discard(event["event"])
                port = event["port"] if event["event"] == "listening" else port
        yield Process(process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def limits() -> list[str]:
    """Return the flags that make the limits of a target small."""
    return [
        "--max-connections-of-peer", str(CONNECTIONS), "--max-requests-of-peer", "1024",
        "--max-requests-per-s", "200", "--max-requests-per-s-of-peer", "400",
        "--connection-window", str(WINDOW), "--stream-window", str(WINDOW // 4),
        "--max-unread-octets", str(WINDOW),
    ]  # fmt: skip


class Consumer:
    """Retrieves the same cache again and again, and takes the time."""

    def __init__(self, spec: ConnectionSpec, source: SyntheticSource) -> None:
        self._spec = spec
        self._expected = Expectations.of_tokens(SCOPE, source.descriptor, source.tokens)
        self.failed: list[str] = []
        self.retrievals = 0

    async def speed(self, seconds: float) -> float:
        """Return the megabytes a second that came, over all retrievals of so many seconds."""
        octets, took, until = 0, 0.0, time.monotonic() + seconds
        while time.monotonic() < until or not octets:
            began = time.monotonic()
            sink = ArraySink()
            try:
                async with asyncio.timeout(60):
                    async with consume(self._expected, [self._spec], sink) as retrieval:
                        await retrieval.result()
            except Exception as exc:  # whatever it is, it is what the attacker has done
                self.failed.append(f"{type(exc).__name__}: {exc}"[:300])
                if len(self.failed) > 20:
                    break
            else:
                octets += sum(array.nbytes for array in (*sink.k, *sink.v))
            self.retrievals += 1
            took += time.monotonic() - began
        return octets / took / 1e6 if took else 0.0


class Guard:
    """An issuer, and what it has given to the consumer and to the attacker."""

    def __init__(self, folder: Path) -> None:
        private = Ed25519PrivateKey.generate()
        self._key = SigningKey("siege", default_kid(private.public_key()), private)
        self.issuers_file = folder / "issuers.toml"
        self.issuers_file.write_text(
            f'[[issuers]]\nissuer = "siege"\n'
            f'public_key = "{private.public_key().public_bytes_raw().hex()}"\n'
        )
        self.of_consumer = self._token(SCOPE.scope_id)
        self.of_attacker = self._token(bytes(32))

    def _token(self, scope_id: bytes) -> AuthorizationToken:
        claims = Claims(
            issuer=self._key.issuer,
            audience=(AUDIENCE,),
            expires_at=time.time() + 3600,
            permissions=permissions_of(Role.CONSUMER, [scope_id]),
        )
        return AuthorizationToken.use_value(CAT_TOKEN_TYPE, issue(claims, self._key))


async def besieged(
    where: str,
    target: Process,
    spec: ConnectionSpec,
    files: CertificateFiles,
    seconds: float,
    attacks: Sequence[str],
    guard: Guard,
) -> Report:
    """Attack one target beside a consumer; return what came of it."""
    report = Report(where, seconds)
    source = SyntheticSource.of_model(SHAPE, TOKENS)
    consumer = Consumer(spec, source)
    await consumer.speed(min(1.0, seconds / 8))  # caches are warm from here on
    before = await consumer.speed(seconds / 4)
    report.memory_calm_mib = target.memory / MIB
    options = {
        "host": "127.0.0.1",
        "port": target.port,
        "ca_file": str(files.ca_file),
        "prefix": [PROFILE.hex(), SCOPE.scope_id.hex()],
        "seconds": seconds,
        "attacks": list(attacks),
        "token": guard.of_attacker.value.hex() if where == "guarded" else None,
    }
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.attack.attacker", json.dumps(options),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            with contextlib.suppress(OSError, ValueError):
                peak = max(peak, target.memory)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    try:
        report.attacked_mb_per_s = await consumer.speed(seconds)
        async with asyncio.timeout(60):
            out, _ = await attacker.communicate()
    finally:
        watching.cancel()
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    if attacker.returncode:
        report.crashes.append(f"the attacker ended with status {attacker.returncode}")
    else:
        report.answers = json.loads(out)
    after = await consumer.speed(seconds / 4)
    report.calm_mb_per_s = (before + after) / 2
    report.retrievals, report.failed = consumer.retrievals, consumer.failed
    report.memory_peak_mib = peak / MIB
    # What an attacker may fill: windows and answers of its connections, and at a relay the cache.
    own = CONNECTIONS * 2 * WINDOW + (CACHE if where == "relay" else 0)
    report.memory_allowed_mib = report.memory_calm_mib + (own + MEMORY_BEYOND) / MIB
    report.undocumented = sorted(
        f"{attack}: {answer}"
        for attack, answers in report.answers.items()
        for answer in answers
        if undocumented(attack, answer, where)
    )
    report.crashes += target.failures
    return report


@asynccontextmanager
async def at_work(folder: Path, files: CertificateFiles) -> AsyncIterator[dict[str, Process]]:
    """Run everything that can be attacked, with one cache at each."""
    key = folder / "scope.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    listen = [
        "--json", "--log-format", "json", "--listen", "127.0.0.1:0",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
        *limits(),
    ]  # fmt: skip
    cache = ["--synthetic", SHAPE, "--tokens", str(TOKENS), "--scope-key-file", str(key)]
    issuers = ["--issuers-file", str(folder / "issuers.toml"), "--audience", AUDIENCE]
    async with running(folder, "relay", *listen, "--cache-octets", str(CACHE)) as relay:
        reached = ["--ca-file", str(files.ca_file), "--connect", f"moqt://127.0.0.1:{relay.port}/"]
        async with (
            running(folder, "produce", *listen, *cache, *reached) as producer,
            running(folder, "store", "kept", *listen, *reached, *cache[-2:]) as store,
            running(folder, "produce", *listen, *cache, *issuers) as guarded,
        ):  # fmt: skip
            yield {"producer": producer, "relay": relay, "store": store, "guarded": guarded}


async def siege(
    seconds: float, where: Sequence[str], attacks: Sequence[str], folder: Path
) -> list[Report]:
    """Attack one target after the other."""
    files = make_certificates(folder)
    guard = Guard(folder)
    tls = ClientTls(ca_file=files.ca_file)
    config = SessionConfig(tokens=lambda: (guard.of_consumer,))
    reports = []
    async with at_work(folder, files) as targets:
        for name in where:
            target = targets[name]
            spec = ConnectionSpec(uri=f"moqt://127.0.0.1:{target.port}/", tls=tls, config=config)
            reports.append(await besieged(name, target, spec, files, seconds, attacks, guard))
    return reports


def main() -> int:
    """Run it from the command line; the status is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--attack", choices=sorted(ATTACKS), action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        reports = asyncio.run(
            siege(
                args.seconds,
                args.target or TARGETS,
                args.attack or sorted(ATTACKS),
                Path(folder),
            )
        )
    for report in reports:
        if args.json:
            print(json.dumps({**asdict(report), "kept": report.kept}))
            continue
        print(
            f"{report.target}: {report.attacked_mb_per_s:.1f} MB/s under attack, "
            f"{report.calm_mb_per_s:.1f} without: {report.kept:.0%} (wanted: {WANTED_SPEED:.0%}); "
            f"{report.memory_calm_mib:.0f} MiB, at most {report.memory_peak_mib:.0f} under attack "
            f"(allowed: {report.memory_allowed_mib:.0f})"
        )
        for attack, answers in report.answers.items():
            print(f"  {attack}: {', '.join(f'{a} {n}' for a, n in answers.items())}")
        for finding in report.findings:
            print(f"  FOUND {finding}")
    slow = [r for r in reports if r.kept < WANTED_SPEED]
    return 1 if slow or any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
