"""A short siege; two minutes of it are `scripts/attack`."""

from pathlib import Path

import pytest

from tests.attack.attacks import ATTACKS
from tests.attack.siege import TARGETS, Report, siege

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.aioquic, pytest.mark.timeout(400)]

#: What each attack must be told, at whomever it is made: that is how it is seen to reach its limit.
TOLD = {
    "filters": "INVALID_FILTER",
    "halves": "stopped EXCESSIVE_LOAD",
    "handshakes": "INITIAL",
    "real-updates": "closed TOO_MANY_REQUEST_UPDATES",
    "requests": "DOES_NOT_EXIST",
    "tokens": "closed AUTH_TOKEN_CACHE_OVERFLOW",
    "unread": "accepted",
}
#: And where tokens are asked for, of whose right the attacker's is none.
TOLD_STRANGERS = (
    TOLD
    | dict.fromkeys(["filters", "forgeries", "requests", "unread"], "UNAUTHORIZED")
    | {"real-updates": "UNAUTHORIZED"}
)


def described(report: Report) -> str:
    return f"{report.target}: {report.answers}"


async def test_an_attacker_gets_documented_answers_and_a_consumer_gets_its_cache(
    tmp_path: Path,
) -> None:
    # Streams that are left open are given up after ten seconds.
    reports = await siege(25.0, TARGETS, sorted(ATTACKS), tmp_path)

    assert [report.target for report in reports] == list(TARGETS)
    for report in reports:
        assert report.findings == [], described(report)
        assert report.retrievals > 2, described(report)
        for attack, answer in (TOLD_STRANGERS if report.target == "guarded" else TOLD).items():
            assert report.answers.get(attack, {}).get(answer), f"{attack}: {described(report)}"
