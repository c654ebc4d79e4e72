"""Whatever the description allows, and what it forbids, asked of both services at once.

The services run in a thread of their own, since what asks here waits for each answer.
"""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.core.result import Ok

from kvcs.kvsp.http.records import Runs
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import COMPAT, SCOPE, WRITER, Stage, on_stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "kvsp-http.openapi.json"
OPERATIONS = [
    result.ok()
    for result in schemathesis.openapi.from_path(DOCUMENT).get_all_operations()
    if isinstance(result, Ok)
]
#: Requests for each operation and each way to ask.
EXAMPLES = 60
HOLDER, PUBLISHED = "68" * 16, "70" * 16

pytestmark = pytest.mark.network


@contextmanager
def serving(files: CertificateFiles) -> Iterator[Stage]:
    """Run the services in a thread, as long as the block runs."""
    loop = asyncio.new_event_loop()
    found: list[Stage] = []
    ready, until = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with on_stage(files, patience_s=600) as stage:
            found.append(stage)
            ready.set()
            await until.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(until.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def stage(certificates: CertificateFiles) -> Iterator[Stage]:
    with serving(certificates) as found:
        yield found


@pytest.fixture(scope="module")
def session(stage: Stage) -> Iterator[requests.Session]:
    with requests.Session() as made, pytest.MonkeyPatch.context() as patch:
        # Some checks ask by themselves, with a session of their own.
        patch.setenv("REQUESTS_CA_BUNDLE", str(stage.files.ca_file))
        yield made


def about_what_there_is(case: Any, stage: Stage, data: st.DataObject) -> None:
    """Have a question be about the scope of the token, and sometimes about what is held.

    And mend what a schema cannot say: that runs ascend, and that a URI is of the scope of its path.
    """
    scope, compat = SCOPE.scope_id.hex(), COMPAT.hex()
    case.path_parameters |= {"scope": scope, "compatibility": compat}
    if data.draw(st.sampled_from([True, True, False])):
        there = {"key": stage.names[1].block_key.hex(), "layer": 2, "holder": HOLDER}
        there["published"] = PUBLISHED
        case.path_parameters |= {n: v for n, v in there.items() if n in case.path_parameters}
        case.query.pop("publication", None)
        case.headers.pop("If-Match", None)
    body = case.body
    if isinstance(body, dict):
        if "layers" in body:
            layers = {int(layer) for pair in body["layers"] for layer in pair}
            body["layers"] = Runs.of(sorted(layers)[:8]).json()
        if "uri" in body:
            body["uri"] = re.sub(
                "#kvcs-1:[0-9a-f]+/[0-9a-f]+", f"#kvcs-1:{scope}/{compat}", body["uri"]
            )
            if body["uri"].startswith("moqt"):
                body.pop("publication", None)
            body["first_block"] = min(body["first_block"], 1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.definition.raw["operationId"])
def test_the_services_do_what_their_description_says(
    operation: Any, mode: GenerationMode, stage: Stage, session: requests.Session
) -> None:
    statuses: Counter[int] = Counter()
    # A precondition may fail, a range be behind the end, whatever their form.
    is_octets = operation.method in ("get", "head")
    passed_over = [positive_data_acceptance] if is_octets else []

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE:
            about_what_there_is(case, stage, data)
        case.headers["Authorization"] = f"Bearer {WRITER}"
        response = case.call_and_validate(
            base_url=stage.base, session=session, excluded_checks=passed_over
        )
        statuses[response.status_code] += 1

    there: Any
    if operation.path.endswith(("/lease", "/publications/{published}")):
        model = operation.path.partition("{scope}")[0] + f"{SCOPE.scope_id.hex()}/{COMPAT.hex()}"
        there = {"uri": "https://host", "first_block": 0, "keys": ["6b" * 32], "layers": [[0, 0]]}
        session.put(
            f"{stage.base}{model}/holders/{HOLDER}",
            json=there
            | {"encodings": ["raw"], "complete": True, "lease_s": 3600, "publication": PUBLISHED},
            headers={"Authorization": f"Bearer {WRITER}"},
        ).raise_for_status()
    ask()
    if mode is GenerationMode.POSITIVE:
        assert any(status < 300 for status in statuses), f"nothing was ever right: {statuses}"


def test_every_operation_is_asked() -> None:
    described = {
        (method, path)
        for path, item in json.loads(DOCUMENT.read_text())["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert {(one.method, one.path) for one in OPERATIONS} == described
