"""What ``peer_subscriber.py`` receives, as a test sees it."""

import json
from pathlib import Path
from typing import Any

from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus
from moqt.location import Location
from moqt.names import FullTrackName
from tests.interop.conftest import StartPeer
from tests.interop.peer import PeerProcess

SUBSCRIBER = Path(__file__).with_name("peer_subscriber.py")


class Taken:
    """A subscription made with the peer's library; the script tells events as JSON lines."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        start_peer: StartPeer,
        uri: str,
        certificates: CertificateFiles,
        track: FullTrackName,
    ) -> "Taken":
        """Subscribe to ``track`` with Next Object and a fill from the start."""
        fields = "/".join(field.hex() for field in track.namespace.fields)
        arguments = (SUBSCRIBER, uri, certificates.ca_file, fields, track.name.hex())
        return cls(start_peer("python", *arguments))

    async def event(self, kind: str) -> dict[str, Any]:
        """Return the first event of a kind, once it has been told."""
        return _event(await self._process.line(f'{{"event": "{kind}"'))

    async def finish(self) -> None:
        """Return when the script has had everything it waits for."""
        assert await self._process.exit_status(60) == 0, self._process.output

    def objects(self) -> dict[Location, dict[str, Any]]:
        """The Objects that are no statuses. None may come twice."""
        return {at: o for at, o in self._all().items() if o["status"] == ObjectStatus.NORMAL}

    def ends(self) -> dict[Location, int]:
        """The statuses."""
        return {
            at: o["status"] for at, o in self._all().items() if o["status"] != ObjectStatus.NORMAL
        }

    def _all(self) -> dict[Location, dict[str, Any]]:
        found: dict[Location, dict[str, Any]] = {}
        for line in self._process.lines:
            if line.startswith('{"event": "object"'):
                event = _event(line)
                at = Location(event["group"], event["object"])
                assert at not in found, f"{at} came twice"
                found[at] = event
        return found


def _event(line: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    return event
