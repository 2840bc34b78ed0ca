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
# # The elastic curve
#
# A mixture-of-experts model runs on two machines. In the evening the load rises fifteenfold; volunteers with a GPU lend their memory
# bandwidth: each downloads some experts and serves them, as long as the model is saturated. This notebook follows one evening:
# how fast help comes, what it adds, what it costs, and that it goes again.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from kvasir_sim import run

SCENARIO = Path("../scenarios/moe_swarm.yaml")
OUT = Path(tempfile.mkdtemp())
BLUE, ORANGE, GREEN, RED, SKY, GREY, PALE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#999999",
    "#eeeeee",
)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110})
EVENING = [  # The shipped scenario's evening, shortened.
    "what_if={}",
    "workload.duration_s=460",
    "workload.rate_per_s={phases: [{rate_per_s: 0.2, for_s: 30}, {rate_per_s: 3.0, for_s: 190}, {rate_per_s: 0.1, for_s: 1}]}",
    "experts.hub.down_s=60",
    "experts.hub.idle_exit_s=30",
    "run.horizon_s=460",
]
helped = run(SCENARIO, OUT / "helped", overrides=EVENING)
alone = run(SCENARIO, OUT / "alone", overrides=[*EVENING, "experts.workers=[]"])

# %% [markdown]
# ## The curve
#
# `Result.swarm` has a row every few seconds. Grey: expert work goes to workers.

# %%
swarm = helped.swarm
fig, axes = plt.subplots(4, 1, figsize=(6.4, 9), sharex=True, layout="constrained")
load, market, workers, tokens = axes
load.step(swarm.at_s, swarm.running, color=BLUE, label="running")
load.step(swarm.at_s, swarm.waiting, color=ORANGE, linestyle="--", label="waiting")
market.step(swarm.at_s, swarm.target, color=RED, label="replicas wanted of each expert")
market.step(swarm.at_s, swarm.claims, color=GREY, linestyle=":", label="claims open (downloading)")
bottom = pd.Series(0.0, index=swarm.index)
for standing, colour in (("proven", GREEN), ("trial", SKY), ("new", GREY)):
    workers.fill_between(
        swarm.at_s,
        bottom,
        bottom + swarm[standing],
        step="pre",
        color=colour,
        label=standing,
        linewidth=0,
    )
    bottom = bottom + swarm[standing]
tokens.step(swarm.at_s, swarm.tokens_per_s.rolling(5).mean(), color=BLUE, label="with workers")
tokens.step(
    alone.swarm.at_s,
    alone.swarm.tokens_per_s.rolling(5).mean(),
    color=ORANGE,
    linestyle="--",
    label="alone",
)
for axis, name in zip(
    axes, ("requests", "market", "workers by standing", "output tokens/s"), strict=True
):
    axis.fill_between(
        swarm.at_s,
        0,
        1,
        where=swarm.is_engaged,
        transform=axis.get_xaxis_transform(),
        color=PALE,
        zorder=0,
        linewidth=0,
    )
    axis.set(ylabel=name, ylim=(0, None))
    axis.legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderpad=0
    )
tokens.set(xlabel="time, s", xlim=(0, 460))
plt.show()

# %% [markdown]
# ## What help brought
#
# The report's `swarm` part has the moments that people ask about. *Relief* is the first accepted answer of a worker after the knee;
# *contraction* is when nothing above the base target is held any more; NaN: not before the end of this short evening.

# %%
part = helped.report.swarm
pd.Series(
    {
        "tokens/s in the peak, alone": alone.report.swarm.peak.output_tokens_per_s,
        "tokens/s in the peak, helped": part.peak.output_tokens_per_s,
        "share of expert work done by workers": part.share_remote_pairs,
        "workers that served at once": part.workers_covering_max,
        "knee to first relief, s": part.time_to_first_relief_s,
        "knee to full coverage, s": part.time_to_full_coverage_s,
        "last high load to contraction, s": part.time_to_contraction_s,
        "downloads": part.downloads,
        "downloaded for nothing": part.wasted_downloads,
        "GiB downloaded": part.download_bytes / 2**30,
    }
).to_frame("").round(3)

# %%
fig, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for result, name, colour, style in (
    (helped, "with workers", BLUE, "-"),
    (alone, "alone", ORANGE, "--"),
):
    first = result.requests.ttft_s.dropna().sort_values().reset_index(drop=True)
    axis.plot(
        first, (first.index + 1) / len(result.requests), color=colour, linestyle=style, label=name
    )
axis.set(xscale="log", xlabel="time to first token, s", ylabel="share of all requests", ylim=(0, 1))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What to take from it
#
# - Help is not instant: a worker must be asked, download, and prove itself on work that is also done locally. The knee costs what that takes.
# - The market asks for replicas of *experts*, not for machines; a small GPU takes a small slice.
# - When the load goes, the slices go after `idle_exit_s`. Workers keep them on disk, so the next evening begins warm.

# %%
assert part.peak.output_tokens_per_s > 1.2 * alone.report.swarm.peak.output_tokens_per_s
assert part.time_to_first_relief_s is not None
assert helped.swarm.workers_covering.iloc[-1] < part.workers_covering_max
