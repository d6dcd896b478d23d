"""Engine workers crashed after every action, against a plain oracle."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.unit.undercurrent.protocol.worker_oracle import PARTITIONS
from tests.unit.undercurrent.protocol.worker_process import Worker
from tests.unit.undercurrent.protocol.worker_world import World
from undercurrent.protocol.worker_types import Defect

pick = st.integers(0, 1 << 16)


class WorkerMachine(RuleBasedStateMachine):
    """Several workers, all the harm that the protocol names, and at the end exactly one valid final for each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.spawn()
        self.names = 0

    def worker(self, number: int) -> Worker:
        workers = sorted(self.world.workers.values(), key=lambda w: w.number)
        return workers[number % len(workers)]

    @rule(
        kind=st.sampled_from(["plain"] * 6 + ["two", "bad", "defect", "again", "unreadable", "late", "poison"]),
        number=pick,
    )
    def send(self, kind: str, number: int) -> None:
        world = self.world
        self.names += 1
        if kind == "unreadable":
            world.send_unreadable(number % PARTITIONS)
        elif kind == "again" and self.names > 1:
            world.send(f"r{number % self.names}")
        elif kind in ("bad", "poison"):
            world.send(f"{kind}{self.names}")
        elif kind == "defect":
            world.send(f"d{self.names}", defect=Defect(kind="bad_request", error="unknown point"))
        elif kind == "late":
            world.send(f"l{self.names}", deadline_us=world.now.wall_us + 1)
        else:
            world.send(f"r{self.names}", n=2 if kind == "two" else 1)

    @precondition(lambda self: len(self.world.workers) < 3)
    @rule()
    def spawn(self) -> None:
        self.world.spawn()

    @precondition(lambda self: self.world.workers)
    @rule(number=pick)
    def kill(self, number: int) -> None:
        self.world.kill(self.worker(number))

    @precondition(lambda self: self.world.workers)
    @rule(number=pick, partition=st.integers(0, PARTITIONS - 1))
    def assign(self, number: int, partition: int) -> None:
        worker = self.worker(number)
        if worker.member and not worker.stopping:
            self.world.assign(partition, worker)

    @precondition(lambda self: self.world.workers)
    @rule(number=pick, partition=st.integers(0, PARTITIONS - 1))
    def steal(self, number: int, partition: int) -> None:
        worker = self.worker(number)
        if worker.member and not worker.stopping and self.world.owner[partition] not in (None, worker.number):
            self.world.steal(partition, worker)

    @precondition(lambda self: self.world.workers)
    @rule(number=pick)
    def expel(self, number: int) -> None:
        self.world.expel(self.worker(number))

    @precondition(lambda self: self.world.workers)
    @rule(number=pick)
    def learn(self, number: int) -> None:
        worker = self.worker(number)
        self.world.learn_steal(worker) if worker.member else self.world.learn_loss(worker)

    @precondition(lambda self: self.world.workers)
    @rule(number=pick)
    def stop(self, number: int) -> None:
        self.world.stop(self.worker(number))

    @rule(number=pick, attempt=st.sampled_from([None, None, 1, 2, 3]), index=st.sampled_from([None, None, 0, 1, 2]))
    def order(self, number: int, attempt: int | None, index: int | None) -> None:
        if self.names:
            self.world.order(f"r{1 + number % self.names}", attempt, index)

    @precondition(lambda self: self.world.workers)
    @rule(number=pick, steps=st.integers(1, 6))
    def act(self, number: int, steps: int) -> None:
        worker = self.worker(number)
        for _ in range(steps):
            self.world.act(worker)

    @precondition(lambda self: self.world.workers)
    @rule(number=pick, whole=st.booleans())
    def turn(self, number: int, whole: bool) -> None:
        """A worker gets some time, as if nothing was wrong."""
        world, worker = self.world, self.worker(number)
        for step in (world.poll, world.deliver, world.read, world.generate, world.end_streams, world.read_control):
            step(worker)
            while whole and (world.act(worker) or world.deliver(worker)):
                pass

    @precondition(lambda self: self.world.workers)
    @rule(number=pick, what=st.sampled_from(["deliver", "read", "poll", "generate", "end_streams", "read_control"]))
    def step(self, number: int, what: str) -> None:
        getattr(self.world, what)(self.worker(number))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.world.mono_s += seconds
        for worker in self.world.workers.values():
            self.world.tick(worker)

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_end()


TestWorkerMachine = WorkerMachine.TestCase
TestWorkerMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


STEPS = ("deliver", "read", "poll", "generate", "end_streams", "read_control")
# What happens, and how often.
WEIGHTS = {
    "spawn": 2, "send": 13, "kill": 2, "assign": 8, "steal": 3, "expel": 2, "learn": 5, "stop": 1, "order": 4,
    "act": 20, "turn": 20, "step": 12, "wait": 8,
}  # fmt: skip


KINDS = ("plain", "plain", "plain", "two", "bad", "defect", "again", "unreadable", "late", "poison")


def _arguments(rng: random.Random, name: str, n: int) -> tuple[object, ...]:
    match name:
        case "spawn":
            return ()
        case "send":
            return rng.choice(KINDS), n
        case "assign" | "steal":
            return n, n % PARTITIONS
        case "order":
            return n, rng.choice([None, 1, 2]), rng.choice([None, None, 0, 1, 2])
        case "act":
            return n, 1 + n % 6
        case "turn":
            return n, n % 2 == 0
        case "step":
            return n, rng.choice(STEPS)
        case "wait":
            return (rng.choice([0.1, 0.5, 1.0, 2.0]),)
    return (n,)


@pytest.mark.parametrize("seed", range(40))
def test_long_random_runs_end_with_one_valid_final_each(seed: int) -> None:
    rng = random.Random(seed)
    machine = WorkerMachine()
    for _ in range(400):
        n = rng.randrange(1 << 16)
        name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if not machine.world.workers:
            name = "spawn"
        elif name == "spawn" and len(machine.world.workers) > 2:
            continue
        getattr(machine, name)(*_arguments(rng, name, n))
    machine.teardown()
