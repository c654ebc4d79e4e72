"""SIGHUP: the certificate that a listener shows is read again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from kvcs.audit import AuditEvent, Outcome, note
from kvcs.config import IndexSettings, ProducerSettings, RelaySettings, StoreSettings
from kvcs.lifecycle import on_hangup
from kvcs.link import server_tls
from kvcs.telemetry import LogEvent
from moqt.aio import ServerTls
from moqt.aio.tls import TlsSettingsError

log = structlog.get_logger("kvcs")


@contextmanager
def renewing_certificate(
    settings: ProducerSettings | RelaySettings | StoreSettings | IndexSettings,
    identify: Callable[[ServerTls], None],
) -> Iterator[None]:
    """While the block runs, have each SIGHUP read certificate and key again.

    Who connects from then on is shown the new certificate; sessions go on. One that cannot be
    used is not taken: a log line says what was found and what was expected, and what was shown
    before still is.
    """
    tls = server_tls(settings)

    def renew() -> None:
        try:
            identify(tls)
        except TlsSettingsError as exc:
            log.warning(LogEvent.CERTIFICATE_REFUSED, error=str(exc))
            note(AuditEvent.CERTIFICATE, Outcome.REFUSED, reason=str(exc))
        else:
            log.info(LogEvent.CERTIFICATE_TAKEN, file=str(tls.certificate_file))
            note(AuditEvent.CERTIFICATE, Outcome.TAKEN, reason=str(tls.certificate_file))

    with on_hangup(renew):
        yield
