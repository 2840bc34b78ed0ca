"""What is compared takes turns, each in a process of its own that is loaded once.

Who does not have the turn waits for a line on its standard input.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

WAIT_S_MAX = 1800  # Loading, or one turn.
READY = "ready"
Result = dict[str, Any]


def serve_turns(measure: Callable[[], Result]) -> None:
    """The body of such a process: one line of JSON for each line of input, until that ends."""
    print(READY, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


class Loaded:
    """Starts a process that calls `serve_turns`; as a context it is ready, and ended after.

    Args:
        name: For error messages.
        arguments: The command.
        log: Where its standard error goes.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self._name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )

    def __enter__(self) -> Self:
        while self._line() != READY:
            pass  # Libraries greet.
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def measure(self) -> Result:
        """One turn.

        Raises:
            SystemExit: The process failed; its last words are in the message.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        result: Result = json.loads(self._line())
        return result

    def _line(self) -> str:
        assert self._process.stdout is not None
        too_late = threading.Timer(WAIT_S_MAX, self._process.kill)
        too_late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            too_late.cancel()
        if not line:
            said = self._log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{self._name} failed with status {self._process.wait()}:\n{said}")
        return line.strip()
