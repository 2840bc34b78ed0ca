"""A TCP proxy that cuts its connections after so many bytes."""

import asyncio
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit


class CuttingProxy:
    """Between a peer and a hub. Bytes are counted in both directions together."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        self._loop = asyncio.new_event_loop()
        self._left: int | None = None
        self._is_refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.port = 0
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut_after(self, count: int) -> None:
        """Cut everything when so many more bytes have passed; then serve on."""
        self._loop.call_soon_threadsafe(setattr, self, "_left", count)

    def refuse(self) -> None:
        """Cut everything, and whoever comes, until `accept`."""
        self._is_refusing = True
        self._loop.call_soon_threadsafe(self._cut)

    def accept(self) -> None:
        self._is_refusing = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        async with server:
            await self._stop.wait()
            self._cut()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.transport.abort()
            return
        try:
            back, forth = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, forth}
        try:
            await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
        finally:
            self._writers -= {writer, forth}
            writer.transport.abort()
            forth.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self._left is not None:
                    if len(data) > self._left:
                        writer.write(data[: self._left])
                        with suppress(OSError):
                            await writer.drain()
                        self._cut()
                        return
                    self._left -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _cut(self) -> None:
        self._left = None
        self.cuts += 1
        for writer in self._writers:
            writer.close() if self._is_refusing else writer.transport.abort()
