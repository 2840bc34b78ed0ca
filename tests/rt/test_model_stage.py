"""A stage computes what it was sent: any split, any composition, any order, the same tokens."""

import random
from pathlib import Path

import pytest
import torch

from kvasir_core.plan import Plan
from kvasir_rt.errors import ModelFileError, ModelMemoryError, StageStateError, UnsupportedModel
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.stage_model import StageModel
from kvasir_rt.model.weights import weight_bytes
from tests.rt.batches import forward, greedy, greedy_mixed, micro_batch, stages_of
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
PROMPT = [5, 10, 300, 40, 7, 101, 33]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: write_tiny_model(folder / f"{name}.gguf", TinyModel(architecture=name))
        for name in ARCHITECTURES
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_split_gives_the_tokens_of_one_process(
    files: dict[str, Path], architecture: str
) -> None:
    with open_gguf(files[architecture]) as gguf:
        whole = greedy(stages_of(gguf, [0, 4]), PROMPT, 24)
        assert len(set(whole)) > 8  # Else equality would say little.
        for edges in ([0, 2, 4], [0, 1, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]):
            assert greedy(stages_of(gguf, edges), PROMPT, 24) == whole


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_of_late_requests_in_random_chunks_give_each_request_its_own_tokens(
    files: dict[str, Path], architecture: str, seed: int
) -> None:
    prompts = prompts_of(seed, 7)
    with open_gguf(files[architecture]) as gguf:
        stages = stages_of(gguf, [0, 1, 4])
        alone = [greedy(stages, prompt, 12) for prompt in prompts]
        assert greedy_mixed(stages, prompts, 12, seed=seed) == alone


def test_five_stages_of_a_ten_layer_model_give_the_tokens_of_two_and_three(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "ten.gguf", TinyModel(layers=10))
    with open_gguf(path) as gguf:
        two = greedy(stages_of(gguf, [0, 5, 10]), PROMPT, 16)
        assert greedy(stages_of(gguf, [0, 4, 7, 10]), PROMPT, 16) == two
        assert greedy(stages_of(gguf, [0, 2, 4, 6, 8, 10]), PROMPT, 16) == two


def test_chunks_of_64_rows_give_the_tokens_of_one_pass(files: dict[str, Path]) -> None:
    prompt = prompts_of(9, 1)[0] * 40
    prompt = prompt[:200]
    with open_gguf(files["llama"]) as gguf:
        stages = stages_of(gguf, [0, 2, 4])
        whole = greedy(stages, prompt, 8)
        for start in (0, 64, 128):
            mb = micro_batch([], [(0, start, 64)])
            forward(stages, mb, prompt[start : start + 64])
        logits = forward(stages, micro_batch([], [(0, 192, 8)], [0]), prompt[192:])
        assert logits.shape == (1, VOCAB)
        assert int(logits.argmax()) == whole[0]


def test_a_micro_batch_without_output_rows_gives_no_logits(files: dict[str, Path]) -> None:
    with open_gguf(files["llama"]) as gguf:
        logits = forward(stages_of(gguf, [0, 4]), micro_batch([], [(0, 0, 5)]), PROMPT[:5])
    assert logits.shape == (0, VOCAB)


def test_decodes_of_far_apart_lengths_and_slots_equal_each_alone(files: dict[str, Path]) -> None:
    prompts = [[1] * 3, [2] * 180, [3] * 5, [4] * 200, [5] * 4, [6] * 190]
    with open_gguf(files["llama"]) as gguf:
        stages = stages_of(gguf, [0, 4])
        alone = []
        for prompt in prompts:
            forward(stages, micro_batch([], [(0, 0, len(prompt))]), prompt)
            alone.append(forward(stages, micro_batch([(0, len(prompt))]), [7]))
            stages[0].release([0])
        for number, prompt in enumerate(prompts):
            forward(stages, micro_batch([], [(number, 0, len(prompt))]), prompt)
        stages[0].release([2])  # A hole among the slots.
        chosen = [5, 0, 3, 1, 4]
        mb = micro_batch([(number, len(prompts[number])) for number in chosen])
        together = forward(stages, mb, [7] * len(chosen))
    for row, number in enumerate(chosen):
        assert torch.allclose(together[row], alone[number][0], atol=1e-4)


# ------------------------------------------------------------------------------------ state


def test_released_slots_are_taken_again_and_hold_nothing_of_the_last_request(
    files: dict[str, Path],
) -> None:
    with open_gguf(files["llama"]) as gguf:
        stages = stages_of(gguf, [0, 4], running_max=2)
        first = greedy(stages, PROMPT, 8)
        for number in range(1, 9):
            forward(stages, micro_batch([], [(number, 0, 3)]), [number] * 3)
            stages[0].release([number])
        assert greedy(stages, PROMPT, 8) == first


