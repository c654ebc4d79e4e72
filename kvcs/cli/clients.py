"""Whom commands ask over HTTP: an index, and block services."""

from kvcs.config import ConsumerSettings, IndexedSettings
from kvcs.kvsp.http.blockclient import BlockClient
from kvcs.kvsp.http.client import ClientOptions
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.tokens import read_token
from moqt.aio import ClientTls


def index_client(settings: IndexedSettings, scope_id: bytes) -> IndexClient | None:
    """Return who asks and tells the index; ``None`` if there is none.

    Raises:
        ConfigError: If a file cannot be used; the message names it.
    """
    if settings.index_uri is None:
        return None
    assert settings.index_token_file is not None, "the settings see to that"
    return IndexClient(
        settings.index_uri,
        read_token(settings.index_token_file),
        scope_id,
        tls=_tls(settings),
        options=_options(settings),
    )


def block_clients(settings: ConsumerSettings) -> list[BlockClient]:
    """Return who asks the block services.

    Raises:
        ConfigError: If a file cannot be used; the message names it.
    """
    if not settings.block_services:
        return []
    assert settings.block_token_file is not None, "the settings see to that"
    token = read_token(settings.block_token_file)
    return [
        BlockClient(uri, token, tls=_tls(settings), options=_options(settings))
        for uri in settings.block_services
    ]


def _tls(settings: IndexedSettings) -> ClientTls:
    # The name that a relay's certificate shows, if that is set, is not a service's.
    return ClientTls(
        settings.ca_file,
        not settings.insecure_skip_verify,
        certificate_file=settings.client_certificate_file,
        key_file=settings.client_key_file,
    )


def _options(settings: IndexedSettings) -> ClientOptions:
    return ClientOptions(
        connect_timeout_s=settings.connect_timeout_s, request_timeout_s=settings.request_timeout_s
    )
