"""``kvcs ping``: ask a producer or relay whether it serves."""

import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from kvcs.cli.output import Output
from kvcs.config import Address, PingSettings, add_settings, settings_from
from kvcs.errors import ConfigError
from kvcs.link import client_config, client_tls, quic_settings
from kvcs.telemetry import set_up_logging
from moqt.aio import ClientTls, MoqtUri, connect
from moqt.codepoints import SessionErrorCode
from moqt.errors import SessionClosed

DESCRIPTION = """\
Open a MOQT session, handshake and SETUP on both sides, and close it again. For health checks: the
exit status tells whether sessions are taken, within --connect-timeout-s.

  kvcs ping moqt://relay:4443/ --ca-file ca.pem
  KVCS_LISTEN=:4443 kvcs ping         the daemon of this machine that listens there

Where tokens are asked for, the one of --token-file is shown. Without one it is enough that a token
is asked for: then it serves, but nobody unknown.

Without URI, the port that the setting listen names is asked over loopback. Who answers there is
this machine itself, so that its certificate may name whomever it likes.
"""
EPILOG = "Exit status: 0 it serves; 2 a URI, setting or file cannot be used; 11 it does not."

#: What is dialled for a listener on every address: both families are served there.
_LOOPBACK = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument(
        "uri", nargs="?", metavar="URI", help="moqt://HOST:PORT/PATH (default: see --listen)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, PingSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(PingSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    uri, tls = target(args.uri, settings)
    began = time.monotonic()
    authorized = True
    try:
        async with connect(
            uri,
            tls=tls,
            quic=quic_settings(settings),
            config=client_config(settings),
            timeout_s=settings.connect_timeout_s,
            drain_s=0.0,
        ):
            seconds = round(time.monotonic() - began, 3)
    except SessionClosed as exc:
        # Who asks without a token whether it serves is told: it does, but whom it knows.
        if settings.token_file is not None or exc.code != SessionErrorCode.UNAUTHORIZED:
            raise
        seconds, authorized = round(time.monotonic() - began, 3), False
    Output(as_json=args.json).tell("serves", uri=uri, seconds=seconds, authorized=authorized)
    return 0


def target(uri: str | None, settings: PingSettings) -> tuple[str, ClientTls]:
    """Return whom to dial, and whom to believe there.

    Raises:
        ConfigError: If neither a URI nor ``listen`` says whom, or the URI is none.
    """
    if uri is not None:
        try:
            MoqtUri.parse(uri)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        return uri, client_tls(settings)
    if settings.listen is None:
        raise ConfigError("whom to ask: expected moqt://HOST:PORT/PATH, or listen to be set")
    host, port = settings.listen
    here = f"moqt://{Address(_LOOPBACK.get(host, host), port)}/"
    return here, replace(client_tls(settings), verify=False)
