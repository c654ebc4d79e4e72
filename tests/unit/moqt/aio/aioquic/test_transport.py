"""What a connection says of its end."""

from moqt.aio.aioquic.transport import _short


def test_a_long_reason_is_cut_between_characters() -> None:
    assert _short("x" * 10) == "x" * 10
    assert len(_short("é" * 2000).encode()) == 500
    assert _short("x" + "é" * 2000) == "x" + "é" * 249
