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
# # One batch at a time, or several in flight?
#
# The simple way to run a pipeline is to send one batch through all stages and wait for it: the ring is *drained* between two batches, and
# of four stages three stand idle at any moment. Kvasir keeps several micro-batches *in flight*: while stage 3 computes one, stage 0
# has the next. The packer decides; everything else is the same.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.patches import Rectangle

from kvasir_sim import run

SCENARIO = Path("../scenarios/4stage.yaml")
OUT = Path(tempfile.mkdtemp())
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00")
plt.rcParams.update(
    {
        "figure.figsize": (6.4, 3.2),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 110,
    }
)
COMMON = ["what_if={}", "workload.requests=150"]
in_flight = run(SCENARIO, OUT / "in_flight", overrides=COMMON)
drained = run(SCENARIO, OUT / "drained", overrides=[*COMMON, "policy.packer=drained"])
runs = {"in flight": in_flight, "drained": drained}

# %% [markdown]
# ## What the stages do
#
# `Result.stages` has one row per stage and micro-batch. Half a second of each run; a colour is one micro-batch on its way:


# %%
def draw(axis: plt.Axes, name: str) -> None:
    stages = runs[name].stages
    start = stages.start_s.max() / 2
    shown = stages[(stages.end_s > start) & (stages.start_s < start + 0.5)]
    for row in shown.itertuples():
        colour = COLOURS[row.micro_batch_id % len(COLOURS)]
        axis.add_patch(
            Rectangle(
                (row.start_s, row.stage - 0.4),
                row.end_s - row.start_s,
                0.8,
                facecolor=colour,
                edgecolor="white",
            )
        )
    axis.set(
        xlim=(start, start + 0.5),
        ylim=(3.5, -0.5),
        yticks=range(4),
        yticklabels=[f"stage {k}" for k in range(4)],
        title=name,
    )


fig, axes = plt.subplots(2, 1, figsize=(6.4, 5), layout="constrained")
for axis, name in zip(axes, runs, strict=True):
    draw(axis, name)
axes[-1].set_xlabel("time, s (white: nothing in hand)")
plt.show()

# %% [markdown]
# ## What it costs
#
# The load is the same for both. Drained cannot carry it: its queue grows, and the verdict says so.

# %%
pd.DataFrame(
    {
        name: {
            "verdict": run.report.verdict.kind.value,
            "busy share": sum(s.busy_s for s in run.report.stages) / (4 * run.report.elapsed_s),
            "output tokens/s": run.report.throughput.output_tokens_per_s,
            "TTFT p50, s": run.report.latency.ttft_s.p50,
            "TTFT p99, s": run.report.latency.ttft_s.p99,
            "TPOT p50, s": run.report.latency.tpot_s.p50,
        }
        for name, run in runs.items()
    }
)

# %%
fig, (upper, lower) = plt.subplots(2, 1, figsize=(6.4, 5.6), layout="constrained")
for (name, run_), colour, style in zip(
    runs.items(), ("#0072b2", "#d55e00"), ("-", "--"), strict=True
):
    requests = run_.requests.sort_values("arrival_s")
    upper.plot(requests.arrival_s, requests.ttft_s, color=colour, linestyle=style, label=name)
    ordered = requests.tpot_s.dropna().sort_values().reset_index(drop=True)
    lower.plot(
        1000 * ordered,
        (ordered.index + 1) / len(ordered),
        color=colour,
        linestyle=style,
        label=name,
    )
upper.set(
    xlabel="arrival, s", ylabel="time to first token, s", title="who comes later waits longer"
)
lower.set(
    xlabel="time per token, ms", ylabel="share of requests", title="and each token takes longer"
)
upper.legend(frameon=False)
lower.legend(frameon=False)
plt.show()

# %% [markdown]
# ## How many in flight?
#
# The window bounds the micro-batches in the ring. One is the drained ring again, as far as stages are concerned; about one per stage keeps
# them all fed; far more only queue between the stages.

# %%
windows = (1, 2, 3, 4, 6, 8, 12)
swept = pd.DataFrame(
    [
        {
            "window": window,
            "tokens_per_s": report.throughput.output_tokens_per_s,
            "tpot_p50_ms": 1000 * report.latency.tpot_s.p50,
            "verdict": report.verdict.kind.value,
        }
        for window in windows
        for report in [
            run(
                SCENARIO, overrides=[*COMMON, f"ring.window={window}", "workload.rate_per_s=8"]
            ).report
        ]
    ]
)
swept.round(1)

# %%
fig, axis = plt.subplots(layout="constrained")
axis.plot(swept.window, swept.tokens_per_s, color="#0072b2", marker="o", label="output tokens/s")
axis.set(xlabel="window (micro-batches in flight)", ylabel="output tokens/s", ylim=(0, None))
other = axis.twinx()
other.plot(
    swept.window,
    swept.tpot_p50_ms,
    color="#d55e00",
    marker="s",
    linestyle="--",
    label="time per token p50, ms",
)
other.set(ylabel="time per token, ms", ylim=(0, None))
other.spines["right"].set_visible(True)
fig.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# `ring.window: auto` computes the window from the stages' and links' times while the ring runs; that is the default of the scenario above.

# %%
assert (
    in_flight.report.throughput.output_tokens_per_s
    > 1.3 * drained.report.throughput.output_tokens_per_s
)
assert in_flight.report.latency.ttft_s.p99 < drained.report.latency.ttft_s.p99
assert (
    swept.tokens_per_s[swept.window == 4].item()
    > 1.5 * swept.tokens_per_s[swept.window == 1].item()
)
