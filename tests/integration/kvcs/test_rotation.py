"""Two scopes at once, and producers whose keys come and go: rotation without a gap."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvcs.cli.retrieving import Prompt, expectations, retrieve, wished
from kvcs.config import ConsumerSettings
from kvcs.consumer.events import Event, LayerReady, PublicationComplete
from kvcs.errors import BadManifest, NotFound
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.profile.signing import ProducerKey
from kvcs.trust.producers import KnownProducer
from kvcs.trust.scope import Protection, Scope
from kvcs.trust.scopefile import add_producer, new_scope
from moqt.aio import ServerTls
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import (
    COMPAT,
    EVERYTHING,
    LAYERS,
    TOKENS,
    CountingSink,
    assert_same_cache,
    filled,
)

pytestmark = pytest.mark.network


class Site:
    """One host with scope files: what is published in which, and what a consumer finds."""

    def __init__(self, folder: Path, certificates: CertificateFiles) -> None:
        self.certificates = certificates
        self.current, self.previous = folder / "current.toml", folder / "previous.toml"
        self.scopes = {
            self.current: new_scope(self.current, Protection()),
            self.previous: new_scope(self.previous, None),
        }
        self.events: list[Event] = []

    async def publish(self, scope: Scope, *, signed_by: ProducerKey | None = None) -> Producer:
        producer = Producer(scope, ProducerOptions(drain_s=0.0), producer_key=signed_by)
        await producer.__aenter__()
        files = self.certificates
        self.address = await producer.listen(
            "127.0.0.1", 0, tls=ServerTls(files.certificate_file, files.key_file)
        )
        await filled(producer.open(COMPAT, TOKENS))
        return producer

    async def retrieve(self, *files: Path, discovery_s: float = 5.0) -> CountingSink:
        settings = ConsumerSettings(
            connect=(f"moqt://127.0.0.1:{self.address[1]}/",),
            ca_file=self.certificates.ca_file,
            scope_file=files,
            discovery_timeout_s=discovery_s,
            deadline_s=15,
        )
        prompt = Prompt(COMPAT, np.array(TOKENS, np.uint32))
        self.events, sink = [], CountingSink()
        await retrieve(
            expectations(settings, prompt),
            settings,
            sink,
            wished(settings, layers=None),
            lambda event, _: self.events.append(event),
        )
        return sink


@pytest.fixture
def site(tmp_path: Path, certificates: CertificateFiles) -> Site:
    return Site(tmp_path, certificates)


@pytest.mark.parametrize("where", ["current", "previous"])
async def test_a_consumer_finds_what_is_published_in_either_scope(site: Site, where: str) -> None:
    published_in = getattr(site, where)
    producer = await site.publish(site.scopes[published_in])
    try:
        sink = await site.retrieve(site.current, site.previous)
    finally:
        await producer.__aexit__(None, None, None)

    assert_same_cache(sink)
    assert sink.placed == EVERYTHING
    kinds = [type(event) for event in site.events]
    assert kinds.count(LayerReady) == LAYERS
    assert kinds[-1] is PublicationComplete
    assert "Failed" not in {kind.__name__ for kind in kinds}


async def test_what_is_in_neither_is_told_once_in_time(site: Site) -> None:
    producer = await site.publish(Scope(ScopeKey.generate()))
    began = time.monotonic()
    try:
        with pytest.raises(NotFound):
            await site.retrieve(site.current, site.previous, discovery_s=0.7)
    finally:
        await producer.__aexit__(None, None, None)

    assert time.monotonic() - began < 10
    assert [type(event).__name__ for event in site.events].count("Failed") == 1


async def test_a_producer_whose_key_is_listed_is_believed_until_its_date(site: Site) -> None:
    old, new = ProducerKey.generate(), ProducerKey.generate()
    add_producer(site.current, KnownProducer(old.public_key, not_after=1.0))
    add_producer(site.current, KnownProducer(new.public_key, not_before=2.0))
    for key, is_believed in ((new, True), (old, False), (None, False)):
        producer = await site.publish(site.scopes[site.current], signed_by=key)
        try:
            if is_believed:
                assert_same_cache(await site.retrieve(site.current))
            else:
                with pytest.raises((BadManifest, NotFound)):
                    await site.retrieve(site.current, discovery_s=0.5)
        finally:
            await producer.__aexit__(None, None, None)
