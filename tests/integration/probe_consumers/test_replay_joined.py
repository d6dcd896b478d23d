"""Replays of a probe that joins two points, on a real broker: what a group said that was killed, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from probe_consumers.inputs import Inputs
from probe_consumers.replay_command import replay
from probe_consumers.replay_live import LivePositions
from probe_consumers.replay_order import Origins, ReplayOrder
from probe_consumers.replay_range import RangeRequest
from probe_consumers.replay_store import read_checkpoint
from tests.faults.test_joining_hosts import BINDING, BLOCKS, LAYERS, POINTS, WEIGHT, WIDTH, Traffic, make_bench
from undercurrent.codec import Codec
from undercurrent.errors import ConfigError, TopicError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder, publisher_started

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

CODEC = Codec()
RESULTS = ("verdicts.parquet", "scores.parquet", "left_out.parquet", "cut.parquet", "summary.json")
NEVER = RangeRequest(since_ms=4_102_444_800_000)


def run(bench, out, config, **fields):
    origins = Origins(config=config)
    return replay(ReplayOrder(origins=origins, point=bench.point, out=out, **({"compare": "live"} | fields)))


@contextmanager
def command(bench, config, out, *options):
    """Run the command as a user would; it is dead when the block ends."""
    argv = [sys.executable, "-m", "undercurrent.cli", "replay", "--config", str(config), "--out", str(out)]
    with (
        (bench.folder / "command.log").open("w") as log,
        subprocess.Popen([*argv, *options], stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def said(bench):
    return (bench.folder / "command.log").read_text()


def test_a_group_that_changed_and_was_killed_and_its_replay_say_the_same(apache_broker, tmp_path):
    with make_bench(apache_broker, tmp_path, Assignor.RANGE) as bench:
        config = bench.configure([BINDING])
        traffic = Traffic(bench, 9)
        first = bench.start_host(config)
        traffic.rounds(5)
        bench.wait(bench.verdicts, "verdicts")
        second = bench.start_host(config)  # a rebalance
        traffic.rounds(3)
        first.kill()
        traffic.finish()
        bench.wait(lambda: len(bench.last_words()) >= 9, "9 results", 90.0, interval_s=0.5)
        assert second.terminate() == 0, bench.logs()
        with command(bench, config, tmp_path / "o", "--fail-on-diff", "--workers", "2") as process:
            assert process.wait(90) == 0, said(bench)
        report = json.loads((tmp_path / "o" / "report.json").read_text())
        assert (report["equal"], report["verdicts_compared"], report["scores_compared"]) == (True, 9, 9 * BLOCKS)
        summary = json.loads((tmp_path / "o" / "summary.json").read_text())
        assert sorted(summary["ranges"]) == sorted(f"{point}:{number}" for point in POINTS for number in range(3))
        some = run(bench, tmp_path / "some", config, requests=frozenset({"request-0", "request-4"})).diff
        assert (some.equal, some.verdicts_compared, some.scores_compared) == (True, 2, 2 * BLOCKS)
        check_controls(bench, config, tmp_path)


def check_controls(bench, config, folder):
    """Nothing but the same is equal: on another pipeline's topics with the same verdicts, and by the command's exit."""
    verdicts = bench.read(bench.plan.verdicts)
    logs = {point: bench.read(bench.plan.activations(point)) for point in POINTS}
    for name, point in (("same", POINTS[0]), ("flipped", POINTS[1]), ("removed", POINTS[0]), ("gone", POINTS[1])):
        records = logs[point]
        blocks = [at for at, record in enumerate(records) if isinstance(CODEC.decode(record.value), ActivationBlock)]
        at = blocks[len(blocks) // 2]
        one = records[at]
        # Offsets stay: in a record's place is what says nothing of any stream.
        nothing = one._replace(key=None, value=publisher_started("other", 1))
        flipped = one._replace(value=one.value[:-1] + bytes([one.value[-1] ^ 0x40]))
        changed = {
            "same": records,
            "flipped": [*records[:at], flipped, *records[at + 1 :]],
            "removed": [*records[:at], nothing, *records[at + 1 :]],
            "gone": [nothing._replace(partition=item.partition) if item.key == one.key else item for item in records],
        }[name]
        (folder / name).mkdir()
        with ProbeBench(bench.settings, folder / name, others=POINTS[1:], layers=LAYERS, partitions=3) as other:
            copy(other, logs | {point: changed}, verdicts)
            other.save_linear("both", WEIGHT, threshold=9.0)
            made = other.configure([BINDING])
            diff = run(other, folder / f"{name}-o", made, service=bench.group).diff
            assert (diff.equal, diff.empty) == (name == "same", False), (name, diff.differences[:3])
            if name != "same":
                assert {item.request_id for item in diff.differences} == {one.key.decode()}, name
    bench.save_linear("both", WEIGHT, threshold=-1e6)
    with command(bench, config, folder / "threshold-o", "--fail-on-diff") as process:
        assert process.wait(60) == 1, said(bench)
    diff = run(bench, folder / "empty-o", config, range=NEVER).diff
    assert (diff.equal, diff.empty) == (False, True)
    with command(bench, config, folder / "empty-2", "--fail-on-diff", "--since", "2100-01-01") as process:
        assert process.wait(60) == 1, said(bench)


def copy(bench, logs, verdicts):
    publisher = BulkPublisher(bench.settings)
    topics = {bench.plan.activations(point): records for point, records in logs.items()}
    for topic, listed in (topics | {bench.plan.verdicts: verdicts}).items():
        by_partition = {}
        for record in listed:
            by_partition.setdefault(Partition(topic, record.partition), []).append(Outgoing(record.key, record.value))
        publisher.write(by_partition)
    publisher.close()


def streams(name, width=WIDTH, layers=LAYERS):
    """Return what builds each point's stream of a request."""
    made = {"layers": layers, "width": width, "prompt_len": 2, "points": POINTS}
    return {point: StreamBuilder(name, point=point, **made) for point in POINTS}


