"""``kvcs store``: keep the publications of a scope on disk, and publish them again."""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from kvcs.audit import auditing
from kvcs.cli.authorizing import Authorizing
from kvcs.cli.output import Output
from kvcs.cli.overhttp import OverHttp
from kvcs.cli.renewal import renewing_certificate
from kvcs.cli.scopes import believed
from kvcs.config import StoreSettings, add_settings, settings_from
from kvcs.depot.archive import listing
from kvcs.depot.daemon import Store, StoreOptions
from kvcs.depot.shelf import Holding
from kvcs.errors import ConfigError
from kvcs.lifecycle import run_until_stopped
from kvcs.link import (
    client_config,
    client_tls,
    guests,
    quic_settings,
    server_tls,
    serving_quic,
    session_config,
)
from kvcs.profile.naming import PROFILE
from kvcs.telemetry import set_up_logging
from kvcs.trust.scope import Scope
from moqt.names import TrackNamespace

DESCRIPTION = """\
Follow what producers publish, directly or at relays (--connect), keep it in FOLDER, and publish it
again, octet for octet and under the same Publication IDs: to those who connect here (--listen), or
through relays (--announce). What is kept outlives its producer and this process: after a restart,
or a crash, it is served at once. Every object is checked before it is written, and again before it
is sent.

  kvcs store /srv/kvcs --connect moqt://relay:4443/ --budget-octets 200GiB \\
      --listen 0.0.0.0:4444 --certificate-file cert.pem --key-file key.pem \\
      --issuers-file issuers.toml --audience moqt://store:4444 \\
      --token-file store.token --scope-file scope.toml
  kvcs store --list /srv/kvcs

With --index, publications that are held whole are listed at an index, which is asked for their
Block Keys; with --http, blocks are served over HTTPS as well, to who has a token of --tokens-file:

  kvcs store /srv/kvcs --connect moqt://relay:4443/ --listen ... --scope-key-file scope.key \\
      --http 0.0.0.0:8444 --tokens-file tokens \\
      --index https://index:8443 --index-token-file mine.token --reached-at moqt://store:4444/

When the budget is used up, whole publications go, the least recently used first, none that is being
read or written. One that its producer did not finish is served as far as it goes, and dropped
--partial-s seconds after its last object. On SIGINT or SIGTERM, sessions have --drain-s seconds to
end. On SIGHUP, and when they change, certificate and key are read again, for those who connect from
then on.
"""

#: Seconds between lines about what changes.
_PAUSE_S = 0.5


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument("folder", metavar="FOLDER", help="where publications lie")
    parser.add_argument(
        "--list", action="store_true", help="show what FOLDER holds, and end; also while it is used"
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, StoreSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    output = Output(as_json=args.json)
    if args.list:
        for holding in listing(Path(args.folder)):
            output.tell("publication", **_shown(holding))
        return 0
    settings = settings_from(StoreSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    scope = _the_one_scope(settings)
    prefixes = [_prefix(scope.key.scope_id, text) for text in settings.only]
    trusted, required = believed(settings, scope)
    store = Store(
        Path(args.folder),
        scope,
        replace(StoreOptions.of(settings), require_signature=required),
        trusted=trusted,
    )
    over_http = OverHttp.of_store(store, settings)

    authorizing, config = Authorizing(settings, store.ask_again), client_config(settings)

    async def serve(stopping: asyncio.Event) -> None:
        tls, quic = client_tls(settings), quic_settings(settings)
        async with store:
            shelf = store.depot.shelf
            output.tell("opened", publications=len(shelf), octets=shelf.used)
            address: tuple[str, int] | None = None
            if settings.listen is not None:
                address = await store.listen(
                    *settings.listen,
                    tls=server_tls(settings),
                    quic=serving_quic(settings),
                    config=session_config(settings),
                    guests=guests(settings),
                    authority=authorizing.authority,
                )
                output.tell("listening", host=address[0], port=address[1])
            for uri in settings.announce:
                store.announce_at(uri, tls=tls, quic=quic, config=config)
            if settings.connect:
                store.follow(settings.connect, prefixes=prefixes, tls=tls, quic=quic, config=config)
            async with over_http.serving(address, output):
                await _tell_changes(store, output, stopping)
        output.tell("stopped", **{c.value: n for c, n in store.depot.counters.items() if n})

    listens = settings.listen is not None or settings.http_listen is not None
    renew = authorizing.renewing(over_http.renewing(store.identify))
    renewing = renewing_certificate(settings, renew, [settings.tokens_file])
    with auditing(settings.audit_file), renewing if listens else nullcontext():
        # What is over HTTP is drained first, then the sessions.
        await run_until_stopped(serve, authorizing.keep, grace=2 * settings.drain_s + 8.0)
    return 0


def _the_one_scope(settings: StoreSettings) -> Scope:
    scopes = settings.load_scopes()
    if len(scopes) > 1:
        raise ConfigError(
            f"scope_file names {len(scopes)} files, expected one: a folder is for one scope"
        )
    return scopes[0]


async def _tell_changes(store: Store, output: Output, stopping: asyncio.Event) -> None:
    """Tell what is being kept, what is kept and what is gone, until stopped."""
    known = {holding.name: _state(holding) for holding in store.depot.shelf}
    stop, seen = asyncio.create_task(stopping.wait()), 0
    while not stopping.is_set():
        changed = asyncio.create_task(store.depot.wait_changed(seen))
        await asyncio.wait({stop, changed}, return_when=asyncio.FIRST_COMPLETED)
        if changed.done():
            seen = changed.result()
        changed.cancel()
        held = {holding.name: holding for holding in store.depot.shelf}
        for name in known.keys() - held.keys():
            output.tell("publication-gone", publication=name.publication_id.hex())
        for name, holding in held.items():
            finished, objects = known.get(name, (False, 0))
            if holding.finished and not finished:
                output.tell("publication-kept", **_shown(holding))
            elif holding.objects > objects and not holding.finished:
                output.tell("publication-progress", **_shown(holding))
        known = {name: _state(holding) for name, holding in held.items()}
        # What changes meanwhile is told together.
        await asyncio.wait({stop}, timeout=_PAUSE_S)


def _state(holding: Holding) -> tuple[bool, int]:
    return holding.finished, holding.objects


def _shown(holding: Holding) -> dict[str, object]:
    name = holding.name
    state = "whole" if holding.finished else "partial"
    return {
        "scope": name.scope_id.hex(),
        "compatibility": name.compatibility_id.hex(),
        "anchor": name.anchor_key.hex(),
        "publication": name.publication_id.hex(),
        "state": "damaged" if holding.damaged else state,
        "objects": holding.objects,
        "octets": holding.octets,
        "kept_at": _date(holding.kept_at),
        "used_at": _date(holding.used_at),
    }


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _prefix(scope_id: bytes, text: str) -> TrackNamespace:
    """Read which publications are to be kept: up to three identifiers, in hex."""
    parts = text.split("/")
    try:
        fields = [bytes.fromhex(part) for part in parts]
    except ValueError:
        fields = []
    if not 1 <= len(fields) <= 3 or [len(f) for f in fields] != [32, 32, 16][: len(fields)]:
        raise ConfigError(
            f"only is {text!r:.100}, expected COMPATIBILITY[/ANCHOR[/PUBLICATION]]: 64, 64 and 32 "
            "hex digits"
        )
    return TrackNamespace((PROFILE, scope_id, *fields))
