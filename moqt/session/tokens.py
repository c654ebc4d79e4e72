"""Authorization Tokens that the peer registered under an alias (MOQT, "Authorization Token").

Only the bookkeeping of aliases is here; what a token allows is the application's to say.
"""

from collections.abc import Iterable

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
