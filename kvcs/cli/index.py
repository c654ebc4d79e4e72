"""``kvcs index``: tell who holds which blocks."""

import asyncio
from argparse import ArgumentParser, Namespace

import structlog

from kvcs.cli.output import Output
from kvcs.cli.overhttp import renew_tokens
from kvcs.cli.renewal import renewing_certificate
from kvcs.config import IndexSettings, add_settings, settings_from
from kvcs.kvsp.http.directory import Directory, DirectoryLimits
from kvcs.kvsp.http.indexservice import IndexService
from kvcs.kvsp.http.service import HttpService, ServiceOptions
from kvcs.kvsp.http.tokens import TokenFile
from kvcs.lifecycle import run_until_stopped
from kvcs.link import server_tls
from kvcs.telemetry import Counters, LogEvent, set_up_logging
from moqt.aio import ServerTls

DESCRIPTION = """\
Keep a list of who holds which blocks, over HTTPS: publications at relays and producers, and block
services. Holders register under a lease and renew it; consumers ask for the Block Keys of their
prompt, and find in one question who covers the longest beginning of it, also of publications that
are longer than the prompt. The list is in memory: after a restart, holders register anew.

  openssl rand -hex 32                                    # makes a token
  install -m 600 /dev/null tokens                         # for its owner alone
  echo "$SCOPE_ID read,write $TOKEN" >> tokens            # SCOPE_ID as kvcs keys prints it
  kvcs index --listen 0.0.0.0:8443 --tokens-file tokens \\
      --certificate-file cert.pem --key-file key.pem

Each line of the tokens file has a Scope ID in hex, what the token is good for in that scope (read,
write or read,write), and the token. What an index says is never trusted: what is had from a holder
is verified by who gets it. On SIGHUP, and when they change, tokens, certificate and key are read
again. On SIGINT or SIGTERM, requests have --drain-s seconds to end.
"""

log = structlog.get_logger("kvcs")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, IndexSettings)


def directory_limits(settings: IndexSettings) -> DirectoryLimits:
    """Return how much is listed."""
    return DirectoryLimits(
        max_holders=settings.max_holders,
        max_holders_of_subject=settings.max_holders_of_token,
        max_keys=settings.max_keys,
        max_keys_of_subject=settings.max_keys_of_token,
        max_lease_s=settings.max_lease_s,
    )


def service_options(settings: IndexSettings) -> ServiceOptions:
    """Return the limits of the listener."""
    return ServiceOptions(
        max_connections=settings.max_connections,
        max_requests=settings.max_open_requests,
        request_timeout_s=settings.request_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(IndexSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    output, counters = Output(as_json=args.json), Counters()
    index = IndexService(Directory(directory_limits(settings)), counters=counters)
    service = HttpService(
        [index],
        TokenFile.read(settings.tokens_file),
        options=service_options(settings),
        counters=counters,
    )

    def renew(tls: ServerTls) -> None:
        renew_tokens(service, settings.tokens_file)
        service.identify(tls)

    async def serve(stopping: asyncio.Event) -> None:
        async with service:
            host, port = await service.listen(*settings.listen, tls=server_tls(settings))
            output.tell("listening", host=host, port=port)
            await stopping.wait()
            log.info(LogEvent.STOPPING, drain_s=settings.drain_s)
            await service.close(settings.drain_s)
        output.tell("stopped", **{c.value: n for c, n in counters.items() if n})

    with renewing_certificate(settings, renew, [settings.tokens_file]):
        await run_until_stopped(serve, grace=settings.drain_s + 5.0)
    return 0
