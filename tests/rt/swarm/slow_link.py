"""A line between two TUN devices that delays every packet and loses some: netem for any kernel.

    python slow_link.py NAME NAME DELAY_MS LOSS_PERCENT SEED

makes both devices, says `ready`, answers each line of its input with the counts so far, and ends
with its input. Devices may be moved to other namespaces and renamed meanwhile. Order is kept.
"""

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
QUEUE_MAX = 4000  # Packets; more are lost, as at a router.
BURST = 64


@dataclass(frozen=True)
class Loss:
    """How slow and how lossy a line is, each way."""

    delay_ms: float = 10.0
    percent: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class Carried:
    """Packets so far, both ways."""

    sent: int
    lost: int


class SlowLink:
    """The line's process, while it stands."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def carried(self) -> Carried:
        return Carried(**json.loads(self._ask("?\n")))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline()


@contextmanager
def slow_link(one: str, other: str, loss: Loss) -> Iterator[SlowLink]:
    """Both devices stand in our namespace when this begins, and are gone when it ends."""
    numbers = [str(loss.delay_ms), str(loss.percent), str(loss.seed)]
    process = subprocess.Popen(
        [sys.executable, __file__, one, other, *numbers],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the slow link did not begin"
        yield SlowLink(process)
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------------- the line's own process


@dataclass
class Way:
    """One direction."""

    source: int
    sink: int
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)  # When due, and what.
    sent: int = 0
    lost: int = 0

    def take(self, delay_s: float, share_lost: float, chance: random.Random) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(self.source, 65535)
            except OSError:  # Nothing more, or the device is down.
                return
            if chance.random() < share_lost or len(self.under_way) >= QUEUE_MAX:
                self.lost += 1
                continue
            self.under_way.append((time.monotonic() + delay_s, packet))

    def give(self) -> None:
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            _, packet = self.under_way.popleft()
            try:
                os.write(self.sink, packet)
                self.sent += 1
            except OSError:  # That end is down: a packet to nowhere.
                self.lost += 1


def device(name: str) -> int:
    """A TUN device of this name; it lives as long as the number returned is open."""
    found = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(found, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return found


def main() -> None:
    one, other = (device(name) for name in sys.argv[1:3])
    delay_s, share_lost = float(sys.argv[3]) / 1e3, float(sys.argv[4]) / 100
    chance = random.Random(int(sys.argv[5]))
    ways = [Way(one, other), Way(other, one)]
    print("ready", flush=True)
    while True:
        due = [way.under_way[0][0] for way in ways if way.under_way]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([one, other, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            if not sys.stdin.readline():
                return
            counts = {key: sum(getattr(way, key) for way in ways) for key in ("sent", "lost")}
            print(json.dumps(counts), flush=True)
        for way in ways:
            if way.source in readable:
                way.take(delay_s, share_lost, chance)
            way.give()


if __name__ == "__main__":
    main()
