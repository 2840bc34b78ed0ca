"""Composing a micro-batch: one pure function per packer, chosen by name.

A packer looks at the head's queues and says how many ready decodes (from the front) and which
prompt chunks join the next micro-batch, and which limit stopped it. It changes nothing; the ring
applies what it says. Candidates for a chunk are the admitted prompts in order, then the waiting
requests in order of arrival while the running cap and the KV ledger let them in.
"""

from collections.abc import Callable
from functools import lru_cache

from kvasir_core.microbatch import BindingLimit
from kvasir_core.plan import Plan, blocks_for
from kvasir_core.queues import Composition, Queues
from kvasir_core.request import Request

PREFILL_FLOOR_SHARE = 8  # A solved chunk is at least 1/8 of the cap, or prompts would crawl.

NOTHING_WAITING = BindingLimit.NOTHING_WAITING  # See `ring.py`: a name is reached sooner.

Packer = Callable[[Queues], Composition]


@lru_cache(maxsize=1024)
def decodes_only(decodes: int, binding: BindingLimit) -> Composition:
    """An answer without chunks: immutable, and the same again and again."""
    return Composition(decodes, (), binding)


def fill_with_prompts(
    queues: Queues, decodes: int, rows_max: int, rows_cap: BindingLimit
) -> Composition:
    """Add prompt chunks behind `decodes` decode rows until a limit binds.

    Args:
        queues: The head's queues.
        decodes: Decode spans already taken.
        rows_max: Most prompt rows to add.
        rows_cap: The limit to name when `rows_max` binds.
    """
    plan = queues.plan
    spans_left = plan.micro_batch_width - decodes
    chunks: list[tuple[Request, int]] = []
    for request in queues.prompts:
        if not spans_left:
            return Composition(decodes, chunks, BindingLimit.MICRO_BATCH_WIDTH)
        if rows_max <= 0:
            return Composition(decodes, chunks, rows_cap)
        rows = request.target - request.scheduled
        if rows > rows_max:
            chunks.append((request, rows_max))
            return Composition(decodes, chunks, rows_cap)
        chunks.append((request, rows))
        rows_max -= rows
        spans_left -= 1
    free = queues.blocks_free
    if queues.waiting and decodes:
        free -= sum(map(queues.begins_block, queues.decodes[:decodes]))
    running = queues.running
    if queues.waiting and queues.is_first_releasing:
        return Composition(decodes, chunks, BindingLimit.KV)
    for request in queues.waiting:
        if not spans_left:
            return Composition(decodes, chunks, BindingLimit.MICRO_BATCH_WIDTH)
        if rows_max <= 0:
            return Composition(decodes, chunks, rows_cap)
        if running >= plan.running_max:
            return Composition(decodes, chunks, BindingLimit.RUNNING_CAP)
        rows = request.target - request.scheduled
        blocks = blocks_for(request.target, plan.kv_block)
        # Room for one block of growth per running request, or the newcomer is evicted at once.
        if blocks + running > free:
            return Composition(decodes, chunks, BindingLimit.KV)
        if rows > rows_max:
            if plan.chunked_prefill:
                chunks.append((request, rows_max))
            return Composition(decodes, chunks, rows_cap)
        chunks.append((request, rows))
        free -= blocks
        running += 1
        rows_max -= rows
        spans_left -= 1
    return Composition(decodes, chunks, BindingLimit.NOTHING_WAITING)


def width_limit(plan: Plan) -> BindingLimit:
    """Which width binds when a micro-batch is full of decodes, one row each."""
    is_row_bound = plan.row_width < plan.micro_batch_width
    return BindingLimit.ROW_WIDTH if is_row_bound else BindingLimit.MICRO_BATCH_WIDTH


def greedy(queues: Queues) -> Composition:
    """All ready decodes first, then prompts to the row width. Lumps, and can starve prompts."""
    plan = queues.plan
    ready = len(queues.decodes)
    wanted = ready if ready < queues.width else queues.width  # noqa: FURB136 - a call costs more.
    taken = wanted if wanted <= queues.blocks_free else queues.growable(wanted)
    if taken < wanted:
        return Composition(taken, [], BindingLimit.KV, is_short=True)
    if taken < ready:
        return Composition(taken, [], width_limit(plan))
    if not queues.prompts and not queues.waiting:
        return decodes_only(taken, NOTHING_WAITING)
    return fill_with_prompts(queues, taken, plan.row_width - taken, BindingLimit.ROW_WIDTH)


