"""Drift as a host exports it: from committed results, each request once, and nothing for probes without a reference."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from probe_consumers.chunks import chunks_of
from probe_consumers.drift import ROW_EVERY, DriftSeer
from tests.unit.probe_consumers.dataset_doubles import Topics
from tests.unit.probe_consumers.host_doubles import Cluster, Later, make_host, turn_until
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.codec import Codec
from undercurrent.errors import AbortableTransactionError
from undercurrent.evaluation.fit.reference import ReferenceBuilder
from undercurrent.probes import LinearProbe
from undercurrent.probes.folder import LinearArtefact, make_config
from undercurrent.protocol.host_events import Step
from undercurrent.protocol.streams import StreamTable
from undercurrent.testing.streams import StreamBuilder

THRESHOLD = 1.0
TOKENS = 3


def rows_of(rng, *, scale=1.0, mix=0.02):
    """Rows of one request, [3, 1, 4]; the first element is the score."""
    values = rng.normal(size=(TOKENS, 1, 4)) * scale
    values[:, 0, 0] *= 0.3
    values[1, 0, 0] += 1.5 * (rng.random() < mix)
    return values.astype(np.float32)


def reference_of(rng, requests=400):
    builder = ReferenceBuilder()
    highest = []
    for _ in range(requests):
        rows = rows_of(rng)[:, 0]
        score = float(rows[:, 0].max())
        highest.append(score)
        norms = np.linalg.norm(rows, axis=1).astype(np.float32)
        builder.take(np.arange(TOKENS), rows[:, 0], norms, score, score, 1.0)
    return dict(builder.finish(np.array(highest) >= THRESHOLD, np.ones(requests), THRESHOLD))


def stream_of(name, values):
    stream = StreamBuilder(name)
    return [stream.start(), stream.block(range(TOKENS), values), stream.end()]


@pytest.fixture(scope="module")
def reference():
    return reference_of(np.random.default_rng(0))


def gauges(host, family="undercurrent_probe_drift"):
    return {
        sample.labels.get("figure", family): sample.value
        for metric in host.registry.collect()
        for sample in metric.samples
        if sample.name == family
    }


def windows(host):
    return sum(gauges(host, "undercurrent_probe_drift_windows_total").values())


def test_a_request_counts_once_its_result_is_committed_and_never_again(reference):
    cluster, rng = Cluster(), np.random.default_rng(1)
    executor = Later()
    with make_host(cluster, reference=reference, executor=executor) as host:
        turn_until(host, lambda: cluster.committed is not None)
        assert all(math.isnan(value) for value in gauges(host).values())
        executor.keeps = True
        for number in range(10):
            cluster.append(*stream_of(f"a{number}", rows_of(rng)))
        host._next_transaction_s = 0.0
        turn_until(host, lambda: executor.kept)
        assert windows(host) == 0
        cluster.fail = [AbortableTransactionError("not now")]
        executor.run()
        # Ten requests were read twice, and are ten.
        turn_until(host, lambda: windows(host) == 1)
        for _ in range(5):
            host.turn()
        assert windows(host) == 1
        figures = gauges(host)
        assert set(figures) == {"psi", "ks", "mean_shift", "norm_ratio", "missing_share", "verdict_rate"}
        assert figures["missing_share"] == 0.0
        assert math.isfinite(figures["psi"])
        labels = {
            frozenset(sample.labels)
            for metric in host.registry.collect()
            if metric.name.startswith("undercurrent_probe_drift")
            for sample in metric.samples
        }
        assert labels <= {frozenset({"point", "probe", "version"}), frozenset({"point", "probe", "version", "figure"})}
    # Its successor rebuilds open streams from before the commit, silently, and begins its windows anew.
    cluster.append(*stream_of("a10", rows_of(rng)))
    with make_host(cluster, reference=reference, window_requests=2) as host:
        turn_until(host, lambda: len(cluster.verdicts()) >= 11)
        for _ in range(5):
            host.turn()
        assert windows(host) == 0
        assert math.isnan(gauges(host)["psi"])


def test_a_probe_without_a_reference_has_no_figures_and_no_rows_are_looked_at():
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*stream_of("a", np.ones((TOKENS, 1, 4), np.float32)))
        turn_until(host, lambda: cluster.verdicts())
        assert gauges(host) == {}
        assert host.runner.drift.take().norms == {}


def test_of_every_so_many_rows_one_is_taken_however_they_are_batched(reference):
    with make_host(Cluster(), reference=reference) as host:
        bounds = host.bounds
    seers = [DriftSeer() for _ in range(2)]
    stream, table = StreamBuilder("a", prompt_len=1), StreamTable("residual")
    steps = []
    at = 0
    for size in (1, 70, 5, 200, 1, 1, 33, 9):
        value = np.zeros((size, 1, 4), np.float32)
        value[:, 0, 1] = np.exp(np.arange(at, at + size) % 7)
        for raw in [*([stream.start()] if at == 0 else []), stream.block(range(at, at + size), value)]:
            for event in table.observe(len(steps), Codec().decode(raw)):
                steps.append(Step(partition=0, offset=len(steps), timestamp_us=0, event=event, silent=False))
        at += size
    seers[0].rows(chunks_of(steps).values(), lambda chunk: bounds)
    for step in steps:
        seers[1].rows(chunks_of([step]).values(), lambda chunk: bounds)
    taken = [next(iter(seer.take().norms.values())) for seer in seers]
    assert taken[0] == pytest.approx(taken[1])
    assert taken[0][1] == len(range(0, at, ROW_EVERY))
    assert taken[0][0] == pytest.approx(sum(row % 7 for row in range(0, at, ROW_EVERY)))
    seers[0].rows(
        [Step(partition=0, offset=0, timestamp_us=0, event=step.event, silent=True) for step in steps],
        lambda *of: bounds,
    )
    assert seers[0].take().norms == {}


def test_an_end_whose_counts_do_not_go_together_is_an_end_all_the_same(reference):
    cluster, stream = Cluster(), StreamBuilder("a")
    start, block = stream.start(), stream.block(range(TOKENS), np.ones((TOKENS, 1, 4), np.float32))
    with make_host(cluster, reference=reference, window_requests=1) as host:
        cluster.append(start, block, Codec().encode(replace(stream.ended(), dropped=())))
        turn_until(host, lambda: windows(host) == 1)
    assert [verdict.end_reason for verdict in cluster.verdicts() if verdict.end_reason] == ["finished"]


def test_a_version_whose_reference_is_damaged_judges_and_tells_no_drift(reference, caplog):
    with make_host(Cluster(), reference=reference) as host:
        (bound,) = host.bounds
    damaged = replace(bound.loaded.sample.artefact, reference={**reference, "drift_score.moments": np.zeros(1)})
    bounds = [replace(bound, loaded=replace(bound.loaded, sample=LinearProbe(damaged)))]
    stream, table, seer = StreamBuilder("a"), StreamTable("residual"), DriftSeer()
    raw = [stream.start(), stream.block(range(TOKENS), np.ones((TOKENS, 1, 4), np.float32))]
    steps = [
        Step(partition=0, offset=at, timestamp_us=0, event=event, silent=False)
        for at, value in enumerate(raw)
        for event in table.observe(at, Codec().decode(value))
    ]
    seer.rows(chunks_of(steps).values(), lambda chunk: bounds)
    assert seer.take().norms == {}
    assert "binding 'guard': reference.drift_*: cannot be read" in caplog.text


@pytest.fixture(scope="module")
def probe(reference, tmp_path_factory):
    data = {"name": "guard", "layer": 0, "tensor_type": "residual_stream", "threshold": THRESHOLD}
    folder = tmp_path_factory.mktemp("probes") / "guard"
    LinearProbe(LinearArtefact(np.array([1, 0, 0, 0], np.float32), 0.0, make_config(data, "test"), reference)).save(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """500 requests as the reference's, 500 of another mix of prompts, 500 of a perturbed layer, and 7 more."""
    topics, rng = Topics(), np.random.default_rng(2)
    for number in range(1507):
        change = [{}, {"mix": 0.4}, {"scale": 1.4}, {}][number // 500]
        stream = StreamBuilder(f"r{number}", started_at_us=number + 1)
        values = rows_of(rng, **change)
        topics.activations(stream, stream.start(), stream.block(range(TOKENS), values), stream.end())
    folder = tmp_path_factory.mktemp("data") / "d"
    topics.export(folder)
    return folder


def drift(*arguments):
    return run(app, PROG_NAME, ["probe", "drift", *map(str, arguments)])


def test_recorded_windows_tell_what_has_changed_in_which(probe, dataset, capsys):
    assert drift(probe, dataset, "--json", "--fail-on-drift") == 1
    found = json.loads(capsys.readouterr().out)
    assert (len(found["windows"]), found["requests_left"], found["errors"]) == (3, 7, {})
    same, mix, scaled = found["windows"]
    assert same["raised"] == []
    assert {"psi", "ks", "mean_shift", "verdict_rate"} <= set(mix["raised"])
    assert "norm_ratio" not in mix["raised"]
    assert "norm_ratio" in scaled["raised"]
    assert scaled["figures"]["norm_ratio"] == pytest.approx(1.4, rel=0.05)
    assert mix["last_started_at_us"] < scaled["first_started_at_us"]

    assert drift(probe, dataset) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "window",
        "from",
        "(UTC)",
        "psi",
        "ks",
        "mean_shift",
        "norm_ratio",
        "missing_share",
        "verdict_rate",
    ]
    assert "!" not in lines[1]
    assert "!" in lines[2]
    assert lines[4].startswith("limit")
    assert "the last 7 requests: n/a (needs >= 500 requests, has 7)" in lines


