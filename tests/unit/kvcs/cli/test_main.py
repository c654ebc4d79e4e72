"""The command line as scripts see it: exit codes, one line for each error, help."""

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

import pytest

from kvcs import errors
from kvcs.cli import main as cli
from kvcs.cli.exits import EXIT_CODES, EXIT_INTERNAL
from kvcs.consumer.retrieval import Unreachable
from moqt.aio import TlsSettingsError
from moqt.authority import Denial
from moqt.errors import RequestRejected, SessionClosed


def command(*failure: BaseException, status: int = 0) -> ModuleType:
    """Return a subcommand ``fail`` that raises, or ends with a status."""
    module = ModuleType("fail")

    async def run(_args: Namespace) -> int:
        for exc in failure:
            raise exc
        return status

    module.__dict__.update(add_arguments=_no_arguments, run=run)
    return module


def the_only_one(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Have no other subcommand but ``fail``."""
    monkeypatch.setattr(cli, "SUBCOMMANDS", {"fail": "fail"})
    monkeypatch.setattr(cli, "load", {"fail": module}.__getitem__)


def _no_arguments(_parser: ArgumentParser) -> None:
    pass


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (errors.KvcsError("x"), 1),
        (errors.ConfigError("x"), 2),
        (TlsSettingsError("x"), 2),
        (errors.NotFound("x"), 3),
        (errors.BadManifest("x"), 4),
        (errors.BadObject(errors.Rejection.DIGEST, "x"), 5),
        (errors.BadDescriptor("x"), 6),
        (errors.BadName("x"), 7),
        (errors.Incomplete("x"), 8),
        (errors.PublicationFailed("x"), 9),
        (errors.Expired("x"), 10),
        (errors.ServiceFailed(errors.ServiceFault.BUSY, "x"), 12),
        (errors.BadToken(Denial.EXPIRED, "x"), 13),
        (Unreachable("x"), 11),
        (SessionClosed(0, "x", by_peer=True), 11),
        (RequestRejected(0x10, "x", None), 11),
        (ConnectionRefusedError(111, "x"), 11),
        (TimeoutError("x"), 11),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_failure_has_its_exit_code_and_its_line(
    failure: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    the_only_one(monkeypatch, command(failure))

    assert cli.main(["fail"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcs: ")
    assert err.count("\n") == 1


def test_every_error_of_kvcs_has_an_exit_code_of_its_own() -> None:
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.KvcsError)
    ]

    codes = [EXIT_CODES[kind] for kind in kinds]
    assert len(set(codes)) == len(codes) == 12


def test_the_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])

    text = " ".join(capsys.readouterr().out.split()).partition("Exit status:")[2]
    for code in {0, *EXIT_CODES.values(), EXIT_INTERNAL}:
        assert f" {code} " in text


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])

    out = capsys.readouterr().out
    assert out.startswith(f"usage: kvcs {name}")
    assert f"  kvcs {name} " in out, "the help has no example"


def test_no_subcommand_is_imported_before_it_is_wanted() -> None:
    code = (
        "import sys; from kvcs.cli.main import make_parser; make_parser().format_help();"
        "print(*[name for name in sys.modules if name.startswith(('kvcs.cli.', 'moqt.aio'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert done.stdout.split() == ["kvcs.cli.main"]


def test_what_failed_inside_a_task_group_is_told_like_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = ExceptionGroup("inner", [errors.NotFound("nobody\nhas it"), errors.NotFound("gone")])
    the_only_one(monkeypatch, command(ExceptionGroup("outer", [inner])))

    assert cli.main(["fail"]) == 3
    assert capsys.readouterr().err == "kvcs: nobody has it\nkvcs: gone\n"


def test_a_mistake_of_ours_shows_where_it_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    the_only_one(monkeypatch, command(ZeroDivisionError("oops")))

    assert cli.main(["fail"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("please report it\n")


def test_an_interrupt_is_told_by_the_exit_code_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    the_only_one(monkeypatch, command(KeyboardInterrupt()))

    assert cli.main(["fail"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_status_of_a_subcommand_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    the_only_one(monkeypatch, command(status=4))

    assert cli.main(["fail"]) == 4


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["keys", "--nonsense"], ["--vers"]])
def test_what_the_parser_does_not_know_is_refused_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)

    assert "usage: kvcs" in capsys.readouterr().err


def test_the_version_names_the_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])

    assert "MOQT draft 22, kvcs-1" in capsys.readouterr().out


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # nobody will read
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvcs", "show", "kvcs-1/" + "ab" * 32],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=50,
            check=False,
        )
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (141, b"")