def cohort(queues: Queues) -> Composition:
    """Even cohorts: what keeps every window place filled with an equal share of the decodes.

    At most ceil(live decodes / window) decodes, counting those in flight, and at most
    ceil(ready / free places), so that cohorts stay even and do not merge at the last vacancy. A
    waiting prompt always gets at least one row. While any decode is live prompt rows are capped, by
    the plan's cap and, with a cost model, so that the micro-batch takes as long as the others.
    """
    plan = queues.plan
    ready = len(queues.decodes)
    places = queues.window - queues.open_count
    has_prompt = bool(queues.prompts) or can_admit(queues)
    width = queues.width
    if has_prompt and (width > 1 or not queues.passed_over):
        width -= 1  # At width 1 the phases take turns.
    even = -(-queues.live_decodes // queues.window)
    share = -(-ready // places)
    wanted = min(ready, width, even, share)
    taken = queues.growable(wanted)
    if taken < wanted:
        return Composition(taken, [], BindingLimit.KV, is_short=True)
    rows_max, rows_cap = plan.row_width - taken, BindingLimit.ROW_WIDTH
    if queues.live_decodes and has_prompt:
        chunk = chunk_rows(queues, taken)
        if chunk < rows_max:
            rows_max, rows_cap = chunk, BindingLimit.COHORT
    composition = fill_with_prompts(queues, taken, rows_max, rows_cap)
    if taken < ready and composition.binding is BindingLimit.NOTHING_WAITING:
        is_full = taken == width < min(even, share)
        return composition._replace(binding=width_limit(plan) if is_full else BindingLimit.COHORT)
    return composition


def can_admit(queues: Queues) -> bool:
    """Whether the first waiting request could join now."""
    if not queues.waiting or queues.is_first_releasing:
        return False
    request = queues.waiting[0]
    blocks = blocks_for(request.target, queues.plan.kv_block)
    has_blocks = blocks + queues.running <= queues.blocks_free
    return has_blocks and queues.running < queues.plan.running_max


def chunk_rows(queues: Queues, taken: int) -> int:
    """Most prompt rows beside `taken` decodes while any decode is live.

    Without a cost model: the plan's cap. With one: the largest chunk that keeps the predicted hold
    at that of an even cohort with a full cap at context 0, so that micro-batches take equal time
    whatever their context; at least 1/8 of the cap. Holds must not fall with rows (bisection).
    """
    plan = queues.plan
    cap = plan.prefill_rows_max or -(-plan.row_width // 2)
    first = queues.prompts[0] if queues.prompts else queues.waiting[0]
    predict = queues.predict
    if predict is None or not plan.chunked_prefill:
        return cap if plan.chunked_prefill else plan.row_width
    context = sum(r.length for r in queues.decodes[:taken])
    even = -(-queues.live_decodes // queues.window)
    mean = context // taken if taken else first.target
    target = predict(even, even * mean, cap, 0)
    low, high = max(1, cap // PREFILL_FLOOR_SHARE), min(cap, plan.row_width - taken)
    if predict(taken, context, high, first.scheduled) <= target:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if predict(taken, context, middle, first.scheduled) <= target:
            low = middle
        else:
            high = middle
    return low


def is_lone(queues: Queues, composition: Composition) -> bool:
    """All that is ready is decodes below an even share, and others may return to join them."""
    return (
        composition.binding is BindingLimit.NOTHING_WAITING
        and not composition.chunks
        and composition.decodes < queues.live_decodes // queues.window
    )


PACKERS: dict[str, Packer] = {
    "drained": greedy,  # The ring opens one micro-batch at a time for it.
    "greedy": greedy,
    "cohort": cohort,
    # Stall-free chunked prefill as Sarathi-Serve does it: one chunk of a prompt in flight (the ring
    # keeps it out of `prompts` meanwhile), and what was left over is sorted by arrival.
    "sarathi": greedy,
}
