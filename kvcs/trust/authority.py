"""An endpoint's authority: tokens and client certificates in, grants and refusals out.

A request is judged by the tokens that are shown with it, of which one that allows is enough; where
none is shown, by the client's certificate. Who shows tokens is judged by those alone, so that a
revoked or narrower one is not undone by what else one has.

What a peer is told is one of three codes. Why, is for our own log.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final, Generic, TypeVar

from kvcs.errors import BadToken, ConfigError
from kvcs.profile.naming import short_hex
from kvcs.trust.grants import allows
from kvcs.trust.identities import ClientCertificate, Identity, read_certificate
from kvcs.trust.policy import Policy
from kvcs.trust.tokens import CAT_TOKEN_TYPE, LEEWAY_S, MAX_LIFETIME_S, Token, read_token
from moqt.authority import Action, Bearer, Denial, Denied, Granted
from moqt.limits import FailedTokens
from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken

#: Verified tokens that are remembered, so that a request costs a digest and no signature.
MAX_CACHED: Final = 4096
#: Tokens of one request that are looked at; with more, none is.
MAX_SHOWN: Final = 8
#: Seconds after which what runs is looked at again, if its token is to be checked again at all. The
#: interval of the token is the longest that it allows; this one makes a revocation count at once.
RECHECK_S: Final = 3.0

#: Of several refusals the first of these is told.
_FIRST: Final = (Denial.MALFORMED, Denial.EXPIRED, Denial.UNAUTHORIZED)

V = TypeVar("V")


class Remembered(Generic[V]):
    """What was made of octets, by their SHA-256; what was not asked for longest is forgotten."""

    def __init__(self, limit: int = MAX_CACHED) -> None:
        self._limit = limit
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, octets: bytes, make: Callable[[bytes], V]) -> V:
        """Return what is remembered of them; if nothing is, what ``make`` makes and returns.

        Whatever ``make`` raises is not remembered: strangers could have it forget what is good.
        """
        digest = sha256(octets).digest()
        if digest in self._values:
            self._values.move_to_end(digest)
            return self._values[digest]
        value = self._values[digest] = make(octets)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)
        return value

    def forget(self) -> None:
        """Forget everything."""
        self._values.clear()


@dataclass(frozen=True, slots=True)
class _Client:
    """A certificate, and what is known of who has it."""

    certificate: ClientCertificate
    known: tuple[tuple[str, Identity], ...]


class TokenAuthority:
    """Decides by tokens and client certificates (:class:`moqt.authority.Authority`).

    Args:
        policy: Whom to believe.
        audience: Names of this endpoint, such as ``moqt://relay.example:4433``; a token must be
            for one of them. From the configuration: what a client says it dialled is no evidence.
        leeway_s: Seconds by which clocks may differ.
        max_lifetime_s: Seconds that a token may live; longer ones are refused.
        recheck_s: Seconds after which what runs is to be asked about again, at most.

    Raises:
        ConfigError: If there are issuers and no name that their tokens could be for.
    """

    def __init__(
        self,
        policy: Policy,
        audience: Collection[str],
        *,
        leeway_s: float = LEEWAY_S,
        max_lifetime_s: float = MAX_LIFETIME_S,
        recheck_s: float = RECHECK_S,
    ) -> None:
        self._audience = frozenset(audience)
        self._leeway_s = leeway_s
        self._max_lifetime_s = max_lifetime_s
        self._recheck_s = recheck_s
        self._tokens: Remembered[Token] = Remembered()
        self._clients: Remembered[_Client] = Remembered()
        self._failed = FailedTokens()
        self.take(policy)

    def take(self, policy: Policy) -> None:
        """Believe these from now on. That a signature was good under other keys is forgotten.

        Raises:
            ConfigError: As the constructor. The policy before stays.
        """
        if policy.issuers and not self._audience:
            raise ConfigError(
                "issuers without an audience: expected the name of this endpoint that tokens "
                "are for, such as moqt://relay.example:4433"
            )
        self._policy = policy
        self._tokens.forget()
        self._clients.forget()

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        """See :meth:`moqt.authority.Authority.decide`.

        A prefix is asked for where ``track`` is None: SUBSCRIBE_TRACKS, which has no action of its
        own, is SUBSCRIBE_NAMESPACE and SUBSCRIBE of its prefix.
        """
        if not bearer.tokens:
            return self._by_certificate(action, namespace, track, bearer, now)
        if len(bearer.tokens) > MAX_SHOWN:
            found = f"{len(bearer.tokens)} tokens"
            return Denied(Denial.MALFORMED, f"{found}, limit {MAX_SHOWN}")
        refusals = []
        for shown in bearer.tokens:
            decision = self._by_token(action, namespace, track, shown, bearer, now)
            if isinstance(decision, Granted):
                return decision
            refusals.append(decision)
        return min(refusals, key=_rank)

    def believed(self, shown: AuthorizationToken, certificate: bytes | None, now: float) -> Token:
        """Return a token that would be believed now, whatever it allows.

        Raises:
            BadToken: If it would not.
        """
        token = self._opened(shown, "", now)
        self._check(token, certificate, now)
        return token

    def _by_token(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        shown: AuthorizationToken,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        token: Token | None = None
        try:
            token = self._opened(shown, bearer.address, now)
            self._check(token, bearer.certificate, now)
            if not allows(token.claims.permissions, action, namespace, track):
                raise BadToken(Denial.UNAUTHORIZED, f"token does not allow {action.name}")
        except BadToken as exc:
            who, mark = ("", "") if token is None else (token.claims.who, _mark(token))
            return Denied(exc.why, str(exc), exc.retry_after_s, who, mark)
        claims = token.claims
        if not claims.revalidate_s:
            return Granted(claims.who, token=_mark(token))
        expires_at = claims.expires_at + self._leeway_s
        check_at = min(now + claims.revalidate_s, now + self._recheck_s, expires_at)
        return Granted(claims.who, check_at, expires_at, _mark(token))

    def _by_certificate(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        if bearer.certificate is None:
            return Denied(Denial.UNAUTHORIZED, "neither a token nor a client certificate")
        try:
            client = self._clients.get(bearer.certificate, self._read_client)
        except ConfigError as exc:
            return Denied(Denial.UNAUTHORIZED, str(exc))
        if not client.known:
            return Denied(Denial.UNAUTHORIZED, "client certificate without a URI that is known")
        who, expires_at = client.known[0][0], client.certificate.expires_at
        if now >= expires_at:
            return Denied(Denial.EXPIRED, "client certificate has expired", who=who)
        for uri, identity in client.known:
            if allows(identity.permissions, action, namespace, track):
                return Granted(uri, min(now + self._recheck_s, expires_at), expires_at)
        text = f"client certificate does not allow {action.name}"
        return Denied(Denial.UNAUTHORIZED, text, who=who)

    def _opened(self, shown: AuthorizationToken, address: str, now: float) -> Token:
        if shown.token_type != CAT_TOKEN_TYPE:
            text = f"token of type {shown.token_type}, expected {CAT_TOKEN_TYPE}"
            raise BadToken(Denial.MALFORMED, text)
        return self._tokens.get(shown.value, partial(self._read, address, now))

    def _check(self, token: Token, certificate: bytes | None, now: float) -> None:
        if token.claims.thumbprint is not None:
            token.check_bearer(self._thumbprint(certificate))
        token.check_time(now, leeway_s=self._leeway_s, max_lifetime_s=self._max_lifetime_s)
        revoked = self._policy.revocations
        if token.claims.token_id in revoked.token_ids or token.key.kid in revoked.kids:
            raise BadToken(Denial.UNAUTHORIZED, "token was revoked")

    def _read(self, address: str, now: float, value: bytes) -> Token:
        """Verify a token that is not known yet, unless too many from there were no good.

        What is known already is not concerned: somebody may share an address with who guesses.
        """
        wait_s = self._failed.wait_s(address, now)
        if wait_s:
            text = "too many tokens from there were refused"
            raise BadToken(Denial.UNAUTHORIZED, text, retry_after_s=wait_s)
        try:
            return read_token(value, self._policy.issuers, self._audience)
        except BadToken:
            self._failed.failed(address, now)
            raise

    def _read_client(self, der: bytes) -> _Client:
        certificate = read_certificate(der)
        known = tuple(
            (uri, identity)
            for uri in certificate.uris
            for identity in self._policy.identities
            if identity.fits(uri)
        )
        return _Client(certificate, known)

    def _thumbprint(self, certificate: bytes | None) -> bytes | None:
        if certificate is None:
            return None
        try:
            return self._clients.get(certificate, self._read_client).certificate.thumbprint
        except ConfigError:
            return None


def _mark(token: Token) -> str:
    return short_hex(token.claims.token_id)


def _rank(refusal: Denied) -> tuple[int, bool]:
    return _FIRST.index(refusal.why), refusal.retry_after_s is None
