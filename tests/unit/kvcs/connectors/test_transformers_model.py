"""What the transformers adapter does with a model: a random tiny one, and the real one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kvcs.connectors import transformers as adapter
from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor

torch: Any = pytest.importorskip("torch", reason="needs the extra `transformers`: torch is missing")
transformers: Any = pytest.importorskip(
    "transformers", reason="needs the extra `transformers`: transformers is missing"
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[4]
TENSORS = ROOT / "tests/data/smollm2-128.safetensors"
Array = NDArray[Any]
Layers = list[tuple[Array, Array]]

TINY_LAYERS = 3
PROMPT_IDS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 5, 6]
CACHED = 8
ORIGIN = adapter.ModelOrigin("test/tiny", "sha256:00", "sha256:11")

PROMPTS = [
    "The keeper of the lighthouse climbs the stairs at dusk, lights the lamp and then",
    "A short list of things to take to the island: rope, bread, oil,",
    "Once upon a time there was a small boat that wanted to see the whole world. One day it",
    "def area(width, height):\n    ",
    "In 1912 the ship left the harbour and sailed west. The captain wrote in the log that",
    "Water boils at 100 degrees. Ice melts at 0 degrees. Iron melts at",
]


def tiny(**changes: Any) -> Any:
    """Return a model of random weights, the same ones every time."""
    torch.manual_seed(7)
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_hidden_layers": TINY_LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    config = transformers.LlamaConfig(**settings | changes)
    # Larger than usual, so that what the model says depends on the whole prompt.
    config.initializer_range = 0.6
    return transformers.LlamaForCausalLM(config).eval()


def prefill(model: Any, token_ids: list[int], dtype: str = "bfloat16") -> tuple[Layers, Any]:
    layers: Layers = []
    tap = adapter.LayerTap(model, lambda layer, k, v: layers.append((k, v)), dtype=dtype)
    return layers, tap.prefill(token_ids)


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    """Tokenizer and model, fetched if they are not here yet."""
    try:
        return adapter.load_model(adapter.download_model())
    except adapter.ModelUnavailable as exc:
        pytest.skip(str(exc))


def test_hands_each_layer_over_before_the_model_has_computed_it_to_the_end(
    tiny_model: Any,
) -> None:
    seen: list[tuple[str, int]] = []
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: seen.append(("computed", number)))
        for number, layer in enumerate(tiny_model.model.layers)
    ]
    tap = adapter.LayerTap(tiny_model, lambda layer, k, v: seen.append(("handed over", layer)))

    tap.prefill(PROMPT_IDS)

    for hook in hooks:
        hook.remove()
    assert seen == [
        (what, layer) for layer in range(TINY_LAYERS) for what in ("handed over", "computed")
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_arrays_are_token_major_read_only_and_what_the_model_goes_on_with(
    tiny_model: Any, dtype: str
) -> None:
    layers, cache = prefill(tiny_model, PROMPT_IDS, dtype)

    assert len(layers) == TINY_LAYERS
    for pair, kept in zip(layers, cache.layers, strict=True):
        for array, tensor in zip(pair, (kept.keys, kept.values), strict=True):
            assert array.shape == (len(PROMPT_IDS), 2, 8)
            assert str(array.dtype) == dtype
            assert array.flags.c_contiguous
            assert not array.flags.writeable
            in_model = tensor[0].transpose(0, 1).numpy()
            assert np.array_equal(array.astype(np.float32), in_model)


def test_layers_are_what_the_model_computes_without_us_but_for_the_rounding(
    tiny_model: Any,
) -> None:
    exact, _ = prefill(tiny_model, PROMPT_IDS, "float32")
    rounded, _ = prefill(tiny_model, PROMPT_IDS, "bfloat16")
    with torch.inference_mode():
        plain = tiny_model(torch.tensor([PROMPT_IDS]), use_cache=True).cache

    for (k, v), kept in zip(exact, plain.layers, strict=True):
        assert np.array_equal(k, kept.keys[0].transpose(0, 1).numpy())
        assert np.array_equal(v, kept.values[0].transpose(0, 1).numpy())
    # Later layers have seen the rounding of the ones before.
    for narrow, wide in zip(rounded[0], exact[0], strict=True):
        assert np.array_equal(narrow, wide.astype(narrow.dtype))


def test_what_was_handed_over_does_not_change_when_the_model_goes_on(tiny_model: Any) -> None:
    layers, cache = prefill(tiny_model, PROMPT_IDS[:CACHED])
    before = [(k.tobytes(), v.tobytes()) for k, v in layers]

    adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, CACHED, 5)

    assert [(k.tobytes(), v.tobytes()) for k, v in layers] == before
    assert len(layers) == TINY_LAYERS


def test_an_error_of_the_callee_ends_the_pass(tiny_model: Any) -> None:
    seen: list[int] = []

    def fail(layer: int, k: Array, v: Array) -> None:
        seen.append(layer)
        if layer == 1:
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        adapter.LayerTap(tiny_model, fail).prefill(PROMPT_IDS)

    assert seen == [0, 1]


def test_a_prefill_in_chunks_hands_over_each_chunk_and_ends_with_one_cache(
    tiny_model: Any,
) -> None:
    handed: list[tuple[int, Array, Array]] = []
    tap = adapter.LayerTap(tiny_model, lambda layer, k, v: handed.append((layer, k, v)))

    cache: Any = None
    for start, stop in ((0, 3), (3, 4), (4, CACHED)):
        cache = tap.prefill(PROMPT_IDS[start:stop], cache)

    assert [(layer, len(k)) for layer, k, _ in handed] == [
        (layer, tokens) for tokens in (3, 1, 4) for layer in range(TINY_LAYERS)
    ]
    for layer, kept in enumerate(cache.layers):
        k = np.concatenate([k for number, k, _ in handed if number == layer])
        assert np.array_equal(k.astype(np.float32), kept.keys[0].transpose(0, 1).numpy())


def test_blocks_are_handed_over_as_they_fill_while_the_text_goes_on(tiny_model: Any) -> None:
    blocks: list[tuple[list[int], Layers]] = []
    _, cache = prefill(tiny_model, PROMPT_IDS[:CACHED])
    adapter.BlockTap(cache, 4, lambda tokens, layers: blocks.append((tokens, layers)))

    text = adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, CACHED, 12)

    # The last token that was said has not been computed: nobody has its K and V.
    computed = [*PROMPT_IDS, *text][CACHED:-1]
    assert [tokens for tokens, _ in blocks] == [
        computed[at : at + 4] for at in range(0, len(computed) - 3, 4)
    ]
    for layer, kept in enumerate(cache.layers):
        for side, tensor in enumerate((kept.keys, kept.values)):
            whole = np.concatenate([layers[layer][side] for _, layers in blocks])
            in_model = tensor[0].transpose(0, 1).numpy()[CACHED : CACHED + len(whole)]
            assert np.array_equal(whole.astype(np.float32), in_model)


def test_a_cache_that_ends_within_a_block_is_not_watched(tiny_model: Any) -> None:
    _, cache = prefill(tiny_model, PROMPT_IDS[:CACHED])

    with pytest.raises(ValueError, match="2 tokens into a block of 3"):
        adapter.BlockTap(cache, 3, lambda tokens, layers: None)


@pytest.mark.parametrize("held", [8, 12, 16, 20])
def test_a_text_that_was_begun_elsewhere_goes_on_token_for_token(
    tiny_model: Any, held: int
) -> None:
    layers, cache = prefill(tiny_model, PROMPT_IDS[:CACHED])
    blocks: list[Layers] = []
    adapter.BlockTap(cache, 4, lambda tokens, layers: blocks.append(layers))
    text = adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, CACHED, 24)
    arrays = [
        tuple(
            np.concatenate([layers[layer][side], *(block[layer][side] for block in blocks)])
            for side in (0, 1)
        )
        for layer in range(TINY_LAYERS)
    ]

    received = adapter.cache_from_arrays(tiny_model, arrays, tokens=held)  # type: ignore[arg-type]
    said = text[: max(held + 1 - len(PROMPT_IDS), 0)]
    more = adapter.continue_greedy(
        tiny_model, [*PROMPT_IDS, *said], received, held, 24 - len(said), decoded=len(said)
    )

    assert [*said, *more] == text


def test_continues_from_the_received_cache_as_from_its_own(tiny_model: Any) -> None:
    layers, own = prefill(tiny_model, PROMPT_IDS[:CACHED])
    received = adapter.cache_from_arrays(tiny_model, layers)

    local = adapter.continue_greedy(tiny_model, PROMPT_IDS, own, CACHED)
    remote = adapter.continue_greedy(tiny_model, PROMPT_IDS, received, CACHED)

    assert len(local) == 32
    assert remote == local


def test_a_damaged_cache_says_something_else(tiny_model: Any) -> None:
    layers, own = prefill(tiny_model, PROMPT_IDS[:CACHED])
    k, v = layers[0]
    damaged = adapter.cache_from_arrays(tiny_model, [(k, v[::-1]), *layers[1:]])

    local = adapter.continue_greedy(tiny_model, PROMPT_IDS, own, CACHED)

    assert adapter.continue_greedy(tiny_model, PROMPT_IDS, damaged, CACHED) != local


def test_a_model_in_bfloat16_hands_over_its_own_cache(tiny_model: Any) -> None:
    model = tiny().to(torch.bfloat16)
    layers, own = prefill(model, PROMPT_IDS[:CACHED])
    received = adapter.cache_from_arrays(model, layers)

    assert adapter.continue_greedy(model, PROMPT_IDS, received, CACHED) == (
        adapter.continue_greedy(model, PROMPT_IDS, own, CACHED)
    )


def test_uses_only_the_tokens_it_is_told_to(tiny_model: Any) -> None:
    layers, _ = prefill(tiny_model, PROMPT_IDS)
    shorter, _ = prefill(tiny_model, PROMPT_IDS[:CACHED])

    cut = adapter.cache_from_arrays(tiny_model, layers, tokens=CACHED)
    whole = adapter.cache_from_arrays(tiny_model, shorter)

    assert cut.get_seq_length() == CACHED
    assert adapter.continue_greedy(tiny_model, PROMPT_IDS, cut, CACHED, 4) == (
        adapter.continue_greedy(tiny_model, PROMPT_IDS, whole, CACHED, 4)
    )


def test_the_model_begins_before_the_last_layers_are_asked_for(tiny_model: Any) -> None:
    arrays, own = prefill(tiny_model, PROMPT_IDS[:CACHED])
    seen: list[tuple[str, int]] = []

    class Arriving(list[tuple[Array, Array]]):
        def __getitem__(self, layer: Any) -> Any:
            seen.append(("asked for", layer))
            return super().__getitem__(layer)

    hooks = [
        layer.register_forward_hook(lambda *_, number=number: seen.append(("computed", number)))
        for number, layer in enumerate(tiny_model.model.layers)
    ]
    cache = adapter.cache_from_arrays(tiny_model, Arriving(arrays))
    said = adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, CACHED, 1)

    for hook in hooks:
        hook.remove()
    assert seen.index(("computed", 0)) < seen.index(("asked for", 1))
    assert seen.index(("computed", 1)) < seen.index(("asked for", 2))
    assert said == adapter.continue_greedy(tiny_model, PROMPT_IDS, own, CACHED, 1)


def without_a_layer(layers: Layers) -> Layers:
    return layers[:-1]


def with_a_shorter_layer(layers: Layers) -> Layers:
    k, v = layers[1]
    return [layers[0], (k[:-1], v), *layers[2:]]


def with_a_layer_of_another_type(layers: Layers) -> Layers:
    k, v = layers[2]
    return [*layers[:2], (k, v.astype(np.float32))]


def with_v_shorter_than_k(layers: Layers) -> Layers:
    return [(k, v[:-1]) for k, v in layers]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (without_a_layer, "2 layers, the model has 3"),
        (with_a_shorter_layer, "k of layer 1 has shape"),
        (with_a_layer_of_another_type, "v of layer 2 is float32"),
        (with_v_shorter_than_k, "v of layer 0 has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tiny_model: Any, spoil: Callable[[Layers], Layers], text: str
) -> None:
    layers, _ = prefill(tiny_model, PROMPT_IDS[:CACHED])

    with pytest.raises(ValueError, match=text):
        adapter.continue_greedy(
            tiny_model, PROMPT_IDS, adapter.cache_from_arrays(tiny_model, spoil(layers)), CACHED
        )


@pytest.mark.parametrize("tokens", [0, -1, CACHED + 1])
def test_more_tokens_than_there_are_or_none_are_refused(tiny_model: Any, tokens: int) -> None:
    layers, _ = prefill(tiny_model, PROMPT_IDS[:CACHED])

    with pytest.raises(ValueError, match=f"{tokens} tokens of a cache"):
        adapter.cache_from_arrays(tiny_model, layers, tokens=tokens)


def test_a_cache_of_another_length_than_said_is_refused(tiny_model: Any) -> None:
    _, cache = prefill(tiny_model, PROMPT_IDS[:CACHED])

    with pytest.raises(ValueError, match="holds 8 tokens, not 7"):
        adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, 7)


def test_a_cache_that_leaves_nothing_to_compute_is_refused(tiny_model: Any) -> None:
    _, cache = prefill(tiny_model, PROMPT_IDS)

    with pytest.raises(ValueError, match="leave none"):
        adapter.continue_greedy(tiny_model, PROMPT_IDS, cache, len(PROMPT_IDS))


def test_an_element_type_that_no_cache_has_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="int8"):
        prefill(tiny_model, PROMPT_IDS, "int8")


def test_no_tokens_are_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        prefill(tiny_model, [])


def test_describes_the_cache_that_the_model_really_makes(tiny_model: Any) -> None:
    described = adapter.descriptor_for(tiny_model, 4, "float16", origin=ORIGIN)
    descriptor = Descriptor.from_json(described)

    layers, _ = prefill(tiny_model, PROMPT_IDS, "float16")
    assert descriptor.layers == len(layers)
    assert descriptor.k_shape == layers[0][0].shape[1:]
    assert descriptor.v_shape == layers[0][1].shape[1:]
    assert (descriptor.model, descriptor.revision) == (ORIGIN.model, ORIGIN.revision)
    assert descriptor.block_tokens == 4
    assert descriptor.dtype == "float16"


def test_another_rotation_is_another_descriptor() -> None:
    usual = adapter.descriptor_for(tiny(), 4, origin=ORIGIN)
    other = adapter.descriptor_for(
        tiny(rope_parameters={"rope_type": "default", "rope_theta": 123.0}), 4, origin=ORIGIN
    )

    [difference] = Descriptor.from_json(usual).differences(Descriptor.from_json(other))
    assert difference.startswith("rope")


def test_a_model_of_unknown_origin_is_not_described(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="which weights"):
        adapter.descriptor_for(tiny_model, 4)


def test_k_and_v_of_different_width_come_back_as_they_were() -> None:
    torch.manual_seed(7)
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    config.initializer_range = 0.6
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    layers, own = prefill(model, PROMPT_IDS[:CACHED])
    received = adapter.cache_from_arrays(model, layers)

    described = adapter.descriptor_for(model, 4, origin=ORIGIN)

    assert described["k_shape"] != described["v_shape"]
    assert adapter.continue_greedy(model, PROMPT_IDS, received, CACHED) == (
        adapter.continue_greedy(model, PROMPT_IDS, own, CACHED)
    )


CONSUMER = """
import json, sys
from pathlib import Path
from safetensors.numpy import load_file
from kvcs.connectors import transformers as adapter