@pytest.mark.parametrize(
    ("mb", "text"),
    [
        (micro_batch([(0, 4)]), "continues at row 4; this stage holds 3 rows"),
        (micro_batch([(0, 2)]), "continues at row 2; this stage holds 3 rows"),
        (micro_batch([(9, 3)]), "continues at row 3; this stage holds 0 rows"),
        (micro_batch([], [(0, 3, 30)]), "needs 33 rows; the plan's context is 32"),
        (micro_batch([], [(5, 0, 1), (6, 0, 1)]), "all 2 are in use"),
    ],
)
def test_rows_that_do_not_continue_what_is_held_are_refused(
    files: dict[str, Path], mb: "object", text: str
) -> None:
    with open_gguf(files["llama"]) as gguf:
        (stage,) = stages_of(gguf, [0, 4], running_max=2, context=32)
    stage.forward(micro_batch([], [(0, 0, 3)]), torch.tensor([1, 2, 3]))
    with pytest.raises(StageStateError, match=text):
        stage.forward(mb, torch.zeros(mb.row_count, dtype=torch.int64))  # type: ignore[attr-defined,arg-type]


def test_a_tensor_of_another_shape_than_composed_is_refused(files: dict[str, Path]) -> None:
    with open_gguf(files["llama"]) as gguf:
        head, tail = stages_of(gguf, [0, 2, 4])
    with pytest.raises(StageStateError, match=r"shape \[4\].* asks for \[3\]"):
        head.forward(micro_batch([], [(0, 0, 3)]), torch.tensor([1, 2, 3, 4]))
    with pytest.raises(StageStateError, match=r"asks for \[3, 64\]"):
        tail.forward(micro_batch([], [(0, 0, 3)]), torch.zeros(3, 65))


def test_reset_forgets_every_request(files: dict[str, Path]) -> None:
    with open_gguf(files["llama"]) as gguf:
        stages = stages_of(gguf, [0, 4], running_max=2)
    first = greedy(stages, PROMPT, 6)
    for number in (0, 1):
        forward(stages, micro_batch([], [(number, 0, 3)]), [1, 2, 3])
    stages[0].reset()
    assert greedy(stages, PROMPT, 6) == first


# ------------------------------------------------------------------------- case M1, weights


def write_pair(folder: Path) -> tuple[Path, Path]:
    tied = write_tiny_model(folder / "tied.gguf", TinyModel(is_tied=True))
    untied = write_tiny_model(folder / "untied.gguf", TinyModel(is_tied=False))
    return tied, untied


def test_without_output_weight_the_tail_uses_the_embedding_that_the_head_owns(
    tmp_path: Path,
) -> None:
    path = write_tiny_model(tmp_path / "tied.gguf", TinyModel(is_tied=True))
    with open_gguf(path) as gguf:
        head, tail = stages_of(gguf, [0, 2, 4])
        assert head._embedding is not None
        assert tail._embedding is None
        shape = ModelShape.of(gguf)
        numerics = Numerics.of("cpu", "float32")
        table = VOCAB * 64 * 4
        assert weight_bytes(shape, (0, 2), numerics).embedding == table
        assert weight_bytes(shape, (2, 4), numerics).lm_head == table  # The second copy.
        boundary = head.forward(micro_batch([], [(0, 0, 3)], [0]), torch.tensor([1, 2, 3]))
        logits = tail.forward(micro_batch([], [(0, 0, 3)], [0]), boundary)
        norm = tail._output_norm
        assert norm is not None
        # The reference: the tail's last hidden state times the head's embedding.
        seen: list[torch.Tensor] = []
        lm_head = tail._lm_head
        assert lm_head is not None
        tail._lm_head = lambda x: (seen.append(x), lm_head(x))[1]  # type: ignore[func-returns-value]
        tail.reset()
        tail.forward(micro_batch([], [(0, 0, 3)], [0]), boundary)
        reference = seen[0] @ head._embedding.T
    assert torch.allclose(logits, reference, atol=1e-4)


@pytest.mark.parametrize("edges", [[0, 2, 4], [0, 1, 3, 4]])
def test_an_output_weight_of_its_own_is_used_also_from_the_second_file_of_a_split_model(
    tmp_path: Path, edges: list[int]
) -> None:
    model = TinyModel(is_tied=False)
    whole = write_tiny_model(tmp_path / "whole.gguf", model)
    tied = write_tiny_model(tmp_path / "tied.gguf", TinyModel(is_tied=True))
    split = write_tiny_model(
        tmp_path / "split.gguf", TinyModel(is_tied=False, split_tensors=4 * 9 + 2)
    )
    assert split.name == "split-00001-of-00002.gguf"
    mb = micro_batch([], [(0, 0, len(PROMPT))], [0])
    with open_gguf(whole) as one, open_gguf(split) as two, open_gguf(tied) as three:
        assert [name for name, at in two.tensors.items() if at.part == 1] == ["output.weight"]
        assert two.tensors.keys() == one.tensors.keys()
        expected = forward(stages_of(one, edges), mb, PROMPT)
        assert torch.equal(forward(stages_of(two, edges), mb, PROMPT), expected)
        assert (forward(stages_of(three, edges), mb, PROMPT) - expected).abs().max() > 1e-2


