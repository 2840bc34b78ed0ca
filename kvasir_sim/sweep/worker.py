"""A worker process of a sweep: tasks come in on standard input, replies leave on standard output.

The first line is the source; it is answered with `ready`. The end of input means that whoever asked
is gone: a thread waits for it, so that no simulation outlives the process that wanted it.
"""

import os
import queue
import signal
import sys
import threading

from kvasir_sim.sweep.evaluate import Evaluator

READY = "ready"


def _read(tasks: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)  # In the midst of a simulation, too.


def main() -> None:
    """Serve until the end of input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the asker decides.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What anything else prints is no reply.
    evaluator = Evaluator(sys.stdin.buffer.readline().decode())
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()
    print(READY, file=replies, flush=True)
    while True:
        print(evaluator.evaluate(tasks.get()), file=replies, flush=True)


if __name__ == "__main__":
    main()
