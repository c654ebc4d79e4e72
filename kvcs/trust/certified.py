"""Who has a certificate of a client may do everything: where no token is asked for. Pure."""

from functools import lru_cache

from cryptography import x509

from moqt.authority import Action, Bearer, Denial, Denied, Granted
from moqt.certificates import subject_of
from moqt.names import TrackNamespace

#: Certificates that are remembered, so that a request does not read one again.
MAX_CACHED = 1024


class CertifiedAuthority:
    """Grants everything to whoever has shown a certificate, and says whose it is.

    It was verified when the session was made; what it opened ends with it. Limits and logs know its
    bearer by the name in it (:func:`moqt.certificates.subject_of`).
    """

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        """See :meth:`moqt.authority.Authority.decide`."""
        if bearer.certificate is None:
            return Denied(Denial.UNAUTHORIZED, "no client certificate")
        who, until = _read(bearer.certificate)
        if now >= until:
            return Denied(Denial.EXPIRED, "the client certificate has expired")
        return Granted(who, check_at=until, expires_at=until)


@lru_cache(MAX_CACHED)
def _read(der: bytes) -> tuple[str, float]:
    """Return whose a certificate is, and until when it is valid."""
    certificate = x509.load_der_x509_certificate(der)
    return subject_of(der), certificate.not_valid_after_utc.timestamp()
