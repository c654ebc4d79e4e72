"""The ways to a first layer, with a real model: live, with FETCH, over HTTP, or computed anew.

Producer and consumers have the very cache that the model makes of a prompt, and what each way
brings is compared octet for octet with what the model computes again.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing
from hashlib import sha256
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchcases.case import Case, Options
from benchcases.ends import LIMIT_S, End, Place, Role
from benchcases.environments import model as model_environment
from benchcases.figures import Result, Target, Untold, megabytes
from benchcases.turns import say
from kvcs.consumer.events import Event, LayerReady
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.http.blockclient import BlockClient, LayerSections
from kvcs.kvsp.http.blockservice import BlockService
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.http.service import HttpService
from kvcs.kvsp.http.tokens import TokenFile, parse_lines
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Layout
from kvcs.producer.blocks import PublishedBlocks
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.store.sink import ArraySink
from moqt.aio import ClientTls, ServerTls, connect

#: Tokens of the prompts, whole blocks each.
LENGTHS = (128, 512, 2048)
_BLOCK_TOKENS = 16
#: What the prompts are about, as often as it takes.
_TEXT = (
    "The harbour master keeps a small book in the drawer of his desk. In it he writes down every "
    "boat that leaves before dawn, who is aboard, and what the sky looked like when they cast off. "
)
#: Seconds until the model is there; the first time it is fetched and unpacked.
_LOAD_S = 900.0
WAYS = ("live", "fetch", "http", "recompute")

Layers = list[tuple[NDArray[Any], NDArray[Any]]]


class ModelEnd(Role):
    """A producer that has the model, publishes while it computes, and serves blocks over HTTP."""

    @staticmethod
    def python() -> str:
        return str(model_environment().made() / "python")

    async def start(self, stack: AsyncExitStack) -> None:
        scope, files = ScopeKey(self.place.scope), self.place.certificates
        tls = ServerTls(files.certificate_file, files.key_file)
        # A layer waits for a signed manifest that lists it.
        options = ProducerOptions(manifest_every=1, drain_s=0.2)
        self._producer = await stack.enter_async_context(
            Producer(scope, options, producer_key=self.place.producer_key)
        )
        _, self._port = await self._producer.listen("127.0.0.1", 0, tls=tls)
        line = f"{scope.scope_id.hex()} read {_token(self.place)}"
        service = await stack.enter_async_context(
            HttpService(
                [BlockService(PublishedBlocks(self._producer.answers))],
                TokenFile(parse_lines(line.encode())),
            )
        )
        _, self._http_port = await service.listen("127.0.0.1", 0, tls=tls)
        self._producing: asyncio.Task[None] | None = None
        self._published, self._changed = 0, asyncio.Event()

    async def load(self) -> str | None:
        """Get the model; return why that cannot be, or None."""
        from kvcs.connectors import transformers as adapter

        try:
            folder = await asyncio.to_thread(adapter.download_model, timeout_s=_LOAD_S / 2)
            found = await asyncio.to_thread(adapter.load_model, folder)
        except adapter.ModelUnavailable as exc:
            return str(exc)
        self._tokenizer, self._model = found
        self._adapter = adapter
        about = adapter.descriptor_for(self._model, _BLOCK_TOKENS)
        self._descriptor = Descriptor.from_json(about)
        return None

    async def about(self) -> dict[str, Any]:
        """Return where it serves, and what."""
        import torch

        return {
            "port": self._port,
            "http_port": self._http_port,
            "descriptor": self._descriptor.members(),
            "model": self._adapter.MODEL_NAME,
            "threads": torch.get_num_threads(),
        }

    async def prompt(self, tokens: int, number: int) -> list[int]:
        """Return so many tokens, others for each number."""
        text = f"Day {number}. " + _TEXT * (1 + tokens // 16)
        found: list[int] = list(self._tokenizer(text)["input_ids"])[:tokens]
        assert len(found) == tokens, "the text is long enough"
        return found

    async def produce(self, tokens: Sequence[int]) -> None:
        """Begin to compute and to publish; return once the publication is announced."""
        handle = self._producer.open(self._descriptor, tokens)
        await handle.add_segment()
        self._published = 0
        self._producing = asyncio.create_task(self._produce(handle, tokens))

    async def reached(self, layers: int) -> None:
        """Return when so many layers have been published."""
        while self._published < layers:
            self._changed.clear()
            await self._changed.wait()

    async def produced(self) -> None:
        """Wait for the end."""
        assert self._producing is not None
        await self._producing

    async def recompute(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Compute the prompt and keep what comes; return when it came."""
        at: list[float] = []
        layers: Layers = []

        def keep(layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
            at.append(time.monotonic())
            layers.append((k, v))

        tap = self._adapter.LayerTap(self._model, keep)
        began = time.monotonic()
        await asyncio.to_thread(tap.prefill, tokens)
        return _found(began, at[0], at[-1], layers)

    async def _produce(self, handle: PublicationHandle, tokens: Sequence[int]) -> None:
        loop, handed = asyncio.get_running_loop(), list[Future[None]]()

        async def publish(layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
            await handle.add_layer(layer, k, v)
            self._published += 1
            self._changed.set()

        def hand_over(layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
            handed.append(asyncio.run_coroutine_threadsafe(publish(layer, k, v), loop))

        tap = self._adapter.LayerTap(self._model, hand_over)
        await asyncio.to_thread(tap.prefill, tokens)
        for future in handed:
            await asyncio.wrap_future(future)
        await handle.finish()


class GuestEnd(Role):
    """Who wants the cache, and has no model."""

    def __init__(self, place: Place, *, about: dict[str, Any]) -> None:
        super().__init__(place)
        self._about = about
        self._descriptor = Descriptor.from_json(about["descriptor"])
        self._tls = ClientTls(ca_file=place.certificates.ca_file)
        self._scope = ScopeKey(place.scope)

    async def warm_up(self) -> None:
        """Meet the producer once: modules are loaded then."""
        async with connect(self._uri, tls=self._tls):
            pass

    async def subscribe(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Retrieve the cache while it is made."""
        return await self._retrieve(tokens, RetrievalSettings(deadline_s=LIMIT_S))

    async def fetch(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Retrieve the finished cache with FETCH alone."""
        return await self._retrieve(tokens, RetrievalSettings(deadline_s=LIMIT_S, fetch="always"))

    async def http(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Have the sections of all layers of all blocks in one answer, layer by layer.

        Each has the digest that the service says it has; there is no manifest.
        """
        keys = self._scope.block_keys(self._descriptor, tokens)
        layout, blocks = Layout.of(self._descriptor), len(keys)
        found: list[list[LayerSections]] = [[] for _ in range(layout.layers)]
        at: list[float] = []
        began = time.monotonic()
        uri = f"https://127.0.0.1:{self._about['http_port']}"
        async with BlockClient(uri, _token(self.place), tls=self._tls) as client:
            answer = client.sections(
                self._scope.scope_id,
                self._scope.compatibility_id(self._descriptor),
                keys,
                Runs.of(range(layout.layers)),
                layout,
                timeout_s=LIMIT_S,
            )
            async with aclosing(answer) as sections:
                async for one in sections:
                    assert isinstance(one, LayerSections), "all of it has been published"
                    found[one.layer].append(one)
                    if len(found[one.layer]) == blocks:
                        at.append(time.monotonic())
        layers = [
            tuple(
                np.frombuffer(b"".join(part), layout.dtype)
                for part in ([one.k for one in parts], [one.v for one in parts])
            )
            for parts in found
        ]
        return _found(began, at[0], at[-1], layers)  # type: ignore[arg-type]  # pairs

    @property
    def _uri(self) -> str:
        return f"moqt://127.0.0.1:{self._about['port']}/"

    async def _retrieve(self, tokens: Sequence[int], settings: RetrievalSettings) -> dict[str, Any]:
        key, sink, at = self.place.producer_key, ArraySink(), []
        expected = Expectations.of_tokens(
            self._scope,
            self._descriptor,
            tokens,
            trusted={key.kid: key.public_key},
            require_signature=True,
        )

        def note(event: Event) -> None:
            if isinstance(event, LayerReady):
                at.append(time.monotonic())

        spec = ConnectionSpec(uri=self._uri, tls=self._tls)
        began = time.monotonic()
        async with consume(expected, [spec], sink, settings=settings, on_event=note) as retrieval:
            await retrieval.result()
        return _found(began, at[0], at[-1], list(zip(sink.k, sink.v, strict=True)))


def _token(place: Place) -> str:
    """Return what the block service knows a consumer by."""
    return sha256(place.scope + b"token").hexdigest()


def _found(began: float, first: float, last: float, layers: Layers) -> dict[str, Any]:
    digest = sha256()
    for k, v in layers:
        digest.update(k.tobytes())
        digest.update(v.tobytes())
    return {"first_s": first - began, "all_s": last - began, "digest": digest.hexdigest()}


def _round(model: End, guest: End, layers: int, tokens: int, number: int) -> dict[str, Any]:
    """Have the cache of a prompt in each of the ways; return what each found."""
    prompt = model.ask("prompt", tokens, number)
    model.ask("produce", prompt)
    model.ask("reached", layers // 2)
    found = {"live": guest.ask("subscribe", prompt)}
    model.ask("produced")
    for verb in ("fetch", "http"):
        found[verb] = guest.ask(verb, prompt)
    found["recompute"] = model.ask("recompute", prompt)
    return found


def _ways(case: Case, place: Place, options: Options) -> Result:
    rows: list[dict[str, Any]] = []
    same = 0
    with End(ModelEnd, place) as model:
        say(f"{case.name}: loading the model")
        if (why := model.ask("load", limit_s=_LOAD_S)) is not None:
            raise Untold(why)
        about = model.ask("about")
        descriptor = Descriptor.from_json(about["descriptor"])
        layers = descriptor.layers
        with End(GuestEnd, place, about=about) as guest:
            guest.ask("warm_up")
            _round(model, guest, layers, LENGTHS[0], 0)
            for tokens in LENGTHS:
                rounds = []
                for number in range(options.pairs):
                    say(f"{case.name}, {tokens} tokens: {number + 1} of {options.pairs}")
                    rounds.append(_round(model, guest, layers, tokens, number + 1))
                same += sum(len({one["digest"] for one in found.values()}) == 1 for found in rounds)
                octets = Layout.of(descriptor).container_octets * (tokens // _BLOCK_TOKENS)
                rows.append({"tokens": tokens, "mb": megabytes(octets)} | _medians(rounds))
    for line in table(rows):
        say(line)
    longest = rows[-1]
    figures = {
        "model": about["model"],
        "layers": layers,
        "threads": about["threads"],
        "lengths": rows,
        "identical": same,
        "rounds": len(LENGTHS) * options.pairs,
    }
    computed = longest["recompute"]["all_s"]
    ratios: dict[str, float | None] = {
        f"recomputed_vs_{way}": round(computed / longest[way]["all_s"], 2)
        for way in ("fetch", "http")
    }
    ratios["identical_of_rounds"] = same / figures["rounds"]
    return Result(case.name, figures, ratios, case.targets)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was found as lines for people: seconds to the first layer, and to the last."""
    lines = [f"{'tokens':>6} {'MB':>6}" + "".join(f"{way + ' s':>18}" for way in WAYS)]
    for row in rows:
        cells = (f"{row[way]['first_s']:.3f} {row[way]['all_s']:.3f}" for way in WAYS)
        lines.append(f"{row['tokens']:>6} {row['mb']:>6}" + "".join(f"{one:>18}" for one in cells))
    return lines


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each way: seconds to the first layer, and to the last."""
    return {
        way: {
            name: round(median(found[way][name] for found in rounds), 4)
            for name in ("first_s", "all_s")
        }
        for way in WAYS
    }


CASES = (
    Case(
        "first-layer-ways",
        "a real model's cache: seconds to the first and the last layer, live, by FETCH, over HTTP, "
        "computed anew",
        (
            Target("recomputed_vs_fetch", at_least=1.0),
            Target("identical_of_rounds", at_least=1.0),
        ),
        _ways,
    ),
)
