"""What a stage takes: KV stays at the ledger's bound, loading at the weights and a little more."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.attention import SlotBatch, SlotKv
from kvasir_rt.model.linear import Numerics, Packer
from kvasir_rt.model.places import MOVED_ROWS_MAX, KvSizes, exchanges
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.weights import weight_bytes
from tests.rt.batches import micro_batch
from tests.rt.tiny_models import TinyModel, write_tiny_model

SPARE_MIB = 32  # 20 for the loader's blocks, the rest for what allocators and libraries keep.

MEASURE = """
import json, re, sys
import torch
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.stage_model import StageModel
import gguf  # So that its own memory is not counted.

def status(name):
    text = open("/proc/self/status").read()
    return int(re.search(name + r":\\s+(\\d+)", text)[1]) / 1024

path, start, stop, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
# First use of the matrix library maps its code; that is no weight.
torch.nn.functional.linear(torch.randn(8, 64), torch.randn(64, 64))
with open_gguf(path) as opened:
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # The peak starts here.
    stage = StageModel(
        opened, (start, stop), running_max=64, context=8192, kv_tokens=4096, dtype=dtype
    )
    print(json.dumps([status("VmHWM") - before, status("VmRSS") - before, stage.kv.bytes_virtual]))
"""


def measured(path: Path, layers: tuple[int, int], dtype: str) -> tuple[float, float, float]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), *map(str, layers), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, kept, virtual = json.loads(done.stdout)
    return peak, kept, virtual


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 MiB of float32 weights in 8 layers; a file of a quarter of that."""
    model = TinyModel(
        layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=2048, context=8192,
        quantisation="Q8_0",
    )  # fmt: skip
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "wide.gguf", model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [(0, 2), (2, 8)])
def test_a_stage_peaks_at_its_own_weights_and_a_little_more(
    wide: Path, layers: tuple[int, int], dtype: str
) -> None:
    with open_gguf(wide) as gguf:
        numerics = Numerics.of("cpu", dtype)
        expected = weight_bytes(ModelShape.of(gguf), layers, numerics).total / (1 << 20)
    peak, kept, virtual = measured(wide, layers, dtype)
    assert expected - 2 < kept < expected + SPARE_MIB
    assert peak < expected + SPARE_MIB
    assert virtual > 64 * 8192 * 2 * 4 * 64 * 4  # 64 slots of 8,192 positions: address space only.


# ---------------------------------------------------------------------------------- KV


def sizes(**options: int) -> KvSizes:
    given = {
        "slots": 6, "context": 256, "tokens": 600, "layers": 3, "heads": 4, "kv_heads": 2,
        "head_dim": 64,
    }  # fmt: skip
    return KvSizes(**(given | options))


def resident_bytes(kv: SlotKv) -> int:
    """Of the mapping, from the kernel."""
    address = kv.flat.data_ptr()
    text = Path("/proc/self/smaps").read_text()
    total, inside = 0, False
    for line in text.splitlines():
        first, _, rest = line.partition("-")
        if rest and ":" not in first:
            start, stop = int(first, 16), int(rest.split(" ", 1)[0], 16)
            inside = start < address + kv.bytes_virtual and stop > address
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def fill(kv: SlotKv, request: int, start: int, rows: int) -> None:
    batch = kv.batch(micro_batch([], [(request, start, rows)]))
    for layer in range(kv.sizes.layers):
        batch.attend(layer, torch.randn(rows, 4, 64), torch.randn(rows, 4, 64))


def test_physical_kv_follows_the_ledger_and_not_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = SlotKv(sizes(), torch.float32)
    row = 3 * kv.sizes.row_elements * 4
    assert resident_bytes(kv) == 0
    for request in range(6):  # Each long, one after the other: every slot would be touched in turn.
        fill(kv, request, 0, 100)
    assert kv.tokens_touched == 600
    assert resident_bytes(kv) <= 600 * row + 6 * 3 * 4096
    kv.release([0, 1, 2, 3, 4, 5])
    for request in range(10, 40):  # Now two long ones at a time, which the ledger admits.
        fill(kv, request, 0, 256)
        fill(kv, request + 100, 0, 256)
        assert kv.tokens_touched <= 600
        assert resident_bytes(kv) <= 600 * row + 6 * 3 * 4096
        kv.release([request, request + 100])


