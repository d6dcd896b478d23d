"""Faults that befall a ring while it works, one after the other or several at a time, chosen by a seed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.faults.ring_world import RingWorld
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.records import Partition
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.testing.brokers import Broker
from undercurrent.testing.cut_proxy import CutProxy
from undercurrent.testing.waiting import wait_until

# Longer than a session: who is frozen or cut off for so long has lost its partitions.
LONG_S = 4.5
SHORT_S = 1.0


class Storm:
    """Plays faults on a ring.

    Args:
        world: the ring.
        rng: chooses.
        broker: where it may be killed and frozen too.
        network: that some workers and hosts go through, where it may be cut.
    """

    def __init__(
        self,
        world: RingWorld,
        rng: random.Random,
        broker: Broker | None = None,
        network: CutProxy | None = None,
    ) -> None:
        self.world = world
        self.rng = rng
        self._broker = broker
        self._network = network

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return what may happen, by name."""
        found = {
            "worker killed": lambda: self._worker().kill(),
            "worker told to end": lambda: self._ended(self._worker()),
            "worker frozen": lambda: self._frozen(self._worker()),
            "publisher killed": self._publisher_killed,
            "publisher told to end": self._publisher_told,
            "publisher frozen": self._publisher_frozen,
            "host killed": lambda: self._host().kill(),
            "host told to end": lambda: self._ended(self._host()),
            "host frozen": lambda: self._frozen(self._host()),
        }
        if self._broker is not None:
            found |= {
                "broker killed": lambda: self._broker_gone("kill"),
                "broker told to end": lambda: self._broker_gone("stop"),
                "broker frozen": self._broker_frozen,
            }
        if self._network is not None:
            found |= {
                "network silent": lambda: self._cut(reset=False),
                "network reset": lambda: self._cut(reset=True),
            }
        return found

    def run(self, seconds: float, names: Sequence[str] | None = None) -> None:
        """Let faults happen for some seconds, prompts being sent meanwhile; whoever died is there again at the end.

        Args:
            seconds: how long.
            names: the faults, each in turn; all of them, in any order, when not given.
        """
        known = self.faults()
        chosen = iter(names or ())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            name = next(chosen, None) if names is not None else self.rng.choice(sorted(known))
            if name is None:
                break
            self.world.send(self.rng.randint(2, 6))
            self.world.figures[name] += 1
            known[name]()
            self.mend()
            # Of which length it is decides what the next fault meets.
            time.sleep(self.rng.uniform(0.2, 2.0))
        self.mend()

    def mend(self) -> None:
        """Start again who has died."""
        for name, worker in list(self.world.workers.items()):
            if not worker.running:
                self.world.start_worker(name)
        for name, host in list(self.world.hosts.items()):
            if not host.running:
                self.world.start_host(name)

    def _worker(self):
        return self.world.workers[self.rng.choice(sorted(self.world.workers))]

    def _host(self):
        return self.world.hosts[self.rng.choice(sorted(self.world.hosts))]

    def _length(self) -> float:
        return self.rng.choice((SHORT_S, LONG_S))

    def _ended(self, process) -> None:
        code = process.terminate()
        # One that has said nothing yet had not come to where it listens to that.
        assert code == 0 or not process.log.read_text(), f"exit code {code}: {process.tail()}"

    def _frozen(self, process) -> None:
        process.freeze()
        time.sleep(self._length())
        process.thaw()

    def _publisher_killed(self) -> None:
        name = self.rng.choice(sorted(self.world.workers))
        self.world.workers[name].wait_ready()
        killed = self.world.publisher_of(name)
        killed.kill()
        # The worker goes on, with another one.
        wait_until(lambda: self.world.publisher_of(name) not in (None, killed), 60.0, f"another publisher of {name}")

    def _publisher_told(self) -> None:
        name = self.rng.choice(sorted(self.world.workers))
        self.world.workers[name].wait_ready()
        told = self.world.publisher_of(name)
        assert told is not None
        told.terminate()
        # A service manager tells the whole group: when it ends is its worker's business.
        time.sleep(SHORT_S)
        assert told.is_running()
        assert self.world.publisher_of(name) == told

    def _publisher_frozen(self) -> None:
        name = self.rng.choice(sorted(self.world.workers))
        self.world.workers[name].wait_ready()
        publisher = self.world.publisher_of(name)
        assert publisher is not None
        publisher.suspend()
        time.sleep(self._length())
        publisher.resume()

    def _broker_gone(self, how: str) -> None:
        assert self._broker is not None
        getattr(self._broker, how)()
        time.sleep(self.rng.uniform(0.0, 2.0))
        self._broker.start()

    def _broker_frozen(self) -> None:
        assert self._broker is not None
        self._broker.pause()
        time.sleep(self._length())
        self._broker.resume()

    def _cut(self, *, reset: bool) -> None:
        assert self._network is not None
        with self._network.cut(reset=reset):
            time.sleep(self._length())


@contextmanager
def strangers(world: RingWorld, group: str, topic: str, assignor: Assignor, seed: int) -> Iterator[list[int]]:
    """Let somebody join a group again and again, take partitions, do nothing with them and leave.

    Args:
        world: whose group it is.
        group: its name.
        topic: that it reads.
        assignor: of the group.
        seed: of how long each stays.

    Yields:
        Numbers of partitions that they were given, one for each time.
    """
    stop, given = threading.Event(), list[int]()

    class Idle:
        def on_assigned(self, partitions: list[Partition]) -> None:
            given.append(len(partitions))

        def on_revoked(self, partitions: list[Partition]) -> None: ...
        def on_lost(self, partitions: list[Partition]) -> None: ...

    def come_and_go() -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with GroupSubscriber(world.bench.settings, group, [topic], Idle(), assignor=assignor) as member:
                until = time.monotonic() + rng.uniform(0.3, 2.5)
                while time.monotonic() < until and not stop.is_set():
                    member.poll_batch(1, 0.05)

    thread = threading.Thread(target=come_and_go, name=f"strangers of {group}")
    thread.start()
    try:
        yield given
    finally:
        stop.set()
        thread.join(60.0)