def test_what_waits_for_another_points_record_is_not_judged_yet_and_no_difference(apache_broker, tmp_path):
    with make_bench(apache_broker, tmp_path, Assignor.RANGE) as bench:
        config = bench.configure([BINDING])
        host = bench.start_host(config)
        rows = np.random.default_rng(0).normal(size=(2, len(LAYERS), WIDTH))
        for point, stream in streams("early").items():
            bench.write(stream.key, [stream.start(), stream.block([0], rows[0]), stream.end()], point=point)
        first, second = streams("cut").values()
        both = [
            [item.start(), item.block([0], rows[0]), item.block([1], rows[1]), item.end()] for item in (first, second)
        ]
        bench.write(first.key, both[0], point=POINTS[0])
        bench.write(second.key, both[1][:2], point=POINTS[1])
        inputs = Inputs.of(bench.plan, POINTS)
        lookup = OffsetLookup(bench.settings)
        positions = LivePositions(lookup, inputs, bench.plan.verdicts)
        lane = bench.partition(first.key)
        end = lookup.end([inputs.place(lane)])[inputs.place(lane)]
        bench.wait(lambda: positions.judged_up_to(bench.group, [lane]).get(lane) == end, "all of the first point")
        bench.wait(lambda: {item.request_id for item in bench.verdicts()} == {"early", "cut"}, "both requests")
        assert host.terminate() == 0, bench.logs()
        bench.write(second.key, both[1][2:], point=POINTS[1])
        diff = run(bench, tmp_path / "o", config).diff
        assert (diff.verdicts_compared, diff.differences_total, diff.not_judged_yet) == (1, 0, 1), diff.differences
        assert [item.request_id for item in diff.waiting] == ["cut"]
        host = bench.start_host(config)
        diff = run(bench, tmp_path / "o", config, wait_s=60.0).diff
        assert (diff.verdicts_compared, diff.differences_total, diff.not_judged_yet) == (2, 0, 0)
        assert host.terminate() == 0, bench.logs()


