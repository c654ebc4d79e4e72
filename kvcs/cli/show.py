"""``kvcs show``: explain an object, a manifest, a descriptor or a name.

What is broken is explained as far as it can be read; the error then decides the exit code.
"""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvcs.cli.inputs import (
    HEX_NAME,
    STDIN,
    descriptor_and_tokens,
    parse_json,
    parse_name,
    read_octets,
    shown_name,
)
from kvcs.consumer.trust import examine
from kvcs.errors import BadDescriptor, BadManifest, BadName, ConfigError, KvcsError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import (
    ID_OCTETS,
    MANIFEST,
    MANIFEST_COSE,
    PROFILE,
    PUBLICATION_ID_OCTETS,
    DataTrack,
    publisher_priority,
)
from kvcs.profile.payload import MAGIC, Block, Header
from kvcs.profile.signing import read_unverified, trusted_keys, verify_manifest
from moqt.names import TrackNamespace

DESCRIPTION = """
Explain what somebody handed you: the payload of an Object, a manifest (JSON or COSE), a
Compatibility Descriptor, a Track Namespace or a Full Track Name. What is broken is shown as far
as it can be read, with what is wrong with it, and the exit status says which kind it was.
"""
EPILOG = """
A name is given as it is printed in logs of MOQT (kvcs.2d1-...), with --TRACK behind it or
without, or as kvcs-1/HEX/HEX/HEX/HEX, with the fields in hex; a prefix of it will do.

examples:
  kvcs show manifest.json
  kvcs show manifest.cose --trust producer.pub.pem
  kvcs show object.bin --group 3 --object 5
  kvcs show object.bin --manifest manifest.json --track k.raw.s0
  kvcs show 4b564f310101...
  kvcs show descriptor.json --json
"""

_PRINTABLE = re.compile(r"kvcs\.2d1(-[A-Za-z0-9_.]+)*(--[A-Za-z0-9_.]*)?")
_HEX_TEXT = b"0123456789abcdefABCDEF \t\r\n"
#: Tag 18 and an array of four, with and without the tag (RFC 9052 Section 4.2).
_COSE_STARTS = (b"\xd2\x84", b"\x84")
_FIELDS = ("profile", "scope_id", "compatibility_id", "anchor_key", "publication_id")


