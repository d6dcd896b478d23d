"""Tokens to text while they come: never half a character, never a stop string.

Pure: whoever uses it brings the function that turns token ids into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 6
_OPEN_MARKS = 3  # a character that is not complete has at most three bytes, and decodes to at most as many marks
_MARK = "\ufffd"


class Detokenizer:
    """The text of a growing sequence of tokens, piece by piece; the pieces together are the decoded text.

    A token's text may depend on the tokens before it (a leading blank), and a character may be spread over several.
    So a short window is decoded at every token, and what ends in the mark of an incomplete character waits.

    Args:
        decode: token ids to text.
        context: tokens before the first one; they give no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._sent = _complete(decode(self._window)) if self._window else 0
        self._read = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that a further token completes, often all of its own, sometimes none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        complete = _complete(text)
        new = text[self._sent : complete]
        if new and complete == len(text):
            # All is out. The tokens since the last time that it was stay as context for the next one.
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._sent = len(self._decode(self._window))
        else:
            self._sent = max(self._sent, complete)
        return new


class StopText:
    """Holds back what might be the beginning of a stop string, and ends the text before one.

    Args:
        stop: the stop strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that is certain by now; after a stop string there is none."""
        if self.stopped or not self._stop:
            return "" if self.stopped else text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """Return what is still held back: no stop string will come of it any more."""
        held, self._held = self._held, ""
        return held


def _complete(text: str) -> int:
    """Return how much of a text no further token can change."""
    open_marks = len(text) - len(text.rstrip(_MARK))
    return len(text) - min(open_marks, _OPEN_MARKS)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)
