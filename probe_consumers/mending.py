"""Partitions that cannot be read where they stand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from probe_consumers.inputs import Inputs
from probe_consumers.metrics import HostMetrics
from probe_consumers.watchdog import Busy
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action, Read

logger = logging.getLogger(__name__)


class Mending:
    """What the member was told of its partitions, until something is done about it.

    Args:
        core: decides.
        lookup: knows where logs begin and end.
        inputs: what is read.
        metrics: counts.
        busy: says what the loop is at.
        act: does what the core says.
    """

    def __init__(
        self,
        core: ProbeHost,
        lookup: OffsetLookup,
        inputs: Inputs,
        metrics: HostMetrics,
        busy: Busy,
        act: Callable[[Iterable[Action]], None],
    ) -> None:
        self._core = core
        self._lookup = lookup
        self._inputs = inputs
        self._metrics = metrics
        self._busy = busy
        self._act = act
        self._events: list[PartitionEvent] = []

    def take(self, events: Iterable[PartitionEvent]) -> None:
        """Take what was told."""
        self._events += events

    def mend(self) -> None:
        """Do something about each problem; one about which nobody can be asked stays.

        Raises:
            UnreachableError: nobody told the bounds of a log.
        """
        while self._events:
            self._problem(self._events[0])
            self._events.pop(0)

    def _problem(self, event: PartitionEvent) -> None:
        if event.problem is not PartitionProblem.OUT_OF_RANGE:
            logger.warning("%s: %s", event.partition, event.reason)
            self._metrics.problem(event.problem)
            return
        where, lane = event.partition, self._inputs.lane(event.partition)
        start, end = self._lookup.beginning([where])[where], self._lookup.end([where])[where]
        with self._busy.at(f"{where}: ending streams"):
            actions = self._core.out_of_range(lane, start, end)
        if not actions and lane in self._core.emitted_up_to:
            # In range by now; librdkafka stands still until it is told to go on.
            actions = [Read(lane, max(start, event.position))]
        self._act(actions)
