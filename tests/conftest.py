"""Settings for every test, and the QUIC engine that carries those over loopback."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from moqt.aio import engine

# Machines that share their cores have no steady speed: a slow example is no failing one.
settings.register_profile("kvcs", deadline=None, max_examples=25)
#: With more examples, for after the ordinary suite: ``--hypothesis-profile thorough``.
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("kvcs")


@pytest.fixture(autouse=True)
def log_lines_as_before() -> Iterator[None]:
    """Have no test write where another one's command was told to: that is closed by then."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        choices=["aioquic", "picoquic"],
        default="aioquic",
        help="QUIC engine of the tests over loopback that name none (default: aioquic)",
    )


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--engine")
    if name != engine.DEFAULT:
        engine.check_engine(name)
        engine.DEFAULT = name
        # For the commands that tests start.
        os.environ["KVCS_ENGINE"] = name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--engine") != "aioquic":
        skip = pytest.mark.skip(reason="asks for what only the engine aioquic can do")
        for item in items:
            if item.get_closest_marker("aioquic"):
                item.add_marker(skip)
