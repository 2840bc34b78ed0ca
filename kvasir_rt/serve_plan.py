"""From a model's shape and the command line to the plan: defaults and their reasons."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_core.errors import PlanError
from kvasir_core.plan import Plan
from kvasir_rt.measure_split import Beside
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.split import estimated_tail_layers, parse_layers, split_by_cost

AUTO = "auto"
CONTEXT_DEFAULT_MAX = 4096  # Models state far more than a small machine can hold KV for.
KV_TOKENS_DEFAULT_MAX = 65_536
KV_MEMORY_SHARE = 0.25  # Of the machine, for all stages together; pages are taken when written.
WINDOW_MAX_PER_STAGE = 4  # Four micro-batches a stage cover links as long as three holds.
OVERLAP_ON_THE_WAY = 2  # A stage's input slots: what it takes in hand next must be there.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The ring as the command line asks for it; None takes the default of `plan_for`.

    Attributes:
        stages: How many, where `layers` does not say.
        layers: `18,12`; None for a split by estimated cost; `auto` by measured cost.
        devices: One for all stages, or one each.
        dtype: `float32` or `bfloat16`; the default is float32 on the CPU, bfloat16 elsewhere.
        window: A number, or None for auto.
        overlap: Most micro-batches that a stage holds at once.
    """

    stages: int = 2
    layers: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    dtype: str | None = None
    context: int | None = None
    row_width: int = 128
    micro_batch_width: int = 8
    window: int | None = None
    running_max: int = 32
    kv_tokens: int | None = None
    packer: str = "cohort"
    overlap: int = 1

    @property
    def number_format(self) -> str:
        is_cpu = all(device == "cpu" for device in self.devices)
        return self.dtype or ("float32" if is_cpu else "bfloat16")

    def devices_of(self, stages: int) -> tuple[str, ...]:
        """The device of each stage.

        Raises:
            PlanError: Neither one device nor one per stage.
        """
        if len(self.devices) == 1:
            return self.devices * stages
        if len(self.devices) != stages:
            raise PlanError(
                f"--device names {len(self.devices)} devices for {stages} stages; name one, or "
                "one for each"
            )
        return self.devices


def check_devices(devices: Sequence[str]) -> None:
    """Whether these devices are here; torch is asked only for those that are not the CPU.

    Raises:
        PlanError: One has no such name, or is not there.
    """
    wrong = [device for device in devices if not re.fullmatch(r"cpu|cuda:\d{1,3}", device)]
    if wrong:
        raise PlanError(f"--device {wrong[0]} is no device; it must be cpu, or cuda:0 and so on")
    indexes = [int(device.partition(":")[2]) for device in devices if device != "cpu"]
    if not indexes:
        return
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if max(indexes) >= gpus:
        raise PlanError(
            f"--device cuda:{max(indexes)} is not there: torch sees {gpus} GPUs on this machine"
        )


def plan_for(shape: ModelShape, options: RingOptions, beside: Beside | None = None) -> Plan:
    """The ring's fixed numbers for a model.

    Args:
        shape: The model's.
        options: What was asked for.
        beside: What head and tail do beside their layers; estimated if it was not measured.

    Raises:
        PlanError: What was asked for contradicts the model or itself.
    """
    if options.layers is not None and options.layers != AUTO:
        layers = parse_layers(options.layers, shape.layers)
    else:
        beside = beside or Beside(0.0, estimated_tail_layers(shape))
        layers = split_by_cost(
            shape.layers,
            options.stages,
            head_layers=beside.head_layers,
            tail_layers=beside.tail_layers,
        )
    context = options.context or min(shape.context, CONTEXT_DEFAULT_MAX)
    if context > shape.context:
        raise PlanError(f"--context is {context}; the model was made for {shape.context}")
    element_bytes = ELEMENT_BYTES[options.number_format]
    kv_tokens = options.kv_tokens or _kv_tokens(shape, options.running_max * context, element_bytes)
    stages = len(layers)
    per_stage = max(WINDOW_MAX_PER_STAGE, options.overlap + OVERLAP_ON_THE_WAY)
    window_max = options.window or per_stage * stages
    return Plan(
        layers=layers,
        row_width=options.row_width,
        micro_batch_width=options.micro_batch_width,
        window=options.window or min(stages, window_max),
        window_max=window_max,
        window_auto=options.window is None and options.packer != "drained",
        running_max=options.running_max,
        context=context,
        kv_tokens=(kv_tokens,) * stages,
        hidden=shape.hidden,
        element_bytes=element_bytes,
        packer=options.packer,
    )


def _kv_tokens(shape: ModelShape, wanted: int, element_bytes: int) -> int:
    """As many as all requests could use, within a share of this machine's memory."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element_bytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = int(memory * KV_MEMORY_SHARE) // per_token
    return max(1, min(wanted, KV_TOKENS_DEFAULT_MAX, fits))
