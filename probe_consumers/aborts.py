"""The abort writer: commands leave at once, and must have arrived before the transaction that covers them commits."""

from __future__ import annotations

import logging
import time
from functools import partial

from probe_consumers.bound import Clock
from undercurrent.codec import Codec
from undercurrent.errors import ProducerFatalError, UnreachableError
from undercurrent.failpoints import failpoint
from undercurrent.kafka.publisher import Delivery, DeliveryError, Publisher
from undercurrent.protocol.messages import ControlCommand, ProbeHeartbeat

logger = logging.getLogger(__name__)


def _now_us() -> int:
    return time.time_ns() // 1000


class AbortWriter:
    """Writes abort commands.

    Args:
        publisher: an idempotent producer without linger; nothing else writes through it.
        topic: the control topic.
        codec: encodes.
        flush_timeout_s: how long the acknowledgements may take.
        clock: microseconds since the Unix epoch.

    Attributes:
        clock_ahead_us: by how much that clock is ahead of the broker's, as far as acknowledgements tell.
    """

    def __init__(
        self, publisher: Publisher, topic: str, codec: Codec, flush_timeout_s: float = 6.0, clock: Clock = _now_us
    ) -> None:
        self._publisher = publisher
        self._topic = topic
        self._codec = codec
        self._flush_timeout_s = flush_timeout_s
        self._clock = clock
        self.clock_ahead_us = 0
        self._failed: DeliveryError | None = None
        self._waiting = False

    def open(self, hello: ProbeHeartbeat) -> None:
        """Create the client and write a first record, so that the first abort is not the one to pay for connections.

        Args:
            hello: announces no probe; an engine worker passes over it.
        """
        self._publisher.open()
        value, key = self._codec.encode(hello), hello.service.encode()
        told = partial(self._look_at_clock, self._clock())
        self._publisher.produce(self._topic, value, key=key, partition=0, on_delivery=told)
        left = self._publisher.flush(self._flush_timeout_s)
        if left:
            logger.warning("the first record for %s is not acknowledged yet", self._topic)

    def send(self, command: ControlCommand) -> None:
        """Send a command; `flush` tells whether it arrived."""
        value, told = self._codec.encode(command), partial(self._delivered, self._clock())
        refused = self._publisher.produce(
            self._topic, value, key=command.request_id.encode(), partition=0, on_delivery=told
        )
        self._failed = self._failed or refused
        self._waiting = True
        self._publisher.poll(0.0)

    def flush(self) -> None:
        """Wait until every command sent before this call has arrived; `send` may go on meanwhile.

        Raises:
            UnreachableError: one has not; the transaction that covers it must not commit.
            ProducerFatalError: none can arrive any more.
        """
        if not self._waiting:
            return
        # Cleared before the wait: a command that is sent meanwhile, on the loop's thread, is the next flush's.
        self._waiting = False
        left = self._publisher.flush(self._flush_timeout_s)
        self._waiting = self._waiting or left > 0
        failed, self._failed = self._failed, None
        if failed is not None and failed.fatal:
            # Trying again would fail for ever, while heartbeats say that all is well.
            raise ProducerFatalError(f"abort commands cannot be written any more: {failed.reason}")
        if failed is not None or left:
            reason = failed.reason if failed is not None else f"{left} without an answer"
            raise UnreachableError(f"abort commands did not arrive at {self._topic}: {reason}")
        failpoint("abort_sent")

    def close(self) -> None:
        """End the client."""
        self._publisher.close()

    def _delivered(self, sent_at_us: int, delivery: Delivery) -> None:
        self._look_at_clock(sent_at_us, delivery)
        if delivery.error is not None:
            self._failed = self._failed or delivery.error

    def _look_at_clock(self, sent_at_us: int, delivery: Delivery) -> None:
        if delivery.appended_at_us is not None and delivery.error is None:
            # It was appended after it was sent and before this, which may be long after: no more than that is known.
            least, most = (at_us - delivery.appended_at_us for at_us in (sent_at_us, self._clock()))
            self.clock_ahead_us = min(max(self.clock_ahead_us, least), most)
