"""A subscriber made of aiomoqt; run with the Python of its environment.

It subscribes to one Track with Next Object and a fill from {0, 0}, and prints what comes as JSON
lines: ``subscribed``, one ``object`` for each Object, ``filled``, ``done`` for PUBLISH_DONE, and
``end`` once every stream that was counted there has ended. Namespaces and names are given in
hexadecimal, which the peer's own tools cannot do.

The library drops a fill whose first octets are overtaken by PUBLISH_DONE, which the draft allows
to happen. So a Track should not end while its fill is only beginning.
"""

import argparse
import asyncio
import hashlib
import json
from typing import Any
from urllib.parse import urlsplit

# Only the peer's environment has these.
from aiomoqt.client import MOQTClient  # type: ignore[import-not-found, unused-ignore]
from aiomoqt.messages.params import (  # type: ignore[import-not-found, unused-ignore]
    D20ParamType,
    LocationFilter,
)
from aiomoqt.types import FilterType, ParamType  # type: ignore[import-not-found, unused-ignore]


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def tell_object(via: str, group: int, message: Any) -> None:
    payload = bytes(message.payload or b"")
    tell(
        "object",
        via=via,
        group=group,
        object=message.object_id,
        status=int(message.status),
        priority=message.publisher_priority,
        octets=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )


async def subscribe(session: Any, namespace: tuple[bytes, ...], track: bytes) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    ended: asyncio.Queue[bool] = asyncio.Queue()
    session.on_fetch_object = lambda message, *_: tell_object("fill", message.group_id, message)
    accepted = await session.subscribe(
        namespace,
        track,
        filter_type=FilterType.LATEST_OBJECT,  # Next Object, as the draft calls it now
        parameters={
            D20ParamType.FILL_PARAMETERS: {ParamType.LOCATION_FILTER: LocationFilter.absolute(0, 0)}
        },
        on_object=lambda message, _size, _time, group, _subgroup: tell_object(
            "live", group, message
        ),
        on_done=done.set_result,
        wait_response=True,
    )
    session.register_stream_end_handler(
        accepted.track_alias,
        lambda _group, _subgroup, *, clean, **_: ended.put_nowait(clean),
    )
    exists = accepted.largest_group_id is not None
    tell(
        "subscribed",
        largest=[accepted.largest_group_id, accepted.largest_object_id] if exists else None,
    )
    filled = await session.await_fetch_done(accepted.request_id, timeout=60)
    tell("filled", complete=filled)
    message = await done
    tell(
        "done",
        status=int(message.status_code),
        streams=message.stream_count,
        reason=str(message.reason),
    )
    clean = [await ended.get() for _ in range(message.stream_count - (1 if exists else 0))]
    tell("end", streams=len(clean), clean=all(clean))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("ca_file")
    parser.add_argument("namespace", help="fields in hexadecimal, joined by /")
    parser.add_argument("track", help="in hexadecimal")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for all of it")
    arguments = parser.parse_args()
    target = urlsplit(arguments.uri)
    namespace = tuple(bytes.fromhex(field) for field in arguments.namespace.split("/"))
    client = MOQTClient(
        target.hostname,
        target.port,
        path=target.path,
        use_quic=True,
        ca_file=arguments.ca_file,
        supported_drafts=22,
        keep_alive_interval=5,
    )
    async with asyncio.timeout(arguments.timeout), client.connect() as session:
        await session.client_session_init()
        await subscribe(session, namespace, bytes.fromhex(arguments.track))


if __name__ == "__main__":
    asyncio.run(main())
