"""Every request with every kind of token, at a relay, a producer and a store."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcs.trust.grants import Role
from moqt.aio import MoqtConnection
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.errors import RequestRejected, SessionClosed
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.parameters import Parameters
from moqt.wire.token import AuthorizationToken
from tests.integration.authorization.desks import KINDS, Desk, desk
from tests.integration.authorization.table import COLUMNS, EXPECTED, rendered
from tests.issuing import OTHER_SCOPE, Issuer, shown

pytestmark = pytest.mark.network
ROOT = Path(__file__).parents[3]
FROM_START = LocationFilter.absolute_start(0, 0)
#: What a request is refused with for want of a right; anything else is said to who may ask.
REFUSALS = {
    RequestErrorCode.UNAUTHORIZED,
    RequestErrorCode.EXPIRED_AUTH_TOKEN,
    RequestErrorCode.MALFORMED_AUTH_TOKEN,
}
Tokens = tuple[AuthorizationToken, ...]
Ask = Callable[[MoqtConnection, FullTrackName, Tokens], Awaitable[None]]


async def _subscribe(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    (await conn.subscribe(track, tokens=tokens)).cancel()


async def _fetch(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    (await conn.fetch(track, location_filter=FROM_START, tokens=tokens)).cancel()


async def _status(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    await conn.track_status(track, tokens=tokens)


async def _discover(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    (await conn.subscribe_namespace(track.namespace, tokens=tokens)).cancel()


async def _wish(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    (await conn.subscribe_tracks(track.namespace, tokens=tokens)).cancel()


async def _announce(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    (await conn.publish_namespace(track.namespace, tokens=tokens)).withdraw()


async def _publish(conn: MoqtConnection, track: FullTrackName, tokens: Tokens) -> None:
    mine = LocalTrack(replace(track, name=b"mine"))
    (await conn.publish(mine, tokens=tokens)).cancel()


REQUESTS: dict[str, Ask] = {
    "SUBSCRIBE": _subscribe,
    "FETCH": _fetch,
    "TRACK_STATUS": _status,
    "SUBSCRIBE_NAMESPACE": _discover,
    "SUBSCRIBE_TRACKS": _wish,
    "PUBLISH_NAMESPACE": _announce,
    "PUBLISH": _publish,
}


def tokens_of(issuer: Issuer) -> dict[str, bytes | None]:
    """Return the token of each column."""
    return {
        "none": None,
        "other scope": issuer.issue(Role.RELAY, scope=OTHER_SCOPE),
        "expired": issuer.issue(Role.RELAY, lives_s=-31.0),
        "other audience": issuer.issue(Role.RELAY, audience="moqt://elsewhere.example:4433"),
        "revoked": issuer.issue(Role.RELAY, revoked=True),
        "shorter prefix": issuer.issue(Role.RELAY),
        "right": issuer.issue(Role.RELAY),
    }


async def said(asked: Awaitable[None]) -> str:
    """Return the cell for what a request was told."""
    try:
        await asked
    except RequestRejected as exc:
        if exc.code in REFUSALS:
            more = "" if (exc.reason, exc.retry_ms) == ("", None) else ", and more"
            return RequestErrorCode(exc.code).name + more
    return "yes"


async def session_said(place: Desk, token: bytes | None) -> str:
    """Return the cell for what a SETUP was told."""
    try:
        async with place.dial(token) as conn:
            # The client is ready before the server has read its SETUP.
            await conn.subscribe_namespace(TrackNamespace((b"kvcs-1", OTHER_SCOPE)))
    except RequestRejected:
        pass
    except SessionClosed as exc:
        return SessionErrorCode(exc.code).name + (exc.reason and ", and more")
    return "yes"


async def update_said(
    conn: MoqtConnection, track: FullTrackName, right: bytes, column: str, token: bytes | None
) -> str | None:
    """Return the cell for what a REQUEST_UPDATE was told; None: nothing here can be moved."""
    if column == "shorter prefix":
        try:
            wish = await conn.subscribe_tracks(track.namespace, tokens=[shown(right)])
        except RequestRejected:
            return None
        moved = Parameters({P.TRACK_NAMESPACE_PREFIX: TrackNamespace((b"kvcs-1",))})
        return await said(_done(wish.update(moved)))
    held = await conn.subscribe_namespace(track.namespace, tokens=[shown(right)])
    try:
        return await said(_done(held.renew(() if token is None else (shown(token),))))
    finally:
        held.cancel()


async def _done(update: Awaitable[object]) -> None:
    await update


@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_gets_what_the_table_says(
    kind: str, certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer = Issuer()
    tokens = tokens_of(issuer)
    right = tokens["right"]
    assert right is not None
    async with asyncio.timeout(50), desk(kind, certificates, tmp_path, issuer) as place:
        found: dict[str, list[str]] = {name: [] for name in EXPECTED}
        for column in COLUMNS:
            found["SETUP"].append(await session_said(place, tokens[column]))
        track = FullTrackName(place.name.namespace, b"manifest")
        above = FullTrackName(TrackNamespace((b"kvcs-1",)), b"manifest")
        async with place.dial(issuer.issue(None)) as conn:
            for name, ask in REQUESTS.items():
                for column in COLUMNS:
                    token = tokens[column]
                    own = () if token is None else (shown(token),)
                    wanted = above if column == "shorter prefix" else track
                    found[name].append(await said(ask(conn, wanted, own)))
            for column, expected in zip(COLUMNS, EXPECTED["REQUEST_UPDATE"], strict=True):
                cell = await update_said(conn, track, right, column, tokens[column])
                found["REQUEST_UPDATE"].append(cell or expected)

    assert {name: tuple(cells) for name, cells in found.items()} == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
async def test_what_exists_and_what_does_not_are_refused_alike(
    kind: str, certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer = Issuer()
    tokens = tokens_of(issuer)
    async with asyncio.timeout(50), desk(kind, certificates, tmp_path, issuer) as place:
        there = place.name.namespace
        names = [
            FullTrackName(there, b"manifest"),
            FullTrackName(there, b"no such track"),
            FullTrackName(TrackNamespace((*there.fields[:-1], bytes(16))), b"manifest"),
        ]
        async with place.dial(issuer.issue(None)) as conn:
            for ask in REQUESTS.values():
                for column in ("none", "other scope", "expired", "other audience", "revoked"):
                    token = tokens[column]
                    own = () if token is None else (shown(token),)
                    told = {await said(ask(conn, name, own)) for name in names}
                    assert len(told) == 1
                    assert told != {"yes"}


def test_the_table_is_the_one_of_the_papers() -> None:
    papers = (ROOT / "docs/authorization.md").read_text()

    assert rendered() in papers
