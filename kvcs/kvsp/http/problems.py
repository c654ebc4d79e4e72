"""Refusals: a status and a problem document (RFC 9457) for each, and nothing about what exists.

Each problem reads the same whatever it is about. In particular who asks for what there is not, and
who asks for what a token is not good for, get the same octets: nobody learns from a refusal whether
a scope, a model or a block is known here.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import orjson

CONTENT_TYPE = "application/problem+json"
#: What ``type`` begins with: a reference that is resolved against the service (RFC 9457 3.1.1).
TYPE_PREFIX = "/kvsp/1/problems/"


class _Kind(NamedTuple):
    status: int
    name: str
    title: str


class Problem(Enum):
    """The refusals there are."""

    BAD_REQUEST = _Kind(400, "bad-request", "The request cannot be read")
    UNAUTHORIZED = _Kind(401, "unauthorized", "No token, or one that is nobody's")
    FORBIDDEN = _Kind(403, "forbidden", "The token is not good for writing here")
    NOT_FOUND = _Kind(404, "not-found", "Nothing here that the token is good for")
    METHOD_NOT_ALLOWED = _Kind(405, "method-not-allowed", "Not a method of this path")
    TIMED_OUT = _Kind(408, "timed-out", "The request did not come in time")
    PRECONDITION_FAILED = _Kind(412, "precondition-failed", "Not the representation that was meant")
    TOO_LARGE = _Kind(413, "too-large", "More than one request may ask for")
    MEDIA_TYPE = _Kind(415, "media-type", "Expected application/json")
    BAD_RANGE = _Kind(416, "bad-range", "No single range of octets within the representation")
    BROKEN = _Kind(500, "broken", "A mistake of this service")
    FULL = _Kind(503, "full", "No room for more holders")
    BUSY = _Kind(503, "busy", "More requests than are served at once")
    STOPPING = _Kind(503, "stopping", "The service is stopping")

    @property
    def status(self) -> int:
        """The status of the answer."""
        return self.value.status

    @property
    def type(self) -> str:
        """What ``type`` says in the document: stable."""
        return TYPE_PREFIX + self.value.name

    def document(self, detail: str | None = None) -> bytes:
        """Return the problem document.

        Args:
            detail: What was found in the request and what was expected. Nothing else belongs
                there.
        """
        members: dict[str, str | int] = {
            "type": self.type,
            "title": self.value.title,
            "status": self.status,
        }
        if detail is not None:
            members["detail"] = detail
        return orjson.dumps(members)


#: Problems by status, for those that the library answers by itself.
BY_STATUS = {problem.status: problem for problem in reversed(Problem) if problem.status != 503}


class Refused(Exception):
    """A request is refused; what serves it turns this into the answer.

    Args:
        problem: Which refusal.
        detail: See :meth:`Problem.document`.
        headers: Fields that go with it.
    """

    def __init__(
        self,
        problem: Problem,
        detail: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(problem.type)
        self.problem = problem
        self.detail = detail
        self.headers = headers
