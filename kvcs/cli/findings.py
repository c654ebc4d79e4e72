"""What settings come to: certificates, who is believed, who may come in. For ``kvcs check``.

Each question is one function, and answered as the command itself would answer it: with the same
readers, and what they say. So nothing here can be right about a file that a command refuses.
"""

import datetime
import stat
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from kvcs.cli.authorizing import policy_files
from kvcs.cli.scopes import believed
from kvcs.config import (
    Access,
    CommonSettings,
    ConsumerSettings,
    IndexedSettings,
    IndexSettings,
    ListeningSettings,
    ProducerSettings,
    RelaySettings,
    ScopedSettings,
    Settings,
    StoreSettings,
)
from kvcs.errors import ConfigError
from kvcs.kvsp.http.tokens import TokenFile, read_token
from kvcs.link import client_tls, quic_settings, server_tls
from kvcs.profile.naming import short_hex
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.issuers import shown_kid
from kvcs.trust.producers import KnownProducer, check_listed
from kvcs.trust.scope import SUITES, Scope
from kvcs.trust.tokenfile import TokenFile as ClientToken
from moqt.aio.tls import (
    Identity,
    TlsSettingsError,
    load_cas,
    load_client_identity,
    load_client_verifier,
    load_identity,
)
from moqt.certificates import subject_of

#: What is valid for less than this is worth a word.
SOON_S = 7 * 86_400.0
T = TypeVar("T")


