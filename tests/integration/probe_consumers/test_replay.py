"""A replay of topics on a real broker: ranges, what retention has deleted, its death, and what it is compared with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest

from probe_consumers.dataset_export import ExportOrder, export
from probe_consumers.dataset_source import KafkaSource
from probe_consumers.replay_command import replay
from probe_consumers.replay_order import Origins, ReplayOrder
from probe_consumers.replay_range import RangeRequest
from probe_consumers.replay_store import read_checkpoint
from tests.contracts.probe_cases import ATTENTION, ENSEMBLE, LAYERS, MEANS, MLP, SUPPORT, WIDTH, normal
from undercurrent.codec import Codec
from undercurrent.errors import ReplayError
from undercurrent.evaluation.labels import key_of
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.records import Partition
from undercurrent.probes import (
    AttentionProbe,
    EnsembleProbe,
    LinearProbe,
    MahalanobisProbe,
    MeanDifferenceProbe,
    MlpProbe,
)
from undercurrent.protocol.messages import ActivationBlock, Label, LabelValue
from undercurrent.testing.brokers import QUICK
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder, publisher_started

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

RESULTS = ("verdicts.parquet", "scores.parquet", "left_out.parquet", "cut.parquet", "summary.json")
NAMES = [f"r{number}" for number in range(12)]
BLOCKS = 6
CODEC = Codec()


def every_probe():
    """Every built-in probe, with every aggregator among them."""
    at = {"layer": 3, "tensor_type": "residual_stream"}
    spread = normal(5, WIDTH, WIDTH).astype(float)

    def linear(threshold=1.5, **settings):
        return LinearProbe.from_arrays(np.linspace(-1, 1, WIDTH), 0.1, threshold=threshold, **at, **settings)

    return {
        "max": linear(aggregation={"kind": "max"}),
        "k-of-n": linear(aggregation={"kind": "k_of_n", "k": 2, "n": 4}, positions="generated"),
        "ema": linear(aggregation={"kind": "ema", "alpha": 0.3}, **SUPPORT),
        "cusum": linear(2.0, aggregation={"kind": "cusum", "drift": 0.5}),
        "mlp": MlpProbe.from_tensors(MLP, threshold=2.5, aggregation={"kind": "mean", "min_count": 2}, **at),
        "difference": MeanDifferenceProbe.from_tensors(MEANS, threshold=1.5, **at),
        "mahalanobis": MahalanobisProbe.from_moments(
            normal(6, WIDTH), spread @ spread.T / WIDTH + np.eye(WIDTH), rank=3, threshold=5.0, **at
        ),
        "ensemble": EnsembleProbe.from_tensors(
            ENSEMBLE, layers=[1, 3], tensor_type="residual_stream", threshold=4.5, layer=3
        ),
        "attention": AttentionProbe.from_tensors(ATTENTION, threshold=2.5, pool_min_count=2, **at),
    }


def bindings_of(names):
    return [{"name": name, "point": "residual", "probe": f"./{name}", "mode": "flag"} for name in names]


@pytest.fixture(scope="module")
def bench(apache_broker, tmp_path_factory):
    """Twelve whole streams on three partitions, of which nobody has said anything."""
    folder = tmp_path_factory.mktemp("bench")
    with ProbeBench(apache_broker.settings(), folder, layers=LAYERS, partitions=3) as made:
        made.save_linear("guard", np.linspace(-1, 1, WIDTH), threshold=1.5, layer=3)
        made.config = made.configure(bindings_of(["guard"]))
        for name in NAMES:
            write_stream(made, name)
        yield made


def write_stream(bench, name, blocks=BLOCKS):
    rng = np.random.default_rng(sum(name.encode()))
    stream = StreamBuilder(name, layers=LAYERS, width=WIDTH, dtype="bfloat16", prompt_len=2)
    rows = rng.normal(size=(blocks, 1, len(LAYERS), WIDTH))
    bench.write(stream.key, [stream.start(), *(stream.block([at], rows[at]) for at in range(blocks)), stream.end()])


def run(bench, out, config=None, **fields):
    fields = {"compare": "none", "range": RangeRequest()} | fields
    return replay(ReplayOrder(origins=Origins(config=config or bench.config), point="residual", out=out, **fields))


def streams_of(result):
    return result.summary["by_probe"]["guard"]["streams"]


@contextmanager
def command(bench, out, *options):
    """Run the command as a user would; it is dead when the block ends."""
    argv = [sys.executable, "-m", "undercurrent.cli", "replay", "--config", str(bench.config), "--out", str(out)]
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


def test_ranges_by_offset_time_request_label_and_the_last_ones(bench, tmp_path):
    whole = run(bench, tmp_path / "whole").summary
    assert (whole["by_probe"]["guard"]["streams"], whole["scores"]) == (12, 12 * BLOCKS)
    mine = [name for name in NAMES if bench.partition(name.encode()) == 0]
    only = RangeRequest(offsets={None: 10**6, 0: 0})
    with pytest.raises(ReplayError, match="name another folder"):
        run(bench, tmp_path / "whole", range=only)
    size = BLOCKS + 2
    part = RangeRequest(ends={0: size + 2, 1: 0, 2: 0})
    summary = run(bench, tmp_path / "offsets", range=part).summary
    assert summary["by_probe"]["guard"]["streams"] == 1
    assert [item["request_id"] for item in summary["cut"]["unfinished_at_its_end"]["named"]] == [mine[1]]
    assert streams_of(run(bench, tmp_path / "since", range=RangeRequest(since_ms=4_102_444_800_000))) == 0
    assert streams_of(run(bench, tmp_path / "until", range=RangeRequest(until_ms=4_102_444_800_000))) == 12
    assert streams_of(run(bench, tmp_path / "named", requests=frozenset({"r1", "r5", "nobody"}))) == 2
    last = run(bench, tmp_path / "last", last=3)
    verdicts = pq.read_table(tmp_path / "last" / "verdicts.parquet", filters=[("kind", "==", "result")])
    assert (streams_of(last), sorted(verdicts["request_id"].to_pylist())) == (3, ["r10", "r11", "r9"])
    assert streams_of(run(bench, tmp_path / "more", last=100)) == 12
    publisher = BulkPublisher(bench.settings)
    labels = [
        Label(request_id=name, name="bad", value=LabelValue(value), source=source, created_at_us=1)
        for name, value, source in (
            ("r1", "positive", "a"), ("r2", "positive", "a"), ("r2", "negative", "b"), ("r3", "negative", "a"),
        )
    ]  # fmt: skip
    records = [Outgoing(key_of(label), CODEC.encode(label)) for label in labels]
    # What is no label stays on a compacted topic for ever.
    records += [Outgoing(b"garbage", b"no message"), Outgoing(b"no|key", None)]
    publisher.write({Partition(bench.plan.labels, 0): records})
    publisher.close()
    run(bench, tmp_path / "label", labels=(("bad", "positive"),))
    told = pq.read_table(tmp_path / "label" / "verdicts.parquet", filters=[("kind", "==", "result")])
    assert told["request_id"].to_pylist() == ["r1"]  # of r2 the sources disagree


def test_a_dataset_says_what_the_topic_says(bench, tmp_path):
    run(bench, tmp_path / "topic")
    export(KafkaSource(bench.settings), bench.plan, ExportOrder(points=("residual",)), tmp_path / "d")
    order = ReplayOrder(
        origins=Origins(config=bench.config, dataset=tmp_path / "d"),
        point="residual",
        out=tmp_path / "o",
        compare=str(tmp_path / "topic"),
    )
    diff = replay(order).diff
    assert (diff.equal, diff.verdicts_compared, diff.scores_compared) == (True, 12, 12 * BLOCKS)


def test_what_a_host_that_was_stopped_has_not_judged_yet_is_named_and_no_difference(bench, tmp_path):
    """A host that is stopped in the middle of a stream, while others wait behind it; then one that goes on."""
    with ProbeBench(bench.settings, tmp_path, layers=LAYERS, partitions=1) as lagging:
        lagging.save_linear("guard", np.linspace(-1, 1, WIDTH), threshold=1.5, layer=3)
        lagging.config = lagging.configure(bindings_of(["guard"]))
        host = lagging.start_host(lagging.config)
        rows = np.random.default_rng(0).normal(size=(2, 1, len(LAYERS), WIDTH))
        cut = StreamBuilder("cut", layers=LAYERS, width=WIDTH, dtype="bfloat16", prompt_len=2)
        write_stream(lagging, "early")
        lagging.write(cut.key, [cut.start(), cut.block([0], rows[0])])
        lagging.wait(lambda: {item.request_id for item in lagging.verdicts()} == {"early", "cut"}, "both streams")
        assert host.terminate() == 0, lagging.logs()
        lagging.write(cut.key, [cut.block([1], rows[1]), cut.end()])
        write_stream(lagging, "late")
        with command(lagging, tmp_path / "o", "--fail-on-diff") as process:
            assert process.wait(60) == 0, said(lagging)
        told = json.loads((tmp_path / "o" / "report.json").read_text())
        assert (told["verdicts_compared"], told["differences_total"], told["not_judged_yet"]) == (1, 0, 2)
        assert [item["request_id"] for item in told["waiting"]] == ["cut", "late"]
        assert "2 results are not judged yet" in said(lagging)
        host = lagging.start_host(lagging.config)
        diff = run(lagging, tmp_path / "o", compare="live", wait_s=60.0).diff
        assert (diff.verdicts_compared, diff.differences_total, diff.not_judged_yet) == (3, 0, 0)
        assert host.terminate() == 0, lagging.logs()


def test_what_retention_has_deleted_is_told_and_streams_that_it_cut_are_named(apache_broker, tmp_path):
    with ProbeBench(apache_broker.settings(), tmp_path, layers=LAYERS, partitions=1) as bench:
        bench.save_linear("guard", np.linspace(-1, 1, WIDTH), threshold=1.5, layer=3)
        bench.config = bench.configure(bindings_of(["guard"]))
        for name in ("a", "b"):
            write_stream(bench, name)
        TopicAdmin(bench.settings).delete_records({(bench.topic, 0): 3})
        summary = run(bench, tmp_path / "o").summary
        assert summary["deleted"]["0"]["offsets"] == 3
        assert summary["deleted"]["0"]["left_from"] > "2020"
        assert [item["request_id"] for item in summary["cut"]["started_before_the_range"]["named"]] == ["a"]
        assert summary["records"]["left_out"] == {"started_before_the_range": BLOCKS + 2 - 3}
        assert summary["by_probe"]["guard"]["streams"] == 1
        with pytest.raises(ReplayError, match="offset 0 is gone, 3 is there"):
            run(bench, tmp_path / "p", range=RangeRequest(offsets={None: 0}))


def test_a_command_that_is_killed_goes_on_to_the_same_bytes(apache_broker, tmp_path):
    with ProbeBench(apache_broker.settings(), tmp_path, partitions=2) as bench:
        bench.save_linear("guard", np.linspace(-1, 1, 4096), threshold=1e9)
        bench.config = bench.configure(bindings_of(["guard"]))
        write_much(bench)
        run(bench, tmp_path / "whole")
        out, options = tmp_path / "o", ("--compare", "none", "--workers", "2")
        with command(bench, out, *options) as process:
            while process.poll() is None and not progress(out):
                time.sleep(0.01)
            assert process.poll() is None, said(bench)
        assert progress(out)
        with command(bench, out, *options) as process:
            assert process.wait(120) == 0, said(bench)
        assert {name: (out / name).read_bytes() for name in RESULTS} == {
            name: (tmp_path / "whole" / name).read_bytes() for name in RESULTS
        }


def write_much(bench):
    """Several times what is read between two checkpoints, into each partition."""
    rows = np.random.default_rng(1).normal(size=(32, 4096))
    for partition in (0, 1):
        names = (f"r{number}" for number in range(1000))
        name = next(name for name in names if bench.partition(name.encode()) == partition)
        stream = StreamBuilder(name, width=4096, dtype="bfloat16", prompt_len=2)
        blocks = [stream.block(range(at, at + 32), rows, step=at) for at in range(0, 32 * 500, 32)]
        bench.write(stream.key, [stream.start(), *blocks, stream.end()])


def progress(out):
    return [reached.position for folder in sorted(out.glob("progress/*")) if (reached := read_checkpoint(folder))]


def test_every_built_in_probe_live_and_replayed_with_a_host_killed(apache_broker, tmp_path):
    settings = apache_broker.settings(**QUICK)
    with ProbeBench(settings, tmp_path, layers=LAYERS, partitions=3, assignor=Assignor.COOPERATIVE_STICKY) as bench:
        probes = every_probe()
        for name, probe in probes.items():
            probe.save(tmp_path / name)
        bench.config = bench.configure(bindings_of(probes))
        first = bench.start_host(bench.config)
        for name in NAMES[:4]:
            write_stream(bench, name, blocks=20)
        bench.wait(bench.verdicts, "verdicts")
        second = bench.start_host(bench.config)  # a rebalance
        for name in NAMES[4:8]:
            write_stream(bench, name, blocks=20)
        first.kill()
        for name in NAMES[8:]:
            write_stream(bench, name, blocks=20)
        count = len(probes) * len(NAMES)
        bench.wait(lambda: len(bench.last_words()) >= count, f"{count} results", 90.0, interval_s=0.5)
        assert second.terminate() == 0, bench.logs()
        diff = run(bench, tmp_path / "o", compare="live", workers=2).diff
        assert diff.equal, diff.differences[:5]
        assert (diff.verdicts_compared, diff.differences_total) == (count, 0)
        assert diff.scores_compared >= count * 20
        check_controls(bench, tmp_path, probes)


def check_controls(bench, folder, probes):
    """Nothing but the same is equal: on another pipeline's topics with the same verdicts, and by the command's exit."""
    records, verdicts = bench.read(bench.topic), bench.read(bench.plan.verdicts)
    blocks = [at for at, record in enumerate(records) if isinstance(CODEC.decode(record.value), ActivationBlock)]
    at = blocks[len(blocks) // 2]
    flipped = records[at]._replace(value=records[at].value[:-1] + bytes([records[at].value[-1] ^ 0x40]))
    nothing = records[at]._replace(key=None, value=publisher_started("other", 1))
    for name, changed in (
        ("same", records),
        ("flipped", [*records[:at], flipped, *records[at + 1 :]]),
        # Offsets stay: in its place is what says nothing of any stream.
        ("removed", [*records[:at], nothing, *records[at + 1 :]]),
    ):
        (folder / name).mkdir()
        with ProbeBench(bench.settings, folder / name, layers=LAYERS, partitions=3) as other:
            copy(other, changed, verdicts)
            for probe, made in probes.items():
                made.save(folder / name / probe)
            config = other.configure(bindings_of(probes))
            diff = run(other, folder / f"{name}-o", config, compare="live", service=bench.group).diff
            assert (diff.equal, diff.empty) == (name == "same", False), (name, diff.differences[:3])
            if name != "same":
                assert {item.request_id for item in diff.differences} == {records[at].key.decode()}
    LinearProbe.from_arrays(
        np.linspace(-1, 1, WIDTH), 0.1, threshold=-1e6, layer=3, tensor_type="residual_stream"
    ).save(folder / "max")
    with command(bench, folder / "threshold-o", "--fail-on-diff") as process:
        assert process.wait(60) == 1, said(bench)
    report = json.loads((folder / "threshold-o" / "report.json").read_text())
    assert (report["equal"], report["empty"]) == (False, False)
    diff = run(bench, folder / "empty-o", compare="live", range=RangeRequest(since_ms=4_102_444_800_000)).diff
    assert (diff.equal, diff.empty) == (False, True)


def copy(bench, records, verdicts):
    publisher = BulkPublisher(bench.settings)
    for topic, listed in ((bench.topic, records), (bench.plan.verdicts, verdicts)):
        by_partition = {}
        for record in listed:
            by_partition.setdefault(Partition(topic, record.partition), []).append(Outgoing(record.key, record.value))
        publisher.write(by_partition)
    publisher.close()
