"""Where a certificate is asked for and no token: whose it is, and until when that counts."""

import pytest

from kvcs.trust.certified import CertifiedAuthority
from moqt.authority import Action, Bearer, Denial, Denied, Granted
from moqt.names import TrackNamespace
from tests.pki import NOW, Ca, der, dns, uri

CA = Ca()
SPIFFE = "spiffe://kvcs.example/decode/7"
ANYWHERE = TrackNamespace((b"kvcs-1",))


@pytest.mark.parametrize("action", Action)
def test_whoever_has_one_may_do_everything_and_is_known_by_its_name(action: Action) -> None:
    certificate = CA.issue(dns("a.example"), uri(SPIFFE), until_days=1)
    until = certificate.not_valid_after_utc.timestamp()

    bearer = Bearer(certificate=der(certificate), address="192.0.2.1")
    found = CertifiedAuthority().decide(action, ANYWHERE, None, bearer, NOW.timestamp())
    assert found == Granted(SPIFFE, check_at=until, expires_at=until)


def test_it_counts_until_its_last_second_and_nobody_goes_without() -> None:
    certificate = CA.issue(uri(SPIFFE))
    until = certificate.not_valid_after_utc.timestamp()
    authority = CertifiedAuthority()

    def asked(bearer: Bearer, now: float) -> Granted | Denied:
        return authority.decide(Action.FETCH, ANYWHERE, b"track", bearer, now)

    shown = Bearer(certificate=der(certificate))
    assert isinstance(asked(shown, until - 1), Granted)
    late, without = asked(shown, until), asked(Bearer(address="192.0.2.1"), until - 1)
    assert isinstance(late, Denied)
    assert isinstance(without, Denied)
    assert (late.why, without.why) == (Denial.EXPIRED, Denial.UNAUTHORIZED)
