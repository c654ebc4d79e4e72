"""What aiopquic itself does, and the part of its memory that the engine writes."""

import importlib
import re
from pathlib import Path

import pytest

aiopquic = pytest.importorskip("aiopquic")

from moqt.aio.picoquic import library  # noqa: E402
from moqt.aio.picoquic.library import Command, Event  # noqa: E402

BINDING = Path(str(aiopquic.__file__)).parent / "_binding"


def test_the_record_of_a_stream_is_laid_out_as_it_was() -> None:
    library._check_layout()


def test_a_record_that_begins_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_RECORD", re.compile("another record"))

    with pytest.raises(ImportError, match=r"laid out differently, expected 0\.6\.1"):
        library._check_layout()


def test_a_library_that_does_not_say_how_it_is_laid_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(aiopquic, "__file__", str(tmp_path / "__init__.py"))

    with pytest.raises(ImportError, match=r"lacks stream_ctx\.h"):
        library._check_layout()


def test_what_is_withheld_is_what_the_worker_reads() -> None:
    """The handler of OPEN_FLOW_CONTROL grants the free part of the ring less this field."""
    source = (BINDING / "c" / "callback.h").read_text()
    [handler] = re.findall(r"case SPSC_EVT_TX_OPEN_FLOW_CONTROL: \{.*?break;\n", source, re.DOTALL)

    assert "aiopquic_stream_ctx_pending_load(sc)" in handler
    assert "(uint32_t)(buf_free - pending)" in handler


@pytest.mark.parametrize("number", [*Event, *Command], ids=lambda n: n.name)
def test_events_and_commands_have_the_librarys_numbers(number: Event | Command) -> None:
    source = (BINDING / "c" / "spsc_ring.h").read_text()
    prefix = "SPSC_EVT_TX_" if isinstance(number, Command) else "SPSC_EVT_"

    assert re.search(rf"\b{prefix}{number.name} = {number:d}\b", source)


def test_aiopquic_needs_it_while_its_own_windows_follow_what_was_read() -> None:
    """A chunk counts as consumed when a memoryview of it is made, which the drain does itself."""
    source = (BINDING / "_transport.pyx").read_text()
    [access] = re.findall(r"def __getbuffer__\(.*?def __releasebuffer__", source, re.DOTALL)

    assert "self._release_fc()" in access
    assert "data = memoryview(StreamChunk._wrap(" in source


def test_aiopquic_tells_nothing_that_would_make_guessing_unnecessary() -> None:
    """If one of these appears, credit and acknowledgements can be asked for instead."""
    binding = importlib.import_module("aiopquic._binding._transport")

    words = ("max_data", "stream_limit", "acked_bytes", "stream_credit")
    assert not [
        name for name in dir(binding.TransportContext) if any(word in name for word in words)
    ]
