"""A probe host as a process on a real broker: what it writes, and a replay of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pyarrow.parquet as pq
import pytest

from undercurrent.evaluation.diff import collect
from undercurrent.kafka.client import Assignor
from undercurrent.protocol.messages import BindingMode, VerdictKind
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder, publisher_started

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

WEIGHT = [1.0, -0.5, 0.25, 2.0]


@pytest.fixture
def bench(broker, tmp_path):
    with ProbeBench(broker.settings(), tmp_path, assignor=broker.assignors[-1], layers=(0, 1)) as made:
        made.save_linear("guard", WEIGHT, threshold=4.0)
        yield made


def guard(mode="abort", **fields):
    return {"name": "guard", "point": "residual", "probe": "./guard", "mode": mode, **fields}


def write_requests(bench, names, *, blocks=6, dtype="float32", hot=()):
    """Write whole streams; those in `hot` reach the guard's threshold at position 4."""
    for name in names:
        rng = np.random.default_rng(sum(name.encode()))
        stream = StreamBuilder(name, layers=(0, 1), dtype=dtype, prompt_len=3)
        values = [stream.start(), stream.block([0, 1, 2], rng.normal(scale=0.3, size=(3, 2, 4)))]
        for at in range(3, 3 + blocks):
            rows = rng.normal(scale=0.3, size=(1, 2, 4))
            if name in hot and at == 4:
                rows[0, 0] = [1, 0, 0, 2]
            values.append(stream.block([at], rows, captured_at_us=1000 + at))
        bench.write(stream.key, [*values, stream.end()])


def replay(bench, config, *options):
    """Run the command as a user would; return its exit code and its report."""
    out = bench.folder / f"replay-{len(list(bench.folder.glob('replay-*')))}"
    argv = [sys.executable, "-m", "undercurrent.cli", "replay", "--config", str(config), "--point", "residual"]
    done = subprocess.run(
        [*argv, "--out", str(out), *options], capture_output=True, text=True, timeout=120, check=False, env=os.environ
    )
    report = out / "report.json"
    assert report.exists(), done.stderr
    return done.returncode, json.loads(report.read_text()), out


def test_a_host_writes_what_a_replay_says_again_bit_for_bit(bench):
    names = [f"r{i}" for i in range(12)]
    config = bench.configure([guard(), guard("shadow", name="shade")])
    host = bench.start_host(config)
    write_requests(bench, names[:6], hot=("r1", "r4"))
    write_requests(bench, names[6:], dtype="bfloat16", hot=("r8",))
    bench.wait(lambda: len(bench.last_words()) >= 24, "a result per request and probe")
    verdicts = bench.verdicts()
    told = collect(verdicts)
    assert len(told) == 24
    for telling in told.values():
        assert len(telling.last_words) == 1
        assert sorted(telling.scores) == [(at, 0) for at in range(9)]
        assert telling.doubled == 0
    signals = [item for item in verdicts if item.kind is VerdictKind.SIGNAL]
    assert {(item.request_id, item.probe) for item in signals} == {
        (name, probe) for name in ("r1", "r4", "r8") for probe in ("guard", "shade")
    }
    assert all(item.token_pos == 4 for item in signals)
    commands = bench.commands()
    assert sorted(command.request_id for command in commands) == ["r1", "r4", "r8"]
    assert {command.command_id for command in commands} == {
        item.command_id for item in signals if item.mode is BindingMode.ABORT
    }
    assert all(command.captured_at_us == 1004 and command.published_at_us > 1_000_000 for command in commands)
    beats = bench.wait(lambda: [beat for beat in bench.heartbeats() if beat.partitions], "a heartbeat")
    assert (beats[-1].service, beats[-1].partition_count) == (bench.group, 2)
    assert {bound.probe: bound.mode for bound in beats[-1].probes} == {"guard": "abort", "shade": "shadow"}
    assert host.terminate() == 0, bench.logs()

    code, report, out = replay(bench, config, "--fail-on-diff")
    assert (code, report["equal"], report["empty"]) == (0, True, False), report
    assert (report["verdicts_compared"], report["scores_compared"]) == (24, 24 * 9)
    assert (report["max_abs_diff"], report["decisions_changed"]) == (0.0, 0)
    assert pq.read_table(out / "scores.parquet").num_rows == 24 * 9
    assert len(bench.commands()) == 3

    code, report, _ = replay(bench, config, "--fail-on-diff", "--request", "r1", "--request", "r2")
    assert (code, report["verdicts_compared"]) == (0, 4)
    code, report, _ = replay(bench, config, "--fail-on-diff", "--since", "2100-01-01")
    assert (code, report["equal"], report["empty"], report["verdicts_compared"]) == (1, False, True, 0)
    code, report, _ = replay(bench, config, "--since", "2100-01-01")
    assert (code, report["equal"]) == (0, False)


