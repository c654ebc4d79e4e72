"""Who may use what listens: decided from settings alone, for every command in the same way."""

import ipaddress
from enum import Enum


class Access(Enum):
    """Who is let in where something listens."""

    #: Nothing listens.
    NOBODY = "nobody"
    #: Who is on this machine.
    LOOPBACK = "loopback"
    #: Who has a token, or a client certificate, that allows what is asked for.
    AUTHORIZED = "authorized"
    #: Who has a client certificate. It may do everything.
    CERTIFIED = "certified"
    #: Anybody who reaches the address. It may do everything.
    EVERYBODY = "everybody"


def access(host: str | None, *, asks_tokens: bool, asks_certificates: bool) -> Access:
    """Say who is let in.

    Args:
        host: What is listened on: an address, or a name; None: nothing.
        asks_tokens: Whether there are issuers, so that each request is checked.
        asks_certificates: Whether clients must show a certificate.
    """
    if host is None:
        return Access.NOBODY
    if asks_tokens:
        return Access.AUTHORIZED
    if asks_certificates:
        return Access.CERTIFIED
    return Access.LOOPBACK if is_loopback(host) else Access.EVERYBODY


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, ``localhost`` alone is known."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
