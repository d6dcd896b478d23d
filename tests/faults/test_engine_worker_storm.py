"""Engine workers in a storm: whatever happens to them, the topics hold what was promised, and nothing else."""

from __future__ import annotations

import re

import pytest

from undercurrent.kafka.client import Assignor
from undercurrent.protocol.messages import Outcome
from undercurrent.testing.cut_proxy import cuttable_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import generated_text
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.testing.storm import PROPERTIES, SESSION, Storm, StormPlan
from undercurrent.testing.storm_record import taken_back

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(400)]

LONG = 500
"""Tokens of a request that a worker which comes or goes interrupts: five seconds' worth."""


@pytest.fixture(scope="module")
def kafka():
    yield from or_skip(cuttable_kafka("a", "b", properties=PROPERTIES))


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_storm_leaves_exactly_what_was_promised(kafka, tmp_path, assignor, record_property):
    broker, networks = kafka
    options = SESSION if assignor is Assignor.COOPERATIVE_STICKY else {}
    with EngineBench(broker.settings(), tmp_path, assignor=assignor, partitions=3) as bench:
        plan = StormPlan(seconds=10, seed=20261130, options=options, tokens=(5, 80))
        report = Storm(bench, list(networks.values()), plan).run()
        record_property("storm", str(report))
        assert not report.problems, f"{report}\n{bench.logs()}"
        assert report.counts["completed"] > len(report.sent) / 2


def test_workers_that_come_and_go_all_the_time_cost_time_and_nothing_else(kafka, tmp_path):
    broker, _ = kafka
    limits = {"handover_s": 0.3, "shutdown_s": 0.3}
    with EngineBench(broker.settings(), tmp_path, partitions=3) as bench:
        engine = {"kind": "fake", "args": {"step_s": 0.01}}
        stays = bench.start_worker(bench.configure("engine-0", engine=engine, limits=limits))
        ids = bench.send(["long"] * 6, max_tokens=LONG)
        stays.wait_ready()
        comes_and_goes = bench.configure("engine-1", engine=engine, limits=limits)

        def has_taken(turn):
            # There is always something to take over, however long a start takes here.
            if len(ids) - len(bench.finals()) < 6:
                ids.extend(bench.send(["long"] * 6, max_tokens=LONG))
            return len(incarnations(bench, "engine-1")) == turn

        for turn in range(1, 3):
            worker = bench.start_worker(comes_and_goes)
            bench.wait(lambda turn=turn: has_taken(turn), "it to take requests over", 120)
            assert worker.terminate(60) == 0, worker.tail()
        finals = bench.wait_finals(ids, 120)
        assert [final.outcome for found in finals.values() for final in found] == [Outcome.COMPLETED] * len(ids)
        texts = bench.texts()
        assert all(texts[request_id] == generated_text(request_id, LONG) for request_id in ids)
        begun_anew = sum(claim.engine == "engine-0" for claims in bench.starts().values() for claim in claims[1:])
        assert 0 < restarts(stays, "released") <= begun_anew
        assert restarts(stays, "lost") == 0
        assert not taken_back(bench)
        assert stays.terminate(60) == 0, stays.tail()


def incarnations(bench, engine):
    return {claim.incarnation for claims in bench.starts().values() for claim in claims if claim.engine == engine}


def restarts(worker, cause):
    found = re.search(rf'undercurrent_engine_restarts_total\{{cause="{cause}"\}} (\S+)', worker.get("/metrics")[1])
    assert found
    return float(found[1])