def test_pages_given_back_are_those_of_free_slots_and_then_beyond_live_lengths() -> None:
    kv = SlotKv(sizes(tokens=300), torch.float32)
    fill(kv, 0, 0, 250)
    kv.release([0])
    fill(kv, 1, 0, 40)  # In the same slot, which keeps 250 rows of pages.
    before = kv.flat.view(6, 3, 256, 4, 64)[0, :, :40].clone()
    fill(kv, 2, 0, 200)
    assert kv.tokens_touched == 240
    assert torch.equal(kv.flat.view(6, 3, 256, 4, 64)[0, :, :40], before)
    assert kv.flat.view(6, 3, 256, 4, 64)[0, :, 64:].abs().max() == 0  # Given back: zeros.


def places(kv: SlotKv) -> dict[int, int]:
    return {request: kv._lengths._place_of[request] for request in kv._lengths.requests}


def test_requests_that_begin_alone_lie_far_apart() -> None:
    kv = SlotKv(sizes(tokens=6 * 256), torch.float32)
    for request in range(6):
        fill(kv, request, 0, 4)
    assert places(kv) == {0: 0, 1: 3, 2: 2, 3: 5, 4: 1, 5: 4}
    kv.release([0, 1, 2, 3, 4, 5])
    fill(kv, 7, 0, 4)
    assert places(kv) == {7: 0}  # Where pages are warm.


def test_a_new_request_lies_beside_those_of_its_micro_batch() -> None:
    kv = SlotKv(sizes(slots=16, tokens=16 * 256), torch.float32)
    cohorts: list[list[int]] = [[], []]
    rows = dict.fromkeys(range(16), 4)
    for request in range(16):  # Prompts enter the two cohorts in turn.
        cohort = cohorts[request % 2]
        kv.batch(micro_batch([(each, rows[each]) for each in cohort], [(request, 0, 4)]))
        for each in cohort:
            rows[each] += 1
        cohort.append(request)
    where = places(kv)
    assert [sorted(where[each] for each in cohort) for cohort in cohorts] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    kv.release([3])
    kv.batch(micro_batch([(1, rows[1])], [(20, 0, 4)]))
    assert places(kv)[20] == where[3]


Begun = Sequence[tuple[int, int]]  # Requests and the rows of their prompts.


class Written:
    """Writes rows that tell who and where they are, and knows what must be in memory then."""

    def __init__(self, kv: SlotKv) -> None:
        self.kv = kv
        self.rows: dict[int, int] = {}

    def lay_out(self, decoding: list[int], beginning: Begun = ()) -> SlotBatch:
        batch = self.kv.batch(
            micro_batch(
                [(each, self.rows[each]) for each in decoding],
                [(each, 0, rows) for each, rows in beginning],
            )
        )
        self.rows.update(beginning)
        self.rows.update({each: self.rows[each] + 1 for each in decoding})
        return batch

    def attend(self, batch: SlotBatch, decoding: list[int], began: Sequence[int] = ()) -> None:
        order = list(range(len(decoding))) if batch.order is None else batch.order.tolist()
        owners = [decoding[place] for place in order[: len(decoding)]]
        owners += [each for each in began for _ in range(self.rows[each])]
        told = torch.tensor([float(each) for each in owners]) * 1000 + batch.positions
        for layer in range(self.kv.sizes.layers):
            kv = (told + layer / 8).view(-1, 1, 1).expand(-1, 4, 64)
            batch.attend(layer, torch.randn(len(owners), 4, 64), kv)

    def run(self, decoding: list[int], beginning: Begun = ()) -> None:
        batch = self.lay_out(decoding, beginning)
        self.attend(batch, decoding, [each for each, _ in beginning])

    def check(self) -> None:
        slots, layers, context = (getattr(self.kv.sizes, name) for name in SHAPE)
        whole = self.kv.flat.view(slots, layers, context, 4, 64)
        touched = self.kv._touched
        assert self.kv.tokens_touched == sum(touched)
        for request, place in places(self.kv).items():
            assert touched[place] >= self.rows[request]
            for layer in range(layers):
                expected = request * 1000 + torch.arange(self.rows[request]) + layer / 8
                assert torch.equal(whole[place, layer, : len(expected), 3, 63], expected)


SHAPE = ("slots", "layers", "context")


def spanned(kv: SlotKv, requests: list[int]) -> int:
    where = [places(kv)[each] for each in requests]
    return max(where) - min(where) + 1


