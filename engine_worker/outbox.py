"""Everything that the worker writes itself: generations, acknowledgements, dead letters, lost ends of streams.

Each partition has a queue before the client, and the next records are handed over when the last ones are acknowledged.
So a stopped broker costs no CPU: with five messages of a partition unacknowledged and another past its linger,
librdkafka burns a core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from undercurrent.errors import ProducerFatalError
from undercurrent.kafka.publisher import Delivery, DeliveryError, HeaderList, Publisher
from undercurrent.kafka.records import Partition

logger = logging.getLogger(__name__)

_BATCH = 500
_POLL_S = 0.1


class Item(NamedTuple):
    """One record to write.

    Args:
        key: its key.
        value: its bytes.
        headers: its headers.
        done: called on the loop with its offset once it is acknowledged.
    """

    key: bytes | None
    value: bytes | None
    headers: HeaderList | None = None
    done: Callable[[int], None] | None = None


class Outbox:
    """Queues before one idempotent producer. Use it from the loop's thread alone.

    Args:
        publisher: the client.
        post: runs a function on the loop's thread; callable from any thread.
        failed: called on the loop's thread when a record did not arrive: the worker cannot go on.
    """

    def __init__(
        self,
        publisher: Publisher,
        post: Callable[[Callable[[], None]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._publisher = publisher
        self._post = post
        self._failed = failed
        self._queues: dict[Partition, deque[Item]] = {}
        self._unacked: dict[Partition, int] = {}
        # Partitions of which the client has nothing, because others fill it; tried in turn.
        self._held: dict[Partition, None] = {}
        self._offering = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="deliveries", daemon=True)

    @property
    def pending(self) -> int:
        """Records that are not acknowledged."""
        return sum(self._unacked.values()) + sum(len(queue) for queue in self._queues.values())

    def start(self) -> None:
        """Begin to serve acknowledgements."""
        self._publisher.open()
        self._thread.start()

    def send(self, topic: str, partition: int, item: Item) -> None:
        """Write a record after those of its partition that were sent before."""
        where = Partition(topic, partition)
        self._queues.setdefault(where, deque()).append(item)
        self._hand_over(where)

    def purge(self, topic: str, partition: int) -> int:
        """Take back what the client does not have yet of a partition; return how many records that were."""
        queue = self._queues.get(Partition(topic, partition), deque())
        taken = len(queue)
        queue.clear()
        return taken

    def close(self, timeout_s: float) -> int:
        """End the client; return how many records it gave up."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_POLL_S + 5.0)
        return self._publisher.close(timeout_s)

    def _hand_over(self, where: Partition) -> None:
        queue = self._queues[where]
        if self._unacked.get(where, 0):
            return
        self._held.pop(where, None)
        for _ in range(min(len(queue), _BATCH)):
            item = queue[0]
            error = self._publisher.produce(
                where.topic,
                item.value,
                key=item.key,
                partition=where.number,
                headers=item.headers,
                on_delivery=partial(self._delivered, where, item),
            )
            if error is not None and error.queue_full:
                if not self._unacked.get(where, 0):
                    self._held[where] = None
                return
            queue.popleft()
            if error is not None:
                self._give_up(where, error)
                return
            self._unacked[where] = self._unacked.get(where, 0) + 1

    def _delivered(self, where: Partition, item: Item, delivery: Delivery) -> None:
        """Runs on the thread of deliveries."""
        self._post(lambda: self._acknowledged(where, item, delivery))

    def _acknowledged(self, where: Partition, item: Item, delivery: Delivery) -> None:
        self._unacked[where] -= 1
        if delivery.error is not None:
            self._give_up(where, delivery.error)
            return
        if item.done is not None:
            item.done(delivery.offset)
        if not self._unacked[where]:
            self._hand_over(where)

    def _give_up(self, where: Partition, error: DeliveryError) -> None:
        self._failed(ProducerFatalError(f"{where}: a record did not arrive: {error.reason} [{error.code}]"))

    def _offer_held(self) -> None:
        self._offering = False
        for where in list(self._held):
            self._hand_over(where)
            if where in self._held:
                return

    def _poll(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            served = self._publisher.poll(_POLL_S)
            # Not in the callback of a delivery: the record leaves the client only after it.
            if self._held and not self._offering:
                self._offering = True
                self._post(self._offer_held)
            if not served and time.monotonic() - began < _POLL_S / 2:
                self._stop.wait(_POLL_S / 2)
