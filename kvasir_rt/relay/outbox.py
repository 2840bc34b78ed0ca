"""What waits to be sent on one connection: bounded, urgent frames first, bulk in chunks.

A frame that has begun goes on, but an urgent one (a beat, a fault) is sent between its chunks, so
it waits for one chunk at most.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvasir_rt.swarm.frames import CHUNK_BYTES_MAX, chunks


class Outbox:
    """A queue of frames.

    Args:
        bytes_max, frames_max: Of bulk frames; a frame beyond either is not taken.
        urgent_max: Of urgent frames.
    """

    def __init__(self, bytes_max: int, frames_max: int, urgent_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames_max = frames_max
        self._urgent_max = urgent_max
        self._urgent: deque[bytes] = deque()
        self._bulk: OrderedDict[int, bytes] = OrderedDict()  # By a number of this outbox.
        self._begun: Iterator[bytes] | None = None
        self._numbers = 0
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._bulk) + (self._begun is not None)

    def post_urgent(self, frame: bytes) -> bool:
        """False: nothing was sent for so long that there is no room even for small ones."""
        assert len(frame) <= CHUNK_BYTES_MAX
        if len(self._urgent) >= self._urgent_max:
            return False
        self._urgent.append(frame)
        return True

    def post(self, frame: bytes) -> int | None:
        """The number by which the frame can be withdrawn, or None: the queue is full."""
        if len(self._bulk) >= self._frames_max or self.bytes_held + len(frame) > self._bytes_max:
            return None
        self._numbers += 1
        self._bulk[self._numbers] = frame
        self.bytes_held += len(frame)
        return self._numbers

    def withdraw(self, number: int) -> bool:
        """Take a frame back; False if it has begun to leave."""
        frame = self._bulk.pop(number, None)
        if frame is None:
            return False
        self.bytes_held -= len(frame)
        return True

    def take(self) -> bytes | None:
        """The next message, or None: there is nothing to send."""
        if self._urgent:
            self._numbers += 1
            (message,) = chunks(self._urgent.popleft(), self._numbers)
            return message
        while True:
            if self._begun is not None:
                message = next(self._begun, b"")
                if message:
                    return message
                self._begun = None
            if not self._bulk:
                return None
            number, frame = self._bulk.popitem(last=False)
            self.bytes_held -= len(frame)
            self._begun = chunks(frame, number)
