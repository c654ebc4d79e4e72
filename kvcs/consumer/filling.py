"""Bringing what is missing from a block service. Shell.

What is asked for, and what is believed, is decided by :mod:`kvcs.consumer.sections`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial

import structlog

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import FailureReason
from kvcs.consumer.examining import Examined
from kvcs.consumer.failures import Failure
from kvcs.consumer.opening import Job
from kvcs.consumer.sections import (
    Found,
    Place,
    Section,
    SectionKey,
    SectionSource,
    check_section,
    wanted_sections,
)
from kvcs.errors import BadObject, KvcsError, NotFound
from kvcs.kvsp.layout import Layout
from kvcs.profile.naming import DataTrack
from kvcs.telemetry import LogEvent

log = structlog.get_logger("kvcs.consumer")

#: Sections of one request.
AT_ONCE = 256

#: Takes what came of the examination of an Object.
Judge = Callable[[DataTrack, int, int, Examined | BadObject], None]


async def fill(
    source: SectionSource, assembler: Assembler, job: Job, judge: Judge
) -> Failure | None:
    """Have a block service bring what is missing and can be had there.

    A service that gives no sign of life for as long as a request may take is left.

    Args:
        source: The service.
        assembler: How far the publication is.
        job: The retrieval.
        judge: Called with each Object that a section stands for.

    Returns:
        None if everything is there now. Failures are those of nobody having been there, so that
        they hide no failure of a relay.
    """
    keys = job.expected.block_keys
    wanted = wanted_sections(assembler, keys, deterministic=source.deterministic)
    left = list(wanted)
    try:
        while left:
            batch, left = left[:AT_ONCE], left[AT_ONCE:]
            await _bring(source, assembler, job, judge, {key: wanted[key] for key in batch})
    except NotFound as exc:
        return Failure(FailureReason.NOT_FOUND, f"{source.name}: {exc}")
    except (KvcsError, OSError) as exc:  # TimeoutError is an OSError
        text = f"{source.name}: {str(exc) or 'no section in time'}"
        log.info(LogEvent.BLOCKS_MISSED, source=source.name, reason=text)
        return Failure(FailureReason.UNREACHABLE, text, again=True)
    if assembler.is_complete:
        return None
    return Failure(FailureReason.NOT_FOUND, f"{source.name}: not everything is to be had there")


async def _bring(
    source: SectionSource,
    assembler: Assembler,
    job: Job,
    judge: Judge,
    wanted: dict[SectionKey, list[Place]],
) -> None:
    name, patience_s = assembler.publication, job.settings.request_timeout_s
    layout = Layout.of(job.expected.descriptor)
    sections = source.sections(
        name.scope_id, name.compatibility_id, tuple(wanted), layout, name.publication_id
    )
    async with aclosing(sections) as found:
        while True:
            async with asyncio.timeout(patience_s):
                section = await anext(found, None)
            if section is None:
                return
            places = wanted.pop(section.key, None)
            if places is None:
                continue  # nobody asked for it, or it came before
            for one in await _checked(section, places, assembler, job):
                if isinstance(one, Found):
                    octets = len(one.data)
                    judge(*one.place, Examined(one.digest, octets, one.data))
                else:
                    place, why = one
                    judge(*place, why)


async def _checked(
    section: Section, places: Sequence[Place], assembler: Assembler, job: Job
) -> list[Found | tuple[Place, BadObject]]:
    sealed = () if section.sealed is None else section.sealed.objects
    if sum(map(len, (section.k, section.v, *sealed))) < job.settings.large_octets:
        return check_section(section, places, assembler, job.expected)
    loop = asyncio.get_running_loop()
    check = partial(check_section, section, places, assembler, job.expected)
    return await loop.run_in_executor(job.pool, check)