class State(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    #: A person should know.
    NOTE = "note"
    #: Somebody may do something who has shown nothing.
    OPEN = "open"
    #: The command would not start, or refuse everything.
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that was looked at."""

    topic: str
    state: State
    text: str
    """One line. Never a secret."""


def findings_of(settings: CommonSettings, now: float) -> list[Finding]:
    """Look at everything that settings name.

    Args:
        settings: Of any command.
        now: Wall clock, in seconds.
    """
    return [
        finding
        for look in (
            *(_own_certificate, _clients, _access, _peers, _client_certificate, _token),
            *(_scopes, _services),
        )
        for finding in look(settings, now)
    ]


Listening = ProducerSettings | RelaySettings | StoreSettings | IndexSettings


# -- certificates --------------------------------------------------------------------------------


def _own_certificate(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, Listening) or not _listens(settings):
        return
    identity, wrong = _tried(lambda: load_identity(server_tls(settings)))
    if identity is None:
        yield Finding("certificate", State.WRONG, wrong)
        return
    yield _certificate_found("certificate", identity, now)
    assert settings.key_file is not None, "it was loaded"
    yield from _file_mode("key", settings.key_file)
    if isinstance(settings, Settings) and settings.ca_file is not None:
        cas, _ = _tried(lambda: load_cas(client_tls(settings)))
        if cas:
            yield _chain_found(identity, cas, now)
    if isinstance(settings, Settings):
        _, wrong = _tried(lambda: quic_settings(settings))
        if not wrong and settings.engine == "picoquic" and settings.client_ca_file is not None:
            wrong = "picoquic asks no client for a certificate, expected aioquic"
        if wrong:
            yield Finding("engine", State.WRONG, wrong)


def _certificate_found(topic: str, identity: Identity, now: float) -> Finding:
    names = ", ".join(_names(identity.certificate)) or "no name"
    until = min(one.not_valid_after_utc for one in (identity.certificate, *identity.chain))
    text = (
        f"{names}; {1 + len(identity.chain)} in its chain, in order; valid until "
        f"{until:%Y-%m-%d %H:%M}Z; the key is its own"
    )
    if until.timestamp() - now < SOON_S:
        return Finding(topic, State.NOTE, f"{text}; it expires soon")
    return Finding(topic, State.OK, text)


def _chain_found(identity: Identity, cas: Sequence[x509.Certificate], now: float) -> Finding:
    """Say whether who has our own ``ca_file`` would believe us."""
    try:
        found = identity.certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except (x509.ExtensionNotFound, ValueError):
        return Finding("chain", State.WRONG, "the certificate has no host name, expected one")
    when = datetime.datetime.fromtimestamp(now, datetime.UTC)
    policy = PolicyBuilder().store(Store(list(cas))).time(when)
    hosts: list[x509.verification.Subject] = [
        *map(x509.DNSName, found.get_values_for_type(x509.DNSName)),
        *map(x509.IPAddress, found.get_values_for_type(x509.IPAddress)),
    ]
    for host in hosts:
        try:
            policy.build_server_verifier(host).verify(identity.certificate, list(identity.chain))
        except VerificationError as exc:
            text = f"ca_file would not believe it as {host.value}: {exc}"
            return Finding("chain", State.NOTE, " ".join(text.split())[:400])
    return Finding("chain", State.OK, "whoever believes our ca_file believes the certificate")


def _clients(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, Listening) or not _listens(settings):
        return
    if settings.client_ca_file is None:
        return
    verifier, wrong = _tried(lambda: load_client_verifier(server_tls(settings)))
    if verifier is None:
        yield Finding("clients", State.WRONG, wrong)
        return
    who = ", ".join(verifier.names) or "whomever they vouch for"
    yield Finding("clients", State.OK, f"with a certificate of {settings.client_ca_file}: {who}")


def _access(settings: CommonSettings, now: float) -> Iterator[Finding]:
    """Say who may do what over MOQT."""
    if not isinstance(settings, ListeningSettings):
        return
    match settings.access:
        case Access.CERTIFIED:
            text = "whoever has such a certificate may do everything: no token is asked for"
            yield Finding("access", State.OK, text)
        case Access.LOOPBACK:
            text = "whoever is on this machine may do everything: no token is asked for"
            yield Finding("access", State.OPEN, text)
        case Access.EVERYBODY:
            yield Finding("access", State.OPEN, f"anybody who reaches {settings.listen}")
        case Access.AUTHORIZED:
            yield from _policy(settings, now)


def _policy(settings: ListeningSettings, now: float) -> Iterator[Finding]:
    files = policy_files(settings)
    assert files is not None, "that is how access was found"
    policy, wrong = _tried(files.read)
    if policy is None:
        yield Finding("tokens", State.WRONG, wrong)
        return
    _, wrong = _tried(lambda: TokenAuthority(policy, settings.audience))
    if wrong:
        yield Finding("audience", State.WRONG, wrong)
    elif settings.audience:
        text = f"tokens must be for {' or '.join(settings.audience)}"
        yield Finding("audience", State.OK, text)
    live = 0
    for one in policy.issuers.values():
        if is_live := one.is_trusted_at(now):
            live += 1
        until = "" if one.not_after is None else f" until {_date(one.not_after)}"
        text = f"of {one.issuer}, key {shown_kid(one.kid)}, are believed"
        if not is_live:
            yield Finding("tokens", State.NOTE, f"{text} no more")
        elif one.not_after is not None and one.not_after - now < SOON_S:
            yield Finding("tokens", State.NOTE, f"{text}{until}, which is soon")
        else:
            yield Finding("tokens", State.OK, f"{text}{until}")
    for identity in policy.identities:
        yield Finding("certificates", State.OK, f"those of {identity.uri} allow something")
    if policy.identities and settings.client_ca_file is None:
        text = "identities are listed, but nobody is asked for a certificate: set client_ca_file"
        yield Finding("certificates", State.WRONG, text)
    if not live and not policy.identities:
        yield Finding("tokens", State.WRONG, "those of nobody are believed now")
    revoked = policy.revocations
    if count := len(revoked.token_ids) + len(revoked.kids):
        yield Finding("tokens", State.OK, f"{count} tokens and keys are revoked")


def _peers(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, Settings):
        return
    if settings.insecure_skip_verify:
        yield Finding("peers", State.OPEN, "whoever answers is believed: insecure_skip_verify")
        return
    cas, wrong = _tried(lambda: load_cas(client_tls(settings)))
    if wrong:
        yield Finding("peers", State.WRONG, wrong)
    elif cas is None:
        yield Finding("peers", State.OK, "whom the public CAs vouch for is believed")
    else:
        valid = [one for one in cas if one.not_valid_after_utc.timestamp() > now]
        state = State.OK if valid else State.WRONG
        text = f"whom {settings.ca_file} vouches for: {len(valid)} of {len(cas)} CAs are valid"
        yield Finding("peers", state, text)


def _client_certificate(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, Settings) or settings.client_certificate_file is None:
        return
    identity, wrong = _tried(lambda: load_client_identity(client_tls(settings)))
    if identity is None:
        yield Finding("client certificate", State.WRONG, wrong)
        return
    yield _certificate_found("client certificate", identity, now)
    if not subject_of(_der(identity.certificate)):
        text = "it has neither a URI nor a DNS name: no listener of ours takes it"
        yield Finding("client certificate", State.WRONG, text)
    if settings.client_key_file is not None:
        yield from _file_mode("client key", settings.client_key_file)


def _token(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, Settings) or settings.token_file is None:
        return
    file = settings.token_file
    held, wrong = _tried(lambda: ClientToken(file).read(now))
    if held is None:
        yield Finding("token", State.WRONG, wrong)
    else:
        text = f"{held.mark} is shown to whom we dial, until {_date(held.expires_at)}"
        yield Finding("token", State.OK, text)


# -- scopes --------------------------------------------------------------------------------------


def _scopes(settings: CommonSettings, now: float) -> Iterator[Finding]:
    if not isinstance(settings, ScopedSettings):
        return
    scopes, wrong = _tried(settings.load_scopes)
    if scopes is None:
        yield Finding("scope", State.WRONG, wrong)
        return
    for number, scope in enumerate(scopes):
        yield from _scope_found(scope, now, is_current=number == 0)
    if isinstance(settings, StoreSettings) and len(scopes) > 1:
        yield Finding("scope", State.WRONG, f"{len(scopes)} scopes, expected one of a store")
    if isinstance(settings, ProducerSettings):
        yield from _producer_key(settings, scopes[0], now)
    if isinstance(settings, ConsumerSettings | StoreSettings):
        for scope in scopes:
            yield from _whose_manifests(settings, scope)


def _scope_found(scope: Scope, now: float, *, is_current: bool) -> Iterator[Finding]:
    topic = f"scope {short_hex(scope.key.scope_id)}"
    role = "" if is_current else ", looked in only"
    if scope.protection is None:
        yield Finding(topic, State.OPEN, f"in clear{role}: relays can read its objects")
    else:
        [suite] = [name for name, suite in SUITES.items() if suite is scope.protection.suite]
        text = f"sealed with {suite}, padding {scope.protection.padding}{role}"
        yield Finding(topic, State.OK, text)
    for one in scope.producers:
        yield _producer_found(topic, one, now)
    if not scope.producers:
        yield Finding(topic, State.OPEN, "lists no producers: who has the key can publish")
    for issuer in scope.issuers.values():
        live = issuer.is_trusted_at(now)
        text = f"tokens of {issuer.issuer} are believed{'' if live else ' no more'}"
        yield Finding(topic, State.OK if live else State.NOTE, text)


def _producer_found(topic: str, one: KnownProducer, now: float) -> Finding:
    who = f"producer {short_hex(one.kid)}" + (f" ({one.name})" if one.name else "")
    if one.not_before is not None and now < one.not_before:
        return Finding(topic, State.NOTE, f"{who} is believed from {_date(one.not_before)} only")
    if one.not_after is None:
        return Finding(topic, State.OK, f"{who} is believed without end")
    if now >= one.not_after:
        return Finding(topic, State.NOTE, f"{who} is believed no more since {_date(one.not_after)}")
    state = State.NOTE if one.not_after - now < SOON_S else State.OK
    return Finding(topic, state, f"{who} is believed until {_date(one.not_after)}")


def _producer_key(settings: ProducerSettings, scope: Scope, now: float) -> Iterator[Finding]:
    key, wrong = _tried(settings.load_producer_key)
    if not wrong:
        _, wrong = _tried(lambda: check_listed(scope.producers, key, now))
    if wrong:
        yield Finding("producer key", State.WRONG, wrong)
    elif key is None:
        yield Finding("producer key", State.OPEN, "manifests are not signed")
    else:
        listed = ", which the scope lists" if scope.producers else ""
        yield Finding("producer key", State.OK, f"signs as {short_hex(key.kid)}{listed}")
    if settings.producer_key_file is not None and not wrong:
        yield from _file_mode("producer key", settings.producer_key_file)


def _whose_manifests(settings: ConsumerSettings | StoreSettings, scope: Scope) -> Iterator[Finding]:
    topic = f"manifests of scope {short_hex(scope.key.scope_id)}"
    found, wrong = _tried(lambda: believed(settings, scope))
    if found is None:
        yield Finding(topic, State.WRONG, wrong)
        return
    trusted, required = found
    if required and not len(trusted):
        yield Finding(topic, State.WRONG, "those of nobody are believed now: every key has expired")
    elif required:
        yield Finding(topic, State.OK, f"believed if one of {len(trusted)} keys has signed them")
    else:
        text = "believed without a signature: from whoever has the scope key"
        yield Finding(topic, State.OPEN, text)


# -- services over HTTP --------------------------------------------------------------------------


def _services(settings: CommonSettings, now: float) -> Iterator[Finding]:
    tokens_file = None
    if isinstance(settings, IndexSettings | ProducerSettings | StoreSettings):
        tokens_file = settings.tokens_file
    if tokens_file is not None:
        tokens, wrong = _tried(lambda: TokenFile.read(tokens_file))
        if tokens is None:
            yield Finding("tokens over HTTP", State.WRONG, wrong)
        else:
            yield Finding("tokens over HTTP", State.OK, f"{len(tokens)} are known")
    files = []
    if isinstance(settings, IndexedSettings):
        files.append(("index token", settings.index_token_file))
    if isinstance(settings, ConsumerSettings):
        files.append(("block token", settings.block_token_file))
    for topic, file in files:
        if file is None:
            continue
        _, wrong = _tried(lambda: read_token(file))  # noqa: B023 - called at once
        yield Finding(topic, State.WRONG, wrong) if wrong else Finding(topic, State.OK, "readable")
        if not wrong:
            yield from _file_mode(topic, file)


# -- parts ---------------------------------------------------------------------------------------


def _listens(settings: Listening) -> bool:
    if isinstance(settings, ProducerSettings | StoreSettings) and settings.http_listen is not None:
        return True
    return settings.listen is not None


def _tried(read: Callable[[], T]) -> tuple[T | None, str]:
    """Return what was read, or what the command would say of it."""
    try:
        return read(), ""
    except (ConfigError, TlsSettingsError) as exc:
        return None, " ".join(str(exc).split())


def _file_mode(topic: str, file: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return  # it was there when it was read
    if mode & 0o077:
        text = f"{file} has mode {mode:04o}: others may read or change it, expected 0600"
        yield Finding(topic, State.OPEN, text)


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return (
        *found.get_values_for_type(x509.UniformResourceIdentifier),
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    )


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


def _date(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M}Z"
