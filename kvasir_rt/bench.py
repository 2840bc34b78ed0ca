"""`kvasir-rt bench`: what several micro-batches in flight bring over one at a time, here and now.

The same stages, width and requests twice: `drained` has one micro-batch in the ring, `in_flight` as
many as the window allows. Both rings are loaded first and measured in turn, so that what else the
machine does falls on both. Tokens per second are new tokens over the whole time, prefill included.
"""

import json
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

import click

from kvasir_core.microbatch import FinishReason
from kvasir_core.plan import STAGES_MAX, WIDTH_MAX
from kvasir_rt import wire
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.member import CrewOptions
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model_files import find_model
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.serve_plan import RingOptions, check_devices, plan_for
from kvasir_rt.submission import EndEvent, EngineEvent, Submission
from kvasir_rt.switchboard import LineOptions
from kvasir_scenario.option_numbers import TOKENS_MAX, Whole

ANSWER_S_MAX = 3600.0
SHORTEST_ID = 300  # Below are bytes and control tokens in most vocabularies.


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one measurement, all there at once."""

    requests: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    seed: int = 1

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random ids; the same for the same seed."""
        random = Random(self.seed)  # noqa: S311 - Not for secrets.
        low = min(SHORTEST_ID, vocabulary // 2)
        return [
            [random.randrange(low, vocabulary) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


class BenchRing:
    """A ring of real stages that answers a load and is timed.

    Args:
        model: The GGUF file.
        ring: Its numbers.
        pin: Each stage on its own core.
    """

    def __init__(self, model: Path, ring: RingOptions, *, pin: bool) -> None:
        with open_gguf(model) as gguf:
            shape = ModelShape.of(gguf)
        self.vocabulary = shape.vocab
        self.plan = plan_for(shape, ring)
        check_devices(ring.devices_of(self.plan.stages))
        compute = wire.ModelSpec(
            path=str(model), sha256="", devices=ring.devices_of(self.plan.stages)
        )
        crew = CrewOptions(
            plan=self.plan,
            dtype=ring.number_format,
            compute=compute,
            secret=secrets.token_hex(32),
        )
        self._engine = Engine(EngineOptions(lines=LineOptions(crew=crew, pin=pin)))
        self._requests = Requests(self._engine)

    def __enter__(self) -> Self:
        try:
            self._engine.start()
        except BaseException:
            self._engine.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(self, load: Load) -> tuple[float, list[list[int]]]:
        """Answers the load; returns seconds and every request's tokens.

        Raises:
            RingDown: A request failed.
        """
        return self._requests.run(load, self.vocabulary)

    def busy_shares(self, seconds: float, before: Sequence[int]) -> list[float]:
        """Each stage's busy time over the seconds just measured."""
        return [
            (now - then) / 1e9 / seconds for now, then in zip(self.busy_ns(), before, strict=True)
        ]

    def busy_ns(self) -> list[int]:
        return [stage.times.busy_ns for stage in self._engine.snapshot().stages]


class Requests:
    """Offers loads to an engine, one after another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next_request = 0

    def run(self, load: Load, vocabulary: int) -> tuple[float, list[list[int]]]:
        """Answers the load; returns seconds and every request's tokens.

        Raises:
            RingDown: A request failed.
        """
        collector = Collector(load.requests)
        first = self._next_request
        self._next_request += load.requests
        started = time.perf_counter()
        for index, prompt in enumerate(load.prompts(vocabulary)):
            self._engine.submit(
                Submission(
                    request_id=first + index,
                    prompt_ids=prompt,
                    output_tokens_max=load.new_tokens,
                    sampling=SamplingParams(),
                    stop_ids=frozenset(),
                    on_event=collector.taker(index),
                )
            )
        collector.wait()
        return time.perf_counter() - started, collector.tokens


class Collector:
    """Takes events on the engine's thread and waits for the last."""

    def __init__(self, requests: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self._left = requests
        self._failures: list[str] = []
        self._is_over = threading.Event()

    def taker(self, index: int) -> Callable[[EngineEvent], None]:
        mine = self.tokens[index]

        def take(event: EngineEvent) -> None:
            if not isinstance(event, EndEvent):
                mine.append(event.token)
                return
            if event.reason is not FinishReason.LENGTH:
                self._failures.append(f"request {index} {event.reason}: {event.detail}")
            self._left -= 1
            if self._left == 0:
                self._is_over.set()

        return take

    def wait(self) -> None:
        if not self._is_over.wait(ANSWER_S_MAX):
            raise RingDown(f"{self._left} requests did not end within {ANSWER_S_MAX:g} s")
        if self._failures:
            raise RingDown(self._failures[0])


def compare(
    model: Path, ring: RingOptions, load: Load, *, pin: bool, repeats: int
) -> dict[str, Any]:
    """Both ways in turn; tokens per second with their spread, busy shares, and the ratio.

    Raises:
        KvasirError: The model, the plan or a ring failed.
    """
    ways = {"drained": replace(ring, packer="drained", window=1), "in_flight": ring}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {}
    answers: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        rings = {
            way: stack.enter_context(BenchRing(model, options, pin=pin))
            for way, options in ways.items()
        }
        for each in rings.values():
            each.run(replace(load, new_tokens=min(4, load.new_tokens)))  # Warm.
        for _ in range(repeats):
            for way, each in rings.items():
                before = each.busy_ns()
                seconds, answers[way] = each.run(load)
                rates[way].append(load.requests * load.new_tokens / seconds)
                busy[way] = each.busy_shares(seconds, before)
        plan = rings["in_flight"].plan
    result: dict[str, Any] = {
        way: {
            "tokens_per_s": statistics.median(rates[way]),
            "tokens_per_s_min": min(rates[way]),
            "tokens_per_s_max": max(rates[way]),
            "stage_busy_share": [round(share, 4) for share in busy[way]],
        }
        for way in ways
    }
    ratios = [b / a for a, b in zip(rates["drained"], rates["in_flight"], strict=True)]
    return {
        **result,
        "in_flight_over_drained": statistics.median(ratios),
        "same_tokens": answers["drained"] == answers["in_flight"],
        "layers": [stop - start for start, stop in plan.layers],
        "dtype": ring.number_format,
        "repeats": repeats,
    }


RUNS_MAX = 1_000_000


@click.command()
@click.argument("model")
@click.option("--stages", type=Whole(2, STAGES_MAX), default=2, show_default=True)
@click.option("--layers", help="Layers per stage: 18,12.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]))
@click.option("--micro-batch-width", type=Whole(1, WIDTH_MAX), default=8, show_default=True)
@click.option("--row-width", type=Whole(1, WIDTH_MAX), default=128, show_default=True)
@click.option("--window", type=Whole(1, WIDTH_MAX), help="Open micro-batches [default: auto].")
@click.option("--requests", type=Whole(1, RUNS_MAX), default=16, show_default=True)
@click.option("--prompt-tokens", type=Whole(1, TOKENS_MAX), default=128, show_default=True)
@click.option("--new-tokens", type=Whole(1, TOKENS_MAX), default=64, show_default=True)
@click.option("--repeats", type=Whole(1, RUNS_MAX), default=3, show_default=True)
@click.option("--pin/--no-pin", default=True, show_default=True, help="A core for each stage.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON and nothing else.")
def command(model: str, *, as_json: bool, **given: Any) -> None:
    """Compare drained and in-flight on MODEL."""
    ring = RingOptions(
        stages=given["stages"],
        layers=given["layers"],
        devices=tuple(given["device"].split(",")),
        dtype=given["dtype"],
        context=given["prompt_tokens"] + given["new_tokens"],
        row_width=given["row_width"],
        micro_batch_width=given["micro_batch_width"],
        window=given["window"],
        running_max=given["requests"],
    )
    load = Load(
        requests=given["requests"],
        prompt_tokens=given["prompt_tokens"],
        new_tokens=given["new_tokens"],
    )
    result = compare(find_model(model), ring, load, pin=given["pin"], repeats=given["repeats"])
    if as_json:
        print(json.dumps(result))
        return
    for way in ("drained", "in_flight"):
        part = result[way]
        busy = " ".join(f"{share:.0%}" for share in part["stage_busy_share"])
        print(
            f"{way:9} {part['tokens_per_s']:8.1f} tokens/s "
            f"({part['tokens_per_s_min']:.1f} to {part['tokens_per_s_max']:.1f}), busy {busy}"
        )
    print(f"in flight over drained: {result['in_flight_over_drained']:.2f}")
    if not result["same_tokens"]:
        print("the tokens differ (near ties; expected only in bfloat16)", file=sys.stderr)
