"""Probe hosts that are killed, frozen, joined and cut off in mid-stream: every output exactly once all the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import uuid

import numpy as np
import pytest

from tests.faults.rounds import Rounds
from undercurrent.evaluation.diff import collect
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.messages import BindingMode, VerdictKind
from undercurrent.testing.brokers import QUICK, apache_kafka
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

LAYERS = (0, 1)
# A killed member's partitions are free after this; production leaves more time.
BINDINGS = [
    {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"},
    {"name": "mean", "point": "residual", "probe": "./mean", "mode": "flag"},
]


def make_bench(broker, folder, assignor, partitions=3):
    options = {} if assignor is Assignor.CONSUMER else QUICK
    bench = ProbeBench(broker.settings(**options), folder, assignor=assignor, layers=LAYERS, partitions=partitions)
    bench.save_linear("guard", [1.0, -0.5, 0.25, 2.0], threshold=3.0)
    bench.save_linear("mean", [0.5, 0.5, 0.5, 0.5], threshold=0.4, layer=1, aggregation={"kind": "mean"})
    return bench


class Traffic(Rounds):
    """Streams written in rounds, so that many are open at any time; every third reaches the guard's threshold."""

    def __init__(self, bench, count=10, blocks=40, seed=0):
        self.bench = bench
        self.blocks = blocks
        self.names = [f"request-{number}" for number in range(count)]
        self.hot = {name for number, name in enumerate(self.names) if number % 3 == 0}
        self._streams = {name: StreamBuilder(name, layers=LAYERS, prompt_len=2) for name in self.names}
        self._rng = np.random.default_rng(seed)
        self._written = dict.fromkeys(self.names, 0)

    @property
    def open(self):
        """Streams of which the log has the start and not the end."""
        return [name for name, written in self._written.items() if 0 < written <= self.blocks]

    def round(self):
        """Append one message to each stream that is not finished; return whether any was left."""
        todo = [name for name, written in self._written.items() if written <= self.blocks + 1]
        # Streams begin and end at different times.
        for at, name in enumerate(todo):
            written = self._written[name]
            if written == 0 and at > 4 + max(self._written.values()) // 4:
                continue
            self.bench.write(name.encode(), [self._message(name, written)])
            self._written[name] += 1
        return any(written <= self.blocks + 1 for written in self._written.values())

    def _message(self, name, written):
        stream = self._streams[name]
        if written == 0:
            return stream.start()
        if written > self.blocks:
            return stream.end()
        rows = self._rng.normal(scale=0.2, size=(1, 2, 4))
        if name in self.hot and written == self.blocks // 2:
            rows[0, 0] = [1, 0, 0, 1.5]
        return stream.block([written - 1], rows)


def wait_for_results(bench, traffic, timeout_s=90):
    expected = len(traffic.names) * len(BINDINGS)
    bench.wait(lambda: len(bench.last_words()) >= expected, f"{expected} results", timeout_s, interval_s=0.5)


def check_exactly_once(bench, traffic):
    verdicts = bench.verdicts()
    told = collect(verdicts)
    assert {name.request_id for name in told} == set(traffic.names)
    assert len(told) == len(traffic.names) * len(BINDINGS)
    for name, telling in told.items():
        assert [item.kind for item in telling.last_words] == ["result"], (name, bench.logs())
        assert telling.doubled == 0, name
        layer = 0 if name.probe == "guard" else 1
        assert sorted(telling.scores) == [(at, layer) for at in range(traffic.blocks)], name
        assert (telling.last_words[0].complete, telling.last_words[0].scored) == (True, traffic.blocks)
    signals = [item for item in verdicts if item.kind is VerdictKind.SIGNAL]
    assert len({(item.request_id, item.probe) for item in signals}) == len(signals)
    aborts = [item for item in signals if item.mode is BindingMode.ABORT]
    assert {item.request_id for item in aborts} == traffic.hot
    # An abort may be sent again by whoever took over: under the same id, so that it is the same abort.
    assert {command.command_id for command in bench.commands()} == {item.command_id for item in aborts}
    assert bench.dead_letters() == []


