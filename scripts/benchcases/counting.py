"""What passes between a process and its connections, counted for the process as a whole.

Where it is counted, public methods are wrapped: a process is one end and nothing else.
"""

import asyncio

from kvcs.producer.handler import ServingHandler
from moqt.aio import MoqtConnection
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.session.events import PeerRequestEnded, RequestId, SubscribeReceived


class SentOctets:
    """Octets of streams handed to any connection; one that has to be sent again counts once."""

    def __init__(self) -> None:
        self.octets = 0
        send = AioquicTransport.send_stream_data

        def counting(
            transport: AioquicTransport, stream_id: int, data: bytes | memoryview, fin: bool = False
        ) -> None:
            self.octets += len(data)
            send(transport, stream_id, data, fin)

        AioquicTransport.send_stream_data = counting  # type: ignore[assignment,method-assign]


class Asked:
    """Subscriptions that a producer is asked for."""

    def __init__(self) -> None:
        self.subscriptions = 0
        self.open: set[tuple[MoqtConnection, RequestId]] = set()
        self.changed = asyncio.Event()
        received, ended = ServingHandler.subscribe_received, ServingHandler.request_ended
        closed = ServingHandler.connection_closed

        def subscribe_received(
            handler: ServingHandler, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            self.subscriptions += 1
            self.open.add((connection, request.request_id))
            received(handler, connection, request)

        def request_ended(
            handler: ServingHandler, connection: MoqtConnection, event: PeerRequestEnded
        ) -> None:
            self.open.discard((connection, event.request_id))
            self.changed.set()
            ended(handler, connection, event)

        def connection_closed(handler: ServingHandler, connection: MoqtConnection) -> None:
            self.open = {key for key in self.open if key[0] is not connection}
            self.changed.set()
            closed(handler, connection)

        ServingHandler.subscribe_received = subscribe_received  # type: ignore[assignment,method-assign]
        ServingHandler.request_ended = request_ended  # type: ignore[assignment,method-assign]
        ServingHandler.connection_closed = connection_closed  # type: ignore[assignment,method-assign]
