"""The answers and changes that every kind of request shares."""

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from moqt.codepoints import MessageType, RequestErrorCode, known
from moqt.errors import ProtocolError, UsageError
from moqt.names import FullTrackName
from moqt.wire.messages.base import Message
from moqt.wire.pairs import Properties, decode_track_properties, encode_pairs
from moqt.wire.parameters import (
    NO_PARAMETERS,
    OK_SCOPES,
    UPDATE_SCOPES,
    Parameters,
    decode_parameters,
    encode_parameters,
)
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

#: Requests about a prefix: a redirect of one names no Track.
_NAMESPACE_REQUESTS: Final = frozenset(
    {
        MessageType.PUBLISH_NAMESPACE,
        MessageType.SUBSCRIBE_NAMESPACE,
        MessageType.SUBSCRIBE_TRACKS,
    }
)


@dataclass(frozen=True, slots=True)
class RequestOk(Message):
    """REQUEST_OK: a request, or a change to one, was accepted (MOQT, "REQUEST_OK").

    Stands for PUBLISH_OK, TRACK_STATUS_OK, REQUEST_UPDATE_OK and the like: which of them, and so
    what it may carry, depends on the request it answers.
    """

    type: ClassVar = MessageType.REQUEST_OK

    parameters: Parameters = NO_PARAMETERS

    track_properties: Properties = ()
    """Only in the answer to a TRACK_STATUS."""

    def encode_body(self, w: Writer) -> None:
        if self.track_properties and w.context not in (None, MessageType.TRACK_STATUS):
            raise UsageError("REQUEST_OK with Track Properties answers no TRACK_STATUS")
        scopes = OK_SCOPES.values() if w.context is None else (OK_SCOPES[w.context],)
        encode_parameters(w, self.parameters, *scopes)
        w.octets(encode_pairs(self.track_properties))

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        scope = OK_SCOPES.get(r.context) if r.context is not None else None
        if scope is None:
            raise ProtocolError("REQUEST_OK where no request was made")
        message = cls(decode_parameters(r, scope), decode_track_properties(r))
        if message.track_properties and r.context is not MessageType.TRACK_STATUS:
            raise ProtocolError("REQUEST_OK with Track Properties answers no TRACK_STATUS")
        return message


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where to ask instead (MOQT, "Redirect Structure")."""

    connect_uri: str
    """Empty: the URI in use. Only a server may state one."""

    track: FullTrackName
    """What to ask for. The Track Name is empty if the request was about a namespace."""


@dataclass(frozen=True, slots=True)
class RequestError(Message):
    """REQUEST_ERROR: a request, or a change to one, was refused (MOQT, "REQUEST_ERROR").

    Raises:
        UsageError: When sent, if ``redirect`` and the code REDIRECT do not come together.
    """

    type: ClassVar = MessageType.REQUEST_ERROR

    error_code: RequestErrorCode | int
    """Why. An unregistered code is kept as it came."""

    retry_interval: int = 0
    """0: do not retry. Otherwise milliseconds to wait, plus 1."""

    reason: str = ""
    """For people. At most 1024 octets of UTF-8."""

    redirect: Redirect | None = None

    @property
    def retry_ms(self) -> int | None:
        """Milliseconds after which the request may be tried again; None: never."""
        return self.retry_interval - 1 if self.retry_interval else None

    def encode_body(self, w: Writer) -> None:
        if (self.redirect is not None) != (self.error_code == RequestErrorCode.REDIRECT):
            raise UsageError(f"REQUEST_ERROR {self.error_code!r} with redirect {self.redirect}")
        w.vi64(self.error_code)
        w.vi64(self.retry_interval)
        w.reason_phrase(self.reason)
        if self.redirect is not None:
            if self.redirect.track.name and w.context in _NAMESPACE_REQUESTS:
                raise UsageError("redirect of a namespace request with a Track Name")
            w.text(self.redirect.connect_uri)
            w.full_track_name(self.redirect.track)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        error_code = known(RequestErrorCode, r.vi64())
        retry_interval, reason = r.vi64(), r.reason_phrase()
        redirect = None
        if error_code == RequestErrorCode.REDIRECT:
            redirect = Redirect(r.text(), r.full_track_name())
            if redirect.track.name and r.context in _NAMESPACE_REQUESTS:
                raise ProtocolError("redirect of a namespace request with a Track Name")
        return cls(error_code, retry_interval, reason, redirect)


@dataclass(frozen=True, slots=True)
class RequestUpdate(Message):
    """REQUEST_UPDATE: change a request that stands (MOQT, "REQUEST_UPDATE").

    A parameter that is absent keeps its value.
    """

    type: ClassVar = MessageType.REQUEST_UPDATE

    request_id: int
    """Its own, from the same sequence as those of requests."""

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        scope = UPDATE_SCOPES.get(w.context) if w.context is not None else None
        if scope is None and w.context is not None:
            raise UsageError(f"{w.context.name} cannot be updated")
        w.vi64(self.request_id)
        scopes = UPDATE_SCOPES.values() if scope is None else (scope,)
        encode_parameters(w, self.parameters, *scopes)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        scope = UPDATE_SCOPES.get(r.context) if r.context is not None else None
        if scope is None:
            raise ProtocolError("REQUEST_UPDATE where there is nothing to update")
        return cls(r.vi64(), decode_parameters(r, scope))
