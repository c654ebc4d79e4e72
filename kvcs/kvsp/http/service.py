"""HttpService: a listener over TLS, and what every request goes through. Shell.

A request is refused here when it comes with no token, too early, too late, or beside too many
others. What it is answered with is decided by the parts that are served: blocks, an index, or both.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import structlog
from aiohttp import web

from kvcs.errors import BadName, ConfigError
from kvcs.kvsp.http.names import from_hex
from kvcs.kvsp.http.problems import BY_STATUS, CONTENT_TYPE, Problem, Refused
from kvcs.kvsp.http.routes import VARIABLES, Routes
from kvcs.kvsp.http.tokens import Authorizer, Bearer, bearer_token
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.telemetry import Counter, Counters, LogEvent
from moqt.aio import ServerTls, TlsSettingsError
from moqt.aio.tls import check_server_tls

log = structlog.get_logger("kvcs.http")

#: Seconds for what is still open when the time to drain is over.
_CLOSE_S = 1.0
#: Seconds after which who is refused for want of room may come again.
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Limits of a listener."""

    max_connections: int = 1024
    """Connections at once; more are closed as they come."""

    max_requests: int = 256
    """Requests that are served at once; more are refused."""

    request_timeout_s: float = 10.0
    """Seconds for a handshake, for the first request to come, and for the body of each."""

    stall_s: float = 10.0
    """Seconds for the peer to take what is sent to it, at a standstill."""

    idle_timeout_s: float = 30.0
    """Seconds between two requests of one connection."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that a token was found for."""

    request: web.Request
    bearer: Bearer
    options: ServiceOptions

    @property
    def scope_id(self) -> bytes:
        """The scope that its path names."""
        return self.variable("scope", ID_OCTETS)

    @property
    def compatibility_id(self) -> bytes:
        """The model that its path names."""
        return self.variable("compatibility", ID_OCTETS)

    def variable(self, name: str, octets: int) -> bytes:
        """Return an identifier of the path."""
        try:
            return from_hex(name, self.request.match_info[name], octets)
        except BadName:  # the routes let nothing else through; whatever came, it names nothing
            raise Refused(Problem.NOT_FOUND) from None

    async def body(self, limit: int) -> bytes:
        """Return the body, which must be JSON.

        Raises:
            Refused: If it is longer than ``limit`` octets, of another type, or does not come.
        """
        request = self.request
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise Refused(Problem.MEDIA_TYPE)
        too_large = Refused(Problem.TOO_LARGE, f"expected a body of at most {limit} octets")
        if (request.content_length or 0) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                while data := await request.content.readany():
                    body += data
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise Refused(Problem.TIMED_OUT, headers={"Connection": "close"}) from None
        return bytes(body)

    async def begin(self, response: web.StreamResponse) -> None:
        """Send the header of an answer. Whatever fails after that cuts the connection."""
        self.request[_BEGUN] = response
        async with asyncio.timeout(self.options.stall_s):
            await response.prepare(self.request)


Handler = Callable[[Call], Awaitable[web.StreamResponse]]

_BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey("begun", web.StreamResponse)


class ServicePart(Protocol):
    """What is served at some of the paths."""

    @property
    def handlers(self) -> Mapping[Routes, Handler]:
        """Who answers at which path."""
        ...


