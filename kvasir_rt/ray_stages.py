"""`kvasir-rt serve --launcher ray`: the stages as actors of a Ray cluster, one stage each.

Ray only finds a place: an actor joins the ring as `kvasir-rt stage --join` does, over CURVE with
the ring's token, and tokens and boundaries travel our own lines. A stage that dies is started again
by its actor, an actor that dies (with its node, perhaps) by the watch here, by the same rule; the
bridge treats both as any lost stage. Kvasir must be installed on every node, and the model must lie
at the same path there.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_core.errors import KvasirError
from kvasir_rt.join import RESTART_WINDOW_S, RESTARTS_MAX, RingKeys, join_ring
from kvasir_rt.model_files import find_model
from kvasir_rt.ring_errors import JoinError
from kvasir_scenario.ray_cluster import connected, node_address

if TYPE_CHECKING:
    from kvasir_rt.serve import ServeOptions

WATCH_S = 0.5
BRIDGE_WAIT_S = 60.0  # A stage waits so long for its bridge; loading a large model is not in it.
log = logging.getLogger("kvasir.ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What an actor needs to join: all texts."""

    bridge: str
    token: str
    model: str

    def __repr__(self) -> str:
        return f"Seat(bridge={self.bridge})"  # The token is a password.


class StageActor:
    """One stage, on whatever node Ray has put it."""

    def run(self, bridge: str, token: str, model: str) -> str:
        """Be a stage until the ring ends; returns why it ended before, or nothing."""
        try:
            join_ring(
                bridge,
                f"{node_address()}:0",
                token=token,
                model=find_model(model),
                wait_s=BRIDGE_WAIT_S,
            )
        except (KvasirError, OSError) as error:
            return str(error)
        return ""


class RayStages:
    """The actors, and the thread that replaces those that die."""

    def __init__(self, ray: Any, seat: Seat, count: int, resources: dict[str, int]) -> None:
        self._ray = ray
        self._seat = seat
        self._remote = ray.remote(**resources, scheduling_strategy="SPREAD")(StageActor)
        self._actors: dict[Any, Any] = {}  # What it will return, and the actor.
        self._is_over = threading.Event()
        self._deaths: deque[float] = deque()
        self.failure = ""  # Why there are no successors any more.
        for _ in range(count):
            self._start()
        self._thread = threading.Thread(target=self._watch, name="ray stages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No actor is left, and no stage."""
        self._is_over.set()
        self._thread.join()
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()

    def _start(self) -> None:
        seat = self._seat
        actor = self._remote.remote()
        self._actors[actor.run.remote(seat.bridge, seat.token, seat.model)] = actor

    def _watch(self) -> None:
        """An actor that ends before the ring does has a successor, as a stage process has."""
        while self._actors and not self._is_over.wait(WATCH_S):
            done, _ = self._ray.wait(list(self._actors), timeout=0)
            for answer in done:
                actor = self._actors.pop(answer)
                try:
                    why = self._ray.get(answer)
                except self._ray.exceptions.RayError as error:
                    why = " ".join(str(error).split())[:200]
                self._ray.kill(actor)
                self._replace(why)

    def _replace(self, why: str) -> None:
        log.warning("an actor with a stage ended: %s", why or "it was told to leave")
        self._deaths.append(time.monotonic())
        while self._deaths[0] < self._deaths[-1] - RESTART_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) <= RESTARTS_MAX:
            self._start()
        elif not self.failure:
            self.failure = f"gave up: {len(self._deaths)} actors ended; the last: {why}"
            os.kill(os.getpid(), signal.SIGTERM)  # The server drains and ends.


@contextmanager
def placed_on_ray(
    options: "ServeOptions", address: str, say: Callable[[str], None]
) -> Iterator["ServeOptions"]:
    """Options under which every stage joins from the cluster; the stages run meanwhile.

    Raises:
        ScenarioError: There is no such cluster, or no Ray.
    """
    find_model(options.model)  # A wrong name is told before anything is started.
    ray = connected(address)
    try:
        stages = options.ring.stages
        has_gpus = any(device.startswith("cuda") for device in options.ring.devices)
        resources = {"num_cpus": 1, "num_gpus": int(has_gpus)}
        with tempfile.TemporaryDirectory(prefix="kvasir-ray-") as folder:
            keys = Path(folder) / "ring_keys"  # Made here, so that stages have the token now.
            token = RingKeys.load_or_create(keys).token
            bridge = f"{node_address()}:{_free_port(node_address())}"
            path = Path(options.model)
            model = str(path.absolute()) if path.exists() else options.model
            placed = RayStages(
                ray, Seat(bridge=bridge, token=token, model=model), stages, resources
            )
            say(f"{stages} stages are placed on the Ray cluster at {address}")
            try:
                yield replace(
                    options, remote=frozenset(range(stages)), ring_listen=bridge, ring_keys=keys
                )
            finally:
                placed.close()
                if placed.failure:
                    raise JoinError(placed.failure)
    finally:
        ray.shutdown()


def _free_port(host: str) -> int:
    """A port that is free now; the bridge binds it a moment later, and says so if it cannot."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
