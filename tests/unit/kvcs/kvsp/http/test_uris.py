"""URIs of publications and of services, and identifiers in paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadName
from kvcs.kvsp.http.names import BlockName, from_hex
from kvcs.kvsp.http.uris import MAX_URI, PublicationUri, ServiceUri, parse_holder
from kvcs.profile.naming import PublicationName
from moqt.aio.client import MoqtUri

NAME = PublicationName(b"s" * 32, b"c" * 32, b"a" * 32, b"p" * 16)
FRAGMENT = f"kvcs-1:{'73' * 32}/{'63' * 32}/{'61' * 32}/{'70' * 16}"

NAMES = st.builds(PublicationName, *(st.binary(min_size=n, max_size=n) for n in (32, 32, 32, 16)))
HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda a: f"[{a}]"),
)
PORTS = st.one_of(st.just(""), st.integers(1, 65_535).map(lambda n: f":{n}"))
PATHS = st.from_regex(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%20-]{0,8}){0,3}", fullmatch=True).filter(
    lambda path: "%" not in path.replace("%20", "")
)
QUERIES = st.one_of(st.just(""), st.just("?a=b&c=/d?"))


@given(HOSTS, PORTS, PATHS, QUERIES, NAMES)
def test_a_publication_and_its_uri_turn_into_each_other(
    host: str, port: str, path: str, query: str, name: PublicationName
) -> None:
    uri = PublicationUri(f"moqt://{host}{port}{path}{query}", name)

    assert PublicationUri.parse(str(uri)) == uri == parse_holder(str(uri))


@given(HOSTS, PORTS, PATHS, QUERIES)
def test_what_is_before_the_fragment_can_be_dialled(
    host: str, port: str, path: str, query: str
) -> None:
    uri = PublicationUri(f"moqt://{host}{port}{path}{query}", NAME)

    target = MoqtUri.parse(uri.session)
    assert target.port == int(port[1:] or 443)
    assert target.path == path + query


def test_the_fragment_is_field_0_and_the_others_in_hex() -> None:
    assert str(PublicationUri("moqt://relay:4443/", NAME)) == f"moqt://relay:4443/#{FRAGMENT}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("moqt://relay:4443/", "fragment '', expected #kvcs-1:"),
        (f"moqt://relay:4443/#{FRAGMENT[7:]}", "expected #kvcs-1:"),
        (f"moqt://relay/#{FRAGMENT}".replace("kvcs-1", "kvcs-2"), "expected #kvcs-1:"),
        (f"moqt://relay/#{FRAGMENT}/00", "namespace of 6 fields, expected 5"),
        (f"moqt://relay/#{FRAGMENT[:-33]}", "namespace of 4 fields, expected 5"),
        (f"moqt://relay/#{FRAGMENT[:-2]}", "Publication ID of 30 characters, expected 32"),
        (f"moqt://relay/#{FRAGMENT.replace('73', '7A')}", "Scope ID of 64 characters"),
        (f"moqt://#{FRAGMENT}", "authority ''"),
        (f"moqt://user@relay/#{FRAGMENT}", "authority 'user@relay'"),
        (f"moqt://relay:0/#{FRAGMENT}", "port 0, expected 1 to 65535"),
        (f"moqt://relay:65536/#{FRAGMENT}", "port 65536"),
        (f"moqt://[::g]/#{FRAGMENT}", "authority"),
        (f"moqt://[1::2::3]/#{FRAGMENT}", "expected IPv6"),
        (f"moqt://relay/a b#{FRAGMENT}", "path that RFC 3986"),
        (f"moqt://relay/%zz#{FRAGMENT}", "path that RFC 3986"),
        (f"moqt://relay/?\n#{FRAGMENT}", "query"),
        (f"moqt://relay/{'a' * MAX_URI}#{FRAGMENT}", "limit 2048"),
        ("https://host/?query", "query"),
        ("https://host/#fragment", "path that RFC 3986"),
        ("https://", "begins with 'https:', expected https://"),
        ("http://host/", "begins with 'http', expected moqt:// or https://"),
        ("", "begins with ''"),
        (None, "is no text"),
        (7, "is no text"),
    ],
)
def test_any_other_uri_is_refused_and_says_why(text: object, says: str) -> None:
    with pytest.raises(BadName, match=says.replace("?", r"\?")):
        parse_holder(text)


@given(st.one_of(st.text(), st.text(max_size=40).map(lambda t: "moqt://" + t + "#" + FRAGMENT)))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        uri = parse_holder(text)
    except BadName:
        return
    assert parse_holder(str(uri)) == uri


def test_slashes_at_the_end_of_a_service_make_no_difference() -> None:
    assert ServiceUri.parse("https://host:8443/blocks//") == ServiceUri("https://host:8443/blocks")
    assert ServiceUri.parse("https://host/") == ServiceUri("https://host")
    with pytest.raises(BadName, match="slash at its end"):
        ServiceUri("https://host/")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("https://host", "host", 443), ("https://[::1]:8443/x", "::1", 8443)],
)
def test_a_service_has_host_and_port(text: str, host: str, port: int) -> None:
    uri = ServiceUri.parse(text)

    assert (uri.host, uri.port) == (host, port)


# -- identifiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["00" * 31, "00" * 33, "0g" * 32, "AA" * 32, "\u0660" * 64, " " * 64, "", None, 7, b"00" * 32],
)
def test_only_lower_case_hex_of_the_right_length_is_an_identifier(text: object) -> None:
    with pytest.raises(BadName, match="expected 64 digits of lower-case hex"):
        from_hex("Block Key", text, 32)


@given(st.binary(min_size=32, max_size=32))
def test_identifiers_are_read_as_they_are_written(octets: bytes) -> None:
    assert from_hex("Block Key", octets.hex(), 32) == octets


def test_a_block_is_logged_with_eight_digits_of_each_identifier() -> None:
    name = BlockName.parse("73" * 32, "63" * 32, "6b" * 32)

    assert str(name) == "73737373/63636363/6b6b6b6b"
    with pytest.raises(BadName, match="Block Key of 3 octets, expected 32"):
        BlockName(b"s" * 32, b"c" * 32, b"key")