class HttpService:
    """Serves parts to who has a token. An asynchronous context manager.

    Args:
        parts: What is served.
        authorizer: Who knows the tokens; may be replaced while it serves.
        options: Limits.
        counters: Where things are counted.

    Attributes:
        authorizer: As given.
        counters: As given, or new.
    """

    def __init__(
        self,
        parts: Sequence[ServicePart],
        authorizer: Authorizer,
        *,
        options: ServiceOptions | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.authorizer = authorizer
        self.counters = Counters() if counters is None else counters
        self._options = options or ServiceOptions()
        self._context: ssl.SSLContext | None = None
        self._servers: list[asyncio.Server] = []
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        # Connections that have asked nothing yet, and when they are closed for that.
        self._silent: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        app = web.Application(middlewares=[self._answer])
        for part in parts:
            for route, handler in part.handlers.items():
                self._add(app, route, handler)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._options.idle_timeout_s,
            lingering_time=self._options.request_timeout_s,
            shutdown_timeout=_CLOSE_S,
        )

    def _add(self, app: web.Application, route: Routes, handler: Handler) -> None:
        async def serve(request: web.Request) -> web.StreamResponse:
            bearer = self._identify(request)
            return await handler(Call(request, bearer, self._options))

        path = route.value.template
        for name, pattern in VARIABLES.items():
            path = path.replace(f"{{{name}}}", f"{{{name}:{pattern}}}")
        resource = app.router.add_resource(path, name=route.value.name)
        for method in route.value.methods:
            resource.add_route(method, serve)

    # -- life ------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, tls: ServerTls) -> tuple[str, int]:
        """Accept connections.

        Returns:
            Address and TCP port, for ``port`` 0 the one that was free.

        Raises:
            ConfigError: If the address cannot be bound or a certificate file cannot be used;
                the message names it.
        """
        loop = asyncio.get_running_loop()
        try:
            self._context = _server_context(tls)
            context = _server_context(tls)
            context.sni_callback = self._show
            listener = await _bind(host, port)
        except (OSError, TlsSettingsError) as exc:
            raise ConfigError(f"cannot listen on {host} port {port}: {exc}") from None
        if self._runner.server is None:
            await self._runner.setup()
        server = await loop.create_server(
            self._accept,
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=self._options.request_timeout_s,
            ssl_shutdown_timeout=_CLOSE_S,
        )
        self._servers.append(server)
        address: tuple[str, int] = listener.getsockname()[:2]
        log.info(LogEvent.HTTP_LISTENING, host=address[0], port=address[1])
        return address

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on, and believe these CAs.

        Whether clients are asked for certificates at all was decided with :meth:`listen`.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """
        if self._context is not None:
            self._context = _server_context(tls)

    def _show(self, connection: ssl.SSLObject, name: str, first: ssl.SSLContext) -> None:
        """Have a connection that begins show what is to be shown now (called by the library).

        It is called whether a client names a server or not. So what is shown is replaced as a
        whole; a context into which other files are loaded would keep the CAs of the old ones.
        """
        if self._context is not None:
            connection.context = self._context

    async def close(self, drain_s: float) -> None:
        """Take no more requests, and let those that are being served end within ``drain_s``."""
        self._stopping = True
        for server in self._servers:
            server.close()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._stopping:
            await self.close(0.0)

    # -- parts -----------------------------------------------------------------------------------

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._options.max_connections:
            return _Refusing()
        protocol = server()
        # Who connects and asks nothing would be waited for without end otherwise.
        self._silent[protocol] = asyncio.get_running_loop().call_later(
            2 * self._options.request_timeout_s, self._close_silent, protocol
        )
        return protocol

    def _close_silent(self, protocol: asyncio.Protocol) -> None:
        self._silent.pop(protocol, None)
        if isinstance(protocol, web.RequestHandler):
            protocol.force_close()

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        self.counters.add(Counter.HTTP_REQUESTS)
        self._active += 1
        self._idle.clear()
        try:
            self._check_room()
            return await handler(request)
        except Refused as refused:
            return self._refuse(request, refused)
        except web.HTTPException as exc:
            return self._refuse(request, self._in_our_words(request, exc))
        except (ConnectionError, TimeoutError) as exc:
            # The peer is gone, or takes nothing any more.
            return self._cut(request, exc)
        except Exception as exc:
            log.exception(LogEvent.HTTP_BROKEN, method=request.method)
            if _BEGUN in request:
                return self._cut(request, exc)
            return self._refuse(request, Refused(Problem.BROKEN))
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def _check_room(self) -> None:
        if self._stopping:
            raise Refused(
                Problem.STOPPING,
                headers={"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"},
            )
        if self._active > self._options.max_requests:
            raise Refused(Problem.BUSY, headers={"Retry-After": str(_RETRY_AFTER_S)})

    def _identify(self, request: web.Request) -> Bearer:
        token = bearer_token(request.headers.get("Authorization"))
        bearer = None if token is None else self.authorizer.identify(token, time.time())
        if bearer is None:
            raise Refused(Problem.UNAUTHORIZED, headers={"WWW-Authenticate": "Bearer"})
        return bearer

    def _in_our_words(self, request: web.Request, exc: web.HTTPException) -> Refused:
        """Return the refusal for what the router has found; without a token it finds nothing."""
        try:
            self._identify(request)
        except Refused as refused:
            return refused
        problem = BY_STATUS.get(exc.status, Problem.BAD_REQUEST)
        return Refused(problem, headers={n: v for n, v in exc.headers.items() if n == "Allow"})

    def _refuse(self, request: web.Request, refused: Refused) -> web.StreamResponse:
        if _BEGUN in request:
            return self._cut(request, refused)
        self.counters.add(Counter.HTTP_REQUESTS_REFUSED)
        return web.Response(
            status=refused.problem.status,
            body=refused.problem.document(refused.detail),
            headers=refused.headers,
            content_type=CONTENT_TYPE,
        )

    def _cut(self, request: web.Request, exc: Exception) -> web.StreamResponse:
        """Break off: an answer that is not whole must not look as if it were."""
        self.counters.add(Counter.HTTP_ANSWERS_CUT)
        log.debug(LogEvent.HTTP_CUT, error=type(exc).__name__)
        if request.transport is not None:
            request.transport.abort()
        return request.get(_BEGUN) or web.Response(status=Problem.BROKEN.status)


class _Refusing(asyncio.Protocol):
    """A connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        transport.close()


def _server_context(tls: ServerTls) -> ssl.SSLContext:
    check_server_tls(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.certificate_file, tls.key_file)
        if tls.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(tls.client_ca_file)
    except OSError as exc:  # of TLS, or of a file that has changed since it was checked
        reason = getattr(exc, "reason", None) or exc.strerror
        raise TlsSettingsError(f"{tls.certificate_file}: cannot be used: {reason}") from exc
    return context


async def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound; ``::`` is every address, of IPv4 as well."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
    )
    family, _, _, _, address = found[0]
    is_every = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (str(address[0]), int(address[1])), family=family, dualstack_ipv6=is_every
    )
