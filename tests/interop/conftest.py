"""The peer, installed and started; skips with a reason where it cannot be had."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moqt.aio.tls import CertificateFiles, make_certificates
from tests.interop.peer import PeerProcess, PeerUnavailable, free_port, install

CHECKOUT = Path(__file__).parents[2]

StartPeer = Callable[..., PeerProcess]


@dataclass(frozen=True, slots=True)
class Relay:
    """The peer's relay, listening."""

    uri: str
    process: PeerProcess


@pytest.fixture(scope="session")
def peer_commands() -> Path:
    """The folder of the peer's commands, its ``python`` among them."""
    try:
        return install(CHECKOUT / ".venv-peer")
    except PeerUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def start_peer(peer_commands: Path, tmp_path: Path) -> Iterator[StartPeer]:
    """Start commands of the peer by name; what still runs after the test is ended."""
    with _started_from(peer_commands, tmp_path) as start:
        yield start


@pytest.fixture
def start_ours(tmp_path: Path) -> Iterator[StartPeer]:
    """Start commands of ours by name, as :func:`start_peer` does."""
    with _started_from(Path(sys.executable).parent, tmp_path) as start:
        yield start


@contextmanager
def _started_from(commands: Path, folder: Path) -> Iterator[StartPeer]:
    with ExitStack() as running:

        def start(name: str, *arguments: str | Path) -> PeerProcess:
            process = PeerProcess(commands / name, *arguments, folder=folder)
            running.callback(process.stop)
            return process

        yield start


@pytest.fixture(scope="session")
def relay(
    peer_commands: Path, certificates: CertificateFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """One relay for all tests: each has namespaces of its own."""
    with _started_from(peer_commands, tmp_path_factory.mktemp("relay")) as start:
        yield start_relay(start, certificates)


def start_relay(start_peer: StartPeer, certificates: CertificateFiles) -> Relay:
    """Start a relay of the peer's; return when it listens."""
    port = free_port()
    process = start_peer(
        "moq-interop-relay",
        *("--port", str(port), "--quic", "--draft", "22"),
        *("--cert", certificates.certificate_file, "--key", certificates.key_file),
        # Objects larger than its ring vanish without an error, and the default is 1 MiB.
        *("--stream-ring-cap", str(16 << 20), "--max-inflight-bytes", str(8 << 20)),
    )
    process.wait_for_line(f"UDP port {port}")
    return Relay(f"moqt://127.0.0.1:{port}/", process)