def test_a_model_without_embedding_is_refused_naming_the_tensor(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "none.gguf", TinyModel(without=("token_embd.weight",)))
    with (
        open_gguf(path) as gguf,
        pytest.raises(ModelFileError, match=r"'token_embd.weight' is mis"),
    ):
        stages_of(gguf, [0, 2, 4])


def test_a_stage_reads_only_what_it_needs(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "part.gguf", TinyModel(without=("blk.3.attn_q.weight",)))
    with open_gguf(path) as gguf:
        stages_of(gguf, [0, 3])
        with pytest.raises(ModelFileError, match=r"'blk.3.attn_q.weight' is missing"):
            stages_of(gguf, [3, 4])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_files_give_the_tokens_of_their_dequantised_values(
    tmp_path: Path, kind: str
) -> None:
    path = write_tiny_model(tmp_path / "q.gguf", TinyModel(quantisation=kind, is_tied=True))
    with open_gguf(path) as gguf:
        (stage,) = stages_of(gguf, [0, 4])
        assert gguf.tensors["blk.0.attn_q.weight"].type_name == kind
        logits = stage.forward(micro_batch([], [(0, 0, 3)], [0]), torch.tensor([1, 2, 3]))
    assert torch.isfinite(logits).all()
    assert logits.std() > 1


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (TinyModel(extra=(("attention.sliding_window", 16),)), "sliding_window is 16"),
        (TinyModel(extra=(("rope.scaling.type", "yarn"),)), "'yarn' is not supported"),
        (TinyModel(extra=(("expert_count", 4),)), "llama with experts is not supported"),
        (TinyModel(extra=(("logit_scale", 0.5),)), "logit_scale is 0.5"),
        (TinyModel(heads=4, kv_heads=3), "4 query heads cannot share 3 KV heads"),
        (TinyModel(architecture="qwen3moe", experts=4, experts_used=5), "from 1 to 4"),
    ],
)
def test_what_would_change_the_results_is_refused_by_name(
    tmp_path: Path, model: TinyModel, text: str
) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", model)
    with open_gguf(path) as gguf, pytest.raises(ModelFileError, match=text):
        ModelShape.of(gguf)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", TinyModel(architecture="gemma2"))
    with (
        open_gguf(path) as gguf,
        pytest.raises(UnsupportedModel, match="'gemma2' is not supported"),
    ):
        ModelShape.of(gguf)


def test_a_tensor_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", TinyModel(architecture="qwen3"))
    data = path.read_bytes().replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_q_gone.weight")
    path.write_bytes(data)
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModel, match="attn_q_gone"):
        stages_of(gguf, [0, 4])


def test_absurd_kv_is_refused_with_both_numbers_before_it_is_taken(files: dict[str, Path]) -> None:
    with open_gguf(files["llama"]) as gguf:
        with pytest.raises(ModelMemoryError, match=r"kv_tokens takes \d+ bytes; this machine has"):
            stages_of(gguf, [0, 4], kv_tokens=1 << 40)
        with pytest.raises(ModelMemoryError, match=r"bytes of addresses .* limit is"):
            stages_of(gguf, [0, 4], running_max=1 << 30)
        with pytest.raises(UnsupportedModel, match="'float16' is not supported"):
            stages_of(gguf, [0, 4], dtype="float16")


def test_a_plan_sizes_its_stages(files: dict[str, Path]) -> None:
    plan = Plan(
        layers=((0, 2), (2, 4)), row_width=16, micro_batch_width=4, window=2, window_max=2,
        running_max=3, context=64, kv_tokens=(200, 128), hidden=64, element_bytes=4,
    )  # fmt: skip
    with open_gguf(files["llama"]) as gguf:
        stages = [StageModel.of_plan(gguf, plan, stage) for stage in range(2)]
        assert [stage.layers for stage in stages] == [(0, 2), (2, 4)]
        assert greedy(stages, PROMPT, 8) == greedy(stages_of(gguf, [0, 4]), PROMPT, 8)


@pytest.mark.parametrize("is_native", [False, True], ids=["this processor", "native"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_close_to_float32(
    files: dict[str, Path], architecture: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            pytest.skip("this processor's matrix library has no bfloat16, not even emulated")
        monkeypatch.setattr("kvasir_rt.model.linear.has_bfloat16_arithmetic", lambda: True)
        assert Numerics.of("cpu", "bfloat16").compute == torch.bfloat16
    mb = micro_batch([], [(0, 0, len(PROMPT))], [0])
    with open_gguf(files[architecture]) as gguf:
        wide = forward(stages_of(gguf, [0, 2, 4]), mb, PROMPT)
        stages = stages_of(gguf, [0, 2, 4], dtype="bfloat16")
        assert stages[0].boundary == torch.bfloat16
        boundary = stages[0].forward(mb, torch.tensor(PROMPT))
        assert boundary.dtype == torch.bfloat16
        narrow = stages[1].forward(mb, boundary)
    assert narrow.dtype == torch.float32
    scale = wide.abs().max()
    assert ((narrow - wide).abs().max() / scale) < (0.2 if architecture == "qwen3moe" else 0.08)
