"""Wraps the methods of a model runner that begin and end a step, and counts what capture spends in between."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

Before = Callable[[Any], None]
After = Callable[[Any], None]
Spent = Callable[[int], None]

TIMED_EVERY = 7
"""One step of so many is timed: a look at the thread's clock is a system call, and four of them are 5 us. A prime, so
that what comes and goes in a rhythm is met as often as it is."""


def around(original: Callable[..., Any], before: Before, after: After, spent: Spent) -> Callable[..., Any]:
    """Return a method that calls `before` and `after` around the original with its first argument.

    Args:
        original: a bound method whose first argument is the scheduler's output.
        before: called first.
        after: called last, where the original has returned.
        spent: gets the CPU time of this thread that both took, nanoseconds: of a timed step, for all since the last.
    """
    untimed = TIMED_EVERY

    @functools.wraps(original)
    def wrapped(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        nonlocal untimed
        untimed -= 1
        if untimed:
            before(scheduler_output)
            result = original(scheduler_output, *args, **kwargs)
            after(scheduler_output)
            return result
        untimed = TIMED_EVERY
        began = time.thread_time_ns()
        before(scheduler_output)
        prepared = time.thread_time_ns()
        result = original(scheduler_output, *args, **kwargs)
        ran = time.thread_time_ns()
        after(scheduler_output)
        spent(TIMED_EVERY * (time.thread_time_ns() - ran + prepared - began))
        return result

    return wrapped
