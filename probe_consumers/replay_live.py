"""How far a consumer group has come with a range that is replayed, and that what it said up to there can be read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from probe_consumers.inputs import Inputs
from probe_consumers.replay import Span
from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.protocol.host_position import HostMetadata

_LOOK_S = 0.5
# Longer than a dead host's transaction holds up readers.
_DECIDED_S = 30.0
_AGAIN_S = 0.1


class LivePositions:
    """Asks how far consumer groups have come with a topic, or with those that they join.

    Args:
        lookup: asks.
        inputs: what a group reads.
        verdicts: topic of verdicts.
    """

    def __init__(self, lookup: OffsetLookup, inputs: Inputs, verdicts: str) -> None:
        self._lookup = lookup
        self._inputs = inputs
        self._verdicts = verdicts

    def judged_up_to(self, group: str, lanes: Iterable[int]) -> dict[int, int]:
        """Return the first offset whose outputs a group may not have written, where it has committed.

        Args:
            group: the group.
            lanes: which partitions; they are the keys of the answer too.
        """
        asked = [self._inputs.place(lane) for lane in lanes]
        found = {}
        for where, (offset, text) in self._lookup.committed(group, asked).items():
            metadata = HostMetadata.from_text(text)
            found[self._inputs.lane(where)] = offset if metadata is None else max(offset, metadata.emitted_up_to)
        return found

    def wait(self, group: str, spans: Mapping[int, Span], seconds: float) -> dict[int, int]:
        """Wait until a group has come to the end of a range; return how far it is then, or when the time is over.

        Args:
            group: the group.
            spans: the range, by partition, or lane.
            seconds: how long.
        """
        deadline = time.monotonic() + seconds
        while True:
            found = self.judged_up_to(group, spans)
            left_s = deadline - time.monotonic()
            behind = [lane for lane, span in spans.items() if span.start < span.end > found.get(lane, -1)]
            if left_s <= 0 or not behind:
                return found
            time.sleep(min(_LOOK_S, left_s))

    def settle(self) -> None:
        """Wait until every transaction that has written a verdict by now is decided.

        A commit is seen in one partition before it is in another: a position that says that verdicts are written may
        be read before they can.

        Raises:
            UnreachableError: one stays open.
        """
        partitions = self._lookup.partitions(self._verdicts)
        ends, deadline = self._lookup.end(partitions), time.monotonic() + _DECIDED_S
        while True:
            decided = self._lookup.end(partitions, isolation=Isolation.READ_COMMITTED)
            behind = [where for where in partitions if decided[where] < ends[where]]
            if not behind:
                return
            if time.monotonic() > deadline:
                raise UnreachableError(f"{behind[0]}: a transaction has been open for {_DECIDED_S:g} s")
            time.sleep(_AGAIN_S)
