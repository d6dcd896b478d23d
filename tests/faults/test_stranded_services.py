"""Services on a broker that was frozen past all sessions and then listed no broker for a moment: they go on."""

from __future__ import annotations

import pytest

from tests.faults.forgetful_proxy import forgetful_kafka
from tests.faults.test_engine_worker_faults import four_in_flight, one_final_each
from tests.faults.test_probe_host_faults import finish, in_mid_stream, make_bench
from undercurrent.kafka.client import Assignor
from undercurrent.testing.brokers import QUICK, BrokerUnavailableError
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

FREEZE_S = 8.0
STRANDED = "lost its brokers for good"


@pytest.fixture
def proxy():
    try:
        with forgetful_kafka() as proxy:
            yield proxy
    except BrokerUnavailableError as exc:
        pytest.skip(str(exc))


def test_a_worker_writes_one_final_for_each_request_and_a_probe_host_each_output_once(proxy, tmp_path):
    for name in ("engine", "probes"):
        (tmp_path / name).mkdir()
    with (
        EngineBench(proxy.settings(**QUICK), tmp_path / "engine") as engine,
        make_bench(proxy, tmp_path / "probes", Assignor.COOPERATIVE_STICKY) as probes,
    ):
        worker = engine.start_worker(engine.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}))
        config, traffic, host = in_mid_stream(probes)
        worker.wait_ready()
        ids = engine.send(["long"] * 6, max_tokens=300)
        four_in_flight(engine, ids)
        proxy.freeze(FREEZE_S)
        ids += engine.send(["after it"] * 4, max_tokens=20)
        engine.wait_finals(ids, 60)
        finish(probes, traffic, config, host)
        # The host's writer always is; which readers and members are is a matter of microseconds.
        assert STRANDED in host.log.read_text()
        assert worker.terminate(60) == 0, worker.tail()
        one_final_each(engine, ids)
