"""The block service, asked by a client that knows nothing of us, and by ours."""

import asyncio
import base64
from hashlib import sha256

import orjson
import pytest

from kvcs.errors import BadObject, NotFound, ServiceFailed, ServiceFault
from kvcs.kvsp.http import frames
from kvcs.kvsp.http.blockclient import Absent, LayerSections
from kvcs.kvsp.http.blockservice import BlockLimits
from kvcs.kvsp.http.holder import MemoryHolder
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.layout import Component, Octets
from kvcs.telemetry import Counter
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import (
    COMPAT,
    FOREIGNER,
    LAYOUT,
    OTHER_SCOPE,
    READER,
    SCOPE,
    authorized,
    container,
    octets,
    on_stage,
    section,
)

pytestmark = pytest.mark.network


def field(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256(content).digest()).decode()}:"


# -- as HTTP has it ------------------------------------------------------------------------------


async def test_a_block_and_its_layers_come_with_digest_and_tag(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        for block in range(3):
            for layer, expected in (
                (None, container(block)),
                *((n, octets(n, block)) for n in range(LAYOUT.layers)),
            ):
                async with browser.get(stage.path(block, layer), headers=authorized()) as response:
                    assert await response.read() == expected
                    assert response.status == 200
                    assert response.headers["Repr-Digest"] == field(expected)
                    assert response.headers["Content-Digest"] == field(expected)
                    assert response.headers["ETag"] == f'"{sha256(expected).hexdigest()}"'
                    assert response.headers["Accept-Ranges"] == "bytes"
                    assert response.headers["Cache-Control"] == "private, no-cache"
                    assert response.content_type == "application/octet-stream"
        assert stage.counters[Counter.HTTP_OCTETS] == 2 * 3 * LAYOUT.container_octets


async def test_head_says_what_get_would_send_and_sends_nothing(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        fields = authorized(Range="bytes=0-1")
        async with browser.head(stage.path(1, 2), headers=fields) as response:
            assert await response.read() == b""
            assert response.status == 200
            assert response.content_length == LAYOUT.layer_octets
            assert response.headers["Repr-Digest"] == field(octets(2, 1))
            assert "Content-Digest" not in response.headers
        async with browser.head(stage.path(1, 99), headers=authorized()) as response:
            assert (response.status, await response.read()) == (404, b"")


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-9", 0, 10),
        (f"bytes={LAYOUT.layer_octets - 5}-{LAYOUT.layer_octets + 4}",
         LAYOUT.layer_octets - 5, LAYOUT.layer_octets + 5),
        ("bytes=-7", LAYOUT.container_octets - 7, LAYOUT.container_octets),
        ("bytes=3-", 3, LAYOUT.container_octets),
        (f"bytes={LAYOUT.k_octets}-{LAYOUT.layer_octets - 1}",
         LAYOUT.k_octets, LAYOUT.layer_octets),
    ],
)  # fmt: skip
async def test_a_range_comes_with_its_own_digest_and_that_of_the_whole(
    certificates: CertificateFiles, asked: str, start: int, stop: int
) -> None:
    async with (
        on_stage(certificates) as stage,
        stage.browser() as browser,
        browser.get(stage.path(), headers=authorized(Range=asked)) as response,
    ):
        expected = container(0)[start:stop]

        assert await response.read() == expected
        assert response.status == 206
        whole = LAYOUT.container_octets
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{whole}"
        assert response.headers["Content-Digest"] == field(expected)
        assert response.headers["Repr-Digest"] == field(container(0))


@pytest.mark.parametrize("asked", ["bytes=99999-", "bytes=0-1,3-4", "bytes=x", "bytes=5-3"])
async def test_a_bad_range_is_refused_with_the_length(
    certificates: CertificateFiles, asked: str
) -> None:
    async with (
        on_stage(certificates) as stage,
        stage.browser() as browser,
        browser.get(stage.path(0, 1), headers=authorized(Range=asked)) as response,
    ):
        problem = await response.json(content_type="application/problem+json")

        assert (response.status, problem["type"]) == (416, "/kvsp/1/problems/bad-range")
        assert response.headers["Content-Range"] == f"bytes */{LAYOUT.layer_octets}"


