"""Numbers of things in words."""

from __future__ import annotations


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return a number of things as a person says it.

        counted(1, "record")                                      1 record
        counted(1200, "record is left out", "records are left out")   1,200 records are left out

    Args:
        count: how many.
        one: what follows where it is one.
        several: what follows any other number, 0 too; `one` with an s by default.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"
