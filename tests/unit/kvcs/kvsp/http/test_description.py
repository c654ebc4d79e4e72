"""The papers about KVSP over HTTP, held against the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcs.kvsp.http.blockservice import BlockLimits
from kvcs.kvsp.http.frames import CONTENT_TYPE, HEADER_OCTETS
from kvcs.kvsp.http.indexservice import IndexLimits
from kvcs.kvsp.http.problems import Problem
from kvcs.kvsp.http.questions import MAX_TOLD
from kvcs.kvsp.http.records import MAX_BLOCKS, MAX_ENCODINGS, MAX_RUNS
from kvcs.kvsp.http.routes import PREFIX, VARIABLES, Routes
from kvcs.kvsp.http.uris import MAX_URI

DOCS = Path(__file__).parents[5] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the wheel carries no papers")


def description() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "kvsp-http.openapi.json").read_text())
    return found


def papers() -> str:
    return (DOCS / "kvsp-http.md").read_text()


def test_every_path_and_method_is_described_and_no_other() -> None:
    described = {
        path: {method.upper() for method in item if method != "parameters"}
        for path, item in description()["paths"].items()
    }

    assert described == {route.value.template: set(route.value.methods) for route in Routes}


def test_the_variables_of_paths_are_what_the_routes_let_through() -> None:
    for name, parameter in description()["components"]["parameters"].items():
        if parameter["in"] != "path":
            continue
        pattern = VARIABLES[name]
        assert re.fullmatch(pattern, str(parameter["example"]))
        if name != "layer":
            assert parameter["schema"]["pattern"] == f"^{pattern}$"


def test_the_limits_are_those_of_the_code() -> None:
    schemas = description()["components"]["schemas"]
    holding = schemas["Holding"]["properties"]

    assert holding["keys"]["maxItems"] == IndexLimits().max_keys_registered
    assert schemas["KeysQuestion"]["properties"]["keys"]["maxItems"] == IndexLimits().max_keys_asked
    assert schemas["KeysQuestion"]["properties"]["limit"]["maximum"] == MAX_TOLD
    assert schemas["SectionsQuestion"]["properties"]["keys"]["maxItems"] == BlockLimits().max_keys
    assert schemas["Chain"]["properties"]["keys"] == holding["keys"]
    assert holding["uri"]["maxLength"] == MAX_URI
    assert holding["layers"]["maxItems"] == MAX_RUNS
    assert holding["encodings"]["maxItems"] == MAX_ENCODINGS
    assert holding["first_block"]["maximum"] == MAX_BLOCKS
    for number in (
        IndexLimits().max_keys_registered, IndexLimits().max_keys_asked, BlockLimits().max_keys,
        BlockLimits().max_sections, MAX_URI, MAX_TOLD,
    ):  # fmt: skip
        assert re.search(rf"\b{number:,}\b", papers()), number


def test_every_refusal_is_in_the_table() -> None:
    table = papers().partition("## Refusals")[2].partition("\n\n")[2].partition("\n\n")[0]
    told = {
        (int(row.split("|")[1]), name)
        for row in table.splitlines()[2:]
        for name in re.findall(r"(?:/kvsp/1/problems|…)/([a-z-]+)", row.split("|")[2])
    }

    assert told == {(p.status, p.type.removeprefix("/kvsp/1/problems/")) for p in Problem}


def test_every_path_is_in_the_table() -> None:
    model = PREFIX + "/{scope}/{compatibility}"
    table = papers().partition(f"| path behind `{PREFIX}/SCOPE/COMPAT` |")[2].partition("\n\n")[0]
    rows = [
        [cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]
    ]

    assert {(path, tuple(methods.split(", ")), right) for path, methods, _, right in rows} == {
        (
            re.sub(r"{(\w+)}", lambda m: m[1].upper(), route.value.template.removeprefix(model)),
            route.value.methods,
            route.value.right.value,
        )
        for route in Routes
    }


def test_the_frame_is_as_long_as_its_fields() -> None:
    table = papers().partition("| octets | | |")[2].partition("\n\n")[0]

    assert sum(int(row.split("|")[1]) for row in table.splitlines()[2:]) == HEADER_OCTETS
    assert CONTENT_TYPE in papers()
