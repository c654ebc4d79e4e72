"""An issuer of tokens, and the policy of endpoints that believe it."""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.trust.authority import TokenAuthority
from kvcs.trust.claims import Claims
from kvcs.trust.grants import Permission, Role, permissions_of
from kvcs.trust.issuers import Issuers, Revocations
from kvcs.trust.policy import Policy
from kvcs.trust.tokenfile import token_to_text
from kvcs.trust.tokens import CAT_TOKEN_TYPE, SigningKey, issue
from moqt.authority import Action
from moqt.wire.token import AuthorizationToken
from tests.integration.kvcs.scene import SCOPE

AUDIENCE = "moqt://relay.example:4433"
ISSUER = "issuer.example"
OTHER_SCOPE = bytes(32)
#: Opens a session, and allows nothing in it.
DOOR = (Permission(frozenset({Action.CLIENT_SETUP})),)


@dataclass
class Issuer:
    """Signs tokens, and remembers what it revoked."""

    key: SigningKey = field(
        default_factory=lambda: SigningKey(ISSUER, b"test-1", Ed25519PrivateKey.generate())
    )
    revoked: set[bytes] = field(default_factory=set)

    def issue(
        self,
        role: Role | None = Role.CONSUMER,
        *,
        scope: bytes = SCOPE.scope_id,
        audience: str = AUDIENCE,
        lives_s: float = 600.0,
        recheck_s: float = 60.0,
        permissions: tuple[Permission, ...] | None = None,
        revoked: bool = False,
        thumbprint: bytes | None = None,
    ) -> bytes:
        """Return a token; of no role: one that opens a session and allows nothing in it."""
        if permissions is None:
            permissions = DOOR if role is None else permissions_of(role, [scope])
        now, token_id = time.time(), secrets.token_bytes(16)
        if revoked:
            self.revoked.add(token_id)
        claims = Claims(
            issuer=ISSUER,
            audience=(audience,),
            expires_at=now + lives_s,
            subject="somebody",
            issued_at=now - 600.0,
            token_id=token_id,
            thumbprint=thumbprint,
            permissions=permissions,
            revalidate_s=recheck_s,
        )
        return issue(claims, self.key)

    @property
    def policy(self) -> Policy:
        """What believes it, but for what it revoked."""
        return Policy(
            Issuers([self.key.verifier]), revocations=Revocations(frozenset(self.revoked))
        )

    def authority(self, audience: str = AUDIENCE, **options: float) -> TokenAuthority:
        """Return the authority of an endpoint with that name."""
        return TokenAuthority(self.policy, [audience], **options)

    def file(self, folder: Path, name: str, token: bytes) -> Path:
        """Write a token as a client keeps it."""
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(token_to_text(token))
        return path

    def issuers_file(self, folder: Path) -> Path:
        """Write what a server is told of this issuer."""
        assert isinstance(self.key.key, Ed25519PrivateKey)
        public = self.key.key.public_key().public_bytes_raw().hex()
        path = folder / "issuers.toml"
        path.write_text(
            f'[[issuers]]\nissuer = "{ISSUER}"\nkid = "test-1"\npublic_key = "{public}"\n'
        )
        return path


def shown(token: bytes) -> AuthorizationToken:
    """Return a token as a client shows it."""
    return AuthorizationToken.use_value(CAT_TOKEN_TYPE, token)


@dataclass(frozen=True)
class Shows:
    """What a session that is dialled shows in SETUP."""

    token: bytes

    def __call__(self) -> tuple[AuthorizationToken, ...]:
        return (shown(self.token),)
