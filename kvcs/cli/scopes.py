"""What commands make of scopes: whose manifests are believed, and in which one to look when."""

import time
from collections.abc import Iterator, Mapping

from kvcs.config import ConsumerSettings, StoreSettings
from kvcs.errors import ConfigError
from kvcs.profile.signing import PublicKey
from kvcs.trust.producers import KeysByDate
from kvcs.trust.scope import Scope

#: Seconds for which one scope of several is looked in at first.
FIRST_TURN_S = 0.5


def believed(
    settings: ConsumerSettings | StoreSettings, scope: Scope
) -> tuple[Mapping[bytes, PublicKey], bool]:
    """Return whose manifests are believed, by date, and whether unsigned ones are refused.

    They are if the settings say so, or the scope lists producers.

    Raises:
        ConfigError: If a key cannot be used, or signatures are required of nobody.
    """
    trusted = KeysByDate(scope.producers, time.time, settings.load_trusted_keys())
    required = settings.require_signature or bool(scope.producers)
    if required and not trusted:
        raise ConfigError(
            "require_signature is set, but neither trust nor the scope file lists a producer"
        )
    return trusted, required


def turns(scopes: int, seconds: float) -> Iterator[tuple[int, float, bool]]:
    """Yield which scope to look in next, for how long, and whether that is the last time.

    Each is looked in for so many seconds in all, a little while at first, since what is published
    already is found at once wherever it is; then longer.
    """
    length, left = FIRST_TURN_S if scopes > 1 else seconds, seconds
    while left > 0:
        this = left if left < 2 * length else length
        left -= this
        for number in range(scopes):
            yield number, this, left <= 0 and number == scopes - 1
        length *= 2
