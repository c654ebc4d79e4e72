"""How long a retrieval waits for what, and how much it holds."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvcs.consumer.assembler import EARLY_OCTETS
from kvcs.consumer.prefixes import Prefixes
from kvcs.errors import ConfigError

#: When FETCH is used.
Fetching = Literal["auto", "never", "always"]

#: Connections of one retrieval to one relay or producer.
MAX_CONNECTIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """How long a retrieval waits for what, and how much it holds. Seconds and octets.

    Raises:
        ConfigError: If a value is out of its range; the message names it.
    """

    deadline_s: float = 300.0
    """The whole retrieval, from its start to its last event, also of a context that is followed."""

    connect_timeout_s: float = 10.0
    """One connection, handshakes included."""

    request_timeout_s: float = 10.0
    """The answer to one request, and then the first manifest."""

    discovery_timeout_s: float = 10.0
    """For a publication to appear at all, on one connection."""

    settle_s: float = 0.01
    """For the manifests of further publications after the first one's, to have a choice, and, if
    several prefixes are looked for, for further announcements; ten times that for announcements of
    one group of prefixes, before shorter ones are tried."""

    another_s: float = 1.0
    """For another publication to appear after one that failed before a layer was ready."""

    stall_timeout_s: float = 30.0
    """Without an Object or a manifest that is new, on a connection that stands. While a context is
    followed, only as long as something of what is listed is missing."""

    silence_s: float = 3.0
    """Without a sign of life of a peer that is asked for one, until another connection is made
    beside the one to it."""

    again_s: float = 0.25
    """The first pause before everything is tried again, if something was lost; doubled each
    time, and shortened at random."""

    again_max_s: float = 2.0
    """The longest of those pauses."""

    connections: int = 1
    """Connections to one relay or producer, 1 to 16: each has a congestion window of its own, and
    brings its part of every layer. Those that cannot be had are done without."""

    processes: bool = False
    """Whether each of them, beside one for the manifest, is in a process of its own, which
    verifies and places what comes. The sink must be one that can be shared
    (:mod:`kvcs.store.shared`), and the codecs those that come with kvcs."""

    spread_wait_s: float = 2.0
    """For the connections that data come over, once there is a manifest; with processes, which have
    to start, it is ``connect_timeout_s``. One that comes later is asked for what is begun later."""

    prefixes: Prefixes = "longest"
    """Which prefixes of the prompt are looked for: see :mod:`kvcs.consumer.prefixes`."""

    octets_per_s: float | None = None
    """How fast finished Objects come, as the caller has measured it before; what this retrieval
    measures itself is preferred. Where it is known, of several publications one is chosen that
    can come before the deadline, if need be of a shorter prefix. None: it is not known."""

    eager: bool = False
    """Ask for the ``raw`` tracks of segment 0 together with the manifest, where all of a
    publication is wanted, ``raw`` is liked best, and it comes over one connection: a round trip
    less to the first layer. In vain if the publication is refused or offers something else; what
    came until then is bounded by ``early_octets``. Through a relay that asks for all of it with
    one priority the manifest comes later by it, and the first layer with it."""

    fetch: Fetching = "auto"
    """Whether past Objects alone are asked for, with FETCH: of segments that the manifest says
    are complete (``auto``; who refuses is subscribed to), of none (``never``), or of all, which
    are then not asked for before they are complete (``always``)."""

    resubscribe: int = 1
    """How often a track is asked for again that ended before everything came."""

    segments_at_once: int = 32
    """Segments whose tracks are asked for at the same time: the first ones of the context, and of
    them, earlier layers first; of more that are complete an eighth of the layers of all is fetched
    first, then half of them. Peers grant some hundred requests at once, and one that waits for that
    longer than ``request_timeout_s`` is lost."""

    workers: int = 2
    """Threads that examine what is large."""

    large_octets: int = 128 << 10
    """Payload from which an Object is examined in a thread: less takes less than the way."""

    pending_octets: int = 32 << 20
    """Octets under examination in threads, as they came or, if that is more, as they are decoded;
    at the limit nothing more is read."""

    early_octets: int = EARLY_OCTETS
    """Payload kept ahead of the manifest; at the limit nothing more is read."""

    max_rejected: int = 1000
    """Objects that are rejected before the publication is given up."""

    recompute_tokens_per_s: float | None = None
    """The caller's estimate of how many tokens it computes in a second. Recovery of what is
    missing, from the first failure or loss on, never lasts longer than computing the tokens
    concerned would, nor is anything waited for in silence for as long. None: the deadline alone
    ends it."""

    def __post_init__(self) -> None:
        for name in (
            "deadline_s", "connect_timeout_s", "request_timeout_s", "discovery_timeout_s",
            "stall_timeout_s", "silence_s", "again_max_s", "segments_at_once", "workers",
            "pending_octets", "max_rejected", "connections",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in (
            "settle_s", "another_s", "again_s", "resubscribe", "large_octets", "early_octets",
            "spread_wait_s",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.octets_per_s is not None and not self.octets_per_s > 0:
            raise ConfigError(f"octets_per_s is {self.octets_per_s}, expected more than 0")
        if self.fetch not in get_args(Fetching):
            raise ConfigError(f"fetch is {self.fetch!r}, expected auto, never or always")
        rate = self.recompute_tokens_per_s
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(
                f"recompute_tokens_per_s is {rate}, expected a number of tokens/s above 0"
            )
        if self.connections > MAX_CONNECTIONS:
            raise ConfigError(
                f"connections is {self.connections}, expected {MAX_CONNECTIONS} or less"
            )

    @property
    def is_spread(self) -> bool:
        """Whether data come over more than the connection that the manifest comes over."""
        return self.processes or self.connections > 1
