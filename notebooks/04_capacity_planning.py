# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How much can this ring carry?
#
# Four stages are to serve conversations: first token within a second for 99 of 100 requests, and then 80 ms per token for 9 of 10. How many requests per second is that, what binds, and what would more of it bring?
#
# `kvasir_sim.find_capacity` answers this in one call (last section), `kvasir-sim capacity` in one command. Here the same question is
# asked step by step with `kvasir_sim.run`, to see where the answer comes from.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from kvasir_sim import find_capacity, run

SCENARIO = Path("../scenarios/starved.yaml")
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#999999"
plt.rcParams.update(
    {
        "figure.figsize": (6.4, 3.2),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 110,
    }
)
TTFT_S, TPOT_S = 1.0, 0.08
LOAD = "workload={{kind: poisson, rate_per_s: {rate}, requests: 160, prompt_tokens: {{lognormal: {{median: 150, p90: 400}}, max: 1000}}, output_tokens: {{lognormal: {{median: 60, p90: 150}}, max: 400}}}}"
RING = ["ring.running_max=64", "ring.window=auto", f"slo={{ttft_s: {TTFT_S}, tpot_s: {TPOT_S}}}"]


def at(rate: float, *changes: str, seed: int = 1) -> dict[str, object]:
    report = run(SCENARIO, overrides=[*RING, LOAD.format(rate=rate), *changes], seed=seed).report
    latency = report.latency
    return {
        "rate_per_s": rate,
        "ttft_p99_s": latency.ttft_s.p99,
        "tpot_p90_s": latency.tpot_s.p90,
        "tokens_per_s": report.throughput.output_tokens_per_s,
        "verdict": report.verdict.kind.value,
        "is_carried": latency.ttft_s.p99 <= TTFT_S
        and latency.tpot_s.p90 <= TPOT_S
        and report.verdict.kind.value != "overloaded",
    }


# %% [markdown]
# ## The curve
#
# The same 160 requests at rising rates (common random numbers: only the clock runs faster).

# %%
curve = pd.DataFrame([at(rate) for rate in (4, 8, 12, 16, 20, 24, 28, 32, 40)])
curve.round(3)

# %%
fig, (upper, lower) = plt.subplots(2, 1, figsize=(6.4, 5.6), layout="constrained")
for axis, column, limit, name in (
    (upper, "ttft_p99_s", TTFT_S, "TTFT p99, s"),
    (lower, "tpot_p90_s", TPOT_S, "TPOT p90, s"),
):
    axis.plot(curve.rate_per_s, curve[column], color=GREY, linewidth=1)
    held, broken = curve[curve.is_carried], curve[~curve.is_carried]
    axis.plot(held.rate_per_s, held[column], "o", color=BLUE, label="carried")
    axis.plot(broken.rate_per_s, broken[column], "x", color=RED, markersize=8, label="not carried")
    axis.axhline(limit, color=ORANGE, linestyle="--", label="limit")
    axis.set(xlabel="requests/s", ylabel=name, ylim=(0, 3 * limit))
    axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The edge
#
# Bisection between the last rate that held and the first that did not; three seeds vote.


# %%
def capacity(*changes: str, low: float = 8.0, high: float = 48.0, steps: int = 4) -> float:
    for _ in range(steps):
        middle = (low * high) ** 0.5
        votes = 0
        for seed in (1, 2, 3):
            votes += bool(at(middle, *changes, seed=seed)["is_carried"])
            if votes == 2 or seed - votes == 2:
                break
        low, high = (middle, high) if votes >= 2 else (low, middle)
    return low


base = capacity()
print(f"{base:.2f} requests/s are carried")

# %% [markdown]
# ## What would one more bring?
#
# One change at a time. What moves the number is what binds; the rest would be money for nothing.

# %%
CHANGES = {
    "as it is": [],
    "row width 256 to 512": ["ring.row_width=512"],
    "16 to 32 spans": ["ring.micro_batch_width=32"],
    "64 to 128 running": ["ring.running_max=128"],
    "stages 20 % faster": ["costs.pass_s=0.008", "costs.per_token_s=0.000016"],
    "two more stages": ["ring.stages=6", "costs.pass_s=0.00667", "costs.per_token_s=0.0000133"],
}
gains = pd.Series(
    {name: capacity(*changes) if changes else base for name, changes in CHANGES.items()},
    name="requests/s",
)
gains.round(2).to_frame()

# %%
fig, axis = plt.subplots(layout="constrained")
colours = [GREY if value < 1.1 * base else GREEN for value in gains]
axis.barh(gains.index, gains, color=colours)
axis.axvline(base, color=GREY, linewidth=1)
axis.invert_yaxis()
axis.set(xlabel="requests/s within the limits")
for place, value in enumerate(gains):
    axis.text(value, place, f" {value / base - 1:+.0%}", va="center")
plt.show()

# %% [markdown]
# ## In one call
#
# `find_capacity` does the same, and lists the gain of one step more of every resource. It asks more of a load: the queue must not grow in
# any part of the run, so its answer lies a step lower here ([docs/capacity.md](../docs/capacity.md)).

# %%
answer = find_capacity(
    SCENARIO,
    {"ttft_p99": TTFT_S, "tpot_p90": TPOT_S},
    overrides=[*RING[:2], LOAD.format(rate=16)],
    seeds=2,
    precision=0.15,
    gains=False,
    jobs=1,
)
print(f"{answer.load:.3g} {answer.unit} are carried; at {answer.next_load:.3g}: {answer.breaks}")
print(f"micro-batches end there most often because of: {answer.binding}")

# %%
assert curve.is_carried.iloc[0]
assert not curve.is_carried.iloc[-1]
assert gains["stages 20 % faster"] > base
assert answer.load is not None
