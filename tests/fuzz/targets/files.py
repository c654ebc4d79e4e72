"""Targets of files that a person or another program wrote: settings, keys, tensors, scripts."""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kvcs.config import ConsumerSettings, RelaySettings, settings_from
from kvcs.config.readers import (
    parse_address,
    parse_datagram,
    parse_octets,
    parse_places,
    parse_service,
    parse_uri,
)
from kvcs.errors import BadDescriptor, ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey, trusted_keys
from kvcs.store.source import ModelShape, SafetensorsSource
from kvcs.store.tensorfile import TensorFile, TensorSpec
from kvcs.trust.issuers import public_key_from_file
from kvcs.trust.keyfiles import private_key_from_file
from moqt.aio import ClientTls, ServerTls
from moqt.aio.tls import TlsSettingsError, check_client_tls, check_server_tls, make_certificates
from moqt.certificates import UNREADABLE, ClientRefused, ClientVerifier, names_of
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target
from tests.fuzz.targets.profile import COMPAT, keys
from tests.pki import NOW, SERVER, Ca, dns, uri


class Place:
    """A folder for files that are read by their name, in memory where that can be had."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() else None
        self._made = tempfile.TemporaryDirectory(prefix="kvcs-fuzz-", dir=place)
        self.path = Path(self._made.name)

    def written(self, name: str, octets: bytes) -> Path:
        path = self.path / name
        path.write_bytes(octets)
        path.chmod(0o600)
        return path


@cache
def place() -> Place:
    return Place()


def settings_file(data: bytes) -> None:
    way = data[:1] == b"\x01"
    path = place().written("kvcs.toml", data[1:])
    cls = RelaySettings if way else ConsumerSettings
    settings_from(cls, Namespace(config=str(path)), environ={})


_READERS = (parse_address, parse_datagram, parse_octets, parse_places, parse_service, parse_uri)


def setting(data: bytes) -> None:
    choices = Octets(data)
    read = choices.pick(_READERS)
    read(choices.rest().decode(errors="replace"))


def scope_key(data: bytes) -> None:
    key = ScopeKey.from_file(place().written("scope.key", data))
    assert data.hex() not in repr(key) or not data


def key_file(data: bytes) -> None:
    """A key in PEM, for each of those who read one."""
    path = place().written("producer.pem", data[1:])
    match data[:1]:
        case b"\x01":
            ProducerKey.from_file(path)
        case b"\x02":
            private_key_from_file(path)
        case b"\x03":
            public_key_from_file(path)
        case _:
            trusted_keys([path])


def tls_files(data: bytes) -> None:
    """A certificate and its key, of a listener and of a client."""
    certificate, _, key = data.partition(b"\x00")
    check_server_tls(
        ServerTls(place().written("cert.pem", certificate), place().written("key.pem", key))
    )
    check_client_tls(ClientTls(ca_file=place().written("ca.pem", certificate)))


@cache
def certifier() -> tuple[Ca, ClientVerifier]:
    ca = Ca()
    return ca, ClientVerifier([ca.certificate])


def client_certificate(data: bytes) -> None:
    """What a stranger shows, as far as a TLS library reads it: nobody is believed who is not."""
    names_of(data)
    try:
        found = x509.load_der_x509_certificate(data)
    except UNREADABLE:
        return
    shown = certifier()[1].verify([found], NOW)
    assert shown in set(certificate_seeds()), "believed, and issued by nobody"


@cache
def certificate_seeds() -> tuple[bytes, ...]:
    ca, other = certifier()[0], Ca()
    made = (
        ca.issue(uri("spiffe://site/one")),
        ca.issue(dns("one.example"), until_days=-0.5),
        other.issue(uri("spiffe://site/two")),
        ca.issue(uri("spiffe://site/three"), usage=SERVER),
        ca.issue(),
    )
    return tuple(one.public_bytes(Encoding.DER) for one in made)


def tensor_file(data: bytes) -> None:
    """A tensor file; each of its tensors lies in it and nowhere else."""
    with TensorFile.open(place().written("tensors", data)) as file:
        octets = 0
        for name in file:
            octets += file.tensor(name).nbytes
            assert file.tensor(name).nbytes == file.specs[name].octets <= len(data)


def cache_file(data: bytes) -> None:
    """A recorded cache: the tensors, and beside them what they are of."""
    place().written("cache.safetensors", cache_octets())
    place().written("cache.json", data)
    source = SafetensorsSource(place().path / "cache.safetensors")
    try:
        for layer in source.layers(0, 1):
            assert layer.k.shape
    finally:
        source.close()


def shape(data: bytes) -> None:
    found = ModelShape.parse(data.decode(errors="replace"))
    found.descriptor("m")


@cache
def cache_octets() -> bytes:
    specs = {
        f"{part}.{layer}": TensorSpec("float16", (8, 1, 4)) for part in "kv" for layer in range(2)
    }
    path = place().path / "made"
    path.unlink(missing_ok=True)
    with TensorFile.create(path, specs) as file:
        for name in specs:
            file.tensor(name)[:] = np.float16(1)
    return path.read_bytes()


def settings_seeds() -> Iterable[bytes]:
    relay = b'listen = "127.0.0.1:4443"\ncertificate_file = "a"\nkey_file = "b"\n'
    yield b"\x01" + relay + b'[relay]\ncache_octets = "4GiB"\n[consume]\ndeadline_s = 5\n'
    yield b"\x00" + b'[consume]\nrelay = ["moqt://127.0.0.1:4443/"]\ndeadline_s = 1.5\n'
    yield b"\x00"


def setting_seeds() -> Iterable[bytes]:
    texts = (
        "[::1]:4443",
        "1200",
        "512MiB",
        "moqt://a:1/,https://b:2/x",
        "https://b/",
        "moqt://a:1/",
    )
    for way, text in enumerate(texts):
        yield bytes([way]) + text.encode()


def key_seeds() -> Iterable[bytes]:
    for key in keys():
        yield from (way + key.private_pem() for way in (b"\x01", b"\x02"))
        yield from (way + key.public_pem() for way in (b"\x00", b"\x03"))


def tls_seeds() -> Iterable[bytes]:
    files = make_certificates(place().path)
    yield files.certificate_file.read_bytes() + b"\x00" + files.key_file.read_bytes()


def side_seeds() -> Iterable[bytes]:
    compat = COMPAT.to_json()
    yield b'{"descriptor":' + compat + b',"tokens":[1,2,3,4,5,6,7,8],"ready_at_s":[0.1,0.2]}'
    yield b'{"descriptor":' + compat + b',"tokens":[1,2,3,4,5,6,7,8]}'


def texts(*given: str) -> Callable[[], Iterable[bytes]]:
    return lambda: [text.encode() for text in given]


TARGETS = (
    Target(
        name="settings_file",
        run=settings_file,
        documented=(ConfigError,),
        seeds=settings_seeds,
    ),
    Target(
        name="setting", run=setting, documented=(ValueError,), seeds=setting_seeds, max_octets=512
    ),
    Target(
        name="scope_key_file",
        run=scope_key,
        documented=(ConfigError,),
        seeds=lambda: [bytes(range(32)), bytes(range(32)).hex().encode() + b"\n"],
    ),
    Target(name="key_file", run=key_file, documented=(ConfigError,), seeds=key_seeds),
    Target(
        name="client_certificate",
        run=client_certificate,
        documented=(ClientRefused,),
        seeds=certificate_seeds,
    ),
    Target(
        name="tls_files",
        run=tls_files,
        documented=(TlsSettingsError,),
        seeds=tls_seeds,
        max_octets=4096,
    ),
    Target(
        name="tensor_file",
        run=tensor_file,
        documented=(ConfigError,),
        seeds=lambda: [cache_octets()],
    ),
    Target(name="cache_file", run=cache_file, documented=(ConfigError,), seeds=side_seeds),
    Target(
        name="model_shape",
        run=shape,
        documented=(ConfigError, BadDescriptor),
        seeds=texts("32,8,128,bfloat16", "1,1,1", "llama-3-8b"),
        max_octets=256,
    ),
)
