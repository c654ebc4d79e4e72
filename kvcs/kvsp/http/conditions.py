"""Preconditions and ranges: which status, and which octets, a request for octets gets.

Implements the parts of RFC 9110 that such a representation needs: strong entity tags (8.8.3),
If-Match, If-None-Match and If-Range (13.1), their order (13.2.2), and ranges of octets (14). Pure:
header fields in, a decision out.

Of several ranges none is sent, since nobody here asks for several; there is no ``Last-Modified``,
so preconditions about dates do not hold.
"""

import re
from dataclasses import dataclass

#: Digits of a position at most: no representation has as many octets.
_DIGITS = 18
_OWS = " \t"
_RANGE = re.compile(rf"(?:([0-9]{{1,{_DIGITS}}})-([0-9]{{0,{_DIGITS}}})|-([0-9]{{1,{_DIGITS}}}))")
_UNIT = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# An opaque tag may hold commas, so a list cannot simply be split at them.
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
#: Entity tags of a list that are looked at.
_MAX_TAGS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Octets ``start`` to ``stop - 1`` of a representation."""

    start: int
    stop: int

    @property
    def octets(self) -> int:
        """How many."""
        return self.stop - self.start

    def content_range(self, length: int) -> str:
        """Return the Content-Range field of an answer that carries them, of ``length`` in all."""
        return f"bytes {self.start}-{self.stop - 1}/{length}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a request gets.

    Attributes:
        status: 200, 206, 304, 412 or 416.
        span: Which octets: of 200 all, of 206 the part; empty for the others.
    """

    status: int
    span: Span


_NOTHING = Span(0, 0)


def select(
    *,
    etag: str,
    length: int,
    is_get: bool = True,
    if_match: str | None = None,
    if_none_match: str | None = None,
    if_range: str | None = None,
    range_: str | None = None,
) -> Selection:
    """Decide, in the order of RFC 9110 Section 13.2.2.

    Args:
        etag: The strong entity tag of the representation, in its quotes.
        length: Its octets.
        is_get: False for HEAD, for which ranges are not defined.
        if_match: The field, all its lines joined with commas; ``None`` if there is none.
        if_none_match: As above.
        if_range: As above.
        range_: As above.
    """
    if if_match is not None and not matches(if_match, etag, strong=True):
        return Selection(412, _NOTHING)
    if if_none_match is not None and matches(if_none_match, etag, strong=False):
        return Selection(304, _NOTHING)
    whole = Selection(200, Span(0, length))
    if range_ is None or not is_get:
        return whole
    if if_range is not None and if_range.strip(_OWS) != etag:
        # A weak tag or a date never is the strong tag (RFC 9110 Section 13.1.5).
        return whole
    try:
        span = parse_range(range_, length)
    except ValueError:
        return Selection(416, _NOTHING)
    return whole if span is None else Selection(206, span)


def parse_range(field: str, length: int) -> Span | None:
    """Read a Range field about a representation of ``length`` octets.

    Returns:
        The octets, within the representation; ``None`` if the field is of another unit, and to be
        ignored.

    Raises:
        ValueError: If it cannot be satisfied: no range, several, or one that lies behind the end.
    """
    unit, mark, ranges = field.strip(_OWS).partition("=")
    if not mark or not _UNIT.fullmatch(unit):
        raise ValueError("no range")
    if unit.lower() != "bytes":
        return None
    # A list may have empty elements (RFC 9110 Section 5.6.1.2).
    elements = [part for part in (p.strip(_OWS) for p in ranges.split(",")) if part]
    if len(elements) != 1:
        raise ValueError(f"{len(elements)} ranges, expected 1")
    match = _RANGE.fullmatch(elements[0])
    if match is None:
        raise ValueError("no range of octets")
    first, last, suffix = match.groups()
    if suffix is not None:
        start, stop = max(0, length - int(suffix)), length
    else:
        start = int(first)
        stop = min(int(last) + 1, length) if last else length
        if last and int(last) < start:
            raise ValueError("a range that ends before it begins")
    if start >= stop:
        raise ValueError(f"a range behind the end, {length} octets")
    return Span(start, stop)


def matches(field: str, etag: str, *, strong: bool) -> bool:
    """Say whether a list of entity tags has one that is ``etag``; ``*`` has every one.

    Args:
        field: If-Match or If-None-Match. One that is malformed has no tag behind what is wrong.
        etag: A strong entity tag, in its quotes.
        strong: Whether a weak tag of the list counts (RFC 9110 Section 8.8.3.2).
    """
    if field.strip(_OWS) == "*":
        return True
    at = 0
    for _ in range(_MAX_TAGS):
        while at < len(field) and field[at] in _OWS + ",":
            at += 1
        match = _TAG.match(field, at)
        if match is None:
            return False
        if f'"{match[2]}"' == etag and not (strong and match[1]):
            return True
        at = match.end()
    return False
