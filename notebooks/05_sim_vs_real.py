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
# # Simulated and real
#
# One scheduler drives both: what `kvasir-sim` predicts is decided by the code that `kvasir-rt` runs. What is left to doubt are the
# *times*: how long a stage holds a micro-batch. Here they are fitted on one real run and used to predict two others.
#
# The real runs are saved beside this notebook: SmolLM2-135M in a ring of two processes (17 and 13 layers) on a two-core machine that was
# not quiet. They were made by `kvasir-rt benchmarks/fidelity/many.yaml --out ...` and so on; make your own, on a quiet machine, and
# point `SAVED` at them. Nothing here needs torch.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from kvasir_sim import Result, run

SAVED = Path("saved")
SCENARIOS = Path("../benchmarks/fidelity")
BLUE, ORANGE, GREEN, RED, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9"
plt.rcParams.update(
    {
        "figure.figsize": (6.4, 3.2),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 110,
    }
)
real = {name: Result.read(SAVED / name) for name in ("many", "few", "drained")}
pd.DataFrame(
    {
        name: {
            "mode": result.report.mode,
            "requests": result.report.counts.finished,
            "micro-batches": result.report.micro_batches,
            "output tokens/s": round(result.report.throughput.output_tokens_per_s, 1),
            "verdict": result.report.verdict.kind.value,
        }
        for name, result in real.items()
    }
)


# %% [markdown]
# ## How long does a stage hold a micro-batch?
#
# `Result.stages` says when each stage began and ended each micro-batch; `Result.micro_batches` says how many rows it had. A straight line
# through `many` (sixteen users, 310 micro-batches) gives the cost of a pass and of a row.


# %%
def holds(result: Result) -> pd.DataFrame:
    stages = result.stages.merge(
        result.micro_batches[["micro_batch_id", "rows"]], on="micro_batch_id"
    )
    return stages.assign(hold_s=stages.end_s - stages.start_s)


measured = holds(real["many"])
lines = {
    stage: np.polynomial.Polynomial.fit(part.rows, part.hold_s, 1).convert().coef
    for stage, part in measured.groupby("stage")
}
fig, axes = plt.subplots(2, 1, figsize=(6.4, 5.6), sharex=True, layout="constrained")
for axis, (stage, (pass_s, per_row_s)) in zip(axes, lines.items(), strict=True):
    part = measured[measured.stage == stage]
    rows = np.array([0, part.rows.max()])
    axis.scatter(part.rows, 1000 * part.hold_s, s=12, color=SKY, label="measured")
    axis.plot(
        rows,
        1000 * (pass_s + per_row_s * rows),
        color=RED,
        label=f"{1000 * pass_s:.1f} ms + {1000 * per_row_s:.2f} ms a row",
    )
    axis.set(xlabel="rows", ylabel="hold, ms", title=f"stage {stage}", ylim=(0, 175))
    axis.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# The scatter around the line is the machine's own: the same eight rows take 45 to 80 ms, depending on what else it does.
#
# ## Predict
#
# The same scenario files, with these costs. `many` was fitted, so it shows how well a line describes; `few` and `drained` are predictions.

# %%
layers = (17, 13)
stages = ", ".join(
    f"{{layers: {n}, pass_s: {c[0]:.6f}, per_token_s: {c[1]:.8f}}}"
    for n, c in zip(layers, lines.values(), strict=True)
)
predicted = {
    name: run(SCENARIOS / f"{name}.yaml", overrides=[f"ring.stages=[{stages}]"]) for name in real
}
FIGURES = {
    "output tokens/s": lambda report: report.throughput.output_tokens_per_s,
    "TTFT p50, s": lambda report: report.latency.ttft_s.p50,
    "TPOT p50, s": lambda report: report.latency.tpot_s.p50,
    "end to end p50, s": lambda report: report.latency.e2e_s.p50,
}
table = pd.DataFrame(
    [
        {
            "run": name,
            "figure": figure,
            "measured": value_of(real[name].report),
            "simulated": value_of(predicted[name].report),
            "error": value_of(predicted[name].report) / value_of(real[name].report) - 1,
        }
        for name in real
        for figure, value_of in FIGURES.items()
    ]
).set_index(["run", "figure"])
table.round({"measured": 3, "simulated": 3, "error": 2})

# %%
errors = table.error.unstack("run")[list(real)]
fig, axis = plt.subplots(layout="constrained")
for place, (name, colour, mark) in enumerate(
    (("many", ORANGE, "o"), ("few", BLUE, "s"), ("drained", GREEN, "D"))
):
    axis.plot(
        errors[name],
        np.arange(len(errors)) + 0.12 * (place - 1),
        mark,
        color=colour,
        label=name,
        markersize=8,
        linestyle="none",
    )
axis.axvline(0, color="black", linewidth=1)
axis.set(
    yticks=range(len(errors)),
    yticklabels=errors.index,
    xlabel="simulated over measured, less 1",
    xlim=(-0.5, 0.5),
)
axis.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
axis.invert_yaxis()
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Where it is off, and why
#
# `few` has two users: a stage mostly computes alone. The line was fitted while both stages computed at once, and on a machine of two cores they
# slow each other down. So the fitted holds are too long for `few`:

# %%
pd.DataFrame(
    {
        name: holds(result).groupby("stage").hold_s.median().mul(1000)
        for name, result in real.items()
    }
).round(1).rename_axis("median hold, ms")

# %% [markdown]
# `kvasir-rt profile` measures this too: holds by rows, by context, and next to busy neighbours (`costs: {kind: profile}`);
# [docs/fidelity.md](../docs/fidelity.md) has what is left then. The verdicts agree even with the line:

# %%
verdicts = pd.DataFrame(
    {
        "measured": {name: result.report.verdict.kind.value for name, result in real.items()},
        "simulated": {name: result.report.verdict.kind.value for name, result in predicted.items()},
    }
)
verdicts

# %%
assert (verdicts.measured == verdicts.simulated).all()
assert table.error.xs("output tokens/s", level="figure").abs().max() < 0.2
