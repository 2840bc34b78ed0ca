"""Runs with a swarm side by side: what each policy, pool or overlap gives, and what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_scenario.report_schema import Report
from kvasir_scenario.swarm_report import SwarmPart
from kvasir_scenario.wording import UNDEFINED, duration

Runs = Sequence[tuple[str, Report]]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of all runs: as text, and as numbers to sort by."""

    short: str
    heading: str
    texts: list[str]
    values: list[float | None]


def labels(runs: Runs) -> list[str]:
    """The runs' names; with their policies where these differ."""
    policies = [None if run.swarm is None else run.swarm.policy for _, run in runs]
    if len({policy for policy in policies if policy is not None}) < 2:
        return [name for name, _ in runs]
    return [
        name if policy is None else f"{name} ({policy.replace(' rejoin', '')})"
        for (name, _), policy in zip(runs, policies, strict=True)
    ]


def columns(runs: Runs) -> list[Column]:
    """The figures; without those that are nothing in every run."""
    alone = _alone(runs)

    def gain(swarm: SwarmPart) -> float | None:
        ours, theirs = _rate(swarm), None if alone is None else _rate(alone)
        return ours / theirs if ours is not None and theirs else None

    def added_s(swarm: SwarmPart) -> float | None:
        ours, theirs = swarm.peak.tpot_s, None if alone is None else alone.peak.tpot_s
        return None if ours is None or theirs is None else ours - theirs

    figures: tuple[
        tuple[str, str, Callable[[SwarmPart], float | None], Callable[[float], str]], ...
    ]
    figures = (
        ("peak\ntok/s", "peak tokens/s", _rate, _number),
        ("of\nalone", "of alone", gain, lambda value: f"{value:.2f} x"),
        ("per\ntoken", "per token", lambda swarm: swarm.peak.tpot_s, duration),
        ("against\nalone", "per token against alone", added_s, _signed),
        ("remote\npairs", "remote pairs", lambda swarm: swarm.share_remote_pairs, _percent),
        ("targets\n/h", "target changes/h", lambda swarm: swarm.target_changes_per_hour, _number),
        ("flips\n/h", "flips/h", lambda swarm: swarm.flips_per_hour, _number),
        ("loads\n/h", "downloads/h", lambda swarm: swarm.downloads_per_hour, _number),
        ("from\ndisk/h", "from disk/h", lambda swarm: swarm.warm_loads_per_hour, _number),
        ("wasted\n/h", "wasted/h", lambda swarm: swarm.wasted_downloads_per_hour, _number),
        (
            "above\ntarget",
            "recruits above target",
            lambda swarm: swarm.recruits_above_target,
            _number,
        ),
    )
    shown = []
    for short, heading, of, wording in figures:
        values = [None if run.swarm is None else of(run.swarm) for _, run in runs]
        if any(values):
            texts = [UNDEFINED if value is None else wording(value) for value in values]
            shown.append(Column(short, heading, texts, values))
    return shown


def what_pays(runs: Runs) -> str | None:
    """Where remote experts give more output tokens, and where they cost time per token for it."""
    alone = _alone(runs)
    reached = None if alone is None else _rate(alone)
    if alone is None or not reached:
        return None
    paying: list[str] = []
    waiting: list[str] = []
    losing: list[str] = []
    for name, run in runs:
        rate = None if run.swarm is None else _rate(run.swarm)
        if run.swarm is None or not run.swarm.workers or rate is None:
            continue
        theirs, ours = alone.peak.tpot_s, run.swarm.peak.tpot_s
        is_slower = theirs is not None and ours is not None and ours > theirs
        (losing if rate <= reached else waiting if is_slower else paying).append(name)
    sentences = [
        f"{what}: {', '.join(names)}."
        for what, names in (
            ("Remote experts give more tokens, and each sooner", paying),
            ("More tokens in total, but each later", waiting),
            ("Fewer tokens than without workers", losing),
        )
        if names
    ]
    return " ".join(sentences) or None


def _alone(runs: Runs) -> SwarmPart | None:
    """The first run that no worker takes part in."""
    swarms = (run.swarm for _, run in runs)
    return next((swarm for swarm in swarms if swarm is not None and not swarm.workers), None)


def _rate(swarm: SwarmPart) -> float | None:
    return swarm.peak.output_tokens_per_s


def _number(value: float) -> str:
    return f"{value:,.4g}" if value >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{duration(seconds)}"
