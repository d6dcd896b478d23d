"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout_s: float, what: str = "the condition", *, every_s: float = 0.02
) -> T:
    """Return the first true value of `condition`.

    Args:
        condition: asked again and again.
        timeout_s: how long at most, in seconds.
        what: what is waited for, as the error says it.
        every_s: pause between two questions; as long as the question took, where that was longer.

    Raises:
        TimeoutError: it did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come about in {timeout_s:g} s; last value {value!r}")
        # A question that reads a whole log would else take the time of those who are to write it.
        time.sleep(max(every_s, time.monotonic() - asked))
