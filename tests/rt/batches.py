"""Stages run one after the other in this process, over micro-batches composed at random."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.units import Epoch, MicroBatchId, RequestId
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.model.stage_model import StageModel

Part = tuple[int, int, int]  # request, start, rows


def micro_batch(
    decodes: Sequence[tuple[int, int]], chunks: Sequence[Part] = (), completing: Sequence[int] = ()
) -> MicroBatch:
    """Decodes are `(request, position)`; `completing` are the requests whose chunk ends a prompt."""
    parts = [(request, start, 1) for request, start in decodes] + list(chunks)
    return MicroBatch(
        id=MicroBatchId(0),
        epoch=Epoch(0),
        requests=tuple(RequestId(request) for request, _, _ in parts),
        starts=tuple(start for _, start, _ in parts),
        rows=tuple(rows for _, _, rows in parts),
        decodes=len(decodes),
        completing=tuple(
            index
            for index, (request, _, _) in enumerate(parts)
            if index >= len(decodes) and request in completing
        ),
        row_count=sum(rows for _, _, rows in parts),
        decode_context=sum(start + 1 for _, start in decodes),
        binding=BindingLimit.NOTHING_WAITING,
    )


def stages_of(
    gguf: GgufFile,
    edges: Sequence[int],
    *,
    running_max: int = 8,
    context: int = 256,
    kv_tokens: int = 2048,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[StageModel]:
    """Stages cut at `edges`, such as [0, 4] or [0, 2, 4]."""
    return [
        StageModel(
            gguf,
            (start, stop),
            running_max=running_max,
            context=context,
            kv_tokens=kv_tokens,
            device=device,
            dtype=dtype,
        )
        for start, stop in itertools.pairwise(edges)
    ]


def forward(stages: Sequence[StageModel], mb: MicroBatch, ids: Sequence[int]) -> torch.Tensor:
    """The tail's logits."""
    boundary = torch.tensor(ids)
    for stage in stages:
        boundary = stage.forward(mb, boundary)
    return boundary


def greedy(stages: Sequence[StageModel], prompt: Sequence[int], tokens: int) -> list[int]:
    """One request alone, its prompt in one chunk."""
    logits = forward(stages, micro_batch([], [(0, 0, len(prompt))], [0]), prompt)
    output = [int(logits.argmax())]
    while len(output) < tokens:
        at = len(prompt) + len(output) - 1
        output.append(int(forward(stages, micro_batch([(0, at)]), output[-1:]).argmax()))
    for stage in stages:
        stage.release([0])
    return output


@dataclass
class _Request:
    prompt: list[int]
    tokens: int
    done: int = 0  # Prompt rows computed.
    output: list[int] = field(default_factory=list)


def greedy_mixed(
    stages: Sequence[StageModel],
    prompts: Sequence[list[int]],
    tokens: int,
    *,
    seed: int,
    rows_max: int = 24,
) -> list[list[int]]:
    """All requests together, arriving late, in chunks and cohorts drawn from `seed`."""
    draw = random.Random(seed)
    requests = {number: _Request(prompt, tokens) for number, prompt in enumerate(prompts)}
    outputs: dict[int, list[int]] = {}
    waiting = list(requests)
    draw.shuffle(waiting)
    live: list[int] = []
    while waiting or live:
        if waiting and (not live or draw.random() < 0.5):
            live.append(waiting.pop())
        chosen = [number for number in live if draw.random() < 0.7] or live[:1]
        draw.shuffle(chosen)
        ended = _step(stages, requests, chosen, draw, rows_max)
        for number in ended:
            live.remove(number)
            outputs[number] = requests[number].output
        for stage in stages:
            stage.release(ended)
    return [outputs[number] for number in range(len(prompts))]


def _step(
    stages: Sequence[StageModel],
    requests: dict[int, _Request],
    chosen: list[int],
    draw: random.Random,
    rows_max: int,
) -> list[int]:
    decodes: list[tuple[int, int]] = []
    chunks: list[Part] = []
    ids: list[int] = []
    chunk_ids: list[int] = []
    for number in chosen:
        each = requests[number]
        if each.output:
            decodes.append((number, len(each.prompt) + len(each.output) - 1))
            ids.append(each.output[-1])
        else:
            rows = min(draw.randint(1, rows_max), len(each.prompt) - each.done)
            chunks.append((number, each.done, rows))
            chunk_ids += each.prompt[each.done : each.done + rows]
            each.done += rows
    completing = [n for n, start, rows in chunks if start + rows == len(requests[n].prompt)]
    mb = micro_batch(decodes, chunks, completing)
    picked = forward(stages, mb, ids + chunk_ids).argmax(dim=-1).tolist()
    ended: list[int] = []
    for number, token in zip(mb.outputs, picked, strict=True):
        requests[number].output.append(token)
        if len(requests[number].output) == requests[number].tokens:
            ended.append(number)
    return ended
