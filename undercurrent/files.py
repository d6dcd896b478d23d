"""Writing files so that whoever reads the error knows which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name a file in the error where writing to it fails: of a full disk the system says no more than that it is full.

    Raises:
        OSError: as raised inside, with the file's name.
    """
    try:
        yield
    except OSError as exc:
        if exc.filename is not None:
            raise
        raise OSError(exc.errno or 0, exc.strerror or str(exc), str(path)) from exc


def write_text(path: Path, text: str) -> None:
    """Write a file of text, UTF-8.

    Raises:
        OSError: with the file's name.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")
