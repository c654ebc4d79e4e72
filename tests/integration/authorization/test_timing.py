"""Whether the time of a refusal tells what exists: asked 2,000 times, turn about by chance."""

import asyncio
import math
import random
import time
from pathlib import Path

import pytest

from moqt.aio import MoqtConnection
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.errors import RequestRejected
from moqt.names import FullTrackName, TrackNamespace
from tests.integration.authorization.desks import KINDS, desk
from tests.issuing import Issuer

pytestmark = [pytest.mark.network, pytest.mark.slow]
TRIALS = 2000
#: Of a rank test, in standard deviations. By chance it is passed once in 10**9 times; what can be
#: told apart by its time in so many trials passes it by far.
BOUND = 6.0


async def refusal_s(conn: MoqtConnection, track: FullTrackName) -> float:
    """Return how long a refusal takes."""
    began = time.perf_counter()
    with pytest.raises(RequestRejected) as refused:
        await conn.track_status(track)
    assert refused.value.code == RequestErrorCode.UNAUTHORIZED
    return time.perf_counter() - began


def rank_score(ones: list[float], others: list[float]) -> float:
    """Return by how many standard deviations the ranks of two samples differ (Mann, Whitney)."""
    ranked = sorted([(value, 0) for value in ones] + [(value, 1) for value in others])
    total = sum(rank for rank, (_, which) in enumerate(ranked, start=1) if which == 0)
    n, m = len(ones), len(others)
    mean, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return (total - mean) / deviation


def test_a_difference_is_found_where_there_is_one() -> None:
    rng = random.Random(1)
    same = [rng.gauss(1.0, 0.2) for _ in range(TRIALS)]
    other = [rng.gauss(1.0, 0.2) for _ in range(TRIALS)]

    assert abs(rank_score(same, other)) < BOUND
    assert abs(rank_score(same, [value + 0.05 for value in other])) > BOUND


@pytest.mark.parametrize("kind", KINDS)
async def test_the_time_of_a_refusal_does_not_tell_what_exists(
    kind: str, certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer = Issuer()
    async with asyncio.timeout(55), desk(kind, certificates, tmp_path, issuer) as place:
        there = place.name.namespace
        elsewhere = TrackNamespace((*there.fields[:-1], bytes(16)))
        names = {True: FullTrackName(there, b"manifest"), False: FullTrackName(elsewhere, b"x" * 8)}
        turns = [True, False] * TRIALS
        random.Random(0).shuffle(turns)
        took: dict[bool, list[float]] = {True: [], False: []}
        async with place.dial(issuer.issue(None)) as conn:
            for exists in turns:
                took[exists].append(await refusal_s(conn, names[exists]))

    score = rank_score(took[True], took[False])
    medians = {exists: sorted(times)[TRIALS // 2] * 1e6 for exists, times in took.items()}
    print(
        f"{kind}: {TRIALS} refusals each, median {medians[True]:.0f} us of what exists, "
        f"{medians[False]:.0f} us of what does not, {score:+.2f} standard deviations apart"
    )
    assert abs(score) < BOUND
