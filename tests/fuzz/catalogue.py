"""Every fuzz target, by its name.

A module of targets is named here. One of a part that is not in this checkout is left out.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.target import Target

#: Modules of ``tests.fuzz.targets``, and what has to be there for each to make sense.
MODULES: Mapping[str, str] = {
    "wire": "moqt.wire",
    "quic": "aioquic",
    "sessions": "moqt.session",
    "profile": "kvcs.profile",
    "codecs": "kvcs.kvsp",
    "http": "kvcs.kvsp.http",
    "storage": "kvcs.depot",
    "files": "kvcs.config",
    "processes": "kvcs.consumer",
    "trust": "kvcs.trust.tokens",
}

#: Inputs that fuzzing found and that no seed reaches: one in hex on each line.
CORPUS = Path(__file__).parent / "corpus"


def targets() -> dict[str, Target]:
    """Return the targets, in the order of the modules."""
    found: dict[str, Target] = {}
    for module in modules():
        for name, target in targets_of(module).items():
            if name in found:
                raise ValueError(f"two targets of the name {name}")
            found[name] = target
    return found


def modules() -> list[str]:
    """Return the modules of targets of which the part is in this checkout."""
    return [module for module, part in MODULES.items() if find_spec(part) is not None]


def targets_of(module: str) -> dict[str, Target]:
    """Return the targets of one module, without importing what the others are about."""
    found: tuple[Target, ...] = import_module(f"tests.fuzz.targets.{module}").TARGETS
    return {target.name: target for target in found}


def module_of(name: str) -> str:
    """Return the module of a target."""
    return next(module for module in modules() if name in targets_of(module))


def corpus_of(target: Target) -> list[bytes]:
    """Return its seeds, and what fuzzing has found beside them."""
    return [*target.seeds(), *found_for(target)]


def found_for(target: Target) -> list[bytes]:
    """Return what fuzzing has found."""
    path = CORPUS / f"{target.name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []
