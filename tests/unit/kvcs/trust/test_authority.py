"""The authority of an endpoint: every decision of the vectors, the order of refusals, the cache."""

from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.errors import ConfigError
from kvcs.trust import authority as module
from kvcs.trust.authority import MAX_SHOWN, Remembered, TokenAuthority
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.identities import Identity
from kvcs.trust.issuers import IssuerKey, Issuers, Revocations
from kvcs.trust.keys import thumbprint
from kvcs.trust.policy import Policy
from kvcs.trust.tokens import read_token
from moqt.authority import Action, Authority, Bearer, Denial, Denied, Granted
from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken
from tests.unit.kvcs.trust.certificates import certificate
from tests.unit.kvcs.trust.vectors import (
    ALL,
    AUDIENCE,
    ED25519,
    ISSUER,
    ISSUERS,
    NOW,
    PRIVATE,
    TOKENS,
    token_with,
    valid,
)

SCOPE = bytes.fromhex(ALL["decisions"][1]["namespace"][1])
PREFIX = TrackNamespace.of("kvcs-1", SCOPE)
CTI = bytes.fromhex("00112233445566778899aabbccddeeff")
WHO = f"{ISSUER}/decode-7"
URI = "spiffe://cluster.example/decode/7"
POLICY = Policy(issuers=ISSUERS)
BY_NAME = {
    "consumer": valid("consumer, EdDSA"),
    "producer": valid("producer, EdDSA"),
    "one model": valid("consumer of one model"),
}
GOOD = BY_NAME["consumer"]
EXPIRED = token_with(exp_4=NOW - 31, iat_6=NOW - 60)
EARLY = token_with(nbf_5=NOW + 40)
NO_CLAIM = token_with(moqt_327=None)
BAD = GOOD[:-1] + b"\0"


def bearer(*values: bytes, certificate: bytes | None = None) -> Bearer:
    return Bearer(
        tuple(AuthorizationToken.use_value(1, value) for value in values), certificate, "192.0.2.1"
    )


def ask(
    shown: Bearer,
    *,
    policy: Policy = POLICY,
    action: Action = Action.SUBSCRIBE_NAMESPACE,
    now: float = NOW,
) -> Granted | Denied:
    authority: Authority = TokenAuthority(policy, [AUDIENCE])
    return authority.decide(action, PREFIX, None, shown, now)


@pytest.mark.parametrize("case", ALL["decisions"], ids=lambda case: case["what"])
def test_every_decision_of_the_vectors_is_taken_so(case: dict[str, Any]) -> None:
    fields = case["namespace"]
    namespace = None if fields is None else TrackNamespace.of(*map(bytes.fromhex, fields))
    track = None if case["name"] is None else case["name"].encode()
    authority = TokenAuthority(POLICY, [AUDIENCE])

    found = authority.decide(
        Action(case["action"]), namespace, track, bearer(BY_NAME[case["token"]]), NOW
    )

    if case["allowed"]:
        assert isinstance(found, Granted)
        assert (found.who, found.token) == (WHO, "00112233")
    else:
        assert isinstance(found, Denied)
        assert (found.why, found.retry_after_s) == (Denial.UNAUTHORIZED, None)


@pytest.mark.parametrize("case", TOKENS["refused"], ids=lambda case: case["name"])
def test_every_refused_token_of_the_vectors_is_refused_with_its_code(case: dict[str, Any]) -> None:
    found = ask(bearer(bytes.fromhex(case["token"])))

    assert isinstance(found, Denied)
    assert case["error"].startswith(found.why.name)


# -- several tokens, and none ----------------------------------------------------------------------


def test_who_shows_nothing_is_not_allowed() -> None:
    found = ask(bearer())

    assert found == Denied(Denial.UNAUTHORIZED, "neither a token nor a client certificate")


