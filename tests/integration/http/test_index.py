"""The Index Service over TLS: who holds which blocks, told, kept and forgotten."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvcs.errors import NotFound, ServiceFailed, ServiceFault
from kvcs.kvsp.http.directory import Directory, DirectoryLimits
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.questions import Chain
from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import (
    COMPAT,
    FOREIGNER,
    LAYOUT,
    OTHER_SCOPE,
    READER,
    SCOPE,
    SOURCE,
    WRITER,
    authorized,
    octets,
    on_stage,
)

pytestmark = pytest.mark.network

KEYS = SCOPE.block_keys(COMPAT, range(40), block_tokens=4)
ID = b"h" * 16
PAPERS = Path(__file__).parents[3] / "docs" / "kvsp-http.md"


def publication(blocks: int, number: int = 0) -> Holding:
    """A publication of the first blocks, at a relay."""
    name = PublicationName(SCOPE.scope_id, COMPAT, KEYS[blocks - 1], bytes([number]) * 16)
    uri = PublicationUri("moqt://relay.example:4443/", name)
    return Holding(uri, tuple(KEYS[:blocks]), Runs(((0, 31),)), encodings=("raw", "kv.raw"))


def service(blocks: int) -> Holding:
    uri = ServiceUri("https://host.example:8443/cache")
    return Holding(
        uri, tuple(KEYS[:blocks]), Runs(((0, 15), (20, 31))), complete=True,
        publication=b"p" * 16,
    )  # fmt: skip


async def test_what_is_registered_is_found_until_it_is_withdrawn(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.index() as writer:
        assert await writer.register(COMPAT, ID, publication(3), lease_s=30) == 30
        await writer.register(COMPAT, b"i" * 16, service(5), lease_s=60)
        async with stage.index(READER) as reader:
            found = await reader.look_up(COMPAT, [KEYS[0], KEYS[4], b"?" * 32])
            longest = await reader.longest(COMPAT, KEYS[:4])
        await writer.withdraw(COMPAT, b"i" * 16)
        after = await writer.longest(COMPAT, KEYS[:4])
        assert stage.counters[Counter.HOLDERS_REGISTERED] == 2

    assert [[one.uri for one in found.of(n)] for n in range(3)] == [
        [service(5).uri, publication(3).uri], [service(5).uri], [],
    ]  # fmt: skip
    assert [(one.uri, one.covers) for one in longest.candidates] == [
        (service(5).uri, 4), (publication(3).uri, 3),
    ]  # fmt: skip
    [best] = found.of(1)
    assert (best.blocks, best.layers, best.encodings) == (5, service(5).layers, ("raw",))
    assert (best.complete, best.publication) == (True, b"p" * 16)
    assert 50 < best.expires_s <= 60
    assert [one.uri for one in after.candidates] == [publication(3).uri]


async def test_a_publication_longer_than_the_prompt_is_found_in_one_question(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(9), lease_s=60)
        before = stage.counters[Counter.HTTP_REQUESTS]
        longest = await index.longest(COMPAT, KEYS[:6], following=True)
        assert stage.counters[Counter.HTTP_REQUESTS] == before + 1

    [one] = longest.candidates
    assert isinstance(one.uri, PublicationUri)
    assert one.uri.name.anchor_key == KEYS[8]  # which who asked cannot compute
    assert (longest.blocks, one.covers, one.blocks) == (6, 6, 9)
    assert one.following == tuple(KEYS[6:9])


async def test_the_blocks_of_a_publication_are_told_to_who_does_not_know_its_tokens(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(9, 1), lease_s=60)
        await index.register(COMPAT, b"i" * 16, service(5), lease_s=60)
        async with stage.index(READER) as reader, stage.index(FOREIGNER) as stranger:
            found = [await reader.chain(COMPAT, bytes([n]) * 16) for n in (1, 2, *b"p")]
            nothing = await stranger.chain(COMPAT, bytes([1]) * 16)

    assert found == [Chain(0, tuple(KEYS[:9])), None, Chain(0, tuple(KEYS[:5]))]
    assert nothing is None


async def test_a_lease_ends_and_its_holder_is_told_so(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(3), lease_s=30)
        assert await index.renew(COMPAT, ID, lease_s=40) == 40
        assert stage.directory.expire(asyncio.get_running_loop().time() + 39) == 0
        assert stage.directory.expire(asyncio.get_running_loop().time() + 41) == 1

        assert await index.renew(COMPAT, ID, lease_s=40) is None
        assert (await index.longest(COMPAT, KEYS)).candidates == ()


async def test_a_lease_that_ran_out_is_counted(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(3), lease_s=0.1)
        async with asyncio.timeout(10):
            while (await index.longest(COMPAT, KEYS)).candidates:
                pass

        assert stage.counters[Counter.HOLDERS_EXPIRED] == 1


async def test_no_lease_is_longer_than_is_allowed(certificates: CertificateFiles) -> None:
    directory = Directory(DirectoryLimits(max_lease_s=5.0))
    async with on_stage(certificates, directory=directory) as stage, stage.index() as index:
        assert await index.register(COMPAT, ID, publication(3), lease_s=3600) == 5.0


# -- refusals ------------------------------------------------------------------------------------


async def test_who_asks_about_others_gets_what_who_asks_about_nothing_known_gets(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        async with stage.index() as index:
            await index.register(COMPAT, ID, publication(3), lease_s=60)
        body = {"keys": [KEYS[0].hex()]}
        unknown = {"keys": ["ab" * 32]}
        scope, other, compat = SCOPE.scope_id.hex(), OTHER_SCOPE.scope_id.hex(), COMPAT.hex()
        for what in ("look-up", "longest"):
            answers = set()
            for token, asked_scope, asked_compat, asked in (
                (READER, scope, compat, unknown),
                (READER, scope, "ab" * 32, body),
                (READER, other, compat, body),
                (READER, "ab" * 32, compat, body),
                (FOREIGNER, scope, compat, body),
                (FOREIGNER, other, compat, body),
            ):
                path = f"/kvsp/1/{asked_scope}/{asked_compat}/{what}"
                async with browser.post(path, headers=authorized(token), json=asked) as response:
                    fields = {n: v for n, v in response.headers.items() if n != "Date"}
                    answers.add(
                        (response.status, await response.read(), tuple(sorted(fields.items())))
                    )
            assert len(answers) == 1, what


@pytest.mark.parametrize("token", [READER, FOREIGNER])
@pytest.mark.parametrize("scope", [SCOPE.scope_id.hex(), "ab" * 32], ids=["known", "unknown"])
@pytest.mark.parametrize("path", ["", "/lease"])
async def test_who_may_not_write_there_is_told_so_whether_there_is_such_a_scope_or_not(
    certificates: CertificateFiles, token: str, scope: str, path: str
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        where = f"/kvsp/1/{scope}/{COMPAT.hex()}/holders/{ID.hex()}{path}"
        body = {"lease_s": 5} if path else publication(3).json(60)
        async with browser.put(where, headers=authorized(token), json=body) as response:
            content = await response.read()

            assert response.status == 403
    assert orjson.loads(content) == {
        "type": "/kvsp/1/problems/forbidden",
        "title": "The token is not good for writing here",
        "status": 403,
    }


async def test_a_publication_of_another_scope_cannot_be_registered(
    certificates: CertificateFiles,
) -> None:
    name = PublicationName(OTHER_SCOPE.scope_id, COMPAT, KEYS[2], bytes(16))
    foreign = replace(publication(3), uri=PublicationUri("moqt://relay/", name))
    async with on_stage(certificates) as stage, stage.index() as index:
        with pytest.raises(ServiceFailed, match="names another scope or model") as refused:
            await index.register(COMPAT, ID, foreign, lease_s=60)

    assert refused.value.fault is ServiceFault.REFUSED


async def test_nobody_withdraws_what_another_token_has_registered(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(3), lease_s=60)
        async with stage.index(READER) as reader:
            with pytest.raises(ServiceFailed) as refused:
                await reader.withdraw(COMPAT, ID)

        assert refused.value.fault is ServiceFault.UNAUTHORIZED
        assert len((await index.longest(COMPAT, KEYS)).candidates) == 1


async def test_an_index_without_room_says_when_to_come_again(
    certificates: CertificateFiles,
) -> None:
    directory = Directory(DirectoryLimits(max_holders=1))
    async with on_stage(certificates, directory=directory) as stage, stage.index() as index:
        await index.register(COMPAT, ID, publication(3), lease_s=60)
        with pytest.raises(ServiceFailed, match="full: limit of 1 holders") as refused:
            await index.register(COMPAT, b"i" * 16, publication(3), lease_s=60)

    assert refused.value.fault is ServiceFault.BUSY
    assert refused.value.retry_after_s == 10


async def test_a_question_and_a_record_have_their_limits(certificates: CertificateFiles) -> None:
    many = [n.to_bytes(32, "big") for n in range(16_385)]
    async with on_stage(certificates) as stage, stage.index() as index:
        assert len((await index.look_up(COMPAT, many[:16_384])).by_key) == 16_384
        with pytest.raises(ServiceFailed, match="16385 keys, expected 1 to 16384"):
            await index.longest(COMPAT, many)
        with pytest.raises(ServiceFailed, match="0 keys, expected 1"):
            await index.longest(COMPAT, [])
        long = replace(publication(3), keys=tuple(n.to_bytes(32, "big") for n in range(65_536)))
        assert await index.register(COMPAT, ID, long, lease_s=60) == 60


async def test_a_query_is_refused_and_another_path_is_not_found(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        fields, body = authorized(WRITER), {"keys": [KEYS[0].hex()]}
        async with browser.post(
            f"{stage.model}/longest?x=1", headers=fields, json=body
        ) as response:
            assert response.status == 400
        async with browser.delete(f"{stage.model}/holders/xyz", headers=fields) as response:
            assert response.status == 404
        async with browser.delete(f"{stage.model}/holders/{'00' * 16}", headers=fields) as response:
            assert (response.status, await response.read()) == (204, b"")


async def test_an_index_that_serves_no_blocks_has_none(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage:
        prefixed = IndexClient(f"{stage.base}/elsewhere", WRITER, SCOPE.scope_id, tls=stage.tls)
        async with prefixed as client:
            with pytest.raises(NotFound):
                await client.longest(COMPAT, KEYS)


async def test_the_program_in_the_papers_works(certificates: CertificateFiles) -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAPERS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, PAPERS.name, "exec"), names)
    keys = SCOPE.block_keys(SOURCE.descriptor, SOURCE.tokens)
    async with on_stage(certificates) as stage, stage.index() as index:
        elsewhere = ServiceUri("https://no-token-of-ours.example")
        for number, uri in enumerate((elsewhere, ServiceUri(stage.base))):
            holding = Holding(uri, tuple(keys), Runs(((0, 2),)))
            await index.register(COMPAT, bytes([number]) * 16, holding, lease_s=60)
        found = await names["first_layer"](
            SCOPE.scope_id, COMPAT, keys, LAYOUT, stage.base, {stage.base: WRITER}, stage.tls
        )

    assert bytes(found.k) + bytes(found.v) == octets(0, 0)