def test_a_micro_batch_that_finds_others_among_its_own_changes_places_with_them() -> None:
    kv = SlotKv(sizes(slots=16, tokens=16 * 256), torch.float32)
    told = Written(kv)
    told.run([], [(each, 5 + each) for each in range(16)])
    odd, even = list(range(1, 16, 2)), list(range(0, 16, 2))
    assert spanned(kv, odd) == 15
    for decoding in (odd, even):
        told.run(decoding)
        assert spanned(kv, decoding) == 8
        told.check()
    before = places(kv)
    for _ in range(3):  # And there they stay.
        told.run(even)
        told.run(odd)
    assert places(kv) == before
    told.check()


def test_a_micro_batch_moves_few_rows_at_once_and_the_next_goes_on() -> None:
    kv = SlotKv(sizes(slots=16, tokens=16 * 256), torch.float32)
    told = Written(kv)
    told.run([], [(each, 100) for each in range(16)])
    spans = []
    for _ in range(3):
        told.run(list(range(0, 16, 2)))
        spans.append(spanned(kv, list(range(0, 16, 2))))
        told.check()
    assert spans[0] > spans[-1] == 8


def test_nobody_moves_those_of_a_micro_batch_that_waits_for_experts() -> None:
    kv = SlotKv(sizes(slots=8), torch.float32)
    told = Written(kv)
    told.run([], [(each, 5) for each in range(8)])
    waits = told.lay_out([1, 3, 5])
    where = places(kv)
    told.run([0, 2, 4, 6])
    assert {each: places(kv)[each] for each in (1, 3, 5)} == {
        each: where[each] for each in (1, 3, 5)
    }
    told.attend(waits, [1, 3, 5])
    told.check()
    told.run([0, 2, 4, 6])
    assert spanned(kv, [0, 2, 4, 6]) == 4
    told.check()


def test_what_is_moved_stays_within_the_bound_of_physical_kv() -> None:
    kv = SlotKv(sizes(slots=8, tokens=410), torch.float32)
    told = Written(kv)
    told.run([], [(each, 50) for each in range(8)])
    kv.release([1, 3])
    told.run([0, 2, 4])
    assert spanned(kv, [0, 2, 4]) == 3
    assert kv.tokens_touched <= 410
    told.check()


@given(st.data())
def test_what_is_exchanged_brings_a_micro_batch_together(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 24))
    used = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
    mine = data.draw(st.sets(st.sampled_from(sorted(used)), min_size=1))
    fixed = data.draw(st.sets(st.integers(0, slots - 1))) - mine
    rows = {at: data.draw(st.integers(0, 300)) for at in sorted(used)}
    pairs = exchanges(mine, rows, fixed, slots)
    assert sum(rows.get(at, 0) for pair in pairs for at in pair) <= MOVED_ROWS_MAX
    ends = [at for pair in pairs for at in pair]
    assert len(set(ends)) == len(ends)
    assert not set(ends) & fixed
    moved = dict(pairs)
    assert set(moved) <= mine
    assert not set(moved.values()) & mine
    after = {moved.get(at, at) for at in mine}

    def most_together(places: set[int]) -> int:
        return max(sum(start <= at < start + len(mine) for at in places) for start in range(slots))

    assert most_together(after) == most_together(mine) + len(pairs)
    if not fixed and sum(rows.values()) <= MOVED_ROWS_MAX:
        assert max(after) - min(after) + 1 == len(mine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matrix_packed_in_chunks_is_the_matrix(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    numerics = Numerics.of("cpu", dtype)
    weight, bias, x = torch.randn(100, 32), torch.randn(100), torch.randn(9, 32)
    expected = x @ weight.T + bias
    whole = Packer(numerics).pack([weight.numpy()], 100, 32, bias)(x.to(numerics.compute))
    monkeypatch.setattr("kvasir_rt.model.linear.CHUNK_ELEMENTS", 32 * 7)
    blocks = [weight[at : at + 30].contiguous().numpy() for at in range(0, 100, 30)]
    parts = Packer(numerics).pack(blocks, 100, 32, bias)(x.to(numerics.compute))
    assert torch.allclose(parts.float(), whole.float(), atol=1e-5)
    assert torch.allclose(whole.float(), expected, atol=1e-4 if dtype == "float32" else 0.2)


def test_a_weight_beyond_float16_is_kept_exactly() -> None:
    weight = torch.tensor([[1e6, 1.0], [2.0, 3.0]])
    linear = Packer(Numerics.of("cpu", "bfloat16")).pack([weight.numpy()], 2, 2)
    x = torch.tensor([[1.0, 2.0]], dtype=Numerics.of("cpu", "bfloat16").compute)
    assert torch.allclose(linear(x).float(), x.float() @ weight.T, rtol=1e-2)