@pytest.mark.parametrize("others", [(BAD,), (EXPIRED, BAD), (NO_CLAIM, EARLY, BAD)])
def test_one_token_that_allows_is_enough_wherever_it_stands(others: tuple[bytes, ...]) -> None:
    for tokens in ((GOOD, *others), (*others, GOOD)):
        assert isinstance(ask(bearer(*tokens)), Granted)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ((NO_CLAIM, EXPIRED, BAD), Denial.MALFORMED),
        ((BAD, EXPIRED, NO_CLAIM), Denial.MALFORMED),
        ((NO_CLAIM, EXPIRED), Denial.EXPIRED),
        ((EXPIRED, EARLY), Denial.EXPIRED),
        ((NO_CLAIM, NO_CLAIM), Denial.UNAUTHORIZED),
        ((NO_CLAIM, EARLY), Denial.UNAUTHORIZED),
    ],
)
def test_of_several_refusals_the_first_in_order_is_told(
    tokens: tuple[bytes, ...], why: Denial
) -> None:
    found = ask(bearer(*tokens))

    assert isinstance(found, Denied)
    assert found.why is why


def test_only_a_token_that_is_not_valid_yet_says_when_to_come_again() -> None:
    for tokens in ((EARLY,), (NO_CLAIM, EARLY), (EARLY, NO_CLAIM)):
        found = ask(bearer(*tokens))
        assert isinstance(found, Denied)
        assert found.retry_after_s == 10.0
    for tokens in ((BAD, EARLY), (EXPIRED, EARLY), (NO_CLAIM,)):
        found = ask(bearer(*tokens))
        assert isinstance(found, Denied)
        assert found.retry_after_s is None


def test_a_token_of_another_type_is_skipped_if_another_allows_and_malformed_otherwise() -> None:
    other = AuthorizationToken.use_value(0, GOOD)
    good = AuthorizationToken.use_value(1, GOOD)

    assert isinstance(ask(Bearer((other, good))), Granted)
    found = ask(Bearer((other,)))
    assert found == Denied(Denial.MALFORMED, "token of type 0, expected 1")
    alias = ask(Bearer((AuthorizationToken.use_alias(1),)))
    assert isinstance(alias, Denied)
    assert alias.why is Denial.MALFORMED


def test_more_tokens_than_anybody_needs_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ask(bearer(*[BAD] * (MAX_SHOWN - 1), GOOD)), Granted)
    monkeypatch.setattr(module, "read_token", None)

    found = ask(bearer(*[GOOD] * (MAX_SHOWN + 1)))
    assert found == Denied(Denial.MALFORMED, f"{MAX_SHOWN + 1} tokens, limit {MAX_SHOWN}")


# -- what is told to logs --------------------------------------------------------------------------


def test_who_was_refused_is_told_only_where_the_signature_is_good() -> None:
    found = ask(bearer(GOOD), action=Action.PUBLISH)
    assert found == Denied(
        Denial.UNAUTHORIZED, "token does not allow PUBLISH", None, WHO, "00112233"
    )
    stranger = ask(bearer(BAD))
    assert isinstance(stranger, Denied)
    assert (stranger.who, stranger.token) == ("", "")


# -- what still runs -------------------------------------------------------------------------------


def test_what_runs_is_asked_about_again_soon_and_ends_with_its_token() -> None:
    authority = TokenAuthority(POLICY, [AUDIENCE], recheck_s=3.0)

    def decide(now: float) -> Granted | Denied:
        return authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD), now)

    end = NOW + 3600 + 30
    assert decide(NOW) == Granted(WHO, NOW + 3, end, "00112233")
    assert decide(end - 1) == Granted(WHO, end, end, "00112233")
    over = decide(end)
    assert isinstance(over, Denied)
    assert over.why is Denial.EXPIRED


def test_an_interval_shorter_than_ours_is_kept() -> None:
    found = ask(bearer(token_with(reval_328=1)))

    assert isinstance(found, Granted)
    assert found.check_at == NOW + 1


@pytest.mark.parametrize("changes", [{"reval_328": None}, {"reval_328": 0}])
def test_what_a_token_without_an_interval_allowed_is_not_asked_about_again(
    changes: dict[str, Any],
) -> None:
    found = ask(bearer(token_with(**changes)))

    assert isinstance(found, Granted)
    assert (found.check_at, found.expires_at) == (None, None)


# -- what is believed, and no more -----------------------------------------------------------------


