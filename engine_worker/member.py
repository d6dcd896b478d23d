"""The Kafka thread: the one that polls the prompts, runs the rebalance callbacks, and commits.

It decides nothing but how a partition is taken: read the committed position, commit an epoch above it, and only when
that has succeeded hand out the partition's prompts. A revoked partition is kept until the loop says that nothing of it
is in flight any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine_worker.scan import Scan
from engine_worker.stall import StallClock
from undercurrent.errors import CommitError, EngineDeadError, UnreachableError
from undercurrent.failpoints import failpoint
from undercurrent.kafka.events import PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.subscriber import CommitResult, GroupSubscriber, RebalanceHandler
from undercurrent.protocol.epochs import LogRange, Position, begin, encode_metadata, taken_by_retention
from undercurrent.protocol.worker_partition import Finished
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

_BATCH = 64
_WAIT_S = 0.02
_COMMITTED_S = 1.0
_EPOCH_RETRY_S = 10.0


class MemberListener(Protocol):
    """Hears on the loop's thread what becomes of the member's partitions."""

    def on_acquired(self, partition: int, position: Position, past: Mapping[str, Finished]) -> None:
        """A partition's epoch is committed; it is paused until told otherwise. `past` are finished prompts by id."""

    def on_gone(self, partition: int, offsets: LogRange, done: Callable[[], None]) -> None:
        """Retention has taken prompts that nobody had finished; `done` when that is declared."""

    def on_prompts(self, epochs: Mapping[int, int], records: Sequence[Record]) -> None:
        """Prompts were fetched, under these epochs."""

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Partitions are asked back; `hand_over` lets each go."""

    def on_lost(self, partitions: Sequence[int]) -> None:
        """Partitions are gone."""

    def on_committed(self, partition: int, serial: int, ok: bool) -> None:
        """A commit was answered."""

    def on_failure(self, error: BaseException) -> None:
        """The member cannot go on."""


@dataclass(slots=True)
class _Taking:
    """A partition on its way to being ours."""

    at_least: int
    position: Position | None = None
    sent_s: float = 0.0
    ok: bool = False
    scan: Scan | None = None
    undeclared: set[LogRange] | None = None


class Member:
    """A thread that is a member of the group of the prompts.

    Args:
        prompts: the prompts topic.
        generations: its generations topic.
        make_subscriber: makes the group member for a handler of rebalances, on the thread.
        lookup: says where logs begin and end.
        scan: looks for the finished prompts below an offset, in which a repeated id has to be found.
        post: runs a function on the loop's thread.
        listener: hears.
        heartbeat: of the thread.
        handover_s: how long a revoked partition is kept at most.
        loop: heartbeat of the loop that this thread works for.
        stall_s: when that has stood still for so long, the group is left: nothing would be done for its partitions.
    """

    def __init__(
        self,
        *,
        prompts: str,
        generations: str,
        make_subscriber: Callable[[RebalanceHandler], GroupSubscriber],
        lookup: OffsetLookup,
        scan: Callable[[Partition, int], Scan],
        post: Callable[[Callable[[], None]], None],
        listener: MemberListener,
        heartbeat: Heartbeat,
        handover_s: float,
        loop: Heartbeat,
        stall_s: float,
    ) -> None:
        self.heartbeat = heartbeat
        self._prompts = prompts
        self._generations = generations
        self._make_subscriber = make_subscriber
        self._lookup = lookup
        self._scan = scan
        self._post = post
        self._listener = listener
        self._patience_s = handover_s + 2.0
        self._loop = loop
        self._stall = StallClock(stall_s, time.monotonic())
        self._orders: queue.SimpleQueue[Callable[[GroupSubscriber], None]] = queue.SimpleQueue()
        self._taking: dict[int, _Taking] = {}
        self._epochs: dict[int, int] = {}
        self._last_epochs: dict[int, int] = {}
        self._commits: deque[tuple[Partition, int, int]] = deque()
        self._kept: set[int] = set()
        self._subscriber: GroupSubscriber | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)

    # From the loop's thread.

    def start(self) -> None:
        """Join the group."""
        self._thread.start()

    def commit(self, partition: int, offset: int, metadata: str, serial: int) -> None:
        """Commit a position, if the partition is still ours then."""
        self._orders.put(lambda subscriber: self._commit(subscriber, partition, offset, metadata, serial))

    def pause(self, partition: int, paused: bool) -> None:
        """Deliver nothing of a partition, or deliver again."""

        def order(subscriber: GroupSubscriber) -> None:
            where = Partition(self._prompts, partition)
            if partition in self._epochs:
                subscriber.pause(where) if paused else subscriber.resume(where)

        self._orders.put(order)

    def reacquire(self, partition: int, at_least: int) -> None:
        """Take a partition's epoch anew."""

        def order(subscriber: GroupSubscriber) -> None:
            where = Partition(self._prompts, partition)
            self._epochs.pop(partition, None)
            if subscriber.pause(where):
                self._taking[partition] = _Taking(at_least)

        self._orders.put(order)

    def hand_over(self, partition: int) -> None:
        """Let a revoked partition go."""
        self._orders.put(lambda _: self._kept.discard(partition))

    def stop(self, timeout_s: float) -> None:
        """Carry out what was ordered, wait for commits under way, and leave the group."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # On the thread, inside the client's calls.

    def on_assigned(self, partitions: list[Partition]) -> None:
        """Take note; the epoch is committed outside the callback."""
        self._taking.update({where.number: _Taking(1) for where in partitions})

    def on_revoked(self, partitions: list[Partition]) -> None:
        """Keep the partitions until the loop has let them go, or its time is over."""
        failpoint("revoke")
        numbers = self._forget(partitions)
        subscriber = self._subscriber
        if subscriber is None or not numbers or self._stop.is_set():
            return
        self._kept = set(numbers)
        self._post(lambda: self._listener.on_revoked(numbers))
        deadline = time.monotonic() + self._patience_s
        while self._kept and time.monotonic() < deadline and not self._stop.is_set():
            self._carry_out(subscriber, deadline - time.monotonic())
        if self._kept:
            logger.warning("partitions %s go while requests of them are in flight", sorted(self._kept))
            late = sorted(self._kept)
            self._post(lambda: self._listener.on_lost(late))

    def on_lost(self, partitions: list[Partition]) -> None:
        """Tell the loop at once."""
        numbers = self._forget(partitions)
        logger.warning("lost partitions %s", numbers)
        self._post(lambda: self._listener.on_lost(numbers))

    # On the thread.

    def _run(self) -> None:
        try:
            self._subscriber = self._make_subscriber(self)
            with self._subscriber as subscriber:
                while not self._stop.is_set():
                    self.heartbeat.beat()
                    self._watch_loop()
                    self._turn(subscriber)
                self._finish(subscriber)
        except BaseException as exc:  # the loop's thread ends the worker
            failure = exc
            self._post(lambda: self._listener.on_failure(failure))
        finally:
            self.heartbeat.rest()

    def _watch_loop(self) -> None:
        beat_s = self._loop.last_s
        if self._stall.stalled(beat_s, time.monotonic(), busy=beat_s is not None):
            # Nobody would answer what a revocation asks for.
            self._stop.set()
            raise EngineDeadError(f"the loop has stood still for {self._stall.limit_s:g} s; the group is left")

    def _turn(self, subscriber: GroupSubscriber) -> None:
        self._carry_out(subscriber, 0.0)
        records = subscriber.poll_batch(_BATCH, _WAIT_S)
        if records:
            epochs = dict(self._epochs)
            self._post(lambda: self._listener.on_prompts(epochs, records))
        for result in subscriber.take_commit_results():
            self._committed(result)
        for event in subscriber.take_events():
            if event.problem is not PartitionProblem.OUT_OF_RANGE:
                raise UnreachableError(f"{event.partition}: {event.reason} [{event.code}]")
            # Retention has taken prompts that nobody had run yet: that is declared, and what is left begins anew.
            logger.error("%s: offset %d is out of range", event.partition, event.position)
            self._drop([event.partition.number])
            self._taking[event.partition.number] = _Taking(1)
        self._take(subscriber)

    def _carry_out(self, subscriber: GroupSubscriber, wait_s: float) -> None:
        """Do what the loop has ordered; wait for the first order."""
        try:
            self._orders.get(timeout=min(wait_s, 0.1))(subscriber) if wait_s > 0 else None
            while True:
                self._orders.get_nowait()(subscriber)
        except queue.Empty:
            return

    def _take(self, subscriber: GroupSubscriber) -> None:
        """Bring partitions that were assigned one step further."""
        for number, taking in list(self._taking.items()):
            if taking.ok and taking.position is not None:
                self._look_back(subscriber, number, taking, taking.position)
            elif taking.undeclared:
                continue  # the commit would hide that they ever were
            elif taking.position is None or time.monotonic() - taking.sent_s > _EPOCH_RETRY_S:
                self._commit_epoch(subscriber, number, taking)

    def _commit_epoch(self, subscriber: GroupSubscriber, number: int, taking: _Taking) -> None:
        where, generations = Partition(self._prompts, number), Partition(self._generations, number)
        committed = subscriber.committed([where], _COMMITTED_S).get(where)
        if committed is None:
            return
        try:
            starts = self._lookup.beginning([where, generations])
            ends = self._lookup.end([where, generations])
        except UnreachableError as exc:
            logger.warning("%s: asking again: %s", where, exc)
            return
        offset, metadata = committed
        known = None if offset is None else (offset, metadata or "")
        prompts = LogRange(starts[where], ends[where])
        if taking.undeclared is None and self._declare(number, taking, taken_by_retention(known, prompts)):
            return
        beginning = begin(
            known,
            prompts=prompts,
            generations=LogRange(starts[generations], ends[generations]),
            unix_s=int(time.time()),
            at_least=max(taking.at_least, self._last_epochs.get(number, 0) + 1),
        )
        if beginning.reset:
            logger.warning("%s: offset %d carries no metadata of ours", where, beginning.position.offset)
        taking.position, taking.sent_s = beginning.position, time.monotonic()
        self._last_epochs[number] = beginning.position.epoch
        # No two epochs of a partition are equal here, so an answer to an earlier taking's commit is not taken for ours.
        serial = -beginning.position.epoch
        self._commit(subscriber, number, beginning.position.offset, encode_metadata(beginning.position), serial)

    def _declare(self, number: int, taking: _Taking, gone: Sequence[LogRange]) -> bool:
        """Have it declared which prompts retention has taken; return whether there are any."""
        undeclared = taking.undeclared = set(gone)
        for offsets in gone:
            logger.error(
                "partition %d: prompts %d to %d are gone before they ran", number, offsets.start, offsets.end - 1
            )

            def declared(_: GroupSubscriber, offsets: LogRange = offsets) -> None:
                undeclared.discard(offsets)

            def done(order: Callable[[GroupSubscriber], None] = declared) -> None:
                self._orders.put(order)

            self._post(partial(self._listener.on_gone, number, offsets, done))
        return bool(gone)

    def _look_back(self, subscriber: GroupSubscriber, number: int, taking: _Taking, position: Position) -> None:
        where = Partition(self._prompts, number)
        try:
            if taking.scan is None:
                taking.scan = self._scan(where, position.offset)
            past = next(taking.scan)
        except UnreachableError as exc:
            taking.scan = None
            logger.warning("%s: looking for finished prompts again: %s", where, exc)
            return
        if past is None:
            return
        del self._taking[number]
        self._epochs[number] = position.epoch
        subscriber.pause(where)
        subscriber.start(where, position.offset)
        logger.info("took partition %d at offset %d, epoch %d", number, position.offset, position.epoch)
        self._post(lambda: self._listener.on_acquired(number, position, past))

    def _commit(self, subscriber: GroupSubscriber, number: int, offset: int, metadata: str, serial: int) -> None:
        where = Partition(self._prompts, number)
        try:
            sent = subscriber.commit({where: (offset, metadata)})
        except CommitError as exc:
            logger.warning("%s", exc)
            sent = {}
        if sent:
            self._commits.append((where, offset, serial))
        else:
            self._answer(number, serial, False)

    def _committed(self, result: CommitResult) -> None:
        if result.error is not None:
            logger.warning("commit of %s: %s", result.offsets, result.error)
        for where, offset in result.offsets.items():
            match = next((item for item in self._commits if item[:2] == (where, offset)), None)
            if match is not None:
                self._commits.remove(match)
                self._answer(where.number, match[2], result.error is None)

    def _answer(self, number: int, serial: int, ok: bool) -> None:
        if serial >= 0:
            self._post(lambda: self._listener.on_committed(number, serial, ok))
            return
        taking = self._taking.get(number)
        if taking is not None and taking.position is not None and taking.position.epoch == -serial:
            taking.ok = ok
            if not ok:
                # Read the committed position again: somebody else may have taken it in between.
                taking.position = None

    def _finish(self, subscriber: GroupSubscriber) -> None:
        """Carry out the last orders and wait for the answers of commits."""
        self._carry_out(subscriber, 0.0)
        deadline = time.monotonic() + 5.0
        while self._commits and time.monotonic() < deadline:
            subscriber.poll_batch(1, 0.05)
            for result in subscriber.take_commit_results():
                self._committed(result)

    def _drop(self, numbers: Iterable[int]) -> None:
        gone = list(numbers)
        self._forget([Partition(self._prompts, number) for number in gone])
        self._post(lambda: self._listener.on_lost(gone))

    def _forget(self, partitions: Sequence[Partition]) -> list[int]:
        numbers = [where.number for where in partitions]
        for number in numbers:
            self._taking.pop(number, None)
            self._epochs.pop(number, None)
        return numbers
