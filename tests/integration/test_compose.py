"""The image and docker-compose.yml: built and run, where a Docker engine can be had."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compose-test"
COMPOSE = (ROOT / "docker-compose.yml").read_text()
#: Exit status of the script where it has nothing to run on.
UNAVAILABLE = 3
PATIENCE_S = 330


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(PATIENCE_S + 60)
def test_two_consumers_in_containers_verify_everything() -> None:
    flags = ["--install"] if os.environ.get("KVCS_COMPOSE_INSTALL") else []
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # it removes what it made
        out, err = process.communicate(timeout=30)
    if process.returncode == UNAVAILABLE:
        pytest.skip(err.splitlines()[-1])

    assert process.returncode == 0, err[-4000:]
    figures = json.loads(out)
    for consumer in ("early", "late"):
        assert figures[consumer]["objects"] == figures[consumer]["attested"] > 0
        assert figures[consumer]["rejected"] == figures[consumer]["duplicates"] == 0


def test_it_explains_itself_and_names_only_exit_statuses_it_has() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=30, check=True
    )

    assert "--install" in done.stdout
    told = done.stdout[done.stdout.index("Exit status:") :]
    returned = re.findall(r"^\s+return (\d)$", SCRIPT.read_text(), re.MULTILINE)
    assert sorted({*returned, "2"}) == sorted(re.findall(r"\b(\d) ", told))


def test_without_an_engine_and_without_root_it_says_so(tmp_path: Path) -> None:
    """Nothing is on the path but what cannot be an engine."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SYSTEM_FOLDERS, SCRIPT],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip

    assert done.returncode == UNAVAILABLE
    assert "no Docker engine answers" in done.stderr
    assert list(tmp_path.iterdir()) == []


#: The script adds the folders of the system's tools to the path; here are none.
WITHOUT_SYSTEM_FOLDERS = """
import runpy, shutil, subprocess, sys
shutil.which = lambda _: None
started = subprocess.run
def run(command, **options):
    raise FileNotFoundError(2, "missing", command[0])
subprocess.run = run
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def words(row: str) -> list[str]:
    return re.findall(r'"(\w+)"', row)


def test_the_compose_file_and_the_script_know_the_same_services_and_variables() -> None:
    services = set(re.findall(r"^  (\w+):$", COMPOSE.partition("\nservices:")[2], re.MULTILINE))
    script = SCRIPT.read_text()
    daemons, consumers = (
        {name for row in re.findall(rf"^{table} = \((.*)\)$", script, re.M) for name in words(row)}
        for table in ("DAEMONS", "CONSUMERS")
    )

    assert daemons
    assert consumers
    assert services - {"keys"} == {"setup", *daemons, *consumers}
    told = set(re.findall(r"^# ([A-Z_]+)  ", COMPOSE, re.MULTILINE))
    assert told == set(re.findall(r"\$\{([A-Z_]+)", COMPOSE))


def test_the_image_is_built_on_the_official_python_unless_told_otherwise() -> None:
    [of_dockerfile] = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    [of_compose] = set(re.findall(r"BASE: \$\{BASE:-(\S+)\}", COMPOSE))
    [of_script] = re.findall(r'^DEFAULT_IMAGE = "(\S+)"$', SCRIPT.read_text(), re.M)

    assert of_dockerfile == of_compose == of_script
    assert of_dockerfile.startswith("python:3.")
    assert of_dockerfile.endswith("-slim")
