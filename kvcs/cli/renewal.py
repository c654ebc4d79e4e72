"""What a listener shows is read again: on SIGHUP, and when a file of it has changed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from kvcs.audit import AuditEvent, Outcome, note
from kvcs.config import IndexSettings, ProducerSettings, RelaySettings, StoreSettings
from kvcs.lifecycle import on_change, on_hangup
from kvcs.link import server_tls
from kvcs.telemetry import LogEvent
from moqt.aio import ServerTls
from moqt.aio.tls import TlsSettingsError

log = structlog.get_logger("kvcs")


@contextmanager
def renewing_certificate(
    settings: ProducerSettings | RelaySettings | StoreSettings | IndexSettings,
    identify: Callable[[ServerTls], None],
    also: Iterable[Path | None] = (),
) -> Iterator[None]:
    """While the block runs, read certificate, key and CAs of clients again when there is cause.

    That is each SIGHUP, and each change of one of these files or of those named beside them. Who
    connects from then on is shown the new certificate; sessions go on. One that cannot be used is
    not taken: a log line says what was found and what was expected, and what was shown before still
    is.

    Args:
        settings: Which files, and how often they are looked at.
        identify: Takes the new ones, or raises :exc:`TlsSettingsError`.
        also: Further files that ``identify`` reads.
    """
    tls = server_tls(settings)
    files = (tls.certificate_file, tls.key_file, tls.client_ca_file, *also)

    def renew() -> None:
        try:
            identify(tls)
        except TlsSettingsError as exc:
            log.warning(LogEvent.CERTIFICATE_REFUSED, error=str(exc))
            note(AuditEvent.CERTIFICATE, Outcome.REFUSED, reason=str(exc))
        else:
            log.info(LogEvent.CERTIFICATE_TAKEN, file=str(tls.certificate_file))
            note(AuditEvent.CERTIFICATE, Outcome.TAKEN, reason=str(tls.certificate_file))

    named = [file for file in files if file is not None]
    with on_hangup(renew), on_change(named, renew, settings.watch_s):
        yield
