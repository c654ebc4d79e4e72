"""An engine is got by its name, or it is said why not."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from moqt.aio import QuicSettings, aioquic
from moqt.aio.engine import EngineUnavailableError, check_engine, engine_named


def test_aioquic_is_there_under_its_name_and_by_default() -> None:
    assert engine_named("aioquic").dial is aioquic.dial
    assert engine_named("aioquic").listen is aioquic.listen


def test_an_engine_that_nobody_knows_is_no_setting() -> None:
    unknown: Any = "msquic"
    with pytest.raises(ValueError, match="engine 'msquic' is not known"):
        QuicSettings(engine=unknown)


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))

    with pytest.raises(EngineUnavailableError, match=r"needs Python 3\.12 or later, this is 3\.11"):
        check_engine("picoquic")


def test_a_library_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(EngineUnavailableError, match=r"pip install 'kvcs\[picoquic\]'"):
        check_engine("picoquic")


def test_a_library_that_cannot_be_used_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("laid out differently")

    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", fail)

    with pytest.raises(EngineUnavailableError, match="cannot run: laid out differently"):
        check_engine("picoquic")
