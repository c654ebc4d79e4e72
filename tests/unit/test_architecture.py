"""The drawing is a test: who imports whom, who may do I/O, what is public, what the papers say."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"

#: Lowest floor first. A module imports from its own floor or from below, never upwards.
FLOORS = (
    ("moqt.codepoints", "moqt.errors", "moqt.names", "moqt.location", "moqt.values", "moqt.limits"),
    ("moqt.wire", "moqt.authority", "moqt.certificates"),
    ("moqt.session",),
    ("moqt.aio",),
    ("moqt.relay",),
    ("kvcs.errors", "kvcs.kvsp"),
    ("kvcs.profile", "kvcs.trust"),
    (
        "kvcs.config",
        "kvcs.store",
        "kvcs.telemetry",
        "kvcs.lifecycle",
        "kvcs.link",
        "kvcs.memory",
        "kvcs.garbage",
        "kvcs.measurement",
        "kvcs.advice",
        "kvcs.kvsp.http",
        "kvcs.trust.watching",
        "kvcs.audit",
        "kvcs.repeats",
    ),
    ("kvcs.producer", "kvcs.consumer", "kvcs.depot"),
    ("kvcs.cli", "kvcs.connectors", "kvcs.__main__"),
)
#: The packages' own faces, which everything may import.
FACES = {"moqt": 0, "kvcs": 5}

#: The only places that may know of event loops, tasks, sockets, threads, processes and QUIC.
SHELL = (
    "moqt.aio",
    "moqt.relay.answers",
    "moqt.relay.holdings",
    "moqt.relay.mending",
    "moqt.relay.neighbours",
    "moqt.relay.offers",
    "moqt.relay.pausing",
    "moqt.relay.readers",
    "moqt.relay.server",
    "moqt.relay.sources",
    "moqt.relay.tasks",
    "moqt.relay.track",
    "moqt.relay.upstream",
    "kvcs.audit",
    "kvcs.garbage",
    "kvcs.lifecycle",
    "kvcs.link",
    "kvcs.kvsp.http.blockclient",
    "kvcs.kvsp.http.blockservice",
    "kvcs.kvsp.http.client",
    "kvcs.kvsp.http.indexclient",
    "kvcs.kvsp.http.indexservice",
    "kvcs.kvsp.http.registrar",
    "kvcs.kvsp.http.service",
    "kvcs.trust.watching",
    "kvcs.producer.daemon",
    "kvcs.producer.handle",
    "kvcs.producer.handler",
    "kvcs.producer.holdings",
    "kvcs.producer.listing",
    "kvcs.producer.relay",
    "kvcs.producer.serving",
    "kvcs.producer.workers",
    "kvcs.consumer.course",
    "kvcs.consumer.discovery",
    "kvcs.consumer.download",
    "kvcs.consumer.filling",
    "kvcs.consumer.intake",
    "kvcs.consumer.landing",
    "kvcs.consumer.lanes",
    "kvcs.consumer.moving",
    "kvcs.consumer.opening",
    "kvcs.consumer.processes",
    "kvcs.consumer.pursuit",
    "kvcs.consumer.readers",
    "kvcs.consumer.replicas",
    "kvcs.consumer.retrieval",
    "kvcs.consumer.services",
    "kvcs.consumer.sessions",
    "kvcs.consumer.tasks",
    "kvcs.consumer.telling",
    "kvcs.consumer.versions",
    "kvcs.consumer.ways",
    "kvcs.consumer.worker",
    "kvcs.depot.daemon",
    "kvcs.depot.depot",
    "kvcs.depot.following",
    "kvcs.depot.gallery",
    "kvcs.depot.handler",
    "kvcs.depot.keeping",
    "kvcs.depot.listing",
    "kvcs.depot.loading",
    "kvcs.cli",
    "kvcs.connectors",
    "kvcs.__main__",
)
IO_LIBRARIES = (
    "asyncio",
    "aiohttp",
    "aioquic",
    "aiopquic",
    "uvloop",
    "socket",
    "ssl",
    "selectors",
    "signal",
    "threading",
    "concurrent",
    "multiprocessing",
    "subprocess",
)
#: What a pure module would know the time by. The time is an argument, where it matters.
CLOCKS = ("time", "sched")

#: The only packages that know which QUIC library carries us, each its own, and who chooses one.
ENGINES = {"moqt.aio.aioquic": "aioquic", "moqt.aio.picoquic": "aiopquic"}
CHOOSES_THE_ENGINE = "moqt.aio.engine"

PATHS = sorted(str(path.relative_to(ROOT)) for top in FACES for path in (ROOT / top).rglob("*.py"))
MODULES = {".".join(Path(p).with_suffix("").parts).removesuffix(".__init__"): p for p in PATHS}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def floor(name: str) -> int:
    if name in FACES:
        return FACES[name]
    # A package may stand above the one that it is a part of: the longest name counts.
    return max((len(p), n) for n, row in enumerate(FLOORS) for p in row if within(name, p))[1]


def nodes(path: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import of a file, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imports(path: str) -> Iterator[str]:
    """Yield the modules that a file imports: ``from a import b`` is ``a.b`` if that is one."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else str(node.module)


