"""What capture and publishing cost the engine: paired visits of real vLLM with and without them.

    KAFKA_HOME=... python -m benchmarks.engine_overhead [--seconds 10] [--pairs 20] [--warm-up 90] [--seed 1]

All engines are resident; those that are not visited are stopped (SIGSTOP). Each variant's visit stands between two
visits of the plain engine, in an order that is shuffled each round, until the 95 % interval of its median ratio lies
within +-0.03 or there are `--pairs` of them. The last line is one JSON object. Figures are ratios of one run.

Before the first visit that counts, visits are published for `--warm-up` seconds: a broker that started a moment ago
compiles its code meanwhile and costs two to three times as much CPU per record as one that has served for some minutes.

After each visit that is published, a consumer reads the topic: what the engine computed, what the broker acknowledged
and what it read are equal to the last activation, and nothing was dropped, or the run ends.

    null_*       capture on; the ring's reader drops everything
    publish_*    capture on; the publisher process writes to Apache Kafka; `1k`: 4 of 8 layers of a model of width 1024
    idle         taps installed for all layers, no request captured
    control      plain engine, and beside it a publisher fed with the recorded frames of a publish_all visit: what any
                 capture that ends in Kafka must cost on these cores
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from benchmarks.overhead import load
from benchmarks.overhead.counting import Consumer, check_counts
from benchmarks.overhead.figures import Ratios
from benchmarks.overhead.processes import RING_BYTES, EngineProcess, Heard, Meter, Reader, Task
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from engine_worker.publishing import PublisherProcess
from undercurrent.capture.ring import Ring
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.tiny_models import build_tiny_model
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import Topic

VARIANTS = ("null_1", "null_all", "publish_1", "publish_all", "publish_1k", "idle", "control")
LAYERS_OF = {"1": [2], "all": list(range(load.LAYERS)), "1k": [1, 3, 5, 7]}
WIDE = "1k"
SOME, MANY = 16, 256


class Bench:
    """Engines, broker and readers of one run."""

    def __init__(self, broker: Broker, model: Path, wide: Path, folder: Path, seconds: float) -> None:
        self.broker, self.seconds, self.folder = broker, seconds, folder
        self.plain = EngineProcess(model, None)
        self.plain_wide = EngineProcess(wide, None)
        self.tapped = {
            name: EngineProcess(wide if name == WIDE else model, layers) for name, layers in LAYERS_OF.items()
        }
        self.recording = folder / "frames"
        self.recorded: dict[str, Any] = {}
        self.number = 0
        self.cost: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        self._publishers = 0
        for name in LAYERS_OF:
            topic = Topic(name=f"bench.{name}", partitions=load.PARTITIONS, retention_ms=600_000)
            TopicAdmin(broker.settings()).create([topic])

    def visit_plain(self, variant: str = "") -> float:
        """Return the tokens per second of the plain engine that a variant is compared with."""
        answer = self._visit(self.plain_wide if variant.endswith(WIDE) else self.plain)
        return _rate(answer)

    def visit(self, variant: str) -> tuple[float, float]:
        """Return a variant's tokens per second at the last token and at the broker's last acknowledgement."""
        kind, _, name = variant.partition("_")
        if kind == "null":
            return self._null(variant, name)
        if kind == "publish":
            return self._publish(variant, name)
        if kind == "idle":
            rate = _rate(self._visit(self.tapped["all"], captured=False))
            return rate, rate
        return self._control()

    def warm_up(self, seconds: float) -> None:
        """Publish for a while, and forget the figures."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.visit("publish_all")
            print(
                f"warming up   {self.cost['publish_all'][-1]['broker_us_per_token']:8.1f} us of broker per token",
                flush=True,
            )
        self.cost.clear()

    def record(self) -> None:
        """Keep the frames of one visit with all layers, for the control."""
        engine = self.tapped["all"]
        assert engine.ring is not None
        with self._reader("record", engine.ring, str(self.recording)):
            self.recorded = self._visit_to_the_end(engine)

    def added_us(self, name: str, requests: int) -> dict[str, float]:
        """Return what capture adds to the engine's thread in a step, microseconds of CPU, and the step.

        Args:
            name: of the engine; its last visits, since the clocks around its taps stay.
            requests: at once.
        """
        engine = self.tapped[name]
        assert engine.ring is not None
        with self._reader("null", engine.ring):
            answer = self._visit_to_the_end(engine, time_taps=True, concurrency=requests)
        steps = answer["steps"]
        return {
            "around_the_model": answer["capture_us"] / steps,
            "taps": answer["tap_us"] / steps,
            "step": 1e6 * (answer["ended_s"] - answer["started_s"]) / steps,
        }

    def close(self) -> None:
        """End every engine."""
        for engine in (self.plain, self.plain_wide, *self.tapped.values()):
            engine.close()

    def _null(self, variant: str, name: str) -> tuple[float, float]:
        engine = self.tapped[name]
        assert engine.ring is not None
        with self._reader("null", engine.ring):
            answer = self._visit_to_the_end(engine)
        ms_per_step = 1e3 * (answer["ended_s"] - answer["started_s"]) / answer["steps"]
        self.cost[variant].append(
            {"capture_us_per_step": answer["capture_us"] / answer["steps"], "ms_per_step": ms_per_step}
        )
        return _rate(answer), _rate(answer)

    def _publish(self, variant: str, name: str) -> tuple[float, float]:
        engine = self.tapped[name]
        assert engine.ring is not None
        heard, publisher = self._publisher(engine.ring, name)
        consumer = Consumer(self.broker.settings(), f"bench.{name}")
        meter = Meter(publisher.pid, self.broker.pid)
        answer = self._visit(engine, asleep=False)
        wait_until(lambda: heard.ended >= answer["requests"], 120, "the last acknowledgement")
        engine.sleep()
        cpu = meter.read()
        publisher.end()
        if answer["dropped"]:
            raise SystemExit(f"{answer['dropped']} rows were dropped: a faster reader or a larger ring is needed")
        self._check(variant, name, answer, heard, consumer)
        self._note(variant, cpu, heard, answer)
        started = answer["started_s"]
        return answer["tokens"] / (answer["ended_s"] - started), answer["tokens"] / (heard.last_ended_s - started)

    def _control(self) -> tuple[float, float]:
        # A ring of its own: what is played opens the same streams each time.
        played = Ring.create(RING_BYTES)
        heard, publisher = self._publisher(played, "all")
        consumer = Consumer(self.broker.settings(), "bench.all")
        command = [sys.executable, "-m", "benchmarks.overhead.readers", "play", played.path, str(self.recording)]
        player = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert player.stdin is not None
        assert player.stdout is not None
        player.stdout.readline()
        meter = Meter(publisher.pid, self.broker.pid)
        player.stdin.close()
        answer = self._visit(self.plain)
        if player.wait(60) != 0:
            raise SystemExit("the player of the control ended early; its reason is above")
        wait_until(lambda: played.stats().used_bytes == 0, 30, "an empty ring")
        time.sleep(0.5)
        cpu = meter.read()
        publisher.end()
        played.close()
        self._check("control", "all", self.recorded, heard, consumer)
        self._note("control", cpu, heard, answer)
        return _rate(answer), _rate(answer)

    @staticmethod
    def _check(variant: str, name: str, answer: dict[str, Any], heard: Heard, consumer: Consumer) -> None:
        computed = answer["positions"] * len(LAYERS_OF[name])
        check_counts(variant, computed, answer["requests"], heard.records, consumer.read())

    def _note(self, variant: str, cpu: dict[str, float], heard: Heard, answer: dict[str, Any]) -> None:
        figures = {
            "publisher_us_per_record": 1e6 * cpu["publisher"] / max(1, heard.records),
            "publisher_us_per_token": 1e6 * cpu["publisher"] / answer["tokens"],
            "broker_us_per_token": 1e6 * cpu["broker"] / answer["tokens"],
            "ack_p50_ms": 1e3 * float(np.percentile(heard.ack_s, 50)),
            "ack_p99_ms": 1e3 * float(np.percentile(heard.ack_s, 99)),
            "captured_to_acknowledged_p50_ms": 1e3 * float(np.percentile(heard.publish_s, 50)),
            "captured_to_acknowledged_p99_ms": 1e3 * float(np.percentile(heard.publish_s, 99)),
        }
        if "steps" in answer:
            figures["capture_us_per_step"] = answer["capture_us"] / answer["steps"]
            figures["ms_per_step"] = 1e3 * (answer["ended_s"] - answer["started_s"]) / answer["steps"]
        self.cost[variant].append(figures)

    def _visit(self, engine: EngineProcess, *, asleep: bool = True, **task: Unpack[Task]) -> dict[str, Any]:
        self.number += 1
        answer = engine.visit(self.seconds, self.number, **task)
        if asleep:
            engine.sleep()
        return answer

    def _visit_to_the_end(self, engine: EngineProcess, **task: Unpack[Task]) -> dict[str, Any]:
        """Visit, and let the reader have the ends of the last streams too: the next reader does not know them."""
        ring = engine.ring
        assert ring is not None
        answer = self._visit(engine, asleep=False, **task)
        time.sleep(0.5)
        wait_until(lambda: ring.stats().used_bytes == 0, 30, "an empty ring")
        engine.sleep()
        return answer

    def _publisher(self, ring: Ring, name: str) -> tuple[Heard, PublisherProcess]:
        heard = Heard()
        publisher = PublisherProcess(lambda call: call(), heard)
        self._publishers += 1
        settings = PublisherSettings(
            ring=ring.path,
            identity=Identity(engine="bench", incarnation=self._publishers, model="tiny"),
            kafka={"bootstrap_servers": self.broker.bootstrap_servers},
            topics={load.POINT: f"bench.{name}"},
            partitions={load.POINT: load.PARTITIONS},
            max_record_bytes={load.POINT: 1_000_000},
        )
        publisher.start(settings)
        publisher.wait_ready(30)
        return heard, publisher

    def _reader(self, role: str, ring: Ring, *arguments: str) -> Reader:
        return Reader([sys.executable, "-m", "benchmarks.overhead.readers", role, ring.path, *arguments])


