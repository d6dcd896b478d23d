"""The loop of one point, or of several that are joined: poll, decide, commit.

Everything it decides is decided by `undercurrent.protocol.host`. Partitions are called by their lanes: of one topic
that is their number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from probe_consumers.aborts import AbortWriter
from probe_consumers.backlog import SLOW_S
from probe_consumers.bound import Clock
from probe_consumers.deciding import Deciding
from probe_consumers.drift import Seen
from probe_consumers.halves import Halves
from probe_consumers.intake import Intake
from probe_consumers.loop_settings import LoopSettings, MakeSubscriber
from probe_consumers.mending import Mending
from probe_consumers.metrics import HostMetrics
from probe_consumers.resuming import Ready, ResumeRules, Resuming, tell
from probe_consumers.rollout_log import Knows
from probe_consumers.runner import BindingRunner
from probe_consumers.states import ReadStates
from probe_consumers.transactor import Transactor
from probe_consumers.watchdog import Busy
from probe_consumers.writing import Writing
from undercurrent.codec import Codec
from undercurrent.errors import UnreachableError
from undercurrent.failpoints import failpoint
from undercurrent.kafka.aftermath import partitions_of
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action, Commit, Declare, Fetch, Read, SendAbort
from undercurrent.protocol.messages import ProbeHeartbeat
from undercurrent.protocol.stream_state import rollouts_of
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 60.0
# How far the loop runs ahead of a transaction that is not written yet; how long a revocation works, and waits for one.
AHEAD_S = 5.0
# How long it waits for that at a time. A rebalance needs several polls of every member, and all of them wait for one
# that does not poll.
_ATTEND_S = 0.2
# How long a poll lasts at least, without records, while a transaction is being written.
_WRITING_POLL_S = 0.02
_REVOKE_S = 3.0


class PointHost:
    """Runs the probes of one point, or those that join several, as a member of their consumer group.

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
        knows: waits until the rollouts below an offset are known; see `RolloutFollower.knows`.
        read_states: reads the states of long streams; None where none are kept.
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
        knows: Knows | None = None,
        read_states: ReadStates | None = None,
    ) -> None:
        self.inputs = settings.inputs
        self.name = settings.inputs.name
        self.runner = runner
        self._core = core
        self._subscriber = make_subscriber(self)
        self._intake = Intake(self.inputs, self._subscriber, settings.batch_records)
        self._transactor = transactor
        self._aborts = aborts
        self._lookup = lookup
        self._deciding = Deciding(core, codec, clock, lambda: aborts.clock_ahead_us, knows, self.name)
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._halves = Halves(self.inputs)
        self._next_transaction_s = 0.0
        self._writing = Writing(
            transactor,
            aborts,
            metrics,
            executor or ThreadPoolExecutor(1, thread_name_prefix="transactions"),
            Seen if runner.drift is None else runner.drift.take,
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="states")
        rules = ResumeRules(fingerprint=settings.fingerprint, start_from=settings.start_from, change=settings.change)
        self._resuming = Resuming(self.inputs, rules, lookup, read_states, self._reader)
        self._seen_positions: dict[int, int] = {}
        self._failed = False
        self._failures = 0
        self.states_ends: dict[int, int] = {}
        self.heartbeat = Heartbeat(self.name, STUCK_AFTER_S)
        self.busy = Busy()
        self._mending = Mending(core, lookup, self.inputs, metrics, self.busy, self._act)
        self.joined = False

    # --- seen from other threads: copies of small facts, never the core's own state

    @property
    def emitted_up_to(self) -> dict[int, int]:
        """Per partition that flows, the first offset without outputs."""
        return self._seen_positions

    def age_s(self, lane: int) -> float:
        """Return how long ago the broker appended the last record that was read of a lane, seconds."""
        return self._deciding.age_s(lane)

    @property
    def waiting(self) -> list[int]:
        """Partitions that are assigned and do not flow yet."""
        return self._resuming.waiting

    @property
    def torn(self) -> str:
        """What is wrong with how partitions that belong together are handed out, in words; empty where nothing is."""
        return self._halves.trouble

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
        others = partitions_of(self._lookup, self._transactor.other_topics)
        self._transactor.warm_up(hello, [where.number for where in verdict_partitions], list(others))
        self._aborts.open(hello)
        self._subscriber.open()
        try:
            while not stop.is_set():
                self.turn()
            self._transact()
        except BaseException:
            self._failed = True
            raise
        finally:
            self.heartbeat.rest()
            # What is still this member's is worked on and committed in `on_revoked`.
            self._subscriber.close()
            self._writing.close()
            self._reader.shutdown()
            self._transactor.close()
            self._aborts.close()

    def turn(self) -> None:
        """Do one round: poll, decide, and hand a transaction over when it is time."""
        self._settle()
        if self._writing.age_s > AHEAD_S:
            if not self._writing.wait(_ATTEND_S):
                self._attend()
            return
        self._poll()
        self._mending.take(self._subscriber.take_events())
        self._work()
        try:
            # What is committed is not known while a transaction is under way that may commit it: whoever goes on from
            # what was before says everything twice.
            if self._resuming.may_ask and not self._writing.under_way:
                self._mending.mend()
                if self._intake.metadata is not None:
                    self._begin(self._resuming.ask(self._subscriber.committed))
            self._begin(self._resuming.read())
        except UnreachableError as exc:
            # Tried again soon; a client that is beyond use says so where it polls.
            logger.warning("%s", exc)
            self._resuming.rest()
        if not self._writing.under_way and time.monotonic() >= self._next_transaction_s and self._has_to_write:
            self._hand_over()
            self._settle()
        self._report()

    @property
    def _has_to_write(self) -> bool:
        # Also without partitions: others may have got those that wait for what this one's last writer left.
        return self._core.dirty or (self._transactor.due and self.joined)

    def _poll(self) -> None:
        wait_s = 0.01 if self._resuming else max(0.0, min(0.1, self._next_transaction_s - time.monotonic()))
        if not self._core.dirty and not self._resuming:
            wait_s = 0.1
        if self._writing.under_way:
            # Nothing can be handed over before it has ended. A loop that only looked whether it has would take the
            # processor from the thread that writes it.
            wait_s = max(wait_s, _WRITING_POLL_S)
        self._intake.fetch(0.0 if self._intake.backlog else wait_s)

    def _attend(self) -> None:
        """Hear what the group says, and read nothing: a transaction takes long."""
        self._intake.holding.hold(self._core.emitted_up_to.keys())
        self._intake.fetch(0.0)
        self._mending.take(self._subscriber.take_events())
        self._report()

    def _work(self, limit_s: float = SLOW_S) -> None:
        """Work on what was fetched, for so long; where that is not enough, nothing more is fetched meanwhile."""
        backlog, holding, began_s = self._intake.backlog, self._intake.holding, time.monotonic()
        while backlog and time.monotonic() - began_s < limit_s:
            part = backlog.part(self._core.careful)
            careful = part[0].partition in self._core.careful
            if careful and not self._mark(part[0]):
                break
            backlog.take(len(part))
            self._take(part)
            if careful and not self._transact():
                break
        if backlog:
            holding.hold(self._core.emitted_up_to.keys())
        else:
            holding.release(self._resuming.waiting)
        holding.keep_back(self._core.ahead, self._core.emitted_up_to.keys())

    def _mark(self, record: Record) -> bool:
        """Commit that a record is about to be worked on; return False where that, or what came before, is not known."""
        self._core.take_in_hand(record.partition, record.offset)
        return self._transact() and record.partition in self._core.emitted_up_to

    def _take(self, records: Sequence[Record]) -> None:
        began_s = time.monotonic()
        first = records[0]
        with self.busy.at(f"{self.inputs.place(first.partition)} at offset {first.offset} and {len(records) - 1} more"):
            self._act(self._deciding.records(records))
        seconds = time.monotonic() - began_s
        self._intake.backlog.took(seconds)
        self._metrics.batch(records, seconds)

    def _transact(self, *, needed: bool = False) -> bool:
        """Write all that is pending and wait for it; return whether it stands."""
        if not self._settle(patient=True):
            return False
        if self._intake.metadata is None:
            if needed:
                self._act(self._core.failed())
            return False
        self._hand_over()
        return self._settle(patient=True)

    def _hand_over(self) -> None:
        """Give all that is pending to the transactions' thread; the loop goes on meanwhile."""
        if self._intake.metadata is None:
            return
        self._next_transaction_s = time.monotonic() + self._settings.transaction_interval_s
        self._core.states_end(self.states_ends)
        with self.busy.at(f"{self.name}: what its probes say, and their states"):
            transaction = self._core.transaction()
        self._writing.begin(transaction, self._intake.metadata)

    def _settle(self, *, patient: bool = False) -> bool:
        """Take note of a transaction that has ended; begin anew with everything when one was not written."""
        failures = self._failures
        while patient and not self._writing.wait(_ATTEND_S):
            if self._writing.age_s > AHEAD_S:
                self._attend()  # a revocation in there may settle it, and hand over another
        if not self._writing.settle():
            self._failures += 1
            self._act(self._core.failed())
        return self._failures == failures

    # --- actions of the core

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fetch(partition=lane):
                    self._resuming.add(lane)
                    self._intake.stand_still({lane})
                case Declare(partition=lane, declaration=item):
                    tell(self.inputs.place(lane), item)
                    self._metrics.notice(item.notice)
                case Commit():
                    if not self._transact(needed=True):
                        return
                case Read(partition=lane, offset=offset):
                    self._intake.read(lane, offset)
                case SendAbort(command=command):
                    self._aborts.send(command)
                    self._metrics.abort(command)

    def _begin(self, ready: Iterable[Ready]) -> None:
        """Let partitions flow, with one transaction before that for all that need one."""
        ready = list(ready)
        if not self._deciding.know_rollouts(rollouts_of(state.stream) for item in ready for state in item.states):
            for item in ready:
                self._resuming.add(item.partition)
            return
        with self.busy.at(f"{self.name}: taking up states"):
            actions = [
                action for item in ready for action in self._core.begin(item.partition, item.resume, item.states)
            ]
        commits = [action for action in actions if isinstance(action, Commit)][:1]
        reads = [action for action in actions if isinstance(action, Read)]
        said = [action for action in actions if not isinstance(action, Commit | Read)]
        self._act([*said, *commits, *reads])

    # --- what the group says, inside `poll_batch` and `close`

    def on_assigned(self, partitions: list[Partition]) -> None:
        """Take partitions."""
        lanes = set(map(self.inputs.lane, partitions))
        logger.info("%s: assigned %s", self.name, self.inputs.told(lanes))
        self.joined = True
        for action in self._core.assign(lanes):
            self._resuming.add(action.partition)

    def on_revoked(self, partitions: list[Partition]) -> None:
        """Work on what was fetched, commit, and give up; not for long: the next owner derives what is not written."""
        lanes = set(map(self.inputs.lane, partitions))
        logger.info("%s: revoked %s", self.name, self.inputs.told(lanes))
        failpoint("revoke")
        if not self._failed:
            # What is joined with them stands still from now on, too.
            ending = self.inputs.partners(lanes)
            until_s = time.monotonic() + _REVOKE_S
            for part in self._intake.backlog.parts_of(ending):
                if time.monotonic() > until_s or not self._core.careful.isdisjoint(ending):
                    break
                self._take(part)
            self._core.leave(ending)
            self._last_words()
        self._give_up(lanes)

    def _last_words(self) -> None:
        """Commit before partitions go, as far as the group can wait for it."""
        self._intake.refresh_metadata()
        for _ in range(2):
            if not self._writing.wait(_REVOKE_S) or not self._settle() or not self._core.dirty:
                return
            self._hand_over()

    def on_lost(self, partitions: list[Partition]) -> None:
        """Give up partitions that are somebody else's already."""
        lanes = set(map(self.inputs.lane, partitions))
        logger.warning("%s: lost %s", self.name, self.inputs.told(lanes))
        self._give_up(lanes)

    def _give_up(self, lanes: set[int]) -> None:
        self._core.revoke(lanes)
        ending = self.inputs.partners(lanes)
        self._resuming.drop(ending)
        self._intake.drop(ending)
        # Whatever is left of a number stays assigned, and goes on when its others come back.
        self._intake.stand_still(ending - lanes)

    def _report(self) -> None:
        self._seen_positions = self._core.emitted_up_to
        self._metrics.counts(self._core.take_counts())
        self._metrics.open_streams(self.runner.open_streams)
        if self.inputs.joined:
            self._halves.look(self._core.assigned)
        self.heartbeat.beat()
