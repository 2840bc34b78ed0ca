"""Overlap pays: with 20 ms on every expert call, a stage that holds 8 micro-batches against one
that holds one.

    .venv/bin/python benchmarks/elastic_overlap.py [--repeats 3] [--delay-ms 20] [--json]

All experts of a tiny qwen3moe are with three workers whose every answer waits 20 ms. The same
requests are served with `--experts-overlap 1` and `8`; micro-batches are two requests wide, so that
a blocking stage has more to do than it can hold. Rates are of runs that alternate; outputs must be
equal. Both have a window of 16, so that micro-batches are equally wide. Last line with `--json`:
`{overlap_1, overlap_8, ratio}`, medians of tokens a second.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.swarm_timeline import moments_of
from tests.e2e.swarm_world import Load, WorldOptions, until, world
from tests.rt.tiny_models import TinyModel

CLIENTS = 32
WIDTH = 2
TOKENS = 16
MEASURE_S = 10.0
MODEL = TinyModel(architecture="qwen3moe", layers=4, experts=16, experts_used=4)


def rate_with(overlap: int, delay_ms: float) -> tuple[float, dict[str, set[str]], int]:
    """Tokens a second, what the clients got, and how many parts workers computed meanwhile."""
    options = WorldOptions(
        model=MODEL,
        base=1,
        boost=0,
        overlap=overlap,
        serve=(
            "--micro-batch-width",
            str(WIDTH),
            "--running-max",
            str(CLIENTS),
            "--window",
            str(CLIENTS // WIDTH),
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with world(root, options) as made:
            for number in range(3):
                made.start_worker(
                    f"far-{number}", "--max-experts", "32", "--delay-ms", str(delay_ms)
                )
            with Load(made, CLIENTS, TOKENS) as load:
                until("all is covered", made.is_covered)
                until("a worker proves itself", made.has_proven_worker)
                load.wait_rounds(2 * CLIENTS)  # Past the first answers, all of which are checked.
                started, before = time.monotonic(), made.ring()["output_tokens"]
                time.sleep(MEASURE_S)
                tokens = made.ring()["output_tokens"] - before
                seconds = time.monotonic() - started
            assert not load.errors, load.errors
        begun = int(started * 1e9)
        accepted = sum(m.kind == "accepts" and m.at_ns > begun for m in moments_of(made.events))
    return tokens / seconds, load.texts, accepted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 8: []}
    texts: dict[str, set[str]] = {}
    for _ in range(given.repeats):
        for overlap, found in rates.items():
            rate, said, accepted = rate_with(overlap, given.delay_ms)
            found.append(rate)
            print(
                f"overlap {overlap}: {rate:.1f} tokens/s, {accepted} parts from workers",
                file=sys.stderr,
            )
            for prompt, answers in said.items():
                texts.setdefault(prompt, set()).update(answers)
    assert all(len(answers) == 1 for answers in texts.values()), "tokens differ"
    one, eight = median(rates[1]), median(rates[8])
    result = {"overlap_1": round(one, 1), "overlap_8": round(eight, 1), "ratio": eight / one}
    print(json.dumps(result) if given.json else f"{eight / one:.2f} times, outputs equal")


if __name__ == "__main__":
    main()
