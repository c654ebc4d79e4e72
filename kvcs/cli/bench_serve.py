"""``kvcs bench --serve``: a throwaway producer, and what the other end needs."""

import asyncio
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.cli.bench_cache import BenchCache
from kvcs.cli.output import Output
from kvcs.config import Address, BenchSettings
from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.lifecycle import run_until_stopped
from kvcs.link import quic_settings
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.segment import Encoding
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.claims import Claims
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.issuers import IssuerKey, Issuers
from kvcs.trust.keyfiles import write_new_secret
from kvcs.trust.keys import default_kid
from kvcs.trust.policy import Policy
from kvcs.trust.scope import SUITES, Protection, Scope
from kvcs.trust.tokenfile import token_to_text
from kvcs.trust.tokens import SigningKey, issue
from moqt.aio import MoqtConnection, ServerTls
from moqt.aio.tls import CertificateFiles, make_certificates

#: Seconds after which it ends by itself: nobody means to leave it running.
SERVE_S = 3600.0
#: How often an engine is asked for figures that it does not have at hand.
_LOOK_S = 0.2
#: Seconds that sessions have to end.
_DRAIN_S = 0.2
#: What the other end needs: whom to believe, the key of the scope, and a token to show.
OTHER_END = ("ca.pem", "scope.key", "token")
#: What this end is called in the token. Both are gone before anybody else could be called so.
_AUDIENCE = "moqt://kvcs-bench"
#: A documentation address (RFC 5737): nothing is ever sent there.
_SOMEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True, slots=True)
class Keys:
    """Files made for the occasion."""

    certificates: CertificateFiles
    for_the_other_end: Path
    """A folder with what the other end needs, and nothing else: :data:`OTHER_END`."""

    scope_key: ScopeKey
    issuer: IssuerKey
    """Of the token that the other end shows."""

    @classmethod
    def make(cls, folder: Path, names: Sequence[str]) -> "Keys":
        """Make a certificate for these names, a scope key, and a token to retrieve with.

        Raises:
            ConfigError: If the folder cannot be written to, or has such files already.
        """
        other_end = folder / "other-end"
        if found := sorted(path.name for path in folder.glob("*.pem")):
            raise ConfigError(
                f"--files {folder}: has {found[0]} already, expected a folder to fill"
            )
        try:
            other_end.mkdir(mode=0o700, parents=True)
            certificates = make_certificates(folder, names)
            (other_end / "ca.pem").write_bytes(certificates.ca_file.read_bytes())
        except OSError as exc:
            raise ConfigError(f"--files {folder}: {exc.filename}: {exc.strerror or exc}") from None
        scope_key = ScopeKey.generate()
        scope_key.to_file(other_end / "scope.key")
        private = Ed25519PrivateKey.generate()
        signing = SigningKey("kvcs bench", default_kid(private.public_key()), private)
        now = int(time.time())
        token = issue(
            Claims(
                issuer=signing.issuer,
                audience=(_AUDIENCE,),
                expires_at=now + SERVE_S,
                issued_at=now,
                permissions=permissions_of(Role.CONSUMER, [scope_key.scope_id]),
            ),
            signing,
        )
        text = token_to_text(token).encode() + b"\n"
        write_new_secret(other_end / "token", text, what="token file")
        return cls(certificates, other_end, scope_key, signing.verifier)


async def serve(
    cache: BenchCache,
    settings: BenchSettings,
    *,
    names: Sequence[str],
    files: Path | None,
    output: Output,
) -> None:
    """Serve a cache until told to stop, an hour at most; tell what each session was served.

    Args:
        cache: What is served.
        settings: Where to listen, and how.
        names: Names and addresses that this machine is reached by; found out if there are none.
        files: Where certificate and key go; a folder that is removed at the end if left out.
        output: Where it is told.

    Raises:
        ConfigError: If something given cannot be used.
    """
    if settings.listen is None:
        raise ConfigError(
            "listen is not set, expected an address that the other end reaches, such as "
            "--listen :4443"
        )
    if files is not None:
        await _serve(cache, settings, names, files, output)
        return
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        await _serve(cache, settings, names, Path(folder), output)


