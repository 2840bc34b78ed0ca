"""The worker's slices on disk, under a size limit; they stay when they are not served.

    STORE/node.key            the node's key, see `identity`
    STORE/hubs.json           which hub was met where
    STORE/slices/NAME.gguf    a slice, complete and checked when it was fetched
    STORE/slices/NAME.part    a download under way, or cut off: it goes on where it stopped
    STORE/slices/NAME.json    what both are: model, layer, range, SHA-256, size

A slice is hashed again before it is loaded, so a disk that rots does not make a liar. One process
uses a store at a time.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.words import Slice

NOTE_BYTES_MAX = 4096
SLICES_MAX = 1024  # As many as a volunteer may name.
SHA256 = re.compile(r"[0-9a-f]{64}")


class StoreError(KvasirError):
    """The store cannot be used, or has no room; the message says what to do."""


class SliceChanged(StoreError):
    """Bytes are not what their SHA-256 says; they were thrown away."""


@dataclass(frozen=True, slots=True)
class SliceName:
    """Which experts of which model."""

    model: str
    slice: Slice

    @property
    def stem(self) -> str:
        digest = hashlib.sha256(self.model.encode()).hexdigest()[:16]
        return f"{digest}-{self.slice.layer}-{self.slice.begin}-{self.slice.end}"

    def __str__(self) -> str:
        layer, begin, end = self.slice
        return f"layer {layer} experts [{begin}, {end}) of {self.model}"


@dataclass(frozen=True, slots=True)
class Note:
    """What a file is to be."""

    model: str
    layer: int
    begin: int
    end: int
    sha256: str
    size: int

    @property
    def name(self) -> SliceName:
        return SliceName(self.model, Slice(self.layer, self.begin, self.end))


class SliceStore:
    """A directory of slices.

    Args:
        root: The store.
        bytes_max: What slices and begun downloads may take.

    Raises:
        StoreError: It cannot be made, or another process uses it.
    """

    def __init__(self, root: Path, bytes_max: int) -> None:
        self.root = root
        self._bytes_max = bytes_max
        self._slices = root / "slices"
        try:
            self._slices.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (root / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(
                f"{root}: another worker uses this store; stop it, or give another --store"
            ) from None
        except OSError as error:
            raise StoreError(f"{root}: cannot be used as a store: {error.strerror}") from None

    def close(self) -> None:
        self._lock.close()

    def held(self) -> list[SliceName]:
        """Complete slices, used last first."""
        found = [(self._path(note.name), note) for note in self._notes()]
        complete = [(_used_at(path), note.name) for path, note in found if path.is_file()]
        return [name for _, name in sorted(complete, key=lambda entry: -entry[0])][:SLICES_MAX]

    def note(self, name: SliceName) -> Note | None:
        """What is known of a slice, complete or begun."""
        return _read_note(self._note_path(name), name)

    def path(self, name: SliceName) -> Path | None:
        """The file of a complete slice."""
        path = self._path(name)
        return path if path.is_file() and self.note(name) is not None else None

    def begin(self, note: Note, keep: set[SliceName]) -> tuple[Path, int]:
        """Where to write a download, and how much of it is there already.

        Args:
            note: What it will be; a begun download of other bytes is thrown away.
            keep: Slices that must not leave to make room.

        Raises:
            StoreError: It does not fit.
        """
        name = note.name
        part = self._part(name)
        if self.note(name) != note or part.is_dir():
            self._slices.mkdir(parents=True, exist_ok=True, mode=0o700)  # Somebody emptied it.
            self.remove(name)
            self._make_room(note.size, {*keep, name})
            temporary = self._note_path(name).with_suffix(".json.part")
            temporary.write_text(json.dumps(asdict(note)) + "\n", encoding="utf-8")
            temporary.replace(self._note_path(name))
        size = part.stat().st_size if part.exists() else 0
        if size > note.size:
            part.unlink()
            size = 0
        return part, size

    def finish(self, note: Note) -> Path:
        """Check the complete download and keep it.

        Raises:
            SliceChanged: Its bytes are not what was announced.
        """
        part = self._part(note.name)
        found = sha256_of(part)
        if found != note.sha256:
            self.remove(note.name)
            raise SliceChanged(
                f"{note.name}: the download has SHA-256 {found[:16]}...; "
                f"{note.sha256[:16]}... was announced"
            )
        path = self._path(note.name)
        if path.is_dir():
            shutil.rmtree(path)
        part.replace(path)
        return path

    def verified(self, name: SliceName) -> Path:
        """The file of a complete slice, hashed now.

        Raises:
            StoreError: It is not there, or has changed.
        """
        note, path = self.note(name), self.path(name)
        if note is None or path is None:
            raise StoreError(f"{name}: is not in the store")
        if sha256_of(path) != note.sha256:
            self.remove(name)
            raise SliceChanged(f"{name}: has changed on disk; it was removed")
        os.utime(path)  # Used last.
        return path

    def remove(self, name: SliceName) -> None:
        """Whatever lies there."""
        for path in (self._path(name), self._part(name), self._note_path(name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def bytes_held(self) -> int:
        return sum(self._bytes_of(note) for note in self._notes())

    def _make_room(self, size: int, keep: set[SliceName]) -> None:
        if size > self._bytes_max:
            raise StoreError(
                f"a slice of {size} bytes does not fit the store's {self._bytes_max}; "
                "give --store-bytes more, or --max-experts less"
            )
        notes = sorted(self._notes(), key=lambda note: _used_at(self._path(note.name)))
        held = sum(self._bytes_of(note) for note in notes)
        for note in notes:
            if held + size <= self._bytes_max and len(notes) < SLICES_MAX:
                break
            if note.name not in keep:
                held -= self._bytes_of(note)
                self.remove(note.name)
        if held + size > self._bytes_max:
            raise StoreError(
                f"a slice of {size} bytes does not fit beside {held} bytes that are being served; "
                f"the store's limit is {self._bytes_max}: give --store-bytes more"
            )

    def _bytes_of(self, note: Note) -> int:
        return note.size  # A begun download will need it all.

    def _notes(self) -> Iterator[Note]:
        for path in sorted(self._slices.glob("*.json")):
            note = _read_note(path, None)
            if note is not None and self._note_path(note.name) == path:
                yield note

    def _path(self, name: SliceName) -> Path:
        return self._slices / f"{name.stem}.gguf"

    def _part(self, name: SliceName) -> Path:
        return self._slices / f"{name.stem}.part"

    def _note_path(self, name: SliceName) -> Path:
        return self._slices / f"{name.stem}.json"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_note(path: Path, name: SliceName | None) -> Note | None:
    """The note, or None: there is none, it is damaged, or it is about another slice."""
    try:
        with path.open("rb") as file:
            note = msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    numbers = (note.layer, note.begin, note.end, note.size)
    is_right = min(numbers) >= 0 and SHA256.fullmatch(note.sha256) is not None
    return note if is_right and name in (None, note.name) else None
