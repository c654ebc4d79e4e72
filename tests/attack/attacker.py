"""The attacker, as a process of its own: attacks side by side until its time is over.

Prints what came back as one JSON object: by attack, how often each answer came.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import structlog

from kvcs.trust.tokens import CAT_TOKEN_TYPE
from moqt.aio import ClientTls
from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken
from tests.attack.attacks import Target, attack_until_cancelled


async def run(options: dict[str, object]) -> dict[str, dict[str, int]]:
    """Attack; return what came back."""
    target = Target(
        address=(str(options["host"]), int(str(options["port"]))),
        tls=ClientTls(ca_file=Path(str(options["ca_file"]))),
        prefix=TrackNamespace(tuple(bytes.fromhex(f) for f in options["prefix"])),  # type: ignore[attr-defined]  # a list
        token=(
            AuthorizationToken.use_value(CAT_TOKEN_TYPE, bytes.fromhex(str(options["token"])))
            if options["token"]
            else None
        ),
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(float(str(options["seconds"]))), asyncio.TaskGroup() as group:
            # Each from an address of its own, or one that is refused for a while stops them all.
            for number, which in enumerate(options["attacks"]):  # type: ignore[arg-type, var-annotated]  # a list
                alone = replace(target, source=f"127.0.{number + 1}.1")
                group.create_task(attack_until_cancelled(which, alone))
    answers: dict[str, dict[str, int]] = defaultdict(dict)
    for (attack, answer), count in sorted(target.answers.items()):
        answers[attack][answer] = count
    return answers


def main() -> None:
    """Read what to do from the one argument, as JSON."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    # An attacker has machines of its own. Here it gets what the others leave, and that is plenty.
    os.nice(10)
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
