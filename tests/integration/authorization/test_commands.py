"""The commands with tokens, as processes: a relay that asks, who has a token and who has none."""

import asyncio
import json
from pathlib import Path

import pytest

from kvcs.cli.main import main
from kvcs.trust.grants import Role
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import PATIENCE_S
from tests.issuing import AUDIENCE, Issuer

pytestmark = pytest.mark.network


def listening(desk: Desk) -> list[str]:
    files = desk.certificates
    return [
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip


async def ended(*arguments: str) -> tuple[int | None, str, str]:
    """Run a command to its end."""
    async with started(arguments) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_who_has_a_token_is_served_and_who_has_none_is_not(desk: Desk) -> None:
    issuer, folder = Issuer(), Path(desk.folder)
    ours = issuer.file(folder, "producer.token", issuer.issue(Role.PRODUCER))
    mine = issuer.file(folder, "consumer.token", issuer.issue())
    asking = [
        "relay", "--json", "--listen", "0.0.0.0:0", *listening(desk), "--audience", AUDIENCE,
        "--issuers-file", str(issuer.issuers_file(folder)),
    ]  # fmt: skip
    async with started(asking) as relay:
        port = (await event_of(relay, "listening"))["port"]
        uri = f"moqt://127.0.0.1:{port}/"
        pinged = await ended("ping", uri, "--json", "--ca-file", str(desk.certificates.ca_file))
        produce = [
            *desk.without(desk.produce("--json", "--drain-s", "0"), "--listen"),
            "--connect", uri, "--ca-file", str(desk.certificates.ca_file),
            "--token-file", str(ours),
        ]  # fmt: skip
        async with started(produce) as producer:
            await event_of(producer, "publication-finished")
            served = await ended(*desk.consume("--token-file", str(mine), port=port))
            refused = await ended(*desk.consume(port=port))

    assert (pinged[0], json.loads(pinged[1])["authorized"]) == (0, False)
    assert served[0] == 0, served[2]
    assert refused[0] == 11
    assert "the session was refused: UNAUTHORIZED" in refused[2].splitlines()[-1]
    assert "Traceback" not in refused[2]


def test_nobody_listens_for_everybody_without_saying_so(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["relay", "--listen", ":0", *listening(desk)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("kvcs: listen is [::]:0, where anybody could do everything: expected ")
    assert line.count("\n") == 1


async def test_who_listens_for_everybody_says_so_loudly(desk: Desk) -> None:
    command = ["relay", "--json", "--listen", ":0", "--insecure-open", *listening(desk)]
    async with started(command) as relay:
        await event_of(relay, "listening")
        relay.terminate()
        assert relay.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            told = (await relay.stderr.read()).decode()
    assert "anybody may do everything here" in told


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--issuers-file", "nowhere"], "issuers file nowhere: "),
        (["--issuers-file", "issuers.toml"], "issuers without an audience"),
        (["--token-file", "nowhere"], "token file nowhere: "),
        (["--token-file", "open.token"], "expected 0600"),
        (["--token-file", "door.token"], "the token allows no SUBSCRIBE_NAMESPACE"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_before_anything_starts(
    desk: Desk, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    issuer, folder = Issuer(), Path(desk.folder)
    issuer.issuers_file(folder)
    issuer.file(folder, "door.token", issuer.issue(None))
    issuer.file(folder, "open.token", issuer.issue()).chmod(0o644)

    assert main(["relay", "--listen", "127.0.0.1:0", *listening(desk), *flags]) == 2
    line = capsys.readouterr().err
    assert complaint in line
    assert line.count("\n") == 1