@dataclass
class Report:
    """What is known of a thing: lines for people, values for programs, and what is wrong."""

    kind: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    error: KvcsError | None = None

    def add(self, name: str, label: str, value: Any, text: str | None = None) -> None:
        """Note a value, and how people read it."""
        self.values[name] = value
        self.rows.append((label, str(value) if text is None else text))


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument("what", metavar="WHAT", help="a file, - for standard input, hex, or a name")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=sorted(_READERS),
        help="what it is; found out by looking at it if left out",
    )
    parser.add_argument(
        "--group", type=int, metavar="N", help="Group ID that the object arrived under"
    )
    parser.add_argument(
        "--object", type=int, metavar="N", help="Object ID that the object arrived under"
    )
    parser.add_argument(
        "--manifest", metavar="FILE", help="also check the object against this manifest"
    )
    parser.add_argument(
        "--track", metavar="NAME", help="track that the object arrived on, such as k.raw.s0"
    )
    parser.add_argument(
        "--trust",
        metavar="FILE",
        action="append",
        default=[],
        help="PEM file with a producer's public key; checks the signature of a manifest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    kind, content = _look(args)
    report = _READERS[kind](content, args)
    if args.json:
        values = {"kind": report.kind, **report.values}
        if report.error is not None:
            values["error"] = _error_values(report.error)
        print(orjson.dumps(values, option=orjson.OPT_NON_STR_KEYS).decode())
    else:
        width = 2 + max((len(label) for label, _ in report.rows), default=0)
        print(report.kind)
        for label, text in report.rows:
            print(f"  {label:<{width}}{text}".rstrip())
    if report.error is not None:
        # What can be shown is out before the error is, whoever reads both.
        sys.stdout.flush()
        raise report.error
    return 0


def _error_values(error: KvcsError) -> dict[str, Any]:
    reason = getattr(error, "reason", None)
    values = {"type": type(error).__name__, "text": str(error)}
    return values if reason is None else values | {"reason": str(reason)}


# -- finding out what it is ----------------------------------------------------------------------


def _look(args: Namespace) -> tuple[str, bytes]:
    """Return what the argument is and its octets; the text itself for a name."""
    what: str = args.what
    if args.kind == "name" or (args.kind is None and _is_name(what)):
        return "name", what.encode(errors="surrogateescape")
    typed = what.encode(errors="surrogateescape")
    if what != STDIN and not os.path.exists(what) and (octets := _unhexed(typed)) != typed:
        content = octets
    else:
        content = _unhexed(read_octets(what))
    return args.kind or _kind_of(content, shown_name(what)), content


def _is_name(text: str) -> bool:
    # os.path.exists, since a pathlib.Path raises for a name that is too long to be a file's.
    looks_like_one = text.startswith(HEX_NAME) or _PRINTABLE.fullmatch(text) is not None
    return looks_like_one and not os.path.exists(text)


def _unhexed(content: bytes) -> bytes:
    """Return what hex digits stand for; anything else as it is."""
    if content.translate(None, _HEX_TEXT):
        return content
    try:
        return bytes.fromhex(content.decode())
    except ValueError:  # an odd number of them
        return content


def _kind_of(content: bytes, name: str) -> str:
    if content.startswith(MAGIC):
        return "object"
    if content.startswith(_COSE_STARTS):
        return "manifest"
    if content.lstrip().startswith(b"{"):
        members = parse_json(content, name)
        return "manifest" if "kvcs" in members else "descriptor"
    if _is_name(content.decode(errors="replace").strip()):
        return "name"
    raise ConfigError(
        f"{name}: {len(content)} octets that are no object, manifest, descriptor or name; "
        "--as KIND says what is wrong with it"
    )


# -- objects -------------------------------------------------------------------------------------


def _show_object(content: bytes, args: Namespace) -> Report:
    report = Report("object")
    report.add("octets", "octets", len(content))
    try:
        header = Header.read(content)
        _add_header(report, header)
        block = Block.decode(
            content,
            group_id=header.layer if args.group is None else args.group,
            object_id=header.block_index if args.object is None else args.object,
        )
        checked = ["payload", "digest"]
        checked += ["Group ID"] if args.group is not None else []
        checked += ["Object ID"] if args.object is not None else []
        if args.manifest is not None:
            _check_against(block, args)
            checked += ["manifest", "decoding"]
        report.add("checked", "checked", checked, ", ".join(checked))
    except KvcsError as exc:
        _note(report, exc)
    return report


def _add_header(report: Report, header: Header) -> None:
    components = {int(member): member.name.lower() for member in Component}
    component = components.get(header.component)
    report.add("magic", "Magic", header.magic.hex(), _shown_octets(header.magic))
    report.add("version", "Version", header.version)
    report.add(
        "component",
        "Component",
        component or header.component,
        f"{header.component}, {component or 'not registered'}",
    )
    report.add("flags", "Flags", header.flags)
    report.add("layer", "Layer", header.layer)
    report.add("block_index", "Block Index", header.block_index)
    report.add("token_start", "Token Start", header.token_start)
    report.add("token_count", "Token Count", header.token_count)
    codec = standard_codecs().by_value(header.codec)
    told = "not known here" if codec is None else f"{codec.name}, {_kept(codec.lossless)}"
    report.add("codec", "Codec", header.codec, f"{header.codec:#06x}, {told}")
    if codec is not None:
        report.values |= {"codec_name": codec.name, "lossless": codec.lossless}
    report.add("data_length", "Data Length", header.data_length, f"{header.data_length} octets")
    report.add("data_digest", "Data Digest", header.data_digest.hex())


def _check_against(block: Block, args: Namespace) -> None:
    if args.track is None:
        raise ConfigError("--manifest needs --track: which track did the object arrive on?")
    content = _unhexed(read_octets(args.manifest))
    text = _manifest_text(content, args.trust)
    manifest, track = Manifest.from_json(text), DataTrack.parse(args.track)
    entries = [entry for entry in manifest.segments if track in entry.tracks]
    if not entries:
        raise ConfigError(f"{shown_name(args.manifest)}: no track {track} in this manifest")
    examine(
        block.encode(), track=track, layer=block.layer, block=block.block_index, entry=entries[0],
        descriptor=manifest.compat, codecs=standard_codecs(),
    )  # fmt: skip
    listed = entries[0].digest(track, block.layer, block.block_index)
    if listed is not None and listed != block.digest:
        raise BadManifest(f"the manifest lists the digest {listed.hex()} for this object")


# -- manifests and descriptors -------------------------------------------------------------------


def _show_manifest(content: bytes, args: Namespace) -> Report:
    report = Report("manifest")
    report.add("octets", "octets", len(content))
    try:
        if content.startswith(_COSE_STARTS):
            signed = read_unverified(content)
            kid = None if signed.kid is None else signed.kid.hex()
            report.add("algorithm", "signed with", signed.algorithm)
            report.add("kid", "by the key", kid)
            _add_manifest(report, signed.text)
            if args.trust:
                verify_manifest(content, trusted_keys(args.trust))
                report.add("signature", "signature", "good")
            else:
                report.add("signature", "signature", "not checked", "not checked: give --trust")
        else:
            report.add("signature", "signature", "none")
            _add_manifest(report, content)
            if args.trust:
                raise BadManifest("the manifest is not signed, but --trust was given")
    except KvcsError as exc:
        _note(report, exc)
    return report


def _manifest_text(content: bytes, trust: Iterable[str]) -> bytes:
    if not content.startswith(_COSE_STARTS):
        return content
    trusted = list(trust)
    return (
        verify_manifest(content, trusted_keys(trusted))
        if trusted
        else read_unverified(content).text
    )


def _add_manifest(report: Report, text: bytes) -> None:
    manifest = Manifest.from_json(text)
    for name, label in (("publication", "publication"), ("anchor", "Anchor Key")):
        octets = getattr(manifest, name)
        if octets is not None:
            report.add(name, label, octets.hex())
    if manifest.version is not None:
        report.add("version", "version", manifest.version)
    report.add(
        "deterministic",
        "deterministic",
        manifest.deterministic,
        "yes: every run gives the same octets" if manifest.deterministic else "no",
    )
    report.add("complete", "complete", manifest.complete, _yes(manifest.complete))
    _add_descriptor(report, manifest.compat)
    layout = Layout.of(manifest.compat)
    report.values["segments"] = [_entry_values(entry) for entry in manifest.segments]
    for entry in manifest.segments:
        first = entry.first_block * manifest.block_tokens
        last = entry.end_block * manifest.block_tokens - 1
        state = "complete" if entry.complete else "not complete"
        report.rows.append(
            (
                f"segment {entry.segment}",
                f"blocks {entry.first_block} to {entry.end_block - 1}, tokens {first} to {last}, "
                f"{state}",
            )
        )
        where = "" if entry.digests_in is None else f" (in version {entry.digests_in})"
        for track in entry.tracks:
            octets = layout.section_octets(track.component) * entry.blocks * manifest.layers
            report.rows.append(
                (
                    f"  {track}",
                    f"digests of {entry.groups(track)} of {manifest.layers} layers{where}, "
                    f"{octets} octets of tensors",
                )
            )
    if not manifest.segments:
        report.rows.append(("segments", "none yet"))
    report.values["codecs"] = {
        name: {"value": codec.value, "lossless": codec.lossless}
        for name, codec in manifest.codecs.items()
    }
    report.rows += [(f"codec {name}", str(codec)) for name, codec in manifest.codecs.items()]


def _entry_values(entry: SegmentEntry) -> dict[str, Any]:
    return {
        "segment": entry.segment,
        "first_block": entry.first_block,
        "blocks": entry.blocks,
        "block_keys_sha256": entry.block_keys_sha256.hex(),
        "complete": entry.complete,
        "digests_in": entry.digests_in,
        "tracks": {str(track): {"layers_listed": entry.groups(track)} for track in entry.tracks},
    }


def _show_descriptor(content: bytes, args: Namespace) -> Report:
    report = Report("descriptor")
    try:
        value = parse_json(content, shown_name(args.what))
        descriptor, tokens = descriptor_and_tokens(value, shown_name(args.what))
        _add_descriptor(report, descriptor)
        if isinstance(tokens, list):
            blocks, left = divmod(len(tokens), descriptor.block_tokens)
            text = f"{len(tokens)}: {blocks} whole blocks, {left} left over"
            report.add("tokens", "tokens", len(tokens), text)
    except ConfigError as exc:  # not JSON at all: here that is the thing that is broken
        report.error = BadDescriptor(str(exc))
    except KvcsError as exc:
        report.error = exc
    return report


def _add_descriptor(report: Report, descriptor: Descriptor) -> None:
    layout = Layout.of(descriptor)
    report.values["descriptor"] = descriptor.members()
    report.values["layer_octets"] = layout.layer_octets
    k, v = (" x ".join(map(str, shape)) for shape in (descriptor.k_shape, descriptor.v_shape))
    report.rows += [
        ("model", f"{descriptor.model} at {descriptor.revision}"),
        ("layers", str(descriptor.layers)),
        ("block", f"{descriptor.block_tokens} tokens, {descriptor.dtype}, {descriptor.layout}"),
        ("K of a token", f"{k}; {layout.k_octets} octets a block and layer"),
        ("V of a token", f"{v}; {layout.v_octets} octets a block and layer"),
    ]
    report.rows += [
        (name, orjson.dumps(value).decode()) for name, value in sorted(descriptor.extra.items())
    ]


# -- names ---------------------------------------------------------------------------------------


def _show_name(content: bytes, args: Namespace) -> Report:
    report = Report("name")
    text = content.decode(errors="replace").strip()
    try:
        namespace, track_name = parse_name(text)
        _add_namespace(report, namespace)
        if track_name is not None:
            _add_track(report, track_name)
        _check_fields(namespace)
    except KvcsError as exc:
        report.error = exc
    return report


def _add_namespace(report: Report, namespace: TrackNamespace) -> None:
    labels = ("profile", "Scope ID", "Compatibility ID", "Anchor Key", "Publication ID")
    for position, octets in enumerate(namespace.fields):
        if position == 0:
            report.add("profile", "profile", octets.decode(errors="replace"))
        elif position < len(_FIELDS):
            report.add(_FIELDS[position], labels[position], octets.hex())
        else:
            report.add(f"field_{position}", f"field {position}", octets.hex())
    covers = {
        1: "all of KVCS",
        2: "all publications of the scope",
        3: "all publications of the scope with this descriptor",
        4: "all publications of one token prefix",
        5: "one publication",
    }
    count = len(namespace.fields)
    report.add("covers", "covers", covers.get(count, "nothing of KVCS"))
    report.add("printable", "printable", str(namespace))
    hexed = "/".join(part.hex() for part in namespace.fields[1:])
    report.add("hex", "in hex", f"{HEX_NAME}{hexed}")


def _add_track(report: Report, name: bytes) -> None:
    if name in (MANIFEST, MANIFEST_COSE):
        report.add("track", "track", name.decode(), f"{name.decode()}, priority 0")
        return
    track = DataTrack.parse(name)
    report.add("track", "track", str(track))
    report.add("component", "component", track.component.name.lower())
    codec = standard_codecs().get(track.codec)
    told = "not known here" if codec is None else _kept(codec.lossless)
    report.add("codec", "codec", track.codec, f"{track.codec}, {told}")
    report.add("segment", "segment", track.segment)
    report.rows.append(("priority", f"{publisher_priority(0, 1)} for layer 0, below 128 for all"))


def _check_fields(namespace: TrackNamespace) -> None:
    """Refuse what cannot be a namespace of the profile or the beginning of one."""
    fields = namespace.fields
    if fields[:1] != (PROFILE,):
        first = fields[0][:32] if fields else b""
        raise BadName(f"namespace begins with {first!r}, expected {PROFILE!r}")
    if len(fields) > len(_FIELDS):
        raise BadName(f"namespace of {len(fields)} fields, expected {len(_FIELDS)} at most")
    for position, octets in enumerate(fields[1:], start=1):
        expected = PUBLICATION_ID_OCTETS if position == 4 else ID_OCTETS
        if len(octets) != expected:
            raise BadName(f"{_FIELDS[position]} of {len(octets)} octets, expected {expected}")


# -- helpers -------------------------------------------------------------------------------------


def _note(report: Report, error: KvcsError) -> None:
    """Keep what is wrong with the thing; what is wrong with the request is raised at once."""
    if isinstance(error, ConfigError):
        raise error
    report.error = error


def _kept(lossless: bool) -> str:
    return "lossless" if lossless else "lossy"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _shown_octets(octets: bytes) -> str:
    return f"{octets.hex()}, {octets.decode('ascii', 'backslashreplace')}"


_READERS: Mapping[str, Callable[[bytes, Namespace], Report]] = {
    "object": _show_object,
    "manifest": _show_manifest,
    "descriptor": _show_descriptor,
    "name": _show_name,
}
