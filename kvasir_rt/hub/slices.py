"""Slices on disk under a size limit: cut when first asked for, the longest unused leave first.

A download holds its file open, so a slice may leave the directory while it is being read. The
directory is emptied at start: a slice is cheap to cut again and has the same bytes then, and what
another process left there was checked by nobody.
"""

import asyncio
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Hashable
from pathlib import Path

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.words import ModelName, Slice
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.errors import ModelFileError
from kvasir_rt.hub.cutting import CutSlice, Outcome, slice_bytes, write_slice
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.models import ExpertModel

Key = tuple[ModelName, Slice]
SUFFIXES = (".slice.gguf", ".slice.gguf.part")
RETRY_S = 5.0


class SliceStoreError(KvasirError):
    """The directory cannot hold slices; the message names it and why."""


class SliceStore:
    """The directory.

    Args:
        root: Its path; only files with our suffix are touched.
        bytes_max: What all slices together may take.
        experts_max: Of one slice; the hub never offers more.
    """

    def __init__(self, root: Path, bytes_max: int, experts_max: int, limits: HubLimits) -> None:
        self._root = root
        self._bytes_max = bytes_max
        self._experts_max = experts_max
        self._limits = limits
        self._cut: OrderedDict[Key, CutSlice] = OrderedDict()  # Used longest ago first.
        self._cutting: dict[Key, asyncio.Task[CutSlice]] = {}
        self._room = asyncio.Semaphore(limits.cuts_max)
        self._downloads: Counter[Hashable] = Counter()
        self._numbers = 0
        self._reserved = 0
        self.cuts = 0
        self.bytes_sent = 0
        self.ended: Counter[Outcome] = Counter()

    def __len__(self) -> int:
        return len(self._cut)

    @property
    def bytes_held(self) -> int:
        return sum(each.size for each in self._cut.values()) + self._reserved

    @property
    def downloads(self) -> int:
        return self._downloads.total()

    def prepare(self) -> None:
        """Make the directory and empty it.

        Raises:
            SliceStoreError: It cannot be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._root.iterdir():
                if path.name.endswith(SUFFIXES):
                    path.unlink()
        except OSError as error:
            raise SliceStoreError(
                f"{self._root}: cannot hold slices: {error.strerror}; give --state another path"
            ) from None

    def check(self, model: ExpertModel, cut: Slice) -> None:
        """Whether that slice exists: what is asked for is refused or given, never clamped.

        Raises:
            ApiError: 400 naming the rule.
        """
        facts = model.facts
        if cut.layer not in facts.layers:
            raise _bad(f"layer {cut.layer} of {facts.model!r} holds no experts")
        if not 0 <= cut.begin < cut.end <= facts.experts:
            raise _bad(
                f"experts [{cut.begin}, {cut.end}) do not exist; {facts.model!r} has "
                f"[0, {facts.experts}) in each layer, and begin must be before end"
            )
        if cut.end - cut.begin > self._experts_max:
            raise _bad(
                f"{cut.end - cut.begin} experts were asked for; a slice has at most "
                f"{self._experts_max}"
            )
        if slice_bytes(model, cut) > self._bytes_max:
            raise ApiError(
                503,
                f"This slice takes {slice_bytes(model, cut)} bytes; the hub keeps at most "
                f"{self._bytes_max} (--slices-bytes).",
                code="full",
            )

    async def open(self, model: ExpertModel, cut: Slice) -> tuple[CutSlice, int]:
        """The slice and an open descriptor, which the caller closes.

        Raises:
            ApiError: 503 if there is no room for it now.
        """
        key = model.facts.model, cut
        while True:
            found = self._cut.get(key)
            if found is None:
                found = await self._wait(key, model, cut)
            try:
                descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._cut.pop(key, None)  # Somebody emptied the directory: cut it again.
                continue
            if key in self._cut:
                self._cut.move_to_end(key)
            return found, descriptor

    def begin_download(self, who: Hashable) -> None:
        """Count a download; `end_download` must follow.

        Raises:
            ApiError: 429, 503: too many at once.
        """
        if self._downloads[who] >= self._limits.downloads_per_node_max:
            raise ApiError(
                429,
                f"{self._downloads[who]} downloads of yours are under way, the most.",
                code="too_many_downloads",
                retry_after_s=RETRY_S,
            )
        if self.downloads >= self._limits.downloads_max:
            raise ApiError(
                503,
                f"{self.downloads} downloads are under way, the most; try again.",
                code="full",
                retry_after_s=RETRY_S,
            )
        self._downloads[who] += 1

    def end_download(self, who: Hashable, sent: int, outcome: Outcome) -> None:
        self.bytes_sent += sent
        self.ended[outcome] += 1
        self._downloads[who] -= 1
        if not self._downloads[who]:
            del self._downloads[who]

    async def close(self) -> None:
        await asyncio.gather(*self._cutting.values(), return_exceptions=True)

    async def _wait(self, key: Key, model: ExpertModel, cut: Slice) -> CutSlice:
        """Cut it, or wait for who is cutting it; whoever leaves does not stop it."""
        task = self._cutting.get(key)
        if task is None:
            task = self._cutting[key] = asyncio.create_task(self._make(key, model, cut))
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    def _done(self, key: Key, task: asyncio.Task[CutSlice]) -> None:
        del self._cutting[key]
        if not task.cancelled():
            task.exception()  # Seen, also when nobody waits any more.

    async def _make(self, key: Key, model: ExpertModel, cut: Slice) -> CutSlice:
        async with self._room:
            size = slice_bytes(model, cut)
            self._make_room(size)
            self._numbers += 1
            path = self._root / f"{self._numbers:08d}{SUFFIXES[0]}"
            self._reserved += size
            try:
                made = await asyncio.to_thread(write_slice, model, cut, path)
            except ModelFileError as error:
                raise ApiError(503, f"The model cannot be read: {error}", code="model") from None
            except OSError as error:
                raise ApiError(
                    503,
                    f"The slice cannot be written: {error.strerror}.",
                    code="full",
                    retry_after_s=RETRY_S,
                ) from None
            finally:
                self._reserved -= size
            self._cut[key] = made
            self.cuts += 1
            return made

    def _make_room(self, size: int) -> None:
        while self._cut and self.bytes_held + size > self._bytes_max:
            _, oldest = self._cut.popitem(last=False)
            oldest.path.unlink(missing_ok=True)
        free = shutil.disk_usage(self._root).free
        if self.bytes_held + size > self._bytes_max or size > free:
            raise ApiError(
                503,
                f"There is no room for {size} more bytes of slices now ({free} are free on disk).",
                code="full",
                retry_after_s=RETRY_S,
            )


def _bad(message: str) -> ApiError:
    return ApiError(400, message + ".", code="invalid_slice")