async def test_what_has_not_changed_is_not_sent_again(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        tag, other = f'"{sha256(octets(1, 0)).hexdigest()}"', '"other"'
        for fields, status in (
            ({"If-None-Match": tag}, 304),
            ({"If-None-Match": f"{other}, W/{tag}"}, 304),
            ({"If-None-Match": other}, 200),
            ({"If-Match": tag}, 200),
            ({"If-Match": other}, 412),
            ({"If-Range": tag, "Range": "bytes=0-0"}, 206),
            ({"If-Range": other, "Range": "bytes=0-0"}, 200),
        ):
            async with browser.get(stage.path(0, 1), headers=authorized() | fields) as response:
                content = await response.read()
                assert response.status == status, fields
                assert response.headers["ETag"] == tag
                assert bool(content) == (status != 304)


# -- refusals ------------------------------------------------------------------------------------


async def test_a_refusal_says_nothing_about_what_exists(certificates: CertificateFiles) -> None:
    """The same octets for an unknown scope, model, block and layer, and for a token of others."""
    async with on_stage(certificates) as stage, stage.browser() as browser:
        scope, compat, key = SCOPE.scope_id.hex(), COMPAT.hex(), stage.names[0].block_key.hex()
        unknown = "ab" * 32
        refused = [
            (READER, f"/kvsp/1/{unknown}/{compat}/blocks/{key}"),
            (READER, f"/kvsp/1/{OTHER_SCOPE.scope_id.hex()}/{compat}/blocks/{key}"),
            (READER, f"/kvsp/1/{scope}/{unknown}/blocks/{key}"),
            (READER, f"/kvsp/1/{scope}/{compat}/blocks/{unknown}"),
            (READER, f"/kvsp/1/{scope}/{compat}/blocks/{key}/layers/3"),
            (READER, f"/kvsp/1/{scope}/{compat}/blocks/{key}/layers/99999"),
            (READER, f"/kvsp/1/{scope}/{compat}/blocks/{key}?publication={'00' * 16}"),
            (READER, f"/kvsp/1/{scope}/{compat}/blocks/{key.upper()}"),
            (READER, f"/kvsp/1/{scope}/{compat}/elsewhere"),
            (READER, "/"),
            (FOREIGNER, f"/kvsp/1/{scope}/{compat}/blocks/{key}"),
            (FOREIGNER, f"/kvsp/1/{scope}/{compat}/blocks/{unknown}"),
        ]
        answers = set()
        for token, path in refused:
            async with browser.get(path, headers=authorized(token, Range="bytes=9-3")) as response:
                fields = {n: v for n, v in response.headers.items() if n not in ("Date",)}
                answers.add((response.status, await response.read(), tuple(sorted(fields.items()))))

        [(status, content, _)] = answers
        assert status == 404
        assert orjson.loads(content) == {
            "type": "/kvsp/1/problems/not-found",
            "title": "Nothing here that the token is good for",
            "status": 404,
        }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"Authorization": f"Bearer {'x' * 40}"},
        {"Authorization": f"Basic {READER}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {READER}x"},
    ],
)
@pytest.mark.parametrize("path", ["known", "/kvsp/1/unknown", "/"])
async def test_who_is_nobody_is_told_so_whatever_the_path(
    certificates: CertificateFiles, fields: dict[str, str], path: str
) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        where = stage.path() if path == "known" else path
        async with browser.get(where, headers=fields) as response:
            problem = await response.json(content_type="application/problem+json")

            assert (response.status, problem["type"]) == (401, "/kvsp/1/problems/unauthorized")
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert READER not in await response.text()


async def test_another_method_is_refused_with_those_there_are(
    certificates: CertificateFiles,
) -> None:
    async with (
        on_stage(certificates) as stage,
        stage.browser() as browser,
        browser.put(stage.path(), headers=authorized(), data=b"") as response,
    ):
        problem = await response.json(content_type="application/problem+json")

        assert response.status == 405
        assert problem["type"] == "/kvsp/1/problems/method-not-allowed"
        assert set(response.headers["Allow"].split(",")) == {"GET", "HEAD"}


@pytest.mark.parametrize("query", ["publication=xyz", "more=1", "publication=a&publication=b"])
async def test_a_query_that_nobody_knows_is_refused(
    certificates: CertificateFiles, query: str
) -> None:
    async with (
        on_stage(certificates) as stage,
        stage.browser() as browser,
        browser.get(f"{stage.path()}?{query}", headers=authorized()) as response,
    ):
        assert response.status == 400


