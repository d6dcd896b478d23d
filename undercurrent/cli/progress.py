"""How far a command is: a bar on a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress(
    doing: str, total: int, unit: str = "records", *, every_s: float = LINE_EVERY_S
) -> Iterator[Callable[[int], None]]:
    """Show how far something is, with rate and time left; give a function that moves it on.

    Args:
        doing: a word for it, as `exporting`.
        total: units in all, or an upper bound.
        unit: what is counted.
        every_s: between two lines.
    """
    if not sys.stderr.isatty():
        yield _Lines(doing, total, unit, every_s).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(doing),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began_s = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=max(1, total), rate="")

        def advance(count: int) -> None:
            done = bar.tasks[0].completed + count
            bar.update(task, advance=count, rate=f"{done / max(1e-9, time.monotonic() - began_s):,.0f}/s")

        yield advance


class _Lines:
    def __init__(self, doing: str, total: int, unit: str, every_s: float) -> None:
        self._doing, self._total, self._unit, self._every_s = doing, total, unit, every_s
        self._done = 0
        self._began_s = self._told_s = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now_s = time.monotonic()
        if now_s - self._told_s < self._every_s:
            return
        self._told_s = now_s
        rate = self._done / (now_s - self._began_s)
        left_s = max(0, self._total - self._done) / max(rate, 1e-9)
        sys.stderr.write(
            f"{self._doing}: {self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s, {left_s:,.0f} s left\n"
        )
        sys.stderr.flush()
