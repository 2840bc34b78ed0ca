"""Table costs against a literal transcription of the golden run's formula, and their limits."""

import io
import math
import random
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_sim.costs import build_costs
from kvasir_sim.costs.table import FILE_BYTES_MAX, MATRICES, VECTORS, TableCosts, read_tables
from tests.sim.cost_inputs import data_file, micro_batch, scenario

Arrays = dict[str, npt.NDArray[np.float64]]


def golden() -> Arrays:
    return read_tables(data_file("golden", "pipeline_4stage_a100", "cost_tables.npz"))


def made_up() -> Arrays:
    """Random tables in the golden shapes, so that every test here runs without the data."""
    random_numbers = np.random.default_rng(7)
    arrays = {name: random_numbers.uniform(0.001, 0.5, 521) for name in VECTORS}
    arrays["attn_decode_ms"] = random_numbers.uniform(0.001, 0.5, (257, 257))
    arrays["attn_prefill_ms"] = random_numbers.uniform(0.001, 0.5, (257, 513))
    return arrays


def transcribed(t: Arrays, batch: MicroBatch, layers: list[int]) -> list[int]:
    """The README's lines, one by one, straight from the arrays."""
    spans = batch.spans
    decodes = [span for span in spans if span.is_decode]
    prompts = [span for span in spans if not span.is_decode]
    n = sum(span.rows for span in spans)
    n8 = math.ceil(n / 8) * 8
    decode = 0.0
    if decodes:
        mean_kv = sum(span.start + 1 for span in decodes) / len(decodes)
        decode = float(t["attn_decode_ms"][len(decodes), math.ceil(int(mean_kv) / 64)])
        if len(decodes) > 1:
            decode = decode * 1.1
    prefill = 0.0
    if prompts:
        a = sum(math.ceil(span.start / 64) for span in prompts)
        s = sum(span.rows**2 for span in prompts)
        prefill = float(t["attn_prefill_ms"][a, round(math.sqrt(s))])
        if len(prompts) > 1:
            prefill = prefill * 1.1
    holds = []
    for stage, depth in enumerate(layers):
        is_last = stage == len(layers) - 1
        send = 0.0 if is_last else float(t["send_recv_ms"][n8])
        per_layer = float(t["block_tokens_ms"][n8]) + float(t["kv_save_ms"][n]) + decode + prefill
        stage_s = 1e-3 * (depth * per_layer + send)
        holds.append(round(stage_s * 1e9))
    return holds


