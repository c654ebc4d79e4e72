"""Authorization Tokens and their aliases, of both directions (MOQT, "Authorization Token").

Only the bookkeeping of aliases is here; what a token allows is an Authority's to say.
"""

from collections.abc import Iterable
from typing import Protocol

from moqt.codepoints import TokenAliasType
from moqt.errors import AuthTokenCacheOverflow, DuplicateAuthTokenAlias
from moqt.wire.token import AuthorizationToken


class UnknownTokenAlias(Exception):
    """A message uses an alias that is not registered: the message is refused, nothing else."""


class TokenCache:
    """The tokens a peer registered with us; bounded in octets by what our SETUP offered."""

    def __init__(self, limit_octets: int) -> None:
        self._limit = limit_octets
        self._octets = 0
        self._tokens: dict[int, AuthorizationToken] = {}

    def resolve(
        self, tokens: Iterable[AuthorizationToken], *, in_setup: bool = False
    ) -> tuple[AuthorizationToken, ...]:
        """Apply what the tokens of one message ask for; return the usable ones with values.

        Registrations take effect even when the message is refused for other reasons, so this is
        called before anything else is looked at.

        Raises:
            DuplicateAuthTokenAlias: If an alias is registered twice; the session closes.
            AuthTokenCacheOverflow: If the limit is passed outside SETUP; the session closes.
            UnknownTokenAlias: If an alias is used or deleted that is not registered.
        """
        usable: list[AuthorizationToken] = []
        unknown: int | None = None
        for token in tokens:
            alias = token.alias
            match token.alias_type:
                case TokenAliasType.USE_VALUE:
                    usable.append(token)
                case TokenAliasType.REGISTER if alias is not None:
                    self._register(alias, token, in_setup=in_setup)
                    usable.append(token)
                case TokenAliasType.USE_ALIAS if alias in self._tokens:
                    usable.append(self._tokens[alias])
                case TokenAliasType.DELETE if alias in self._tokens:
                    self._octets -= self._tokens.pop(alias).cache_octets
                case _:
                    unknown = alias
        if unknown is not None:
            raise UnknownTokenAlias(f"token alias {unknown} is not registered")
        return tuple(usable)

    def _register(self, alias: int, token: AuthorizationToken, *, in_setup: bool) -> None:
        if alias in self._tokens:
            raise DuplicateAuthTokenAlias(f"token alias {alias} is registered already")
        total = self._octets + token.cache_octets
        if total > self._limit:
            if in_setup:
                return  # as if it were USE_VALUE: the sender did not know the limit yet
            raise AuthTokenCacheOverflow(f"{total} octets of tokens, limit {self._limit}")
        self._octets = total
        self._tokens[alias] = token


class Answerable(Protocol):
    """A request of ours."""

    answered: bool


class Wallet:
    """The tokens that we show. Each is registered once where the peer has room to keep it.

    An alias is used once the request that registered it was answered: on another stream it could
    come ahead of its registration otherwise. Until then, and where there is no room, a token goes
    by value. Nothing is deleted: a session sees few tokens.
    """

    def __init__(self) -> None:
        self._room = 0
        self._aliases: dict[tuple[int | None, bytes], tuple[int, Answerable]] = {}

    def peer_keeps(self, octets: int) -> None:
        """Note the peer's MAX_AUTH_TOKEN_CACHE_SIZE."""
        self._room = octets

    def to_show(
        self, tokens: Iterable[AuthorizationToken], *, register: bool = True
    ) -> tuple[AuthorizationToken, ...]:
        """Return how to show tokens, which are given with their values, in one message.

        ``register``: whether the message will be told of with :meth:`shown`.
        """
        room, alias = self._room, len(self._aliases)
        shown = []
        for token in dict.fromkeys(tokens):  # twice in one message is forbidden
            token_type, value = token.token_type or 0, token.value
            known = self._aliases.get((token_type, value))
            if known is not None and known[1].answered:
                shown.append(AuthorizationToken.use_alias(known[0]))
            elif register and known is None and token.cache_octets <= room:
                shown.append(AuthorizationToken.register(alias, token_type, value))
                room, alias = room - token.cache_octets, alias + 1
            else:
                shown.append(AuthorizationToken.use_value(token_type, value))
        return tuple(shown)

    def shown(self, tokens: Iterable[AuthorizationToken], request: Answerable) -> None:
        """Note that a request went out with tokens as :meth:`to_show` gave them."""
        for token in tokens:
            if token.alias_type is TokenAliasType.REGISTER and token.alias is not None:
                self._room -= token.cache_octets
                self._aliases[token.token_type or 0, token.value] = token.alias, request
