"""What a member of a group has fetched and its host has not worked on yet, and which lanes stand still meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set

from probe_consumers.backlog import Backlog
from probe_consumers.holding import Holding
from probe_consumers.inputs import Inputs
from undercurrent.kafka.records import Record
from undercurrent.kafka.subscriber import GroupSubscriber

# A loop that stood still for longer may have lost its partitions without knowing: it polls before it commits.
PAUSE_S = 1.5


class Intake:
    """Fetches for a host, and keeps what it fetched.

    Args:
        inputs: what is read.
        subscriber: the member that reads it.
        batch_records: how many records are fetched at once, at most.

    Attributes:
        backlog: what was fetched and is not worked on.
        holding: lanes that stand still although they could flow.
        metadata: the member's, by which the broker fences; None where it may be out of date.
    """

    def __init__(self, inputs: Inputs, subscriber: GroupSubscriber, batch_records: int) -> None:
        self._inputs = inputs
        self._subscriber = subscriber
        self._batch_records = batch_records
        self.backlog = Backlog(batch_records)
        self.holding = Holding(inputs, subscriber)
        self.metadata: object | None = None

    def fetch(self, wait_s: float) -> None:
        """Poll, and keep what comes."""
        began_s = time.monotonic()
        records: Sequence[Record] = self._inputs.laned(self._subscriber.poll_batch(self._batch_records, wait_s))
        metadata = self._subscriber.consumer_group_metadata()
        # The broker fences by the member's generation. Taken here, it is the one whose rebalances the callbacks have
        # told of, unless this thread was frozen in between: then the next poll has to tell first.
        self.metadata = metadata if time.monotonic() - began_s - wait_s < PAUSE_S else None
        self.backlog.add(records)

    def refresh_metadata(self) -> None:
        """Take the member's metadata in a revocation: before that is over nobody else has what it may still commit."""
        self.metadata = self._subscriber.consumer_group_metadata()

    def read(self, lane: int, offset: int) -> None:
        """Begin to read a lane, or begin anew."""
        self.drop([lane])
        self._subscriber.start(self._inputs.place(lane), offset)
        self._subscriber.resume(self._inputs.place(lane))

    def stand_still(self, lanes: Set[int]) -> None:
        """Read nothing more of lanes before `read`, and forget what was fetched of them."""
        self.drop(lanes)
        for lane in lanes:
            self._subscriber.pause(self._inputs.place(lane))

    def drop(self, lanes: Iterable[int]) -> None:
        """Forget what was fetched of lanes."""
        gone = set(lanes)
        self.backlog.of(gone)
        self.holding.drop(gone)
