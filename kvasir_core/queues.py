"""The head's queues and its KV ledger: who is ready, who waits, who holds which blocks.

KV is accounted in blocks, at the head only; stages mirror it. Every stage holds KV for the same
tokens, so the scarcest stage rules. Blocks for the whole prompt are taken at admission, so a prompt
never stops halfway for KV; a decode takes a block when its last one is full.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.plan import Plan, blocks_for
from kvasir_core.request import Request
from kvasir_core.units import Epoch, MicroBatchId, RequestId, make

by_order = attrgetter("order")
is_running = attrgetter("is_running")

Predict = Callable[[int, int, int, int], int]
"""(decodes, decode_context, chunk_rows, chunk_start) -> longest stage hold in nanoseconds."""


class Composition(NamedTuple):
    """A packer's answer."""

    decodes: int  # So many from the front of `Queues.decodes`.
    chunks: Sequence[tuple[Request, int]]  # With their rows; admitted ones before waiting ones.
    binding: BindingLimit
    is_short: bool = False  # A ready decode found no KV block for its row.


@dataclass(slots=True, eq=False)
class Queues:
    """Where every live request is. Packers only look; the ring calls the methods that change it."""

    plan: Plan
    window: int
    predict: Predict | None
    blocks_free: int
    flies_one_chunk: bool  # A prompt is kept out of `prompts` while a chunk of it is in flight.
    decodes: list[Request] = field(default_factory=list)  # Ready, longest-ready first.
    prompts: list[Request] = field(default_factory=list)  # Admitted, with rows left to compose.
    waiting: deque[Request] = field(default_factory=deque)  # Not admitted, in order of arrival.
    releasing: dict[RequestId, Request] = field(default_factory=dict)  # Their KV is on its way out.
    open_count: int = 0
    running: int = 0  # Admitted and unfinished.
    live_decodes: int = 0  # Past their prompt and unfinished, in flight or not.
    passed_over: bool = False  # The last composition took no decode although one was ready.
    width: int = field(init=False)  # Most decodes of one micro-batch: each is a span and a row.
    blocks_free_least: int = field(init=False)  # So far.

    def __post_init__(self) -> None:
        self.width = min(self.plan.micro_batch_width, self.plan.row_width)
        self.blocks_free_least = self.blocks_free

    @property
    def is_first_releasing(self) -> bool:
        """The first waiting request was preempted and its old KV is not yet released."""
        return bool(self.releasing) and self.waiting[0].id in self.releasing

    @property
    def fillable(self) -> int:
        """How many micro-batches the live requests fill: with decodes, or with rows of all kinds.

        O(waiting requests), up to the plan's largest window.
        """
        rows, row_width = self.live_decodes, self.plan.row_width
        for request in chain(self.prompts, self.waiting):
            rows += request.target - request.scheduled
            if rows >= row_width * self.plan.window_max:
                break
        return max(-(-self.live_decodes // self.width), -(-rows // row_width))

    def begins_block(self, request: Request) -> bool:
        """Whether a decode's next row lies in a block that it does not hold yet."""
        return not (request.length - 1) % self.plan.kv_block

    def growable(self, count: int) -> int:
        """How many of the first `count` ready decodes can get the KV row they need now."""
        free = self.blocks_free
        if free >= count:
            return count
        for index in range(count):
            if self.begins_block(self.decodes[index]):
                if not free:
                    return index
                free -= 1
        return count

    def take(
        self, composition: Composition, id_: MicroBatchId, epoch: Epoch
    ) -> tuple[MicroBatch, list[Request]]:
        """Freeze a composition: its rows are in flight from now on.

        Returns:
            The micro-batch, and the request of each of its spans.
        """
        count, chunks, binding, _ = composition
        ready = self.decodes
        if count == len(ready):
            members, self.decodes = ready, []
        else:
            members = ready[:count]
            del ready[:count]
        ids: list[RequestId] = []
        starts: list[int] = []
        block = self.plan.kv_block
        for request in members:
            start = request.length - 1
            if not start % block:  # As `begins_block` says.
                self._hold_blocks(request, 1)
            request.in_flight = 1
            ids.append(request.id)
            starts.append(start)
        context = sum(starts) + count
        rows: tuple[int, ...] = (1,) * count
        row_count = count
        completing: tuple[int, ...] = ()
        if chunks:
            lengths = [length for _, length in chunks]
            rows += tuple(lengths)
            row_count += sum(lengths)
            completing = self._take_chunks(chunks, starts, members)
            ids += [request.id for request, _ in chunks]
        if self.flies_one_chunk and (self.decodes or self.prompts):
            self.decodes.sort(key=by_order)  # Sarathi: what was left over is sorted by arrival.
            self.prompts.sort(key=by_order)
        assert len(members) <= self.plan.micro_batch_width
        assert row_count <= self.plan.row_width
        self.passed_over = not count and bool(self.decodes)
        self.open_count += 1
        fields = (
            id_, epoch, tuple(ids), tuple(starts), rows, count, completing, row_count, context,
            binding,
        )  # fmt: skip
        return make(MicroBatch, fields), members

    def _take_chunks(
        self,
        chunks: Sequence[tuple[Request, int]],
        starts: list[int],
        members: list[Request],
    ) -> tuple[int, ...]:
        """Take prompt chunks, admitting those that waited; return indexes that end a prompt.

        Only the last chunk may be cut: a cut prompt stands alone in `prompts`, or is kept out of it
        while it flies.
        """
        completing: list[int] = []
        del self.prompts[: sum(1 for request, _ in chunks if request.is_running)]
        for request, rows in chunks:
            if not request.is_running:
                self._admit(request)
            starts.append(request.scheduled)
            request.scheduled += rows
            request.in_flight += 1
            if request.scheduled == request.target:
                completing.append(len(members))
            elif not self.flies_one_chunk:
                self.prompts.append(request)
            members.append(request)
        return tuple(completing)

    def _admit(self, request: Request) -> None:
        first = self.waiting.popleft()
        assert first is request, "requests are admitted in order of arrival"
        request.is_running = True
        self._hold_blocks(request, blocks_for(request.target, self.plan.kv_block))
        self.running += 1

    def _hold_blocks(self, request: Request, count: int) -> None:
        """Give it so many blocks more."""
        request.blocks += count
        self.blocks_free -= count
        self.blocks_free_least = min(self.blocks_free_least, self.blocks_free)

    def stop_running(self, request: Request) -> None:
        """The request ended or lost its place; its blocks are free when its release is back."""
        self.live_decodes -= request.is_decoding
        self.running -= 1
        request.is_running = False
        self.releasing[request.id] = request

    def unlist(self, request: Request) -> None:
        """Take a running request out of the ready lists, if it is in one."""
        if request.is_decoding:
            if not request.in_flight:
                self.decodes.remove(request)
        elif request in self.prompts:
            self.prompts.remove(request)

    def preempt(self, victim: Request) -> int:
        """A running request that is not in flight waits again, first of all; returns rows lost."""
        self.unlist(victim)
        rows_lost = self._take_back(victim)
        self.waiting.appendleft(victim)
        return rows_lost

    def drop_all(self, live: Iterable[Request]) -> list[tuple[Request, int]]:
        """Every stage drops all KV: whoever ran waits again; returns what each lost."""
        running = sorted(filter(is_running, live), key=by_order)
        losses = [(request, self._take_back(request)) for request in running]
        self.waiting.extendleft(reversed(running))
        self.decodes.clear()
        self.prompts.clear()
        self.releasing.clear()
        for request in self.waiting:
            request.blocks = request.in_flight = 0
            request.scheduled = request.returned = 0  # What a prefix cache held is gone too.
        self.blocks_free = self.plan.kv_blocks
        self.open_count = 0
        return losses

    def _take_back(self, request: Request) -> int:
        """Undo a running request's progress, for recomputation; returns the rows lost."""
        lost = request.rows_computed
        self.stop_running(request)
        request.target = request.length
        request.scheduled = request.returned = 0
        return lost

    def released(self, request: RequestId) -> None:
        """Its release has passed every stage."""
        entry = self.releasing.pop(request)
        self.blocks_free += entry.blocks
        entry.blocks = 0

    def check(self, live: list[Request], flying: list[Request]) -> None:
        """Assert that every live request is in its one place and every block has one holder."""
        running = [r for r in live if r.is_running]
        assert len(running) == self.running
        assert sum(r.is_decoding for r in running) == self.live_decodes
        held = sum(r.blocks for r in running) + sum(r.blocks for r in self.releasing.values())
        assert held + self.blocks_free == self.plan.kv_blocks
        orders = [r.order for r in self.waiting]
        assert orders == sorted(orders), "the queue is not in order of arrival"
        for request in running:
            listed = (request in self.decodes) + (request in self.prompts)
            assert flying.count(request) == request.in_flight
            assert listed <= 1
            assert listed or request.in_flight, "a running request is nowhere"
            if request.is_decoding:
                assert listed != request.in_flight, "two decodes of a request at once"
            rows = max(request.target, request.rows_computed)
            assert request.blocks == blocks_for(rows, self.plan.kv_block)
