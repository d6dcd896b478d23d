"""The loop of one point: poll, decide, commit. Everything it decides is decided by `undercurrent.protocol.host`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Clock
from probe_consumers.decoding import incoming
from probe_consumers.metrics import HostMetrics
from probe_consumers.runner import BindingRunner
from probe_consumers.transactor import Transactor
from undercurrent.codec import Codec
from undercurrent.errors import UnreachableError
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action, Commit, Declare, Fetch, Read, SendAbort, Transaction
from undercurrent.protocol.host_position import Committed, StartFrom, resume_from
from undercurrent.protocol.messages import ProbeHeartbeat
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

# A loop that stood still for longer may have lost its partitions without knowing: it polls before it commits.
PAUSE_S = 1.5
STUCK_AFTER_S = 60.0
# The other partitions wait meanwhile, so a question is short at first; an unanswered one is asked again, longer.
_QUESTION_TIMEOUT_S = 0.1
_LONGEST_QUESTION_S = 1.0
_QUESTION_INTERVAL_S = 0.2
# How far the loop runs ahead of a transaction that is not written yet, and how long a revocation waits for it.
_AHEAD_S = 5.0
_REVOKE_WAIT_S = 2.0


class MakeSubscriber(Protocol):
    """Makes the group member of a loop."""

    def __call__(self, handler: PointHost) -> GroupSubscriber:
        """Return a subscriber that tells `handler` of rebalances; the loop opens and closes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a loop runs.

    Args:
        topic: activations topic of the point.
        verdicts: topic of verdicts.
        service: consumer group.
        fingerprint: of the probe set.
        start_from: where a new group begins.
        transaction_interval_s: time between transactions.
        batch_records: most records that are decided on at once.
    """

    topic: str
    verdicts: str
    service: str
    fingerprint: str
    start_from: StartFrom
    transaction_interval_s: float = 0.1
    batch_records: int = 500


class PointHost:
    """Runs the probes of one point as a member of its consumer group.

    Args:
        core: decides.
        runner: runs the probes; the core's.
        make_subscriber: makes the group member.
        transactor: writes transactions.
        aborts: writes abort commands.
        lookup: knows where logs begin and end.
        codec: decodes.
        clock: microseconds since the Unix epoch.
        metrics: counts.
        settings: how the loop runs.
        executor: runs one transaction at a time; a thread of its own when not given.
    """

    def __init__(
        self,
        *,
        core: ProbeHost,
        runner: BindingRunner,
        make_subscriber: MakeSubscriber,
        transactor: Transactor,
        aborts: AbortWriter,
        lookup: OffsetLookup,
        codec: Codec,
        clock: Clock,
        metrics: HostMetrics,
        settings: LoopSettings,
        executor: Executor | None = None,
    ) -> None:
        self.topic = settings.topic
        self.runner = runner
        self._core = core
        self._subscriber = make_subscriber(self)
        self._transactor = transactor
        self._aborts = aborts
        self._lookup = lookup
        self._codec = codec
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._fetching: set[int] = set()
        self._group_metadata: object | None = None
        self._next_transaction_s = 0.0
        self._next_question_s = 0.0
        self._question_timeout_s = _QUESTION_TIMEOUT_S
        # A transaction takes 20 ms, and a second where the cores are busy: an abort does not wait for it.
        self._writer = executor or ThreadPoolExecutor(1, thread_name_prefix="transactions")
        self._writing: Future[bool] | None = None
        self._written: Transaction | None = None
        self._writing_since_s = 0.0
        self._problems: list[PartitionEvent] = []
        self._seen_positions: dict[int, int] = {}
        self._last_appended_us: dict[int, int] = {}
        self.heartbeat = Heartbeat(settings.topic, STUCK_AFTER_S)
        self.joined = False

    # --- seen from other threads: copies of small facts, never the core's own state

    @property
    def emitted_up_to(self) -> dict[int, int]:
        """Per partition that flows, the first offset without outputs."""
        return self._seen_positions

    def age_s(self, partition: int) -> float:
        """Return how long ago the broker appended the last record that was read of a partition, seconds."""
        appended_us = self._last_appended_us.get(partition)
        return float("inf") if appended_us is None else max(0.0, (self._clock() - appended_us) / 1e6)

    @property
    def waiting(self) -> list[int]:
        """Partitions that are assigned and do not flow yet."""
        return sorted(set(self._fetching))

    # --- the loop

    def run(self, stop: threading.Event) -> None:
        """Run until told to stop; then finish what was read, commit it, and leave the group.

        Raises:
            UnreachableError: a client is beyond use.
            FencedError: another member has this one's slot.
        """
        self.heartbeat.beat()
        self._transactor.open()
        hello = ProbeHeartbeat(
            service=self._settings.service, member="", probes=(), partitions=(), sent_at_us=self._clock()
        )
        verdict_partitions = self._lookup.partitions(self._settings.verdicts)
        self._transactor.warm_up(hello, [where.number for where in verdict_partitions])
        self._aborts.open(hello)
        self._subscriber.open()
        try:
            while not stop.is_set():
                self.turn()
            self._transact()
        finally:
            self.heartbeat.rest()
            self._writer.shutdown()
            self._subscriber.close()
            self._transactor.close()
            self._aborts.close()

    def turn(self) -> None:
        """Do one round: poll, decide, and hand a transaction over when it is time."""
        self._settle()
        if self._writing is not None and time.monotonic() - self._writing_since_s > _AHEAD_S:
            wait([self._writing], _QUESTION_INTERVAL_S)
            self._report()
            return
        records = self._poll()
        self._problems += self._subscriber.take_events()
        if records:
            self._take(records)
        try:
            if time.monotonic() >= self._next_question_s:
                self._mend()
                self._fetch()
        except UnreachableError as exc:
            # Tried again soon; a client that is beyond use says so where it polls.
            logger.warning("%s", exc)
            self._next_question_s = time.monotonic() + _QUESTION_INTERVAL_S
        if self._writing is None and time.monotonic() >= self._next_transaction_s and self._core.dirty:
            self._hand_over()
            self._settle()
        self._report()

    def _poll(self) -> Sequence[Record]:
        began_s = time.monotonic()
        wait_s = 0.01 if self._fetching else max(0.0, min(0.1, self._next_transaction_s - began_s))
        if not self._core.dirty and not self._fetching:
            wait_s = 0.1
        records = self._subscriber.poll_batch(self._settings.batch_records, wait_s)
        metadata = self._subscriber.consumer_group_metadata()
        # The broker fences by the member's generation. Taken here, it is the one whose rebalances the callbacks have
        # told of, unless this thread was frozen in between: then the next poll has to tell first.
        self._group_metadata = metadata if time.monotonic() - began_s - wait_s < PAUSE_S else None
        return records

    def _take(self, records: Sequence[Record]) -> None:
        began_s = time.monotonic()
        batch = [incoming(self._codec, record) for record in records]
        self._act(self._core.records(batch, self._clock()))
        self._last_appended_us.update((item.partition, item.timestamp_us) for item in batch)
        self._metrics.batch(records, time.monotonic() - began_s)

    def _transact(self, *, needed: bool = False) -> bool:
        """Write all that is pending and wait for it; return whether it stands."""
        if not self._settle(patient=True):
            return False
        if self._group_metadata is None:
            if needed:
                self._act(self._core.failed())
            return False
        self._hand_over()
        return self._settle(patient=True)

    def _hand_over(self) -> None:
        """Give all that is pending to the transactions' thread; the loop goes on meanwhile."""
        if self._group_metadata is None:
            return
        now_s = time.monotonic()
        self._next_transaction_s = now_s + self._settings.transaction_interval_s
        transaction = self._core.transaction()
        if transaction.offsets or transaction.verdicts or transaction.dead_letters:
            self._written, self._writing_since_s = transaction, now_s
            self._writing = self._writer.submit(self._write, transaction, self._group_metadata)

    def _write(self, transaction: Transaction, group_metadata: object) -> bool:
        return self._deliver_aborts() and self._transactor.write(transaction, group_metadata)

    def _settle(self, *, patient: bool = False) -> bool:
        """Take note of a transaction that has ended; return False when one was not written.

        Args:
            patient: wait for its end.
        """
        writing, transaction = self._writing, self._written
        if writing is None or transaction is None or not (patient or writing.done()):
            return True
        written = writing.result()
        self._writing = self._written = None
        self._metrics.transaction(transaction, time.monotonic() - self._writing_since_s, written=written)
        if not written:
            self._act(self._core.failed())
        return written

    def _deliver_aborts(self) -> bool:
        try:
            self._aborts.flush()
        except UnreachableError as exc:
            logger.warning("%s", exc)
            return False
        return True

    # --- actions of the core

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fetch(partition=number):
                    self._fetching.add(number)
                    self._subscriber.pause((self.topic, number))
                case Declare(partition=number, declaration=item):
                    log = logger.warning if item.notice.is_loss else logger.info
                    log(
                        "%s[%d]: %s, offsets %d to %d",
                        self.topic,
                        number,
                        item.notice,
                        item.from_offset,
                        item.to_offset,
                    )
                    self._metrics.notice(item.notice)
                case Commit():
                    if not self._transact(needed=True):
                        return
                case Read(partition=number, offset=offset):
                    self._subscriber.start((self.topic, number), offset)
                    self._subscriber.resume((self.topic, number))
                case SendAbort(command=command):
                    self._aborts.send(command)
                    self._metrics.abort(command)

    def _fetch(self) -> None:
        """Ask for what is committed of new partitions; those that the broker does not know yet are asked for again."""
        if not self._fetching or self._group_metadata is None:
            return
        asked = [Partition(self.topic, number) for number in sorted(self._fetching)]
        answers = self._subscriber.committed(asked, self._question_timeout_s)
        if not answers:
            self._next_question_s = time.monotonic() + _QUESTION_INTERVAL_S
            self._question_timeout_s = min(_LONGEST_QUESTION_S, 2 * self._question_timeout_s)
            return
        self._question_timeout_s = _QUESTION_TIMEOUT_S
        starts, ends = self._lookup.beginning(answers), self._lookup.end(answers)
        for where, (offset, text) in answers.items():
            self._fetching.discard(where.number)
            committed = None if offset is None else Committed(offset=offset, metadata=text)
            resume = resume_from(
                committed, starts[where], ends[where], self._settings.fingerprint, self._settings.start_from
            )
            self._act(self._core.begin(where.number, resume))

    def _mend(self) -> None:
        while self._problems:
            self._problem(self._problems[0])
            self._problems.pop(0)

    def _problem(self, event: PartitionEvent) -> None:
        if event.problem is not PartitionProblem.OUT_OF_RANGE:
            logger.warning("%s: %s", event.partition, event.reason)
            self._metrics.problem(event.problem)
            return
        where = event.partition
        start, end = self._lookup.beginning([where])[where], self._lookup.end([where])[where]
        actions = self._core.out_of_range(where.number, start, end)
        if not actions and where.number in self._core.emitted_up_to:
            # In range by now; librdkafka stands still until it is told to go on.
            actions = [Read(where.number, max(start, event.position))]
        self._act(actions)

    # --- what the group says, inside `poll_batch` and `close`

    def on_assigned(self, partitions: list[Partition]) -> None:
        """Take partitions."""
        logger.info("%s: assigned %s", self.topic, _numbers(partitions))
        self.joined = True
        self._fetching.update(action.partition for action in self._core.assign(where.number for where in partitions))

    def on_revoked(self, partitions: list[Partition]) -> None:
        """Give partitions up. What no transaction holds is left to the next owner: it comes to the same outputs."""
        logger.info("%s: revoked %s", self.topic, _numbers(partitions))
        if self._writing is not None:
            # The next owner waits for it anyway, where its broker knows of it; not for long: the group waits for us.
            wait([self._writing], _REVOKE_WAIT_S)
        self._give_up(partitions)

    def on_lost(self, partitions: list[Partition]) -> None:
        """Give up partitions that are somebody else's already."""
        logger.warning("%s: lost %s", self.topic, _numbers(partitions))
        self._give_up(partitions)

    def _give_up(self, partitions: list[Partition]) -> None:
        numbers = [where.number for where in partitions]
        self._core.revoke(numbers)
        self._fetching.difference_update(numbers)

    def _report(self) -> None:
        self._seen_positions = self._core.emitted_up_to
        self._metrics.counts(self._core.take_counts())
        self._metrics.open_streams(self.runner.open_streams)
        self.heartbeat.beat()


def _numbers(partitions: Sequence[Partition]) -> str:
    return ", ".join(str(where.number) for where in partitions) or "nothing"
