"""``kvcs token``: issue authorization tokens, explain them, and say what an endpoint would do."""

import re
import secrets
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from textwrap import dedent

import orjson
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from kvcs.cli.inputs import parse_name, read_octets, shown_name
from kvcs.cli.tokenshown import described, lines_of
from kvcs.errors import BadToken, ConfigError
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.claims import Claims
from kvcs.trust.grants import ROLE_LIFETIMES_S, BadPermission, Permission, Role, permissions_of
from kvcs.trust.identities import read_certificate
from kvcs.trust.issuers import IssuerKey
from kvcs.trust.keyfiles import (
    private_key_from_file,
    private_key_to_pem,
    replace_secret,
    write_new_secret,
)
from kvcs.trust.keys import default_kid
from kvcs.trust.policy import Policy, PolicyFiles
from kvcs.trust.tokenfile import token_from_octets, token_to_text
from kvcs.trust.tokens import (
    CAT_TOKEN_TYPE,
    MAX_LIFETIME_S,
    SigningKey,
    UnverifiedToken,
    issue,
    read_token,
    read_unverified,
)
from moqt.authority import Action, Bearer, Denied
from moqt.wire.token import AuthorizationToken

DESCRIPTION = """
Authorization tokens say who may do what at a relay, a producer or a store: which actions, in
which scope, until when. An issuer signs them with its private key; servers have the public one
in a file of issuers and can sign nothing. Whoever has a token can use it until it expires,
unless it is bound to a client certificate: keep it like a password. No secret is ever an
argument, and every file with one is written with mode 0600.
"""
EPILOG = """
examples, from nothing to a token that is believed:
  kvcs token issuer issuer.key --issuer cluster.example >> issuers.toml
  kvcs token issue --key-file issuer.key --issuers issuers.toml --role consumer \\
      --scope SCOPE_ID --audience moqt://relay.example:4433 --subject decode-7 --out decode-7.token
  kvcs token show decode-7.token
  kvcs token check decode-7.token --issuers issuers.toml --audience moqt://relay.example:4433

kvcs token issue --help, and so on, says more. `kvcs keys` prints Scope IDs.
"""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")
_AUDIENCE = re.compile(r"moqt://[!-.0-~]+")
_TOKEN_ID_OCTETS = 16
_REVALIDATE_S = 60.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand, and its own subcommands."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT", title="what to do")

    def add(name: str, about: str, description: str) -> ArgumentParser:
        sub = commands.add_parser(
            name,
            help=about,
            description=dedent(description).strip(),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    _add_issuer(add("issuer", "make the key of an issuer", _ISSUER))
    _add_issue(add("issue", "sign a token", _ISSUE))
    _add_show(add("show", "explain a token, believed or not", _SHOW))
    _add_check(add("check", "say what an endpoint would answer to a token", _CHECK))


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    return {"issuer": _issuer, "issue": _issue, "show": _show, "check": _check}[args.what](args)


# -- making an issuer ------------------------------------------------------------------------------

_ISSUER = """
Make a private key (Ed25519) in FILE, for whoever issues tokens, and print the table with its
public key that servers have in their file of issuers. A second key beside the first lets
tokens of both be believed while one takes the place of the other.

example:
  kvcs token issuer issuer.key --issuer cluster.example --kid 2026-11 >> issuers.toml
"""


def _add_issuer(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the private key goes; must not exist")
    parser.add_argument(
        "--issuer", required=True, metavar="NAME", help="what tokens will say of who issued them"
    )
    parser.add_argument(
        "--kid",
        metavar="TEXT",
        help="what tokens will call the key; left out: the beginning of its thumbprint",
    )


def _issuer(args: Namespace) -> int:
    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    kid = default_kid(public) if args.kid is None else args.kid.encode()
    IssuerKey(args.issuer, kid, public)  # whether it can be one, before anything is written
    table = {
        "issuer": args.issuer,
        **({"kid_hex": kid.hex()} if args.kid is None else {"kid": args.kid}),
        "public_key": public.public_bytes_raw().hex(),
    }
    write_new_secret(args.file, private_key_to_pem(key), what="issuer key file")
    if args.json:
        print(orjson.dumps(table).decode())
    else:
        # A text of JSON is one of TOML.
        lines = [f"{name} = {orjson.dumps(value).decode()}" for name, value in table.items()]
        print("\n".join(["[[issuers]]", *lines]))
    print(f"{args.file}: a new private key; whoever has it can issue tokens", file=sys.stderr)
    return 0


# -- issuing ---------------------------------------------------------------------------------------

_ISSUE = """
Sign a token and print it in base64url, or write it to a file, in place of the one that may be
there: a client that shows it finds the new one by itself.

roles: a consumer discovers and retrieves, a producer announces and publishes, a relay (or a
store) does both towards its upstream; all of them in the scopes that are given, and nowhere else.

example:
  kvcs token issue --key-file issuer.key --issuers issuers.toml --role producer \\
      --scope SCOPE_ID --audience moqt://relay.example:4433 --subject prefill-1 --ttl 12h
"""


def _add_issue(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--key-file", required=True, metavar="FILE", help="private key of the issuer, mode 0600")
    add("--issuers", metavar="FILE", help="file of issuers, which names the issuer and its key")
    add("--issuer", metavar="NAME", help="instead of --issuers: what the issuer is called")
    add("--kid", metavar="TEXT", help="with --issuer: what its key is called, if it was given one")
    add("--role", required=True, choices=[*Role], help="what it is for")
    add(
        "--scope",
        required=True,
        action="append",
        metavar="SCOPE_ID",
        help="Scope ID in hex; several times for several scopes",
    )
    add("--compatibility", metavar="ID", help="Compatibility ID in hex: for this model alone")
    add(
        "--audience",
        required=True,
        action="append",
        metavar="URI",
        help="the endpoint that it is for, as it is configured there: moqt://HOST:PORT; several "
        "times for several endpoints, each of which could then use it at the others",
    )
    add("--subject", metavar="TEXT", help="who it is for: for logs, and limits of each")
    add(
        "--ttl",
        metavar="TIME",
        help="how long it lives: 90s, 15m, 1h, 1d at most; left out: 1h for a consumer, else 1d",
    )
    add(
        "--bind",
        metavar="FILE",
        help="PEM file with the client certificate that it is to be good with, and with no other",
    )
    add("--out", metavar="FILE", help="write it here with mode 0600, in place of what is there")


def _issue(args: Namespace) -> int:
    key = _signing_key(args)
    now = float(int(time.time()))
    role = Role(args.role)
    claims = Claims(
        issuer=key.issuer,
        audience=tuple(_audience(name) for name in args.audience),
        expires_at=now + (ROLE_LIFETIMES_S[role] if args.ttl is None else _lifetime(args.ttl)),
        subject=args.subject or "",
        issued_at=now,
        token_id=secrets.token_bytes(_TOKEN_ID_OCTETS),
        thumbprint=None if args.bind is None else _thumbprint_of(args.bind),
        permissions=_permissions(role, args),
        revalidate_s=_REVALIDATE_S,
    )
    token = issue(claims, key)
    if args.out is not None:
        replace_secret(args.out, token_to_text(token).encode() + b"\n", what="token file")
    about = described(read_unverified(token))
    if args.json:
        shown = {} if args.out is not None else {"token": token_to_text(token)}
        print(orjson.dumps(about | shown).decode())
    elif args.out is None:
        print(token_to_text(token))
    if args.out is not None:
        lives = f"{claims.expires_at - now:.0f} s"
        print(f"{args.out}: token {about['token_id']} for {claims.who}, {lives}", file=sys.stderr)
    return 0


def _signing_key(args: Namespace) -> SigningKey:
    private = private_key_from_file(args.key_file)
    public = private.public_key()
    if (args.issuers is None) == (args.issuer is None):
        raise ConfigError("expected one of --issuers and --issuer, which says who issues the token")
    if args.issuers is None:
        kid = default_kid(public) if args.kid is None else args.kid.encode()
        return SigningKey(args.issuer, kid, private)
    if args.kid is not None:
        raise ConfigError("--kid is for --issuer; a file of issuers has it already")
    for known in PolicyFiles(args.issuers).read().issuers.values():
        if known.key == public:
            return SigningKey(known.issuer, known.kid, private)
    raise ConfigError(f"issuers file {args.issuers} does not have the key of {args.key_file}")


def _permissions(role: Role, args: Namespace) -> tuple[Permission, ...]:
    scopes = [_identifier("--scope", text) for text in args.scope]
    model = args.compatibility
    try:
        return permissions_of(
            role, scopes, None if model is None else _identifier("--compatibility", model)
        )
    except BadPermission as exc:
        raise ConfigError(f"--scope, --compatibility: {exc}") from None


def _identifier(flag: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text[:80]!r}, expected hex") from None


def _audience(text: str) -> str:
    if not _AUDIENCE.fullmatch(text):
        raise ConfigError(f"--audience is {text[:80]!r}, expected moqt://HOST:PORT and no path")
    return text


def _lifetime(text: str) -> float:
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 1 <= seconds <= MAX_LIFETIME_S:
        raise ConfigError(f"--ttl is {text[:40]!r}, expected a time of 1s to 1d, such as 15m or 1h")
    return float(seconds)


def _certificate_der(path: str) -> bytes:
    try:
        certificate = x509.load_pem_x509_certificate(read_octets(path))
    except ValueError:
        raise ConfigError(f"{shown_name(path)}: not a certificate in PEM") from None
    return certificate.public_bytes(Encoding.DER)


def _thumbprint_of(path: str) -> bytes:
    thumbprint = read_certificate(_certificate_der(path)).thumbprint
    if thumbprint is None:
        raise ConfigError(f"{shown_name(path)}: its key is neither Ed25519 nor P-256")
    return thumbprint


# -- looking at one --------------------------------------------------------------------------------

_SHOW = """
Decode a token and say what it allows. With --issuers, also whether it verifies; exit status 0
whatever comes of that, 13 if it is no token at all. The signature is never printed.

example:
  kvcs token show decode-7.token --issuers issuers.toml
"""
_CHECK = """
Say what an endpoint would answer whoever shows this token now: with --action, to this request;
without, whether it would be believed at all. Exit status 0 if it would, else 13, and why: here
in full, though the client is told one of three codes.

example:
  kvcs token check decode-7.token --issuers issuers.toml --audience moqt://relay.example:4433 \\
      --action subscribe --name kvcs-1/SCOPE_ID/COMPATIBILITY_ID/ANCHOR/PUBLICATION--manifest
"""


def _add_file(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a token, in base64url or as it is; - for standard input"
    )


def _add_show(parser: ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument("--issuers", metavar="FILE", help="file of issuers, to verify it as well")


def _add_check(parser: ArgumentParser) -> None:
    _add_file(parser)
    add = parser.add_argument
    add("--issuers", required=True, metavar="FILE", help="file of issuers of the endpoint")
    add(
        "--audience",
        required=True,
        action="append",
        metavar="URI",
        help="name of the endpoint, moqt://HOST:PORT; several times if it has several",
    )
    add("--revocations", metavar="FILE", help="list of what is revoked")
    add("--client-certificate", metavar="FILE", help="PEM file with what the client shows in TLS")
    add("--action", choices=[_flag_of(action) for action in Action], help="what is asked for")
    add(
        "--name",
        metavar="NAME",
        help="with --action: namespace or prefix, kvcs-1/HEX/..., and --TRACK for one track",
    )


def _show(args: Namespace) -> int:
    value = _read_file(args.file)
    token = _explained(value)
    verdict: str | None = None
    is_signed: bool | None = None
    if args.issuers is not None:
        try:
            read_token(value, PolicyFiles(args.issuers).read().issuers, token.claims.audience)
            is_signed, verdict = True, "good"
        except BadToken as exc:
            is_signed, verdict = False, str(exc)
    if args.json:
        print(orjson.dumps(described(token) | {"signed": is_signed, "verdict": verdict}).decode())
    else:
        print("\n".join(lines_of(token, time.time())))
        print(f"{'signature':<15}{verdict or 'not checked: no --issuers'}")
    return 0


def _check(args: Namespace) -> int:
    if (args.action is None) and (args.name is not None):
        raise ConfigError("--name is for --action")
    value = _read_file(args.file)
    policy = PolicyFiles(args.issuers, args.revocations).read()
    der = None if args.client_certificate is None else _certificate_der(args.client_certificate)
    now = time.time()
    audience = [_audience(name) for name in args.audience]
    try:
        who = _asked(args, value, policy, audience, der, now)
    except BadToken as exc:
        if args.json:
            answer = {"allowed": False, "told": exc.why.name, "reason": str(exc)}
            print(orjson.dumps(answer).decode())
        raise
    if args.json:
        print(orjson.dumps({"allowed": True, "who": who}).decode())
    else:
        done = "believed" if args.action is None else f"allowed to {args.action}"
        print(f"{done}: {who}")
    return 0


def _asked(
    args: Namespace,
    value: bytes,
    policy: Policy,
    audience: list[str],
    certificate: bytes | None,
    now: float,
) -> str:
    """Ask what is asked for; return who may.

    Raises:
        BadToken: With the whole reason, if nobody may.
    """
    authority = TokenAuthority(policy, audience)
    shown = AuthorizationToken.use_value(CAT_TOKEN_TYPE, value)
    _explained(value)  # more of why it is none than an endpoint would say
    if args.action is None:
        return authority.believed(shown, certificate, now).claims.who
    action = Action[args.action.upper().replace("-", "_")]
    namespace, track = (None, None) if args.name is None else parse_name(args.name)
    if namespace is None and action > Action.SERVER_SETUP:
        raise ConfigError(f"--action {args.action} needs --name, a namespace or prefix")
    answer = authority.decide(action, namespace, track, Bearer((shown,), certificate), now)
    if isinstance(answer, Denied):
        raise BadToken(answer.why, answer.reason, retry_after_s=answer.retry_after_s)
    return answer.who


def _read_file(path: str) -> bytes:
    try:
        return token_from_octets(read_octets(path))
    except BadToken as exc:
        raise BadToken(exc.why, f"{shown_name(path)}: {exc}") from None


def _explained(value: bytes) -> UnverifiedToken:
    """Look into a token of one's own, of which all may be told."""
    try:
        return read_unverified(value)
    except BadToken as exc:
        detail = f": {exc.__cause__}" if exc.__cause__ is not None else ""
        raise BadToken(exc.why, f"{exc}{detail}") from None


def _flag_of(action: Action) -> str:
    return action.name.lower().replace("_", "-")
