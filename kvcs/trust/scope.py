"""A scope: its key, and what goes with it."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from kvcs.kvsp.keys import ScopeKey
from kvcs.trust.issuers import Issuers
from kvcs.trust.producers import KnownProducer

#: Which sealed Objects are made longer, so that their lengths tell less.
Padding = Literal["auto", "none", "bucket"]


class Suite(IntEnum):
    """What Objects are sealed with (Secure Objects, cipher suites); other values are refused."""

    AES_128_GCM_SHA256_128 = 0x0004
    AES_256_GCM_SHA512_128 = 0x0005


#: What the suites are called where people choose one.
SUITES = {
    "aes-128-gcm": Suite.AES_128_GCM_SHA256_128,
    "aes-256-gcm": Suite.AES_256_GCM_SHA512_128,
}


@dataclass(frozen=True, slots=True)
class Protection:
    """How the Objects of a scope are sealed."""

    suite: Suite = Suite.AES_128_GCM_SHA256_128
    padding: Padding = "auto"
    """``auto``: none for ``raw``, buckets for codecs whose lengths depend on what is encoded."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What the members of a scope share."""

    key: ScopeKey
    protection: Protection | None = None
    """None: Objects go in clear, and sealed ones are discarded. Never either (decision 17)."""

    producers: tuple[KnownProducer, ...] = field(default=(), hash=False)
    """Whose manifests are believed; if there are any, unsigned ones are not."""

    issuers: Issuers = field(default_factory=Issuers, hash=False)
    """Whose tokens are believed."""

    @classmethod
    def of(cls, scope: "Scope | ScopeKey") -> "Scope":
        """Return the scope; of a key alone, the one that says nothing else: it is in clear."""
        return cls(scope) if isinstance(scope, ScopeKey) else scope
