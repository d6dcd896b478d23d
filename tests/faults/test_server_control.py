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
from undercurrent.protocol.messages import AckOutcome
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.pytest_plugin import or_skip

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

    def __init__(self, bench: EngineBench, count: int) -> None:
        path = bench._write_yaml("capture.yaml", self._config(bench))
        self.engines = [Engine() for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api servers")
        self._thread.start()
        self.controls = self.call(self._start(path))

    @staticmethod
    def _config(bench: EngineBench) -> dict[str, Any]:
        plan = bench.plan
        return {
            "kafka": {"bootstrap_servers": bench.settings.bootstrap_servers},
            "topics": {"prefix": plan.prefix, "activation_partitions": plan.activation_partitions},
            "points": "points.yaml",
            "engine": {"name": "chat-0"},
        }

    async def _start(self, path: Path) -> list[ServerControl]:
        config = server_config(path)
        controls = [ServerControl(config, index, engine) for index, engine in enumerate(self.engines)]
        await asyncio.gather(*(control.start() for control in controls))
        return controls

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
            servers = Servers(bench, 2)
            try:
                _abort_around_an_outage(bench, servers, broker)
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
    stopped[bench.abort(servers.add(0, "cmpl-anew-00000000"), attempt=1)] = 0
    bench.wait(lambda: bench.acks().keys() >= stopped.keys(), "an answer of the new clients", 60)

    acks = bench.acks()
    assert Counter(len(answers) for answers in acks.values()) == {1: len(stopped)}
    for command_id, index in stopped.items():
        (ack,) = acks[command_id]
        assert (ack.outcome, ack.engine) == (AckOutcome.APPLIED, f"chat-0.api{index}")
