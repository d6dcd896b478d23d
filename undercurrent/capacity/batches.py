"""Batches like the planned ones, as bytes: what compression is tried on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from undercurrent.capacity.meeting import Meeting, Met
from undercurrent.capacity.traffic import Rows, Traffic
from undercurrent.capacity.wire import Place, StreamSizes

MOST_BATCH_BYTES = 1_000_000
"""librdkafka's batch.size."""

_MOST_BATCHES, _FEWEST_BATCHES = 64, 4
_MOST_RECORDS, _MOST_BYTES = 4_000, 16 << 20
_MOST_REQUESTS = 256


class Batches:
    """What batches of a point's records hold.

    Args:
        sizes: encodes its records.
        pieces: tokens of each record of a prompt.
        rows: of a request.
        traffic: what is served.
    """

    def __init__(self, sizes: StreamSizes, pieces: Sequence[int], rows: Rows, traffic: Traffic) -> None:
        prompt = round(traffic.prompt_tokens)
        firsts = accumulate(pieces[:-1], initial=prompt - sum(pieces))
        # (position of the first token, tokens) of each record between start and end.
        self._held = [*zip(firsts, pieces, strict=False), *((prompt + step - 1, 1) for step in rows.steps)]
        self._sizes = sizes
        self._token_s = traffic.token_ms / 1000
        self._taken = 0

    def like(self, meeting: Meeting) -> Iterator[tuple[bytes, int]]:
        """Yield some batches, each with the bytes of values in it, which no codec makes smaller."""
        each = sum(tokens for _, tokens in self._held) * self._sizes.stream.row_bytes / (len(self._held) + 2)
        records = min(_MOST_RECORDS / meeting.records, _MOST_BYTES / max(1.0, each * meeting.records))
        count = max(_FEWEST_BATCHES, min(_MOST_BATCHES, int(records)))
        for batch in meeting.draw(count, _MOST_REQUESTS):
            yield from self._bytes_of(batch)

    def _bytes_of(self, batch: Sequence[Met]) -> Iterator[tuple[bytes, int]]:
        made: list[bytes] = []
        size = held = whole = 0
        for met in batch:
            record, values = self._record(met, len(made))
            if made and size + len(record) > MOST_BATCH_BYTES:
                yield b"".join(made), held
                made, size, held = [], 0, 0
                # What follows of a long prompt, or of many, is like what was.
                if whole > _MOST_BYTES // _FEWEST_BATCHES:
                    return
            made.append(record)
            size, held, whole = size + len(record), held + values, whole + len(record)
        yield b"".join(made), held

    def _record(self, met: Met, offset: int) -> tuple[bytes, int]:
        if not 0 < met.record <= len(self._held):
            return self._sizes.end_record(met.request, offset, opens=not met.record), 0
        position, tokens = self._held[met.record - 1]
        size = tokens * self._sizes.stream.row_bytes
        step = int(met.at_s / self._token_s)
        place = Place(seq=met.record, position=position, tokens=tokens, step=step, offset=offset)
        return self._sizes.block(met.request, place, self._values(size)), size

    def _values(self, size: int) -> bytes:
        noise = _noise(max(2 * size, _MOST_BYTES))
        start = self._taken if self._taken + size <= len(noise) else 0
        self._taken = start + size
        return noise[start : self._taken]


@lru_cache(maxsize=2)
def _noise(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)
