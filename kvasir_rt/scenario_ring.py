"""From a scenario to a real ring: its model file, its plan, its devices, and what cannot be real.

Links, costs and device presets describe an imagined machine; here the real one answers. What a
scenario asks of a run and this shell cannot do is refused by key, never left out silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir_core.errors import PlanError
from kvasir_core.plan import Plan
from kvasir_rt import wire
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model_files import PACKAGED, find_model
from kvasir_rt.serve_plan import ELEMENT_BYTES
from kvasir_rt.split import estimated_tail_layers, split_by_cost
from kvasir_scenario.load import resolve_path
from kvasir_scenario.planning import LayerRanges, plan_of
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_faults import StageLost, StageSlow

FIXED_DTYPE = "float16"  # Of fixed stages' boundaries: their bytes are no numbers.


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRing:
    """What the engine needs to know of a scenario."""

    plan: Plan
    dtype: str
    compute: wire.ComputeSpec
    vocabulary: int


def model_file(path: Path) -> Path:
    """The file of `model.path`, which may be the short name of a packaged model.

    Raises:
        ModelFileError: There is no such file.
    """
    return find_model(path.name if path.name in PACKAGED and not path.exists() else str(path))


def read_shape(path: Path) -> Mapping[str, int | str | bool]:
    """The keys of section `model` that a model file answers."""
    with open_gguf(model_file(path)) as gguf:
        shape = ModelShape.of(gguf)
    keys: dict[str, int | str | bool] = {
        "layers": shape.layers,
        "context": shape.context,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "tied_embeddings": shape.is_tied,
        "experts": shape.experts,
        "experts_used": shape.experts_used,
        "expert_ffn": shape.expert_ffn,
    }
    return {key: value for key, value in keys.items() if value != 0}


def plan_layers(scenario: Scenario) -> LayerRanges:
    """`layers: auto`: by the weights that each stage reads, the tail's output matrix included.

    Raises:
        ScenarioError: More stages than layers.
    """
    tail_layers = 0.0
    if scenario.model.path is not None:
        with open_gguf(model_file(resolve_path(scenario, scenario.model.path))) as gguf:
            tail_layers = estimated_tail_layers(ModelShape.of(gguf))
    try:
        return split_by_cost(
            scenario.model.layers, scenario.ring.stage_count, tail_layers=tail_layers
        )
    except PlanError as error:
        raise scenario.error("ring.stages", str(error)) from None


def fixed_ring(scenario: Scenario, hold_s: tuple[float, ...], vocabulary: int) -> RealRing:
    """A ring of stages that compute nothing, for tests of the ring itself."""
    check_can_run(scenario)
    plan = replace(plan_of(scenario, plan_layers), hidden=8, element_bytes=2)
    holds = tuple(round(hold * 1e9) for hold in hold_s)
    return RealRing(
        plan=plan,
        dtype=FIXED_DTYPE,
        compute=wire.FixedSpec(holds, vocabulary),
        vocabulary=vocabulary,
    )


def ring_of(scenario: Scenario, device: str | None = None, *, has_hub: bool = False) -> RealRing:
    """The ring that runs this scenario's model.

    Args:
        scenario: A valid scenario.
        device: For every stage, whatever the scenario says.
        has_hub: Its experts are shared with a hub's workers.

    Raises:
        ScenarioError: There is no model file, it contradicts the scenario, a device is not here, or
            something is asked that only the simulator does.
    """
    model = scenario.model
    if model.path is None:
        raise scenario.error(
            "model.path",
            "missing; kvasir-rt runs a real model: name a GGUF file, or smollm2-135m "
            "(kvasir-sim needs none)",
        )
    check_can_run(scenario, has_hub=has_hub)
    path = model_file(resolve_path(scenario, model.path))
    with open_gguf(path) as gguf:
        shape = ModelShape.of(gguf)
    for key, asked, found in (
        ("layers", model.layers, shape.layers),
        ("hidden", model.hidden, shape.hidden),
    ):
        if asked is not None and asked != found:
            raise scenario.error(f"model.{key}", f"found {asked}; {path.name} has {found}")
    if model.context > shape.context:
        raise scenario.error(
            "model.context", f"found {model.context}; {path.name} was made for {shape.context}"
        )
    dtype = scenario.runtime.dtype or model.dtype
    if dtype not in ELEMENT_BYTES:
        key = "runtime.dtype" if scenario.runtime.dtype else "model.dtype"
        raise scenario.error(
            key, f"found {dtype}; kvasir-rt computes in {' or '.join(ELEMENT_BYTES)}"
        )
    if has_hub and not shape.experts:
        raise scenario.error("model.path", f"{path.name} is dense: it has no experts to share")
    plan = replace(
        plan_of(scenario, plan_layers), hidden=shape.hidden, element_bytes=ELEMENT_BYTES[dtype]
    )
    devices = devices_of(scenario, device or scenario.runtime.device)
    return RealRing(
        plan=plan,
        dtype=dtype,
        compute=wire.ModelSpec(str(path), "", devices),
        vocabulary=shape.vocab,
    )


def check_can_run(scenario: Scenario, *, has_hub: bool = False) -> None:
    """Refuse what only the simulator does.

    Raises:
        ScenarioError: Names the key.
    """
    if scenario.experts is not None and not has_hub:
        raise scenario.error(
            "experts",
            "found a swarm; give --hub URL to share the experts with the workers of a hub that "
            "runs (`kvasir-rt hub`, `kvasir-rt worker`)",
        )
    if scenario.experts is None and has_hub:
        raise scenario.error("experts", "missing; --hub shares the experts of such a section")
    if scenario.ring.prefix_cache:
        raise scenario.error("ring.prefix_cache", "found true; only kvasir-sim models it")
    for index, fault in enumerate(scenario.faults):
        if not isinstance(fault, StageLost | StageSlow):
            raise scenario.error(
                f"faults.{index}.kind",
                f"found {fault.kind}; on real processes only stage_lost and stage_slow can be done",
            )


def devices_of(scenario: Scenario, device: str | None) -> tuple[str, ...]:
    """Where each stage runs: as told, else on a GPU where the scenario names a device.

    Raises:
        ScenarioError: A GPU is asked for that is not here.
    """
    ring = scenario.ring
    count = ring.stage_count
    if device == "cpu":
        return ("cpu",) * count
    named = [ring.device] * count
    if isinstance(ring.stages, tuple):
        named = [stage.device or ring.device for stage in ring.stages]
    if device is None and not any(named):
        return ("cpu",) * count
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None:
        index = int(device.partition(":")[2] or 0)
        if index >= gpus:
            raise scenario.error(
                "runtime.device", f"found {device}; there are {gpus} GPUs here (--device cpu runs)"
            )
        return (f"cuda:{index}",) * count
    missing = next(name for name in named if name)
    if not gpus:
        raise scenario.error(
            f"devices.{missing}",
            "asks for a GPU and there is none here; --device cpu runs it on the processor",
        )
    return tuple(f"cuda:{k % gpus}" if name else "cpu" for k, name in enumerate(named))