def test_what_cannot_be_compared_is_said(probe, dataset, tmp_path, capsys):
    plain = LinearProbe.from_arrays([1, 0, 0, 0], 0.0, layer=0, tensor_type="residual_stream", threshold=1.0)
    plain.save(tmp_path / "plain")
    assert drift(tmp_path / "plain", dataset) == 1
    assert "carries no reference to tell drift by" in capsys.readouterr().err
    assert drift(probe, dataset, "--window", "499") == 2
    capsys.readouterr()
    assert drift(probe, dataset, "--window", "2000", "--fail-on-drift") == 1
    assert "the last 1,507 requests: n/a (needs >= 2,000 requests, has 1,507)" in capsys.readouterr().out


def test_watching_costs_little_beside_scoring(reference):
    """Not a promise of time: a host that watches takes less than twice the time of one that does not."""
    rng = np.random.default_rng(3)
    took = []
    for given in (None, reference):
        cluster = Cluster()
        with make_host(cluster, reference=given) as host:
            turn_until(host, lambda cluster=cluster: cluster.committed is not None)
            for number in range(200):
                cluster.append(*stream_of(f"a{number}", rows_of(rng)))
            began = time.process_time()
            turn_until(host, lambda cluster=cluster: len(cluster.verdicts()) >= 200)
            took.append(time.process_time() - began)
    assert took[1] < 2 * took[0] + 0.05
