"""Long streams, probes that kill or dawdle, and other probe sets, on a real broker: what a host does about each."""

from __future__ import annotations

import textwrap
import time

import numpy as np
import pytest

from undercurrent.kafka.client import Assignor
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.brokers import QUICK
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

GUARD = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "flag"}


@pytest.fixture
def bench(apache_broker, tmp_path):
    settings = apache_broker.settings(**QUICK)
    with ProbeBench(settings, tmp_path, assignor=Assignor.COOPERATIVE_STICKY, partitions=1) as made:
        made.lookup = OffsetLookup(settings)
        made.save_linear("guard", [1, 0, 0, 0], threshold=3.0, aggregation={"kind": "mean"})
        yield made


def committed(bench):
    where = Partition(bench.topic, 0)
    offset, text = bench.lookup.committed(bench.group, [where]).get(where, (None, None))
    return offset, HostMetadata.from_text(text)


def write_block(bench, stream, at, value=0.0):
    bench.write(stream.key, [stream.block([at], [value, 0, 0, 0])])


def check_once(bench, name, tokens):
    mine = [item for item in bench.verdicts() if item.request_id == name]
    positions = [
        at
        for item in mine
        if item.kind is VerdictKind.WATERMARK
        for at in np.frombuffer(item.score_positions, "<i4").tolist()
    ]
    assert positions == list(range(tokens)), bench.logs()
    [last] = [item for item in mine if item.kind in (VerdictKind.RESULT, VerdictKind.ERROR)]
    assert (last.kind, last.complete, last.scored) == (VerdictKind.RESULT, True, tokens)
    return last


def test_a_long_stream_goes_on_from_its_state_and_its_beginning_is_not_read_again(bench):
    config = bench.configure([GUARD], checkpoint_after_kb=1)
    host = bench.start_host(config)
    long = StreamBuilder("long")
    bench.write(long.key, [long.start()])
    for at in range(40):
        write_block(bench, long, at, value=float(at % 7))
        if at % 20 == 10:
            short = StreamBuilder(f"short-{at}")
            bench.write(short.key, [short.start(), short.block([0], [0, 0, 0, 0]), short.end()])

    def has_state():
        offset, metadata = committed(bench)
        return metadata is not None and metadata.states == 1 and offset > 20 and offset

    offset = bench.wait(has_state, "a state of the long stream")
    host.kill()
    for at in range(40, 50):
        write_block(bench, long, at, value=float(at % 7))
    host = bench.start_host(config)
    bench.write(long.key, [long.end()])
    bench.wait(lambda: len(bench.last_words()) >= 3, "the long stream's result")
    last = check_once(bench, "long", 50)
    assert last.score == pytest.approx(np.mean([at % 7 for at in range(50)]))
    bench.wait(lambda: committed(bench)[1].states == 0, "nothing is left to go on from")
    assert host.terminate() == 0, bench.logs()
    states = bench.read(bench.plan.probe_state)
    assert states[-1].value is None
    assert offset > 20


def test_a_stream_whose_probe_has_no_state_ends_declared_and_holds_nothing_back(bench):
    (bench.folder / "plain.py").write_text(
        textwrap.dedent(
            """
            from undercurrent.core import Probe, ProbeResult


            class Plain(Probe):
                def on_activation(self, record):
                    return None

                def on_end(self, ctx):
                    return ProbeResult(self.request_id, self.extraction_point_name, "clear")
            """
        )
    )
    plain = {"name": "plain", "point": "residual", "probe": "plain:Plain"}
    host = bench.start_host(bench.configure([plain, GUARD], checkpoint_after_kb=1, max_replay_kb=2))
    long = StreamBuilder("long")
    bench.write(long.key, [long.start(), *(long.block([at], [0, 0, 0, 0]) for at in range(60))])
    [cut] = bench.wait(bench.last_words, "the end of what cannot be written down")
    assert (cut.probe, cut.complete, cut.end_reason) == ("plain", False, "rebuild_limit")
    bench.write(long.key, [long.block([60], [0, 0, 0, 0])])
    bench.wait(lambda: committed(bench)[1].states == 1 and committed(bench)[0] > 30, "a state of what can")
    bench.write(long.key, [long.end()])
    bench.wait(lambda: len(bench.last_words()) == 2, "the other probe's result")
    assert {item.probe: item.end_reason for item in bench.last_words()}["guard"] == "finished"
    assert host.terminate() == 0, bench.logs()