def _rate(answer: dict[str, Any]) -> float:
    """Return tokens per second."""
    return float(answer["tokens"]) / (answer["ended_s"] - answer["started_s"])


def run(
    bench: Bench, variants: list[str], pairs: int, seed: int, warm_up_s: float
) -> tuple[dict[str, Ratios], dict[str, Ratios], Ratios]:
    """Visit until every variant is settled; return ratios at the last token, at the last ack, and to the control."""
    order = random.Random(seed)
    last, acked, to_control = ({v: Ratios() for v in VARIANTS} for _ in range(3))
    for variant in ("", WIDE):
        bench.visit_plain(variant)  # the first visit after the start is slower
    for name in LAYERS_OF:
        bench.visit(f"null_{name}")
    bench.record()
    bench.warm_up(warm_up_s)
    before = {wide: bench.visit_plain(WIDE if wide else "") for wide in (False, True)}
    while open_variants := [v for v in variants if not last[v].settled(0.03, pairs)]:
        # The control's ratio is taken in the same round as the variant's that it is for.
        wanted = sorted({*open_variants, "publish_all", "control"} if "control" in open_variants else open_variants)
        order.shuffle(wanted)
        rates: dict[str, float] = {}
        for variant in wanted:
            at_token, at_ack = bench.visit(variant)
            wide = variant.endswith(WIDE)
            after = bench.visit_plain(variant)
            plain = (before[wide] + after) / 2
            last[variant].values.append(at_token / plain)
            acked[variant].values.append(at_ack / plain)
            rates[variant] = at_token / plain
            before[wide] = after
            print(f"{variant:12} {at_token:8.0f} tok/s  plain {plain:8.0f}  ratio {at_token / plain:.3f}", flush=True)
        if "control" in rates and _same_cost(bench):
            to_control["control"].values.append(rates["publish_all"] / rates["control"])
    return last, acked, to_control["control"]


