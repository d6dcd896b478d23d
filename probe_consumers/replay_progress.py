"""How far a replay is: a bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from probe_consumers.replay_order import Plan
from probe_consumers.replay_partition import Watcher
from probe_consumers.replay_store import part_folder, read_checkpoint

_LINE_EVERY_S = 10.0


class Odometer:
    """Reads off the checkpoints how far the parts have come.

    Args:
        out: folder of the results.
        plan: the plan.
    """

    def __init__(self, out: Path, plan: Plan) -> None:
        self._out, self._plan = out, plan
        self.total = sum(part.span.end - part.span.start for part in plan.parts)
        self._started = time.monotonic()
        self.first, self._first_bytes = self.read()

    def read(self) -> tuple[int, int]:
        """Return offsets that are done, and bytes of records that were read."""
        offsets = size = 0
        for number in self._plan.numbers:
            reached = read_checkpoint(part_folder(self._out, number))
            if reached is not None:
                for part, mark in zip(self._plan.parts_of(number), reached.marks, strict=True):
                    offsets += mark.position - part.span.start
                size += reached.read_bytes
        return offsets, size

    def told(self) -> tuple[int, str, float | None]:
        """Return offsets that are done, the rate since this began in words, and seconds that are left if known."""
        offsets, size = self.read()
        seconds = max(time.monotonic() - self._started, 1e-3)
        fresh = offsets - self.first
        left_s = (self.total - offsets) * seconds / fresh if fresh else None
        return offsets, f"{decimal(int((size - self._first_bytes) / seconds))}/s", left_s


@contextmanager
def shown(out: Path, plan: Plan, console: Console) -> Iterator[Watcher]:
    """Show how far a replay is, for the block's time; what it gives is to be called now and then."""
    odometer = Odometer(out, plan)
    if console.is_terminal:
        with _bar(odometer, console) as watch:
            yield watch
        return
    last = time.monotonic()

    def line() -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            offsets, rate, left_s = odometer.told()
            left = "" if left_s is None else f", {left_s:.0f} s left"
            console.print(f"{offsets} of {odometer.total} offsets, {rate}{left}", highlight=False)

    yield line


@contextmanager
def _bar(odometer: Odometer, console: Console) -> Iterator[Watcher]:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=odometer.total, completed=odometer.first, rate="")

        def watch() -> None:
            offsets, rate, _ = odometer.told()
            progress.update(task, completed=offsets, rate=rate)

        yield watch