def replay(bench, config):
    out = bench.folder / "replay"
    argv = [sys.executable, "-m", "undercurrent.cli", "replay", "--config", str(config), "--point", "residual"]
    done = subprocess.run(
        [*argv, "--out", str(out), "--fail-on-diff"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ,
    )
    return done.returncode, json.loads((out / "report.json").read_text())


def check_replay(bench, traffic, config):
    code, report = replay(bench, config)
    assert (code, report["equal"]) == (0, True), report["differences"][:5]
    pairs = len(traffic.names) * len(BINDINGS)
    assert (report["verdicts_compared"], report["scores_compared"]) == (pairs, pairs * traffic.blocks)


def in_mid_stream(bench):
    """Return a configuration, traffic of which some streams are open, and the host that has said something of them."""
    config = bench.configure(BINDINGS)
    traffic = Traffic(bench, count=8)
    host = bench.start_host(config)
    traffic.rounds(8)
    bench.wait(bench.verdicts, "verdicts")
    traffic.rounds(2)
    assert len(traffic.open) >= 4
    return config, traffic, host


def finish(bench, traffic, config, *hosts):
    """End every stream and then the hosts, which all must have lived to see it; nothing is missing or doubled."""
    traffic.finish()
    wait_for_results(bench, traffic)
    assert all(host.running for host in hosts), bench.logs()
    assert [host.terminate() for host in hosts] == [0] * len(hosts), bench.logs()
    check_exactly_once(bench, traffic)
    check_replay(bench, traffic, config)


@pytest.mark.parametrize(
    ("assignor", "slot"),
    [(Assignor.COOPERATIVE_STICKY, "0"), (Assignor.CONSUMER, None), (Assignor.RANGE, None)],
    ids=["cooperative, slot", "consumer", "range"],
)
def test_a_host_that_is_killed_in_mid_stream_writes_everything_once(apache_broker, tmp_path, assignor, slot):
    rng = random.Random(5)
    with make_bench(apache_broker, tmp_path, assignor) as bench:
        config = bench.configure(BINDINGS, **({"slot": slot} if slot else {}))
        traffic = Traffic(bench)
        host = bench.start_host(config)
        for _ in range(2):
            seen = len(bench.verdicts())
            traffic.rounds(8)
            bench.wait(lambda seen=seen: len(bench.verdicts()) > seen, "verdicts", interval_s=0.05)
            # Some of these rounds are committed, some are in a transaction, some are not even read.
            traffic.rounds(rng.randrange(1, 4))
            assert len(traffic.open) >= 4
            assert host.running, bench.logs()
            host.kill()
            traffic.rounds(2)
            host = bench.start_host(config)
        finish(bench, traffic, config, host)


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_frozen_owner_that_thaws_writes_nothing_twice(apache_broker, tmp_path, assignor):
    with make_bench(apache_broker, tmp_path, assignor, partitions=1) as bench:
        config, traffic, frozen = in_mid_stream(bench)
        frozen.freeze()
        other = bench.start_host(config)
        seen = len(bench.verdicts())
        traffic.rounds(6)
        bench.wait(lambda: len(bench.verdicts()) > seen, "the other member took over", interval_s=0.5)
        frozen.thaw()
        finish(bench, traffic, config, frozen, other)


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER, Assignor.RANGE])
def test_members_come_and_go_in_mid_stream(apache_broker, tmp_path, assignor):
    with make_bench(apache_broker, tmp_path, assignor) as bench:
        config = bench.configure(BINDINGS)
        traffic = Traffic(bench)
        first = bench.start_host(config)
        traffic.rounds(6)
        bench.wait(bench.verdicts, "verdicts")
        second = bench.start_host(config)

        def both_hold_some():
            traffic.round()
            held = {beat.member: beat.partitions for beat in bench.heartbeats()}
            return len(held) == 2 and all(held.values())

        bench.wait(both_hold_some, "both members hold partitions", interval_s=0.2)
        assert len(traffic.open) >= 4
        assert first.terminate() == 0, bench.logs()
        finish(bench, traffic, config, second)


def test_partitions_wait_for_the_open_transaction_of_their_last_owner(apache_broker, tmp_path):
    """Pins read_committed: without it the new owner is told an offset that the open transaction is about to move."""
    with make_bench(apache_broker, tmp_path, Assignor.COOPERATIVE_STICKY, partitions=1) as bench:
        config = bench.configure(BINDINGS)
        done = StreamBuilder("done", layers=LAYERS)
        values = [done.start(), done.block([0], np.zeros((1, 2, 4))), done.end()]
        bench.write(done.key, values)
        last_owner = TransactionalWriter(bench.settings, f"{bench.group}.{uuid.uuid4().hex}", transaction_timeout_s=60)
        last_owner.init(30.0)
        with GroupSubscriber(bench.settings, bench.group, [bench.topic], _Nobody()) as member:
            bench.wait(lambda: member.poll_batch(1, 0.2) or member.assigned, "the last owner's partitions")
            last_owner.begin()
            metadata = HostMetadata(emitted_up_to=len(values)).to_text()
            last_owner.send_offsets({(bench.topic, 0): (len(values), metadata)}, member.consumer_group_metadata())
        # What is committed here names no set of probes.
        bench.start_host(config, options=["--change"])
        beats = bench.wait(lambda: len(found := bench.heartbeats()) >= 3 and found, "a member that has asked")
        assert {beat.partitions for beat in beats} == {()}
        last_owner.commit()
        last_owner.close()
        new = StreamBuilder("new", layers=LAYERS)
        bench.write(new.key, [new.start(), new.block([0], np.zeros((1, 2, 4))), new.end()])
        bench.wait(lambda: len(bench.last_words()) >= 2, "results of the new stream")
        assert {item.request_id for item in bench.verdicts()} == {"new"}


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_broker_that_dies_in_mid_stream_leaves_no_gap_and_no_double(tmp_path, assignor):
    with apache_kafka() as broker, make_bench(broker, tmp_path, assignor) as bench:
        config, traffic, host = in_mid_stream(bench)
        broker.kill()
        broker.start()
        finish(bench, traffic, config, host)


def test_a_broker_that_is_frozen_past_the_transactions_timeout_costs_no_output(tmp_path):
    # A single node that is fenced has no leader to offer: this is about transactions, so it is not fenced.
    unfenced = {"broker.session.timeout.ms": "120000"}
    with (
        apache_kafka(properties=unfenced) as broker,
        make_bench(broker, tmp_path, Assignor.COOPERATIVE_STICKY) as bench,
    ):
        config, traffic, host = in_mid_stream(bench)
        broker.pause()
        thaw = threading.Timer(12.0, broker.resume)
        thaw.start()
        thaw.join()
        finish(bench, traffic, config, host)


class _Nobody:
    def on_assigned(self, partitions):
        pass

    def on_revoked(self, partitions):
        pass

    def on_lost(self, partitions):
        pass
