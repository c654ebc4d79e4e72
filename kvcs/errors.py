"""Exceptions of kvcs, sorted by what the caller can do about them.

* :exc:`KvcsError`
    * :exc:`ConfigError`: what a person or caller gave is unusable; the text names what
    * :exc:`BadDescriptor`: a Compatibility Descriptor that this project refuses
    * :exc:`BadName`: a Track Namespace, a Track Name or a holder's URI that is not one of KVCS
    * :exc:`BadObject`: one Object is refused and counts as missing; the others are unaffected
    * :exc:`BadManifest`: a manifest is refused, and with it what it says of the publication
    * :exc:`NotFound`: there is no such publication, segment or block
    * :exc:`Incomplete`: a retrieval ended with things missing; it carries them
    * :exc:`PublicationFailed`: the publisher gave the publication up
    * :exc:`Expired`: the deadline passed
    * :exc:`ServiceFailed`: a service over HTTP did not do what it was asked; it says why
    * :exc:`BadToken`: an authorization token is refused; it says how far its bearer is told why
"""

from collections.abc import Iterable
from enum import StrEnum

from moqt.authority import Denial


class Rejection(StrEnum):
    """Why an Object was refused. The values are stable: logs and metrics carry them."""

    #: Does not begin with ``KVO1``.
    MAGIC = "magic"
    #: A version of the payload other than 1.
    VERSION = "version"
    #: Not a component at all, or not the one of its Track.
    COMPONENT = "component"
    #: The Layer field is not the Group ID.
    LAYER = "layer"
    #: The Block Index field is not the Object ID.
    BLOCK_INDEX = "block-index"
    #: Header and Data Length do not account for the whole payload.
    LENGTH = "length"
    #: Data Length is beyond what the receiver accepts.
    LIMIT = "limit"
    #: The Data does not have the digest that the header gives.
    DIGEST = "digest"
    #: The codec value is not the one of the codec that the Track Name names.
    CODEC = "codec"
    #: Token Count is not the ``block_tokens`` of the descriptor.
    TOKEN_COUNT = "token-count"
    #: Token Start is not the position that the manifest gives the block.
    TOKEN_START = "token-start"
    #: A layer or a block that the manifest does not have.
    OUT_OF_RANGE = "out-of-range"
    #: Data of a codec of fixed length is longer or shorter than its section.
    DATA_LENGTH = "data-length"
    #: The codec could not make a tensor of the Data.
    DECODE = "decode"
    #: In clear, where the scope says that Objects are sealed.
    UNPROTECTED = "unprotected"
    #: Sealed, where the scope says that Objects go in clear.
    PROTECTED = "protected"
    #: Sealed under a Key ID that is not the scope's, or says so in a way that cannot be read.
    KEY_ID = "key-id"
    #: A sealed payload is longer than any that this Object can have.
    TOO_LONG = "too-long"
    #: A sealed payload was not sealed by a member of the scope, for this place in this track.
    TAG = "tag"
    #: A member of the scope sealed what is no payload.
    PLAINTEXT = "plaintext"


#: Why an Object could not be opened. Nobody outside may notice that (Secure Objects): such an
#: Object is treated as if it had never come.
UNOPENED = frozenset(
    {
        Rejection.UNPROTECTED,
        Rejection.PROTECTED,
        Rejection.KEY_ID,
        Rejection.TOO_LONG,
        Rejection.TAG,
        Rejection.PLAINTEXT,
    }
)


class ServiceFault(StrEnum):
    """What went wrong at a service over HTTP. The values are stable, as logs carry them."""

    #: No connection, or one that was lost before the answer was whole.
    UNREACHABLE = "unreachable"
    #: The token is missing, nobody's, or good for something else.
    UNAUTHORIZED = "unauthorized"
    #: It has no room, or is stopping. Later, or another one, may do.
    BUSY = "busy"
    #: It does not take the request as it is; sent again, it would not either.
    REFUSED = "refused"
    #: It made a mistake.
    BROKEN = "broken"
    #: It answered what no such service answers, or more than was asked for.
    BAD_ANSWER = "bad-answer"


class KvcsError(Exception):
    """Base of every exception that kvcs raises on purpose."""


class ConfigError(KvcsError):
    """Something a person or a caller gave cannot be used; the text names it."""


class BadDescriptor(KvcsError):
    """A Compatibility Descriptor is not one (KVSP Section 2); the text names the member."""


class BadName(KvcsError):
    """A Track Namespace, Track Name (KVCS Sections 3.1, 3.2) or holder's URI is none of KVCS."""


class BadObject(KvcsError):
    """One Object failed a check (KVCS Section 3.5, decision 7). Treat it as missing.

    Attributes:
        reason: Which check; stable, for metrics and for tests.
    """

    def __init__(self, reason: Rejection, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class BadManifest(KvcsError):
    """A manifest is malformed, inconsistent, too large, unsigned or not of this publication."""


class NotFound(KvcsError):
    """Nobody asked has the publication, segment or block."""


class Incomplete(KvcsError):
    """A retrieval ended before everything wanted was there.

    Attributes:
        missing: ``(layer, track name, block of the segment)`` of each Object still missing.
    """

    def __init__(self, text: str, missing: Iterable[tuple[int, str, int]] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class PublicationFailed(KvcsError):
    """The publisher ended the publication because of an error; nothing more will come of it."""


class Expired(KvcsError):
    """The deadline passed before the work was done."""


class ServiceFailed(KvcsError):
    """A block service or an Index Service did not do what it was asked. Do without, or ask another.

    Attributes:
        fault: What went wrong; stable, for metrics and for decisions.
        retry_after_s: Seconds after which it may be asked again, where it said so.
    """

    def __init__(
        self, fault: ServiceFault, text: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(text)
        self.fault = fault
        self.retry_after_s = retry_after_s


class BadToken(KvcsError):
    """An authorization token is malformed, not believed, expired, not valid yet, or revoked.

    Attributes:
        why: What its bearer is told. The text is for our own log: it says more than strangers may
            know, and nothing of a token that is not signed but its length and key identifier.
        retry_after_s: Seconds after which it may be valid, where waiting helps.
    """

    def __init__(self, why: Denial, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.why = why
        self.retry_after_s = retry_after_s
