"""Tokens over real sessions: what runs ends with them, relays keep them, files are read again."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcs.cli.authorizing import Authorizing
from kvcs.config import Address, RelaySettings
from kvcs.consumer.events import Failed
from kvcs.consumer.retrieval import ConnectionSpec, consume
from kvcs.store.sink import ArraySink
from kvcs.trust.authority import RECHECK_S
from kvcs.trust.grants import Role
from kvcs.trust.watching import LOOK_S
from moqt.aio import ClientTls, MoqtConnection, ServerTls, connect
from moqt.aio.tls import CertificateFiles
from moqt.authority import Action, Authority, Bearer, Denied, Granted
from moqt.codepoints import PublishDoneCode, SessionErrorCode
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.server import Relay
from moqt.session.config import SessionConfig
from moqt.session.localtrack import LocalTrack
from tests.authorities import Pass, Showing, Table
from tests.integration.authorization.desks import closed_with, desk
from tests.integration.kvcs.scene import (
    QUICK,
    SCOPE,
    assert_same_cache,
    expectations,
    filled,
    on_stage,
    run,
)
from tests.issuing import AUDIENCE, Issuer, Shows

pytestmark = pytest.mark.network
PREFIX = TrackNamespace((b"kvcs-1", SCOPE.scope_id))
LIVE = FullTrackName(PREFIX, b"live")
#: Seconds that any one test may take, on a machine with other work.
PATIENCE_S = 45.0


@dataclass
class Noting(Table):
    """A table that can be waited on until somebody shows a token for something."""

    news: asyncio.Event = field(default_factory=asyncio.Event)

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        self.news.set()
        return super().decide(action, namespace, track, bearer, now)

    async def saw(self, value: bytes, action: Action) -> None:
        """Return when a token was shown for an action."""
        while not any(
            asked[0] is action and value in {t.value for t in bearer.tokens}
            for asked, bearer in zip(self.asked, self.bearers, strict=True)
        ):
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def relay_asking(
    authority: Authority | None, files: CertificateFiles
) -> AsyncIterator[tuple[Relay, str]]:
    """Have a relay listen that asks an authority."""
    async with Relay(authority=authority) as relay:
        tls = ServerTls(files.certificate_file, files.key_file)
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        yield relay, f"moqt://127.0.0.1:{port}/"


@asynccontextmanager
async def dialled(uri: str, files: CertificateFiles, token: bytes) -> AsyncIterator[MoqtConnection]:
    """Open a session that shows a token."""
    tls, config = ClientTls(ca_file=files.ca_file), SessionConfig(tokens=Shows(token))
    async with connect(uri, tls=tls, config=config, drain_s=0.2) as connection:
        yield connection


@contextmanager
def kept(task: "asyncio.Task[None]") -> Iterator[None]:
    """Let a task run while the block does."""
    try:
        yield
    finally:
        task.cancel()


async def test_a_cache_comes_through_a_relay_for_those_who_may_have_it_and_nobody_else(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer = Issuer()
    async with asyncio.timeout(PATIENCE_S), desk("relay", certificates, tmp_path, issuer) as place:
        sink = ArraySink()
        spec = place.spec(issuer.issue())
        events = await run(consume(expectations(), [spec], sink, settings=QUICK))
        assert not [event for event in events if isinstance(event, Failed)]
        assert_same_cache(sink)

        for token in (None, issuer.issue(audience="moqt://elsewhere.example:4433")):
            spec = place.spec(token)
            [*_, last] = await run(consume(expectations(), [spec], ArraySink(), settings=QUICK))
            assert isinstance(last, Failed)
            assert "the session was refused" in last.text


async def test_a_token_that_expires_ends_its_running_subscription(
    certificates: CertificateFiles,
) -> None:
    issuer = Issuer()
    authority = issuer.authority(leeway_s=0.0)
    async with (
        asyncio.timeout(PATIENCE_S),
        relay_asking(authority, certificates) as (_, uri),
        dialled(uri, certificates, issuer.issue(Role.PRODUCER)) as publisher,
        dialled(uri, certificates, issuer.issue(None)) as consumer,
    ):
        await publisher.publish(LocalTrack(LIVE))
        ends_at = time.time() + 2.0
        brief = issuer.issue(lives_s=2.0, recheck_s=1.0)
        subscription = await consumer.subscribe(LIVE, tokens=Shows(brief)())
        assert 0 < subscription.expires_ms <= 2000

        await subscription.finished.wait()
        late_s = time.time() - ends_at
        assert subscription.ended is not None
        assert subscription.ended.code == PublishDoneCode.EXPIRED
        print(f"ended {late_s:+.3f} s after its token, which is checked every second")
        assert late_s > -0.5
        assert consumer.closed is None


async def test_a_session_ends_with_its_token(certificates: CertificateFiles) -> None:
    issuer = Issuer()
    authority = issuer.authority(leeway_s=0.0)
    async with (
        asyncio.timeout(PATIENCE_S),
        relay_asking(authority, certificates) as (_, uri),
        dialled(uri, certificates, issuer.issue(lives_s=2.0, recheck_s=1.0)) as consumer,
    ):
        await consumer.subscribe_namespace(PREFIX)

        await consumer.wait_going_away()
        assert consumer.closed is None, "it is asked to leave first"
        assert await closed_with(consumer) == SessionErrorCode.EXPIRED_AUTH_TOKEN


async def test_a_token_that_is_revoked_in_the_file_ends_what_it_allowed(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer = Issuer()
    revocations = tmp_path / "revoked"
    revocations.write_text("# nobody yet\n")
    settings = RelaySettings(
        listen=Address("127.0.0.1", 0),
        certificate_file=certificates.certificate_file,
        key_file=certificates.key_file,
        issuers_file=issuer.issuers_file(tmp_path),
        revocations_file=revocations,
        audience=(AUDIENCE,),
    )
    relays: list[Relay] = []

    def ask_again() -> None:
        for relay in relays:
            relay.ask_again()

    authorizing = Authorizing(settings, ask_again)
    stopping = asyncio.Event()
    async with (
        asyncio.timeout(PATIENCE_S),
        relay_asking(authorizing.authority, certificates) as (relay, uri),
        dialled(uri, certificates, issuer.issue(Role.PRODUCER)) as publisher,
        dialled(uri, certificates, issuer.issue(None)) as consumer,
    ):
        relays.append(relay)
        with kept(asyncio.create_task(authorizing.keep(stopping))):
            await publisher.publish(LocalTrack(LIVE))
            token = issuer.issue(revoked=True)
            subscription = await consumer.subscribe(LIVE, tokens=Shows(token)())

            [token_id] = issuer.revoked
            revocations.write_text(f"cti {token_id.hex()}\n")
            began = time.monotonic()
            await subscription.finished.wait()
            print(f"ended {time.monotonic() - began:.3f} s after its token was revoked")
        assert subscription.ended is not None
        assert subscription.ended.code == PublishDoneCode.UNAUTHORIZED


def test_a_revocation_counts_within_five_seconds() -> None:
    assert LOOK_S + RECHECK_S < 5.0


async def test_a_relay_shows_its_own_token_to_its_upstream_and_never_a_clients(
    certificates: CertificateFiles,
) -> None:
    far = Noting({b"relay": Pass(prefix=PREFIX), b"producer": Pass(prefix=PREFIX)})
    near = Table({b"client": Pass(prefix=PREFIX)})
    tls = ClientTls(ca_file=certificates.ca_file)
    async with (
        asyncio.timeout(PATIENCE_S),
        relay_asking(far, certificates) as (_, far_uri),
        relay_asking(near, certificates) as (relay, near_uri),
        on_stage(certificates) as scene,
    ):
        relay.ask_at(far_uri, tls=tls, tokens=Showing(b"relay"), prefixes=[PREFIX])
        config = SessionConfig(tokens=Showing(b"producer"))
        link = scene.producer.announce_at(far_uri, tls=tls, config=config)
        await filled(scene.open())
        await link.wait_announced(10.0)
        config = SessionConfig(tokens=Showing(b"client"))
        scene.spec = ConnectionSpec(uri=near_uri, tls=tls, config=config)
        sink = ArraySink()
        events = await run(scene.retrieve(sink))

        assert not [event for event in events if isinstance(event, Failed)]
        assert_same_cache(sink)
        shown = {token.value for bearer in far.bearers for token in bearer.tokens}
        assert shown == {b"relay", b"producer"}
        assert {token.value for b in near.bearers for token in b.tokens} == {b"client"}
        assert (Action.SUBSCRIBE_NAMESPACE, PREFIX, None) in far.asked


async def test_a_producer_comes_back_with_the_next_token_before_its_own_ends(
    certificates: CertificateFiles,
) -> None:
    table = Noting(
        {
            b"first": Pass(prefix=PREFIX, expires_at=time.time() + 3.0),
            b"second": Pass(prefix=PREFIX),
        }
    )
    showing = Showing(b"first")
    async with (
        asyncio.timeout(PATIENCE_S),
        relay_asking(table, certificates) as (_, uri),
        on_stage(certificates) as scene,
    ):
        await filled(scene.open())
        link = scene.producer.announce_at(
            uri, tls=ClientTls(ca_file=certificates.ca_file), config=SessionConfig(tokens=showing)
        )
        await link.wait_announced(10.0)
        showing.values = (b"second",)

        await table.saw(b"second", Action.PUBLISH_NAMESPACE)
        await link.wait_announced(10.0)


@pytest.mark.parametrize("kind", ["producer", "store"])
async def test_they_ask_again_when_they_are_told_to(
    kind: str, certificates: CertificateFiles, tmp_path: Path
) -> None:
    table = Table({b"token": Pass(prefix=PREFIX)})
    async with (
        asyncio.timeout(PATIENCE_S),
        desk(kind, certificates, tmp_path, Issuer(), table) as place,
        place.dial(b"token") as consumer,
    ):
        found = await consumer.subscribe_namespace(PREFIX)
        table.passes[b"token"].revoked = True
        place.endpoint.ask_again()

        with suppress(StopAsyncIteration):
            while True:
                await anext(found)
        assert consumer.going_away is not None
        # It has nothing left to stay for.
        assert await closed_with(consumer) == SessionErrorCode.NO_ERROR
