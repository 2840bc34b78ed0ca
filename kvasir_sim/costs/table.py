"""Costs from measured tables of one transformer layer, as an .npz file in milliseconds.

With n rows of the micro-batch (decodes included) and n8 = n rounded up to a multiple of
`rows_multiple` (8), a stage of L layers holds it, in seconds, for

    1e-3 * (L * (block_tokens_ms[n8] + kv_save_ms[n] + decode + prefill) + send)

- `send` is `send_recv_ms[n8]`, on every stage but the last: sending occupies the sender.
- `decode` is 0 without decodes, else `attn_decode_ms[d, ceil(int(mean kv) / 64)]`, times 1.1 if
  d > 1: d decodes, whose kv counts the row of this lap.
- `prefill` is 0 without prompt chunks, else `attn_prefill_ms[a, round(sqrt(s))]`, times 1.1 if
  there is more than one chunk: a = sum of ceil(kv before the chunk / 64), s = sum of squared
  chunk lengths. The scenario may give `kv_multiple` for 64 and `several_factor` for 1.1.

The sum is formed in double precision, in this order, and rounded once to the nearest nanosecond;
another order or a second rounding changes the schedule of a long run. A lookup outside a table
is an error: a table is measured, and holds nothing to extrapolate from.
"""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_sim.costs.base import Provenance

FILE_BYTES_MAX = 64 << 20  # The largest table in use is 0.1 MB; 2048 x 4096 doubles are 64 MiB.
MEMBERS_MAX = 256
VECTORS = ("block_tokens_ms", "kv_save_ms", "send_recv_ms")
MATRICES = ("attn_decode_ms", "attn_prefill_ms")


