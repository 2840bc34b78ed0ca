"""A small profile whose every number follows from a formula, as plain data."""

from typing import Any


def rows_ns(rows: int) -> int:
    """Linear in the rows, so that interpolation is exact."""
    return 1_000_000 + 10_000 * rows


def decode_ns(decodes: int, context: int) -> int:
    return rows_ns(decodes) + 5 * decodes * context


def prefill_ns(rows: int, start: int) -> int:
    return rows_ns(rows) + 7 * rows * (start + 4)


DECODES, CONTEXTS = (1, 4, 8), (16, 128, 1024)
CHUNKS, STARTS = (1, 16, 64), (0, 64, 512)
EXPERTS = [[distinct, rows, 1000 * distinct + rows, 5] for distinct in (1, 8) for rows in (1, 64)]

PROFILE: dict[str, Any] = {
    "format": "kvasir-profile",
    "version": 1,
    "machine": "2 cores",
    "model": "SmolLM2-135M",
    "dtype": "float32",
    "commit": "0123abc",
    "model_layers": 30,
    "hidden": 576,
    "repeats": 5,
    "body": {
        "layers": 10,
        "pass_ns": 200_000,
        "rows": [[rows, rows_ns(rows), 1000] for rows in (1, 8, 64)],
        "decode": [
            [d, c, decode_ns(d, c), decode_ns(d, c) // 10] for d in DECODES for c in CONTEXTS
        ],
        "prefill": [
            [r, s, prefill_ns(r, s), prefill_ns(r, s) // 20] for r in CHUNKS for s in STARTS
        ],
    },
    "head": [[1, 1_000, 10], [64, 64_000, 10]],
    "tail": [[1, 500_000, 10], [8, 1_200_000, 10]],
    "link": [[0, 100_000, 10], [1_000_000, 600_000, 10]],
    "lap": {"bridge_ns": 42_000, "spread_ns": 100},
    "experts": EXPERTS,
}
