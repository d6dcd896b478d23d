"""Prompts that kill or hang their engines, and engines that are gone for good."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from undercurrent.protocol.generations import Ruling
from undercurrent.protocol.messages import Outcome, Released, ReleaseReason, StreamStarted
from undercurrent.protocol.streams import StreamTable
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import BLOCKS, HANGS, KILLS
from undercurrent.testing.fleet import Fleet
from undercurrent.testing.pytest_plugin import or_skip

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

KILLED = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}
"""A killed member's partitions are free after this."""
LEAVES = {"session.timeout.ms": 120_000, "heartbeat.interval.ms": 1000}
"""Those of one that does not leave are not, before the test is over."""


@pytest.fixture(scope="module")
def kafka():
    yield from or_skip(apache_kafka(properties={"group.min.session.timeout.ms": "1000"}))


def harmable(step_s=0.01):
    return {"kind": "fake", "args": {"step_s": step_s, "harmable": True}}


def test_a_prompt_that_kills_its_engine_is_given_up_and_its_neighbours_complete(kafka, tmp_path):
    with EngineBench(kafka.settings(**KILLED), tmp_path, partitions=1) as bench:
        fleet = Fleet(bench)
        before = bench.send(["before"] * 3, max_tokens=60)
        (killer,) = bench.send([f"this {KILLS}"], max_tokens=100)
        after = bench.send(["after"] * 3, max_tokens=60)
        seat = fleet.start(bench.configure(engine=harmable()))
        finals = fleet.wait_finals([killer, *before, *after], 120)
        assert seat.exits == [-9] * 3
        (final,) = finals[killer]
        assert (final.outcome, final.finish_reason) == (Outcome.FAILED, "engine_lost")
        for name in (*before, *after):
            assert [f.outcome for f in finals[name]] == [Outcome.COMPLETED], (finals[name], bench.logs())
        (letter,) = bench.dead_letters()
        headers = dict(letter.headers)
        assert (letter.key, headers["undercurrent.cause"]) == (killer.encode(), b"engine_lost")
        # The third time it was alone: no request was open beside it in its engine, and none was begun.
        claims = [(ruling, m) for ruling, m in bench.judged() if not isinstance(m, Released)]
        third = [i for i, (ruling, m) in enumerate(claims) if ruling is Ruling.HOLDS and m.request_id == killer][2]
        mine = claims[third][1].incarnation
        begun = {m.request_id for ruling, m in claims if ruling is Ruling.HOLDS and m.incarnation == mine}
        ended = {m.request_id for ruling, m in claims[:third] if ruling is Ruling.CLOSED}
        assert begun - ended == {killer}
        assert seat.worker.terminate(60) == 0, bench.logs()


def test_an_engine_that_hangs_leaves_its_group_and_says_nothing_of_what_it_ran(kafka, tmp_path):
    with EngineBench(kafka.settings(**LEAVES), tmp_path) as bench:
        limits = {"stall_s": 2.0}
        first = bench.start_worker(bench.configure("engine-0", engine=harmable(), limits=limits))
        ids = bench.send(["long"] * 4, max_tokens=400)
        bench.wait(lambda: len(bench.between_tokens()) == 4, "four requests in flight")
        (hangs,) = bench.send([f"this {HANGS}"], max_tokens=100)
        assert first.wait(60) == 1, first.tail()
        assert "took no step for 2 s" in first.log.read_text()
        assert not [m for _, m in bench.judged() if isinstance(m, Released)]
        second = bench.start_worker(bench.configure("engine-1", limits=limits))
        finals = bench.wait_finals([*ids, hangs], 60)
        assert {f.outcome for found in finals.values() for f in found} == {Outcome.COMPLETED}
        assert second.terminate(60) == 0, second.tail()


def test_a_worker_whose_loop_is_blocked_leaves_its_group(kafka, tmp_path):
    with EngineBench(kafka.settings(**LEAVES), tmp_path) as bench:
        limits = {"stall_s": 2.0}
        first = bench.start_worker(bench.configure("engine-0", engine=harmable(), limits=limits))
        first.wait_ready()
        (blocks,) = bench.send([f"this {BLOCKS}"], max_tokens=100)
        second = bench.start_worker(bench.configure("engine-1", limits=limits))
        ids = bench.send(["short"] * 8, max_tokens=4)
        finals = bench.wait_finals([*ids, blocks], 60)
        assert {f.outcome for found in finals.values() for f in found} == {Outcome.COMPLETED}
        assert first.running
        assert second.terminate(60) == 0, second.tail()


def engines(bench, *arguments):
    """Run `undercurrent engines`; return its exit code and what it printed."""
    command = [sys.executable, "-m", "undercurrent.cli", "engines", *arguments]
    ran = subprocess.run([*command, "--config", str(bench.configure())], capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout + ran.stderr


def open_streams(bench):
    """Return how many streams are open at the end of the point's topic, as a probe host counts them."""
    tables = [StreamTable("residual") for _ in range(bench.plan.activation_partitions)]
    for record, message in bench.messages(bench.plan.activations("residual")):
        tables[record.partition].observe(record.offset, message)
    return sum(map(len, tables))


def test_an_engine_that_is_gone_for_good_is_retired_and_its_open_streams_close(kafka, tmp_path):
    with EngineBench(kafka.settings(**KILLED), tmp_path) as bench:
        worker = bench.start_worker(bench.configure(engine=harmable()))
        ids = bench.send(["long"] * 4, max_tokens=400)
        bench.wait(lambda: len(bench.between_tokens()) == 4, "four requests in flight")
        bench.wait(lambda: open_streams(bench) == 4, "four open streams")
        worker.kill()
        code, said = engines(bench, "retire", "engine-7")
        assert code == 2
        assert "known: engine-0" in said
        assert open_streams(bench) == 4
        code, said = engines(bench, "retire", "engine-0")
        assert (code, open_streams(bench)) == (0, 0), said
        assert "in 2 partitions" in said
        # A start that was still under way when it died, as from a publisher that was frozen: retired once more.
        started = next(m for _, m in bench.messages(bench.plan.activations("residual")) if isinstance(m, StreamStarted))
        bench.write(bench.plan.activations("residual"), 0, b"r", bench.codec.encode(started))
        assert open_streams(bench) == 1
        assert engines(bench, "retire", "engine-0")[0] == 0
        assert open_streams(bench) == 0
        (row,) = [json.loads(line) for line in engines(bench, "list", "--json")[1].splitlines()]
        assert (row["engine"], row["retired"]) == ("engine-0", True)
        second = bench.start_worker(bench.configure("engine-1"))
        bench.wait_finals(ids)
        assert second.terminate(60) == 0, second.tail()


def test_an_engine_that_lives_gives_its_requests_up_when_it_is_retired_and_ends(kafka, tmp_path):
    with EngineBench(kafka.settings(**LEAVES), tmp_path) as bench:
        first = bench.start_worker(bench.configure(engine=harmable(step_s=0.2)))
        ids = bench.send(["long"] * 4, max_tokens=400)
        bench.wait(lambda: len(bench.between_tokens()) == 4, "four requests in flight")
        assert engines(bench, "retire", "engine-0")[0] == 0
        assert first.wait(120) == 1, first.tail()
        assert "engine-0 was retired" in first.log.read_text()
        released = [m for _, m in bench.judged() if isinstance(m, Released)]
        assert {m.request_id for m in released} == set(ids)
        assert {m.reason for m in released} == {ReleaseReason.LOST_PARTITION}
        second = bench.start_worker(bench.configure("engine-1", engine=harmable()))
        bench.wait_finals(ids)
        assert second.terminate(60) == 0, second.tail()
