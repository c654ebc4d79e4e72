"""Location Filters and Range Filters: their wire form, and what passes them.

A Location Filter that makes no sense closes the session. A Range Filter that makes no sense only
fails its request, with INVALID_FILTER; so it decodes, and :func:`filter_defect` says what is
wrong with it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from moqt.codepoints import MAX_VI64
from moqt.codepoints import LocationFilterType as L
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.wire.pairs import Properties, property_values
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

if TYPE_CHECKING:  # parameters.py needs the filters; only the name is needed here
    from moqt.wire.parameters import Parameters

_START: Final = Location(0, 0)

#: How many of (start_group, start_object, end_group_delta, end_object) a type has, from the left.
_FIELD_COUNTS: Final = {
    L.NONE: 0,
    L.RELATIVE_START: 1,
    L.ABSOLUTE_START: 2,
    L.ABSOLUTE_START_GROUP_END: 3,
    L.ABSOLUTE_RANGE: 4,
    L.NEXT_OBJECT: 0,
}


@dataclass(frozen=True, slots=True)
class LocationRange:
    """Locations from ``start`` to ``end``, both included; ``end`` None: open.

    May be empty (``end`` before ``start``): a subscription may ask for nothing.
    """

    start: Location
    end: Location | None = None

    def __contains__(self, location: Location) -> bool:
        return self.start <= location and (self.end is None or location <= self.end)


@dataclass(frozen=True, slots=True)
class LocationFilter:
    """Which Locations are wanted (MOQT, "LOCATION_FILTER").

    Build it with one of the constructors. Fields that its type lacks are 0.

    Raises:
        UsageError: If a field is set that the type lacks, is no vi64, or takes the last Group
            past 2**64 - 1.
    """

    type: L
    start_group: int = 0
    start_object: int = 0
    end_group_delta: int = 0
    end_object: int = 0

    #: All that follows the Largest Object there is when the request is processed.
    NEXT_OBJECT: ClassVar["LocationFilter"]

    def __post_init__(self) -> None:
        fields = self._fields()
        if any(fields[_FIELD_COUNTS[self.type] :]):
            raise UsageError(f"{self.type.name} filter with more fields than it has: {fields}")
        if not all(0 <= value <= MAX_VI64 for value in fields):
            raise UsageError(f"{self.type.name} filter with a field that is no vi64: {fields}")
        if self.start_group + self.end_group_delta > MAX_VI64:
            raise UsageError("a location filter ends past Group 2**64 - 1")

    @classmethod
    def none(cls) -> Self:
        """Return the filter that lets everything pass. In an update, it removes the filter."""
        return cls(L.NONE)

    @classmethod
    def relative(cls, groups: int) -> Self:
        """Return a start at a Group counted back from the largest.

        0 is the next Group, 1 the current one, ``n`` begins ``n`` - 1 Groups before the current.
        """
        return cls(L.RELATIVE_START, groups)

    @classmethod
    def absolute_start(cls, group: int, object_: int) -> Self:
        """Return everything from a Location on."""
        return cls(L.ABSOLUTE_START, group, object_)

    @classmethod
    def group_end(cls, group: int, object_: int, end_group: int) -> Self:
        """Return everything from a Location to the last Object of ``end_group``."""
        return cls(L.ABSOLUTE_START_GROUP_END, group, object_, end_group - group)

    @classmethod
    def range(cls, group: int, object_: int, end_group: int, end_object: int) -> Self:
        """Return everything between two Locations, both included."""
        return cls(L.ABSOLUTE_RANGE, group, object_, end_group - group, end_object)

    def resolve(self, largest: Location | None) -> LocationRange:
        """Return what a subscription gets.

        Args:
            largest: The Largest Object when the request is processed; None before the first.
        """
        match self.type:
            case L.NONE:
                return LocationRange(_START)
            case L.NEXT_OBJECT:
                return LocationRange(largest.next() if largest is not None else _START)
            case L.RELATIVE_START:
                next_group = largest.group + 1 if largest is not None else 0
                group = min(max(next_group - self.start_group, 0), MAX_VI64)
                return LocationRange(Location(group, 0))
        start = Location(self.start_group, self.start_object)
        end_group = self.start_group + self.end_group_delta
        match self.type:
            case L.ABSOLUTE_START_GROUP_END:
                return LocationRange(start, Location(end_group, MAX_VI64))
            case L.ABSOLUTE_RANGE:
                return LocationRange(start, Location(end_group, self.end_object))
        return LocationRange(start)

    def resolve_fetch(self, largest: Location | None) -> LocationRange | None:
        """Return what a FETCH or a fill gets: the range cut to the Largest Object.

        None if that leaves nothing: no Objects yet, a start after the largest, or an end before
        the start. It makes a FETCH an INVALID_RANGE, and a fill open no stream.
        """
        wanted = self.resolve(largest)
        if largest is None or wanted.start > largest:
            return None
        end = largest if wanted.end is None else min(wanted.end, largest)
        return LocationRange(wanted.start, end) if wanted.start <= end else None

    def encode(self, w: Writer) -> None:
        """Put the filter; it has no length of its own."""
        w.vi64(self.type)
        for value in self._fields()[: _FIELD_COUNTS[self.type]]:
            w.vi64(value)

    @classmethod
    def decode(cls, r: Reader) -> Self:
        """Take a filter.

        Raises:
            ProtocolError: If its type is unknown or its last Group is past 2**64 - 1.
        """
        number = r.vi64()
        if number not in L._value2member_map_:
            raise ProtocolError(f"location filter of unknown type {number:#x}")
        kind = L(number)
        fields = [r.vi64() for _ in range(_FIELD_COUNTS[kind])]
        try:
            return cls(kind, *fields)
        except UsageError as exc:
            raise ProtocolError(str(exc)) from None

    def _fields(self) -> tuple[int, int, int, int]:
        return self.start_group, self.start_object, self.end_group_delta, self.end_object


LocationFilter.NEXT_OBJECT = LocationFilter(L.NEXT_OBJECT)


#: First and last value that pass; None: no last one.
Range = tuple[int, int | None]

#: Parameters that are Range Filters, and may repeat.
RANGE_FILTERS: Final = frozenset(
    {
        P.SUBGROUP_FILTER,
        P.OBJECTID_FILTER,
        P.PRIORITY_FILTER,
        P.OBJECT_PROPERTY_FILTER,
        P.TRACK_PROPERTY_FILTER,
    }
)
_PROPERTY_FILTERS: Final = frozenset({P.OBJECT_PROPERTY_FILTER, P.TRACK_PROPERTY_FILTER})


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """Values that pass, by one criterion (MOQT, "Range Filters").

    Without ranges it is the wish to remove the filter, unless ``malformed``.
    """

    type: P
    set_id: int = 0
    """0 to 255. Filters with one SetID must all pass; of different SetIDs, one is enough."""

    property_type: int | None = None
    """Which Property's value counts; only for the two property filters, and even."""

    ranges: tuple[Range, ...] = ()
    """In ascending order, not overlapping; only the last may be open."""

    malformed: str | None = None
    """Why the peer's filter could not be read to its end; ``ranges`` is empty then."""

    @classmethod
    def removal(cls, type_: P) -> Self:
        """Return the wish to remove all filters of a type, for REQUEST_UPDATE."""
        return cls(type_)

    @property
    def is_removal(self) -> bool:
        """Whether it removes the filters of its type."""
        return not self.ranges and self.malformed is None

    def defect(self) -> str | None:
        """Say why a request with this filter is to be refused, or None if it is sound."""
        if self.malformed is not None:
            return self.malformed
        if self.property_type is not None and self.property_type % 2:
            return f"{self.type.name} names property {self.property_type:#x}, which is odd"
        if self.type is P.PRIORITY_FILTER and any(
            start > 255 or (end is not None and end > 255) for start, end in self.ranges
        ):
            return "PRIORITY_FILTER with a value above 255"
        return None

    def matches(self, values: Iterable[int]) -> bool:
        """Whether one of the values lies in one of the ranges."""
        return any(
            start <= value and (end is None or value <= end)
            for value in values
            for start, end in self.ranges
        )

    def encode(self, w: Writer) -> None:
        """Put the filter behind its Length.

        Raises:
            UsageError: If it has a defect, or fields and ranges that cannot be put.
        """
        if (defect := self.defect()) is not None:
            raise UsageError(defect)
        if (self.type in _PROPERTY_FILTERS) == (self.property_type is None) and self.ranges:
            raise UsageError(f"{self.type.name} with or without a property, against its kind")
        value = Writer()
        if self.ranges:
            value.uint8(self.set_id)
            if self.property_type is not None:
                value.vi64(self.property_type)
            previous = 0
            for at, (start, end) in enumerate(self.ranges):
                if start < previous or (end is None and at + 1 < len(self.ranges)):
                    raise UsageError(f"{self.type.name} with ranges out of order: {self.ranges}")
                value.vi64(start - previous)
                if end is not None:
                    if not start <= end <= MAX_VI64:
                        raise UsageError(f"{self.type.name} with a range {start} to {end}")
                    value.vi64(end - start)
                    previous = end
        w.prefixed(value.getvalue())

    @classmethod
    def decode(cls, type_: P, r: Reader) -> Self:
        """Take a filter and its Length. One that only fails its request decodes.

        Raises:
            ProtocolError: If an integer is cut by the Length.
        """
        value = Reader(r.prefixed())
        if not value.remaining:
            return cls.removal(type_)
        set_id = value.uint8()
        property_type = value.vi64() if type_ in _PROPERTY_FILTERS else None
        ranges: list[Range] = []
        malformed = None if value.remaining else f"{type_.name} without a range"
        previous = 0
        while value.remaining and malformed is None:
            start = previous + value.vi64()
            # An End that is missing leaves the last range open.
            end = start + value.vi64() if value.remaining else None
            previous = start if end is None else end
            if previous > MAX_VI64:
                malformed = f"{type_.name} with a range past 2**64 - 1"
            ranges.append((start, end))
        return cls(type_, set_id, property_type, () if malformed else tuple(ranges), malformed)


