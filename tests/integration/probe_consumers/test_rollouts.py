"""Versions rolled out by command to probe hosts that run: swapped in mid-traffic, killed in between, replayed."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from probe_consumers.__main__ import read_config
from probe_consumers.rollout_log import read_rollouts
from undercurrent.cli.main import app
from undercurrent.cli.running import EXIT_FAILED, EXIT_USAGE, run
from undercurrent.codec import Codec
from undercurrent.evaluation.diff import collect
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import Rollout, RolloutChange, VerdictKind
from undercurrent.protocol.rollouts import in_share
from undercurrent.testing.brokers import QUICK, apache_kafka
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.testing.streams import StreamBuilder

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

# A killed member's partitions are free after this; production leaves more time.
WEIGHT = [1.0, -0.5, 0.25, 2.0]


@contextlib.contextmanager
def make_bench(broker, folder):
    with ProbeBench(broker.settings(**QUICK), folder, assignor=Assignor.RANGE) as made:
        made.save_linear("own", WEIGHT, threshold=4.0, version="0")
        made.save_linear("guard/1", WEIGHT, threshold=3.0, version="1")
        made.save_linear("guard/2", WEIGHT, threshold=2.0, version="2")
        yield made


@pytest.fixture
def bench(embedded_broker, tmp_path):
    with make_bench(embedded_broker, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def patient_broker():
    """It gives a killed member's partitions to another one, and is not taken for dead when it gets no core for 2 s."""
    yield from or_skip(apache_kafka(properties={"broker.session.timeout.ms": "30000"}))


@pytest.fixture
def real_bench(patient_broker, tmp_path):
    with make_bench(patient_broker, tmp_path) as made:
        yield made


