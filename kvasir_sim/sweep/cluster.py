"""Who runs the points: actors of a Ray cluster, one per core, kept warm (extra `cluster`).

Ray places them and carries two texts per point. It pickles what it carries, as it always does: use
a cluster that you trust. Kvasir must be installed on every node, in the same version, and files
that the scenario names must lie at the same place there.
"""

import json
from collections import deque
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

from kvasir_core.errors import ScenarioError
from kvasir_scenario.ray_cluster import connected
from kvasir_sim.sweep.evaluate import Evaluator, Reply, Task
from kvasir_sim.sweep.points import Source
from kvasir_sim.sweep.pool import JOBS_MAX, TRIES, lost

START_S_MAX = 120.0  # For the first actor; a cluster may be busy, but not for ever.


class RemoteEvaluator:
    """An evaluator on some node."""

    def __init__(self, source_json: str) -> None:
        self._evaluator = Evaluator(source_json)

    def version(self) -> str:
        """Of Kvasir on that node."""
        return version("kvasir")

    def evaluate(self, task_json: str) -> str:
        return self._evaluator.evaluate(task_json)


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor, and what it was asked: None stands for its version."""

    handle: Any
    asked: deque[tuple[Any, Task | None]] = field(default_factory=deque)


class RayPool:
    """Actors on a running Ray cluster; they end when this object is left.

    Raises:
        ScenarioError: Ray is not installed, there is no such cluster, or a node cannot take part.
    """

    def __init__(self, source: Source, address: str, jobs: int | None) -> None:
        self._source = json.dumps(asdict(source))
        self._ray = connected(address)
        cores = int(self._ray.cluster_resources().get("CPU", 0))
        if not cores:
            raise ScenarioError(f"--cluster {address}: the cluster has no CPU to give")
        self.jobs = min(cores if jobs is None else jobs, JOBS_MAX)
        self._actors: list[_Actor] = []
        self._tries: dict[int, int] = {}
        self._replies: deque[Reply] = deque()

    def __enter__(self) -> Self:
        for _ in range(self.jobs):
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._ray.shutdown()

    @property
    def open(self) -> int:
        asked = (task for actor in self._actors for _, task in actor.asked)
        return len(self._replies) + sum(task is not None for task in asked)

    def has_room(self, ahead: int) -> bool:
        if not any(map(_is_ready, self._actors)):
            self._listen(START_S_MAX)
        return any(_is_ready(actor) and len(actor.asked) < ahead for actor in self._actors)

    def submit(self, task: Task) -> None:
        actor = min(filter(_is_ready, self._actors), key=lambda actor: len(actor.asked))
        actor.asked.append((actor.handle.evaluate.remote(task.to_json()), task))

    def receive(self) -> Reply:
        assert self.open, "no reply is due"
        while not self._replies:
            self._listen(None)
        return self._replies.popleft()

    def _start(self) -> None:
        handle = self._ray.remote(num_cpus=1)(RemoteEvaluator).remote(self._source)
        self._actors.append(_Actor(handle, deque([(handle.version.remote(), None)])))

    def _listen(self, seconds: float | None) -> None:
        """Take in what has come, at least one answer."""
        firsts = {actor.asked[0][0]: actor for actor in self._actors if actor.asked}
        done, _ = self._ray.wait(list(firsts), timeout=seconds)
        if not done:
            raise ScenarioError(
                f"--cluster: no node began to work within {seconds:g} s; is it busy?"
            )
        for answer in done:
            self._take(firsts[answer], answer)

    def _take(self, actor: _Actor, answer: Any) -> None:
        try:
            said = self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            self._bury(actor, " ".join(str(error).split())[:200])
            return
        _, task = actor.asked.popleft()
        if task is not None:
            self._replies.append(Reply.from_json(said))
        elif said != version("kvasir"):
            raise ScenarioError(
                f"--cluster: a node has Kvasir {said}, here is {version('kvasir')}; "
                "install the same everywhere"
            )

    def _bury(self, actor: _Actor, why: str) -> None:
        """An actor died, perhaps with its node: another takes its place and its tasks."""
        self._actors.remove(actor)
        tasks = [task for _, task in actor.asked if task is not None]
        if any(task is None for _, task in actor.asked):
            raise ScenarioError(
                f"--cluster: a node could not begin: {why}; is Kvasir installed on every node?"
            )
        self._start()
        if tasks:
            suspect = tasks[0].number
            self._tries[suspect] = self._tries.get(suspect, 0) + 1
            if self._tries[suspect] >= TRIES:
                self._replies.append(lost(tasks.pop(0).number, "on the cluster"))
        for task in tasks:
            if not any(map(_is_ready, self._actors)):
                self._listen(START_S_MAX)
            self.submit(task)


def _is_ready(actor: _Actor) -> bool:
    return not actor.asked or actor.asked[0][1] is not None