@dataclass(frozen=True, slots=True)
class FillParameters:
    """What a subscription asks to be filled with (MOQT, "FILL_PARAMETERS").

    ``parameters`` is a scope of its own: what is stated here overrides the subscription's for
    the fill stream only; what is not is inherited.
    """

    parameters: "Parameters"


def range_filters(parameters: Mapping[P, Any]) -> tuple[RangeFilter, ...]:
    """Return the Range Filters among ``parameters``, of every type, without removals."""
    return tuple([f for f in _all_range_filters(parameters) if not f.is_removal])


def _all_range_filters(parameters: Mapping[P, Any]) -> Iterator[RangeFilter]:
    for type_, filters in parameters.items():
        if type_ in RANGE_FILTERS:
            yield from filters


def filter_defect(parameters: Mapping[P, Any], max_ranges: int) -> str | None:
    """Say why a request must be answered INVALID_FILTER, or None if its filters are sound.

    Looks at the Range Filters of the request and at those of the fill it asks for.

    Args:
        parameters: Of the request, or all that are in force after an update.
        max_ranges: The MAX_FILTER_RANGES this side told the peer. It counts for the request
            and, with what the fill overrides, for the fill.
    """
    defect = _defect(range_filters(parameters), max_ranges)
    fill = parameters.get(P.FILL_PARAMETERS)
    if defect is None and isinstance(fill, FillParameters):
        inner = {key: value for key, value in fill.parameters.items() if key in RANGE_FILTERS}
        defect = _defect(range_filters({**parameters, **inner}), max_ranges)
    return defect


