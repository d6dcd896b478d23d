"""Two pipeline stages on a CPU: an engine worker publishes what each captures, and a probe host joins it.

vLLM alone stops in the first step of two eager stages: nobody has allocated what the second one receives. The run of
the self-check has, so this works with capture and only with it.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from every_point import (
    Reference,
    every_points,
    expert_model,
    meets_a_stop,
    stops_met,
    tempting_prompts,
    wrong_rows,
)
from harness import LAYERS, MAX_LEN, WIDTH
from inprocess import Ran

from undercurrent.codec import as_array, positions, token_ids
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import ProbeVerdict, PromptRequest, Sampling, StreamStarted, VerdictKind
from undercurrent.protocol.streams import Arrived, Closed, StreamTable
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.vllm, pytest.mark.kafka, pytest.mark.timeout(300), pytest.mark.alone]

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ARGS = {
    "pipeline_parallel_size": 2,
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 32,
}
TOKENS = 16
ON_LAYERS = {"first": 1, "last": 3}
"""A probe on a layer of each stage."""


def direction(layer):
    return np.random.default_rng(layer).normal(size=WIDTH).astype(np.float32)


@pytest.fixture(scope="module")
def model(models):
    return expert_model(models["llama"])


@pytest.fixture(scope="module")
def points(model):
    return every_points(model, inputs=(0, 1, 3))


@pytest.fixture(scope="module")
def reference(model):
    """One engine in this process that computes what two stages did."""
    with Reference.of(model) as made:
        yield made


@pytest.fixture(scope="module")
def alone(reference):
    """Requests as one engine runs them, one longer than a step; in the texts of most a stop token is generated."""
    runs = reference.generate(tempting_prompts(), TOKENS)
    stopped = [run for run in runs if meets_a_stop(run)]
    assert len(stopped) >= 2, "no stop token is ever generated: choose other prompts"
    return [runs[0], *stopped[:3]]


@pytest.fixture(scope="module")
def bench(apache_broker, tmp_path_factory, points):
    """A probe host, and the topics that it reads."""
    folder = tmp_path_factory.mktemp("stages")
    with EngineBench(apache_broker.settings(), folder, points=points, partitions=1) as made:
        for name, layer in ON_LAYERS.items():
            LinearProbe.from_arrays(
                direction(layer), 0.0, layer=layer, tensor_type="residual_stream", threshold=1e9, name=name
            ).save(folder / name)
        bindings = [{"name": n, "point": "all", "probe": f"./{n}", "mode": "shadow"} for n in ON_LAYERS]
        process = AppProcess("probe_consumers", made.configure_host(*bindings), folder / "host.log")
        try:
            yield made
        finally:
            process.close()


@pytest.fixture(scope="module")
def ran(bench, model, alone):
    """What stood on the topics when two stages had run the requests: their ids, and verdicts by request and probe."""
    worker = bench.start_worker(
        bench.configure(engine={"kind": "vllm", "model": str(model), "check_plans": True, "args": ARGS}), ENVIRONMENT
    )
    worker.wait_ready(150)
    ids = [f"stages-{n}" for n in range(len(alone))]
    for name, run in zip(ids, alone, strict=True):
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request = PromptRequest(
            request_id=name, prompt_token_ids=run.prompt, sampling=sampling, created_at_us=time.time_ns() // 1000
        )
        bench.send_request(request)
    bench.wait_finals(ids, 60)

    def results():
        found = {(v.request_id, v.probe): v for v in bench.said(ProbeVerdict) if v.kind is VerdictKind.RESULT}
        return found if len(found) == len(ids) * len(ON_LAYERS) else None

    said = bench.wait(results, f"a result of each probe on each stream; {bench.logs()}", 60)
    assert worker.terminate(60) == 0, bench.logs()
    return ids, said


def joined(bench, spec):
    """Return what a reader of a point's topic is shown of each request, as if one engine had captured it."""
    table, shown = StreamTable(spec.name), {}
    for offset, (_, message) in enumerate(bench.messages(bench.plan.activations(spec.name))):
        for event in table.observe(offset, message):
            if isinstance(event, Arrived):
                block = event.block
                assert block.layers == spec.layers
                stream = shown.setdefault(block.request_id, empty(spec))
                stream.opened.row_shape, stream.opened.width = block.row_shape, block.width
                stream.positions += [int(at) for at in positions(block)]
                stream.token_ids += [int(token) for token in token_ids(block)]
                stream.rows += list(as_array(block))
            elif isinstance(event, Closed):
                stream, end = shown.setdefault(event.stream.id.request_id, empty(spec)), event.stream
                dropped = sum(sum(shard.ended.dropped) for shard in end.shards.values())
                assert end.complete, (spec.name, end.end_reason)
                stream.closed = SimpleNamespace(reason=end.end_reason, emitted=len(stream.positions), dropped=dropped)
    return shown


def empty(spec):
    opened = SimpleNamespace(layers=spec.layers, row_shape=(), width=0)
    return SimpleNamespace(opened=opened, positions=[], token_ids=[], rows=[], closed=None)


@pytest.fixture(scope="module")
def together(bench, ran, alone, points):
    """The requests, with what each stage published of them put together."""
    ids, _ = ran
    shown = {spec.name: joined(bench, spec) for spec in points}
    return {
        name: Ran(one.prompt, one.token_ids, {spec.name: shown[spec.name][name] for spec in points})
        for name, one in zip(ids, alone, strict=True)
    }


def test_the_rows_of_two_stages_are_joined_into_those_of_one_engine(bench, ran, together, points, reference):
    log = [message for _, message in bench.messages(bench.plan.activations("all"))]
    starts = sorted((m.shard, m.shards, m.layers) for m in log if isinstance(m, StreamStarted))
    assert starts == sorted([(0, 2, (0, 1)), (1, 2, (2, 3))] * len(together))
    assert wrong_rows(together, points, reference) == []
    assert stops_met(together) >= 1


def test_the_rows_of_one_stage_alone_are_one_shard(bench, ran, points):
    for spec in points:
        log = [message for _, message in bench.messages(bench.plan.activations(spec.name))]
        stages = {layer // (LAYERS // 2) for layer in spec.layers}
        assert {m.shards for m in log if isinstance(m, StreamStarted)} == {len(stages)}, spec.name


def test_a_probe_on_a_layer_of_either_stage_scores_what_one_engine_computes(ran, together):
    ids, said = ran
    for name in ids:
        stream = together[name].streams["all"]
        for probe, layer in ON_LAYERS.items():
            result = said[name, probe]
            best = max(float(row[layer] @ direction(layer)) for row in stream.rows)
            assert (result.complete, result.missing, result.scored) == (True, 0, len(stream.positions))
            assert result.score == pytest.approx(best, rel=1e-4)