@pytest.mark.parametrize(
    "revocations",
    [
        Revocations(token_ids=frozenset({CTI})),
        Revocations(kids=frozenset({b"issuer-1"})),
    ],
    ids=["cti", "kid"],
)
def test_what_was_revoked_is_not_allowed_from_then_on(revocations: Revocations) -> None:
    authority = TokenAuthority(POLICY, [AUDIENCE])
    shown = bearer(GOOD)
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", shown, NOW), Granted)

    authority.take(replace(POLICY, revocations=revocations))

    found = authority.decide(Action.SUBSCRIBE, PREFIX, b"t", shown, NOW)
    assert found == Denied(Denial.UNAUTHORIZED, "token was revoked", None, WHO, "00112233")
    other = bearer(valid("consumer, HMAC") if revocations.kids else token_with(cti_7=b"other"))
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", other, NOW), Granted)


def test_a_token_without_an_identifier_is_not_revoked_by_accident() -> None:
    policy = replace(POLICY, revocations=Revocations(token_ids=frozenset({CTI})))

    assert isinstance(ask(bearer(token_with(cti_7=None)), policy=policy), Granted)


def test_a_key_that_is_taken_away_takes_its_tokens_with_it() -> None:
    authority = TokenAuthority(POLICY, [AUDIENCE])
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD), NOW), Granted)

    stranger = Ed25519PrivateKey.generate().public_key()
    for keys in ([], [IssuerKey(ISSUER, b"issuer-1", stranger)]):
        authority.take(Policy(issuers=Issuers(keys)))
        found = authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD), NOW)
        assert isinstance(found, Denied)
        assert found.why is Denial.MALFORMED


def test_a_key_whose_time_ends_ends_what_runs() -> None:
    policy = Policy(issuers=Issuers([IssuerKey(ISSUER, b"issuer-1", ED25519, NOW + 5)]))

    assert isinstance(ask(bearer(GOOD), policy=policy, now=NOW + 4), Granted)
    found = ask(bearer(GOOD), policy=policy, now=NOW + 5)
    assert isinstance(found, Denied)
    assert found.why is Denial.MALFORMED


def test_issuers_without_a_name_of_the_endpoint_are_refused_and_change_nothing() -> None:
    with pytest.raises(ConfigError, match="issuers without an audience: expected the name"):
        TokenAuthority(POLICY, [])
    authority = TokenAuthority(Policy(), [])
    with pytest.raises(ConfigError, match="issuers without an audience"):
        authority.take(POLICY)


# -- the cache -------------------------------------------------------------------------------------


def test_a_token_is_verified_once_until_keys_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified: list[bytes] = []

    def counted(value: bytes, *args: Any) -> Any:
        verified.append(value)
        return read_token(value, *args)

    monkeypatch.setattr(module, "read_token", counted)
    authority = TokenAuthority(POLICY, [AUDIENCE])

    for _ in range(3):
        authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD, EXPIRED), NOW)
    assert verified == [GOOD]
    authority.take(POLICY)
    authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD), NOW)
    assert verified == [GOOD, GOOD]


def test_what_is_refused_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = TokenAuthority(POLICY, [AUDIENCE])
    authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD), NOW)

    for number in range(20):
        authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(GOOD + bytes([number])), NOW)

    assert len(authority._tokens) == 1


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    made: list[bytes] = []

    def make(octets: bytes) -> bytes:
        made.append(octets)
        return octets

    remembered: Remembered[bytes] = Remembered(limit=2)
    for octets in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert remembered.get(octets, make) == octets
        assert len(remembered) <= 2

    assert made == [b"a", b"b", b"c", b"b"]


# -- client certificates ---------------------------------------------------------------------------

KNOWN = Policy(
    issuers=ISSUERS,
    identities=(
        Identity("spiffe://cluster.example/decode/*", permissions_of(Role.CONSUMER, [SCOPE])),
        Identity("spiffe://cluster.example/prefill/1", permissions_of(Role.PRODUCER, [SCOPE])),
    ),
)


def test_a_client_is_known_by_a_uri_of_its_certificate() -> None:
    shown = bearer(certificate=certificate(["https://other.example/", URI]))

    assert ask(shown, policy=KNOWN) == Granted(URI, NOW + 3, NOW + 1000)
    found = ask(shown, policy=KNOWN, action=Action.PUBLISH_NAMESPACE)
    text = "client certificate does not allow PUBLISH_NAMESPACE"
    assert found == Denied(Denial.UNAUTHORIZED, text, who=URI)


