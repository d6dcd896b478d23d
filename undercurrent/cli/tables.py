"""Rows for a person: aligned columns, whatever the width of the terminal, so that `grep` and `cut` work on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def write_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows to standard output under the names of their columns; those of the first row count.

    Args:
        rows: with equal keys; none writes nothing.
    """
    if not rows:
        return
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def moment(at_us: int) -> str:
    """Return a time for a person, in UTC; one that a clock got wrong by millennia as it is.

    Args:
        at_us: microseconds since the Unix epoch.
    """
    try:
        return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{at_us} us"
