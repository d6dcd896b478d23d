"""Writing files: whole or not at all, and whoever reads the error knows which one it was."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FRESH = ".new"


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write a file to that takes the place of another when it is whole, and is gone when it is not.

    What is no ordinary file, such as /dev/stdout, is written to itself. One that a dying process leaves is `is_fresh`.

    Raises:
        OSError: as raised inside, with the name of the file that was to be written.
    """
    # Through a link: what it points to is replaced, not the link.
    place = path.resolve()
    if place.exists() and not place.is_file():
        with writing(path):
            yield place
        return
    fresh = place.with_name(f".{place.name}.{os.getpid()}{_FRESH}")
    try:
        yield fresh
        fresh.replace(place)
    except OSError as exc:
        raise _instead(exc, fresh, path) from exc
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def together(folder: Path, last: str | None = None) -> Iterator[Path]:
    """Give a folder whose files appear in another one when all of them are written, and not one when that fails.

    Args:
        folder: where they are wanted; it is made.
        last: the file by which others tell that the rest is there: an old one goes first, the new one comes last, so
            that nobody takes new files and old ones for one thing.

    Raises:
        OSError: as raised inside, with the name of the file that was to be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".", suffix=_FRESH, dir=folder))
    try:
        yield fresh
        if last is not None:
            (folder / last).unlink(missing_ok=True)
        for path in sorted((path for path in fresh.rglob("*") if path.is_file()), key=lambda path: path.name == last):
            place = folder / path.relative_to(fresh)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    except OSError as exc:
        raise _instead(exc, fresh, folder) from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def is_fresh(path: Path) -> bool:
    """Return whether a file or folder is one of `replacing` or `together`: left by a process that died."""
    return path.name.startswith(".") and path.name.endswith(_FRESH)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file: it is there whole, or as it was.

    Raises:
        OSError: with the file's name.
    """
    with replacing(path) as fresh, writing(fresh):
        fresh.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, UTF-8: it is there whole, or as it was.

    Raises:
        OSError: with the file's name.
    """
    write_bytes(path, text.encode("utf-8"))


def _instead(error: OSError, fresh: Path, path: Path) -> OSError:
    """Return an error that names what was to be written, not what was written meanwhile."""
    named = str(error.filename or path)
    if named.startswith(str(fresh)):
        named = str(path) + named.removeprefix(str(fresh))
    return OSError(error.errno or 0, error.strerror or str(error), named)
