"""How fast recorded activations are replayed, beside merely reading them, and how that grows with partitions.

    python -m benchmarks.replay [--megabytes 1200] [--width 4096] [--layers 1] [--prompt 384] [--generated 96]

Needs a real Apache Kafka (KAFKA_HOME). Two partitions hold streams of bfloat16 rows: a prompt in blocks of 96 rows,
then one block per generated token. Every figure is of a process of its own. A rate is told per second of CPU time, with
the client's own threads, because the broker shares the cores. A replay of a few records goes before each, and is not
counted: what it takes to start processes and load code is told alone, as `start_s`.

Raw is the client as a reader of the topic configures it. `raw_as_replay` reads with a replay's larger fetches in a
process that keeps the memory that it frees, as a replay does: what is left is what a replay does with the records.
Scaling is of the rate in wall time while all that run are at work: `scaling_2` of a replay, from when both parts have
begun until one is done; `raw_scaling_2` of two processes that read a partition each and do nothing with it, which is
all that the broker and the cores have to give. Then the topic is exported, and a probe trained on what was. The last
line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from probe_consumers.replay_order import Plan
from probe_consumers.replay_partition import KEPT_BYTES, Watcher
from probe_consumers.replay_source import IN_BULK
from probe_consumers.replay_store import Checkpoint, part_folder, read_checkpoint
from undercurrent.codec import Codec
from undercurrent.evaluation.labels import key_of
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import reader_config
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import Label, LabelValue
from undercurrent.service.processes import keep_freed_memory
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

_TOGETHER = 8
_BLOCK_ROWS = 96


def write_streams(bench: ProbeBench, options: argparse.Namespace) -> float:
    """Fill both partitions with as many megabytes each; return how many MB were written."""
    rng = np.random.default_rng(0)
    # Few distinct rows, sent often: making them must not take longer than writing them.
    shape = options.prompt + options.generated, options.layers, options.width
    rows = rng.standard_normal(shape).astype(np.float32)
    shifted = rows + 0.02 * rng.standard_normal(options.width).astype(np.float32)
    labels: list[Outgoing] = []
    publisher, written, number = BulkPublisher(bench.settings), 0.0, 0
    while written < options.megabytes:
        for partition in (0, 1):
            streams: list[StreamBuilder] = []
            while len(streams) < _TOGETHER:
                stream = StreamBuilder(
                    f"r{number}",
                    dtype="bfloat16",
                    width=options.width,
                    layers=tuple(range(options.layers)),
                    prompt_len=options.prompt,
                )
                number += 1
                if bench.partition(stream.key) == partition:
                    streams.append(stream)
            is_bad = len(labels) // _TOGETHER % 4 < 2
            labels += [_label(stream.key.decode(), is_bad=is_bad) for stream in streams]
            records = list(_interleaved(streams, shifted if is_bad else rows, options))
            refused = publisher.write({Partition(bench.topic, partition): records})
            assert not refused, refused[0].error
            written += sum(len(record.value) for record in records) / 1e6
    publisher.write({Partition(bench.plan.labels, 0): labels})
    publisher.close()
    return written


def _label(request_id: str, *, is_bad: bool) -> Outgoing:
    value = LabelValue.POSITIVE if is_bad else LabelValue.NEGATIVE
    label = Label(request_id=request_id, name="bad", value=value, source="benchmark", created_at_us=1)
    return Outgoing(key_of(label), Codec().encode(label))


def _interleaved(streams: list[StreamBuilder], rows: np.ndarray, options: argparse.Namespace) -> Iterator[Outgoing]:
    for stream in streams:
        yield Outgoing(stream.key, stream.start())
        together = max(1, _BLOCK_ROWS // options.layers)
        for first in range(0, options.prompt, together):
            places = range(first, min(first + together, options.prompt))
            yield Outgoing(stream.key, stream.block(places, rows[places.start : places.stop]))
    for at in range(options.prompt, options.prompt + options.generated):
        for stream in streams:
            yield Outgoing(stream.key, stream.block([at], rows[at : at + 1], step=at))
    for stream in streams:
        yield Outgoing(stream.key, stream.end())


# --- what is measured, each in a process of its own


def read_raw(settings: Any, topic: str, numbers: Sequence[int], *, as_replay: bool = False) -> dict[str, float]:  # noqa: ANN401
    """Read partitions one after the other, and do nothing with them."""
    if as_replay:
        keep_freed_memory(KEPT_BYTES)
    ends = OffsetLookup(settings).end([(topic, number) for number in numbers])
    size, began = 0, 0.0
    started, cpu = time.perf_counter(), time.process_time()
    for where, end in ends.items():
        consumer = Consumer(reader_config(settings) | (IN_BULK if as_replay else {}))
        consumer.assign([TopicPartition(where.topic, where.number, 0)])
        position = 0
        while position < end:
            for message in consumer.consume(1000, 0.25):
                began = began or time.perf_counter()
                if message.error() is None:
                    size += len(message.value() or b"")
                    position = (message.offset() or 0) + 1
        consumer.close()
    return _rates(size / 1e6, started, cpu) | {"began": began, "ended": time.perf_counter()}


def replay_all(config: Path, out: Path, workers: int) -> dict[str, float]:
    """Replay both partitions."""
    from probe_consumers.replay_command import replay
    from probe_consumers.replay_order import Origins, ReplayOrder
    from probe_consumers.replay_range import RangeRequest

    def order(name: str, ends: dict[int | None, int] | None = None) -> ReplayOrder:
        return ReplayOrder(
            origins=Origins(config=config),
            point="residual",
            out=out / name,
            range=RangeRequest(ends=ends),
            workers=workers,
            compare="none",
        )

    replay(order("first", {None: 30}))
    started, cpu = time.perf_counter(), time.process_time()
    replay(order("few", {None: 30}))
    start_s, start_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    before = _of_children_s()
    started, cpu = time.perf_counter(), time.process_time()
    pace = Pace(workers)
    summary = replay(order("all"), pace.shown).summary
    assert summary["by_probe"]["guard"]["errors"] == 0
    found = _rates(summary["records"]["bytes"] / 1e6, started, cpu)
    return found | {
        "scores": summary["scores"],
        "start_s": round(start_s, 2),
        "start_cpu_s": round(start_cpu_s, 2),
        "pace_mb_per_s": round(pace.mb_per_s(), 1),
        "child_cpu_s": round(_of_children_s() - before, 2),
    }


class Pace:
    """Notes how far the parts of a replay are, and when.

    Args:
        workers: parts at a time.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._seen: list[tuple[float, list[Checkpoint]]] = []

    @contextmanager
    def shown(self, out: Path, plan: Plan) -> Iterator[Watcher]:
        """Look whenever a replay says that it has come further."""

        def watch() -> None:
            reached = [read_checkpoint(part_folder(out, number)) for number in plan.numbers]
            self._seen.append((time.perf_counter(), [item for item in reached if item is not None]))

        yield watch

    def mb_per_s(self) -> float:
        """Return the rate from when as many parts as can have begun, until one is done; 0 where that never was."""
        seen = [item for item in self._seen if sum(bool(part.read_bytes) for part in item[1]) >= self._workers]
        stop = next((at for at, item in enumerate(seen) if any(part.done for part in item[1])), 0)
        if not stop:
            return 0.0
        size = [sum(part.read_bytes for part in seen[at][1]) for at in (0, stop)]
        return (size[1] - size[0]) / 1e6 / (seen[stop][0] - seen[0][0])