class TableCosts:
    """Table lookups; see the module for the formula."""

    provenance: Provenance = "measured"
    turnaround_ns = 0

    def __init__(
        self,
        layers: Sequence[int],
        arrays: dict[str, npt.NDArray[np.float64]],
        source: str,
        *,
        rows_multiple: int = 8,
        kv_multiple: int = 64,
        several_factor: float = 1.1,
    ) -> None:
        """Takes layers per stage and the arrays of `read_tables`; `source` is for messages.

        Raises:
            ScenarioError: The tables end before `rows_multiple`.
        """
        self._source = source
        self._kv_multiple = kv_multiple
        self._several_factor = several_factor
        block = arrays["block_tokens_ms"].tolist()
        saves = arrays["kv_save_ms"].tolist()
        send = arrays["send_recv_ms"].tolist()
        limit = min(len(block), len(saves), len(send)) - 1
        self._rows_max = limit - limit % rows_multiple
        if self._rows_max < 1:
            raise ScenarioError(
                f"{source}: tables of {limit + 1} entries end before rows_multiple {rows_multiple}"
            )
        rounded = [-(-n // rows_multiple) * rows_multiple for n in range(self._rows_max + 1)]
        # Indexed by rows: the part of a layer, and the sending, that depend on the rows alone.
        self._tokens = [block[n8] + saves[n] for n, n8 in enumerate(rounded)]
        self._send = [send[n8] for n8 in rounded]
        self._decode: list[list[float]] = arrays["attn_decode_ms"].tolist()
        self._prefill: list[list[float]] = arrays["attn_prefill_ms"].tolist()
        self._layers = tuple(layers)
        # Stages of the same depth cost the same; the last does not send.
        self._depths = tuple(dict.fromkeys(self._layers[:-1]))
        self._place = tuple(self._depths.index(depth) for depth in self._layers[:-1])
        self._senders = len(self._place)
        # Without prompt chunks the holds follow from two small numbers, and are looked up again.
        self._decode_only: dict[tuple[int, int], Sequence[int]] = {}

    def check_plan(self, plan: Plan) -> None:
        """Refuses a plan whose widths the tables do not cover.

        Raises:
            ScenarioError: With both numbers, before anything runs.
        """
        decodes = min(plan.micro_batch_width, plan.row_width)
        chunk = plan.row_width
        for what, needed, held in (
            ("ring.row_width", plan.row_width, self._rows_max),
            ("ring.micro_batch_width", decodes, len(self._decode) - 1),
            ("model.context", plan.context, (len(self._decode[0]) - 1) * self._kv_multiple),
            ("ring.row_width (one chunk)", chunk, len(self._prefill[0]) - 1),
            ("model.context", plan.context, (len(self._prefill) - 1) * self._kv_multiple),
        ):
            if needed > held:
                raise ScenarioError(
                    f"{what} is {needed}, but the tables of {self._source} end at {held}; "
                    "lower it or give a larger table"
                )

    def holds(self, micro_batch: MicroBatch) -> Sequence[int]:
        decodes, context = micro_batch.decodes, micro_batch.decode_context
        kv_multiple = self._kv_multiple
        context_blocks = -(-(context // decodes) // kv_multiple) if decodes else 0
        if micro_batch.row_count == decodes:
            key = (decodes, context_blocks)
            known = self._decode_only.get(key)
            if known is None:
                known = self._holds(decodes, decodes, context_blocks, 0, 0, 0)
                self._decode_only[key] = known
            return known
        lengths = micro_batch.rows[decodes:]
        return self._holds(
            micro_batch.row_count,
            decodes,
            context_blocks,
            len(lengths),
            sum(-(-start // kv_multiple) for start in micro_batch.starts[decodes:]),
            sum(length * length for length in lengths),
        )

    def _holds(
        self, rows: int, decodes: int, context_blocks: int, chunks: int, blocks: int, squares: int
    ) -> list[int]:
        try:
            layer_ms = self._tokens[rows]
            send_ms = self._send[rows]
            if decodes:
                attention = self._decode[decodes][context_blocks]
                layer_ms += attention * self._several_factor if decodes > 1 else attention
            if chunks:
                attention = self._prefill[blocks][round(math.sqrt(squares))]
                layer_ms += attention * self._several_factor if chunks > 1 else attention
        except IndexError:
            raise ScenarioError(
                f"{self._source}: a micro-batch of {rows} rows ({decodes} decodes with a mean of "
                f"{context_blocks} blocks; {chunks} prompt chunks behind {blocks} blocks of KV, "
                f"root of squared lengths {round(math.sqrt(squares))}) is outside the tables: "
                f"rows up to {self._rows_max}, decodes up to {len(self._decode) - 1}, blocks up "
                f"to {len(self._prefill) - 1}; lower the widths or give a larger table"
            ) from None
        if len(self._depths) == 1:
            result = [round(1e-3 * (self._depths[0] * layer_ms + send_ms) * 1e9)] * self._senders
        else:
            of_depth = [round(1e-3 * (depth * layer_ms + send_ms) * 1e9) for depth in self._depths]
            result = [of_depth[place] for place in self._place]
        result.append(round(1e-3 * (self._layers[-1] * layer_ms) * 1e9))
        return result

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        return max(
            self._holds(
                decodes + chunk_rows,
                decodes,
                -(-(decode_context // decodes) // self._kv_multiple) if decodes else 0,
                1 if chunk_rows else 0,
                -(-chunk_start // self._kv_multiple),
                chunk_rows * chunk_rows,
            )
        )

    def describe(self) -> list[str]:
        return [
            (
                f"costs: tables of one layer, measured ({self._source}); rows to {self._rows_max}, "
                f"decodes up to {len(self._decode) - 1}, sending occupies the sender; a lookup "
                "outside the tables is an error"
            )
        ]


def read_tables(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Reads the five arrays of a cost table, checking every size before memory is taken.

    Raises:
        ScenarioError: The file is missing, not an .npz, too large, holds objects, lacks an array,
            or an array has the wrong rank, a value that is negative or not finite.
    """
    try:
        if (size := path.stat().st_size) > FILE_BYTES_MAX:
            raise ScenarioError(f"{path}: {size} bytes; a cost table has at most {FILE_BYTES_MAX}")
        with zipfile.ZipFile(path) as archive:
            return {name: _read_array(archive, path, name) for name in VECTORS + MATRICES}
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the cost table: {error.strerror}") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ScenarioError(f"{path}: not an .npz file of cost tables: {error}") from error


def _read_array(archive: zipfile.ZipFile, path: Path, name: str) -> npt.NDArray[np.float64]:
    members = archive.namelist()
    if len(members) > MEMBERS_MAX or f"{name}.npy" not in members:
        raise ScenarioError(
            f"{path}: needs an array {name!r}; it has {', '.join(sorted(members)[:20]) or 'none'}"
        )
    if (size := archive.getinfo(f"{name}.npy").file_size) > FILE_BYTES_MAX:
        raise ScenarioError(f"{path}: {name} unpacks to {size} bytes, over {FILE_BYTES_MAX}")
    with archive.open(f"{name}.npy") as member:
        shape, dtype = _header(member, path, name)
    rank = 1 if name in VECTORS else 2
    if dtype.kind != "f" or len(shape) != rank or min(shape) < 2:
        raise ScenarioError(
            f"{path}: {name} is {dtype}{list(shape)}; it must be floating point with {rank} "
            "dimension(s) of at least 2 entries"
        )
    if math.prod(shape) * dtype.itemsize > size:
        raise ScenarioError(f"{path}: {name} claims shape {list(shape)} in only {size} bytes")
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False).astype(np.float64)
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ScenarioError(f"{path}: {name} holds a value that is negative or not finite")
    return array


def _header(member: IO[bytes], path: Path, name: str) -> tuple[tuple[int, ...], "np.dtype[Any]"]:
    try:
        version = np.lib.format.read_magic(member)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    except ValueError as error:
        raise ScenarioError(f"{path}: {name} is not a NumPy array: {error}") from error
    return shape, dtype
