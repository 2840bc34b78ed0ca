"""A relay that runs alone: its door on a socket of its own, `/health` and `/metrics`."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from kvasir_core.errors import KvasirError
from kvasir_rt.bridge.errors import json_response, on_http_exception
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.server import allow_descriptors, url_of
from kvasir_rt.hub.server import HubServer
from kvasir_rt.relay.app import RelayApp
from kvasir_rt.relay.dial import RELAY_PATH
from kvasir_rt.relay.gate import ASK_S_MAX, RemoteGate
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.relay.meters import metrics_of
from kvasir_rt.relay.port import OneRelay, RelayPort
from kvasir_rt.relay.relay import Relay
from kvasir_rt.swarm.hub_http import HubError, HubHttp, HubRefused
from kvasir_rt.swarm.protocol import DispatchMap
from kvasir_scenario.ending import heeded_stops

CLOSING_S = 5.0


class TokenError(KvasirError):
    """The hub refuses the service token: no worker could ever be let in."""


def run_relay(
    hub: str, token: str, listener: socket.socket, *, nats: str | None, credentials: str | None
) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status.

    Args:
        hub: `http(s)://HOST:PORT`.
        token: The hub's service token.
        listener: Bound.
        nats: Where other relays are found; None: there are none.
        credentials: A NATS credentials file.

    Raises:
        TokenError: The hub refuses the token.
        PortError: NATS cannot be reached.
    """
    return asyncio.run(_run(hub, token, listener, nats, credentials))


async def _run(
    hub: str, token: str, listener: socket.socket, nats: str | None, credentials: str | None
) -> int:
    stop = asyncio.Event()
    for number in heeded_stops():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gate = RemoteGate(hub, token)
    limits = RelayLimits()
    app = RelayApp(Relay(limits, _port(nats, credentials)), gate)
    connections = limits.workers_max + limits.coordinators_max + limits.knocking_max
    allow_descriptors(connections)
    server = HubServer(_routes(app), listener, Limits(connections_max=connections))
    try:
        await _check_token(hub, token)
        await app.relay.open()
        print(f"{url_of(listener).replace('http', 'ws', 1)}{RELAY_PATH}", flush=True)
        serving = asyncio.create_task(server.serve())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await app.close()
        server.stop()
        await serving
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await gate.close()
    return 0


async def _check_token(hub: str, token: str) -> None:
    """A question that needs the token. A hub that is away may come later."""
    http = HubHttp(hub, ASK_S_MAX)
    path, query = "/api/expert-dispatch-map", {"model": "any"}
    try:
        await http.ask(DispatchMap, "GET", path, token=token, query=query)
    except HubRefused as refused:
        if refused.status in (401, 403):
            raise TokenError(
                f"--hub: {hub} refuses the service token ({refused}); give the hub's own with "
                "--service-token-file or KVASIR_HUB_TOKEN"
            ) from None
    except HubError as error:
        print(f"the hub does not answer ({error}); no worker is let in until it does",
              file=sys.stderr, flush=True)  # fmt: skip
    finally:
        await http.close()


def _port(nats: str | None, credentials: str | None) -> RelayPort:
    if nats is None:
        return OneRelay()
    from kvasir_rt.relay.nats_port import NatsPort

    return NatsPort(nats, credentials)


class _Figures(Collector):
    def __init__(self, app: RelayApp) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        yield from metrics_of(self._app.figures())


def _routes(app: RelayApp) -> Starlette:
    registry = CollectorRegistry()
    registry.register(_Figures(app))

    async def health(_request: Request) -> Response:
        return json_response({"status": "ok"})

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        WebSocketRoute(RELAY_PATH, app),
    ]
    return Starlette(routes=routes, exception_handlers={404: on_http_exception})