def _of_children_s() -> float:
    """Return the CPU time of processes that this one has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def export_all(settings: Any, plan: Any, out: Path, megabytes: float) -> dict[str, float]:  # noqa: ANN401
    """Export both partitions as a dataset."""
    from probe_consumers.dataset_export import ExportOrder, export
    from probe_consumers.dataset_source import KafkaSource

    started, cpu = time.perf_counter(), time.process_time()
    export(KafkaSource(settings), plan, ExportOrder(points=("residual",)), out)
    return _rates(megabytes, started, cpu)


def train_on(dataset: Path, out: Path, megabytes: float) -> dict[str, float]:
    """Train a probe on a dataset: of the kinds the one whose reading weighs most."""
    from undercurrent.cli.main import PROG_NAME, app
    from undercurrent.cli.running import run

    started, cpu = time.perf_counter(), time.process_time()
    code = run(
        app,
        PROG_NAME,
        ["probe", "train", str(dataset), "--out", str(out), "--label", "bad", "--kind", "mean-difference"],
    )
    assert code == 0
    return _rates(megabytes, started, cpu)


def _rates(megabytes: float, started: float, cpu: float) -> dict[str, float]:
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "mb_per_s": round(megabytes / seconds, 1),
        "mb_per_cpu_s": round(megabytes / cpu_s, 1),
        "peak_rss_mib": round(peak_kib / 1024),
        "peak_child_rss_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
    }


def alone(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:  # noqa: ANN401
    """Run something in a fresh process and return what it gives."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(function, *arguments).result()
    print(f"{getattr(function, '__name__', 'read_raw as a replay')}: {found}", flush=True)
    return found


