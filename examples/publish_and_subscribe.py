"""Publish Objects on a Track and receive each exactly once, in one process over loopback.

Run it as it is: it makes its own certificate. The subscriber joins when half of the Objects have
been published: those it missed come on the fill, the others live.
"""

import asyncio
import tempfile
from pathlib import Path

from moqt.aio import ClientTls, ServerTls, TrackPublisher, connect, serve
from moqt.aio.tls import make_certificates
from moqt.names import FullTrackName
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter

NAME = FullTrackName.of("example", "weather", "temperature")
HOURS = 24


async def publish(publisher: TrackPublisher, half: asyncio.Event, joined: asyncio.Event) -> None:
    """Publish one Group of hourly readings, and end the Track."""
    track = publisher.add(NAME, retain=True)
    day = track.open_subgroup(0, holds_end_of_group=True)
    for hour in range(HOURS):
        await publisher.publish(day, hour, f"{hour:02}:00 {10 + hour % 12} degrees".encode())
        if hour + 1 == HOURS // 2:
            half.set()
            await joined.wait()
    day.close()
    track.end()


async def main() -> list[str]:
    """Return what the subscriber received, in the order of the Objects."""
    half, joined = asyncio.Event(), asyncio.Event()
    publisher = TrackPublisher()
    received: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificates(Path(folder))
        tls = ServerTls(files.certificate_file, files.key_file)
        async with (
            asyncio.timeout(20),
            await serve("127.0.0.1", 0, tls=tls, handler=publisher) as server,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(publish(publisher, half, joined))
            await half.wait()
            uri = f"moqt://127.0.0.1:{server.address[1]}/"
            async with connect(uri, tls=ClientTls(ca_file=files.ca_file)) as connection:
                everything = LocationFilter.absolute_start(0, 0)
                subscription = await connection.subscribe(NAME, fill=everything)
                joined.set()
                async for event in subscription:
                    if isinstance(event, ObjectReceived):
                        print(event.via.value, event.location, event.payload.decode())
                        received[event.location.object] = event.payload.decode()
    return [received[hour] for hour in sorted(received)]


if __name__ == "__main__":
    asyncio.run(main())
