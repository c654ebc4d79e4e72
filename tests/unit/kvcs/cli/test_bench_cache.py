"""What ``kvcs bench`` transfers, and how both ends come to mean the same."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.cli.bench_cache import BenchCache, LikelySource
from kvcs.cli.bench_serve import OTHER_END, Keys, other_end_command, own_names
from kvcs.cli.main import make_parser
from kvcs.config import BenchSettings, settings_from
from kvcs.errors import BadDescriptor, ConfigError
from kvcs.kvsp.codecs import RAW
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import standard_codecs
from kvcs.trust.scope import Protection, Suite


def cache(model: str = "4,2,64", megabytes: float = 0.1, block_tokens: int = 16) -> BenchCache:
    return BenchCache.of(model, megabytes=megabytes, block_tokens=block_tokens, codec=RAW)


def test_it_is_the_least_cache_of_whole_blocks_that_is_large_enough() -> None:
    # A block takes 4 layers x 2 tensors x 16 tokens x 2 heads x 64 x 2 octets: 32 KiB.
    assert (cache(megabytes=32768e-6).tokens, cache(megabytes=32769e-6).tokens) == (16, 32)
    assert cache(megabytes=1e-9).octets == 32768


@given(st.floats(1e-6, 100))
def test_the_other_end_reads_the_same_cache_out_of_the_flags(megabytes: float) -> None:
    # Blocks of 128 octets: a digit that is lost on the way would show.
    made = cache("1,1,1", megabytes, block_tokens=32)

    args = make_parser().parse_args(["bench", *made.flags()])
    read = BenchCache.of(
        args.model, megabytes=args.mb, block_tokens=args.block_tokens,
        codec=standard_codecs()[args.codec],
    )  # fmt: skip

    assert (read.descriptor, read.tokens, read.codec) == (made.descriptor, made.tokens, made.codec)


@pytest.mark.parametrize("megabytes", [0.0, -1.0, float("nan"), float("inf")])
def test_a_size_that_cannot_be_is_refused(megabytes: float) -> None:
    with pytest.raises(ConfigError, match="--mb is"):
        cache(megabytes=megabytes)


def test_a_model_or_a_block_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shape of model 'gpt-9'"):
        cache("gpt-9")
    with pytest.raises(BadDescriptor, match="block_tokens is 0"):
        cache(block_tokens=0)


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("shuffle-zstd", 0.65, 0.75), ("shuffle-lz4", 0.65, 0.80), ("int8", 0.50, 0.54)],
)
def test_codecs_find_in_it_about_what_they_find_in_the_cache_of_a_model(
    codec: str, least: float, most: float
) -> None:
    made = BenchCache.of("2,8,128", megabytes=0.5, block_tokens=16, codec=RAW)
    _, k, _ = next(made.source().layers(0, made.tokens // 16))
    block = k[:16]

    encoded = standard_codecs()[codec].encode(block)

    assert least < len(encoded) / block.nbytes < most


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_it_is_the_same_whenever_it_is_made_and_no_layer_is_like_another(dtype: str) -> None:
    made = cache(f"3,2,32,{dtype}", 0.05)
    blocks = made.tokens // 16

    once, twice = (list(made.source().layers(0, blocks)) for _ in range(2))

    assert [k.tobytes() for _, k, _ in once] == [k.tobytes() for _, k, _ in twice]
    assert len({tensor.tobytes() for _, *pair in once for tensor in pair}) == 6
    assert once[0].k.shape == (made.tokens, 2, 32)
    if "float" in dtype:
        assert np.isfinite(once[0].k.astype(np.float32)).all()


def test_its_tokens_are_those_of_the_synthetic_cache_of_that_shape() -> None:
    made = cache()

    assert isinstance(made.source(), LikelySource)
    assert len(made.source().tokens) == made.tokens


# -- what the other end needs --------------------------------------------------------------------


def test_the_key_of_the_certificate_is_not_among_what_the_other_end_gets(tmp_path: Path) -> None:
    keys = Keys.make(tmp_path / "files", ["far.example"])

    assert {path.name for path in keys.for_the_other_end.iterdir()} == set(OTHER_END)
    for secret in ("scope.key", "token"):
        assert (keys.for_the_other_end / secret).stat().st_mode & 0o077 == 0
    found = ScopeKey.from_file(keys.for_the_other_end / "scope.key")
    assert found.scope_id == keys.scope_key.scope_id


def test_files_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("mine")

    with pytest.raises(ConfigError, match=r"has key\.pem already"):
        Keys.make(tmp_path, ["far.example"])

    assert (tmp_path / "key.pem").read_text() == "mine"
    assert not (tmp_path / "other-end").exists()


def test_the_line_for_the_other_end_is_one_that_the_parser_takes_and_names_no_secret(
    tmp_path: Path,
) -> None:
    keys = Keys.make(tmp_path, ["far.example"])

    line = other_end_command(cache(), "far.example", 4443, keys.for_the_other_end)

    program, *words = shlex.split(line)
    args = make_parser().parse_args(words)
    assert (program, args.uri) == ("kvcs", "moqt://far.example:4443/")
    assert (args.mb, args.model) == (0.1, "4,2,64")
    assert (keys.for_the_other_end / "scope.key").read_text().strip() not in line


def test_the_other_end_is_told_how_objects_are_sealed(tmp_path: Path) -> None:
    protection = Protection(Suite.AES_256_GCM_SHA512_128, "bucket")

    line = other_end_command(cache(), "far.example", 4443, tmp_path, protection)

    args = make_parser().parse_args(shlex.split(line)[1:])
    settings = settings_from(BenchSettings, args, environ={})
    assert settings.load_protection() == protection


def test_a_machine_that_listens_everywhere_is_called_by_what_it_is_reached_by() -> None:
    assert own_names("192.0.2.7") == ["192.0.2.7"]
    assert own_names("::")[-1]
    assert "::" not in own_names("::")
