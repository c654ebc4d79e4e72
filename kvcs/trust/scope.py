"""A scope: its key, and what goes with it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from kvcs.kvsp.keys import ScopeKey


class Suite(IntEnum):
    """What Objects are sealed with (Secure Objects, cipher suites); other values are refused."""

    AES_128_GCM_SHA256_128 = 0x0004
    AES_256_GCM_SHA512_128 = 0x0005


@dataclass(frozen=True, slots=True)
class Protection:
    """How the Objects of a scope are sealed."""

    suite: Suite = Suite.AES_128_GCM_SHA256_128
    padding: Literal["auto", "none", "bucket"] = "auto"
    """``auto``: none for ``raw``, buckets for codecs whose lengths depend on what is encoded."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What the members of a scope share."""

    key: ScopeKey
    protection: Protection | None = None
    """None: Objects go in clear, and sealed ones are discarded. Never either (decision 17)."""
