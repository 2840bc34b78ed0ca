"""Slices: the model's own bytes, whole, resumable, and under the disk's limit."""

import asyncio
import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvasir_core.swarm.words import ModelName, Slice
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.errors import ModelFileError, UnsupportedModel
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.gguf_read import read_rows
from kvasir_rt.hub.cutting import HEADER_BYTES_MAX, slice_bytes, write_slice
from kvasir_rt.hub.download import range_of
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.models import PARTS, ExpertModel, open_expert_model, tensor_name
from kvasir_rt.hub.slices import SliceStore
from tests.rt.hub.hubs import MODEL, RunningHub, Worker, bearer, running_hub, tiny_moe
from tests.rt.tiny_models import TinyModel, write_tiny_model

URL = f"/api/models/{MODEL}/expert-shard"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture(scope="module")
def headers(hub: RunningHub) -> dict[str, str]:
    return bearer(Worker(hub).login().token)


def fetch(hub: RunningHub, headers: dict[str, str], layer: int, begin: int, end: int) -> bytes:
    answer = hub.client.get(f"{URL}?layer={layer}&begin={begin}&end={end}", headers=headers)
    assert answer.status_code == 200
    return answer.content


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
def test_a_slice_holds_the_models_own_bytes(tmp_path: Path, quantisation: str) -> None:
    path = tiny_moe(tmp_path / "m.gguf", quantisation=quantisation)
    model = open_expert_model(ModelName("m"), path)
    cut = Slice(2, 3, 9)
    made = write_slice(model, cut, tmp_path / "s.gguf")
    assert made.size == made.path.stat().st_size <= slice_bytes(model, cut)
    assert made.sha256 == hashlib.sha256(made.path.read_bytes()).hexdigest()
    with open_gguf(made.path) as found, model.gguf:
        assert len(found.tensors) == len(PARTS)
        assert [found.metadata[f"kvasir.slice.{k}"] for k in ("layer", "begin", "end")] == [2, 3, 9]
        assert found.metadata["kvasir.slice.model"] == "m"
        assert found.metadata["qwen3moe.expert_count"] == model.facts.experts
        for part in PARTS:
            tensor = found.tensors[tensor_name(2, part)]
            whole = model.gguf.tensors[tensor.name]
            assert tensor.kind == whole.kind
            assert tensor.shape == (6, *whole.shape[1:])
            rows = whole.shape[1]
            expected = read_rows(model.gguf, whole, 3 * rows, 9 * rows)
            assert np.array_equal(read_rows(found, tensor), expected)


def test_the_reference_reader_reads_a_slice(tmp_path: Path) -> None:
    import gguf

    model = open_expert_model(ModelName("m"), tiny_moe(tmp_path / "m.gguf"))
    write_slice(model, Slice(0, 15, 16), tmp_path / "s.gguf")
    reader = gguf.GGUFReader(tmp_path / "s.gguf")
    assert [tensor.name for tensor in reader.tensors] == [tensor_name(0, p) for p in PARTS]
    assert reader.tensors[0].data.shape[0] == 1


def test_slices_add_up_to_the_layer(tmp_path: Path) -> None:
    model = open_expert_model(ModelName("m"), tiny_moe(tmp_path / "m.gguf", quantisation="Q8_0"))
    whole = model.tensors(1)[0]
    joined = b""
    for begin, end in ((0, 1), (1, 7), (7, 16)):
        made = write_slice(model, Slice(1, begin, end), tmp_path / f"{begin}.gguf")
        with open_gguf(made.path) as found:
            tensor = found.tensors[whole.name]
            data = np.empty(tensor.size, dtype=np.uint8)
            found.read_into(tensor, 0, data)
            joined += data.tobytes()
    data = np.empty(whole.size, dtype=np.uint8)
    model.gguf.read_into(whole, 0, data)
    assert joined == data.tobytes()


def test_a_dense_model_is_never_offered(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "dense.gguf", TinyModel())
    with pytest.raises(UnsupportedModel, match="no routed experts"):
        open_expert_model(ModelName("dense"), path)


def test_a_model_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    path = tiny_moe(tmp_path / "m.gguf", without=("blk.2.ffn_up_exps.weight",))
    with pytest.raises(ModelFileError, match=r"blk.2.ffn_up_exps.weight.*missing"):
        open_expert_model(ModelName("m"), path)


def test_a_download_has_its_digest_and_resumes(hub: RunningHub, headers: dict[str, str]) -> None:
    url = f"{URL}?layer=1&begin=4&end=8"
    whole = hub.client.get(url, headers=headers)
    digest = hashlib.sha256(whole.content)
    assert whole.headers["etag"] == f'"{digest.hexdigest()}"'
    assert whole.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert whole.headers["accept-ranges"] == "bytes"
    etag = whole.headers["etag"]
    middle = len(whole.content) // 3
    first = hub.client.get(url, headers={**headers, "Range": f"bytes=0-{middle - 1}"})
    rest = hub.client.get(url, headers={**headers, "Range": f"bytes={middle}-", "If-Range": etag})
    assert (first.status_code, rest.status_code) == (206, 206)
    assert (
        rest.headers["content-range"]
        == f"bytes {middle}-{len(whole.content) - 1}/{len(whole.content)}"
    )
    assert first.content + rest.content == whole.content
    last = hub.client.get(url, headers={**headers, "Range": "bytes=-10"})
    assert last.content == whole.content[-10:]
    other = hub.client.get(url, headers={**headers, "Range": "bytes=5-", "If-Range": '"other"'})
    assert (other.status_code, other.content) == (200, whole.content)


