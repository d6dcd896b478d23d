"""Which request holds which passage, beyond a bound on disk: a corpus may have more passages than memory has room."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from undercurrent.evaluation.figures import Ints
from undercurrent.files import writing

HELD_PAIRS = 1 << 21
"""Pairs of 16 bytes that are held before they are written down."""
_BUCKETS = 64


class Passages:
    """Pairs of a passage's hash and a request's number.

    Args:
        folder: where what does not fit memory is written, into files without a name; the system's without it.
        held_pairs: how many are held.
    """

    def __init__(self, folder: Path | None = None, held_pairs: int = HELD_PAIRS) -> None:
        self._folder = folder
        self._held_pairs = held_pairs
        self._pairs: list[Ints] = []
        self._count = 0
        self._files: list[IO[bytes]] = []
        self._stack = contextlib.ExitStack()

    def add(self, passages: Ints, owner: int) -> None:
        """Take the passages of a request, each once."""
        self._pairs.append(np.stack([passages, np.full(passages.size, owner)], axis=1))
        self._count += passages.size
        if self._count >= self._held_pairs:
            self._write()

    def groups(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield passages [m] and owners [m], all pairs of one passage together; then nothing is left."""
        with self._stack:
            if not self._files:
                if self._pairs:
                    yield _columns(np.concatenate(self._pairs))
                return
            self._write()
            for file in self._files:
                file.seek(0)
                yield _columns(np.frombuffer(file.read(), np.int64).reshape(-1, 2))

    def _write(self) -> None:
        while len(self._files) < _BUCKETS:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - the stack closes it
            self._files.append(self._stack.enter_context(file))
        if not self._pairs:
            return
        pairs = np.concatenate(self._pairs)
        bucket = pairs[:, 0] & (_BUCKETS - 1)
        order = np.argsort(bucket, kind="stable")
        cuts = np.searchsorted(bucket[order], np.arange(_BUCKETS + 1))
        for bucket_file, low, high in zip(self._files, cuts, cuts[1:], strict=False):
            with writing(self._folder or Path(tempfile.gettempdir())):
                bucket_file.write(np.ascontiguousarray(pairs[order[low:high]]).tobytes())
        self._pairs, self._count = [], 0


def _columns(pairs: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(pairs[:, 0], kind="stable")
    return pairs[order, 0], pairs[order, 1]