def read_by_two(settings: Any, topic: str) -> list[dict[str, float]]:  # noqa: ANN401 - the broker's settings
    """Return what two processes tell that read a partition each, at the same time."""
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for _ in (0, 1)]
        for pool in pools:  # started, and the code loaded
            pool.submit(_rates, 0.0, 0.0, 0.0).result()
        running = [pool.submit(read_raw, settings, topic, (number,)) for number, pool in enumerate(pools)]
        found = [item.result() for item in running]
    print(f"read_by_two: {found}", flush=True)
    return found


def read_s(found: Sequence[dict[str, float]]) -> float:
    """Return the seconds from the first record to the last one of processes that read; they have one clock."""
    return max(item["ended"] for item in found) - min(item["began"] for item in found)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--generated", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replay-only", action="store_true", help="Neither export nor train.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, apache_kafka() as broker:
        folder = Path(name)
        with ProbeBench(broker.settings(), folder, layers=range(options.layers)) as bench:
            print(json.dumps(measured(bench, folder, options)))


def measured(bench: ProbeBench, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the streams, measure, and return the figures: of each kind the fastest of some rounds, taken in turn."""
    weight = np.random.default_rng(1).standard_normal(options.width)
    bench.save_linear("guard", weight, threshold=1e9)
    config = bench.configure([{"name": "guard", "point": "residual", "probe": "./guard", "mode": "shadow"}])
    megabytes = write_streams(bench, options)
    raw, tuned, raw_two, one, two = [], [], [], [], []
    for number in range(options.rounds):
        raw.append(alone(read_raw, bench.settings, bench.topic, (0, 1)))
        tuned.append(alone(partial(read_raw, as_replay=True), bench.settings, bench.topic, (0, 1)))
        raw_two.append(read_by_two(bench.settings, bench.topic))
        one.append(alone(replay_all, config, folder / f"one-{number}", 1))
        two.append(alone(replay_all, config, folder / f"two-{number}", 2))
    beyond = {} if options.replay_only else exported_and_trained(bench, folder, megabytes)
    rate, as_replay, replayed = (max(item["mb_per_cpu_s"] for item in found) for found in (raw, tuned, one))
    paces = [max(item["pace_mb_per_s"] for item in found) for found in (one, two)]
    assert paces[0], "a part is over before its pace is seen: more --megabytes"
    scaling = paces[1] / paces[0]
    raw_scaling = min(read_s([item]) for item in raw) / min(map(read_s, raw_two))
    return {
        "megabytes": round(megabytes),
        "width": options.width,
        "layers": options.layers,
        "tokens_of_a_prompt": options.prompt,
        "generated_tokens": options.generated,
        "raw_mb_per_cpu_s": rate,
        "raw_as_replay_mb_per_cpu_s": as_replay,
        "replay_mb_per_cpu_s": replayed,
        "replay_mb_per_s": max(item["mb_per_s"] for item in one),
        "replay_peak_rss_mib": max(item["peak_rss_mib"] for item in one),
        "replay_ratio": round(replayed / rate, 3),
        "replay_ratio_as_replay": round(replayed / as_replay, 3),
        "scaling_2": round(scaling, 3),
        "raw_scaling_2": round(raw_scaling, 3),
        "scaling_2_of_raw": round(scaling / raw_scaling, 3),
        "scaling_2_with_start": round(min(item["seconds"] for item in one) / min(item["seconds"] for item in two), 3),
        "start_of_2_s": min(item["start_s"] for item in two),
        "start_cpu_s": min(item["start_cpu_s"] for item in one),
        "replay_cpu_s": [min(item["cpu_s"] for item in one), min(item["child_cpu_s"] for item in two)],
        **beyond,
    }


def exported_and_trained(bench: ProbeBench, folder: Path, megabytes: float) -> dict[str, float]:
    """Export the topic, train on what was exported, and return the figures."""
    exported = alone(export_all, bench.settings, bench.plan, folder / "dataset", megabytes)
    trained = alone(train_on, folder / "dataset", folder / "trained", megabytes)
    return {
        "export_mb_per_s": exported["mb_per_s"],
        "export_peak_rss_mib": exported["peak_rss_mib"],
        "train_mb_per_s": trained["mb_per_s"],
        "train_peak_rss_mib": trained["peak_rss_mib"],
    }


if __name__ == "__main__":
    main()
