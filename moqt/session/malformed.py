"""When a Track breaks its own rules (MOQT, "Malformed Tracks").

What can be noticed without keeping Objects: a priority that changes inside a Subgroup, an Object
past the end of its Group or of its Track, ends that contradict each other. Two payloads, or two
Delivery Modes, for one Object are noticed by whoever keeps Objects.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from moqt.codepoints import ObjectStatus
from moqt.location import Location

#: At hand, since it is asked for with each Object: members of an Enum are looked up slowly.
_NORMAL = ObjectStatus.NORMAL


@dataclass(slots=True)
class _Group:
    end: int | None = None
    """Nothing exists at this Object ID or above."""

    largest: int = -1
    priorities: dict[int, int] = field(default_factory=dict)


class TrackShape:
    """What a subscriber knows of the shape of a Track; bounded.

    Args:
        limit: Groups remembered. The least recently touched is forgotten, and then nothing
            is wrong with it any more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._touched: tuple[int, _Group] = -1, _Group()  # the one touched last
        self._end: Location | None = None

    def object_received(
        self,
        location: Location,
        *,
        subgroup_id: int | None,
        priority: int,
        status: ObjectStatus,
    ) -> str | None:
        """Note an Object; return why it makes the Track malformed, or None."""
        group = self._group(location.group)
        is_end_marker = status is not _NORMAL
        past_track = self._end is not None and location >= self._end
        if past_track and not (is_end_marker and location == self._end):
            return f"Object {location} past the End of Track at {self._end}"
        past_end = group.end is not None and location.object >= group.end
        if past_end and not (is_end_marker and location.object == group.end):
            return f"Object {location} past the end of its Group at Object {group.end}"
        if subgroup_id is not None and not is_end_marker:
            known = group.priorities.setdefault(subgroup_id, priority)
            if known != priority:
                return (
                    f"Object {location} has priority {priority}, Subgroup {subgroup_id} had {known}"
                )
        if not is_end_marker:
            group.largest = max(group.largest, location.object)
            return None
        if status is ObjectStatus.END_OF_TRACK:
            return self.track_ends_at(location)
        return self.group_ends_at(location)

    def group_ends_at(self, location: Location) -> str | None:
        """Note that nothing exists in the Group from ``location`` on."""
        group = self._group(location.group)
        if group.largest >= location.object:
            return f"Group ends at {location} below its Object {group.largest}"
        if group.end is not None and group.end != location.object:
            return f"Group {location.group} ends at {location.object} and at {group.end}"
        group.end = location.object
        return None

    def track_ends_at(self, location: Location) -> str | None:
        """Note that nothing exists in the Track from ``location`` on."""
        if self._end is not None and self._end != location:
            return f"Track ends at {location} and at {self._end}"
        last = max(
            (Location(g, state.largest) for g, state in self._groups.items() if state.largest >= 0),
            default=None,
        )
        if last is not None and last >= location:
            return f"Track ends at {location} below its Object {last}"
        self._end = location
        return None

    def _group(self, group_id: int) -> _Group:
        if group_id == self._touched[0]:
            return self._touched[1]
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
            if len(self._groups) > self._limit:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group_id)
        self._touched = group_id, group
        return group