def test_of_several_uris_one_that_allows_is_enough() -> None:
    producer = "spiffe://cluster.example/prefill/1"
    shown = bearer(certificate=certificate([URI, producer]))

    found = ask(shown, policy=KNOWN, action=Action.PUBLISH_NAMESPACE)
    assert isinstance(found, Granted)
    assert found.who == producer


@pytest.mark.parametrize("uris", [None, [], ["spiffe://cluster.example/decode"]])
def test_a_certificate_that_nobody_knows_allows_nothing(uris: list[str] | None) -> None:
    found = ask(bearer(certificate=certificate(uris)), policy=KNOWN)

    assert isinstance(found, Denied)
    assert found.why is Denial.UNAUTHORIZED


def test_a_certificate_is_good_until_its_end() -> None:
    der = certificate([URI], expires_at=NOW + 10)

    assert ask(bearer(certificate=der), policy=KNOWN, now=NOW + 9) == Granted(
        URI, NOW + 10, NOW + 10
    )
    found = ask(bearer(certificate=der), policy=KNOWN, now=NOW + 10)
    assert found == Denied(Denial.EXPIRED, "client certificate has expired", who=URI)


def test_what_cannot_be_read_as_a_certificate_allows_nothing() -> None:
    found = ask(bearer(certificate=b"none"), policy=KNOWN)

    assert isinstance(found, Denied)
    assert found.why is Denial.UNAUTHORIZED


def test_a_certificate_allows_no_more_once_its_identity_is_taken_away() -> None:
    authority = TokenAuthority(KNOWN, [AUDIENCE])
    shown = bearer(certificate=certificate([URI]))
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", shown, NOW), Granted)

    authority.take(POLICY)

    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", shown, NOW), Denied)


def test_who_shows_tokens_is_judged_by_those_alone() -> None:
    der = certificate(["spiffe://cluster.example/prefill/1"])

    for token in (GOOD, BAD):
        found = ask(bearer(token, certificate=der), policy=KNOWN, action=Action.PUBLISH_NAMESPACE)
        assert isinstance(found, Denied)


def test_a_bound_token_is_good_only_over_the_connection_of_its_key() -> None:
    own = Ed25519PrivateKey.generate()
    token = token_with(cnf_8={5: thumbprint(own.public_key())})

    assert isinstance(ask(bearer(token, certificate=certificate(key=own))), Granted)
    for der in (None, certificate(key=PRIVATE), b"none"):
        found = ask(bearer(token, certificate=der))
        assert isinstance(found, Denied)
        assert found.why is Denial.MALFORMED
    # Verified and remembered, it is still judged by who shows it.
    authority = TokenAuthority(POLICY, [AUDIENCE])
    mine = bearer(token, certificate=certificate(key=own))
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", mine, NOW), Granted)
    assert isinstance(authority.decide(Action.SUBSCRIBE, PREFIX, b"t", bearer(token), NOW), Denied)


def test_who_shows_one_bad_token_after_the_other_is_not_looked_at_and_who_is_known_is() -> None:
    authority, now = TokenAuthority(POLICY, [AUDIENCE]), NOW

    def decide(value: bytes, address: str = "192.0.2.1") -> Granted | Denied:
        shown = replace(bearer(value), address=address)
        return authority.decide(Action.SUBSCRIBE, PREFIX, b"t", shown, now)

    assert isinstance(decide(GOOD), Granted)
    for number in range(33):
        refused = decide(GOOD + bytes([number]))
        assert isinstance(refused, Denied)
        assert refused.why is Denial.MALFORMED
    unseen = decide(GOOD + b"more")
    assert isinstance(unseen, Denied)
    assert unseen.reason == "too many tokens from there were refused"
    assert unseen.why is Denial.UNAUTHORIZED
    assert unseen.retry_after_s is not None
    assert 0 < unseen.retry_after_s <= 1.0
    other = token_with(cti_7=b"other")
    assert isinstance(decide(other), Denied), "it would cost a signature to know"
    assert isinstance(decide(other, "192.0.2.2"), Granted)
    assert isinstance(decide(GOOD), Granted), "it is known"
    now += 1.0
    assert isinstance(decide(token_with(cti_7=b"third")), Granted)
