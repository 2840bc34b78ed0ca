"""Why the planner chose what it chose, in sentences; and the plan as a scenario file."""

from typing import TYPE_CHECKING

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.dump import to_yaml

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario
    from kvasir_sim.plan_load import Load
    from kvasir_sim.planner import PlannedRing

BYTES_PER_GB = 1e9


def reasons(scenario: "Scenario", load: "Load", planned: "PlannedRing") -> tuple[str, ...]:
    """One sentence for each choice, with the numbers that made it."""
    return (
        _reference(load, planned),
        _split(planned),
        _bottleneck(planned),
        _order(scenario, planned),
        _window(scenario, planned),
        _widths(scenario, planned),
        _kv(scenario, planned),
    )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"


def _counts(planned: "PlannedRing") -> list[int]:
    return [stop - start for start, stop in planned.layers]


def _reference(load: "Load", planned: "PlannedRing") -> str:
    reference = planned.reference
    return (
        f"balanced for the load's average micro-batch: {reference.decodes} decodes at context "
        f"{reference.context} and {reference.chunk_rows} prompt rows (mean request: "
        f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens)"
    )


def _split(planned: "PlannedRing") -> str:
    layers = ", ".join(map(str, _counts(planned)))
    holds = ", ".join(_ms(hold) for hold in planned.holds_ns)
    text = f"layers {layers}: the stages hold it for {holds}"
    if planned.even_ns is None:
        return f"{text}; an even split does not fit in memory"
    even = max(planned.even_ns)
    gain = even / max(planned.holds_ns) - 1
    return f"{text}; the longest of an even split would be {_ms(even)} ({gain:+.1%})"


def _bottleneck(planned: "PlannedRing") -> str:
    longest = max(planned.holds_ns)
    rate = f"at most {planned.tokens_per_s:.4g} output tokens/s, with a full window"
    link = max(planned.links_ns)
    if link > longest:
        place = planned.links_ns.index(link)
        return f"link-bound: hop {place} carries it for {_ms(link)}, longer than any stage; {rate}"
    stage = planned.holds_ns.index(longest)
    return f"stage {stage} is the longest with {_ms(longest)}: {rate}"


def _order(scenario: "Scenario", planned: "PlannedRing") -> str:
    from kvasir_sim.planner import is_order_free

    if len(set(map(repr, planned.stages))) == 1:
        return "order: all stages are alike"
    if not is_order_free(scenario):
        return "order kept: the scenario gives links, KV or faults by place"
    if planned.order == tuple(range(len(planned.order))):
        return "order kept: no other first and last stage make the slowest stage faster"
    places = ", ".join(map(str, planned.order))
    return (
        f"order changed: places {places} of the scenario's list; the first and the last stage have "
        "extra work, and so the slowest stage takes the least time"
    )


def _window(scenario: "Scenario", planned: "PlannedRing") -> str:
    if scenario.ring.window != "auto":
        return f"window {planned.window}: given"
    return (
        f"window {planned.window}: a lap of {_ms(sum(planned.holds_ns))} in stages, the links and "
        f"the turnaround, over the longest hold of {_ms(max(planned.holds_ns))}, rounded up"
    )


def _widths(scenario: "Scenario", planned: "PlannedRing") -> str:
    given = scenario.ring.model_fields_set
    kept = [name for name in ("row_width", "micro_batch_width") if name in given]
    text = f"row width {planned.row_width}, micro-batch width {planned.micro_batch_width}"
    if scenario.costs.kind not in {"roofline", "profile"} or len(kept) == 2:
        return f"{text}: as the scenario has them"
    if kept:
        return f"{text}: {kept[0]} is given"
    slo = "" if scenario.slo.tpot_s is None else ", as far as slo.tpot_s allows"
    return (
        f"{text}: a chunk of that length runs at 90 % of the best rate{slo}, and a full window "
        "holds all running requests"
    )


def _kv(scenario: "Scenario", planned: "PlannedRing") -> str:
    if planned.kv_tokens is None:
        return f"KV {scenario.ring.kv_tokens}: as the scenario has it"
    reference = planned.reference
    needed = planned.window * reference.decodes * reference.context
    word = "enough for" if planned.kv_tokens >= needed else "less than"
    return (
        f"KV {planned.kv_tokens} tokens a stage: what fits at the scarcest; {word} a full window "
        f"of the average micro-batch ({needed})"
    )


def stage_lines(planned: "PlannedRing") -> tuple[str, ...]:
    """One line for each stage: device, layers, hold and memory."""
    lines = []
    for index, (stage, (start, stop), hold, memory) in enumerate(
        zip(planned.stages, planned.layers, planned.holds_ns, planned.memory, strict=True)
    ):
        device = "" if stage.device is None else f" on {stage.device}"
        text = f"stage {index}{device}: layers [{start}, {stop}), {_ms(hold)} a micro-batch"
        if memory is not None:
            taken, room = (size / BYTES_PER_GB for size in memory)
            text += f", {taken:.1f} of {room:.1f} GB for weights and KV"
        lines.append(text)
    return tuple(lines)


def planned_scenario(scenario: "Scenario", planned: "PlannedRing") -> "Scenario":
    """The scenario with the plan written into its ring."""
    stages = tuple(
        stage.model_copy(update={"layers": layers})
        for stage, layers in zip(planned.stages, planned.layers, strict=True)
    )
    changes: dict[str, object] = {
        "stages": stages,
        "layers": "even",  # The default, and unused: each stage has its own.
        "window": planned.window,
        "window_max": None,
        "row_width": planned.row_width,
        "micro_batch_width": planned.micro_batch_width,
    }
    if planned.kv_tokens is not None:
        changes["kv_tokens"] = planned.kv_tokens
    return scenario.model_copy(update={"ring": scenario.ring.model_copy(update=changes)})


def plan_yaml(scenario: "Scenario", planned: "PlannedRing") -> str:
    """The planned scenario as YAML, the reasons on top as comments.

    Relative paths stand as in the original: write it beside that file.
    """
    lines = [f"# Planned by kvasir-sim plan: at most {planned.tokens_per_s:.4g} output tokens/s."]
    lines += [f"# {line}" for line in stage_lines(planned)]
    lines += [f"# - {sentence}" for sentence in planned.why]
    return "\n".join(lines) + "\n" + to_yaml(planned_scenario(scenario, planned))


def plan_facts(planned: "PlannedRing") -> dict[str, object]:
    """The plan as strict JSON."""
    return {
        "layers": [list(pair) for pair in planned.layers],
        "order": list(planned.order),
        "devices": [stage.device for stage in planned.stages],
        "window": planned.window,
        "row_width": planned.row_width,
        "micro_batch_width": planned.micro_batch_width,
        "kv_tokens": planned.kv_tokens,
        "holds_s": [hold / NANOS_PER_SECOND for hold in planned.holds_ns],
        "links_s": [link / NANOS_PER_SECOND for link in planned.links_ns],
        "even_holds_s": None
        if planned.even_ns is None
        else [hold / NANOS_PER_SECOND for hold in planned.even_ns],
        "output_tokens_per_s": planned.tokens_per_s,
        "why": list(planned.why),
    }
