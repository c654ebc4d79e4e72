"""The scripts: what they say when they cannot do their work, and what is cheap to run of them."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcs.cli.main import make_parser
from kvcs.config import ProducerSettings, settings_from
from kvcs.errors import ConfigError
from moqt.aio.tls import ServerTls, check_server_tls

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=50,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout without an environment, as far as setup-env needs one."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup-env", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def stand_in(folder: Path, body: str) -> str:
    """Make a program that stands in for a Python."""
    path = folder / "stand-in"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_can_be_executed_and_says_what_it_does(path: Path) -> None:
    first, second = path.read_text().splitlines()[:2]

    assert os.access(path, os.X_OK)
    assert first.startswith("#!")
    assert second.startswith(("# ", '"""'))


def test_ci_runs_the_tests_and_nothing_cleverer() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()

    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert lines[-1] == "exec ./scripts/test"


@pytest.mark.parametrize("name", ["demo", "setup-env", "test"])
def test_shell_scripts_are_sound(name: str) -> None:
    assert run("sh", "-n", ROOT / "scripts" / name).returncode == 0


def test_an_old_python_is_refused_by_name(checkout: Path) -> None:
    old = stand_in(checkout, "exit 1")

    done = run(checkout / "scripts" / "setup-env", KVCS_PYTHON=old)
    assert done.returncode == 1
    assert done.stderr == f"setup-env: KVCS_PYTHON is {old}, expected a Python of 3.11 or later\n"


def test_a_python_that_cannot_make_environments_says_which_package_can(checkout: Path) -> None:
    bare = stand_in(
        checkout, f'case "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"'
    )

    done = run(checkout / "scripts" / "setup-env", KVCS_PYTHON=bare)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_env_knows_two_kinds(checkout: Path) -> None:
    done = run(checkout / "scripts" / "setup-env", "nonsense")

    assert (done.returncode, done.stderr) == (2, "setup-env: nonsense is not one of run, dev\n")


def test_the_test_script_explains_itself() -> None:
    done = run(ROOT / "scripts" / "test", "--help")

    assert done.returncode == 0
    assert done.stdout.startswith("Everything that CI checks")
    assert "--quick" in done.stdout


def test_made_certificates_are_taken_by_a_listener(tmp_path: Path) -> None:
    done = run(sys.executable, ROOT / "scripts" / "make-certs", tmp_path, "--name", "::1")

    assert done.returncode == 0, done.stderr
    flags = done.stdout.splitlines()[0].split()
    args = make_parser().parse_args(["produce", "--listen", "[::1]:0", *flags])
    settings = settings_from(ProducerSettings, args, environ={})
    assert settings.certificate_file is not None
    assert settings.key_file is not None
    check_server_tls(ServerTls(settings.certificate_file, settings.key_file))


def variables() -> set[str]:
    """Return every variable of ours that the scripts, and what they run, speak of."""
    paths = [
        path
        for folder in ("scripts", ".ci", "tests/interop", "kvcs/connectors")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return {name for path in paths for name in re.findall(r"\bKVCS_[A-Z0-9_]+", path.read_text())}


def test_a_variable_of_the_scripts_is_no_unknown_setting() -> None:
    """Else a command that a script starts, or a person beside it, would refuse to run."""
    found = variables()
    assert {"KVCS_PYTHON", "KVCS_BENCH_BASELINE"} <= found, "the walk finds no variables"

    assert [name for name in sorted(found) if "is not a setting" in complaint(name)] == []
    assert "is not a setting" in complaint("KVCS_NEVER_HEARD_OF")


def complaint(variable: str) -> str:
    """Return what a command says to a variable; its value may be wrong, its name may not."""
    args = make_parser().parse_args(["produce", "--connect", "moqt://relay:1/"])
    try:
        settings_from(ProducerSettings, args, environ={variable: "x"})
    except ConfigError as exc:
        return str(exc)
    return ""


def test_every_finding_that_is_answered_in_the_audit_has_its_answer_on_paper() -> None:
    audit = runpy.run_path(str(ROOT / "scripts" / "audit"))
    rows = [
        line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| B")
    ]

    answered = {
        (test, path)
        for line in rows
        for test in re.findall(r"B\d{3}", line.split("|")[1])
        for path in re.findall(r"`(kvcs/[^`]+|moqt/[^`]+)`", line.split("|")[2])
    }
    assert answered == audit["ANSWERED"]
    assert {row[2:6] for row in rows} >= audit["EVERYWHERE"]


def test_fuzz_says_which_targets_there_are_when_asked_for_another() -> None:
    done = run(sys.executable, ROOT / "scripts" / "fuzz", "no-such-target")

    assert done.returncode == 2
    assert "no-such-target is no target; they are control, setup" in done.stderr


def test_fuzz_repeats_one_input(tmp_path: Path) -> None:
    refused, read = tmp_path / "refused", tmp_path / "read"
    refused.write_bytes(b"\xff")
    read.write_bytes(b"\x03\x00secret")  # USE_VALUE, of type 0

    for path, told in (
        (refused, "token: refused, KeyValueFormattingError\n"),
        (read, "token: read\n"),
    ):
        done = run(sys.executable, ROOT / "scripts" / "fuzz", "token", "--input", path)
        assert (done.returncode, done.stdout) == (0, told), done.stderr


def test_fuzz_keeps_the_input_that_ended_a_run_and_says_what_it_caused(tmp_path: Path) -> None:
    fuzz = runpy.run_path(str(ROOT / "scripts" / "fuzz"))
    place, kept = tmp_path / "place", tmp_path / "kept"
    place.mkdir()

    assert fuzz["what_was_found"](place, 0, "Done 100 runs", kept, "token") is None
    (place / "found-crash-1").write_bytes(b"\x01\x02")
    said = "INFO: Seed\n\nKeyError: 'x'\n==1== ERROR: libFuzzer\n"
    assert fuzz["what_was_found"](place, 77, said, kept, "token") == "0102: KeyError: 'x'"
    assert (kept / "fuzz-token-crash-1").read_bytes() == b"\x01\x02"
    assert "status 9" in fuzz["what_was_found"](tmp_path, 9, "", kept, "token")


@pytest.mark.slow
def test_fuzz_counts_what_it_tried() -> None:
    pytest.importorskip("atheris", reason="the fuzzer is not for this Python or machine")
    done = run(
        sys.executable, ROOT / "scripts" / "fuzz", "integer", "token", "--runs", "3000", "--json"
    )

    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["target"] for one in results] == ["integer", "token"]
    for one in results:
        assert one["inputs"] >= 3000
        assert one["branches"] > 10
        assert one["found"] is None
