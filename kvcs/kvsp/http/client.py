"""HttpClient: requests to one service, each with a deadline, a bound and a typed end. Shell.

What comes back is either what was asked for or one of these: :exc:`NotFound`, :exc:`ServiceFailed`
with its fault, :exc:`Expired`. No redirect is followed: a token is for the host that it was given
for.
"""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from kvcs.errors import ConfigError, Expired, NotFound, ServiceFailed, ServiceFault
from kvcs.kvsp.http.problems import TYPE_PREFIX
from kvcs.kvsp.http.records import BadRecord, read_object
from kvcs.kvsp.http.uris import ServiceUri
from moqt.aio import ClientTls
from moqt.aio.tls import check_client_tls

#: A problem document, and what else of a refusal is read.
_MAX_REFUSAL_OCTETS = 4096
_READ_OCTETS = 256 << 10
_MAX_RETRY_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Deadlines and limits of a client."""

    connect_timeout_s: float = 5.0
    """Seconds until a connection must be up, handshake included."""

    request_timeout_s: float = 30.0
    """Seconds until an answer must be there, to its last octet."""

    stall_timeout_s: float = 5.0
    """Seconds without anything new of an answer."""

    max_connections: int = 8
    """Connections at once; more requests wait, within their deadline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came back with."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class HttpClient:
    """Asks one service. An asynchronous context manager.

    Args:
        uri: Where the service is.
        token: What it knows us by; ``None`` asks without.
        tls: Whom to believe.
        options: Deadlines and limits.

    Raises:
        ConfigError: If a file of ``tls`` cannot be used.
        BadName: If ``uri`` is none of a service.
    """

    def __init__(
        self,
        uri: ServiceUri | str,
        token: str | None,
        *,
        tls: ClientTls | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self.uri = uri if isinstance(uri, ServiceUri) else ServiceUri.parse(uri)
        self.options = options or ClientOptions()
        self._tls = tls or ClientTls()
        self._context = _client_context(self._tls)
        self._headers = {"Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=self._context, limit=self.options.max_connections, ttl_dns_cache=30
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None,
                connect=self.options.request_timeout_s,
                sock_connect=self.options.connect_timeout_s,
                sock_read=self.options.stall_timeout_s,
            ),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        limit: int,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Make a request and return its whole answer.

        Args:
            method: GET, PUT, POST or DELETE.
            path: Behind the URI of the service; begins with a slash.
            limit: Octets of the answer's body at most.
            body: JSON to send.
            headers: Fields beside those of every request.
            timeout_s: Seconds until all of it must be there; the client's by default.

        Raises:
            NotFound: If there is no such thing, or the token is not good for it.
            ServiceFailed: If the service did not do it.
            Expired: If it took too long.
        """
        async with self.stream(
            method, path, body=body, headers=headers, timeout_s=timeout_s
        ) as incoming:
            if (incoming.content_length or 0) > limit:
                raise bad_answer(f"answer of {incoming.content_length} octets, limit {limit}")
            content = bytearray()
            async for data in incoming:
                content += data
                if len(content) > limit:
                    raise bad_answer(f"answer of more than {limit} octets")
            return Answer(incoming.status, incoming.headers, bytes(content))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator["Incoming"]:
        """Make a request and hand out its answer, to be read while the block runs.

        The deadline is for all of it, and strikes where something is waited for: what the caller
        does between two reads is never broken off. See :meth:`ask` for the rest.
        """
        if self._session is None:
            raise ConfigError("a request of a client that is not open: use it with `async with`")
        fields = dict(headers or {})
        if body is not None:
            fields["Content-Type"] = "application/json"
        seconds = self.options.request_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + seconds
        with _in_our_words(self.uri):
            async with asyncio.timeout_at(deadline):
                response = await self._session.request(
                    method,
                    self.uri.base + path,
                    data=None if body is None else io.BytesIO(body),
                    headers=fields,
                    allow_redirects=False,
                    server_hostname=self._tls.server_name,
                )
        try:
            if response.status >= 300:
                with _in_our_words(self.uri):
                    async with asyncio.timeout_at(deadline):
                        refusal = await self._refusal(response)
                raise refusal
            yield Incoming(response, self.uri, deadline)
        finally:
            # One that was not read to its end cannot be used for the next request.
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _refusal(self, response: aiohttp.ClientResponse) -> NotFound | ServiceFailed:
        status = response.status
        told = f"{self.uri} answered {status}"
        if status in (404, 410):
            return NotFound(told)
        if problem := await _problem(response):
            told += f", {problem}"
        retry_after_s = _retry_after(response.headers.get("Retry-After"))
        match status:
            case 401 | 403:
                fault = ServiceFault.UNAUTHORIZED
            case 408 | 429 | 503:
                fault = ServiceFault.BUSY
            case _ if status < 400:
                fault = ServiceFault.BAD_ANSWER
            case _ if status < 500:
                fault = ServiceFault.REFUSED
            case _:
                fault = ServiceFault.BROKEN
        return ServiceFailed(fault, told, retry_after_s=retry_after_s)


class Incoming:
    """An answer that is being read: its header, and its octets as they come."""

    def __init__(self, response: aiohttp.ClientResponse, uri: ServiceUri, deadline: float) -> None:
        self._response = response
        self._uri = uri
        self._deadline = deadline

    @property
    def status(self) -> int:
        """The status, of those that are no refusals."""
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Its fields."""
        return self._response.headers

    @property
    def content_type(self) -> str:
        """What it says that it is."""
        return self._response.content_type

    @property
    def content_length(self) -> int | None:
        """How many octets it says that it has."""
        return self._response.content_length

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield octets as they come.

        Raises:
            ServiceFailed: If the connection is lost before all of them were there.
            Expired: If they do not come in time.
        """
        while True:
            with _in_our_words(self._uri):
                async with asyncio.timeout_at(self._deadline):
                    data = await self._response.content.read(_READ_OCTETS)
            if not data:
                return
            yield data


@contextmanager
def _in_our_words(uri: ServiceUri) -> Iterator[None]:
    """Turn what the library raises into our errors."""
    try:
        yield
    except TimeoutError:
        raise Expired(f"{uri}: no whole answer in time") from None
    except aiohttp.ClientError as exc:
        raise ServiceFailed(ServiceFault.UNREACHABLE, f"{uri}: {_reason(exc)}") from None
    except OSError as exc:
        text = f"{uri}: {exc.strerror or type(exc).__name__}"
        raise ServiceFailed(ServiceFault.UNREACHABLE, text) from None


def bad_answer(text: str) -> ServiceFailed:
    """Return the error for what no such service answers."""
    return ServiceFailed(ServiceFault.BAD_ANSWER, text)


async def _problem(response: aiohttp.ClientResponse) -> str:
    """Return the name of a problem document, if the answer is one of ours."""
    if response.content_type != "application/problem+json":
        return ""
    content = bytearray()
    while len(content) <= _MAX_REFUSAL_OCTETS and (data := await response.content.readany()):
        content += data
    try:
        members = read_object(
            bytes(content), octets=_MAX_REFUSAL_OCTETS, values=64,
            required=("type", "title", "status"), optional=("detail",),
        )  # fmt: skip
    except BadRecord:
        return ""
    name, detail = str(members["type"]), str(members.get("detail", ""))
    if not name.startswith(TYPE_PREFIX):
        return ""
    shown = name.removeprefix(TYPE_PREFIX) + (f": {detail}" if detail else "")
    # It comes from outside, and goes into messages of one line.
    return "".join(c if c.isprintable() else "?" for c in shown)[:200]


def _retry_after(value: str | None) -> float | None:
    if value is None or not value.isascii() or not value.isdecimal():
        return None  # a date, which nobody here sends
    return min(float(value[:9]), _MAX_RETRY_AFTER_S)


def _reason(exc: aiohttp.ClientError) -> str:
    """Say what went wrong in one line, without what a library likes to add."""
    cause = exc.__cause__ or exc
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not believed: {cause.verify_message}"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return " ".join(str(exc).split())[:200] or type(exc).__name__


def _client_context(tls: ClientTls) -> ssl.SSLContext:
    try:
        check_client_tls(tls)
        context = ssl.create_default_context(
            cafile=None if tls.ca_file is None else str(tls.ca_file)
        )
    except (ValueError, OSError) as exc:
        raise ConfigError(f"{exc}") from None
    if tls.certificate_file is not None:
        context.load_cert_chain(tls.certificate_file, tls.key_file)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
