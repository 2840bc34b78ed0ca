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
# # Starved or saturated?
#
# A ring of stages can look busy and have nothing to do. Its stages compute small micro-batches, one after another, whether one user
# waits or a hundred. This notebook loads one ring with more and more users and asks which figure tells the difference.
#
# Everything here goes through `kvasir_sim.run(scenario) -> Result`.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from kvasir_sim import run

SCENARIO = Path("../scenarios/starved.yaml")
OUT = Path(tempfile.mkdtemp())
BLUE, ORANGE, GREEN, RED, SKY, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#999999",
)
plt.rcParams.update(
    {
        "figure.figsize": (6.4, 3.2),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 110,
    }
)
print(SCENARIO.read_text())

# %% [markdown]
# One user at a time in four stages: while the prompt is on stage 2, stages 0, 1 and 3 have nothing in hand.

# %%
one = run(SCENARIO, OUT / "one")
print(f"Verdict: {one.report.verdict.kind.value}")
for sentence in one.report.verdict.evidence:
    print(" -", sentence)

# %% [markdown]
# ## More users
#
# Each run is the same ring; only `workload.users` changes, and nobody pauses to think.


# %%
def figures(users: int) -> dict[str, object]:
    result = run(
        SCENARIO,
        overrides=[
            f"workload.users={users}",
            "workload.think_s=0",
            f"workload.requests={max(60, 10 * users)}",
        ],
    )
    report = result.report
    limits = report.binding_limits
    return {
        "users": users,
        "verdict": report.verdict.kind.value,
        "busy_share": sum(stage.busy_s for stage in report.stages)
        / (len(report.stages) * report.elapsed_s),
        "nothing_waiting_share": limits.nothing_waiting / report.micro_batches,
        "rows_mean": report.stages[0].rows / report.micro_batches,
        "output_tokens_per_s": report.throughput.output_tokens_per_s,
        "tpot_p50_s": report.latency.tpot_s.p50,
    }


table = pd.DataFrame([figures(users) for users in (1, 2, 4, 8, 16, 32, 64, 96)])
table.round(3)

# %%
fig, (upper, lower) = plt.subplots(2, 1, figsize=(6.4, 5.6), layout="constrained")
upper.plot(table.users, table.busy_share, color=BLUE, marker="o", label="busy share of the stages")
upper.plot(
    table.users,
    table.nothing_waiting_share,
    color=ORANGE,
    marker="s",
    linestyle="--",
    label="micro-batches that left nobody behind",
)
upper.set(xscale="log", xlabel="users", ylim=(0, 1.05), title="what the stages do")
upper.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
upper.legend(frameon=False)
lower.plot(table.users, table.output_tokens_per_s, color=GREEN, marker="o")
lower.set(
    xscale="log", xlabel="users", ylabel="output tokens/s", ylim=(0, None), title="what comes of it"
)
plt.show()

# %% [markdown]
# From 4 to 96 users the busy share hardly moves, while throughput grows many times. **Busy share saturates first and then says nothing.**
# What does tell is what ended each micro-batch: as long as it left because *nobody else was ready to join*, the ring had room.
#
# ## The same in the tables
#
# `Result.micro_batches` has one row per micro-batch. How full they are, and what ended them:

# %%
full = run(
    SCENARIO,
    OUT / "full",
    overrides=["workload.users=96", "workload.think_s=0", "workload.requests=960"],
)
batches = pd.concat(
    {"1 user": one.micro_batches, "96 users": full.micro_batches}, names=["run"]
).reset_index("run")
shares = batches.groupby("run").binding_limit.value_counts(normalize=True).unstack(fill_value=0)
shares.round(3)

# %%
fig, axes = plt.subplots(2, 1, figsize=(6.4, 5.6), sharex=True, layout="constrained")
for axis, (name, colour) in zip(axes, (("1 user", SKY), ("96 users", BLUE)), strict=True):
    rows = batches.loc[batches.run == name, "rows"]
    axis.hist(rows, bins=range(0, 262, 6), weights=[1 / len(rows)] * len(rows), color=colour)
    axis.axvline(256, color=RED, linestyle="--", linewidth=1)
    axis.set(xlabel="rows in a micro-batch (dashed: the row width)", title=name)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
plt.show()

# %% [markdown]
# ## What a planner does with it
#
# - *Starved*: do not add stages or GPUs. More load, or fewer machines.
# - *Saturated*: the widths are full and nothing grows in the queue; more of what binds brings more.
# - *Overloaded*: the queue grows, and every latency in the report depends on how long one looked.
#
# The verdict weighs exactly this; its thresholds stand in `kvasir_core/verdict.py`.

# %%
assert one.report.verdict.kind.value == "starved"
assert full.report.verdict.kind.value == "saturated"
spread = table[table.users >= 4].busy_share
assert spread.max() - spread.min() < 0.25, "busy share tells hardly anything"
