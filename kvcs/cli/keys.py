"""``kvcs keys``: print the identifiers of a descriptor and tokens, or make keys."""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

import orjson

from kvcs.cli import newkeys
from kvcs.cli.inputs import (
    STDIN,
    descriptor_and_tokens,
    parse_json,
    parse_tokens,
    read_octets,
    shown_name,
    tokens_from,
)
from kvcs.cli.output import Output
from kvcs.config import ScopedSettings, settings_from
from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, anchor_key, block_keys_sha256
from kvcs.profile.naming import PROFILE

DESCRIPTION = f"""
Print the identifiers that a descriptor and tokens have in a scope. Two hosts that print the
same can use each other's caches; where they differ, the first line that differs says why:
the scope key, the descriptor, or the tokens. No identifier tells the key, the model or the
prompt to somebody without the scope key.
{newkeys.DESCRIPTION}"""
EPILOG = f"""
examples:
{newkeys.EXAMPLES.strip(chr(10))}
  kvcs keys --scope-key-file scope.key cache.json
  kvcs keys --scope-key-file scope.key descriptor.json --tokens prompt.json --json
  echo 1 2 3 4 | kvcs keys --scope-key-file scope.key descriptor.json --tokens - --blocks
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument(
        "descriptor",
        nargs="?",
        metavar="DESCRIPTOR",
        help="JSON file with a Compatibility Descriptor, or the one beside a .safetensors cache, "
        "which has the members descriptor and tokens; - for standard input",
    )
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="token ids: a JSON array, an object with a member tokens, or integers with white "
        "space between; - for standard input; those beside the descriptor if left out",
    )
    parser.add_argument("--blocks", action="store_true", help="also print the key of every block")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--new",
        metavar="FILE",
        help="make a new scope key alone in FILE, readable by its owner alone, and print its "
        "Scope ID",
    )
    parser.add_argument(
        "--scope-file",
        metavar="FILE",
        action="append",
        default=SUPPRESS,
        help="the scope; also KVCS_SCOPE_FILE, or scope_file = in the settings file",
    )
    parser.add_argument(
        "--scope-key-file",
        metavar="FILE",
        default=SUPPRESS,
        help="the scope key, raw or in hex; also KVCS_SCOPE_KEY_FILE, or scope_key_file = in the "
        "settings file",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=SUPPRESS, help="TOML file with settings"
    )
    newkeys.add_arguments(parser)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    if args.descriptor in newkeys.WORDS:
        if args.file is None:
            raise ConfigError(f"kvcs keys {args.descriptor}: no FILE given, expected one")
        newkeys.WORDS[args.descriptor](args, Output(as_json=args.json))
        return 0
    if args.file is not None:
        words = ", ".join(newkeys.WORDS)
        raise ConfigError(f"{args.descriptor!r:.60} before a second FILE, expected {words}")
    if args.new is not None:
        if args.descriptor is not None or args.tokens is not None:
            raise ConfigError("--new makes a key and does nothing else: leave the rest out")
        key = ScopeKey.generate()
        key.to_file(args.new)
        _print({"scope_id": key.scope_id.hex()}, as_json=args.json)
        print(f"{args.new}: a new scope key; hand it to members of the scope only", file=sys.stderr)
        return 0
    if args.descriptor is None:
        raise ConfigError("no descriptor given, expected a JSON file or - (see kvcs keys --help)")
    if args.descriptor == STDIN == args.tokens:
        raise ConfigError("descriptor and tokens cannot both be standard input")
    descriptor, tokens = _read(args.descriptor, args.tokens)
    key = settings_from(ScopedSettings, args).load_scope_key()
    _print(identifiers(key, descriptor, tokens), as_json=args.json, with_blocks=args.blocks)
    return 0


def identifiers(key: ScopeKey, descriptor: Descriptor, tokens: Any | None) -> dict[str, Any]:
    """Return every identifier as lower-case hex, by the names that ``--json`` prints.

    Args:
        key: The scope key.
        descriptor: The Compatibility Descriptor.
        tokens: Token ids of the whole prompt; ``None`` for what does not depend on tokens.
    """
    compatibility_id = key.compatibility_id(descriptor)
    found: dict[str, Any] = {
        "scope_id": key.scope_id.hex(),
        "compatibility_id": compatibility_id.hex(),
        "block_tokens": descriptor.block_tokens,
    }
    if tokens is None:
        return found
    block_keys = key.block_keys(descriptor, tokens)
    anchor = anchor_key(block_keys)
    ids = (key.scope_id, compatibility_id)
    found |= {
        "tokens": len(tokens),
        "blocks": len(block_keys),
        "tokens_covered": len(block_keys) * descriptor.block_tokens,
        "anchor_key": None if anchor is None else anchor.hex(),
        "block_keys_sha256": block_keys_sha256(block_keys).hex(),
        "prefix": None
        if anchor is None
        else "/".join((PROFILE.decode(), *(key_id.hex() for key_id in ids), anchor.hex())),
        "block_keys": [block_key.hex() for block_key in block_keys],
    }
    return found


def _read(descriptor_path: str, tokens_path: str | None) -> tuple[Descriptor, Any | None]:
    name = shown_name(descriptor_path)
    value = parse_json(read_octets(descriptor_path), name)
    descriptor, beside = descriptor_and_tokens(value, name)
    if tokens_path is not None:
        return descriptor, parse_tokens(read_octets(tokens_path), shown_name(tokens_path))
    return descriptor, None if beside is None else tokens_from(beside, name)


_LABELS = {
    "scope_id": "Scope ID",
    "compatibility_id": "Compatibility ID",
    "anchor_key": "Anchor Key",
    "block_keys_sha256": "Block Keys SHA-256",
    "prefix": "namespace prefix",
}


def _print(found: dict[str, Any], *, as_json: bool, with_blocks: bool = False) -> None:
    if as_json:
        print(orjson.dumps(found).decode())
        return
    for name, label in _LABELS.items():
        if found.get(name) is not None:
            print(f"{label:<20}{found[name]}")
    if "tokens" not in found:
        return
    size, blocks = found["block_tokens"], found["blocks"]
    print(
        f"{'tokens':<20}{found['tokens']}: {blocks} blocks of {size}, "
        f"{found['tokens'] - found['tokens_covered']} left over"
    )
    if with_blocks:
        width = len(str(max(blocks - 1, 0)))
        for index, block_key in enumerate(found["block_keys"]):
            print(f"block {index:>{width}}  tokens {index * size:>7}  {block_key}")
