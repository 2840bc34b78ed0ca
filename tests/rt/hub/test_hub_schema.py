"""The OpenAPI description against the hub itself: generated requests, true answers."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvasir_rt.hub.limits import HubLimits
from tests.rt.hub.hubs import MODEL, Coordinator, RunningHub, Worker, bearer, running_hub

EXAMPLES = 6  # Per operation, role and mode: some 400 requests in all.
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
LIMITS = HubLimits(
    node_rate_per_s=1e6, node_burst=10**6, stranger_rate_per_s=1e6, stranger_burst=10**6
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with (
        running_hub(tmp_path_factory.mktemp("hub"), limits=LIMITS) as running,
        Coordinator(busy=3) as coordinator,
    ):
        running.register(coordinator)
        yield running


@pytest.fixture(scope="module")
def api(hub: RunningHub) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{hub.url}/openapi.json")


class Caller:
    """Sends generated requests as one role and checks each answer against the description."""

    def __init__(self, hub: RunningHub, role: str) -> None:
        self.worker = Worker(hub).login()
        tokens = {"stranger": None, "node": self.worker.token, "service": hub.token}
        self.headers = bearer(tokens[role])
        self.statuses: Counter[int] = Counter()
        self.real = {
            "model": MODEL, "worker": self.worker.node, "node": self.worker.node,
            "coordinator": "c", "segments": [[0, 0, 8]], "claim": None, "holds": [],
            "public_key": self.worker.key, "layer": 0, "begin": 0, "end": 4,
        }  # fmt: skip

    def send(self, case: Any, *, is_real: bool) -> None:
        if is_real:
            for part in (case.body, case.query, case.path_parameters):
                if isinstance(part, dict):
                    part.update({name: self.real[name] for name in part if name in self.real})
        response = case.call(headers=self.headers)
        self.statuses[response.status_code] += 1
        # Made to be wrong by the schema, and then perhaps put right again.
        checks = [c for c in CHECKS if not is_real or c is not negative_data_rejection]
        case.validate_response(response, checks=checks)


@pytest.mark.parametrize(
    ("role", "mode"), [("stranger", POSITIVE), ("node", POSITIVE), ("node", NEGATIVE),
                       ("service", POSITIVE), ("service", NEGATIVE)],
)  # fmt: skip
def test_generated_requests_get_the_answers_that_are_described(
    hub: RunningHub,
    api: schemathesis.BaseSchema,
    role: str,
    mode: GenerationMode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    caller = Caller(hub, role)
    for result in api.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if mode is NEGATIVE and not (operation.query or operation.body):
            continue  # Nothing in it can be wrong.

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(mode), is_real=strategies.booleans())
        def one(case: Any, is_real: bool) -> None:
            caller.send(case, is_real=is_real)

        one()
    if role == "stranger":
        assert caller.statuses[401] > 20
    elif mode is POSITIVE:
        assert caller.statuses[200] > 20
    assert caller.statuses.total() > 30
    hub.on_loop(hub.service.control.hub.check_invariants)
    assert Worker(hub).login().cover([0, 0, 8])["ok"]
    assert not [r for r in caplog.records if "crashed" in r.message]


def test_every_path_of_the_design_is_described(hub: RunningHub) -> None:
    paths = hub.get("/openapi.json").json()["paths"]
    designed = {
        ("get", "/api/moe/recruitment"),
        ("get", "/api/expert-demand"),
        ("post", "/api/expert-volunteer"),
        ("post", "/api/expert-coverage"),
        ("get", "/api/expert-dispatch-map"),
        ("get", "/api/models/{model}/expert-shard"),
        ("get", "/api/expert-relay"),
    }
    found = {(method, path) for path, methods in paths.items() for method in methods}
    assert designed <= found
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"], (method, path)
            assert operation["description"], (method, path)


def test_the_page_names_every_path_and_needs_nothing_from_elsewhere(hub: RunningHub) -> None:
    page = hub.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in hub.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in page.text
    assert not re.search(r"<script|<link|src=|url\(|href=[\"']?http", page.text)


def test_the_schema_needs_no_running_hub(tmp_path: Path) -> None:
    with running_hub(tmp_path, has_model=False) as hub:
        assert hub.get("/openapi.json").json()["info"]["title"] == "Kvasir hub"
