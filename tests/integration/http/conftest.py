"""What tests of commands that speak HTTP start from."""

from pathlib import Path

import pytest

from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import READER, WRITER
from tests.integration.kvcs.desk import Desk
from tests.integration.kvcs.scene import SCOPE


@pytest.fixture
def desk(tmp_path: Path, certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)  # where no kvcs.toml is
    made = Desk(tmp_path, certificates)
    scope = SCOPE.scope_id.hex()
    for name, text in (
        ("tokens", f"{scope} read {READER}\n{scope} read,write {WRITER}\n"),
        ("mine.token", WRITER + "\n"),
    ):
        made.write(name, text)
        Path(made[name]).chmod(0o600)
    Path(made["cache.json"]).chmod(0o644)
    return made
