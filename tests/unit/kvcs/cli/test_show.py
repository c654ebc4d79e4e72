"""``kvcs show``: every kind of thing, whole and broken, in words and as JSON."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcs.cli.main import main
from kvcs.profile.naming import PublicationName
from kvcs.profile.payload import HEADER_OCTETS
from kvcs.profile.signing import ProducerKey
from tests.unit.kvcs.cli.samples import BLOCK, Folder, make_manifest

KEY = ProducerKey.generate()
PUBLICATION = PublicationName(b"\x01" * 32, b"\x02" * 32, b"\x03" * 32, b"\x04" * 16)
HEX = "/".join(("kvcs-1", "01" * 32, "02" * 32, "03" * 32, "04" * 16))

Out = pytest.CaptureFixture[str]


def shown(capsys: Out, *argv: str, status: int = 0) -> dict[str, Any]:
    """Run ``kvcs show --json`` and return what it printed."""
    assert main(["show", *argv, "--json"]) == status
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_an_object_is_explained_field_by_field(folder: Folder, capsys: Out) -> None:
    assert shown(capsys, folder.object) == {
        "kind": "object",
        "octets": HEADER_OCTETS + 16,
        "magic": "4b564f31",
        "version": 1,
        "component": "k",
        "flags": 0,
        "layer": 1,
        "block_index": 1,
        "token_start": 4,
        "token_count": 4,
        "codec": 0,
        "codec_name": "raw",
        "lossless": True,
        "data_length": 16,
        "data_digest": BLOCK.digest.hex(),
        "checked": ["payload", "digest"],
    }


def test_people_read_the_same_fields(folder: Folder, capsys: Out) -> None:
    assert main(["show", folder.object]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["object"]
    assert ["Component", "1,", "k"] in lines
    assert ["Codec", "0x0000,", "raw,", "lossless"] in lines


def test_hex_will_do_as_an_argument_a_file_or_standard_input(
    folder: Folder, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = BLOCK.encode().hex()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\n")))
    spaced = " ".join(text[at : at + 2] for at in range(0, len(text), 2))

    expected = shown(capsys, folder.object)
    for argument in (text, folder.write("object.hex", spaced), "-"):
        assert shown(capsys, argument) == expected


def test_an_object_is_checked_against_where_it_came_from(folder: Folder, capsys: Out) -> None:
    argv = [folder.object, "--group", "1", "--object", "1"]
    argv += ["--manifest", folder.manifest, "--track", "k.raw.s0"]

    found = shown(capsys, *argv)
    where = ["Group ID", "Object ID", "manifest", "decoding"]
    assert found["checked"] == ["payload", "digest", *where]


def broken(at: int, octets: bytes) -> bytes:
    payload = bytearray(BLOCK.encode())
    payload[at : at + len(octets)] = octets
    return bytes(payload)


Case = Callable[[Folder], list[str]]
BROKEN_OBJECTS: dict[str, tuple[Case, int, str, str]] = {
    "data": (lambda f: [f.write("o", broken(HEADER_OCTETS, b"\xff"))], 5, "BadObject", "digest"),
    "version": (lambda f: [f.write("o", broken(4, b"\x02"))], 5, "BadObject", "version"),
    "component": (lambda f: [f.write("o", broken(5, b"\x07"))], 5, "BadObject", "component"),
    "length": (lambda f: [f.write("o", BLOCK.encode()[:-1])], 5, "BadObject", "length"),
    "cut": (lambda f: [f.write("o", BLOCK.encode()[:30])], 5, "BadObject", "length"),
    "magic": (
        lambda f: [f.write("o", broken(0, b"KVO2")), "--as", "object"],
        5,
        "BadObject",
        "magic",
    ),
    "group": (lambda f: [f.object, "--group", "0"], 5, "BadObject", "layer"),
    "object": (lambda f: [f.object, "--object", "0"], 5, "BadObject", "block-index"),
    "position": (
        lambda f: [
            f.write("o", replace(BLOCK, token_start=8).encode()),
            "--manifest",
            f.manifest,
            "--track",
            "k.raw.s0",
        ],
        5,
        "BadObject",
        "token-start",
    ),
}


@pytest.mark.parametrize("case", BROKEN_OBJECTS)
def test_a_broken_object_is_shown_with_what_is_wrong(
    case: str, folder: Folder, capsys: Out
) -> None:
    arguments, status, kind, reason = BROKEN_OBJECTS[case]
    argv = arguments(folder)

    assert main(["show", *argv, "--json"]) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["error"]["type"], found["error"]["reason"]) == (kind, reason)
    assert err == f"kvcs: {found['error']['text']}\n"
    assert "checked" not in found
    if case != "cut":
        assert found["layer"] == 1  # as far as it can be read
    assert main(["show", *argv]) == status


def test_an_object_of_another_digest_contradicts_the_manifest(folder: Folder, capsys: Out) -> None:
    other = folder.write("o", replace(BLOCK, data=bytes(16)).encode())

    argv = [other, "--manifest", folder.manifest, "--track", "k.raw.s0"]
    found = shown(capsys, *argv, status=4)
    assert "lists the digest" in found["error"]["text"]


def test_a_manifest_is_explained(folder: Folder, capsys: Out) -> None:
    found = shown(capsys, folder.manifest)

    manifest = make_manifest()
    assert found["signature"] == "none"
    assert found["version"] == 3
    assert found["descriptor"] == manifest.compat.members()
    assert found["segments"] == [
        {
            "segment": 0,
            "first_block": 0,
            "blocks": 2,
            "block_keys_sha256": manifest.segments[0].block_keys_sha256.hex(),
            "complete": False,
            "digests_in": None,
            "tracks": {"k.raw.s0": {"layers_listed": 2}, "v.raw.s0": {"layers_listed": 0}},
        }
    ]
    assert main(["show", folder.manifest]) == 0
    text = capsys.readouterr().out
    assert "blocks 0 to 1, tokens 0 to 7, not complete" in text
    assert "digests of 2 of 2 layers" in text


def test_a_signature_is_checked_when_somebody_is_trusted(folder: Folder, capsys: Out) -> None:
    signed = folder.signed(KEY)
    trust = folder.write("producer.pem", KEY.public_pem())

    unchecked, checked = shown(capsys, signed), shown(capsys, signed, "--trust", trust)
    assert (unchecked["signature"], checked["signature"]) == ("not checked", "good")
    assert checked["kid"] == KEY.kid.hex()
    assert checked["algorithm"] == "EDDSA"
    assert checked["segments"] == shown(capsys, folder.manifest)["segments"]


BAD_MANIFESTS: dict[str, tuple[Case, str]] = {
    "another key": (
        lambda f: [
            f.signed(KEY),
            "--trust",
            f.write("other.pem", ProducerKey.generate().public_pem()),
        ],
        "not trusted",
    ),
    "not signed": (
        lambda f: [f.manifest, "--trust", f.write("producer.pem", KEY.public_pem())],
        "not signed",
    ),
    "no segments": (lambda f: [f.json("m", {"kvcs": 1})], "no member 'compat'"),
    "not cose": (lambda f: [f.write("m", b"\xd2\x84\x40\xa0")], "not COSE_Sign1"),
    "not json": (lambda f: [f.write("m", "[1]"), "--as", "manifest"], "manifest is an array"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused_with_4(case: str, folder: Folder, capsys: Out) -> None:
    arguments, text = BAD_MANIFESTS[case]

    found = shown(capsys, *arguments(folder), status=4)
    assert text in found["error"]["text"]


def test_a_descriptor_is_explained_alone_and_beside_a_cache(folder: Folder, capsys: Out) -> None:
    alone, beside = shown(capsys, folder.descriptor), shown(capsys, folder.side)

    assert alone["kind"] == beside["kind"] == "descriptor"
    assert alone["layer_octets"] == 2 * 16
    assert beside == alone | {"tokens": 10}


def test_a_bad_descriptor_is_refused_with_6(folder: Folder, capsys: Out) -> None:
    found = shown(capsys, folder.json("d.json", {"kvsp": 1, "model": "m"}), status=6)
    assert "no member 'revision'" in found["error"]["text"]

    found = shown(capsys, folder.write("d.json", "nonsense"), "--as", "descriptor", status=6)
    assert "not JSON" in found["error"]["text"]


@pytest.mark.parametrize("name", [HEX, str(PUBLICATION.namespace)])
def test_a_namespace_is_explained_in_both_forms(name: str, capsys: Out) -> None:
    assert shown(capsys, name) == {
        "kind": "name",
        "profile": "kvcs-1",
        "scope_id": "01" * 32,
        "compatibility_id": "02" * 32,
        "anchor_key": "03" * 32,
        "publication_id": "04" * 16,
        "covers": "one publication",
        "printable": str(PUBLICATION.namespace),
        "hex": HEX,
    }


def test_a_track_name_behind_it_is_explained(capsys: Out) -> None:
    full = str(PUBLICATION.track(b"kv.raw.s7"))

    found = shown(capsys, full)
    assert (found["track"], found["component"], found["segment"]) == ("kv.raw.s7", "kv", 7)
    assert shown(capsys, HEX + "--kv.raw.s7") == found
    assert shown(capsys, HEX + "--manifest.cose")["track"] == "manifest.cose"


@pytest.mark.parametrize(
    ("fields", "covers"),
    [
        (2, "all publications of the scope"),
        (3, "all publications of the scope with this descriptor"),
        (4, "all publications of one token prefix"),
    ],
)
def test_a_prefix_says_what_it_covers(fields: int, covers: str, capsys: Out) -> None:
    assert shown(capsys, "/".join(HEX.split("/")[:fields]))["covers"] == covers


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (HEX + "00", "publication_id of 17 octets, expected 16"),
        (HEX + "/00", "namespace of 6 fields, expected 5 at most"),
        ("kvcs-1/xyz", "a field is not hex"),
        ("kvcs-1/", "empty field"),
        (HEX + "--k.raw.s01", "not the name of a data track"),
        ("kvcs.2d1-.41", "is not escaped"),
    ],
)
def test_a_bad_name_is_refused_with_7(name: str, text: str, capsys: Out) -> None:
    assert text in shown(capsys, name, status=7)["error"]["text"]


def test_a_name_of_another_application_is_none_of_ours(capsys: Out) -> None:
    found = shown(capsys, "example-video", "--as", "name", status=7)

    assert "namespace begins with b'example'" in found["error"]["text"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda f: ["nowhere"], "nowhere: No such file or directory"),
        (lambda f: [str(f.path)], "Is a directory"),
        (lambda f: [f.write("x", "hello")], "no object, manifest, descriptor or name"),
        (lambda f: [f.object, "--manifest", f.manifest], "--manifest needs --track"),
        (
            lambda f: [f.object, "--manifest", f.manifest, "--track", "k.raw.s1"],
            "no track k.raw.s1 in this manifest",
        ),
        (lambda f: [f.signed(KEY), "--trust", "nowhere.pem"], "nowhere.pem"),
        (lambda f: ["x" * 300], "File name too long"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_with_2(
    arguments: Case, text: str, folder: Folder, capsys: Out
) -> None:
    assert main(["show", *arguments(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") == 1
