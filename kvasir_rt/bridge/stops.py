"""Stop strings: text flows out as early as it can and never includes any of a stop string.

Only the longest end of the text that could still become a stop string is held back. Of the stop
strings that are complete in the text so far, the one that begins first wins; the text ends there.
A match may span any number of tokens, and streamed text equals the text that is not streamed,
because both come through here.
"""

from collections.abc import Sequence


class StopFinder:
    """Feed it text with `push`, end it with `flush`; `is_matched` is then final.

    Args:
        stops: Stop strings, none empty.
    """

    __slots__ = ("_held", "_longest", "_stops", "is_matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """Takes more text; gives what is certain to belong to the answer."""
        if self.is_matched:
            return ""
        if not self._stops:
            return text
        self._held += text
        begins = [at for at in map(self._held.find, self._stops) if at >= 0]
        if begins:
            self.is_matched = True
            certain, self._held = self._held[: min(begins)], ""
            return certain
        keep = self._ambiguous_length()
        split = len(self._held) - keep
        certain, self._held = self._held[:split], self._held[split:]
        return certain

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _ambiguous_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
