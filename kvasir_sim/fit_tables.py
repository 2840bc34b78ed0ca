"""The measured tables as `fit.Table`s: what each point asks for, in bytes and FLOPs at the peaks.

Layer times are of Qwen3-30B-A3B in bfloat16 on one RTX PRO 6000 (vLLM 0.19, no tensor
parallelism: the output matrix's 622 MB in 420 us tell). A constant that multiplies seconds at the
peak is the inverse of an efficiency and is named so: `1/memory`, `1/flops`.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvasir_core.errors import ScenarioError
from kvasir_sim.costs.attention import LAST_WAVE, TILE_ROWS
from kvasir_sim.costs.efficiency import FITTED, FITTED_DEVICE, Efficiency
from kvasir_sim.costs.roofline import EXPERT_ROW_WIDTHS, LOGIT_BYTES
from kvasir_sim.costs.shape import ModelShape
from kvasir_sim.devices import CATALOGUE
from kvasir_sim.fit import Column, Model, Residual, Table, Term

FILE_BYTES_MAX = 64 << 20
PREFIX = "qwen3-30b-a3b_rtxpro6000_profile_"
MICRO, MILLI = 1e-6, 1e-3

SHAPE = ModelShape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    dtype="bfloat16",
    element_bytes=2,
    experts=128,
    experts_used=8,
    expert_ffn=768,
)
DEVICE = CATALOGUE[FITTED_DEVICE]
BANDWIDTH = DEVICE.bandwidth_bytes_per_s
PEAK = DEVICE.peak(SHAPE.dtype)

MATRICES = {
    "qkv_proj": (SHAPE.hidden, (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim),
    "o_proj": (SHAPE.heads * SHAPE.head_dim, SHAPE.hidden),
    "lm_head": (SHAPE.hidden, SHAPE.vocab),
}
_ROTATED = (SHAPE.heads + SHAPE.kv_heads) * SHAPE.head_dim
ROW_WIDTHS = {  # Elements that a small kernel moves per row, in and out together.
    "embedding": 2 * SHAPE.hidden,
    "layernorm": 4 * SHAPE.hidden,
    "final_layernorm": 4 * SHAPE.hidden,
    "rotary_emb": 2 * _ROTATED,
    "qk_norm": 2 * _ROTATED,
}


def all_tables(folder: Path) -> list[Table]:
    """Every measured table below `folder`, in the order of the printed report.

    Raises:
        ScenarioError: A file is missing or not as its README says.
    """
    vllm = folder / "measured_vllm"
    rows = _grouped(vllm / f"{PREFIX}dense.csv", "layer", ("tokens", "time_us"))
    rows |= _grouped(vllm / f"{PREFIX}per_sequence.csv", "layer", ("sequences", "time_us"))
    tables = [_matrix(name, *rows[name]) for name in MATRICES]
    tables.append(_experts(vllm / f"{PREFIX}moe.csv"))
    tables.append(_attention(vllm / f"{PREFIX}attention.csv"))
    tables += [
        _small(name, width * SHAPE.element_bytes, *rows[name]) for name, width in ROW_WIDTHS.items()
    ]
    tables.append(_small("sampler", SHAPE.vocab * LOGIT_BYTES, *rows["sampler"]))
    for host in ("a100", "h100"):
        tables += _links(host, folder / "links" / f"network_{host}_dgx_send_recv.csv")
    return tables


def efficiency_from(residuals: Sequence[Residual]) -> Efficiency:
    """The efficiencies that these fits give; what is not fitted stays as it is."""
    of = {residual.table: residual for residual in residuals}
    experts, attention, sampler = of["experts of one layer"], of["attention"], of["sampler"]
    many_rows = [1 / of[name].value("1/flops") for name in ("qkv_proj", "o_proj")]
    prompt_flops = 1 / attention.value("1/prompt_flops")
    return replace(
        FITTED,
        matrix_memory=1 / of["lm_head"].value("1/memory"),
        matrix_flops=sum(many_rows) / len(many_rows),
        kernel_s=min(of[name].value("floor_s") for name in ROW_WIDTHS),
        expert_memory=1 / experts.value("1/memory"),
        expert_flops=1 / experts.value("1/flops"),
        expert_s=experts.value("floor_s"),
        decode_memory=1 / attention.value("1/decode_memory"),
        decode_s=attention.value("decode_s"),
        prompt_flops=prompt_flops,
        prompt_memory=1 / attention.value("1/prompt_memory"),
        prompt_s=attention.value("prompt_s"),
        tile_positions=attention.value("tile_positions/flops") * prompt_flops,
        empty_tile_s=attention.value("empty_tile_s"),
        sampler_memory=1 / sampler.value("1/memory"),
        sampler_s=sampler.value("floor_s"),
    )


def _matrix(name: str, rows: Column, time_us: Column) -> Table:
    inputs, outputs = MATRICES[name]
    size = SHAPE.element_bytes * (inputs * outputs + rows * (inputs + outputs))
    flops = 2 * rows * inputs * outputs
    return Table(
        name=name,
        group="matrix",
        model=Model(
            ((0, np.ones_like(rows)),),
            (("memory", ((1, size / BANDWIDTH),)), ("compute", ((2, flops / PEAK),))),
        ),
        measured_s=time_us * MICRO,
        size=rows,
        constants=("floor_s", "1/memory", "1/flops"),
        start=(2e-6, 1.1, 1.6),
    )


def _experts(path: Path) -> Table:
    rows, distinct, time_us = read_columns(path, ("tokens", "activated_experts", "time_us"))
    pairs = rows * SHAPE.experts_used
    moved = EXPERT_ROW_WIDTHS[0] * SHAPE.hidden + EXPERT_ROW_WIDTHS[1] * SHAPE.expert_ffn
    size = distinct * SHAPE.expert_bytes + pairs * moved * SHAPE.element_bytes
    flops = pairs * 6 * SHAPE.hidden * SHAPE.expert_ffn
    return Table(
        name="experts of one layer",
        group="experts",
        model=Model(
            ((0, np.ones_like(rows)),),
            (("memory", ((1, size / BANDWIDTH),)), ("compute", ((2, flops / PEAK),))),
        ),
        measured_s=time_us * MICRO,
        size=rows * (SHAPE.experts + 1) + distinct,  # By rows, then by experts touched.
        constants=("floor_s", "1/memory", "1/flops"),
        start=(5e-6, 1.1, 2.0),
    )


def _attention(path: Path) -> Table:
    """The two kernels of `costs.attention` over the whole table; see there for the regimes."""
    chunk, start, decodes, context, time_us = read_columns(
        path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    )
    if DEVICE.units is None or DEVICE.cache_bytes is None:
        raise ScenarioError(f"{DEVICE.name} has no units or cache")
    is_prompt = (chunk > 0).astype(np.float64)
    pairs = chunk * (start + (chunk + 1) / 2)
    summed = decodes * context
    group = SHAPE.heads // SHAPE.kv_heads
    working_set = np.maximum(summed * (SHAPE.kv_bytes // SHAPE.kv_heads), 1.0)
    passes = np.clip(group * decodes / DEVICE.units, 1.0, group)
    reads = 1.0 + (passes - 1.0) * np.maximum(1.0 - DEVICE.cache_bytes / working_set, 0.0)
    tiles = np.ceil(chunk / TILE_ROWS)
    tile_s = TILE_ROWS * 4 * SHAPE.head_dim * DEVICE.units / PEAK  # One position of one tile.
    share = SHAPE.heads / DEVICE.units
    walked = (tiles * (start + (chunk + 1) / 2) + summed) * is_prompt
    longest = np.maximum(start + chunk, context) * is_prompt
    memory: tuple[Term, ...] = (
        (1, summed * SHAPE.kv_bytes / BANDWIDTH * (1 - is_prompt)),
        (3, (start + chunk + summed * reads) * SHAPE.kv_bytes / BANDWIDTH * is_prompt),
    )
    work: tuple[Term, ...] = (
        (4, tile_s * (walked * share + LAST_WAVE * longest)),
        (5, tile_s * ((tiles + decodes) * share + LAST_WAVE) * is_prompt),
    )
    last: tuple[Term, ...] = ((4, tile_s * longest), (5, tile_s * is_prompt))
    empty = SHAPE.heads * decodes * np.maximum(tiles - 1, 0) * is_prompt
    return Table(
        name="attention",
        group="attention",
        model=Model(
            ((0, 1 - is_prompt), (2, is_prompt), (6, empty)),
            (("memory", memory), ("compute", work), ("latency", last)),
        ),
        measured_s=time_us * MICRO,
        size=pairs + summed,
        constants=(
            "decode_s", "1/decode_memory", "prompt_s", "1/prompt_memory", "1/prompt_flops",
            "tile_positions/flops", "empty_tile_s",
        ),
        start=(1e-5, 1.2, 3e-6, 1.6, 1.8, 300.0, 2e-9),
    )  # fmt: skip


def _small(name: str, row_bytes: int, rows: Column, time_us: Column) -> Table:
    return Table(
        name=name,
        group="other",
        model=Model(
            ((0, np.ones_like(rows)),), (("memory", ((1, rows * row_bytes / BANDWIDTH),)),)
        ),
        measured_s=time_us * MICRO,
        size=rows,
        constants=("floor_s", "1/memory"),
        start=(2e-6, 1.0),
    )


def _links(host: str, path: Path) -> list[Table]:
    names = ("devices_per_node", "size", "time_stats.send_recv.median")
    devices, size, time_ms = read_columns(path, names)
    tables = []
    for count, where in ((1.0, "across nodes"), (2.0, "inside a node")):
        chosen = devices == count
        tables.append(
            Table(
                name=f"link, {host} {where}",
                group="link",
                model=Model(
                    ((0, np.ones(int(chosen.sum()))),), (("bandwidth", ((1, size[chosen]),)),)
                ),
                measured_s=time_ms[chosen] * MILLI,
                size=size[chosen],
                constants=("latency_s", "s_per_byte"),
                start=(2e-5, 1e-10),
            )
        )
    return tables


def _grouped(path: Path, key: str, names: tuple[str, str]) -> dict[str, tuple[Column, Column]]:
    first, second = read_columns(path, names)
    labels = np.asarray([row[key] for row in _rows(path, (key,))])
    return {
        str(label): (first[labels == label], second[labels == label])
        for label in dict.fromkeys(labels.tolist())
    }


def read_columns(path: Path, names: tuple[str, ...]) -> list[Column]:
    """Columns of positive or zero numbers of a CSV file.

    Raises:
        ScenarioError: The file or a column is missing, or a value is no such number.
    """
    columns: list[list[float]] = [[] for _ in names]
    for line, row in enumerate(_rows(path, names), start=2):
        for name, column in zip(names, columns, strict=True):
            try:
                value = float(row[name])
            except ValueError:
                value = -1.0
            if not 0 <= value < float("inf"):
                raise ScenarioError(
                    f"{path}:{line}: {name} is {row[name]!r}; it must be a number of at least 0"
                )
            column.append(value)
    return [np.asarray(column) for column in columns]


def _rows(path: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        if (size := path.stat().st_size) > FILE_BYTES_MAX:
            raise ScenarioError(f"{path}: {size} bytes; at most {FILE_BYTES_MAX}")
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise ScenarioError(f"{path}: no column {', '.join(missing)}")
            return [{name: row[name] or "" for name in names} for row in reader]
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read: {error.strerror}") from error
