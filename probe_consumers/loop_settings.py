"""What the loop of a point is told, and what it is given to join its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from probe_consumers.inputs import Inputs
from undercurrent.kafka.subscriber import GroupSubscriber, RebalanceHandler
from undercurrent.protocol.host_position import StartFrom


class MakeSubscriber(Protocol):
    """Makes the group member of a loop."""

    def __call__(self, handler: RebalanceHandler) -> GroupSubscriber:
        """Return a subscriber that tells `handler` of rebalances; the loop opens and closes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a loop runs.

    Args:
        inputs: what it reads.
        verdicts: topic of verdicts.
        service: consumer group.
        fingerprint: of the probe set.
        start_from: where a new group begins.
        transaction_interval_s: time between transactions.
        batch_records: most records that are decided on at once.
        change: another probe set may go on where the last one stopped.
    """

    inputs: Inputs
    verdicts: str
    service: str
    fingerprint: str
    start_from: StartFrom
    transaction_interval_s: float = 0.1
    batch_records: int = 2000
    change: bool = False
