"""A whole ring for faults: scripted engines, probe hosts, and prompts of which a plain loop over the seed knows all.

    with RingWorld(broker.settings(**QUICK), tmp_path, seed=7) as world:
        world.start_worker("engine-0")
        world.start_host()
        world.send(12)
        world.kill_host()
        world.start_host()
        world.settle()
        world.check()

What is expected comes from the driver's own list and from arithmetic, what is found from the topics: nothing that was
acknowledged is lost, nothing is said twice, and what is lost is declared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.faults.ring_checks import Allowed, Checks, Place, place_of
from tests.faults.ring_prompts import JUDGES, POINT, WIDTH, Asked, prompts_of
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.records import Record
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import ControlCommand, Message, ProbeVerdict, StreamStarted, VerdictKind
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.worker_process import WorkerProcess

# A killed member's partitions are free after this; production leaves more time.
QUICK = {"session.timeout.ms": 3000, "heartbeat.interval.ms": 500}


class RingWorld:
    """Topics, workers and hosts, what they were asked, and whether they kept the promise.

    Args:
        settings: the connection.
        folder: for configuration and logs.
        seed: of the prompts.
        assignor: of both groups.
        partitions: of prompts and of activations.
        tokens: fewest and most of a prompt.
        engine: arguments of the scripted engine.
        sections: further sections of the workers' configuration.
        topics: further arguments of the bench.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        folder: Path,
        *,
        seed: int = 1,
        assignor: Assignor = Assignor.COOPERATIVE_STICKY,
        partitions: int = 2,
        tokens: tuple[int, int] = (40, 160),
        engine: Mapping[str, Any] | None = None,
        sections: Mapping[str, Any] | None = None,
        **topics: Any,
    ) -> None:
        self.bench = EngineBench(settings, folder, assignor=assignor, partitions=partitions, **topics)
        self.folder = folder
        self.seed = seed
        self.asked: dict[str, Asked] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.hosts: dict[str, AppProcess] = {}
        self.poison: dict[Place, bytes | None] = {}
        self.figures: Counter[str] = Counter()
        self._tokens = tokens
        self._engine = {"step_s": 0.005, "width": WIDTH, **(engine or {})}
        self._sections = dict(sections or {})
        self._started = 0
        self._assignor = assignor
        for name, judge in JUDGES.items():
            weight = np.zeros(int(self._engine["width"]), np.float32)
            weight[judge.element] = 1.0
            LinearProbe.from_arrays(
                weight, 0.0, layer=judge.layer, tensor_type="residual_stream", threshold=judge.threshold, name=name
            ).save(folder / name)

    def __enter__(self) -> RingWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.close()
        self.bench.__exit__()

    # --- who works

    def start_worker(
        self,
        name: str = "engine-0",
        environment: Mapping[str, str] | None = None,
        kafka: KafkaSettings | None = None,
    ) -> WorkerProcess:
        """Start an engine worker of a name, whose last one has ended; `kafka` is its own way to the broker."""
        sections = {**self._sections, **_connection(kafka)}
        config = self.bench.configure(name, engine={"kind": "fake", "args": self._engine}, **sections)
        self.workers[name] = self.bench.start_worker(config, environment)
        return self.workers[name]

    def start_host(
        self, name: str = "host-0", environment: Mapping[str, str] | None = None, kafka: KafkaSettings | None = None
    ) -> AppProcess:
        """Start a probe host of a name, whose last one has ended; `kafka` is its own way to the broker."""
        self._started += 1
        config = self.bench.configure_host(
            *({"name": n, "point": POINT, "probe": f"./{n}", "mode": judge.mode} for n, judge in JUDGES.items()),
            service={"name": "probes", "assignor": str(self._assignor)},
            **_connection(kafka),
        )
        # What comes next is written into the same file.
        own = config.rename(self.folder / f"{name}-host.yaml")
        self.hosts[name] = AppProcess("probe_consumers", own, self.folder / f"{name}-{self._started}.log", environment)
        return self.hosts[name]

    def publisher_of(self, name: str) -> psutil.Process | None:
        """Return the publisher of a worker, None while it has none."""
        return self.workers[name].publisher

    def stop(self) -> None:
        """Ask everybody to end; all of them have to live until then, and end in good order."""
        running = [*self.workers.values(), *self.hosts.values()]
        assert all(process.running for process in running), self.logs()
        assert [process.terminate() for process in running] == [0] * len(running), self.logs()

    def logs(self) -> str:
        """Return the ends of all logs."""
        processes = {**self.workers, **self.hosts}
        return "\n".join(f"--- {name}: {process.log}\n{process.tail(8)}" for name, process in processes.items())

    # --- what they are asked

    def send(self, count: int) -> list[Asked]:
        """Send the next prompts of the seed; all are acknowledged."""
        new = prompts_of(self.seed, len(self.asked), count, self._tokens)
        self.bench.send_requests([asked.request() for asked in new], 60.0)
        self.asked.update({asked.request_id: asked for asked in new})
        return new

    def under_way(self, count: int = 2) -> set[str]:
        """Wait until so many requests are between their first and last token."""

        def found() -> set[str]:
            running = self.bench.between_tokens()
            if len(running) < count and set(self.asked) <= set(self.bench.finals()):
                # They were over before anybody looked.
                self.send(count)
            return running if len(running) >= count else set()

        return self.bench.wait(found, f"{count} requests under way", 120.0)

    def settle(self, timeout_s: float = 180.0) -> None:
        """Wait until everything that was asked has all of its answers."""
        self.bench.wait_finals(self.asked, timeout_s)
        try:
            self.bench.wait(lambda: not self._missing_words(), "last words of every judge", timeout_s)
        except AssertionError as exc:
            audit = [str(finding) for finding in self.bench.audit()[:10]]
            raise AssertionError(f"no last words of {self._missing_words()[:10]}; {audit}\n{self.logs()}") from exc
        self.bench.wait(lambda: not self._unanswered(), "answers to every abort", timeout_s)

    def _missing_words(self) -> list[tuple[str, int, str]]:
        said = {
            (v.request_id, v.attempt, v.probe)
            for v in self.verdicts()
            if v.kind in (VerdictKind.RESULT, VerdictKind.ERROR)
        }
        dead = {place_of(letter) for letter in self.letters()}
        streams = {(m.request_id, m.attempt) for _, m in self.streamed(dead) if isinstance(m, StreamStarted)}
        return [(*stream, name) for stream in streams for name in JUDGES if (*stream, name) not in said]

    def _unanswered(self) -> set[str]:
        commands = {
            m.command_id for _, m in self.bench.messages(self.bench.plan.control) if isinstance(m, ControlCommand)
        }
        return commands - self.bench.acks().keys()

    def verdicts(self) -> list[ProbeVerdict]:
        """Return the committed verdicts."""
        return self.bench.said(ProbeVerdict)

    def letters(self) -> list[Record]:
        """Return the dead letters of prompts and of streams."""
        return self.bench.dead_letters() + self.bench.read(self.bench.plan.dlq(self.bench.plan.activations(POINT)))

    def streamed(self, dead: Set[Place]) -> list[tuple[Record, Message]]:
        """Return the messages of the point's topic without those that are dead letters."""
        records = self.bench.read(self.bench.plan.activations(POINT))
        alive = [record for record in records if (record.topic, record.partition, record.offset) not in dead]
        return [(record, self.bench.codec.decode(record.value)) for record in alive]

    # --- whether the promise is kept

    def check(self, *, lossless: bool = True, may_die: bool = False, may_lose_streams: bool = False) -> Counter[str]:
        """Compare everything that was said with what follows from the seed; return how much it was.

        Args:
            lossless: no activation of a completed request may be missing; else what is missing has to be declared.
            may_die: requests whose workers died under them three times may end as `engine_lost`, with a dead letter.
            may_lose_streams: a stream may end as lost, which its results say.
        """
        allowed = Allowed(lossless, may_die, may_lose_streams)
        wrong = Checks(self, allowed).run()
        assert not wrong, "\n".join([*wrong[:20], f"({len(wrong)} in all)", self.logs()])
        return self.figures


def _connection(kafka: KafkaSettings | None) -> dict[str, Any]:
    return {} if kafka is None else {"kafka": kafka.keys()}
