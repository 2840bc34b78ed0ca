"""Machines that can run a stage: a catalogue by name, or the scenario's own numbers.

Peaks are vendors' figures for dense (not sparse) arithmetic with 32-bit accumulation. What a
kernel reaches of them is the business of `costs.efficiency`, so that a better kernel changes one
number and not the catalogue. Entries that rest on a third party's measurement, or on our
estimate, say so in `source`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from kvasir_core.errors import ScenarioError

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the roofline needs to know of a machine.

    Attributes:
        flops: Peak FLOP/s by dtype of the weights.
        bandwidth_bytes_per_s: Peak memory bandwidth.
        memory_bytes: For weights and KV; None: not known, so not checked.
        units: Multiprocessors that work on tiles of one kernel side by side; None: not modelled.
        cache_bytes: Last-level cache, from which unit after unit reads the same KV; None: alike.
        overhead_s: Per micro-batch, what no formula covers; None: the efficiency's default.
        source: Where the numbers are from.
        is_assumed: The numbers are estimates, not a data sheet's.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: int | None = None
    units: int | None = None
    cache_bytes: int | None = None
    overhead_s: float | None = None
    source: str = "the scenario's numbers"
    is_assumed: bool = False

    def peak(self, dtype: str) -> float:
        """FLOP/s at this dtype.

        Raises:
            ScenarioError: No figure for it; the message names those there are.
        """
        if dtype not in self.flops:
            raise ScenarioError(
                f"device {self.name}: no FLOP/s for {dtype}; it has "
                f"{', '.join(sorted(self.flops))}; give devices.{self.name}.flops"
            )
        return self.flops[dtype]


class DeviceSection(Protocol):
    """An entry of the scenario's `devices`; any number given wins over the preset's."""

    @property
    def preset(self) -> str | None: ...
    @property
    def flops(self) -> float | None: ...
    @property
    def bandwidth_bytes_per_s(self) -> float | None: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def overhead_s(self) -> float | None: ...


def _flops(bfloat16: float, float32: float) -> Mapping[str, float]:
    """16-bit formats run at one speed on all devices here."""
    return MappingProxyType(
        {"bfloat16": bfloat16 * TERA, "float16": bfloat16 * TERA, "float32": float32 * TERA}
    )


def _device(
    name: str,
    tera: tuple[float, float],
    giga_bytes_per_s: float,
    gib: float,
    source: str,
    *,
    units: int | None = None,
    cache_mib: int | None = None,
    is_assumed: bool = False,
) -> Device:
    return Device(
        name=name,
        flops=_flops(*tera),
        bandwidth_bytes_per_s=giga_bytes_per_s * GIGA,
        memory_bytes=round(gib * GIB),
        units=units,
        cache_bytes=None if cache_mib is None else cache_mib << 20,
        source=source,
        is_assumed=is_assumed,
    )


_APPLE = "Apple's technical specifications (bandwidth, memory); FLOP/s of the GPU at float32"

# Name, (16-bit, float32) TFLOP/s dense, GB/s, GiB, source.
_ENTRIES = (
    _device("a100-40g", (312, 19.5), 1555, 40, "NVIDIA A100 data sheet, SXM4 40 GB",
            units=108, cache_mib=40),
    _device("a100-80g", (312, 19.5), 2039, 80, "NVIDIA A100 data sheet, SXM4 80 GB",
            units=108, cache_mib=40),
    _device("h100-sxm", (989.4, 66.9), 3350, 80, "NVIDIA H100 data sheet, SXM5 (dense)",
            units=132, cache_mib=50),
    _device("h100-pcie", (756, 51.2), 2000, 80, "NVIDIA H100 data sheet, PCIe (dense)",
            units=114, cache_mib=50),
    _device("h200", (989.4, 66.9), 4800, 141 * 1e9 / GIB, "NVIDIA H200 data sheet, SXM (dense)",
            units=132, cache_mib=50),
    _device("l40s", (362, 91.6), 864, 48, "NVIDIA L40S data sheet (dense)",
            units=142, cache_mib=96),
    _device("rtx4090", (165.2, 82.6), 1008, 24,
            "NVIDIA Ada GPU architecture paper (dense, 32-bit accumulation)",
            units=128, cache_mib=72),
    _device("rtx-pro-6000", (503.8, 120), 1597, 96,
            "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet (half the sparse figure)",
            units=188, cache_mib=128),
    _device("apple-m1", (2.6, 2.6), 68.25, 16, _APPLE),
    _device("apple-m2-ultra", (27.2, 27.2), 800, 192, _APPLE),
    _device("apple-m3-max", (14.2, 14.2), 400, 128, _APPLE),
    _device("apple-m4", (4.3, 4.3), 120, 32, _APPLE),
    _device("apple-m4-pro", (9.2, 9.2), 273, 64, _APPLE),
    _device("apple-m4-max", (18.4, 18.4), 546, 128, _APPLE),
    _device("phone", (2.0, 1.0), 60, 8,
            "estimate for a 2024 phone: LPDDR5X at 77 GB/s shared with the rest of the chip",
            is_assumed=True),
    _device("cpu-core", (0.19, 0.096), 20, 16,
            "estimate for one server core: AVX-512 at 3 GHz, one core's share of memory",
            is_assumed=True),
)  # fmt: skip

CATALOGUE: Mapping[str, Device] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def device_of(name: str) -> Device:
    """A device of the catalogue.

    Raises:
        ScenarioError: Unknown; the message lists near matches, then all names.
    """
    if (known := CATALOGUE.get(name)) is not None:
        return known
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ScenarioError(
        f"device preset {name!r} is not in the catalogue; {hint}known: {', '.join(CATALOGUE)}; "
        "or give flops, bandwidth_bytes_per_s and memory_bytes"
    )


def device_from(name: str, section: DeviceSection, dtype: str) -> Device:
    """The device that a scenario's entry describes; `flops` is taken to be that of `dtype`.

    Raises:
        ScenarioError: The preset is unknown, or numbers are missing.
    """
    if section.preset is None:
        if section.flops is None or section.bandwidth_bytes_per_s is None:
            raise ScenarioError(
                f"devices.{name}: needs a preset, or flops and bandwidth_bytes_per_s"
            )
        return Device(
            name=name,
            flops={dtype: section.flops},
            bandwidth_bytes_per_s=section.bandwidth_bytes_per_s,
            memory_bytes=section.memory_bytes,
            overhead_s=section.overhead_s,
            is_assumed=True,
        )
    device = replace(device_of(section.preset), name=name)
    if section.flops is not None:
        device = replace(device, flops={dtype: section.flops})
    if section.bandwidth_bytes_per_s is not None:
        device = replace(device, bandwidth_bytes_per_s=section.bandwidth_bytes_per_s)
    if section.memory_bytes is not None:
        device = replace(device, memory_bytes=section.memory_bytes)
    if section.overhead_s is not None:
        device = replace(device, overhead_s=section.overhead_s)
    return device
