"""Dead letters of the topics that everybody reads and nobody owns: answers, commands, verdicts, labels and the like.

A member of a consumer group of its own reads them, so that each partition has one reader, and writes what cannot be
read to the dead-letter topics. Letters and the offsets behind them are one transaction: a rebalance, a crash or an
owner that was frozen can neither lose a letter nor write it twice. Where everything can be read, which is always, there
is no transaction; how far the group has come is then committed now and then, to have less to read again.

Nobody waits for it. Whatever Kafka says, it begins anew from what is committed, and the worker goes on meanwhile. What
is committed may be unknown because of a transaction of its own that a killed broker forgot: it ends that first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine_worker.unreadable import Judge
from undercurrent.errors import CommitError, ProbingError, TransactionError, UnreachableError
from undercurrent.failpoints import failpoint
from undercurrent.kafka.aftermath import Aftermath, Logs
from undercurrent.kafka.events import PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.subscriber import GroupSubscriber, RebalanceHandler
from undercurrent.kafka.transactions import Offsets, TransactionalWriter, until_decided
from undercurrent.protocol.dead_letters import Letter
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

# Few at a time, and a rest behind each full batch: decoding holds the interpreter, which aborts need too.
_BATCH = 50
_WAIT_S = 0.5
_REST_S = 0.005
_COMMITTED_S = 1.0
_DECIDED_S = 30.0
_MOST_BYTES = 4 << 20
# Behind a letter that is being written, the group's position is unknown for a moment; behind a dead owner's, until the
# transaction has timed out. Only behind one that a broker forgot it stays so.
_UNKNOWN_S = 30.0


class _Found(NamedTuple):
    where: Partition
    letter: Letter


class Sweeper:
    """A thread that sweeps; see the module.

    Args:
        make_subscriber: makes the group member for a handler of rebalances, on the thread.
        make_writer: makes a transactional producer, of the same id each time.
        lookup: says where logs begin.
        logs: says where letters and offsets are written.
        judge: says what is wrong with a record.
        dead_letters: name of a topic's dead-letter topic.
        count: hears the topic of each letter.
        heartbeat: of the thread, which has its name.
        commit_s: how often it is committed how far this has come, where nothing was found.
        again_s: how long to wait before beginning anew.
    """

    def __init__(
        self,
        *,
        make_subscriber: Callable[[RebalanceHandler], GroupSubscriber],
        make_writer: Callable[[], TransactionalWriter],
        lookup: OffsetLookup,
        logs: Callable[[], Logs],
        judge: Judge,
        dead_letters: Callable[[str], str],
        count: Callable[[str], None],
        heartbeat: Heartbeat,
        commit_s: float = 5.0,
        again_s: float = 5.0,
    ) -> None:
        self.heartbeat = heartbeat
        self._make_subscriber = make_subscriber
        self._make_writer = make_writer
        self._lookup = lookup
        self._logs = logs
        self._judge = judge
        self._dead_letters = dead_letters
        self._count = count
        self._commit_s = commit_s
        self._again_s = again_s
        self._writer: TransactionalWriter | None = None
        self._aftermath = Aftermath(due=False)
        self._joined = False  # others may have the partitions that wait for what this one left
        self._settle_s = 0.0  # when that is tried, if it is due
        self._known_s = time.monotonic()  # when the group's position was known, or nobody asked for it
        self._taking: set[Partition] = set()
        self._read: dict[Partition, int] = {}  # up to where, of what has moved since it was committed
        self._found: list[_Found] = []
        self._plain = 0  # commits without a transaction that are not answered
        self._committed_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=heartbeat.name, daemon=True)

    def start(self) -> None:
        """Join the group."""
        self._thread.start()

    def stopping(self) -> None:
        """Begin to end; do not wait for it."""
        self._stop.set()

    def stop(self, timeout_s: float) -> None:
        """Leave the group, if that can be done in time: what is not committed is read again by others."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # On the thread, inside the client's calls.

    def on_assigned(self, partitions: list[Partition]) -> None:
        """Begin where the group has come to, outside the callback."""
        self._joined = True
        self._forget(partitions)
        self._taking.update(partitions)

    def on_revoked(self, partitions: list[Partition]) -> None:
        """Forget them: what is not committed is the next owner's."""
        self._forget(partitions)

    def on_lost(self, partitions: list[Partition]) -> None:
        """Forget them."""
        self._forget(partitions)

    # On the thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._make_subscriber(self) as subscriber:
                    while not self._stop.is_set():
                        self.heartbeat.beat()
                        self._turn(subscriber)
                    self._finish(subscriber)
            # The edge of this thread: the worker serves on, and what is not committed is read again.
            except Exception as exc:
                if not isinstance(exc, ProbingError):
                    logger.exception("sweeping failed")
                logger.error("sweeping begins anew: %s", exc)
                self._begin_anew()
                self._stop.wait(self._again_s)
        self._drop_writer()
        self.heartbeat.rest()

    def _turn(self, subscriber: GroupSubscriber) -> None:
        records = subscriber.poll_batch(_BATCH, _WAIT_S)
        self._plain -= len(subscriber.take_commit_results())
        for record in records:
            # Of one that waits for the group's position: what was fetched before is fetched again from there.
            if record.source not in self._taking:
                self._look(record)
            if sum(len(found.letter.value or b"") for found in self._found) > _MOST_BYTES:
                self._write(subscriber)
        self._see_problems(subscriber)
        if self._aftermath.due and self._joined and time.monotonic() >= self._settle_s:
            self._settle(subscriber)
        if self._found:
            self._write(subscriber)
        elif self._read and not self._plain and time.monotonic() - self._committed_s > self._commit_s:
            self._commit(subscriber)
        self._take(subscriber)
        if len(records) == _BATCH:
            self._stop.wait(_REST_S)

    def _look(self, record: Record) -> None:
        fault = self._judge.fault(record)
        self._read[record.source] = record.offset + 1
        if fault is not None:
            # Not why: that may repeat what the record says. The letter has it.
            logger.warning("%s, offset %d cannot be read: it goes to the dead letters", record.source, record.offset)
            letter = self._judge.letter(record, fault, time.time_ns() // 1_000_000)
            self._found.append(_Found(record.source, letter))

    def _see_problems(self, subscriber: GroupSubscriber) -> None:
        for event in subscriber.take_events():
            if event.problem is not PartitionProblem.OUT_OF_RANGE:
                raise UnreachableError(f"{event.partition}: {event.reason} [{event.code}]")
            logger.warning("%s: retention has taken records from offset %d on", event.partition, event.position)
            start = self._lookup.beginning([event.partition])[event.partition]
            subscriber.start(event.partition, start)

    def _take(self, subscriber: GroupSubscriber) -> None:
        """Start the partitions that were assigned, where the broker says how far the group has come."""
        if not self._taking:
            self._known_s = time.monotonic()
            return
        known = subscriber.committed(sorted(self._taking), _COMMITTED_S)
        if known.keys() >= self._taking:
            self._known_s = time.monotonic()
        elif time.monotonic() - self._known_s > _UNKNOWN_S:
            self._known_s = time.monotonic()
            waiting = ", ".join(map(str, sorted(self._taking - known.keys())))
            logger.warning(
                "%s of group %s: not known for %g s how far it has come", waiting, subscriber.group_id, _UNKNOWN_S
            )
        fresh = [where for where, (offset, _) in known.items() if offset is None]
        starts = self._lookup.beginning(fresh) if fresh else {}
        for where, (offset, _) in known.items():
            subscriber.start(where, starts[where] if offset is None else offset)
            self._taking.discard(where)

    def _write(self, subscriber: GroupSubscriber) -> None:
        """Write the letters and the offsets behind them, all or none."""
        # A commit that is under way may arrive behind the transaction, and take its offsets back.
        if self._plain:
            return
        found = self._found
        moved: Offsets = {where: (offset, None) for where, offset in self._read.items()}
        try:
            writer = self._open(subscriber)
            writer.begin()
            for where, letter in found:
                topic = self._dead_letters(where.topic)
                writer.produce(topic, letter.value, key=letter.key, partition=where.number, headers=letter.headers)
            metadata = subscriber.consumer_group_metadata()
            until_decided(lambda: writer.send_offsets(moved, metadata), _DECIDED_S)
            failpoint("letters_sent")
            until_decided(writer.commit, _DECIDED_S)
        except TransactionError as exc:
            logger.warning("letters are written again: %s", exc)
            self._drop_writer()
            # Whatever became of it: what is committed says where each partition goes on.
            ours = list(subscriber.assigned)
            self._forget(ours)
            self._taking.update(ours)
            return
        for item in found:
            self._count(item.where.topic)
        self._found, self._read = [], {}

    def _settle(self, subscriber: GroupSubscriber) -> None:
        """End what the last writer may have left: nobody knows how far the group has come before that."""
        self._settle_s = time.monotonic() + self._again_s
        try:
            self._open(subscriber)
        except TransactionError as exc:
            logger.warning("what the last writer of letters may have left is not ended yet: %s", exc)
            self._drop_writer()

    def _open(self, subscriber: GroupSubscriber) -> TransactionalWriter:
        """Return a writer whose id has nothing open in the logs."""
        if self._writer is None:
            self._writer = self._make_writer()
            self._writer.init(_DECIDED_S)
        if self._aftermath.due:
            # Before anything else is written: a log would end what is open in it as that ends.
            metadata = subscriber.consumer_group_metadata()
            self._aftermath.settle(self._writer, self._logs(), metadata, lambda call: until_decided(call, _DECIDED_S))
        return self._writer

    def _commit(self, subscriber: GroupSubscriber) -> None:
        self._committed_s = time.monotonic()
        try:
            sent = subscriber.commit({where: (offset, None) for where, offset in self._read.items()})
        except CommitError as exc:
            logger.info("%s", exc)
        else:
            self._plain += bool(sent)
            self._read = {}

    def _finish(self, subscriber: GroupSubscriber) -> None:
        """Commit how far this has come, so that the next owner has less to read."""
        if self._read and not self._found and not self._plain:
            self._commit(subscriber)
        deadline = time.monotonic() + _COMMITTED_S
        while self._plain and time.monotonic() < deadline:
            subscriber.poll_batch(1, 0.05)
            self._plain -= len(subscriber.take_commit_results())

    def _forget(self, partitions: Sequence[Partition]) -> None:
        gone = set(partitions)
        self._taking -= gone
        self._found = [found for found in self._found if found.where not in gone]
        for where in gone:
            self._read.pop(where, None)

    def _begin_anew(self) -> None:
        self._drop_writer()
        self._joined = False
        self._taking, self._read, self._found, self._plain = set(), {}, [], 0

    def _drop_writer(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._aftermath.due = True
            writer.close(_COMMITTED_S)
