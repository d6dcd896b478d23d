"""Control of a bare server's API servers on a broker that goes away and comes back: every abort works, each once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine_worker.server_control import ServerControl
from undercurrent.adapters.vllm.server_settings import server_config
from undercurrent.errors import ProducerFatalError
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import AckOutcome, Rollout, RolloutChange
from undercurrent.protocol.rollouts import key_of
from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(180)]

GONE_S = 10.0


class Engine:
    """Requests that run until they are aborted."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    def tokens_of(self, engine_id: str) -> int | None:
        return 3 if engine_id in self.running else None

    async def abort(self, engine_id: str) -> None:
        self.running.discard(engine_id)

    async def abort_in_core(self, engine_id: str) -> None:
        raise AssertionError("the core has every request of this test before it is aborted")


class Servers:
    """API servers of one server on a loop of their own."""

    def __init__(self, config: Path, count: int) -> None:
        self._config = server_config(config)
        self.engines: list[Engine] = []
        self.controls: list[ServerControl] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api servers")
        self._thread.start()
        self.start(count)

    def start(self, count: int) -> None:
        """Start so many more of them."""

        async def started() -> None:
            first = len(self.controls)
            self.engines += [Engine() for _ in range(count)]
            self.controls += [ServerControl(self._config, n, self.engines[n]) for n in range(first, first + count)]
            await asyncio.gather(*(control.start() for control in self.controls[first:]))

        self.call(started())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def on_loop(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def add(self, index: int, name: str) -> str:
        """Run a request on one of them; return its id."""

        async def added() -> None:
            self.engines[index].running.add(name)
            self.controls[index].adding(name, name.rpartition("-")[0], 0, None)
            self.controls[index].sent(name)

        self.call(added())
        return name

    def close(self) -> None:
        for control in self.controls:
            self.call(control.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def test_aborts_work_and_are_answered_once_before_and_after_the_broker_was_gone(tmp_path: Path) -> None:
    for broker in or_skip(apache_kafka()):
        with EngineBench(broker.settings(), tmp_path) as bench:
            servers = Servers(bench.configure_server(), 2)
            try:
                _abort_around_an_outage(bench, servers, broker)
            finally:
                servers.close()


def test_a_probe_gone_mad_is_braked_in_every_api_server_and_in_one_that_starts_until_it_is_resumed(
    patient_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(line: str, times: int) -> None:
        wait_until(lambda: caplog.text.count(line) >= times, 60.0, f"{line!r}, {times} times")
        assert caplog.text.count(line) == times

    with EngineBench(patient_broker.settings(), tmp_path) as bench:
        servers = Servers(bench.configure_server(brake={"max_abort_share": 0.3, "window": 40, "min_requests": 10}), 2)

        def stop(index: int, names: list[str], probe: str | None = "mad") -> Counter[AckOutcome]:
            commands = [bench.abort(name, attempt=1 if probe else None, probe=probe) for name in names]
            acks = bench.wait(lambda: (a := bench.acks()).keys() >= set(commands) and a, "an answer to each")
            assert {(ack.engine, ack.probe) for c in commands for ack in acks[c]} == {(f"chat-0.api{index}", probe)}
            return Counter(ack.outcome for command in commands for ack in acks[command])

        try:
            names = [servers.add(0, f"cmpl-mad{n}-00000000") for n in range(20)]
            assert stop(0, names) == {AckOutcome.APPLIED: 6, AckOutcome.BRAKED: 14}
            assert servers.engines[0].running == set(names[6:])
            told("probe mad is braked", 2)
            assert stop(1, [servers.add(1, "cmpl-other-00000000")]) == {AckOutcome.BRAKED: 1}
            assert stop(0, names[6:7], probe=None) == {AckOutcome.APPLIED: 1}, "an operator is not braked"
            bench.write(bench.plan.rollouts, 0, b"k", b"nonsense")
            servers.start(1)
            told("probe mad is braked", 3)
            assert stop(2, [servers.add(2, "cmpl-new-00000000")]) == {AckOutcome.BRAKED: 1}
            resumed = Rollout(probe="mad", sequence=1, entry_id="e", change=RolloutChange.RESUME, created_at_us=0)
            bench.write(bench.plan.rollouts, 0, key_of(resumed), bench.codec.encode(resumed))
            told("probe mad is listened to again", 3)
            assert stop(0, names[7:8]) == stop(1, ["cmpl-other-00000000"]) == {AckOutcome.APPLIED: 1}
            # What is read again, after a failure, puts on no brake that was lifted.
            for control in servers.controls:
                servers.on_loop(lambda control=control: control.on_failure(ProducerFatalError("fenced")))  # type: ignore[misc]
            told(f"follows {bench.plan.control} again", 3)
            assert stop(2, ["cmpl-new-00000000"]) == {AckOutcome.APPLIED: 1}
        finally:
            servers.close()


def test_what_is_held_out_runs_on_in_whichever_api_server_it_is(
    patient_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = HoldoutRule(share=0.5)
    with EngineBench(patient_broker.settings(), tmp_path) as bench:
        servers = Servers(bench.configure_server(holdout_share=rule.share), 2)
        assert caplog.text.count("holdout: no probe stops 0.5 of the requests") == 2
        try:
            names = [servers.add(n % 2, f"cmpl-{n}-00000000") for n in range(16)]
            commands = {name: bench.abort(name, attempt=1, probe="guard") for name in names}
            acks = bench.wait(lambda: (a := bench.acks()).keys() >= set(commands.values()) and a, "an answer to each")
            held = {name for name in names if rule.holds(name)}
            assert 0 < len(held) < len(names)
            outcomes = {name: [ack.outcome for ack in acks[command]] for name, command in commands.items()}
            assert outcomes == {n: [AckOutcome.HELD_OUT if n in held else AckOutcome.APPLIED] for n in names}
            assert servers.engines[0].running | servers.engines[1].running == held
        finally:
            servers.close()


def _abort_around_an_outage(bench: EngineBench, servers: Servers, broker: Any) -> None:
    stopped = {bench.abort(servers.add(n % 2, f"cmpl-early{n}-0000000{n}"), attempt=1): n % 2 for n in range(4)}
    bench.wait(lambda: bench.acks().keys() >= stopped.keys(), "answers before")

    # One whose answer may still be under way when the broker dies.
    stopped[bench.abort(servers.add(0, "cmpl-between-00000000"), attempt=1)] = 0
    broker.kill()
    during = servers.add(1, "cmpl-during-00000000")
    time.sleep(GONE_S)
    broker.restart()

    stopped[bench.abort(during, attempt=1)] = 1
    stopped |= {bench.abort(servers.add(n % 2, f"cmpl-late{n}-0000000{n}"), attempt=1): n % 2 for n in range(4)}
    bench.wait(lambda: bench.acks().keys() >= stopped.keys(), "answers after", 60)
    assert [engine.running for engine in servers.engines] == [set(), set()]

    # A client that fails for good is replaced, and what was read and answered is known.
    for control in servers.controls:
        servers.on_loop(lambda control=control: control.on_failure(ProducerFatalError("the producer is fenced")))  # type: ignore[misc]
    bench.wait(lambda: all(control._tail is None for control in servers.controls), "the end of the old clients")
    stopped[bench.abort(servers.add(0, "cmpl-anew-00000000"), attempt=1)] = 0
    bench.wait(lambda: bench.acks().keys() >= stopped.keys(), "an answer of the new clients", 60)
    bench.wait(lambda: not any(control._unwritten for control in servers.controls), "the last acknowledgement")

    acks = bench.acks()
    assert Counter(len(answers) for answers in acks.values()) == {1: len(stopped)}
    for command_id, index in stopped.items():
        (ack,) = acks[command_id]
        assert (ack.outcome, ack.engine) == (AckOutcome.APPLIED, f"chat-0.api{index}")
