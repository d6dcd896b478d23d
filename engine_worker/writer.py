"""What the worker writes, encoded and put where it belongs: generations, answers, dead letters, lost ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine_worker.deltas import DeltaBuffer
from engine_worker.observer import Observer
from engine_worker.outbox import Item, Outbox
from engine_worker.records import GONE, gone_letter, letter_of, lost_ends
from undercurrent.codec import Codec
from undercurrent.protocol.dead_letters import Letter
from undercurrent.protocol.epochs import LogRange
from undercurrent.protocol.messages import Accepted, ControlAck, GenerationEvent, GenerationKind, Released
from undercurrent.protocol.worker_types import DeadLetter, EndStreams, RunKey
from undercurrent.topics import TopicPlan

logger = logging.getLogger(__name__)


class Writer:
    """Writes through the outbox; what has to be known of an acknowledgement is called on the loop's thread.

    Args:
        engine: its name, for dead letters.
        plan: the topics.
        codec: encodes.
        outbox: writes.
        observer: counts.
        deltas: tokens that are not written yet.
    """

    def __init__(
        self, engine: str, plan: TopicPlan, codec: Codec, outbox: Outbox, observer: Observer, deltas: DeltaBuffer
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._codec = codec
        self._outbox = outbox
        self._observer = observer
        self._deltas = deltas

    def generation(self, partition: int, message: Accepted | Released | GenerationEvent) -> None:
        """Write to the generations partition of a prompt; before an attempt's last word, the tokens gathered for it."""
        final = isinstance(message, GenerationEvent) and message.kind is GenerationKind.FINAL
        if final or isinstance(message, Released):
            key = RunKey(message.request_id, message.attempt)
            self.flush(key)
            if not final:
                self._deltas.close(key)
        self._observer.generation(message)
        item = Item(message.request_id.encode(), self._codec.encode(message))
        self._outbox.send(self._plan.generations, partition, item)

    def flush(self, key: RunKey | None = None) -> None:
        """Write the tokens that were gathered, of one run or of all."""
        for partition, event in self._deltas.take(time.time_ns() // 1000, key):
            item = Item(event.request_id.encode(), self._codec.encode(event))
            self._outbox.send(self._plan.generations, partition, item)

    def purge(self, partition: int) -> None:
        """Take back what the client does not have yet of a generations partition that is somebody else's now.

        The tokens of its runs end there: later ones would follow on those that were taken back, and leave a gap.
        """
        self._deltas.close_all(partition)
        self._outbox.purge(self._plan.generations, partition)

    def answer(self, ack: ControlAck, done: Callable[[], None]) -> None:
        """Answer a control command."""
        self._observer.acknowledged(ack)
        item = Item(ack.request_id.encode(), self._codec.encode(ack), done=lambda _: done())
        self._outbox.send(self._plan.acks, 0, item)

    def dead_letter(self, action: DeadLetter, done: Callable[[], None]) -> None:
        """Write a prompt to the dead-letter topic."""
        letter = letter_of(self._plan, action, self._engine, time.time_ns() // 1_000_000)
        logger.warning("prompt %d of partition %d is dead: %s", action.offset, action.partition, action.kind)
        self._bury(action.partition, action.kind, letter, done)

    def gone(self, partition: int, offsets: LogRange, done: Callable[[], None]) -> None:
        """Declare prompts that retention has taken: one dead letter, without bytes, for all of them."""
        letter = gone_letter(self._plan, partition, offsets, self._engine, time.time_ns() // 1_000_000)
        self._bury(partition, GONE, letter, done)

    def _bury(self, partition: int, kind: str, letter: Letter, done: Callable[[], None]) -> None:
        self._observer.dead_letter(kind)
        item = Item(letter.key, letter.value, letter.headers, lambda _: done())
        self._outbox.send(self._plan.dlq(self._plan.prompts), partition, item)

    def lost_ends(self, action: EndStreams, done: Callable[[], None]) -> None:
        """Write the ends of streams that get none from their publisher; `done` when all are acknowledged."""
        ends = list(lost_ends(self._plan, action, time.time_ns() // 1000))
        if not ends:
            done()
            return
        left = len(ends)

        def ended(_: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        logger.warning("%d streams end as lost: %s", left, action.detail)
        for topic, partition, message in ends:
            item = Item(message.request_id.encode(), self._codec.encode(message), done=ended)
            self._outbox.send(topic, partition, item)
