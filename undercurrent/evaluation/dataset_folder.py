"""The folder of an export that is under way: one writer, and nothing of one that was interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_format import LABELS, MANIFEST, README, REQUESTS, STREAMS, UNFINISHED
from undercurrent.files import is_fresh

FACTS = ".facts.sqlite"
_WRITTEN = ("data", "tensors", REQUESTS, STREAMS, LABELS, README, FACTS)


@contextlib.contextmanager
def under_way(folder: Path) -> Iterator[None]:
    """Hold a folder while a dataset is written into it; a mark lies in it until the body has come to its end.

    What an export that was interrupted has left there is deleted: it is not gone on with, since what the topics hold
    between its ends and theirs today cannot be told apart afterwards.

    Raises:
        DatasetError: the folder holds something else, or another export is writing it.
    """
    mark = folder / UNFINISHED
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not mark.exists()) or (folder / MANIFEST).exists():
            raise DatasetError(f"{folder}: is there already; name a folder that is not, or is empty")
    else:
        folder.mkdir(parents=True)
    with mark.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise DatasetError(f"{folder}: another export is writing it") from exc
        for path in (*(folder / name for name in _WRITTEN), *filter(is_fresh, folder.iterdir())):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield
        mark.unlink()
