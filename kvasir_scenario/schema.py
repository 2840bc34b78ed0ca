"""The scenario: one YAML file that both shells read. Attribute names are the file's keys.

Each section is a module of its own; this one puts them together and checks what spans sections.
Everything is refused here that can be refused without opening another file.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from kvasir_core.errors import ScenarioError
from kvasir_scenario.origin import Origin, key_path
from kvasir_scenario.schema_costs import Costs, FixedCosts, RooflineCosts, fixed_times
from kvasir_scenario.schema_experts import Experts
from kvasir_scenario.schema_faults import RING_FAULTS, WORKER_FAULTS, Fault, StageLost, StageSlow
from kvasir_scenario.schema_model import Device, Model
from kvasir_scenario.schema_ring import Policy, Ring, Stage
from kvasir_scenario.schema_types import (
    AsTuple,
    Name,
    PositiveSeconds,
    Seconds,
    Section,
    Text,
    broken,
    broken_at,
    did_you_mean,
)
from kvasir_scenario.schema_workload import ClosedWorkload, Workload

VARIANTS_MAX = 64  # A what-if table longer than a screen is a sweep.
FAULTS_MAX = 1000
DEVICES_MAX = 1024


class Slo(Section):
    """What counts as good service; goodput counts requests that meet all of it."""

    ttft_s: PositiveSeconds | None = None
    tpot_s: PositiveSeconds | None = None


class Run(Section):
    """Seed and measured window."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    warmup_s: Seconds = 0.0
    """Throughput and latency are measured after this time."""
    horizon_s: PositiveSeconds | None = None
    """null: until the last request ends."""

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.horizon_s is not None and self.warmup_s >= self.horizon_s:
            raise broken(
                "warmup_s",
                f"found {self.warmup_s:g}; it must be less than horizon_s ({self.horizon_s:g})",
            )
        return self


class Runtime(Section):
    """Only for `kvasir-rt`: where and how the stages really run."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$")] | None = None
    """For every stage; null: what the stage's device says, or what there is."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in; null: as `model.dtype` says."""
    pin: bool = False
    """On the CPU: one core per stage."""


class Scenario(Section):
    """One experiment: a model on devices in a ring, under a policy and a workload."""

    name: Name = "scenario"
    """Names the run's folder; without it the file's name."""
    question: Text | None = None
    """What the scenario answers, for those who read the file."""
    model: Model
    devices: Annotated[dict[Name, Device], Field(max_length=DEVICES_MAX)] = Field(
        default_factory=dict
    )
    ring: Ring
    costs: Costs = FixedCosts(kind="fixed")
    policy: Policy = Policy()
    workload: Workload
    slo: Slo = Slo()
    experts: Experts | None = None
    faults: Annotated[tuple[Fault, ...], AsTuple, Field(max_length=FAULTS_MAX)] = ()
    what_if: Annotated[dict[Name, dict[str, Any]], Field(max_length=VARIANTS_MAX)] = Field(
        default_factory=dict
    )
    """NAME: {key.path: value}: variants that run beside the baseline."""
    run: Run = Run()
    runtime: Runtime = Runtime()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def __eq__(self, other: object) -> bool:
        """Same content, wherever it was read from."""
        return isinstance(other, Scenario) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    @property
    def base(self) -> Path:
        """The directory that relative paths resolve against."""
        return self._origin.base

    def error(self, key: str, message: str) -> ScenarioError:
        """A complaint about `key` (dotted) that names file and line; the caller raises it."""
        return self._origin.error(key_path(self._origin.data, key), message)

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        named = [("ring.device", self.ring.device)]
        if not isinstance(self.ring.stages, int):
            named += [
                (f"ring.stages.{index}.device", stage.device)
                for index, stage in enumerate(self.ring.stages)
            ]
        for key, name in named:
            if name is not None and name not in self.devices:
                hint = did_you_mean(name, self.devices)
                raise broken(key, f"found {name}, which `devices` does not have; {hint}")
        if isinstance(self.costs, RooflineCosts):
            for key, name in named[1:] or named:
                if name is None and self.ring.device is None:
                    raise broken(key, "missing; costs of kind roofline need a device per stage")
        return self

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        needs: dict[str, str] = {}
        if any(hop.bandwidth_bytes_per_s is not None for hop in self.ring.hops[:-1]):
            needs = dict.fromkeys(("hidden",), "links with a bandwidth carry rows of this width")
        if isinstance(self.costs, RooflineCosts):
            mixture = () if self.model.experts is None else ("expert_ffn",)
            dense = () if mixture else ("ffn",)
            keys = ("hidden", "heads", "kv_heads", "vocab", *dense, *mixture)
            needs |= dict.fromkeys(keys, "costs of kind roofline need it")
        for key, why in needs.items():
            if getattr(self.model, key) is None:
                raise broken(f"model.{key}", f"missing; {why} (or name a preset)")
        return self

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        for name, changes in self.what_if.items():
            for key in changes:
                if key.split(".")[0] in ("what_if", "name"):
                    raise broken_at(("what_if", name, key), "a variant cannot change this key")
        return self

    @model_validator(mode="after")
    def _check_costs(self) -> Self:
        stages = () if isinstance(self.ring.stages, int) else self.ring.stages
        if isinstance(self.costs, FixedCosts):
            for index, stage in enumerate(stages or (Stage(),)):
                if not any(fixed_times(self.costs, stage)):
                    key = f"ring.stages.{index}.pass_s" if stages else "costs.pass_s"
                    raise broken(key, "a stage that takes no time at all; give it pass_s > 0")
            return self
        for index, stage in enumerate(stages):
            for name in ("pass_s", "per_token_s", "pass_s_per_layer"):
                if getattr(stage, name) is not None:
                    raise broken(
                        f"ring.stages.{index}.{name}",
                        f"only costs of kind fixed use it, and these are {self.costs.kind}",
                    )
        return self

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        count = self.ring.stage_count
        for index, fault in enumerate(self.faults):
            if isinstance(fault, RING_FAULTS):
                key = "stage" if isinstance(fault, StageLost | StageSlow) else "hop"
                place = getattr(fault, key)
                if place != "any" and place >= count:
                    raise broken(
                        f"faults.{index}.{key}",
                        f"found {place}; with {count} stages it must be from 0 to {count - 1}",
                    )
            elif self.experts is None:
                raise broken(f"faults.{index}.kind", f"found {fault.kind}; there are no `experts`")
            elif isinstance(fault, WORKER_FAULTS) and fault.workers is not None:
                names = [worker.name for worker in self.experts.workers]
                if fault.workers not in names:
                    hint = did_you_mean(fault.workers, names)
                    raise broken(f"faults.{index}.workers", f"found {fault.workers}; {hint}")
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        endless = (
            isinstance(self.workload, ClosedWorkload)
            and self.workload.requests is None
            and self.workload.duration_s is None
        )
        if endless and self.run.horizon_s is None:
            raise broken(
                "run.horizon_s",
                "missing; closed-loop users never stop: give it, workload.requests or "
                "workload.duration_s",
            )
        return self


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a scenario, for editors."""
    schema = Scenario.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
