"""``kvcs ping``: whether a daemon serves, in an exit status that health checks understand."""

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest

from kvcs.cli.main import main, make_parser
from kvcs.cli.ping import target
from kvcs.config import Address, PingSettings
from kvcs.errors import ConfigError
from moqt.aio import ClientTls
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import PATIENCE_S

pytestmark = pytest.mark.network


async def ping(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return exit status, standard output and standard error."""
    async with started(["ping", *arguments]) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_a_producer_that_serves_is_told_from_its_port_and_from_its_uri(desk: Desk) -> None:
    async with started([*desk.produce(), "--json"]) as process:
        port = (await event_of(process, "listening"))["port"]
        uri = f"moqt://127.0.0.1:{port}/"
        by_port = await ping("--listen", f":{port}", "--json")
        by_uri = await ping(uri, "--ca-file", str(desk.certificates.ca_file))
        unbelieved = await ping(uri)

    assert by_port[0] == by_uri[0] == 0
    told = json.loads(by_port[1])
    assert (told["event"], told["uri"]) == ("serves", uri)
    assert by_uri[1].startswith(f"serves: uri={uri} ")
    # A URI may lead anywhere, so that who answers must show who it is.
    assert unbelieved[0] == 11
    assert unbelieved[2].splitlines()[-1].startswith("kvcs: TLS with ")


async def test_a_relay_that_serves_is_told(desk: Desk) -> None:
    files = desk.certificates
    command = [
        "relay", "--json", "--listen", "127.0.0.1:0",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip
    async with started(command) as process:
        port = (await event_of(process, "listening"))["port"]

        assert (await ping("--listen", f":{port}"))[0] == 0


def test_nobody_there_is_told_within_the_time_to_connect(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        port = hole.getsockname()[1]

        status = main(["ping", "--listen", f"127.0.0.1:{port}", "--connect-timeout-s", "0.3"])

    assert status == 11
    out, err = capsys.readouterr()
    assert out == ""
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "listen"),
        (["https://relay/"], "https://relay/"),
        (["moqt://relay:66000/"], "66000"),
        (["--listen", "4443"], "listen"),
    ],
)
def test_whom_it_cannot_ask_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], named: str
) -> None:
    assert main(["ping", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "uri"),
    [
        (Address("::", 4443), "moqt://127.0.0.1:4443/"),
        (Address("0.0.0.0", 4443), "moqt://127.0.0.1:4443/"),
        (Address("::1", 4443), "moqt://[::1]:4443/"),
        (Address("192.0.2.1", 4443), "moqt://192.0.2.1:4443/"),
    ],
)
def test_a_listener_on_every_address_is_asked_over_loopback(listen: Address, uri: str) -> None:
    assert target(None, PingSettings(listen=listen)) == (uri, ClientTls(verify=False))


def test_a_uri_beats_the_own_port_and_is_verified() -> None:
    settings = PingSettings(listen=Address("::", 1))

    assert target("moqt://relay:2/", settings) == ("moqt://relay:2/", ClientTls())
    with pytest.raises(ConfigError, match="no host"):
        target("moqt:///", settings)


def test_it_knows_no_setting_that_other_commands_do_not() -> None:
    """Else a variable or a name in the file would be refused when another command is told it."""
    args = make_parser().parse_args(["ping", "--listen", ":4443"])

    assert args.listen == ":4443"
