"""What every test over loopback needs."""

import pytest

from moqt.aio.tls import CertificateFiles, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    """Return a throwaway CA and a server's certificate from it, good for loopback."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
