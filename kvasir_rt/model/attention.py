"""KV memory and attention over rows of several requests, on the CPU.

Theory of operation. Every request owns one contiguous *slot* of `context` positions in one
anonymous mapping `[slots, layers, context, K heads then V heads, head_dim]`, taken once. The
mapping is virtual: pages become real when first written, so physical use follows the head's ledger
(`kv_tokens`) and not `running_max x context`. A new request gets the free slot next to those of its
micro-batch, and one alone a slot far from everybody; a micro-batch that finds others between its
own changes places with them, a few at a time (`places.exchanges`), except with those of a
micro-batch that waits for experts. So requests that decode together lie together. When the pages
ever touched pass the ledger's bound, those of free slots are given back to the system, and then
those of live slots beyond their length. So physical KV stays at `kv_tokens`.

Decode rows of neighbouring slots run as one padded attention over a view of the mapping (no gather;
`[slots, kv_heads, group, head_dim]` queries); rows are taken in slot order, and a group grows while
padding costs less than a call. Slots of others between them cost a seventh of a pass (8 rows of 16
slots, 15 layers: 52 ms and 45). Prompt chunks run one by one. Measured here (8 rows, context 128,
one layer): padded 0.27 ms, one by one 0.50 ms, two matrix products and a softmax 0.48 ms.
"""

import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_core.microbatch import MicroBatch
from kvasir_rt.errors import ModelMemoryError
from kvasir_rt.model.places import KvSizes, Lengths, exchanges

VIRTUAL_BYTES_MAX = 16 << 40  # An address space has 128 TiB; more than this is a typing error.
CALL_TOKENS = 128  # Padding (tokens) that costs as much as one more attention call.
MAP_NORESERVE = 0x4000  # Linux; `mmap.MAP_NORESERVE` exists from Python 3.13.


class Batch(Protocol):
    """A micro-batch as one stage's attention sees it; made once, used by every layer."""

    @property
    def positions(self) -> Tensor:
        """`int64[rows]`, in the order in which rows are computed."""
        ...

    @property
    def order(self) -> Tensor | None:
        """`int64[rows]`: computed row i is the micro-batch's row `order[i]`; None if the same."""
        ...

    @property
    def restore(self) -> Tensor | None:
        """The inverse of `order`."""
        ...

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Write K and V, then attend.

        Args:
            layer: Index within this stage.
            queries: `[rows, heads, head_dim]`, rotated.
            kv: `[rows, 2 * kv_heads, head_dim]`: rotated keys, then values.

        Returns:
            `[rows, heads * head_dim]`.
        """
        ...


class KvMemory(Protocol):
    """Where a stage's keys and values live."""

    def batch(self, mb: MicroBatch) -> Batch: ...
    def release(self, requests: Iterable[int]) -> None: ...
    def reset(self) -> None: ...


class _Group(NamedTuple):
    """Decode rows `[first, stop)` attended in one call over slots `[slot, slot + slots)`."""

    first: int
    stop: int
    slot: int
    slots: int
    length: int
    mask: Tensor | None
    places: Tensor | None  # Where the rows stand among the slots, if some slots have no row.


