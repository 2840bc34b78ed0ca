"""A scenario's `experts` for real: its stages share them with the workers of a running hub.

Of the section, `overlap` and `coordinator` hold for both shells; `workers`, `hub`, `routing` and
`local` describe an imagined swarm, and here the real one answers. A run has no bridge, so its slots
are shown by a small server of its own.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from kvasir_rt import wire
from kvasir_rt.bridge.ring_view import Json, slots_view
from kvasir_rt.engine import Engine
from kvasir_rt.hub.dials import Origin
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.scenario_ring import RealRing
from kvasir_rt.serve_experts import rows_dtype
from kvasir_scenario.schema import Scenario
from kvasir_scenario.swarm_policy import coordinator_numbers


@dataclass(frozen=True, slots=True)
class HubAccess:
    """A hub on this machine, and its service token."""

    hub: Origin
    service_token: str = field(repr=False)


def with_experts(ring: RealRing, scenario: Scenario, access: HubAccess, slots_url: str) -> RealRing:
    """The ring with coordinators in its stages.

    Raises:
        ScenarioError: The model is dense, or the policy contradicts itself.
    """
    experts, compute = scenario.experts, ring.compute
    assert experts is not None
    assert isinstance(compute, wire.ModelSpec)
    try:
        policy = replace(coordinator_numbers(experts.coordinator), rule=experts.coordinator.policy)
    except ValueError as error:
        raise scenario.error("experts.coordinator", str(error)) from None
    spec = wire.ExpertsSpec(
        hub=str(access.hub),
        relay=None,
        service_token=access.service_token,
        model=scenario.name,
        brings_file=True,
        slots_url=slots_url,
        slots_key=None,
        overlap=experts.overlap,
        dtype=rows_dtype(ring.dtype),
        policy=policy,
        seed=scenario.run.seed % (1 << 31),
        events=None,
    )
    return replace(ring, compute=msgspec.structs.replace(compute, experts=spec))


class ShownSlots:
    """What the server shows: nothing before there is an engine."""

    def __init__(self) -> None:
        self.url = ""
        self.engine: Engine | None = None

    def answer(self, path: str) -> tuple[int, list[Json]]:
        """Status and body."""
        if path != "/slots":
            return 404, []
        try:
            return (200, slots_view(self.engine.snapshot())) if self.engine else (503, [])
        except RingDown:
            return 503, []


@contextmanager
def slots_server() -> Iterator[ShownSlots]:
    """`GET /slots` at loopback, as a bridge answers it."""
    shown = ShownSlots()

    class Slots(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, found = shown.answer(self.path)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slots)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        shown.url = f"http://127.0.0.1:{server.server_port}"
        yield shown
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