def undercurrent(config, *argv, group="probe"):
    """Run a command of `undercurrent probe`; return its exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(app, "undercurrent", [group, *map(str, argv), "--config", str(config)])
    return code, out.getvalue(), err.getvalue()


def done(config, *argv, **options):
    code, out, err = undercurrent(config, *argv, **options)
    assert code == 0, err
    return out


class Traffic:
    """Streams that are open over several calls."""

    def __init__(self, bench):
        self.bench = bench
        self.open = {}

    def start(self, names, rollouts):
        for name in names:
            made = StreamBuilder(name, rollouts=rollouts)
            self.open[name] = made, np.random.default_rng(sum(name.encode()))
            self.bench.write(made.key, [made.start()])

    def step(self, names, position, peak=None):
        for name in names:
            made, rng = self.open[name]
            row = rng.normal(scale=0.3, size=(1, 1, 4))
            if peak is not None:
                row[0, 0] = [peak, 0, 0, 0]
            self.bench.write(made.key, [made.block([position], row)])

    def end(self, names):
        for name in names:
            made, _ = self.open.pop(name)
            self.bench.write(made.key, [made.end()])


def test_a_swap_in_mid_traffic_with_a_kill_in_between_is_as_without_and_is_replayed_bit_for_bit(real_bench):
    bench = real_bench
    binding = {"name": "guard", "point": "residual", "probe": "./own", "mode": "abort"}
    config = bench.configure([binding])
    traffic, host = Traffic(bench), bench.start_host(config)
    before, during, after = ([f"{part}{n}" for n in range(4)] for part in ("a", "b", "c"))
    done(config, "deploy", "guard", bench.folder / "guard/1", "--mode", "abort", "--reason", "sharper")
    done(config, "promote", "guard")
    known = read_rollouts(bench.settings, bench.plan.rollouts).read_to
    traffic.start(before, 0)
    traffic.start(during, known)
    traffic.step([*before, *during], 0)
    bench.wait(lambda: len(bench.verdicts(VerdictKind.WATERMARK)) >= 8, "scores of both", 60, 0.5)
    done(config, "deploy", "guard", bench.folder / "guard/2", "--mode", "abort", "--share", "1")
    traffic.start(after, read_rollouts(bench.settings, bench.plan.rollouts).read_to)
    host.kill()
    # 2.5 is above the threshold of version 2 alone, 3.5 above that of version 1 too.
    traffic.step([*before, *during, *after], 1, peak=2.5)
    bench.start_host(config)
    bench.wait(
        lambda: len({v.request_id for v in bench.verdicts(VerdictKind.SIGNAL)}) >= 4, "the aborts of version 2", 90, 0.5
    )
    traffic.step([*before, *during], 2, peak=3.5)
    traffic.end([*before, *during, *after])
    bench.wait(lambda: len(bench.last_words()) >= 12, "a result per request", 60, 0.5)

    told = {item.request_id: item for item in bench.last_words()}
    assert len(bench.last_words()) == len(told) == 12
    assert Counter((name[0], item.probe_version, str(item.mode), str(item.action)) for name, item in told.items()) == {
        ("a", "0", "abort", "continue"): 4,
        ("b", "1", "abort", "abort"): 4,
        ("c", "2", "abort", "abort"): 4,
    }
    assert {item.probe_fingerprint for item in told.values() if item.request_id[0] == "c"} == {
        item.probe_fingerprint for item in bench.verdicts() if item.probe_version == "2"
    }
    assert {(c.request_id[0], c.probe_version) for c in bench.commands()} == {("b", "1"), ("c", "2")}
    assert all(telling.doubled == 0 for telling in collect(bench.verdicts()).values())

    # What is in force now does not matter to what was in force then.
    done(config, "rollback", "guard")
    done(config, "pause", "guard")
    out = bench.folder / "replay"
    done(config, "--point", "residual", "--out", out, "--fail-on-diff", "--workers", 1, group="replay")
    report = json.loads((out / "report.json").read_text())
    assert (report["equal"], report["verdicts_compared"], report["scores_compared"]) == (True, 12, 28)


def test_a_candidate_in_shadow_judges_its_share_beside_the_one_that_guards(bench):
    config = bench.configure([{"name": "guard", "point": "residual", "probe": "./own", "mode": "abort"}])
    bench.start_host(config)
    traffic, names = Traffic(bench), [f"r{n}" for n in range(40)]
    done(config, "deploy", "guard", bench.folder / "guard/2", "--share", "0.5")
    traffic.start(names, read_rollouts(bench.settings, bench.plan.rollouts).read_to)
    traffic.step(names, 0, peak=2.5)
    traffic.end(names)
    chosen = {name for name in names if in_share("guard", name, 0.5)}
    assert 0 < len(chosen) < 40
    bench.wait(lambda: len(bench.last_words()) >= 40 + len(chosen), "a result per request and version")
    found = {(item.request_id, item.probe, item.probe_version, str(item.action)) for item in bench.last_words()}
    assert found == {(name, "guard", "0", "continue") for name in names} | {
        (name, "guard@candidate", "2", "abort") for name in chosen
    }
    assert bench.commands() == []
    [state] = json.loads(done(config, "rollouts", "guard", "--json"))["in_force"]
    assert (state["deployed"]["version"], state["deployed"]["mode"]) == ("0", "abort")
    assert (state["candidate"]["artefact"], state["candidate"]["share"]) == ("guard/2", 0.5)


def test_what_anybody_wrote_onto_the_topic_is_shown_and_changed_further(bench):
    config = bench.configure([{"name": "guard", "point": "residual", "probe": "./own"}])
    entry = Rollout(
        probe="guard", sequence=1, entry_id="e", change=RolloutChange.PAUSE, paused=True, created_at_us=2**62
    )
    whole, other = (Codec().encode(item) for item in (entry, replace(entry, probe="nobody")))
    publisher = BulkPublisher(bench.settings)
    values = (b"garbage", None, whole[:-3], other, whole, whole)
    publisher.write({Partition(bench.plan.rollouts, 0): [Outgoing(b"k", value) for value in values]})
    publisher.close()
    told = json.loads(done(config, "rollouts", "guard", "--json"))
    assert ([item["sequence"] for item in told["history"]], told["in_force"][0]["paused"]) == ([1], True)
    assert told["history"][0]["created_at"] == f"{2**62} us"
    assert "paused" not in done(config, "resume", "guard")


def test_what_cannot_be_rolled_out_is_refused_with_what_would_be_right(bench, tmp_path_factory):
    config = bench.configure([{"name": "guard", "point": "residual", "probe": "./own"}])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (bench.folder / "guard" / "empty").mkdir()
    bench.save_linear("guard/deep", WEIGHT, threshold=2.0, layer=7)
    bench.save_linear("guard/wide", [*WEIGHT, 1.0], threshold=2.0)
    for argv, said in [
        (("deploy", "nobody", bench.folder / "guard/1"), "no binding of this host is called so; there are guard"),
        (("deploy", "guard", elsewhere), "accepted: a folder below"),
        (("deploy", "guard", bench.folder / "guard/empty"), "probe.json"),
        (("deploy", "guard", bench.folder / "guard/deep"), "reads layer 7; point 'residual' has [0]"),
        (("deploy", "guard", bench.folder / "guard/wide"), "was fitted on a width of 5, the deployed version on 4"),
        (("deploy", "guard", bench.folder / "guard/1", "--share", "0"), "accepted: above 0, up to 1"),
        (("promote", "guard"), "no candidate to promote"),
        (("rollback", "guard"), "no other version was deployed before"),
    ]:
        code, _, err = undercurrent(config, *argv)
        assert code in (EXIT_FAILED, EXIT_USAGE), argv
        assert said in err, argv
    assert read_rollouts(bench.settings, bench.plan.rollouts).probes == ()
    assert read_config(config).artefacts == bench.folder
