"""Downloads resume where they stopped, wrong bytes are thrown away, the store keeps its limit."""

import asyncio
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from kvasir_core.swarm.words import Slice
from kvasir_rt.swarm.identity import Identity
from kvasir_rt.worker import fetch as fetching
from kvasir_rt.worker.fetch import FetchError, fetch
from kvasir_rt.worker.hub_client import HubClient, OtherHub
from kvasir_rt.worker.store import (
    Note,
    SliceChanged,
    SliceName,
    SliceStore,
    StoreError,
    sha256_of,
)
from tests.rt.swarm.slices_http import SliceHub, slice_hub

NAME = SliceName("a/b?c", Slice(3, 8, 16))
DATA = random.Random(1).randbytes(300_000)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE_S", 0.001)


def run_fetch(hub: SliceHub, root: Path, bytes_max: int = 1 << 20, name: SliceName = NAME) -> bytes:
    """One worker's life as far as a download: a store opened, used and closed."""

    async def story() -> bytes:
        store = SliceStore(root, bytes_max)
        client = HubClient(hub.url, Identity.fresh(), root)
        try:
            return (await fetch(client, store, name, set())).read_bytes()
        finally:
            await client.close()
            store.close()

    return asyncio.run(story())


def test_a_slice_arrives_whole_and_is_not_fetched_again(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        assert run_fetch(hub, tmp_path) == DATA
        assert run_fetch(hub, tmp_path) == DATA
        assert hub.sent == len(DATA)
        assert hub.asked[1] == (None, f'"{hub.sha256}"')


def test_a_download_cut_anywhere_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        hub.cut_after = [0, 1, 65_536, 100_000, 5]
        assert run_fetch(hub, tmp_path) == DATA
        assert hub.sent == len(DATA)
        assert [asked[0] for asked in hub.asked] == [
            None, "bytes=0-", "bytes=1-", "bytes=65537-", "bytes=165537-", "bytes=165542-",
        ]  # fmt: skip


def test_a_worker_that_died_while_downloading_goes_on_after_its_restart(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        hub.cut_after = [120_000] + [0] * (fetching.TRIES_MAX - 1)
        with pytest.raises(FetchError):
            run_fetch(hub, tmp_path)
        hub.cut_after = []
        assert run_fetch(hub, tmp_path) == DATA
        assert hub.sent == len(DATA)


def test_a_slice_that_changed_meanwhile_is_fetched_anew(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        hub.cut_after = [120_000] + [0] * (fetching.TRIES_MAX - 1)
        with pytest.raises(FetchError):
            run_fetch(hub, tmp_path)
        hub.data, hub.cut_after = DATA[::-1], []
        assert run_fetch(hub, tmp_path) == DATA[::-1]
        hub.data = DATA
        assert run_fetch(hub, tmp_path) == DATA  # A complete one, too.


def test_bytes_that_are_not_what_was_announced_are_thrown_away(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        hub.digest_of = b"another file"
        with pytest.raises(SliceChanged, match="SHA-256"):
            run_fetch(hub, tmp_path)
        assert len(hub.asked) == 2
        assert list((tmp_path / "slices").glob("*")) == []
        hub.digest_of = None
        assert run_fetch(hub, tmp_path) == DATA


def test_a_file_that_rotted_on_disk_is_fetched_again(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        run_fetch(hub, tmp_path)
        (path,) = (tmp_path / "slices").glob("*.gguf")
        path.write_bytes(b"x" + DATA[1:])
        assert run_fetch(hub, tmp_path) == DATA


def test_refusals_end_the_fetch_and_passing_troubles_do_not(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        hub.statuses = [503, 429, 401, 500]
        assert run_fetch(hub, tmp_path) == DATA
        for status in (400, 403, 404):
            hub.statuses = [status]
            with pytest.raises(FetchError, match=str(status)):
                run_fetch(hub, tmp_path, name=SliceName("other", Slice(0, 0, 1)))


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub, pytest.raises(StoreError, match="does not fit"):
        run_fetch(hub, tmp_path, bytes_max=len(DATA) - 1)
    assert list((tmp_path / "slices").glob("*")) == []


def test_the_slice_used_longest_ago_leaves_for_a_new_one(tmp_path: Path) -> None:
    names = [SliceName("m", Slice(0, n, n + 1)) for n in range(4)]
    with slice_hub(DATA) as hub:
        for name in names[:3]:
            run_fetch(hub, tmp_path, bytes_max=3 * len(DATA), name=name)
        run_fetch(hub, tmp_path, bytes_max=3 * len(DATA), name=names[0])  # Used last.
        run_fetch(hub, tmp_path, bytes_max=3 * len(DATA), name=names[3])
    store = SliceStore(tmp_path, 3 * len(DATA))
    assert set(store.held()) == {names[0], names[2], names[3]}
    assert store.bytes_held == 3 * len(DATA)
    store.close()


def test_a_slice_in_use_never_leaves(tmp_path: Path) -> None:
    store = SliceStore(tmp_path, 100)
    served = Note("m", 0, 0, 1, "a" * 64, 60)
    store.begin(served, set())
    with pytest.raises(StoreError, match="being served"):
        store.begin(Note("m", 0, 1, 2, "b" * 64, 60), {served.name})
    store.close()


def test_damaged_notes_are_as_if_there_was_nothing(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        negative = '{"model":"m","layer":-1,"begin":0,"end":1,"sha256":"x","size":1}'
        for damage in ("", "{", "[]", '{"model": 1}', negative):
            run_fetch(hub, tmp_path)
            (note,) = (tmp_path / "slices").glob("*.json")
            note.write_text(damage)
            store = SliceStore(tmp_path, 1 << 20)
            assert store.held() == []
            store.close()
        assert run_fetch(hub, tmp_path) == DATA
        (path,) = (tmp_path / "slices").glob("*.gguf")
        assert sha256_of(path) == hub.sha256


def test_a_store_that_was_emptied_meanwhile_is_filled_again(tmp_path: Path) -> None:
    async def story(hub: SliceHub) -> bytes:
        store = SliceStore(tmp_path, 1 << 20)
        client = HubClient(hub.url, Identity.fresh(), tmp_path)
        try:
            shutil.rmtree(tmp_path / "slices")
            assert store.held() == []
            return (await fetch(client, store, NAME, set())).read_bytes()
        finally:
            await client.close()
            store.close()

    with slice_hub(DATA) as hub:
        assert asyncio.run(story(hub)) == DATA


@pytest.mark.parametrize("suffix", ["gguf", "part", "json"])
@pytest.mark.parametrize("is_fetched", [False, True])
def test_directories_where_files_belong_are_cleared_away(
    tmp_path: Path, suffix: str, is_fetched: bool
) -> None:
    with slice_hub(DATA) as hub:
        if is_fetched:
            run_fetch(hub, tmp_path)
        place = tmp_path / "slices" / f"{NAME.stem}.{suffix}"
        place.unlink(missing_ok=True)
        (place / "inside").mkdir(parents=True)
        store = SliceStore(tmp_path, 1 << 20)
        assert store.held() == ([NAME] if is_fetched and suffix == "part" else [])
        store.close()
        assert run_fetch(hub, tmp_path) == DATA


def test_a_full_disk_is_named_and_what_is_freed_is_used(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.decode().strip()}")
    try:
        with slice_hub(DATA) as hub:
            with pytest.raises(StoreError, match="is full"):
                run_fetch(hub, disk)
            subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
            assert run_fetch(hub, disk) == DATA
            assert hub.sent < 1.5 * len(DATA)  # It went on where it stopped.
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_two_workers_do_not_share_a_store(tmp_path: Path) -> None:
    store = SliceStore(tmp_path, 100)
    with pytest.raises(StoreError, match="another worker"):
        SliceStore(tmp_path, 100)
    store.close()
    SliceStore(tmp_path, 100).close()


def test_another_hub_at_a_known_address_gets_no_signature(tmp_path: Path) -> None:
    with slice_hub(DATA) as hub:
        run_fetch(hub, tmp_path)
        known = tmp_path / "hubs.json"
        known.write_text(known.read_text().replace("ab" * 32, "99" * 32))
        with pytest.raises(OtherHub, match="9999"):
            run_fetch(hub, tmp_path)
