"""Real rings for tests: stage processes that hold and hash, and clients that collect tokens."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvasir_core.microbatch import FinishReason
from kvasir_core.plan import Plan, split_evenly
from kvasir_rt import wire
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.fixed_stage import fixed_tokens
from kvasir_rt.member import CrewOptions
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.submission import EndEvent, EngineEvent, Submission, TokenEvent
from kvasir_rt.switchboard import LineOptions

VOCAB = 50_000
WAIT_S = 60.0


def plan_of(stages: int, **changes: object) -> Plan:
    numbers: dict[str, object] = {
        "layers": split_evenly(stages, stages),
        "row_width": 64,
        "micro_batch_width": 8,
        "window": stages,
        "window_max": stages,
        "running_max": 64,
        "context": 512,
        "kv_tokens": (100_000,) * stages,
        "hidden": 8,
        "element_bytes": 2,
    }
    return Plan(**(numbers | changes))  # type: ignore[arg-type]


def engine_of(
    plan: Plan,
    *,
    hold_s: float | Sequence[float] = 0.0,
    events: Path | None = None,
    restarts_max: int = 10,
) -> Engine:
    holds = [hold_s] * plan.stages if isinstance(hold_s, int | float) else hold_s
    compute = wire.FixedSpec(tuple(round(hold * 1e9) for hold in holds), VOCAB)
    crew = CrewOptions(
        plan=plan,
        dtype="float16",
        compute=compute,
        secret="only for this test",
        restarts_max=restarts_max,
    )
    return Engine(EngineOptions(lines=LineOptions(crew=crew), events=events))


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


class Clients:
    """Submits requests with known answers and collects what comes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, EndEvent] = {}
        self.prompts: dict[int, list[int]] = {}
        self.errors: list[str] = []
        self._changed = threading.Condition()

    def submit(
        self,
        request: int,
        prompt: list[int],
        tokens: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        sampling: SamplingParams | None = None,
    ) -> None:
        self.prompts[request] = prompt
        self.tokens[request] = []
        self.engine.submit(
            Submission(
                request_id=request,
                prompt_ids=prompt,
                output_tokens_max=tokens,
                sampling=sampling or SamplingParams(),
                stop_ids=stop_ids,
                on_event=self._take,
            )
        )

    def submit_many(self, count: int, tokens: int, *, prompt: int = 5, first: int = 0) -> None:
        for request in range(first, first + count):
            self.submit(request, [request + 1 + 7 * i for i in range(prompt)], tokens)

    def _take(self, event: EngineEvent) -> None:
        with self._changed:
            if event.request_id in self.ends:
                self.errors.append(f"{event} after the end")
            if isinstance(event, TokenEvent):
                mine = self.tokens[event.request_id]
                if event.index != len(mine):
                    self.errors.append(f"{event}, but {len(mine)} tokens were given")
                mine.append(event.token)
            else:
                self.ends[event.request_id] = event
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
        """Until `condition` holds, looked at after every event."""
        with self._changed:
            assert self._changed.wait_for(condition, limit_s), f"{what}: not within {limit_s} s"

    def wait_all(self, limit_s: float = WAIT_S) -> None:
        self.wait(lambda: len(self.ends) == len(self.prompts), "all requests end", limit_s)

    @property
    def total(self) -> int:
        return sum(map(len, self.tokens.values()))

    def check(self, *, requests: Sequence[int] | None = None) -> None:
        """Every request's tokens are those of an undisturbed ring, whatever happened."""
        assert not self.errors
        for request in requests if requests is not None else list(self.prompts):
            assert self.ends[request].reason in {FinishReason.LENGTH, FinishReason.STOP}
            self.check_prefix(request)

    def check_prefix(self, request: int) -> None:
        got = self.tokens[request]
        stages = self.engine.plan.stages
        right = fixed_tokens(self.prompts[request], len(got), stages=stages, vocab=VOCAB)
        assert got == right, f"request {request}"


def until(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Poll a condition that nothing announces."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
