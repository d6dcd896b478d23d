"""Rows for a person: aligned columns, whatever the width of the terminal, so that `grep` and `cut` work on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


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