@pytest.mark.parametrize(
    ("body", "fields", "status"),
    [
        (b"{}", {}, 400),
        (b"[", {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b" " * (65 << 10), {}, 413),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    certificates: CertificateFiles, body: bytes, fields: dict[str, str], status: int
) -> None:
    limits = BlockLimits(max_body_octets=64 << 10)
    async with on_stage(certificates, limits=limits) as stage, stage.browser() as browser:
        sent = authorized() | {"Content-Type": "application/json"} | fields
        async with browser.post(f"{stage.model}/blocks", headers=sent, data=body) as response:
            assert response.status == status
            assert response.content_type == "application/problem+json"


# -- with our client -----------------------------------------------------------------------------


async def test_our_client_gets_layers_sections_and_containers(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.blocks() as client:
        name = stage.names[1]
        layer = await client.layer(name, 2, LAYOUT, digest=sha256(octets(2, 1)).digest())
        k = await client.section(name, 2, Component.K, LAYOUT)
        v = await client.section(name, 2, Component.V, LAYOUT)
        whole = await client.container(name, LAYOUT)

    assert bytes(layer.k) == bytes(k) == section(2, 1, Component.K)
    assert bytes(layer.v) == bytes(v) == section(2, 1, Component.V)
    assert layer.digest == sha256(octets(2, 1)).digest()
    assert [bytes(one.k) + bytes(one.v) for one in whole] == [octets(n, 1) for n in range(3)]
    assert whole[2] == layer


async def test_many_blocks_come_in_one_answer_layer_by_layer(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.blocks() as client:
        keys = [stage.names[2].block_key, b"?" * 32, stage.names[0].block_key]
        found = [
            one
            async for one in client.sections(
                SCOPE.scope_id, COMPAT, keys, Runs(((0, 0), (2, 3))), LAYOUT
            )
        ]

    assert [(one.layer, keys.index(one.block_key)) for one in found] == [
        (layer, block) for layer in (0, 2, 3) for block in range(3)
    ]
    for one in found:
        if isinstance(one, LayerSections):
            block = 2 if one.block_key == keys[0] else 0
            assert bytes(one.k) + bytes(one.v) == octets(one.layer, block)
    # The key that nobody knows, and the layer that the model does not have.
    absent = {(one.layer, one.block_key) for one in found if isinstance(one, Absent)}
    assert absent == {(0, b"?" * 32), (2, b"?" * 32), *((3, key) for key in keys)}


async def test_whatever_is_missing_comes_in_few_requests(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.blocks() as client:
        keys = [name.block_key for name in stage.names]
        wanted = [(keys[2], 1), (keys[0], 0), (keys[1], 1), (keys[0], 2), (b"?" * 32, 2)]
        found = [one async for one in client.wanted(SCOPE.scope_id, COMPAT, wanted, LAYOUT)]
        assert stage.counters[Counter.HTTP_REQUESTS] == 3
        with pytest.raises(NotFound, match="nothing of what is wanted"):
            await anext(client.wanted(SCOPE.scope_id, COMPAT, [(b"?" * 32, 2)], LAYOUT))

    assert [(keys.index(one.block_key), one.layer) for one in found] == [
        (0, 0), (2, 1), (1, 1), (0, 2),
    ]  # fmt: skip
    for one in found:
        block = keys.index(one.block_key)
        assert isinstance(one, LayerSections)
        assert bytes(one.k) + bytes(one.v) == octets(one.layer, block)


async def test_who_may_not_ask_gets_what_who_asks_for_nothing_known_gets(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage:
        answers = []
        for token, keys in ((FOREIGNER, [stage.names[0].block_key]), (READER, [b"?" * 32])):
            async with stage.blocks(token) as client:
                asked = client.sections(SCOPE.scope_id, COMPAT, keys, Runs(((0, 1),)), LAYOUT)
                answers.append([type(one) async for one in asked])

    assert answers == [[Absent, Absent]] * 2


async def test_more_than_one_answer_may_have_is_refused(certificates: CertificateFiles) -> None:
    limits = BlockLimits(max_sections=5)
    async with on_stage(certificates, limits=limits) as stage, stage.blocks() as client:
        keys = [name.block_key for name in stage.names]
        asked = client.sections(SCOPE.scope_id, COMPAT, keys, Runs(((0, 1),)), LAYOUT)
        with pytest.raises(ServiceFailed, match="3 blocks of 2 layers, limit 5") as refused:
            await anext(asked)

    assert refused.value.fault is ServiceFault.REFUSED


async def test_what_is_unknown_or_not_for_us_is_not_found(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage:
        unknown = BlockName(SCOPE.scope_id, COMPAT, b"?" * 32)
        async with stage.blocks() as client:
            with pytest.raises(NotFound):
                await client.layer(unknown, 0, LAYOUT)
            with pytest.raises(NotFound):
                await client.layer(stage.names[0], 7, LAYOUT)
        async with stage.blocks(FOREIGNER) as client:
            with pytest.raises(NotFound):
                await client.container(stage.names[0], LAYOUT)
        async with stage.blocks(None) as client:
            with pytest.raises(ServiceFailed, match="401, unauthorized") as refused:
                await client.layer(stage.names[0], 0, LAYOUT)

    assert refused.value.fault is ServiceFault.UNAUTHORIZED


async def test_what_is_not_what_was_expected_is_not_handed_out(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, stage.blocks() as client:
        with pytest.raises(BadObject, match="the digest that was expected is 0000"):
            await client.layer(stage.names[0], 0, LAYOUT, digest=bytes(32))


class Lying(MemoryHolder):
    """Has one octet change after its digest was computed."""

    async def find(self, name: BlockName, publication: bytes | None) -> "_Changing | None":
        held = await super().find(name, publication)
        return None if held is None else _Changing(held)


class _Changing:
    identity = None
    layout = LAYOUT

    def __init__(self, held: object) -> None:
        self._held = held
        self._reads = 0

    def has(self, layer: int) -> bool:
        return layer < LAYOUT.layers

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        self._reads += 1
        k = bytearray(section(layer, 0, Component.K))
        k[5] ^= self._reads > 1
        return bytes(k), section(layer, 0, Component.V)


async def test_octets_that_do_not_have_their_digest_are_refused(
    certificates: CertificateFiles,
) -> None:
    holder = Lying()
    async with on_stage(certificates, holder=holder) as stage, stage.blocks() as client:
        name = stage.names[0]
        for layer in range(LAYOUT.layers):
            holder.add(name, LAYOUT, layer, bytes(LAYOUT.k_octets), bytes(LAYOUT.v_octets))

        with pytest.raises(BadObject, match=r"digest is [0-9a-f]{64}, Repr-Digest is"):
            await client.layer(name, 1, LAYOUT)


class Vanishing(MemoryHolder):
    """Lets go of every layer but the first once a block was looked at."""

    async def find(self, name: BlockName, publication: bytes | None) -> "_Vanishing":
        return _Vanishing()


class _Vanishing:
    identity = None
    layout = LAYOUT

    def __init__(self) -> None:
        self._left = LAYOUT.layers + 1

    def has(self, layer: int) -> bool:
        return layer < LAYOUT.layers

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        self._left -= 1
        if self._left < 0:
            return None
        return section(layer, 0, Component.K), section(layer, 0, Component.V)


async def test_an_answer_whose_octets_are_gone_is_cut_off(certificates: CertificateFiles) -> None:
    """The digest of all of it was said; of what was to follow only the first layer is left."""
    async with on_stage(certificates, holder=Vanishing()) as stage, stage.blocks() as client:
        with pytest.raises(ServiceFailed) as failed:
            await client.container(stage.names[0], LAYOUT)

    assert failed.value.fault is ServiceFault.UNREACHABLE


async def test_a_block_of_a_publication_can_be_asked_for(certificates: CertificateFiles) -> None:
    holder, publications = MemoryHolder(), (b"p" * 16, b"q" * 16)
    async with on_stage(certificates, holder=holder) as stage, stage.blocks() as client:
        name = stage.names[0]
        for number, publication in enumerate(publications):
            k = bytes([number]) * LAYOUT.k_octets
            for layer in range(number + 1):
                holder.add(name, LAYOUT, layer, k, bytes(LAYOUT.v_octets), publication=publication)

        found = [
            bytes((await client.layer(name, 0, LAYOUT, publication=one)).k)[0]
            for one in (*publications, None)
        ]
        with pytest.raises(NotFound):
            await client.layer(name, 1, LAYOUT, publication=publications[0])
        with pytest.raises(NotFound):  # not all of its layers are there
            await client.container(name, LAYOUT)

    assert found == [0, 1, 1]  # without a wish, the one that has most


async def test_the_frames_are_what_the_papers_say(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.browser() as browser:
        body = {"keys": [stage.names[0].block_key.hex()], "layers": [[1, 1], [9, 9]]}
        async with browser.post(
            f"{stage.model}/blocks", headers=authorized(), json=body
        ) as response:
            content = await response.read()

            assert response.content_type == frames.CONTENT_TYPE
    expected, digest = octets(1, 0), sha256(octets(1, 0)).digest()
    first = b"KVF1\x01\0\0\x01\0\0\0\0" + len(expected).to_bytes(4, "big") + digest + expected
    absent = b"KVF1\x02\0\0\x09" + bytes(40)
    end = b"KVF1\x03\0\0\0\0\0\0\x02" + bytes(36)
    assert content == first + absent + end


async def test_many_clients_at_once_each_get_their_own(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.blocks(max_connections=4) as client:

        async def one(block: int, layer: int) -> bool:
            got = await client.layer(stage.names[block], layer, LAYOUT)
            return bytes(got.k) + bytes(got.v) == octets(layer, block)

        right = await asyncio.gather(*(one(n % 3, n // 3 % 3) for n in range(60)))

    assert right == [True] * 60
