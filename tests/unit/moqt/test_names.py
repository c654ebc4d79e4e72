import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import UsageError
from moqt.names import MAX_FIELDS, MAX_NAME_OCTETS, FullTrackName, TrackNamespace

FIELDS = st.lists(st.binary(min_size=1, max_size=40), max_size=MAX_FIELDS).map(tuple)
NAMESPACES = FIELDS.map(TrackNamespace)
NAMES = st.builds(FullTrackName, NAMESPACES, st.binary(max_size=60))


def test_every_limit_is_legal_and_one_more_is_not() -> None:
    most = TrackNamespace((b"a",) * MAX_FIELDS)
    longest = TrackNamespace((b"n" * (MAX_NAME_OCTETS - 1), b"n"))

    assert len(most.fields) == 32
    assert longest.octets == 4096
    assert FullTrackName(longest, b"").name == b""
    with pytest.raises(UsageError, match="33 fields"):
        TrackNamespace((b"a",) * (MAX_FIELDS + 1))
    with pytest.raises(UsageError, match="4097 octets"):
        TrackNamespace((b"n" * MAX_NAME_OCTETS, b"n"))
    with pytest.raises(UsageError, match="empty field"):
        TrackNamespace((b"a", b""))
    with pytest.raises(UsageError, match="4097 octets"):
        FullTrackName(longest, b"x")


def test_no_fields_and_no_name_are_a_name() -> None:
    nothing = FullTrackName(TrackNamespace(), b"")

    assert str(nothing) == "--"
    assert FullTrackName.parse("--") == nothing


def test_text_stands_for_its_utf8_octets() -> None:
    assert TrackNamespace.of("kv", b"\xff").fields == (b"kv", b"\xff")
    assert FullTrackName.of("kv", "é") == FullTrackName(TrackNamespace((b"kv",)), b"\xc3\xa9")


def test_a_prefix_matches_whole_fields_only() -> None:
    kv = TrackNamespace.of("kv")

    assert kv.is_prefix_of(kv)
    assert kv.is_prefix_of(TrackNamespace.of("kv", "acme"))
    assert not kv.is_prefix_of(TrackNamespace.of("kvx"))
    assert not TrackNamespace.of("kv", "acme").is_prefix_of(kv)
    assert TrackNamespace().is_prefix_of(kv)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=16), st.integers(0, 16))
def test_prefix_and_suffix_are_the_whole(fields: list[bytes], at: int) -> None:
    whole, prefix = TrackNamespace(tuple(fields)), TrackNamespace(tuple(fields[:at]))

    assert prefix.is_prefix_of(whole)
    assert prefix + whole.suffix(prefix) == whole


def test_there_is_no_suffix_without_the_prefix() -> None:
    with pytest.raises(UsageError, match="does not begin with"):
        TrackNamespace.of("kvx").suffix(TrackNamespace.of("kv"))


def test_a_sum_beyond_the_limits_is_refused() -> None:
    half = TrackNamespace((b"a",) * 17)

    with pytest.raises(UsageError, match="34 fields"):
        half + half


@pytest.mark.parametrize(
    ("first", "reserved", "local"),
    [
        (b".", True, True),
        (b".session", True, True),
        (b".sessions", True, False),
        (b".x", True, False),
        (b"session", False, False),
        (b"a.", False, False),
    ],
)
def test_a_first_field_with_a_dot_is_reserved(first: bytes, reserved: bool, local: bool) -> None:
    namespace = TrackNamespace((first, b".session"))

    assert (namespace.is_reserved, namespace.is_local) == (reserved, local)
    assert not TrackNamespace().is_reserved
    assert not TrackNamespace().is_local


def test_prints_the_form_the_draft_recommends() -> None:
    track = FullTrackName.of("example.net", "team2", "report")

    assert str(track) == "example.2enet-team2--report"
    assert str(FullTrackName.of(b"\x00/", b"-")) == ".00.2f--.2d"


@given(NAMES)
def test_the_printed_form_reads_back(track: FullTrackName) -> None:
    assert FullTrackName.parse(str(track)) == track
    assert TrackNamespace.parse(str(track.namespace)) == track.namespace


@pytest.mark.parametrize(
    "text",
    [
        "a-b",
        "",
        "a--.61",
        "a--.2E",
        "a--.2",
        "a--.",
        "a--b-c",
        "a--b--c",
        "-a--b",
        "a/b--c",
        "é--a",
    ],
)
def test_what_printing_never_makes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        FullTrackName.parse(text)


@given(NAMES, NAMES)
def test_names_are_ordered_and_hashed_by_value(a: FullTrackName, b: FullTrackName) -> None:
    copy = FullTrackName(TrackNamespace(a.namespace.fields), a.name)

    assert len({a, copy}) == 1
    assert (a < b) + (b < a) + (a == b) == 1
