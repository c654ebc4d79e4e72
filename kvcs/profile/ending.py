"""What the end of a subscription says of its publication (KVCS Section 5.4, decision 5). Pure.

A producer that gives a publication up ends every track with INTERNAL_ERROR. So does a relay, or a
session, that has lost its publisher, although the publication may be as good as ever. Both are one
code, so a producer of ours says the first thing in the Reason Phrase, which relays pass on. Who
does not find it there asks again: of a publication that was given up, nothing more will come.
"""

from enum import Enum, auto

from moqt.codepoints import PublishDoneCode

_ABANDONED = "abandoned"


class End(Enum):
    """How a subscription ended."""

    #: As it should, or so it is said (decision 9).
    ENDED = auto()
    #: The producer gave the publication up: nothing of it will come any more.
    ABANDONED = auto()
    #: Who served it cannot go on. Asked again, it or another one may.
    LOST = auto()

    @classmethod
    def of(cls, code: int, reason: str) -> "End":
        """Read what PUBLISH_DONE says, or what stands for one that did not come."""
        if code == PublishDoneCode.TRACK_ENDED:
            return cls.ENDED
        if code == PublishDoneCode.INTERNAL_ERROR and reason.split(":")[0] == _ABANDONED:
            return cls.ABANDONED
        return cls.LOST


def abandoned(reason: str) -> str:
    """Return the Reason Phrase with which every track of an abandoned publication ends."""
    return f"{_ABANDONED}: {reason}"
