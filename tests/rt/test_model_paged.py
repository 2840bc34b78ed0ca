"""Paged KV, as CUDA uses it, on the CPU: the gathering form, and the one call through a double."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir_rt.errors import StageStateError
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.attention_cuda import PAGE, PagedKv
from kvasir_rt.model.cuda_graphs import DecodeGraphs
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.places import KvSizes
from kvasir_rt.model.stage_model import StageModel
from tests.rt.batches import forward, greedy, greedy_mixed, micro_batch, stages_of
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model

PROMPTS = [[5, 10, 300, 40, 7], [100] * 3, list(range(60, 90)), [9] * 17]
NUMERICS = Numerics.of("cpu", "float32")


def varlen_double(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int,
    max_k: int, *, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor,
    block_table: Tensor, num_splits: int,
) -> Tensor:  # fmt: skip
    """What `torch.nn.attention.varlen.varlen_attn` documents, written out plainly."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert num_splits == 1
    assert {each.dtype for each in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert key.shape[1] % 256 == 0
    assert key.stride(-1) == 1
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[2]
    edges = cu_seq_q.tolist()
    for span, length in enumerate(seqused_k.tolist()):
        first, stop = edges[span], edges[span + 1]
        assert stop - first <= max_q
        assert length <= max_k
        keys = key[block_table[span].long()].flatten(0, 1)[:length]
        values = value[block_table[span].long()].flatten(0, 1)[:length]
        for row in range(first, stop):
            seen = length - (stop - first) + (row - first) + 1  # Causal, aligned at the end.
            for head in range(query.shape[1]):
                scores = keys[:seen, head // group] @ query[row, head] / math.sqrt(query.shape[-1])
                out[row, head] = scores.softmax(0) @ values[:seen, head // group]
    return out


def paged(stages: list[StageModel], *, has_varlen: bool) -> list[StageModel]:
    for stage in stages:
        sizes = stage.kv.sizes  # type: ignore[attr-defined]
        stage.kv = PagedKv(sizes, NUMERICS)
        stage.kv.varlen = varlen_double if has_varlen else None
    return stages


@pytest.mark.parametrize("has_varlen", [False, True], ids=["gathered", "one call"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_paged_attention_gives_the_tokens_of_slots(
    tmp_path: Path, architecture: str, has_varlen: bool
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel(architecture=architecture))
    with open_gguf(path) as gguf:
        slots = stages_of(gguf, [0, 1, 4])
        stages = paged(stages_of(gguf, [0, 1, 4]), has_varlen=has_varlen)
    expected = [greedy(slots, prompt, 8) for prompt in PROMPTS]
    assert [greedy(stages, prompt, 8) for prompt in PROMPTS[:2]] == expected[:2]
    assert greedy_mixed(stages, PROMPTS, 8, seed=5) == expected


def test_requests_longer_than_a_page_chunked_equal_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel())
    monkeypatch.setattr("kvasir_rt.model.attention_cuda.PAGE", 16)
    prompts = [[each * 7 % VOCAB for each in range(50)], [3] * 33]
    with open_gguf(path) as gguf:
        slots = stages_of(gguf, [0, 4])
        stages = paged(stages_of(gguf, [0, 4]), has_varlen=False)
    expected = [greedy(slots, prompt, 20) for prompt in prompts]
    assert greedy_mixed(stages, prompts, 20, seed=2, rows_max=11) == expected


def repeat(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """What a CUDA graph does: the same tensors in, the same tensor out, computed again."""
    output = compute()
    return output, lambda: output.copy_(compute())


def test_decodes_padded_to_a_graphs_size_give_the_tokens_of_slots(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel())
    with open_gguf(path) as gguf:
        slots = stages_of(gguf, [0, 1, 4])
        stages = paged(stages_of(gguf, [0, 1, 4]), has_varlen=True)
    for stage in stages:
        row = torch.zeros((), dtype=torch.int64) if stage.is_head else torch.zeros(64)
        kv = stage.kv
        assert isinstance(kv, PagedKv)
        with torch.inference_mode():
            stage._graphs = DecodeGraphs(stage._decode, kv, row, 3, repeat)
        assert list(stage._graphs._graphs) == [1, 2, 4]  # The next size up holds 3 rows.
    expected = [greedy(slots, prompt, 8) for prompt in PROMPTS]
    assert [greedy(stages, prompt, 8) for prompt in PROMPTS] == expected
    assert greedy_mixed(stages, PROMPTS, 8, seed=7) == expected
    mb = micro_batch([(0, 0), (1, 0), (2, 0)])
    assert forward(stages, mb, [4, 5, 6]).shape == (3, VOCAB)
    five = micro_batch([(each, 0) for each in range(10, 15)])
    assert forward(stages, five, [1] * 5).shape == (5, VOCAB)  # No graph of 5: step by step.


def memory(**options: Any) -> PagedKv:
    given = {
        "slots": 4, "context": 2048, "tokens": 1024, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    return PagedKv(KvSizes(**(given | options)), NUMERICS)


def test_pages_suffice_for_whatever_the_ledger_admits_and_come_back() -> None:
    kv = memory()
    for _ in range(3):
        for request, rows in enumerate((255, 257, 511, 1)):  # 1,024 in all, each page badly filled.
            kv.batch(micro_batch([], [(request, 0, rows)]))
        kv.release(range(4))
    assert sorted(kv._free) == list(range(1024 // PAGE + 4))
    kv.batch(micro_batch([], [(9, 0, 1024)]))
    kv.reset()
    assert len(kv._free) == 8


def test_the_one_call_is_tried_before_it_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    kv = memory()
    assert kv._tried(varlen_double) is varlen_double
    assert kv._tried(None) is None

    def off_by_one(*given: Any, **options: Any) -> Tensor:
        return varlen_double(*given, **{**options, "seqused_k": options["seqused_k"] - 1})

    def refuses(*given: Any, **options: Any) -> Tensor:
        raise RuntimeError("block_table needs another kernel")

    assert kv._tried(off_by_one) is None
    assert "is off by" in caplog.text
    assert kv._tried(refuses) is None
    assert "needs another kernel" in caplog.text


def test_more_than_the_ledger_admits_is_refused() -> None:
    kv = memory(context=4096)
    kv.batch(micro_batch([], [(0, 0, 2048)]))
    with pytest.raises(StageStateError, match="needs a page of KV"):
        kv.batch(micro_batch([], [(1, 0, 1)]))
    with pytest.raises(StageStateError, match="this stage holds 2048 rows"):
        kv.batch(micro_batch([(0, 5)]))