def test_a_record_that_no_host_survives_is_quarantined_and_everything_else_is_said_once(bench):
    (bench.folder / "killer.py").write_text(
        textwrap.dedent(
            """
            import os

            from undercurrent.core import Probe, ProbeResult


            class Killer(Probe):
                def on_activation(self, record):
                    if float(record.tensor[0]) == 666.0:
                        os.abort()

                def on_end(self, ctx):
                    return ProbeResult(self.request_id, self.extraction_point_name, "clear")
            """
        )
    )
    killer = {"name": "killer", "point": "residual", "probe": "killer:Killer"}
    config = bench.configure([killer, GUARD], slot="0")
    good, bad, late = StreamBuilder("good"), StreamBuilder("bad"), StreamBuilder("late")
    values = [(good.key, good.start()), (bad.key, bad.start()), (bad.key, bad.block([0], [0, 0, 0, 0]))]
    values += [(good.key, good.block([at], [0, 0, 0, 0])) for at in range(5)]
    killing = len(values)
    values += [(bad.key, bad.block([1], [666, 0, 0, 0])), (bad.key, bad.end()), (good.key, good.end())]
    values += [(late.key, late.start()), (late.key, late.block([0], [0, 0, 0, 0])), (late.key, late.end())]
    for key, value in values:
        bench.write(key, [value])
    deaths, host = 0, bench.start_host(config)
    while len(bench.last_words()) < 6:
        if not host.running:
            deaths += 1
            assert deaths < 10, bench.logs()
            host = bench.start_host(config)
        time.sleep(0.2)
    assert 4 <= deaths <= 6, "two that make no progress, and two with the record in hand, after the first"
    assert host.running
    [letter] = bench.dead_letters()
    headers = dict(letter.headers)
    assert (headers["undercurrent.cause"], int(headers["undercurrent.offset"])) == (b"quarantined", killing)
    assert letter.value == values[killing][1]
    words = {(item.request_id, item.probe): item for item in bench.last_words()}
    assert len(words) == len(bench.last_words()) == 6
    assert {name for name, item in words.items() if item.kind is VerdictKind.ERROR} == {
        ("bad", "killer"),
        ("bad", "guard"),
    }
    assert "quarantined" in words["bad", "guard"].error
    assert words["good", "guard"].scored == 5
    assert host.terminate() == 0, bench.logs()


def test_a_probe_that_never_comes_back_ends_its_process(bench):
    (bench.folder / "looper.py").write_text(
        textwrap.dedent(
            """
            from undercurrent.core import Probe, ProbeResult


            class Looper(Probe):
                def on_activation(self, record):
                    while True:
                        pass

                def on_end(self, ctx):
                    return ProbeResult(self.request_id, self.extraction_point_name, "clear")
            """
        )
    )
    config = bench.configure([{"name": "looper", "point": "residual", "probe": "looper:Looper"}], stuck_after_s=1)
    host = bench.start_host(config)
    stream = StreamBuilder("r")
    bench.write(stream.key, [stream.start(), stream.block([0], [0, 0, 0, 0])])
    assert host.wait() == 70, bench.logs()
    assert f"{bench.topic}[0] at offset" in host.log.read_text()


def test_a_slow_probe_keeps_its_partitions(apache_broker, tmp_path):
    """It takes far longer for what was fetched at once than a member may go without polling."""
    settings = apache_broker.settings(**QUICK)
    with ProbeBench(settings, tmp_path, assignor=Assignor.COOPERATIVE_STICKY, partitions=2) as bench:
        (bench.folder / "slow.py").write_text(
            textwrap.dedent(
                """
                import time

                from undercurrent.core import Probe, ProbeResult


                class Slow(Probe):
                    def on_activation(self, record):
                        time.sleep(0.1)

                    def on_end(self, ctx):
                        return ProbeResult(self.request_id, self.extraction_point_name, "clear")
                """
            )
        )
        impatient = {**settings.keys(), "max.poll.interval.ms": 6000}
        config = bench.configure([{"name": "slow", "point": "residual", "probe": "slow:Slow"}], kafka=impatient)
        for name in ("a", "b", "c", "d"):
            stream = StreamBuilder(name)
            blocks = [stream.block([at], [0, 0, 0, 0]) for at in range(25)]
            bench.write(stream.key, [stream.start(), *blocks, stream.end()])
        host = bench.start_host(config)
        bench.wait(lambda: len(bench.last_words()) == 4, "results")
        assert host.terminate() == 0, bench.logs()
        log = host.log.read_text()
        assert log.count("assigned") == 1, log
        assert " lost " not in log


def test_another_probe_set_is_refused_unless_it_is_told_to_go_on(bench):
    first = bench.start_host(bench.configure([GUARD]))
    stream = StreamBuilder("r")
    bench.write(stream.key, [stream.start(), stream.block([0], [0, 0, 0, 0])])
    bench.wait(bench.verdicts, "a verdict of the first set")
    assert first.terminate() == 0
    bench.save_linear("other", [1, 0, 0, 0], threshold=9.0)
    config = bench.configure([{**GUARD, "probe": "./other"}], name="other.yaml")
    before = committed(bench)
    refused = bench.start_host(config)
    assert refused.wait() == 1
    assert "--change" in refused.log.read_text()
    assert committed(bench)[1].fingerprint == before[1].fingerprint
    changed = bench.start_host(config, options=["--change"])
    bench.write(stream.key, [stream.end()])
    bench.wait(bench.last_words, "a result of the other set")
    assert committed(bench)[1].fingerprint != before[1].fingerprint
    assert changed.terminate() == 0, bench.logs()
