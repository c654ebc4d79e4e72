"""Fixtures of the commands with tokens."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.desk import Desk


@pytest.fixture
def desk(tmp_path: Path, certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)  # where no kvcs.toml is
    for name in os.environ:
        if name.startswith("KVCS_"):
            monkeypatch.delenv(name)
    return Desk(tmp_path, certificates)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process did to logging, before or here."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