def _defect(filters: tuple[RangeFilter, ...], max_ranges: int) -> str | None:
    seen: set[tuple[P, int, int | None]] = set()
    for f in filters:
        if (defect := f.defect()) is not None:
            return defect
        key = (f.type, f.set_id, f.property_type)
        if key in seen:
            return f"{f.type.name} with SetID {f.set_id} twice"
        seen.add(key)
    total = sum(len(f.ranges) for f in filters)
    return f"{total} filter ranges, limit {max_ranges}" if total > max_ranges else None


def passes(
    filters: Iterable[RangeFilter],
    *,
    subgroup_id: int | None,
    object_id: int,
    priority: int,
    properties: Properties = (),
    track_properties: Properties = (),
) -> bool:
    """Whether an Object passes the Range Filters of a request (MOQT, "Range Filters").

    Args:
        filters: As :func:`range_filters` returns them, of every type together.
        subgroup_id: None for an Object of a datagram, which fails every Subgroup Filter.
        object_id: Its Object ID.
        priority: Its Publisher Priority, the default already applied.
        properties: Object Properties. An Object without the Property fails its filter.
        track_properties: Properties of its Track, for Track Property Filters.
    """
    verdicts: dict[int, bool] = {}
    for f in filters:
        if not verdicts.get(f.set_id, True):
            continue
        values: Iterable[int]
        match f.type:
            case P.SUBGROUP_FILTER:
                values = () if subgroup_id is None else (subgroup_id,)
            case P.OBJECTID_FILTER:
                values = (object_id,)
            case P.PRIORITY_FILTER:
                values = (priority,)
            case P.OBJECT_PROPERTY_FILTER:
                values = _numbers(properties, f.property_type)
            case _:
                values = _numbers(track_properties, f.property_type)
        verdicts[f.set_id] = f.matches(values)
    return not verdicts or any(verdicts.values())


def track_passes(filters: Iterable[RangeFilter], track_properties: Properties) -> bool:
    """Whether a Track can have Objects that pass: its Properties satisfy one SetID, or none ask.

    Args:
        filters: As :func:`range_filters` returns them, of every type together.
        track_properties: Properties of the Track.
    """
    verdicts: dict[int, bool] = {}
    for f in filters:
        passed = f.type is not P.TRACK_PROPERTY_FILTER or f.matches(
            _numbers(track_properties, f.property_type)
        )
        verdicts[f.set_id] = verdicts.get(f.set_id, True) and passed
    return not verdicts or any(verdicts.values())


def for_track(
    filters: Iterable[RangeFilter], track_properties: Properties
) -> tuple[RangeFilter, ...]:
    """Return what is left of ``filters`` once the Track is known to pass :func:`track_passes`.

    Track Property Filters are judged now and for good: a SetID whose ones fail is gone, and one
    that asks for nothing else lets every Object pass.
    """
    sets: dict[int, list[RangeFilter]] = {}
    failed: set[int] = set()
    for f in filters:
        rest = sets.setdefault(f.set_id, [])
        if f.type is not P.TRACK_PROPERTY_FILTER:
            rest.append(f)
        elif not f.matches(_numbers(track_properties, f.property_type)):
            failed.add(f.set_id)
    left = [rest for set_id, rest in sets.items() if set_id not in failed]
    return tuple(f for rest in left for f in rest) if all(left) else ()


def _numbers(properties: Properties, number: int | None) -> list[int]:
    if number is None:
        return []
    return [value for value in property_values(properties, number) if isinstance(value, int)]