async def _serve(
    cache: BenchCache,
    settings: BenchSettings,
    names: Sequence[str],
    folder: Path,
    output: Output,
) -> None:
    assert settings.listen is not None, "serve() has looked"
    protection = settings.load_protection()
    reached_by = list(names) or own_names(settings.listen.host)
    keys = Keys.make(folder, list(dict.fromkeys((*reached_by, "localhost", "127.0.0.1"))))
    options = ProducerOptions(
        encodings=(Encoding(cache.codec.name),),
        store_octets=2 * cache.octets + (64 << 20),
        ttl_s=2 * SERVE_S,
        drain_s=_DRAIN_S,
    )

    async def job(stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as sessions:

            def opened(connection: MoqtConnection) -> None:
                sessions.create_task(_watch(connection, settings, output))

            async with Producer(Scope(keys.scope_key, protection), options) as producer:
                await producer.publish(cache.source())
                assert settings.listen is not None
                certificates = keys.certificates
                host, port = await producer.listen(
                    *settings.listen,
                    tls=ServerTls(certificates.certificate_file, certificates.key_file),
                    quic=quic_settings(settings),
                    on_connection=opened,
                    authority=TokenAuthority(Policy(Issuers([keys.issuer])), [_AUDIENCE]),
                )
                command = other_end_command(
                    cache, reached_by[0], port, keys.for_the_other_end, protection
                )
                output.tell(
                    "listening",
                    host=host,
                    port=port,
                    files=str(keys.for_the_other_end),
                    command=command if output.as_json else None,
                    cpu_s=round(time.process_time(), 3),
                )
                if not output.as_json:
                    _explain(command, reached_by[0], keys.for_the_other_end)
                with suppress(TimeoutError):
                    async with asyncio.timeout(SERVE_S):
                        await stopping.wait()

    await run_until_stopped(job, grace=_DRAIN_S + 5.0)


async def _watch(connection: MoqtConnection, settings: BenchSettings, output: Output) -> None:
    """Tell what a session cost once it is over."""
    while connection.closed is None:
        connection.stats()  # some engines then have a look, and tell the next time
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await connection.wait_closed()
    stats = connection.stats()
    output.tell(
        "served",
        peer=str(Address(*connection.peer_address)),
        datagrams=stats.packets_sent,
        lost=stats.packets_lost,
        datagram_octets=stats.datagram_octets or settings.max_datagram_octets,
        rtt_ms=round(stats.smoothed_rtt_s * 1e3, 3),
        cpu_s=round(time.process_time(), 3),
    )


def own_names(host: str) -> list[str]:
    """Return what the other end may call this machine: the address listened on, if it is one.

    Where every address is listened on: the one that a packet to far away would leave from, and
    the host name. Asks nobody.
    """
    if host not in ("::", "0.0.0.0"):
        return [host]
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        found.append(str(probe.getsockname()[0]))
    return [*found, socket.gethostname() or "localhost"]


def other_end_command(
    cache: BenchCache, host: str, port: int, folder: Path, protection: Protection | None = None
) -> str:
    """Return the line to run at the other end, where the files have been copied to ``folder``."""
    words = (
        "kvcs", "bench", f"moqt://{Address(host, port)}/",
        "--ca-file", str(folder / "ca.pem"), "--scope-key-file", str(folder / "scope.key"),
        "--token-file", str(folder / "token"), *cache.flags(),
    )  # fmt: skip
    if protection is not None:
        [suite] = [name for name, suite in SUITES.items() if suite is protection.suite]
        words += ("--sealing", "sealed", "--suite", suite, "--padding", protection.padding)
    return shlex.join(words)


def _explain(command: str, host: str, folder: Path) -> None:
    """Tell a person what to do at the other end."""
    copied = command.replace(str(folder), "kvcs-bench")
    print(
        f"At the other end, with {len(OTHER_END)} throwaway files from here, which are good for "
        f"this run alone:\n\n"
        f"  scp -pr {shlex.quote(f'{host}:{folder}')} kvcs-bench && {copied}\n\n"
        f"Each session is told below. It ends with Ctrl-C, or after {SERVE_S / 60:.0f} minutes.",
        file=sys.stderr,
        flush=True,
    )
