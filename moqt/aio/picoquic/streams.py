"""What is known of each stream, for both directions."""

from collections import deque

from moqt.aio.picoquic.library import Withheld

#: What ``Stream.trial`` begins with. Each time they are taken it is twice as many.
TRIAL_OCTETS = 4 << 10


def is_unidirectional(stream_id: int) -> bool:
    """Whether data flow one way on the stream."""
    return bool(stream_id & 2)


def is_of_client(stream_id: int) -> bool:
    """Whether the client opens the stream."""
    return not stream_id & 1


class Stream:
    """One stream that is not over in both directions.

    ``record`` is aiopquic's, and 0 before there is one and after it died.
    """

    __slots__ = (
        "blocked",
        "dropped",
        "fin_handed",
        "fin_received",
        "fin_wanted",
        "handed",
        "owed",
        "record",
        "reset",
        "resetting",
        "sent",
        "stalled_since",
        "stream_id",
        "trial",
        "unconsumed",
        "urgent",
        "waiting",
        "waiting_octets",
        "withheld",
    )

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.record = 0
        self.withheld: Withheld | None = None
        # Control and request streams, which a few octets keep alive and which others wait for.
        self.urgent = not is_unidirectional(stream_id) or stream_id < 4

        self.unconsumed = 0  # octets received
        self.owed = 0  # octets consumed since the window was widened
        self.fin_received = False
        self.dropped = False  # reset, or stopped by us: nobody consumes what arrives

        self.waiting: deque[bytes] = deque()  # octets for which the ring had no room
        self.waiting_octets = 0
        self.handed = 0  # octets put into the ring
        self.sent = 0  # octets taken out of it, at the last look
        self.stalled_since = 0.0  # when they last changed, if any wait
        self.blocked = False
        self.trial = TRIAL_OCTETS  # octets given beyond what the peer is known to grant
        self.fin_wanted = False
        self.fin_handed = False
        self.reset = False
        self.resetting = False  # once what was written is acknowledged

    def attach(self, record: int) -> None:
        """Note the record that aiopquic keeps."""
        if record and record != self.record:
            self.record = record
            self.withheld = Withheld(record)

    def detach(self) -> None:
        """Forget the record, which dies."""
        self.record = 0
        self.withheld = None

    @property
    def writable(self) -> bool:
        """Whether more may be appended."""
        return not (self.fin_wanted or self.reset or self.resetting)

    @property
    def queued(self) -> int:
        """Octets written that were not in a packet at the last look."""
        return self.waiting_octets + self.handed - self.sent
