"""Time of attention in one layer, in closed form.

**Decodes alone** run a kernel that splits KV over the whole device and reads each position once:
a floor plus bytes over bandwidth (or FLOPs over peak, whichever is longer).

**With a prompt chunk** in the micro-batch, all spans go through one kernel of tiles: 64 rows of
one head, one tile per multiprocessor at a time, walking that span's KV. From this follow its
regimes, all seen in the measurements:
- work: sum over tiles of their KV length, over all multiprocessors; the last wave is half empty;
- latency: no shorter than the longest tile, however empty the device is (a chunk of 16 rows
  behind 16,384 positions takes as long as one of 128);
- a decode row costs a whole tile per head, and its KV is read once per *query* head: from the
  cache if all decodes' KV of one KV head fits in it, else from memory, up to heads / kv heads
  times over, fewer if several heads of a request run at once;
- tiles are laid out for the longest chunk, so every decode starts empty ones.

A device without `units` is a plain roofline: the longer of bytes and FLOPs.

Source of the tiling: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), section 3.3; the constants
are fitted (`costs.efficiency`).
"""

from collections.abc import Sequence

from kvasir_sim.costs.efficiency import Efficiency
from kvasir_sim.costs.shape import ModelShape
from kvasir_sim.devices import Device

TILE_ROWS = 64  # Steps in the measured times of chunks stand at multiples of 64 rows.
LAST_WAVE = 0.5  # On average the last wave of tiles keeps half of the multiprocessors.


class AttentionCost:
    """Seconds of one layer's attention; the constants are folded once."""

    def __init__(self, shape: ModelShape, device: Device, efficiency: Efficiency) -> None:
        peak = device.peak(shape.dtype)
        bandwidth = device.bandwidth_bytes_per_s
        self._heads = shape.heads
        self._group = shape.heads // shape.kv_heads
        self._units = device.units
        self._cache = device.cache_bytes
        self._kv_bytes = shape.kv_bytes
        self._kv_head_bytes = shape.kv_bytes // shape.kv_heads
        row_flops = 4 * shape.head_dim  # One row and head against one position: q.k and p.v.
        self._decode_position_s = max(
            shape.kv_bytes / (efficiency.decode_memory * bandwidth),
            row_flops * shape.heads / (efficiency.prompt_flops * peak),
        )
        self._decode_s = efficiency.decode_s
        self._prompt_s = efficiency.prompt_s
        self._prompt_byte_s = 1 / (efficiency.prompt_memory * bandwidth)
        self._row_position_s = row_flops * shape.heads / (efficiency.prompt_flops * peak)
        units = device.units or 1
        self._tile_position_s = TILE_ROWS * row_flops * units / (efficiency.prompt_flops * peak)
        self._tile_positions = efficiency.tile_positions
        self._empty_tile_s = efficiency.empty_tile_s

    def seconds(
        self, decodes: int, context: int, starts: Sequence[int], rows: Sequence[int]
    ) -> float:
        """For decodes of summed `context`, and chunks of `rows[i]` rows behind `starts[i]`."""
        if not rows:
            return self._decode_s + context * self._decode_position_s
        if self._units is None:
            return self._plain(context, starts, rows)
        overhead = self._tile_positions
        walked = 0.0
        chunk_positions = longest = tiles_most = 0
        for start, count in zip(starts, rows, strict=True):
            tiles = -(-count // TILE_ROWS)
            walked += tiles * (start + (count + 1) / 2 + overhead)
            tiles_most = max(tiles_most, tiles)
            chunk_positions += start + count
            longest = max(longest, start + count)
        read: float = chunk_positions * self._kv_bytes
        empty_s = 0.0
        if decodes:
            walked += context + decodes * overhead
            longest = max(longest, context // decodes)
            read += context * self._kv_bytes * self._reads(decodes, context)
            empty_s = self._heads * decodes * (tiles_most - 1) * self._empty_tile_s
        last = (longest + overhead) * self._tile_position_s
        work = walked * self._heads * self._tile_position_s / self._units + LAST_WAVE * last
        return self._prompt_s + empty_s + max(work, last, read * self._prompt_byte_s)

    def _reads(self, decodes: int, context: int) -> float:
        """How often memory gives each position of the decodes' KV: from 1 to heads / kv heads."""
        if self._cache is None or self._units is None:
            return 1.0
        working_set = context * self._kv_head_bytes
        if working_set <= self._cache:
            return 1.0
        passes = min(max(self._group * decodes / self._units, 1.0), float(self._group))
        return 1.0 + (passes - 1.0) * (1.0 - self._cache / working_set)

    def _plain(self, context: int, starts: Sequence[int], rows: Sequence[int]) -> float:
        pairs: float = context
        positions = context
        for start, count in zip(starts, rows, strict=True):
            pairs += count * (start + (count + 1) / 2)
            positions += start + count
        return self._prompt_s + max(
            pairs * self._row_position_s, positions * self._kv_bytes * self._prompt_byte_s
        )
