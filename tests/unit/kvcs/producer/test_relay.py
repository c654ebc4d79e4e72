"""Where a relay's GOAWAY may send a producer."""

import pytest

from kvcs.producer.relay import why_not_there
from moqt.aio import ClientTls

HERE = "moqt://relay.example:4443/a"


@pytest.mark.parametrize("uri", ["moqt://relay.example:4444/b", "moqt://other.example/"])
def test_it_may_be_sent_to_whoever_has_a_good_certificate(uri: str) -> None:
    assert why_not_there(uri, HERE, ClientTls()) is None


def test_without_verification_it_may_be_sent_to_the_same_host_only() -> None:
    trusting = ClientTls(verify=False)

    assert why_not_there("moqt://relay.example:1/", HERE, trusting) is None
    assert why_not_there("moqt://other.example:4443/a", HERE, trusting) == (
        "other.example is another host, and certificates are not verified"
    )


@pytest.mark.parametrize("uri", ["https://relay.example/", "moqt:///path", "moqt://h:99999/", "x"])
def test_it_may_not_be_sent_to_what_is_no_moqt_uri(uri: str) -> None:
    reason = why_not_there(uri, HERE, ClientTls())

    assert reason is not None
    assert uri in reason