def test_where_retention_took_one_points_start_the_request_is_named_and_not_judged(apache_broker, tmp_path):
    with make_bench(apache_broker, tmp_path, Assignor.RANGE) as bench:
        config = bench.configure([BINDING])
        rows = np.random.default_rng(0).normal(size=(1, len(LAYERS), WIDTH))
        names = [f"r{number}" for number in range(50) if bench.partition(f"r{number}".encode()) == 0][:2]
        for name in names:
            for point, stream in streams(name).items():
                bench.write(stream.key, [stream.start(), stream.block([0], rows[0]), stream.end()], point=point)
        # Of the first request all is gone at one point, and nothing at the other.
        TopicAdmin(bench.settings).delete_records({(bench.plan.activations(POINTS[1]), 0): 3})
        result = run(bench, tmp_path / "o", config, compare="none").summary
        assert result["deleted"].keys() == {f"{POINTS[1]}:0"}
        assert [(item["request_id"], item["point"]) for item in result["cut"]["started_before_the_range"]["named"]] == [
            (names[0], POINTS[1])
        ]
        assert (result["by_probe"]["both"]["streams"], result["scores"]) == (1, 1)


def test_topics_that_cannot_be_joined_and_options_without_one_meaning_are_refused(apache_broker, tmp_path):
    with make_bench(apache_broker, tmp_path, Assignor.RANGE) as bench:
        config = bench.configure([BINDING])
        with pytest.raises(ConfigError, match=r"--last: --point residual\+attn reads several topics"):
            run(bench, tmp_path / "o", config, last=3)
        with pytest.raises(ConfigError, match="a dataset is replayed one point at a time"):
            replay(ReplayOrder(origins=Origins(config=config, dataset=tmp_path), point=bench.point, out=tmp_path / "o"))
        plan = replace(bench.plan, prefix=f"{bench.plan.prefix}x")
        second = plan.activations(POINTS[1])
        TopicAdmin(bench.settings).create(
            [replace(topic, partitions=4) if topic.name == second else topic for topic in plan.topics()]
        )
        other = config.with_name("unequal.yaml")
        other.write_text(config.read_text().replace(bench.plan.prefix, plan.prefix))
        with pytest.raises(TopicError, match=r"has 3, .* has 4 partitions"):
            run(bench, tmp_path / "o", other)


def test_a_command_that_is_killed_goes_on_to_the_same_bytes(apache_broker, tmp_path):
    with ProbeBench(apache_broker.settings(), tmp_path, others=POINTS[1:], partitions=1) as bench:
        bench.save_linear("both", np.linspace(-1, 1, 8192), threshold=1e9)
        config = bench.configure([BINDING])
        rows = np.random.default_rng(1).normal(size=(32, 4096)).astype(np.float32)
        for name in ("a", "b"):
            for point, stream in streams(name, 4096, (0,)).items():
                blocks = [stream.block(range(at, at + 32), rows, step=at) for at in range(0, 32 * 120, 32)]
                bench.write(stream.key, [stream.start(), *blocks, stream.end()], point=point)
        run(bench, tmp_path / "whole", config, compare="none")
        out = tmp_path / "o"
        with command(bench, config, out, "--compare", "none") as process:
            while process.poll() is None and not progress(out):
                time.sleep(0.01)
            assert process.poll() is None, said(bench)
        assert progress(out)
        with command(bench, config, out, "--compare", "none") as process:
            assert process.wait(120) == 0, said(bench)
        assert {name: (out / name).read_bytes() for name in RESULTS} == {
            name: (tmp_path / "whole" / name).read_bytes() for name in RESULTS
        }


def progress(out):
    return [reached.position for folder in sorted(out.glob("progress/*")) if (reached := read_checkpoint(folder))]
