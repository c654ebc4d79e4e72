"""Fixtures of the command line."""

from pathlib import Path

import pytest

from tests.unit.kvcs.cli.samples import Folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder to work in, with no settings of the machine around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("KVCS_CONFIG", "KVCS_SCOPE_FILE", "KVCS_SCOPE_KEY", "KVCS_SCOPE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    return Folder(tmp_path)