class _Chunk(NamedTuple):
    """Prompt rows `[first, stop)` of one slot."""

    first: int
    stop: int
    slot: int
    length: int
    mask: Tensor | None  # None: the chunk starts the prompt, so it is plainly causal.


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    positions: Tensor
    order: Tensor | None
    restore: Tensor | None
    targets: Tensor  # int64[layers, rows]: rows of the flat mapping that K and V are written to.
    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]
    slots: frozenset[int]  # Of all its requests; nobody moves them meanwhile.
    memory: "SlotKv"

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        if layer == self.memory.sizes.layers - 1:
            self.memory.leave(self)
        self.memory.flat.index_copy_(0, self.targets[layer], kv)
        parts = [self._decode(layer, queries, group) for group in self.groups]
        parts += [self._prefill(layer, queries, chunk) for chunk in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, queries: Tensor, group: _Group) -> Tensor:
        first, stop, slot, slots, length, mask, places = group
        sizes = self.memory.sizes
        kv_heads, head_dim = sizes.kv_heads, sizes.head_dim
        rows = queries[first:stop].reshape(stop - first, kv_heads, -1, head_dim)
        if places is not None:
            rows = rows.new_zeros(slots, *rows.shape[1:]).index_copy_(0, places, rows)
        mixed = functional.scaled_dot_product_attention(
            rows,
            self.memory.keys[layer][slot : slot + slots, :, :length],
            self.memory.values[layer][slot : slot + slots, :, :length],
            attn_mask=mask,
        )
        if places is not None:
            mixed = mixed[places]
        return mixed.reshape(stop - first, -1)

    def _prefill(self, layer: int, queries: Tensor, chunk: _Chunk) -> Tensor:
        first, stop, slot, length, mask = chunk
        sizes = self.memory.sizes
        kv_heads, head_dim = sizes.kv_heads, sizes.head_dim
        group = sizes.heads // kv_heads
        rows = queries[first:stop].reshape(stop - first, kv_heads, group, head_dim)
        mixed = functional.scaled_dot_product_attention(
            rows.permute(1, 2, 0, 3),
            self.memory.keys[layer][slot, :, :length].unsqueeze(1).expand(-1, group, -1, -1),
            self.memory.values[layer][slot, :, :length].unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return mixed.permute(2, 0, 1, 3).reshape(stop - first, -1)


class SlotKv:
    """Contiguous slots in lazily touched memory; see the module."""

    def __init__(self, sizes: KvSizes, dtype: torch.dtype) -> None:
        self.sizes = sizes
        row_bytes = sizes.row_elements * dtype.itemsize
        unit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
        self._context = -(-sizes.context // unit) * unit  # Slots start and end on pages.
        self._layer_bytes = self._context * row_bytes
        self._row_bytes = row_bytes
        self.bytes_virtual = sizes.slots * sizes.layers * self._layer_bytes
        _check_memory(self.bytes_virtual, sizes.tokens * sizes.layers * row_bytes)
        self._memory = mmap.mmap(
            -1, self.bytes_virtual, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
        whole = torch.frombuffer(self._memory, dtype=dtype).view(
            sizes.slots, sizes.layers, self._context, 2 * sizes.kv_heads, sizes.head_dim
        )
        self._whole = whole
        self.flat = whole.view(-1, 2 * sizes.kv_heads, sizes.head_dim)
        by_layer = [whole[:, layer].transpose(1, 2) for layer in range(sizes.layers)]
        self.keys = [each[:, : sizes.kv_heads] for each in by_layer]
        self.values = [each[:, sizes.kv_heads :] for each in by_layer]
        self._dtype = dtype
        self._lengths = Lengths(sizes)
        self._touched = [0] * sizes.slots  # Rows per slot whose pages may be real.
        self._touched_sum = 0
        self._attending: set[SlotBatch] = set()  # Laid out, and not yet at the last layer.
        self._layer_offsets = torch.arange(sizes.layers).mul_(self._context).unsqueeze(1)

    @property
    def tokens_touched(self) -> int:
        """Rows whose pages may be real; never above the ledger's bound but while one is moved."""
        return self._touched_sum

    def batch(self, mb: MicroBatch) -> SlotBatch:
        """Note the micro-batch's rows and lay out its attention.

        Raises:
            StageStateError: Positions that do not continue what this stage holds.
        """
        slots: list[int] = []
        for request, start, rows in zip(mb.requests, mb.starts, mb.rows, strict=True):
            slots.append(self._advance(request, start, rows, slots[-1] if slots else None))
        if pairs := self._exchanges(mb, slots):
            for one, other in pairs:
                self._exchange(one, other)
            moved = dict(pairs)  # Mine are the first of each pair.
            slots = [moved.get(slot, slot) for slot in slots]
        decode_slots = slots[: mb.decodes]
        order = sorted(range(mb.decodes), key=decode_slots.__getitem__)
        is_sorted = order == list(range(mb.decodes))
        stride = self.sizes.layers * self._context
        positions = [mb.starts[i] for i in order]
        bases = [slots[i] * stride for i in order]
        groups = self._groups([(slots[i], mb.starts[i] + 1) for i in order])
        chunks: list[_Chunk] = []
        first = mb.decodes
        for i in range(mb.decodes, len(slots)):
            start, rows = mb.starts[i], mb.rows[i]
            positions.extend(range(start, start + rows))
            bases.extend([slots[i] * stride] * rows)
            mask = self._causal(start, rows) if start else None
            chunks.append(_Chunk(first, first + rows, slots[i], start + rows, mask))
            first += rows
        at = torch.tensor(positions)
        rest = range(mb.decodes, first)
        rows_order = None if is_sorted else torch.tensor([*order, *rest])
        batch = SlotBatch(
            positions=at,
            order=rows_order,
            restore=None if rows_order is None else rows_order.argsort(),
            targets=(at + torch.tensor(bases)) + self._layer_offsets,
            groups=groups,
            chunks=tuple(chunks),
            slots=frozenset(slots),
            memory=self,
        )
        self._attending.add(batch)
        return batch

    def leave(self, batch: SlotBatch) -> None:
        """The batch is at its last layer: its slots may be moved by the next."""
        self._attending.discard(batch)

    def release(self, requests: Iterable[int]) -> None:
        """Free the slots of these requests; unknown ones are ignored (never seen here)."""
        for request in requests:
            self._lengths.free(request)

    def reset(self) -> None:
        """Forget every request (a new epoch)."""
        self.release(self._lengths.requests)
        self._attending.clear()

    def _exchanges(self, mb: MicroBatch, slots: list[int]) -> list[tuple[int, int]]:
        if max(slots) - min(slots) < len(slots):
            return []
        rows = self._lengths.by_place
        rows.update(zip(slots, mb.starts, strict=True))  # What this one adds is not there yet.
        fixed = frozenset[int]().union(*(batch.slots for batch in self._attending))
        return exchanges(slots, rows, fixed, self.sizes.slots)

    def _exchange(self, mine: int, other: int) -> None:
        """Move what two slots hold, of which the second may be free."""
        held = self._lengths.by_place
        rows, others = held[mine], held.get(other, 0)
        kept = self._whole[other, :, :others].clone()
        self._whole[other, :, :rows] = self._whole[mine, :, :rows]
        self._whole[mine, :, :others] = kept
        self._lengths.exchange(mine, other)
        self._touch(other, rows)
        self._touch(mine, others)

    def _advance(self, request: int, start: int, rows: int, beside: int | None) -> int:
        slot = self._lengths.advance(request, start, rows, beside)
        self._touch(slot, start + rows)
        return slot

    def _touch(self, slot: int, rows: int) -> None:
        grown = rows - self._touched[slot]
        if grown > 0:
            self._touched[slot] += grown
            self._touched_sum += grown
            if self._touched_sum > self.sizes.tokens:
                self._give_back()

    def _give_back(self) -> None:
        held = self._lengths.by_place
        free_last = sorted(range(self.sizes.slots), key=lambda slot: (slot in held, -slot))
        for slot in free_last:
            if self._touched_sum <= self.sizes.tokens:
                return
            keep = held.get(slot, 0)
            if self._touched[slot] > keep:
                self._drop_pages(slot, keep)
                self._touched_sum += keep - self._touched[slot]
                self._touched[slot] = keep

    def _drop_pages(self, slot: int, keep: int) -> None:
        start = slot * self.sizes.layers * self._layer_bytes
        kept = -(-keep * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if keep == 0:
            size = self.sizes.layers * self._layer_bytes
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
            return
        if kept < self._layer_bytes:
            for layer in range(self.sizes.layers):
                at = start + layer * self._layer_bytes + kept
                self._memory.madvise(mmap.MADV_DONTNEED, at, self._layer_bytes - kept)

    def _groups(self, rows: list[tuple[int, int]]) -> tuple[_Group, ...]:
        """Split decode rows `(slot, length)`, in slot order, where padding costs over a call."""
        groups: list[_Group] = []
        first = 0
        for stop in range(1, len(rows) + 1):
            if stop < len(rows):
                slots = rows[stop][0] - rows[first][0] + 1
                longest = max(length for _, length in rows[first : stop + 1])
                held = sum(length for _, length in rows[first : stop + 1])
                if slots * longest - held <= CALL_TOKENS * (stop - first):
                    continue
            groups.append(self._group(first, stop, rows[first:stop]))
            first = stop
        return tuple(groups)

    def _group(self, first: int, stop: int, rows: list[tuple[int, int]]) -> _Group:
        slot = rows[0][0]
        slots = rows[-1][0] - slot + 1
        longest = max(length for _, length in rows)
        has_holes = slots != len(rows)
        mask = None
        if has_holes or any(length != longest for _, length in rows):
            lengths = [1] * slots
            for place, length in rows:
                lengths[place - slot] = length
            hidden = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
            mask = torch.zeros(slots, longest, dtype=self._dtype)
            mask = mask.masked_fill_(hidden, -math.inf).view(slots, 1, 1, longest)
        places = torch.tensor([place - slot for place, _ in rows]) if has_holes else None
        return _Group(first, stop, slot, slots, longest, mask, places)

    def _causal(self, start: int, rows: int) -> Tensor:
        allowed = torch.ones(rows, start + rows, dtype=torch.bool).tril_(start)
        return torch.zeros(allowed.shape, dtype=self._dtype).masked_fill_(~allowed, -math.inf)


def _check_memory(virtual: int, physical: int) -> None:
    if virtual > VIRTUAL_BYTES_MAX:
        raise ModelMemoryError(
            f"KV slots would span {virtual} bytes of addresses (running_max x context x layers); "
            f"the limit is {VIRTUAL_BYTES_MAX}: lower running_max or context"
        )
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if physical > machine:
        raise ModelMemoryError(
            f"KV for the plan's kv_tokens takes {physical} bytes; this machine has {machine}: "
            "lower kv_tokens"
        )
