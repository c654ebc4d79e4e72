"""``kvcs check``: what a command would accept, and why not, from the same settings."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from kvcs.cli.findings import Finding, State, findings_of
from kvcs.cli.output import Output
from kvcs.config import SETTINGS, CommonSettings, add_settings, settings_from
from kvcs.errors import ConfigError

DESCRIPTION = """\
Read the settings of another command, from the same flags, environment and file, and all files that
they name, and tell what it would show, whom it would believe and who may come in. Nothing is
listened on, dialled or changed.

  kvcs check relay --config kvcs.toml
  kvcs check produce --listen :4443 --certificate-file cert.pem --key-file key.pem \\
      --scope-file scope.toml --producer-key-file producer.pem

Each line begins with ok; note, for what a person should know; open, where somebody may do something
who has shown nothing; or wrong, for what the command would refuse to start with. No secret is
shown.
"""
EPILOG = """\
Exit status: 0 nothing is wrong; 2 something is. With --strict it is 2 if anything is open as well.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand: those of the command that is checked."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="checked")
    for cls in SETTINGS:
        sub = commands.add_parser(
            cls.table, help=f"check what kvcs {cls.table} is told", allow_abbrev=False
        )
        sub.add_argument("--json", action="store_true", help="print findings as JSON lines")
        sub.add_argument(
            "--strict", action="store_true", help="count what is open as if it were wrong"
        )
        add_settings(sub, cls)
        sub.set_defaults(settings=cls)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    cls: type[CommonSettings] = args.settings
    findings: Sequence[Finding]
    try:
        settings = settings_from(cls, args)
    except ConfigError as exc:
        findings = [Finding("settings", State.WRONG, str(exc))]
    else:
        findings = findings_of(settings, time.time())
    output = Output(as_json=args.json)
    for one in findings:
        if args.json:
            output.tell("finding", topic=one.topic, state=one.state.value, text=one.text)
        else:
            print(f"{one.state.value:<6}{one.topic}: {one.text}")
    count = {state: sum(one.state is state for one in findings) for state in State}
    output.tell("checked", command=cls.table, **{s.value: n for s, n in count.items()})
    bad = count[State.WRONG] + (count[State.OPEN] if args.strict else 0)
    return 2 if bad else 0