case = json.loads(sys.stdin.read())
tokenizer, model = adapter.load_model(Path(case["folder"]))
answers = []
for file, prompt, cached in case["prompts"]:
    tensors = load_file(file)
    layers = [(tensors[f"k.{i}"], tensors[f"v.{i}"]) for i in range(len(tensors) // 2)]
    cache = adapter.cache_from_arrays(model, layers)
    answers.append(adapter.continue_greedy(model, prompt, cache, cached, 32))
print(json.dumps(answers))
"""


def test_a_second_process_continues_token_for_token(real: tuple[Any, Any], tmp_path: Path) -> None:
    tokenizer, model = real
    cases: list[tuple[str, list[int], int]] = []
    local: list[list[int]] = []
    for number, text in enumerate(PROMPTS):
        prompt: list[int] = tokenizer(text).input_ids
        cached = adapter.whole_blocks(len(prompt), 4)
        layers, own = prefill(model, prompt[:cached])
        file = tmp_path / f"{number}.safetensors"
        k = {f"k.{layer}": pair[0] for layer, pair in enumerate(layers)}
        v = {f"v.{layer}": pair[1] for layer, pair in enumerate(layers)}
        save_file(k | v, file)
        cases.append((str(file), prompt, cached))
        local.append(adapter.continue_greedy(model, prompt, own, cached, 32))

    done = subprocess.run(
        [sys.executable, "-c", CONSUMER],
        input=json.dumps({"folder": str(adapter.model_folder()), "prompts": cases}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == local


def test_the_recorded_cache_continues_as_recorded(real: tuple[Any, Any]) -> None:
    tokenizer, model = real
    facts = json.loads(TENSORS.with_suffix(".json").read_text())
    tensors = load_file(TENSORS)
    layers = [(tensors[f"k.{i}"], tensors[f"v.{i}"]) for i in range(30)]
    prompt = facts["tokens"] + facts["tail"]
    cache = adapter.cache_from_arrays(model, layers)

    said = adapter.continue_greedy(model, prompt, cache, len(facts["tokens"]), 32)

    assert prompt == tokenizer(facts["prompt"]).input_ids
    assert said == facts["continuation"]["tokens"]
    assert facts["descriptor"] == adapter.descriptor_for(model, 16)


def test_the_unpacked_weights_are_those_of_the_original(
    real: tuple[Any, Any], tmp_path: Path
) -> None:
    """Unpacks once more, into an empty folder, and loads what that left."""
    _, model = real
    (tmp_path / adapter.MODEL_FILE).symlink_to(adapter.model_folder() / adapter.MODEL_FILE)

    tokenizer, unpacked = adapter.load_model(tmp_path)
    _, loaded = adapter.load_model(tmp_path)

    assert adapter.vocabulary_digest(tokenizer) == unpacked.config.kvcs_origin["tokenizer"]
    for other in (unpacked, loaded):
        assert other.config.kvcs_origin == model.config.kvcs_origin
        assert all(
            torch.equal(tensor, other.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )


def test_damaged_unpacked_weights_are_made_again(real: tuple[Any, Any], tmp_path: Path) -> None:
    usual = adapter.model_folder() / adapter._UNPACKED
    (tmp_path / "origin.json").write_bytes((usual / "origin.json").read_bytes())
    weights = bytearray((usual / adapter._UNPACKED_WEIGHTS).read_bytes())
    (tmp_path / adapter._UNPACKED_WEIGHTS).write_bytes(weights)
    intact = adapter._read_origin(tmp_path)
    weights[len(weights) // 2] ^= 1
    (tmp_path / adapter._UNPACKED_WEIGHTS).write_bytes(weights)

    assert intact is not None
    assert adapter._read_origin(tmp_path) is None
