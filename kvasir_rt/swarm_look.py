"""One look at a hub: what of its `GET /api/swarm` concerns one model."""

from dataclasses import dataclass
from typing import Any

COUNTS = ("recruits_above_target", "claims_lapsed", "releases", "workers_lost", "target_changes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLook:
    """The model's market at one moment.

    Attributes:
        policy: The market's.
        recruiting: Whether the model is.
        threshold: Busy slots that saturate.
        base: Replicas wanted at rest.
        target: Replicas wanted now.
        claims: Open ones, of all models.
        online: Workers that cover anything, of any model.
        covering: Workers of the model.
        covered: Share of the model's experts that anybody serves.
        reached: Share of the wanted replicas that there are.
        surplus: Replicas above the target.
        slices: Worker, slice, and whether that worker has served.
        counts: Since the hub began, of all its models.
    """

    policy: str
    recruiting: bool
    threshold: int
    base: int
    target: int
    claims: int
    online: int
    covering: int
    covered: float
    reached: float
    surplus: int
    slices: tuple[tuple[str, tuple[int, ...], bool], ...]
    counts: dict[str, int]


def look_of(shown: dict[str, Any], model: str) -> HubLook:
    """From `GET /api/swarm`.

    Raises:
        KeyError, TypeError, ValueError: It is not what a hub shows, or has not heard of the model.
    """
    rows = [row for row in shown["recruitment"]["models"] if row["model"] == model]
    demands = [each for each in shown["demand"]["models"] if each["model"] == model]
    if not rows or not demands:
        raise KeyError(model)
    statistics = shown["statistics"]
    runs = [segment for layer in demands[0]["layers"] for segment in layer["segments"]]
    sizes = [run["experts"][1] - run["experts"][0] for run in runs]
    sized = list(zip(runs, sizes, strict=True))
    wanted = sum(run["target"] * size for run, size in sized)
    there = sum(min(run["replicas"], run["target"]) * size for run, size in sized)
    nodes = [node for node in statistics["nodes"] if node["model"] == model]
    return HubLook(
        policy=str(shown["policy"]["rule"]),
        recruiting=bool(rows[0]["recruiting"]),
        threshold=int(shown["recruitment"]["threshold"]),
        base=int(rows[0]["base_target"]),
        target=int(rows[0]["effective_target"]),
        claims=int(statistics["claims_open"]),
        online=int(shown["workers"]),
        covering=int(rows[0]["workers"]),
        covered=sum(size for run, size in sized if run["replicas"]) / max(1, sum(sizes)),
        reached=there / wanted if wanted else 1.0,
        surplus=sum(max(0, run["replicas"] - run["target"]) * size for run, size in sized),
        slices=tuple(
            (str(node["worker"]), tuple(map(int, segment)), node["last_serve_ms"] > 0)
            for node in nodes
            for segment in node["segments"]
        ),
        counts=counts_of(shown),
    )


def counts_of(shown: dict[str, Any]) -> dict[str, int]:
    """The hub's own counts, which need no model. Raises as `look_of`."""
    statistics, slices = shown["statistics"], shown["slices"]
    return {name: int(statistics[name]) for name in COUNTS} | {
        "downloads": int(slices["sent"]),
        "download_bytes": int(slices["bytes_sent"]),
        "warm_loads": int(slices["confirmed"]),
    }