def some_batch(dice: random.Random) -> MicroBatch:
    contexts = tuple(dice.randint(1, 8192) for _ in range(dice.choice([0, 0, 1, 2, 5, 64])))
    room = 512 - len(contexts)
    chunks = []
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        rows = dice.randint(1, max(1, room // 4))
        chunks.append((dice.choice([0, 63, 64, 65, dice.randint(0, 4000)]), rows))
    if not contexts and not chunks:
        return micro_batch((dice.randint(1, 8192),))
    return micro_batch(contexts, tuple(chunks))


@pytest.mark.parametrize("layers", [[8, 8, 8, 8], [5, 3, 2], [1, 12, 1, 18], [16, 16]])
def test_holds_equal_the_formula_written_out(layers: list[int]) -> None:
    arrays = made_up()
    costs = TableCosts(layers, arrays, "made up")
    dice = random.Random(str(layers))
    for _ in range(500):
        batch = some_batch(dice)
        assert list(costs.holds(batch)) == transcribed(arrays, batch, layers)


def test_holds_of_the_golden_tables_equal_the_formula_written_out() -> None:
    arrays = golden()
    costs = TableCosts([8, 8, 8, 8], arrays, "golden")
    dice = random.Random(11)
    for _ in range(500):
        batch = some_batch(dice)
        assert list(costs.holds(batch)) == transcribed(arrays, batch, [8, 8, 8, 8])


def flat(**cells: float) -> Arrays:
    """Tables of zeros but for what is given, to see one term at a time."""
    arrays = {name: np.zeros(81) for name in VECTORS}
    arrays |= {name: np.zeros((9, 81)) for name in MATRICES}
    for name, value in cells.items():
        arrays[name][...] = value
    return arrays


def test_only_the_last_stage_does_not_send() -> None:
    costs = TableCosts([2, 2, 2], flat(send_recv_ms=1.0), "flat")
    assert costs.holds(micro_batch((5,))) == [1_000_000, 1_000_000, 0]


def test_matrix_rows_are_rounded_up_to_eight_and_kv_rows_are_not() -> None:
    arrays = flat()
    arrays["block_tokens_ms"][16] = 1.0
    arrays["kv_save_ms"][9] = 0.5
    costs = TableCosts([1, 1], arrays, "steps")
    assert costs.holds(micro_batch((), ((0, 9),))) == [1_500_000, 1_500_000]
    assert costs.holds(micro_batch((), ((0, 16),))) == [1_000_000, 1_000_000]
    assert costs.holds(micro_batch((), ((0, 8),))) == [0, 0]


def test_the_two_factors_for_several_spans_are_independent() -> None:
    costs = TableCosts([1, 1], flat(attn_decode_ms=1.0, attn_prefill_ms=10.0), "flat")
    chunk = (0, 4)
    one_each = costs.holds(micro_batch((9,), (chunk,)))[0]
    two_decodes = costs.holds(micro_batch((9, 9), (chunk,)))[0]
    two_chunks = costs.holds(micro_batch((9,), (chunk, chunk)))[0]
    both = costs.holds(micro_batch((9, 9), (chunk, chunk)))[0]
    assert [one_each, two_decodes, two_chunks, both] == [
        11_000_000,
        11_100_000,
        12_000_000,
        12_100_000,
    ]


def test_the_mean_context_is_cut_to_an_integer_before_it_is_rounded_up_to_64() -> None:
    arrays = flat()
    arrays["attn_decode_ms"][2, 1] = 1.0
    arrays["attn_decode_ms"][2, 2] = 9.0
    costs = TableCosts([1, 1], arrays, "steps")
    assert costs.holds(micro_batch((64, 65)))[0] == 1_100_000  # 64.5 is cut to 64.
    assert costs.holds(micro_batch((65, 65)))[0] == 9_900_000


def test_each_chunks_context_is_rounded_up_before_the_sum() -> None:
    arrays = flat()
    arrays["attn_prefill_ms"][2, 1] = 1.0
    costs = TableCosts([1, 1], arrays, "steps")
    assert costs.holds(micro_batch((), ((1, 1), (1, 1))))[0] == 1_100_000  # 2 blocks, root 1.41.


def test_the_scenario_may_change_the_steps_and_the_factor() -> None:
    arrays = flat(attn_decode_ms=1.0)
    arrays["block_tokens_ms"][4] = 2.0
    costs = TableCosts([1, 1], arrays, "flat", rows_multiple=4, several_factor=1.5)
    assert costs.holds(micro_batch((3, 3, 3)))[0] == 3_500_000


def test_the_prediction_is_the_longest_stage_of_the_same_micro_batch() -> None:
    costs = TableCosts([5, 3, 2], made_up(), "made up")
    batch = micro_batch((100, 200, 300), ((130, 77),))
    assert costs.predict(3, 600, 77, 130) == max(costs.holds(batch))
    assert costs.predict(3, 600, 0, 0) == max(costs.holds(micro_batch((100, 200, 300))))


def test_a_lookup_outside_the_tables_is_an_error_with_the_limits() -> None:
    costs = TableCosts([1, 1], flat(), "small.npz")
    for batch in (
        micro_batch((1,) * 9),  # More decodes than the table has.
        micro_batch((), ((0, 81),)),  # More rows.
        micro_batch((), ((600, 1),)),  # More blocks of KV before the chunk.
    ):
        with pytest.raises(
            ScenarioError, match=r"small\.npz: .* outside the tables.*rows up to 80"
        ):
            costs.holds(batch)


@pytest.mark.parametrize(
    ("ring", "what"),
    [
        ("row_width: 600", "ring.row_width is 600, but the tables of .* end at 520"),
        ("micro_batch_width: 300", "ring.micro_batch_width is 300, .* end at 256"),
    ],
)
def test_a_plan_wider_than_the_tables_is_refused_before_the_run(
    tmp_path: Path, ring: str, what: str
) -> None:
    path = tmp_path / "t.npz"
    write(path, {name: npy(array) for name, array in made_up().items()})
    made, plan = scenario(
        f"model: {{layers: 8}}\nring: {{stages: 2, {ring}}}\ncosts: {{kind: table, file: {path}}}\n"
    )
    with pytest.raises(ScenarioError, match=rf"case\.yaml:3: costs\.file: {what}"):
        build_costs(made, plan)


def test_a_scenario_reads_its_table_and_calls_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    write(path, {name: npy(array) for name, array in made_up().items()})
    made, plan = scenario(
        "model: {layers: 8}\nring: {stages: 2}\ncosts: {kind: table, file: " + f"{path}}}\n"
    )
    costs = build_costs(made, plan)
    batch = micro_batch((70,), ((0, 100),))
    assert list(costs.holds(batch)) == transcribed(made_up(), batch, [4, 4])
    assert costs.provenance == "measured"
    assert "outside the tables is an error" in costs.describe()[0]


def npy(array: npt.NDArray[np.generic]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def broken(path: Path, name: str, data: bytes) -> Path:
    members = {key: npy(array) for key, array in flat().items()}
    return write(path, members | {name: data})


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([print, print]), allow_pickle=True)
    path = broken(tmp_path / "t.npz", "kv_save_ms", file.getvalue())
    with pytest.raises(ScenarioError, match="kv_save_ms is object"):
        read_tables(path)


def test_a_shape_larger_than_its_bytes_takes_no_memory(tmp_path: Path) -> None:
    honest = npy(np.zeros(81))
    path = broken(
        tmp_path / "t.npz", "kv_save_ms", honest.replace(b"(81,), }", b"(99999999999,), }", 1)
    )
    with pytest.raises(ScenarioError, match=r"kv_save_ms (claims shape|is not a NumPy array)"):
        read_tables(path)


def test_an_array_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path) -> None:
    bomb = b"\0" * (FILE_BYTES_MAX + 1)
    path = broken(tmp_path / "t.npz", "kv_save_ms", bomb)
    with pytest.raises(ScenarioError, match=f"kv_save_ms unpacks to {len(bomb)} bytes"):
        read_tables(path)


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((3, 3)), r"is float64\[3, 3\]; .* 1 dimension"),
        (np.zeros(1), r"is float64\[1\]; .* at least 2 entries"),
        (np.zeros(9, dtype=np.int64), r"is int64\[9\]; it must be floating point"),
        (np.full(9, np.nan), "negative or not finite"),
        (np.full(9, -1.0), "negative or not finite"),
    ],
)
def test_a_wrong_array_is_named_with_what_it_is(
    tmp_path: Path, array: npt.NDArray[np.generic], what: str
) -> None:
    path = broken(tmp_path / "t.npz", "send_recv_ms", npy(array))
    with pytest.raises(ScenarioError, match=f"send_recv_ms.* {what}"):
        read_tables(path)


def test_a_missing_array_is_named_with_those_there(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", {"block_tokens_ms": npy(np.zeros(9))})
    with pytest.raises(ScenarioError, match=r"needs an array 'kv_save_ms'; it has block_tokens_ms"):
        read_tables(path)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"PK\x03\x04 not a zip"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=r"t\.npz: not an \.npz file"):
        read_tables(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot read the cost table: No such file"):
        read_tables(tmp_path / "none.npz")