def _same_cost(bench: Bench) -> bool:
    """Return whether the last control's publisher cost per record what the last variant's did, within 20 %."""
    ours = bench.cost["publish_all"][-1]["publisher_us_per_record"]
    control = bench.cost["control"][-1]["publisher_us_per_record"]
    return abs(control / ours - 1) <= 0.20


def _median(rows: list[dict[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return round(float(np.median(values)), 3) if values else None


def summary(bench: Bench, last: dict[str, Ratios], acked: dict[str, Ratios], to_control: Ratios) -> dict[str, Any]:
    """Return the last line."""
    costs = {
        variant: {name: _median(rows, name) for name in sorted({key for row in rows for key in row})}
        for variant, rows in bench.cost.items()
        if rows
    }
    added = {f"{name}_{requests}": bench.added_us(name, requests) for name in ("1", "all") for requests in (SOME, MANY)}

    def total(name: str) -> float:
        return round(added[name]["around_the_model"] + added[name]["taps"], 1)

    return {
        "ratio_null_1": last["null_1"].as_json(),
        "ratio_null_all": last["null_all"].as_json(),
        "ratio_to_control": to_control.as_json(),
        "ratio_1_layer": last["publish_1"].as_json(),
        "ratio_all_layers": last["publish_all"].as_json(),
        "ratio_1k_4of8": last["publish_1k"].as_json(),
        "ratio_taps_idle": last["idle"].as_json(),
        "ratio_1_layer_acknowledged": acked["publish_1"].as_json(),
        "ratio_all_layers_acknowledged": acked["publish_all"].as_json(),
        "ratio_of_control": last["control"].as_json(),
        "added_step_share": round(total(f"all_{SOME}") / added[f"all_{SOME}"]["step"], 5),
        "added_us_16": total(f"1_{SOME}"),
        "added_us_256": total(f"1_{MANY}"),
        "added_us_16_all": total(f"all_{SOME}"),
        "added_us_256_all": total(f"all_{MANY}"),
        "added": added,
        "cost": costs,
        "versions": bench.plain.versions,
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="load of one visit")
    parser.add_argument("--pairs", type=int, default=20, help="most pairs of a variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--warm-up", type=float, default=90.0, help="seconds of publishing before the first pair")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model("llama", folder / "model", layers=load.LAYERS, width=load.WIDTH, max_len=256)
        wide = build_tiny_model("llama", folder / "wide", layers=8, width=1024, max_len=256)
        broker = stack.enter_context(apache_kafka())
        bench = Bench(broker, model, wide, folder, options.seconds)
        stack.callback(bench.close)
        last, acked, to_control = run(bench, options.variants, options.pairs, options.seed, options.warm_up)
        print(json.dumps(summary(bench, last, acked, to_control)))


if __name__ == "__main__":
    main()