def test_the_walk_finds_the_code() -> None:
    assert {"moqt.session.core", "kvcs.cli.main", "moqt", "kvcs"} <= set(MODULES)
    assert "moqt.codepoints" in set(imports("moqt/wire/framing.py"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    for name in imports(MODULES[module]):
        if within(name, *FACES):
            assert floor(name) <= floor(module), f"{module} imports {name} from above"


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, *SHELL)])
def test_what_decides_is_free_of_io_and_of_time(module: str) -> None:
    for name in imports(MODULES[module]):
        assert not within(name, *IO_LIBRARIES, *SHELL, *CLOCKS), f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, "moqt")])
def test_moqt_never_heard_of_kvcs(module: str) -> None:
    assert not [name for name in imports(MODULES[module]) if within(name, "kvcs")]


@pytest.mark.parametrize(("engine", "library"), ENGINES.items())
def test_only_its_engine_knows_a_quic_library(engine: str, library: str) -> None:
    found = {path for path in PATHS if any(within(name, library) for name in imports(path))}

    assert found
    # By path: a module of the package's name would hide behind it.
    assert not [path for path in found if not path.startswith(engine.replace(".", "/") + "/")]


def test_only_kvsp_over_http_knows_the_library_that_carries_it() -> None:
    found = {path for path in PATHS if any(within(name, "aiohttp") for name in imports(path))}

    assert found
    assert not [path for path in found if not path.startswith("kvcs/kvsp/http/")]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_that_is_asked_of_an_engine_is_to_dial_and_to_listen(engine: str) -> None:
    """The one that is optional is loaded by its name, when it is asked for."""
    asked = {
        module: {name for name in imports(path) if within(name, engine)}
        for module, path in MODULES.items()
        if not within(module, engine)
    }

    assert {module for module, names in asked.items() if names} <= {CHOOSES_THE_ENGINE}
    assert set().union(*asked.values()) <= {engine}
    [face] = [
        node.value
        for node in ast.walk(ast.parse((ROOT / MODULES[engine]).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert ast.literal_eval(face) == ["dial", "listen"]


def test_an_engine_that_nobody_asked_for_is_not_loaded() -> None:
    code = "import sys, moqt.aio; print({'aiopquic', 'moqt.aio.picoquic'} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize("path", PATHS)
def test_imports_are_absolute(path: str) -> None:
    assert not [node for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("shell", SHELL)
def test_the_shell_is_no_longer_than_it_must_be(shell: str) -> None:
    part = [path for module, path in MODULES.items() if within(module, shell)]

    wanted = (*IO_LIBRARIES, *(other for other in SHELL if other != shell))
    assert any(within(name, *wanted) for path in part for name in imports(path))


def test_the_session_can_be_loaded_without_an_event_loop() -> None:
    """What the drawing says of the source, said of a running interpreter."""
    code = "import sys, moqt.session.core; print({'asyncio', 'aioquic'} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize("name", ["moqt", "moqt.aio", "kvcs"])
def test_the_public_names_are_exactly_those_listed(name: str) -> None:
    module = importlib.import_module(name)

    public = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public | {n for n in module.__all__ if n == "__version__"} == set(module.__all__)


@pytest.mark.parametrize(
    "module", [m for m, path in MODULES.items() if "__all__ = [" in (ROOT / path).read_text()]
)
def test_what_is_listed_exists_and_is_in_order(module: str) -> None:
    if within(module, "moqt.aio.picoquic"):
        pytest.importorskip("aiopquic")
    loaded = importlib.import_module(module)

    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert len(set(loaded.__all__)) == len(loaded.__all__)


# -- the papers ----------------------------------------------------------------------------------


def test_the_state_diagram_in_the_papers_is_the_table_in_the_code() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "draw-states")]
    drawn = subprocess.run(script, capture_output=True, text=True, timeout=50, check=True).stdout

    assert drawn.startswith("```mermaid\nstateDiagram-v2\n")
    assert drawn in ARCHITECTURE.read_text()


def test_the_floors_in_the_papers_are_those_of_the_test() -> None:
    text = ARCHITECTURE.read_text()

    for number, row in enumerate(FLOORS, start=1):
        [line] = re.findall(rf"^ *floor {number} +(.*)$", text, re.MULTILINE)
        named = {name for name in re.split(r"  +", line) if within(name, *FACES)}
        assert named == set(row) - {"kvcs.__main__"}, f"floor {number}"


def test_the_shell_in_the_papers_is_that_of_the_test() -> None:
    [text] = re.findall(r"^Event loops, sockets.*?\n\n", ARCHITECTURE.read_text(), re.M | re.S)

    named = {name for name in re.findall(r"`([\w.]+)`", text) if within(name, *FACES)}
    assert named == set(SHELL) - {"kvcs.__main__"}


def test_every_file_and_test_that_the_papers_name_exists() -> None:
    named = re.findall(
        r"`((?:moqt|kvcs|tests|scripts)/[\w./-]+)(?:::(\w+))?`", ARCHITECTURE.read_text()
    )

    assert len(named) > 20, "the papers name hardly any file; did their form change?"
    missing = [
        f"{path}::{test}" if test else path
        for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]
    assert missing == []
