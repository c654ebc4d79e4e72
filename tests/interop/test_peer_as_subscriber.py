"""The peer's clients, at servers of ours."""

import asyncio
import re

import pytest

from moqt.aio import RequestHandler, Server, ServerTls, serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.names import FullTrackName
from tests.interop.conftest import StartPeer
from tests.interop.peer import MARKS, PeerProcess
from tests.interop.published import Publisher, TrackMaker, binary_track, payload
from tests.interop.taken import Taken

pytestmark = MARKS


def uri(server: Server) -> str:
    return f"moqt://127.0.0.1:{server.address[1]}/"


async def serving(handler: RequestHandler, certificates: CertificateFiles) -> Server:
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    return await serve("127.0.0.1", 0, tls=tls, handler=handler)


@pytest.mark.parametrize("case", ["setup-only", "subscribe-error"])
async def test_its_interop_client_finds_nothing_to_tolerate_in_our_server(
    case: str, start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    async with await serving(RequestHandler(), certificates) as server:
        client = start_peer(
            "moq-interop-client",
            *("-r", uri(server), "--draft", "22", "--tls-disable-verify", "-t", case),
        )
        status = await client.exit_status(30)

    assert status == 0, client.output
    assert f"ok 1 - {case}" in client.lines
    assert "# COMPAT" not in client.output  # "tolerated, not right"


async def test_its_load_subscriber_counts_every_object_of_a_live_track(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    maker = TrackMaker(FullTrackName.of("kvtest", "live", "t0"), sizes=(300,) * 40)
    publisher = Publisher(maker.track)
    async with await serving(publisher, certificates) as server:
        client = start_peer(
            "moq-sub-bench",
            *(uri(server), "-k", "--draft", "22", "-N", "kvtest/live", "-T", "t0", "-t", "30"),
        )
        async with asyncio.timeout(30):
            await publisher.subscribes.get()
        maker.publish_groups(range(8), end_status=False)
        maker.end()
        status = await client.exit_status(40)

    assert status == 0, client.output
    assert _figure(client, "Groups") == 8
    assert _figure(client, "Objects") == len(maker.expected)
    assert _figure(client, "Lost") == 0
    assert _figure(client, "Out-of-order") == 0


def _figure(client: PeerProcess, name: str) -> int:
    found = re.search(rf"^\s*{name}:\s*([\d,]+)", client.output, re.MULTILINE)
    assert found, f"no {name}:\n{client.output}"
    return int(found[1].replace(",", ""))


async def test_a_subscriber_on_its_library_gets_every_object_of_a_track_with_a_binary_name(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    name = binary_track("counted", b"\x00k.raw/.\xff")
    maker = TrackMaker(name)
    maker.publish_groups(range(3))
    # Joining while an Object is being made: the fill has its beginning, and must bring its end.
    half = maker.track.open_subgroup(3, priority=3, holds_end_of_group=True)
    growing = half.begin(0, 50_000)
    data = payload(3, 0, 50_000)
    maker.expected[Location(3, 0)] = data
    half.extend(growing, data[:20_000])
    async with await serving(Publisher(maker.track), certificates) as server:
        taken = Taken.start(start_peer, uri(server), certificates, name)
        subscribed = await taken.event("subscribed")
        half.extend(growing, data[20_000:])
        half.publish(1, status=ObjectStatus.END_OF_GROUP)
        half.close()
        maker.publish_groups(range(4, 8))
        filled = await taken.event("filled")
        maker.end(end_status_group=8)
        await taken.finish()

    assert subscribed["largest"] == [3, 0]
    assert filled["complete"]
    objects = taken.objects()
    assert {at: o["sha256"] for at, o in objects.items()} == maker.digests
    assert {at.group for at, o in objects.items() if o["via"] == "fill"} == {0, 1, 2, 3}
    assert all(o["priority"] == at.group for at, o in objects.items())
    # Ends are Objects of the live part only: a fetch stream carries no statuses.
    assert taken.ends() == {
        Location(3, 1): ObjectStatus.END_OF_GROUP,
        **{Location(g, 5): ObjectStatus.END_OF_GROUP for g in range(4, 8)},
        Location(8, 0): ObjectStatus.END_OF_TRACK,
    }
    done = await taken.event("done")
    assert done["status"] == PublishDoneCode.TRACK_ENDED
    assert done["reason"] == "all was published"
    # The fill, the rest of Group 3, Groups 4 to 7, and the end.
    assert done["streams"] == 7
    assert (await taken.event("end")) == {"event": "end", "streams": 6, "clean": True}
