"""The paths of both services, and what each needs. The services serve these and no others.

``docs/kvsp-http.openapi.json`` describes the same; a test holds the one against the other.
"""

from enum import Enum
from typing import NamedTuple

from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.tokens import Right

#: What every path begins with, behind that of the service's URI.
PREFIX = "/kvsp/1"
_MODEL = PREFIX + "/{scope}/{compatibility}"


class Part(Enum):
    """The two services. One listener may have both."""

    BLOCKS = "blocks"
    INDEX = "index"


class Route(NamedTuple):
    """One path, and the methods of it."""

    name: str
    part: Part
    methods: tuple[str, ...]
    template: str
    right: Right


class Routes(Enum):
    """The paths there are."""

    CONTAINER = Route(
        "container", Part.BLOCKS, ("GET", "HEAD"), _MODEL + "/blocks/{key}", Right.READ
    )
    LAYER = Route(
        "layer", Part.BLOCKS, ("GET", "HEAD"), _MODEL + "/blocks/{key}/layers/{layer}", Right.READ
    )
    BATCH = Route("batch", Part.BLOCKS, ("POST",), _MODEL + "/blocks", Right.READ)
    LOOK_UP = Route("look-up", Part.INDEX, ("POST",), _MODEL + "/look-up", Right.READ)
    LONGEST = Route("longest", Part.INDEX, ("POST",), _MODEL + "/longest", Right.READ)
    CHAIN = Route("chain", Part.INDEX, ("GET",), _MODEL + "/publications/{published}", Right.READ)
    HOLDER = Route(
        "holder", Part.INDEX, ("PUT", "DELETE"), _MODEL + "/holders/{holder}", Right.WRITE
    )
    LEASE = Route("lease", Part.INDEX, ("PUT",), _MODEL + "/holders/{holder}/lease", Right.WRITE)


#: What each variable of a path may be, as a regular expression.
VARIABLES = {
    "scope": "[0-9a-f]{64}",
    "compatibility": "[0-9a-f]{64}",
    "key": "[0-9a-f]{64}",
    "layer": "(?:0|[1-9][0-9]{0,4})",
    "published": "[0-9a-f]{32}",
    "holder": "[0-9a-f]{32}",
}


def model_path(scope_id: bytes, compatibility_id: bytes) -> str:
    """Return what the paths about one model in one scope begin with."""
    return f"{PREFIX}/{scope_id.hex()}/{compatibility_id.hex()}"


def container_path(name: BlockName) -> str:
    """Return the path of a whole block."""
    return f"{model_path(name.scope_id, name.compatibility_id)}/blocks/{name.block_key.hex()}"


def chain_path(scope_id: bytes, compatibility_id: bytes, publication_id: bytes) -> str:
    """Return the path of the Block Keys of a publication."""
    return f"{model_path(scope_id, compatibility_id)}/publications/{publication_id.hex()}"


def layer_path(name: BlockName, layer: int) -> str:
    """Return the path of one layer of a block."""
    return f"{container_path(name)}/layers/{layer}"
