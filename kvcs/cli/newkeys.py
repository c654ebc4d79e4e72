"""``kvcs keys new-scope``, ``new-producer``, ``add-producer``: what makes keys, and lists them."""

import datetime
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from kvcs.cli.output import Output
from kvcs.errors import ConfigError
from kvcs.profile.signing import ProducerKey, SigningAlgorithm
from kvcs.trust.issuers import public_key_from_file
from kvcs.trust.producers import KnownProducer
from kvcs.trust.scope import SUITES, Protection, Scope
from kvcs.trust.scopefile import add_producer, new_scope, read_scope

DESCRIPTION = """
Three words in the place of DESCRIPTOR make keys:
  new-scope FILE      a scope with a new key, in a new file of mode 0600: hand it to its members
  new-producer FILE   a key that signs manifests, in a new file; it is listed in --scope-file
  add-producer FILE   lists a public key (PEM) that was made elsewhere in --scope-file
Once a scope lists producers, its members believe what those have signed and nothing else. To rotate
a scope, make a new one, and name both: producers publish in the first, consumers look in all.
"""
EXAMPLES = """
  kvcs keys new-scope scope.toml
  kvcs keys new-producer prefill-1.pem --scope-file scope.toml --name prefill-1 --days 90
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags that only these words take."""
    making = parser.add_argument_group("making keys")
    making.add_argument("file", nargs="?", metavar="FILE", help="what to make, or to add")
    making.add_argument("--clear", action="store_true", help="of new-scope: objects are not sealed")
    making.add_argument(
        "--suite", choices=sorted(SUITES), help="what they are sealed with (default: aes-128-gcm)"
    )
    making.add_argument("--name", default="", help="of a producer: for people")
    making.add_argument(
        "--es256", action="store_true", help="of new-producer: P-256 instead of Ed25519"
    )
    making.add_argument(
        "--not-before", metavar="TIME", help="from when on it is believed, 2026-11-30T00:00:00Z"
    )
    making.add_argument("--not-after", metavar="TIME", help="from when on it is believed no more")
    making.add_argument(
        "--days", type=float, metavar="N", help="instead: it is believed for N days from now"
    )


def make_scope(args: Namespace, output: Output) -> None:
    """Make a scope."""
    if args.clear and args.suite is not None:
        raise ConfigError("--suite is set, expected not since --clear is: nothing is sealed")
    protection = None if args.clear else Protection(SUITES[args.suite or "aes-128-gcm"])
    scope = new_scope(args.file, protection)
    output.tell(
        "scope-made", scope=scope.key.scope_id.hex(), sealing="clear" if args.clear else "sealed"
    )
    print(f"{args.file}: a new scope; hand it to members of the scope only", file=sys.stderr)


def make_producer(args: Namespace, output: Output) -> None:
    """Make a producer's key, and list it."""
    scope_file = _scope_file(args)
    first, last = _dates(args)
    read_scope(scope_file)  # before a key is made that nobody would list
    algorithm = SigningAlgorithm.ES256 if args.es256 else SigningAlgorithm.EDDSA
    key = ProducerKey.generate(algorithm)
    listed = KnownProducer(key.public_key, key.kid, args.name, first, last)
    key.to_file(args.file)
    try:
        scope = add_producer(scope_file, listed)
    except ConfigError:
        Path(args.file).unlink()
        raise
    _tell_listed(output, scope, listed)
    print(f"{args.file}: a new key; it is for its producer only", file=sys.stderr)


def list_producer(args: Namespace, output: Output) -> None:
    """List a key that was made elsewhere."""
    first, last = _dates(args)
    listed = KnownProducer(public_key_from_file(args.file), b"", args.name, first, last)
    _tell_listed(output, add_producer(_scope_file(args), listed), listed)


WORDS: Mapping[str, Callable[[Namespace, Output], None]] = {
    "new-scope": make_scope,
    "new-producer": make_producer,
    "add-producer": list_producer,
}


def _tell_listed(output: Output, scope: Scope, listed: KnownProducer) -> None:
    output.tell(
        "producer-listed",
        scope=scope.key.scope_id.hex(),
        key=listed.kid.hex(),
        name=listed.name or None,
        not_before=_shown(listed.not_before),
        not_after=_shown(listed.not_after),
        producers=len(scope.producers),
    )


def _scope_file(args: Namespace) -> str:
    files: list[str] = getattr(args, "scope_file", [])
    if len(files) != 1:
        found = f"{len(files)} of --scope-file" if files else "--scope-file is not set"
        raise ConfigError(f"{found}, expected the one file in which the producer is to be listed")
    return files[0]


def _dates(args: Namespace) -> tuple[float | None, float | None]:
    first, last = _time(args.not_before, "--not-before"), _time(args.not_after, "--not-after")
    if args.days is None:
        return first, last
    if last is not None:
        raise ConfigError("--days and --not-after are both set, expected one of them")
    if not 0 < args.days < 36_525:
        raise ConfigError(f"--days is {args.days}, expected more than 0 and at most a century")
    return first, float(int(time.time() + args.days * 86_400))


def _time(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise ConfigError(
            f"{flag} is {text!r:.60}, expected a time with its zone: 2026-11-30T00:00:00Z"
        )
    return found.timestamp()


def _shown(at: float | None) -> str | None:
    if at is None:
        return None
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
