"""Which layers each stage holds: as even in time as whole layers allow, head and tail included."""

from collections.abc import Sequence
from itertools import pairwise

from kvasir_core.errors import PlanError
from kvasir_rt.model.shape import ModelShape
from kvasir_scenario.digits import whole_number

LayerRanges = tuple[tuple[int, int], ...]

TAIL_SHARE = 0.5  # The output matrix counts in decode and hardly in prefill (one row a prompt).
LAYERS_STATED_MAX = 10**6  # Of one stage; that they add up is looked at later.
TEXT_SHOWN_MAX = 60


def split_by_cost(
    layers: int, stages: int, *, head_layers: float = 0.0, tail_layers: float = 0.0
) -> LayerRanges:
    """The contiguous split whose slowest stage is fastest.

    Args:
        layers: Layers of the model, all of one cost.
        stages: Stages, at least two.
        head_layers: What the head does beside its layers, in layers.
        tail_layers: What the tail does beside its layers, in layers.

    Raises:
        PlanError: More stages than layers, or fewer than two stages.
    """
    if stages < 2:
        raise PlanError(
            f"a ring has at least 2 stages, not {stages}: head and tail are different roles"
        )
    if stages > layers:
        raise PlanError(f"{stages} stages cannot each hold one of {layers} layers")
    beside = [0.0] * stages
    beside[0], beside[-1] = head_layers, tail_layers
    sizes = [1] * stages
    for _ in range(layers - stages):
        # Greedy is optimal here: the layer goes where the stage ends up shortest. On a tie it goes
        # towards the head, as an even split has it.
        loads = [size + 1 + extra for size, extra in zip(sizes, beside, strict=True)]
        sizes[loads.index(min(loads))] += 1
    return ranges_of(sizes)


def ranges_of(sizes: Sequence[int]) -> LayerRanges:
    """Layer counts to half-open ranges, contiguous from 0."""
    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return tuple(pairwise(edges))


def estimated_tail_layers(shape: ModelShape) -> float:
    """What norm and output matrix take at the tail, in layers: by the weights that are read.

    Decoding reads every weight once a micro-batch; prefill multiplies the output matrix with one
    row of a prompt only, so half of it is counted. For SmolLM2-135M this gives 4 and with it the
    split 17/13, which is also the one measured best.
    """
    attention = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    experts = 3 * shape.hidden * shape.expert_ffn * shape.experts_used
    layer = attention + 3 * shape.hidden * shape.ffn + experts
    return TAIL_SHARE * shape.vocab * shape.hidden / layer


def parse_layers(text: str, layers: int) -> LayerRanges:
    """`18,12`: layers per stage, head first.

    Raises:
        PlanError: Not numbers, or they do not add up; both sums are named.
    """
    sizes: list[int] = []
    for part in text.split(","):
        size = whole_number(part.strip(), 1, LAYERS_STATED_MAX)
        if size is None:
            raise PlanError(
                f"--layers is {text[:TEXT_SHOWN_MAX]!r}; it must be layer counts such as 18,12, "
                "or auto"
            )
        sizes.append(size)
    if sum(sizes) != layers:
        raise PlanError(f"--layers {text} adds up to {sum(sizes)}; the model has {layers} layers")
    if len(sizes) < 2:
        raise PlanError(f"--layers {text} is one stage; a ring has at least 2")
    return ranges_of(sizes)
