"""``kvcs relay``: pass Tracks on between producers and consumers, and keep them for a while."""

import asyncio
from argparse import ArgumentParser, Namespace

from kvcs.audit import auditing
from kvcs.cli.audited import Audited
from kvcs.cli.authorizing import Authorizing
from kvcs.cli.output import Output
from kvcs.cli.renewal import renewing_certificate
from kvcs.config import RelaySettings, add_settings, settings_from
from kvcs.lifecycle import run_until_stopped
from kvcs.link import (
    client_config,
    client_tls,
    guests,
    quic_settings,
    server_tls,
    session_config,
    upstream_prefixes,
)
from kvcs.telemetry import set_up_logging
from moqt.relay.server import Relay, RelayOptions

DESCRIPTION = """\
Listen for producers and consumers, and pass on what the ones publish to the others that want it:
each object comes once from its producer and goes to every consumer, also to those that come when
the producer is gone, as long as it is kept. On SIGINT or SIGTERM, sessions are asked to leave, to
--new-session-uri if that is set, and have --drain-s seconds to end; the second signal ends it at
once. On SIGHUP, and when they change, certificate and key are read again, for those who connect
from then on.

  kvcs relay --listen 0.0.0.0:4443 --certificate-file cert.pem --key-file key.pem \\
      --issuers-file issuers.toml --audience moqt://relay:4443
  kvcs produce cache.safetensors --connect moqt://relay:4443/ ...
  kvcs consume prompt.json --connect moqt://relay:4443/ ...

With --issuers-file everybody needs a token, for each session and each request; without it, and
without --client-ca-file, it listens on loopback only, unless told --insecure-open. --token-file is
what it shows at the relays that it dials.

It needs no scope key, and understands nothing of what it carries. With --connect, publications
that no producer here has are asked for at another relay.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, RelaySettings)


def relay_options(settings: RelaySettings) -> RelayOptions:
    """Return the limits of the relay."""
    return RelayOptions(
        cache_octets=settings.cache_octets,
        linger_s=settings.linger_s,
        max_tracks=settings.max_tracks,
        max_namespaces=settings.max_namespaces,
        max_behind_octets=settings.max_behind_octets,
        stall_s=settings.stall_s,
        request_timeout_s=settings.request_timeout_s,
        publisher_grace_s=settings.publisher_grace_s,
        fill_timeout_s=settings.fill_timeout_s,
        pause_after_s=settings.pause_after_s,
    )


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(RelaySettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    output = Output(as_json=args.json)
    authorizing = Authorizing(settings, lambda: relay.ask_again())
    relay = Relay(
        relay_options(settings),
        quic=quic_settings(settings),
        config=session_config(settings),
        authority=authorizing.authority,
        guests=guests(settings),
        observer=Audited(),
    )
    shown = client_config(settings).tokens
    prefixes = upstream_prefixes(settings)

    async def serve(stopping: asyncio.Event) -> None:
        async with relay:
            host, port = await relay.listen(*settings.listen, tls=server_tls(settings))
            output.tell("listening", host=host, port=port)
            for uri in settings.connect:
                relay.ask_at(uri, tls=client_tls(settings), tokens=shown, prefixes=prefixes)
            await stopping.wait()
            await relay.close(
                drain_s=settings.drain_s, new_session_uri=settings.new_session_uri or ""
            )
        output.tell("stopped")

    renewing = renewing_certificate(settings, authorizing.renewing(relay.identify))
    with auditing(settings.audit_file), renewing:
        await run_until_stopped(serve, authorizing.keep, grace=settings.drain_s + 5.0)
    return 0
