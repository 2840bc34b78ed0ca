"""Paged KV memory and attention over mixed rows, for CUDA.

K and V live in pages `[pages, page, kv_heads, head_dim]` per layer, allocated once for the ledger's
tokens and one partial page per request. A micro-batch's decode rows and prompt chunks are attended
in one call of `torch.nn.attention.varlen.varlen_attn` through a block table; splitting over the
keys is off, so that a row's result does not depend on the company it keeps. Whether the installed
torch and the device can do that is tried once, on a few rows whose result is known, when a stage is
loaded: builds differ in which kernel takes a block table. Where it fails, and in float32, each
request's pages are gathered and attended alone: slower, same results.
"""

import heapq
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_core.microbatch import MicroBatch
from kvasir_rt.errors import ModelMemoryError, StageStateError
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.places import KvSizes, Lengths

PAGE = 256  # Tokens; the built-in kernel asks for a multiple of this.
TRIAL_ERROR_MAX = 0.05  # bfloat16 on values of scale 1; a wrong mask or page is off by 1.

Varlen = Callable[..., Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A micro-batch laid out for paged attention; rows keep the micro-batch's order."""

    positions: Tensor
    targets: Tensor  # int64[rows]: flat page rows that K and V are written to.
    starts: Tensor  # int32[spans + 1]: where each span's rows start.
    lengths: Tensor  # int32[spans]: positions each span attends to.
    tables: Tensor  # int32[spans, pages of the longest]
    spans: tuple[tuple[int, int, int], ...]  # (first row, rows, length), for the gathering form.
    rows_max: int
    length_max: int
    memory: "PagedKv"

    @property
    def order(self) -> None:
        return None

    @property
    def restore(self) -> None:
        return None

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        kv_heads = self.memory.sizes.kv_heads
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.targets, kv[:, :kv_heads])
        values.flatten(0, 1).index_copy_(0, self.targets, kv[:, kv_heads:])
        if self.memory.varlen is None:
            return self.gathered(queries, keys, values)
        return self.in_one_call(self.memory.varlen, queries, keys, values)

    def in_one_call(self, varlen: Varlen, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of all rows over the pages `[pages, page, kv_heads, head_dim]`."""
        mixed: Tensor = varlen(
            queries,
            keys,
            values,
            self.starts,
            None,
            self.rows_max,
            self.length_max,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
            num_splits=1,
        )
        return mixed.reshape(len(queries), -1)

    def gathered(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same, span by span."""
        sizes = self.memory.sizes
        group = sizes.heads // sizes.kv_heads
        parts: list[Tensor] = []
        for span, (first, rows, length) in enumerate(self.spans):
            pages = self.tables[span, : -(-length // PAGE)].long()
            key = keys[pages].flatten(0, 1)[:length].transpose(0, 1)
            value = values[pages].flatten(0, 1)[:length].transpose(0, 1)
            query = queries[first : first + rows].reshape(rows, sizes.kv_heads, group, -1)
            mask = None
            if 1 < rows < length:
                allowed = torch.ones(rows, length, dtype=torch.bool, device=key.device)
                allowed = allowed.tril_(length - rows)
                mask = torch.zeros(rows, length, dtype=key.dtype, device=key.device)
                mask = mask.masked_fill_(~allowed, -math.inf)
            mixed = functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.unsqueeze(1).expand(-1, group, -1, -1),
                value.unsqueeze(1).expand(-1, group, -1, -1),
                attn_mask=mask,
                is_causal=rows == length,
            )
            parts.append(mixed.permute(2, 0, 1, 3).reshape(rows, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PagedKv:
    """Pages handed out lowest first; a request's page table grows as its rows do."""

    def __init__(self, sizes: KvSizes, numerics: Numerics) -> None:
        self.sizes = sizes
        self._device = numerics.device
        pages = -(-sizes.tokens // PAGE) + sizes.slots  # Each request may leave one page partial.
        self.spare_page = pages  # Of no request: padding rows of graphs write here.
        self.bytes_total = (pages + 1) * PAGE * sizes.row_elements * sizes.layers
        self.bytes_total *= numerics.compute.itemsize
        self._check_memory()
        shape = (sizes.layers, pages + 1, PAGE, sizes.kv_heads, sizes.head_dim)
        # Zeros, so that what lies beyond a request's length is finite wherever a kernel reads it.
        self.keys = torch.zeros(shape, dtype=numerics.compute, device=self._device)
        self.values = torch.zeros_like(self.keys)
        self.varlen = self._tried(_varlen(numerics))
        self._free = list(range(pages))
        self._tables: dict[int, list[int]] = {}
        self._lengths = Lengths(sizes)

    def batch(self, mb: MicroBatch) -> PagedBatch:
        """Note the micro-batch's rows, give them pages, and lay out its attention.

        Raises:
            StageStateError: Positions that do not continue what this stage holds, or no page left.
        """
        positions: list[int] = []
        targets: list[int] = []
        spans: list[tuple[int, int, int]] = []
        tables: list[list[int]] = []
        for request, start, rows in zip(mb.requests, mb.starts, mb.rows, strict=True):
            self._lengths.advance(request, start, rows)
            table = self._grow(request, start + rows)
            spans.append((len(positions), rows, start + rows))
            tables.append(table)
            span = range(start, start + rows)
            positions.extend(span)
            targets.extend(table[at // PAGE] * PAGE + at % PAGE for at in span)
        widest = max(map(len, tables))
        padded = [table + [0] * (widest - len(table)) for table in tables]
        return PagedBatch(
            positions=self._to_device(positions, torch.int64),
            targets=self._to_device(targets, torch.int64),
            starts=self._to_device([first for first, _, _ in spans] + [mb.row_count], torch.int32),
            lengths=self._to_device([length for _, _, length in spans], torch.int32),
            tables=self._to_device(padded, torch.int32),
            spans=tuple(spans),
            rows_max=max(rows for _, rows, _ in spans),
            length_max=max(length for _, _, length in spans),
            memory=self,
        )

    def release(self, requests: Iterable[int]) -> None:
        """Free the pages of these requests; unknown ones are ignored (never seen here)."""
        for request in requests:
            if self._lengths.free(request) is not None:
                for page in self._tables.pop(request):
                    heapq.heappush(self._free, page)

    def reset(self) -> None:
        """Forget every request (a new epoch)."""
        self.release(self._lengths.requests)

    def _grow(self, request: int, length: int) -> list[int]:
        table = self._tables.setdefault(request, [])
        while len(table) * PAGE < length:
            if not self._free:
                raise StageStateError(
                    f"request {request} needs a page of KV; all are in use: the ledger admits at "
                    f"most {self.sizes.tokens} tokens, or releases did not arrive"
                )
            table.append(heapq.heappop(self._free))
        return table

    def _to_device(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        made = torch.tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            return made.pin_memory().to(self._device, non_blocking=True)
        return made.to(self._device)

    def _tried(self, varlen: Varlen | None) -> Varlen | None:
        """The call, if it gives what gathering gives on a prompt and a decode over two pages."""
        if varlen is None:
            return None
        random = torch.Generator(device=self._device).manual_seed(1)
        keys, values = (
            torch.randn(2, *self.keys.shape[2:], generator=random, device=self._device).to(
                self.keys.dtype
            )
            for _ in range(2)
        )
        queries = torch.randn(
            4, self.sizes.heads, self.sizes.head_dim, generator=random, device=self._device
        ).to(self.keys.dtype)
        batch = PagedBatch(
            positions=self._to_device([0, 1, 2, PAGE + 4], torch.int64),
            targets=self._to_device([0] * 4, torch.int64),
            starts=self._to_device([0, 3, 4], torch.int32),
            lengths=self._to_device([3, PAGE + 5], torch.int32),
            tables=self._to_device([[1, 1], [1, 0]], torch.int32),
            spans=((0, 3, 3), (3, 1, PAGE + 5)),
            rows_max=3,
            length_max=PAGE + 5,
            memory=self,
        )
        try:
            error = batch.in_one_call(varlen, queries, keys, values)
            error = (error - batch.gathered(queries, keys, values)).abs().max()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as refused:
            logger.warning("no paged attention in one call on %s: %s", self._device, refused)
            return None
        if float(error) <= TRIAL_ERROR_MAX:
            return varlen
        logger.warning("paged attention in one call is off by %g on %s", error, self._device)
        return None

    def _check_memory(self) -> None:
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        if self.bytes_total > free:
            raise ModelMemoryError(
                f"KV for the plan's kv_tokens takes {self.bytes_total} bytes on {self._device}; "
                f"{free} are free: lower kv_tokens"
            )


def _varlen(numerics: Numerics) -> Varlen | None:
    """The one-call attention, where this torch has it."""
    if numerics.device.type != "cuda" or numerics.compute == torch.float32:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
