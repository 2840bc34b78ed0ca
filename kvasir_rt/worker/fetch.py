"""Downloads a slice: resumes where it stopped, checks size and SHA-256.

What is on disk already is fetched only if the hub has other bytes now.
"""

import asyncio
import base64
import binascii
import re
from pathlib import Path
from urllib.parse import quote

import httpx

from kvasir_rt.swarm.hub_http import HubAway, HubError, HubRefused, check_status, read_bounded
from kvasir_rt.swarm.protocol import DIGEST_HEADER
from kvasir_rt.worker.hub_client import HubClient
from kvasir_rt.worker.pause import heeded
from kvasir_rt.worker.store import Note, SliceChanged, SliceName, SliceStore, StoreError

SLICE_BYTES_MAX = 64 << 30
IDLE_S_MAX = 15.0  # Without a byte; then the download is begun again where it stopped.
TRIES_MAX = 8
PAUSE_S = 0.5  # Doubling between tries without progress.
DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class FetchError(HubError):
    """The slice could not be had; the message says why."""


async def fetch(
    client: HubClient, store: SliceStore, name: SliceName, keep: set[SliceName]
) -> Path:
    """Have the slice complete in the store; returns its file, hashed just now.

    Args:
        client: Of the hub that offered it.
        store: Where it goes; what is there is used as far as it is still right.
        name: Which slice.
        keep: Slices in use.

    Raises:
        FetchError: After some tries; what has arrived stays for the next time.
        StoreError: It does not fit, is not what was announced, or the disk fails.
    """
    try:
        return await _fetch(client, store, name, keep)
    except TimeoutError:
        raise  # The claim's time is over.
    except OSError as error:  # What is served already goes on, whatever the disk does.
        raise StoreError(f"{name}: {store.root}: {error.strerror or error}") from None


async def _fetch(
    client: HubClient, store: SliceStore, name: SliceName, keep: set[SliceName]
) -> Path:
    """Try until it is here."""
    pause_s = PAUSE_S
    problem: HubError = HubAway("it was not tried")
    for _ in range(TRIES_MAX):
        before = _arrived(store, name)
        try:
            return await _try(client, store, name, keep)
        except HubRefused as refused:
            if refused.status == 401:
                client.forget_token()
            elif refused.status not in (408, 416, 429, 500, 502, 503, 504):
                raise FetchError(f"{name}: {refused}") from None
            problem = refused
            pause_s = max(pause_s, heeded(refused.retry_after_s or 0.0))
        except SliceChanged as changed:  # A bad disk is tried once more, a bad hub not for ever.
            if isinstance(problem, FetchError):
                raise
            problem = FetchError(str(changed))
        except HubAway as away:
            problem = away
        if _arrived(store, name) > before:
            pause_s = PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(30.0, 2 * pause_s)
    raise FetchError(f"{name}: {problem} ({TRIES_MAX} tries)")


def _arrived(store: SliceStore, name: SliceName) -> int:
    note = store.note(name)
    return 0 if note is None else store.begin(note, set())[1]


async def _try(client: HubClient, store: SliceStore, name: SliceName, keep: set[SliceName]) -> Path:
    """One request."""
    headers = {"Authorization": f"Bearer {await client.token()}"}
    known = store.note(name)
    if known is not None and store.path(name) is not None:
        headers["If-None-Match"] = f'"{known.sha256}"'
    elif known is not None:
        _, start = store.begin(known, keep)
        if start == known.size:
            return await asyncio.to_thread(store.finish, known)
        headers["If-Range"] = f'"{known.sha256}"'
        headers["Range"] = f"bytes={start}-"
    layer, begin, end = name.slice
    query = {"layer": str(layer), "begin": str(begin), "end": str(end)}
    path = f"/api/models/{quote(name.model, safe='')}/expert-shard"
    try:
        async with client.http.client.stream(
            "GET", path, params=query, headers=headers, timeout=IDLE_S_MAX
        ) as answer:
            if answer.status_code == 304 and known is not None:
                return await asyncio.to_thread(store.verified, name)
            if answer.status_code == 416 and known is not None:
                store.remove(name)
            if not answer.is_success:
                check_status(answer, await read_bounded(answer, 1 << 16))
            note, start = _announced(answer, name)
            await _write(answer, store, note, start, keep)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
        if isinstance(error, OSError) and error.errno in (28, 122):
            raise StoreError(f"{name}: the disk of {store.root} is full") from None
        raise HubAway(f"{name}: {str(error) or type(error).__name__}") from None
    return await asyncio.to_thread(store.finish, note)


def _announced(answer: httpx.Response, name: SliceName) -> tuple[Note, int]:
    """What the answer says it carries, and from which byte on."""
    digest = DIGEST.fullmatch(answer.headers.get(DIGEST_HEADER, ""))
    length = answer.headers.get("content-length", "")
    if digest is None or not length.isascii() or not length.isdecimal():
        raise HubAway(f"{name}: the answer names no digest or no length")
    try:
        sha256 = base64.b64decode(digest[1], validate=True).hex()
    except binascii.Error:
        raise HubAway(f"{name}: the digest is no Base64") from None
    start, size = 0, int(length[:15])
    if answer.status_code == 206:
        found = CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None:
            raise HubAway(f"{name}: a part came without saying which")
        start, last, size = (int(text) for text in found.groups())
        if last + 1 != size or size - start != int(length[:15]):
            raise HubAway(f"{name}: bytes {start} to {last} of {size} were not asked for")
    if not 0 < size <= SLICE_BYTES_MAX:
        raise HubAway(f"{name}: {size} bytes are announced; at most {SLICE_BYTES_MAX}")
    return Note(name.model, *name.slice, sha256, size), start


async def _write(
    answer: httpx.Response, store: SliceStore, note: Note, start: int, keep: set[SliceName]
) -> None:
    part, held = store.begin(note, keep)
    if start not in (0, held):
        raise HubAway(f"{note.name}: the answer begins at {start}; {held} bytes are here")
    with part.open("r+b" if held and start else "wb") as file:
        file.seek(start)
        left = note.size - start
        async for piece in answer.aiter_raw():
            left -= len(piece)
            if left < 0:
                raise HubAway(f"{note.name}: more than the announced {note.size} bytes came")
            await asyncio.to_thread(file.write, piece)
    if left:
        raise HubAway(f"{note.name}: {left} bytes are missing")
