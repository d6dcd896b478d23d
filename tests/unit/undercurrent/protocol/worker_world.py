"""A small world for engine workers: logs, a broker that fences members and not owners, engines, and a plain oracle.

Every action of a core is queued and carried out alone, so that a worker can be killed between any two. What a worker
publishes lies in its producer's queue until it is delivered, which a zombie's may be much later.
"""

from __future__ import annotations

from collections import defaultdict

from tests.unit.undercurrent.protocol.worker_oracle import PARTITIONS, Logs
from tests.unit.undercurrent.protocol.worker_process import LIMITS, EngineRun, Worker
from undercurrent.protocol.epochs import Beginning, LogRange, begin, encode_metadata
from undercurrent.protocol.messages import (
    CommandKind,
    CommandSource,
    ControlCommand,
)
from undercurrent.protocol.worker import WorkerCore
from undercurrent.protocol.worker_partition import Finished
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Acknowledge,
    Action,
    Commit,
    DeadLetter,
    Defect,
    EndStreams,
    HandedOver,
    Now,
    Prompt,
    Publish,
    Purge,
    Reacquire,
    ReadControl,
    RunKey,
    Start,
    Stopped,
    StreamKey,
    Tail,
    Untail,
)
from undercurrent.topics import partition_of


class World(Logs):
    """Logs, group and workers."""

    def __init__(self) -> None:
        super().__init__()
        self.mono_s = 100.0
        self.committed: dict[int, tuple[int, str]] = {}
        self.owner: dict[int, int | None] = dict.fromkeys(range(PARTITIONS))
        self.moving: dict[int, int] = {}
        self.workers: dict[int, Worker] = {}
        self.starts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.lost_ends: list[EndStreams] = []
        self._next = 0

    @property
    def now(self) -> Now:
        return Now(self.mono_s, int(self.mono_s * 1e6))

    # What a test does to it.

    def stop(self, worker: Worker) -> None:
        """As SIGTERM."""
        worker.stopping = True
        self._do(worker, worker.core.stop(self.now))

    def spawn(self) -> Worker:
        self._next += 1
        core = WorkerCore(f"engine-{self._next % 2}", self._next * 10, PARTITIONS, LIMITS)
        worker = Worker(self._next, core)
        self.workers[worker.number] = worker
        for _ in range(len(self.control) + len(self.acks)):
            self.read_control(worker)
            self.read_acks(worker)
        return worker

    def send(self, request_id: str, **fields: object) -> tuple[int, int]:
        partition = partition_of(request_id, PARTITIONS)
        log = self.prompts[partition]
        prompt = Prompt(request_id=request_id, offset=len(log), content_hash=b"h", points=("p",), **fields)  # type: ignore[arg-type]
        log.append(prompt)
        return partition, prompt.offset

    def send_unreadable(self, partition: int) -> None:
        self.prompts[partition].append(Defect(kind="undecodable", error="no request id"))

    def order(self, request_id: str, attempt: int | None, index: int | None = None) -> None:
        there = self.prompts[partition_of(request_id, PARTITIONS)]
        if request_id not in {prompt.request_id for prompt in there if isinstance(prompt, Prompt)}:
            self.premature.add(f"c{len(self.control)}")
        self.control.append(
            ControlCommand(
                command_id=f"c{len(self.control)}",
                kind=CommandKind.ABORT,
                request_id=request_id,
                attempt=attempt,
                index=index,
                source=CommandSource.OPERATOR if attempt is None else CommandSource.PROBE,
                issued_at_us=0,
            )
        )

    def kill(self, worker: Worker) -> None:
        """As kill -9: what was not carried out never will be, nor what lay in the producer's queue."""
        del self.workers[worker.number]
        worker.dead = True
        for lost in (worker.todo, worker.queue, worker.tails, worker.view, worker.engine):
            lost.clear()
        for partition, owner in self.owner.items():
            if owner == worker.number:
                self.owner[partition] = None

    def expel(self, worker: Worker) -> None:
        """The broker gives its partitions away; the worker does not know yet, and goes on."""
        worker.member = False
        for partition, owner in self.owner.items():
            if owner == worker.number:
                self.owner[partition] = None

    def learn_loss(self, worker: Worker) -> None:
        """The worker hears that it was expelled, and joins again."""
        gone, worker.view = sorted(worker.view), set()
        worker.member = True
        self._do(worker, worker.core.lost(gone, self.now))

    def assign(self, partition: int, worker: Worker) -> None:
        """Give a partition to a member: at once when it is free, else by asking its owner for it."""
        owner = self.owner[partition]
        if owner is None:
            self._hand(partition, worker)
        elif owner != worker.number and partition not in self.moving:
            self.moving[partition] = worker.number
            old = self.workers[owner]
            self._do(old, old.core.revoked([partition], self.now))

    def steal(self, partition: int, worker: Worker) -> None:
        """Give an owned partition away while its owner, still a member, does not know: it may even commit."""
        self.moving.pop(partition, None)
        self._hand(partition, worker)

    def learn_steal(self, worker: Worker) -> None:
        gone = sorted(p for p in worker.view if self.owner[p] != worker.number)
        worker.view -= set(gone)
        self._do(worker, worker.core.lost(gone, self.now))

    def _hand(self, partition: int, worker: Worker) -> None:
        self.owner[partition] = worker.number
        worker.view.add(partition)
        self._acquire(worker, partition, 1)

    def _acquire(self, worker: Worker, partition: int, at_least: int) -> None:
        if partition not in worker.view:
            return
        start: Beginning = begin(
            self.committed.get(partition),
            prompts=LogRange(0, len(self.prompts[partition])),
            generations=LogRange(0, len(self.log[partition])),
            unix_s=1_000_000,
            at_least=max(at_least, worker.epochs.get(partition, 0) + 1),
        )
        if not worker.member:
            return
        position = start.position
        self.committed[partition] = (position.offset, encode_metadata(position))
        worker.epochs[partition] = position.epoch
        worker.fetch[partition] = position.offset
        past = {
            prompt.request_id: Finished(prompt.offset, prompt.content_hash)
            for prompt in reversed(self.prompts[partition][: position.offset])
            if isinstance(prompt, Prompt)
        }
        self._do(worker, worker.core.acquired(partition, position, self.now, past))

    # What happens by itself, one thing at a time.

    def _do(self, worker: Worker, actions: list[Action]) -> None:
        worker.todo += [] if worker.dead else actions

    def act(self, worker: Worker) -> bool:  # noqa: C901 - one case per action
        """Carry out one action."""
        if not worker.todo:
            return False
        action = worker.todo.pop(0)
        match action:
            case Publish():
                worker.queue.append(action)
            case Purge(partition=partition):
                # The first of them may be with the client already.
                kept = [record for record in worker.queue[1:] if record.partition != partition]
                worker.queue[1:] = kept
            case Start(partition=partition, key=key, prompt=prompt):
                self.check_start(worker.core.incarnation, key)
                self._check_alone(worker, partition, key)
                self.starts[key.request_id].append((key.attempt, worker.core.incarnation))
                if prompt.request_id.startswith("poison"):
                    self.kill(worker)
                elif prompt.defect is None and prompt.request_id.startswith("bad"):
                    self._do(worker, worker.core.rejected(key, Defect(kind="bad_request", error="too long"), self.now))
                else:
                    worker.engine[key] = EngineRun(prompt, set(range(prompt.n)))
            case AbortEngine(key=key, index=index):
                if key in worker.engine:
                    run = worker.engine[key]
                    run.aborted |= set(range(run.prompt.n)) if index is None else {index}
            case EndStreams():
                self.lost_ends.append(action)
                self._do(worker, worker.core.streams_lost(action, self.now))
            case DeadLetter(partition=partition, offset=offset):
                self.dead_letters.add((partition, offset))
                self._do(worker, worker.core.dead_lettered(partition, offset, self.now))
            case Acknowledge(ack=ack):
                self.acks.append(ack)
                self._do(worker, worker.core.ack_delivered(ack.command_id, self.now))
            case Commit():
                self._commit(worker, action)
            case Tail(partition=partition, epoch=epoch, offset=offset):
                worker.tails[partition] = epoch, offset, len(self.log[partition])
            case Untail(partition=partition):
                worker.tails.pop(partition, None)
            case Reacquire(partition=partition, at_least=at_least):
                self._acquire(worker, partition, at_least)
            case HandedOver(partition=partition):
                asked = partition in self.moving and self.owner[partition] == worker.number
                if asked and partition not in worker.core.paused():
                    target = self.workers.get(self.moving.pop(partition))
                    worker.view.discard(partition)
                    self.owner[partition] = None
                    if target is not None and target.member:
                        self._hand(partition, target)
            case ReadControl():
                worker.control_until = len(self.control)
                self._reach_control_end(worker)
            case Stopped():
                assert worker.stopping
        return True

    def _check_alone(self, worker: Worker, partition: int, key: RunKey) -> None:
        """A request that two have died of runs in an engine of its own."""
        inside = {key: partition} | {
            other: partition_of(other.request_id, PARTITIONS)
            for other, run in worker.engine.items()
            if run.children - run.aborted
        }
        if len(inside) > 1:
            for other, number in inside.items():
                assert self.deaths(number, *other, worker.core.incarnation) < 2, f"{other} is not alone"

    def _commit(self, worker: Worker, commit: Commit) -> None:
        ok = worker.member and commit.partition in worker.view
        if ok:
            self.committed[commit.partition] = (commit.offset, commit.metadata)
            self.check_commit(commit)
        self._do(worker, worker.core.committed(commit.partition, commit.serial, ok, self.now))

    def deliver(self, worker: Worker) -> bool:
        """Append the oldest record of its producer's queue to the log."""
        if not worker.queue:
            return False
        record = worker.queue.pop(0)
        self.log[record.partition].append(record.message)
        return True

    def read(self, worker: Worker) -> bool:
        """Let it read one record of each generations partition that it tails."""
        moved = False
        for partition, (epoch, position, end) in list(worker.tails.items()):
            if position < len(self.log[partition]):
                worker.tails[partition] = epoch, position + 1, end
                message = self.log[partition][position]
                self._do(worker, worker.core.generation(partition, epoch, position, message, self.now))
                moved = True
            if worker.tails[partition][1] >= end:
                self._do(worker, worker.core.caught_up(partition, epoch, self.now))
        return moved

    def poll(self, worker: Worker) -> bool:
        """Let it fetch one prompt of each partition that it believes to own."""
        moved = False
        paused = worker.core.paused()
        for partition in sorted(worker.view):
            if paused.get(partition, "not acquired") is not None:
                continue
            position = worker.fetch[partition]
            if position < len(self.prompts[partition]):
                worker.fetch[partition] = position + 1
                prompt, epoch = self.prompts[partition][position], worker.epochs[partition]
                if isinstance(prompt, Defect):
                    actions = worker.core.unreadable(partition, epoch, position, None, prompt, self.now)
                else:
                    actions = worker.core.prompt(partition, epoch, prompt, self.now)
                self._do(worker, actions)
                moved = True
        return moved

    def generate(self, worker: Worker) -> bool:
        """One engine step: running requests get a token, or end at their third or when aborted."""
        moved = bool(worker.engine)
        for key, run in list(worker.engine.items()):
            run.steps += 1
            for child in sorted(run.children):
                aborted = child in run.aborted
                reason = "abort" if aborted else "stop" if run.steps > 2 + child else None
                self._do(worker, worker.core.delta(key, child, run.steps - aborted, reason, self.now))
                if reason:
                    run.children.discard(child)
                    worker.ended += [(key, StreamKey(child, point)) for point in run.prompt.points]
            if not run.children:
                del worker.engine[key]
        return moved

    def end_streams(self, worker: Worker) -> bool:
        if not worker.ended:
            return False
        key, stream = worker.ended.pop(0)
        self._do(worker, worker.core.streams_ended(key, [stream], self.now))
        return True

    def read_control(self, worker: Worker) -> bool:
        moved = worker.control < len(self.control)
        if moved:
            worker.control += 1
            self._do(worker, worker.core.command(self.control[worker.control - 1], self.now))
        self._reach_control_end(worker)
        return moved

    def _reach_control_end(self, worker: Worker) -> None:
        if worker.control_until is not None and worker.control >= worker.control_until:
            worker.control_until = None
            self._do(worker, worker.core.control_at_end(self.now))

    def read_acks(self, worker: Worker) -> bool:
        moved = worker.acks < len(self.acks)
        if moved:
            worker.acks += 1
            worker.core.control_ack(self.acks[worker.acks - 1], self.now)
        return moved

    def tick(self, worker: Worker) -> None:
        self._do(worker, worker.core.tick(self.now))
        ends = {partition: len(self.prompts[partition]) for partition in worker.view}
        self._do(worker, worker.core.prompts_end(ends, self.now.wall_us, self.now))

    def settle(self, rounds: int = 2000) -> None:
        """Let everything go on without further harm until nothing is left to do."""
        for worker in list(self.workers.values()):
            if not worker.member:
                self.learn_loss(worker)
            self.learn_steal(worker)
        for number in range(rounds):
            self.mono_s += 0.4
            live = [w for w in self.workers.values() if not w.stopping] or [self.spawn()]
            for partition, owner in self.owner.items():
                if owner is None or owner not in self.workers or self.workers[owner].stopping:
                    self.owner[partition] = None
                    self.assign(partition, live[(partition + number) % len(live)])
            moved = False
            for worker in live:
                for step in (self.read_control, self.read_acks, self.poll, self.generate, self.end_streams):
                    moved |= step(worker)
                while self.act(worker) or self.deliver(worker):
                    moved = True
                moved |= self.read(worker)
                self.tick(worker)
            if not moved and number > 20 and all(not w.todo and not w.core.unsettled for w in live):
                return
        raise AssertionError(f"not settled: {[(w.core.unsettled, w.core.waiting, w.core.paused()) for w in live]}")