def test_a_host_tells_how_it_is(bench):
    host = bench.start_host(bench.configure([guard()]))

    def get(path):
        found = re.search(r"metrics and health at (http://\S+)", host.log.read_text())
        try:
            with urllib.request.urlopen(found[1] + path, timeout=5) as answer:  # noqa: S310 - our own server
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    bench.wait(lambda: "metrics and health at" in host.log.read_text())
    bench.wait(lambda: get("/readyz")[0] == 200, "ready")
    assert get("/healthz")[0] == 200
    stream = StreamBuilder("open", layers=(0, 1))
    bench.write(stream.key, [stream.start(), stream.block([0, 1], np.zeros((2, 2, 4)))])
    write_requests(bench, ["r"], hot=("r",))
    bench.wait(bench.last_words)
    lag = f'undercurrent_probe_lag_records{{partition="{bench.partition(b"open")}",point="residual"}} 0.0'
    bench.wait(lambda: lag in get("/metrics")[1], "a true lag of 0 while a stream is open")
    # The broker shows a verdict a little before the loop hears that its transaction is through.
    result = 'undercurrent_verdicts_total{kind="result",point="residual",probe="guard"} 1.0'
    metrics = bench.wait(lambda: (text := get("/metrics")[1]) and result in text and text, "a verdict that is counted")
    assert 'undercurrent_probe_open_streams{point="residual"} 1.0' in metrics
    assert 'undercurrent_probe_aborts_total{point="residual",probe="guard"} 1.0' in metrics
    assert "undercurrent_probe_transaction_seconds_bucket" in metrics
    wrong = StreamBuilder("wrong", layers=(1,))
    bench.write(wrong.key, [wrong.start()])
    status, said = bench.wait(lambda: (found := get("/readyz"))[0] == 503 and found, "not ready")
    assert status == 503
    assert "guard" in said
    assert "layer 0" in said
    assert host.terminate() == 0, bench.logs()


def test_a_restarted_host_goes_on_and_writes_nothing_again(bench):
    config = bench.configure([guard()])
    first = bench.start_host(config)
    open_stream = StreamBuilder("long", layers=(0, 1))
    bench.write(b"long", [open_stream.start(), open_stream.block([0, 1], np.full((2, 2, 4), 0.1))])
    write_requests(bench, ["a", "b", "c"], hot=("b",))
    bench.wait(lambda: len(bench.last_words()) >= 3)
    assert first.terminate() == 0, bench.logs()
    bench.write(b"long", [open_stream.block([2], np.full((1, 2, 4), 0.2))])
    second = bench.start_host(config)
    bench.write(b"long", [open_stream.block([3], np.full((1, 2, 4), 0.2)), open_stream.end()])
    bench.wait(lambda: any(item.request_id == "long" for item in bench.last_words()))
    assert second.terminate() == 0, bench.logs()
    told = collect(bench.verdicts())
    assert {len(telling.last_words) for telling in told.values()} == {1}
    assert sum(telling.doubled for telling in told.values()) == 0
    [long] = [telling for name, telling in told.items() if name.request_id == "long"]
    assert sorted(long.scores) == [(at, 0) for at in range(4)]
    assert (long.last_words[0].complete, long.last_words[0].scored) == (True, 4)
    assert [command.request_id for command in bench.commands()] == ["b"]


def test_what_cannot_be_read_or_belongs_to_no_stream_is_dead_lettered_and_streams_go_on(bench):
    config = bench.configure([guard()])
    host = bench.start_host(config)
    stream, stray = StreamBuilder("r", layers=(0, 1)), StreamBuilder("never-started", layers=(0, 1))
    stray.skip()
    here = bench.partition(b"r")
    bench.write(b"r", [stream.start(), b"\x00garbage", stream.block([0], np.zeros((1, 2, 4)))])
    bench.write(stray.key, [stray.block([0], np.zeros((1, 2, 4)))], partition=here)
    bench.write(None, [publisher_started("another", 5)], partition=here)
    bench.write(b"r", [None, stream.end()])
    [result] = bench.wait(bench.last_words)
    assert (result.complete, result.missing, result.scored) == (True, 0, 1)
    letters = bench.dead_letters()
    found = [(dict(letter.headers)["undercurrent.cause"], letter.value, letter.partition) for letter in letters]
    assert [cause for cause, _, _ in found] == [b"poison", b"no_open_stream", b"poison"]
    assert found[0][1] == b"\x00garbage"
    assert {number for _, _, number in found} == {here}
    headers = dict(letters[0].headers)
    assert headers["undercurrent.topic"] == bench.topic.encode()
    assert headers["undercurrent.offset"] == b"1"
    assert host.terminate() == 0, bench.logs()


