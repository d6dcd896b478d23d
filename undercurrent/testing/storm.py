"""Engine workers in a storm: killed, frozen, cut off, added and removed under load; then the topics are read.

    with cuttable_kafka("a", "b") as (broker, networks), EngineBench(broker.settings(), folder) as bench:
        report = Storm(bench, list(networks.values()), StormPlan(seconds=60, seed=1)).run()
        assert not report.problems, report

What is wrong is found by `undercurrent.testing.storm_check` from the topics and the driver's list alone.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import GenerationKind, PromptRequest, Sampling, StreamStarted
from undercurrent.testing.cut_proxy import CutProxy
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fleet import Fleet, Seat
from undercurrent.testing.storm_check import Kind, Sent, problems, stories
from undercurrent.testing.storm_record import audited, taken_back

SESSION: Mapping[str, str | float | bool] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}
"""Client settings of members that are taken for dead after two seconds, under the classic group protocol."""
PROPERTIES: Mapping[str, str] = {
    "group.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "2000",
}
"""Server properties that allow it, and do the same under the broker-side protocol."""
HARMS = ("kill", "kill", "freeze", "freeze_publisher", "cut", "add", "remove", "kill_publisher")


@dataclass(frozen=True, slots=True, kw_only=True)
class StormPlan:
    """How hard it blows.

    Args:
        seconds: how long harm is done and prompts are sent.
        seed: of everything that is drawn by lot.
        workers: fewest seats for workers.
        most_workers: most of them.
        harm_every_s: mean time between two harms.
        harms: what is done.
        away_s: how long a worker is frozen or cut off: from, to. Beyond the session it is taken for dead.
        prompts_per_s: mean rate.
        tokens: of a request: from, to.
        step_s: time of an engine step.
        options: of the workers' clients, such as the length of their session.
        settle_s: how long everything may take to end after the storm.
    """

    seconds: float
    seed: int = 0
    workers: int = 2
    most_workers: int = 3
    harm_every_s: float = 1.5
    harms: Sequence[str] = HARMS
    away_s: tuple[float, float] = (0.5, 6.0)
    prompts_per_s: float = 6.0
    tokens: tuple[int, int] = (5, 150)
    step_s: float = 0.01
    options: Mapping[str, str | float | bool] = field(default_factory=dict)
    settle_s: float = 180.0


@dataclass(slots=True, kw_only=True)
class StormReport:
    """What a storm has done and left.

    Args:
        problems: everything that is not as promised, in words.
        counts: harms, outcomes, void records, restarts.
        sent: the driver's list.
    """

    problems: list[str]
    counts: Counter[str]
    sent: list[Sent]

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return "\n".join([f"{len(self.sent)} requests; {told}", *self.problems])


class Storm:
    """One storm. Its thread must live as long as the workers should.

    Args:
        bench: with topics that nobody else uses.
        networks: through which workers reach the broker, in turn; none for the bench's own way.
        plan: how hard it blows.
    """

    def __init__(self, bench: EngineBench, networks: Sequence[CutProxy], plan: StormPlan) -> None:
        self._bench = bench
        self._networks = list(networks)
        self._plan = plan
        self._rng = random.Random(plan.seed)  # noqa: S311 - no secret: a seed that plays the same again
        self._fleet = Fleet(bench)
        self._counts: Counter[str] = Counter()
        self._sent: list[Sent] = []
        self._names = itertools.count()
        self._away: set[int] = set()
        # What is undone or said later: (when, number, what).
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> StormReport:
        """Blow, let everything end, and look."""
        for _ in range(self._plan.workers):
            self._add()
        self._fleet.seats[0].worker.wait_ready()
        start = now = time.monotonic()
        next_prompt = next_harm = start
        while now < start + self._plan.seconds:
            while next_prompt <= now:
                self._send()
                next_prompt += self._rng.expovariate(self._plan.prompts_per_s)
            if next_harm <= now:
                self._harm()
                next_harm = now + self._rng.expovariate(1 / self._plan.harm_every_s)
            self._do_due(now)
            self._fleet.tend()
            time.sleep(0.02)
            now = time.monotonic()
        self._do_due(float("inf"))
        return self._look()

    # Prompts.

    def _send(self) -> None:
        rng, plan = self._rng, self._plan
        kind = rng.choices(list(Kind), [10, 3, 1, 1])[0]
        request = Sent(
            request_id=f"s-{uuid.UUID(int=rng.getrandbits(128)).hex[:12]}",
            kind=kind,
            tokens=rng.randint(*plan.tokens),
            n=2 if kind is not Kind.BAD and rng.random() < 0.2 else 1,
        )
        self._sent.append(request)
        self._bench.send_request(self._prompt(request))
        if kind is Kind.ABORTED:
            self._after(rng.uniform(0.0, 1.5), lambda: self._abort(request))
        elif rng.random() < 0.15:
            self._after(rng.uniform(0.0, 3.0), lambda: self._repeat(request))

    def _prompt(self, request: Sent, prompt: str = "storm") -> PromptRequest:
        return PromptRequest(
            request_id=request.request_id,
            prompt=prompt,
            sampling=Sampling(
                max_tokens=request.tokens, n=request.n, temperature=-1.0 if request.kind is Kind.BAD else None
            ),
            deadline_us=1 if request.kind is Kind.LATE else None,
            created_at_us=0,
        )

    def _abort(self, request: Sent) -> None:
        request.command = self._bench.abort(request.request_id)

    def _repeat(self, request: Sent) -> None:
        same = self._rng.random() < 0.5
        offset = self._bench.send_request(self._prompt(request, "storm" if same else "another"))
        request.repeats[offset] = GenerationKind.DUPLICATE if same else GenerationKind.REFUSED

    # Harm.

    def _harm(self) -> None:
        harm = self._rng.choice(list(self._plan.harms))
        seats = [seat for seat in self._fleet.seats if seat.wanted]
        free = [seat for seat in seats if id(seat) not in self._away]
        if harm == "add" and len(seats) < self._plan.most_workers:
            self._add()
        elif harm == "remove" and len(seats) > self._plan.workers and free:
            self._remove(self._rng.choice(free))
        elif harm in ("kill", "kill_publisher") and free:
            self._kill(self._rng.choice(free), publisher=harm == "kill_publisher")
        elif harm in ("freeze", "freeze_publisher") and free:
            self._freeze(self._rng.choice(free), publisher=harm == "freeze_publisher")
        elif harm == "cut" and self._networks:
            network = self._rng.choice(self._networks)
            network.begin_cut(reset=self._rng.random() < 0.5)
            self._after(self._rng.uniform(*self._plan.away_s), network.mend)
        else:
            return
        self._counts[f"times {harm}"] += 1

    def _add(self) -> None:
        number = next(self._names)
        bench, plan = self._bench, self._plan
        settings: KafkaSettings = bench.settings
        if self._networks:
            settings = self._networks[number % len(self._networks)].settings()
        kafka = {**settings.keys(), **plan.options}
        engine = {"kind": "fake", "args": {"step_s": plan.step_s}}
        limits = {"handover_s": 0.5, "shutdown_s": 0.5, "stream_end_timeout_s": 5.0}
        config = bench.configure(f"engine-{number}", engine=engine, limits=limits, kafka=kafka)
        self._fleet.start(config)

    def _remove(self, seat: Seat) -> None:
        seat.wanted = False
        os.kill(seat.worker.pid, signal.SIGTERM)

    def _kill(self, seat: Seat, *, publisher: bool) -> None:
        _signal(seat, signal.SIGKILL, publisher=publisher)

    def _retire(self, seat: Seat) -> None:
        command = [sys.executable, "-m", "undercurrent.cli", "engines", "retire", seat.config.stem, "--unseen"]
        subprocess.run([*command, "--config", str(seat.config)], check=True, capture_output=True, timeout=120)
        self._counts["times retired"] += 1

    def _freeze(self, seat: Seat, *, publisher: bool) -> None:
        frozen = _signal(seat, signal.SIGSTOP, publisher=publisher)
        self._away.add(id(seat))

        def thaw() -> None:
            self._away.discard(id(seat))
            if frozen is not None:
                with suppress(psutil.NoSuchProcess):
                    frozen.resume()

        self._after(self._rng.uniform(*self._plan.away_s), thaw)

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), work))

    def _do_due(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()

    # Looking.

    def _look(self) -> StormReport:
        bench, counts = self._bench, self._counts
        self._fleet.wait_finals((sent.request_id for sent in self._sent), self._plan.settle_s)
        wrong = []
        for seat in self._fleet.seats:
            if seat.wanted:
                code = seat.worker.terminate(60.0) if seat.worker.running else 0
                # One that has only just been started does not listen to signals yet.
                if code not in (0, -signal.SIGTERM):
                    wrong.append(f"{seat.config.stem} ended with {code}: {seat.worker.tail(5)}")
            elif seat.worker.wait(60.0):
                # It could not end in good order, and is gone for good.
                self._retire(seat)
        children = {sent.request_id: sent.n for sent in self._sent}
        found = stories((message for _, message in bench.messages(bench.plan.generations)), children, counts)
        started = {
            (message.request_id, message.attempt)
            for point in bench.plan.points
            for _, message in bench.messages(bench.plan.activations(point))
            if isinstance(message, StreamStarted)
        }
        dead = {
            (letter.key or b"").decode(): (dict(letter.headers).get("undercurrent.cause") or b"").decode()
            for letter in bench.dead_letters()
        }
        acks = [message for _, message in bench.messages(bench.plan.acks)]
        wrong += problems(self._sent, found, acks, started, dead)
        wrong += [*taken_back(bench), *audited(bench)]
        for story in found.values():
            counts.update(str(final.outcome) for final in story.finals.values())
            counts["given up after three deaths"] += any(
                f.finish_reason == "engine_lost" for f in story.finals.values()
            )
        return StormReport(problems=wrong, counts=counts, sent=self._sent)


def _signal(seat: Seat, number: signal.Signals, *, publisher: bool) -> psutil.Process | None:
    """Send a signal to a worker, or to its publisher; return who got it, None where there is no such process now."""
    with suppress(psutil.NoSuchProcess):
        process = seat.worker.publisher if publisher else psutil.Process(seat.worker.pid)
        if process is not None:
            process.send_signal(number)
        return process
    return None
