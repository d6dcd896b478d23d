"""From records to what the core decides about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from probe_consumers.bound import Clock
from probe_consumers.decoding import Decoder
from probe_consumers.rollout_log import Knows
from undercurrent.codec import Codec
from undercurrent.kafka.records import Record
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action
from undercurrent.protocol.messages import StreamStarted

logger = logging.getLogger(__name__)

# How long a batch waits for the rollouts that its streams began under, before the loop goes round.
_ROLLOUTS_WAIT_S = 2.0


class Deciding:
    """Decodes records and has them decided on, once it is known which versions judge them.

    Args:
        core: decides.
        codec: decodes.
        clock: microseconds since the Unix epoch.
        clock_ahead_us: by how much that clock is ahead of the brokers'.
        knows: waits until the rollouts below an offset are known; None where there are none.
        name: of what is read, for the log.
    """

    def __init__(
        self,
        core: ProbeHost,
        codec: Codec,
        clock: Clock,
        clock_ahead_us: Callable[[], int],
        knows: Knows | None,
        name: str,
    ) -> None:
        self._core = core
        self._decoder = Decoder(codec)
        self._clock = clock
        self._clock_ahead_us = clock_ahead_us
        self._knows = knows
        self._name = name
        self._last_appended_us: dict[int, int] = {}

    def age_s(self, lane: int) -> float:
        """Return how long ago the broker appended the last record that was read of a lane, seconds."""
        appended_us = self._last_appended_us.get(lane)
        return float("inf") if appended_us is None else max(0.0, (self._broker_clock() - appended_us) / 1e6)

    def records(self, records: Sequence[Record]) -> list[Action]:
        """Return what is to be done about records."""
        batch = self._decoder.batch(records)
        if not self.know_rollouts(item.message.rollouts for item in batch if isinstance(item.message, StreamStarted)):
            # They come again, when the partitions begin anew at what is committed.
            return self._core.failed()
        actions = self._core.records(batch, self._broker_clock())
        self._last_appended_us.update((item.partition, item.timestamp_us) for item in batch)
        return actions

    def know_rollouts(self, offsets: Iterable[int]) -> bool:
        """Wait until it is known which versions streams have; their engines knew it, so that it is there."""
        needed = max(offsets, default=0)
        if not needed or self._knows is None or self._knows(needed, _ROLLOUTS_WAIT_S):
            return True
        logger.warning("%s: the rollouts up to offset %d are not known yet", self._name, needed)
        return False

    def _broker_clock(self) -> int:
        # Ages count from when the broker appended a record: by this machine's clock alone, two hours ahead, every abort
        # would be too old.
        return self._clock() - self._clock_ahead_us()