def test_gaps_superseded_attempts_and_dead_publishers_are_declared(bench):
    host = bench.start_host(bench.configure([guard("shadow")]))
    gap = StreamBuilder("gap", layers=(0, 1))
    values = [gap.start(), gap.block([0], np.zeros((1, 2, 4)))]
    gap.skip(3)
    bench.write(gap.key, [*values, gap.block([4], np.zeros((1, 2, 4))), gap.end(dropped=3)])
    old, new = StreamBuilder("twice", layers=(0, 1)), StreamBuilder("twice", attempt=2, layers=(0, 1))
    bench.write(old.key, [old.start(), old.block([0], np.zeros((1, 2, 4))), new.start()])
    bench.write(old.key, [old.block([1], np.zeros((1, 2, 4))), new.block([0], np.zeros((1, 2, 4))), new.end()])
    dead = StreamBuilder("dead", layers=(0, 1), engine="e", incarnation=3)
    bench.write(dead.key, [dead.start(), dead.block([0], np.zeros((1, 2, 4)))])
    bench.write(None, [publisher_started("e", 4)], partition=bench.partition(b"dead"))
    words = bench.wait(lambda: len(found := bench.last_words()) >= 4 and found)
    told = {
        (item.request_id, item.attempt): (item.complete, item.missing, item.partial, item.end_reason) for item in words
    }
    assert told == {
        ("gap", 1): (False, 3, True, "finished"),
        ("twice", 1): (False, 0, False, "superseded"),
        ("twice", 2): (True, 0, False, "finished"),
        ("dead", 1): (False, 0, False, "lost"),
    }
    marks = [item.clear_up_to for item in bench.verdicts(VerdictKind.WATERMARK) if item.request_id == "gap"]
    assert max(marks) == 0
    assert [dict(letter.headers)["undercurrent.cause"] for letter in bench.dead_letters()] == [b"no_open_stream"]
    assert host.terminate() == 0, bench.logs()


def test_a_new_group_from_latest_begins_at_the_end_and_stays_there(bench):
    write_requests(bench, ["old"])
    config = bench.configure([guard()], **{"from": "latest"})
    host = bench.start_host(config)
    bench.wait(lambda: [beat for beat in bench.heartbeats() if len(beat.partitions) == 2])
    write_requests(bench, ["new"])
    bench.wait(bench.last_words)
    assert host.terminate() == 0, bench.logs()
    assert {item.request_id for item in bench.verdicts()} == {"new"}


def test_a_replay_names_the_streams_that_its_range_cuts(bench):
    config = bench.configure([guard()])
    host = bench.start_host(config)
    names = ["a", "b", "c", "d"]
    write_requests(bench, names)
    open_stream = StreamBuilder("open", layers=(0, 1))
    bench.write(open_stream.key, [open_stream.start(), open_stream.block([0], np.zeros((1, 2, 4)))])
    bench.wait(lambda: len(bench.last_words()) >= 4)
    assert host.terminate() == 0, bench.logs()
    code, report, out = replay(bench, config, "--fail-on-diff", "--from-offset", "2")
    assert (code, report["equal"]) == (0, True), report
    cut = json.loads((out / "summary.json").read_text())["cut"]
    assert 1 <= cut["started_before_the_range"]["count"] <= 2
    assert report["verdicts_compared"] == 4 - cut["started_before_the_range"]["count"]
    assert [item["request_id"] for item in cut["unfinished_at_its_end"]["named"]] == ["open"]


def test_a_host_that_its_group_refuses_for_good_ends_and_says_why(apache_broker, tmp_path):
    settings = apache_broker.settings(**{"group.remote.assignor": "nonsense"})
    with ProbeBench(settings, tmp_path, assignor=Assignor.CONSUMER) as bench:
        bench.save_linear("guard", WEIGHT, threshold=4.0)
        host = bench.start_host(bench.configure([guard()]))
        assert host.wait(60.0) == 3, bench.logs()
        assert "beyond use" in bench.logs()


def test_topics_that_are_not_as_planned_end_a_host_at_its_start(bench):
    bench.save_linear("guard", WEIGHT, threshold=4.0)
    path = bench.configure([guard()])
    other = path.with_name("other.yaml")
    other.write_text(path.read_text().replace("activation_partitions: 2", "activation_partitions: 3"))
    assert bench.start_host(other).wait(60.0) == 1, bench.logs()
    assert f"{bench.topic}: 2 partitions, planned 3" in bench.logs()
    absent = path.with_name("absent.yaml")
    absent.write_text(path.read_text().replace(bench.plan.prefix, "absent"))
    assert bench.start_host(absent).wait(60.0) == 1, bench.logs()
    assert "absent.activations.residual: missing" in bench.logs()
