"""The tree of exceptions, as others rely on it."""

import pytest

from kvcs import errors
from kvcs.errors import (
    BadObject,
    BadToken,
    Incomplete,
    KvcsError,
    Rejection,
    ServiceFailed,
    ServiceFault,
)
from moqt.authority import Denial


@pytest.mark.parametrize(
    "name",
    [
        "ConfigError",
        "BadDescriptor",
        "BadName",
        "BadObject",
        "BadManifest",
        "NotFound",
        "Incomplete",
        "PublicationFailed",
        "Expired",
        "ServiceFailed",
        "BadToken",
    ],
)
def test_every_exception_is_of_the_one_family(name: str) -> None:
    assert issubclass(getattr(errors, name), KvcsError)
    assert f":exc:`{name}`" in (errors.__doc__ or "")


def test_a_bad_object_carries_its_reason_and_reads_as_its_text() -> None:
    exc = BadObject(Rejection.DIGEST, "found x, expected y")

    assert exc.reason == "digest"
    assert str(exc) == "found x, expected y"


def test_an_incomplete_retrieval_carries_what_is_missing() -> None:
    exc = Incomplete("2 objects are missing", ((g, "k.raw.s0", 5) for g in (1, 2)))

    assert exc.missing == ((1, "k.raw.s0", 5), (2, "k.raw.s0", 5))
    assert str(exc) == "2 objects are missing"
    assert Incomplete("nothing came").missing == ()


def test_a_service_that_failed_says_why_and_when_it_may_be_asked_again() -> None:
    exc = ServiceFailed(ServiceFault.BUSY, "503, full", retry_after_s=10.0)

    assert (exc.fault, exc.retry_after_s) == ("busy", 10.0)
    assert ServiceFailed(ServiceFault.BROKEN, "500").retry_after_s is None


def test_a_bad_token_says_what_its_bearer_is_told_and_when_waiting_helps() -> None:
    exc = BadToken(Denial.UNAUTHORIZED, "not valid for 5 s", retry_after_s=5.0)

    assert (exc.why, exc.retry_after_s) == (Denial.UNAUTHORIZED, 5.0)
    assert BadToken(Denial.MALFORMED, "x").retry_after_s is None