def test_a_kept_slice_is_confirmed_without_a_byte(hub: RunningHub, headers: dict[str, str]) -> None:
    url = f"{URL}?layer=1&begin=4&end=8"
    etag = hub.client.get(url, headers=headers).headers["etag"]
    same = hub.client.get(url, headers={**headers, "If-None-Match": f'"x", {etag}'})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    changed = hub.client.get(url, headers={**headers, "If-None-Match": '"x"'})
    assert changed.status_code == 200


def test_a_slice_is_cut_once_for_a_herd(hub: RunningHub, headers: dict[str, str]) -> None:
    before = hub.service.slices.cuts
    found = {fetch(hub, headers, 3, 0, 16) for _ in range(3)}
    assert len(found) == 1
    assert hub.service.slices.cuts == before + 1


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    with running_hub(tmp_path, limits=HubLimits(downloads_per_node_max=1)) as hub:
        headers = bearer(Worker(hub).login().token)
        for _ in range(3):
            with hub.client.stream(
                "GET", f"{URL}?layer=0&begin=0&end=16", headers=headers
            ) as answer:
                assert answer.status_code == 200
                next(answer.iter_raw(10))
            # Left in the middle; the next begins as soon as the hub has seen it.
            while hub.service.slices.downloads:
                hub.get("/health")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 100)),
        ("bytes=5-1000", (5, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-1000", (0, 100)),
        (None, None),
        ("bytes=9-5", None),
        ("bytes=0-1,5-6", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
    ],
)
def test_ranges(header: str | None, expected: tuple[int, int] | None) -> None:
    assert range_of(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_ranges_outside_are_refused(header: str) -> None:
    with pytest.raises(ApiError) as found:
        range_of(header, 100)
    assert found.value.status == 416


def make_store(root: Path, model: ExpertModel, slices: float) -> SliceStore:
    """A store with room for so many slices of 4 experts."""
    size = slice_bytes(model, Slice(0, 0, 4))
    store = SliceStore(root / "slices", int(size * slices), 64, HubLimits())
    store.prepare()
    return store


def test_the_longest_unused_slice_leaves_and_its_download_goes_on(tmp_path: Path) -> None:
    import os

    model = open_expert_model(ModelName("m"), tiny_moe(tmp_path / "m.gguf"))
    store = make_store(tmp_path, model, 2.5)

    async def story() -> None:
        held, descriptor = await store.open(model, Slice(0, 0, 4))
        for layer in (1, 0, 2):
            _, other = await store.open(model, Slice(layer, 0, 4))
            os.close(other)
        assert {key[1].layer for key in store._cut} == {0, 2}  # 1 was unused for longest.
        for layer in (2, 3):
            _, other = await store.open(model, Slice(layer, 0, 4))
            os.close(other)
        assert {key[1].layer for key in store._cut} == {2, 3}
        assert not held.path.exists()
        assert hashlib.sha256(os.pread(descriptor, held.size, 0)).hexdigest() == held.sha256
        os.close(descriptor)
        assert len(list((tmp_path / "slices").iterdir())) == 2

    asyncio.run(story())


def test_what_is_larger_than_the_limit_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    model = open_expert_model(ModelName("m"), tiny_moe(tmp_path / "m.gguf"))
    store = make_store(tmp_path, model, 1.0)
    store.check(model, Slice(0, 0, 4))
    with pytest.raises(ApiError, match="keeps at most") as found:
        store.check(model, Slice(0, 0, 16))
    assert found.value.status == 503
    small = SliceStore(tmp_path / "slices", 1 << 40, 4, HubLimits())
    with pytest.raises(ApiError, match="a slice has at most 4"):
        small.check(model, Slice(0, 0, 5))


def test_the_directory_is_emptied_of_our_files_only(tmp_path: Path) -> None:
    root = tmp_path / "slices"
    root.mkdir()
    for name in ("00000001.slice.gguf", "00000002.slice.gguf.part", "precious.gguf"):
        (root / name).write_bytes(b"x")
    SliceStore(root, 1, 1, HubLimits()).prepare()
    assert [path.name for path in root.iterdir()] == ["precious.gguf"]


def test_a_slice_whose_file_was_taken_away_is_cut_again(tmp_path: Path) -> None:
    import os

    model = open_expert_model(ModelName("m"), tiny_moe(tmp_path / "m.gguf"))
    store = make_store(tmp_path, model, 4)

    async def story() -> None:
        first, descriptor = await store.open(model, Slice(0, 0, 4))
        os.close(descriptor)
        first.path.unlink()
        second, descriptor = await store.open(model, Slice(0, 0, 4))
        os.close(descriptor)
        assert second.sha256 == first.sha256

    asyncio.run(story())


def test_a_model_cut_short_is_an_answer_and_not_a_crash(tmp_path: Path) -> None:
    path = tiny_moe(tmp_path / "m.gguf")
    model = open_expert_model(ModelName("m"), path)
    store = make_store(tmp_path, model, 4)
    with path.open("r+b") as file:
        file.truncate(model.tensors(0)[0].offset + 10)
    with pytest.raises(ApiError, match="cannot be read") as found:
        asyncio.run(store.open(model, Slice(0, 0, 4)))
    assert found.value.status == 503
    assert list((tmp_path / "slices").iterdir()) == []
    assert store.bytes_held == 0


def test_a_header_stays_small(tmp_path: Path) -> None:
    model = open_expert_model(ModelName("m" * 128), tiny_moe(tmp_path / "m.gguf"))
    made = write_slice(model, Slice(0, 0, 1), tmp_path / "s.gguf")
    data = sum(t.size // t.shape[0] for t in model.tensors(0))
    assert 0 < made.size - data < HEADER_BYTES_MAX
