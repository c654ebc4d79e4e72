"""What can stand in a setting, and how it is read."""

import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from kvcs.errors import BadName
from kvcs.kvsp.http.uris import ServiceUri

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([kmg]i?|)b?", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:/\s]*)):(?P<port>\d{1,5})")


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object) -> object:
    """Read ``HOST:PORT``; ``[HOST]:PORT`` for IPv6, ``:PORT`` for every address of the machine."""
    if not isinstance(text, str):
        return text
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not int(match["port"]) <= 65_535:
        raise ValueError("expected HOST:PORT with a port of 0 to 65535")
    return Address(match["v6"] or match["host"] or "::", int(match["port"]))


def parse_octets(text: object) -> object:
    """Read a number of octets with an optional unit, such as ``512MiB``."""
    if not isinstance(text, str):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected octets, such as 1048576, 512MiB or 4GB")
    return int(match[1]) * _UNITS[match[2].lower()]


def parse_datagram(value: object) -> object:
    """Read a size of datagrams in octets; ``auto`` is None, which has it found."""
    text = str(value).strip()
    if value is None or text == "auto":
        return None
    if not text.isdecimal() or not 1200 <= int(text) <= 16_000:
        raise ValueError("expected auto, or octets from 1200 to 16000")
    return int(text)


def parse_list(text: object) -> object:
    """Read several values separated by commas, as environment variables have them."""
    if isinstance(text, str):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def parse_uri(value: object) -> object:
    """Read a ``moqt://HOST:PORT/PATH``."""
    if not isinstance(value, str) or not re.fullmatch(r"moqt://[^/\s]+:\d{1,5}(/\S*)?", value):
        raise ValueError(f"expected moqt://HOST:PORT/PATH instead of {value!r:.100}")
    return value


def parse_service(value: object) -> object:
    """Read the ``https://HOST:PORT/PATH`` of a service."""
    try:
        return ServiceUri.parse(value).base if isinstance(value, str) else value
    except BadName as exc:
        raise ValueError(f"expected https://HOST:PORT/PATH: {exc}") from None


def parse_services(value: object) -> object:
    """Read a list of ``https://HOST:PORT/PATH``."""
    found = parse_list(value)
    return tuple(map(parse_service, found)) if isinstance(found, list | tuple) else found


def parse_places(value: object) -> object:
    """Read a list of ``moqt://HOST:PORT/PATH`` and ``https://HOST:PORT/PATH``."""
    found = parse_list(value)
    for uri in found if isinstance(found, list | tuple) else ():
        if isinstance(uri, str) and uri.startswith("https:"):
            parse_service(uri)
        else:
            parse_uri(uri)
    return found


def parse_uris(value: object) -> object:
    """Read a list of ``moqt://HOST:PORT/PATH``."""
    found = parse_list(value)
    for uri in found if isinstance(found, list | tuple) else ():
        parse_uri(uri)
    return found


AddressSetting = Annotated[Address, BeforeValidator(parse_address)]
DatagramSetting = Annotated[int | None, BeforeValidator(parse_datagram)]
OctetsSetting = Annotated[int, BeforeValidator(parse_octets)]
UriSetting = Annotated[str, BeforeValidator(parse_uri)]
ServiceSetting = Annotated[str, BeforeValidator(parse_service)]
ServicesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_services)]
PlacesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_places)]
UrisSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_uris)]
NamesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]
PathsSetting = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(parse_list)]
