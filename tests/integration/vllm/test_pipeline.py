"""Two pipeline stages on a CPU: an engine worker publishes what each captures, and a probe host joins it.

vLLM alone stops in the first step of two eager stages: nobody has allocated what the second one receives. The run of
the self-check has, so this works with capture and only with it.
"""

from __future__ import annotations

import numpy as np
import pytest
import yaml
from harness import LAYERS, MAX_LEN, WIDTH
from inprocess import Ask, Capturing

from undercurrent.codec import as_array, positions, token_ids
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.reader import AssignedReader
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import ProbeVerdict, StreamStarted, VerdictKind
from undercurrent.protocol.streams import Arrived, Closed, StreamTable
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.vllm, pytest.mark.kafka, pytest.mark.timeout(300)]

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
ON_LAYERS = {"first": 1, "last": 3}
"""A probe on a layer of each stage."""


def direction(layer):
    return np.random.default_rng(layer).normal(size=WIDTH).astype(np.float32)


@pytest.fixture
def host(apache_broker, tmp_path, request):
    """A probe host, and the bench whose topics it reads."""
    with EngineBench(apache_broker.settings(), tmp_path, layers=tuple(range(LAYERS)), partitions=1) as bench:
        for name, layer in ON_LAYERS.items():
            LinearProbe.from_arrays(
                direction(layer), 0.0, layer=layer, tensor_type="residual_stream", threshold=1e9, name=name
            ).save(tmp_path / name)
        plan = bench.plan
        config = {
            "kafka": {"bootstrap_servers": bench.settings.bootstrap_servers, **bench.settings.options},
            "topics": {
                "prefix": plan.prefix,
                "prompt_partitions": plan.prompt_partitions,
                "activation_partitions": plan.activation_partitions,
                "verdict_partitions": plan.verdict_partitions,
            },
            "points": "points.yaml",
            "service": {"name": "probes"},
            "from": "earliest",
            "bindings": [
                {"name": name, "point": "residual", "probe": f"./{name}", "mode": "shadow"} for name in ON_LAYERS
            ],
        }
        (tmp_path / "host.yaml").write_text(yaml.safe_dump(config))
        process = AppProcess("probe_consumers", tmp_path / "host.yaml", tmp_path / "host.log")
        try:
            yield bench
        finally:
            process.close()


def verdicts(bench):
    starts = {(bench.plan.verdicts, number): 0 for number in range(bench.plan.verdict_partitions)}
    with AssignedReader(bench.settings, starts, isolation=Isolation.READ_COMMITTED) as reader:
        found = [bench.codec.decode(record.value) for record in reader.read_to_end(30.0)]
    return [message for message in found if isinstance(message, ProbeVerdict)]


def joined(messages):
    """Return what a reader of the topic is shown of each request: positions, token ids and rows; and how it ended."""
    table, shown, ended = StreamTable("residual"), {}, {}
    for offset, message in enumerate(messages):
        for event in table.observe(offset, message):
            if isinstance(event, Arrived):
                assert event.block.layers == tuple(range(LAYERS))
                parts = shown.setdefault(event.block.request_id, ([], [], []))
                for part, values in zip(parts, (positions, token_ids, as_array), strict=True):
                    part.extend(values(event.block))
            elif isinstance(event, Closed):
                ended[event.stream.id.request_id] = event.stream
    return shown, ended


def test_the_rows_of_two_stages_are_joined_into_those_of_one_engine(host, models):
    bench = host
    worker = bench.start_worker(
        bench.configure(engine={"kind": "vllm", "model": str(models["llama"]), "check_plans": True, "args": ARGS}),
        ENVIRONMENT,
    )
    worker.wait_ready(150)
    ids = bench.send(["a prompt that takes two chunks: " + "word " * 8, "short", "another one"], max_tokens=12,
                     temperature=0.0, ignore_eos=True)  # fmt: skip
    bench.wait_finals(ids, 60)

    def results():
        found = {(v.request_id, v.probe): v for v in verdicts(bench) if v.kind is VerdictKind.RESULT}
        return found if len(found) == len(ids) * len(ON_LAYERS) else None

    said = bench.wait(results, f"a result of each probe on each stream; {bench.logs()}", 60)
    assert worker.terminate(60) == 0, bench.logs()
    log = [message for _, message in bench.messages(bench.plan.activations("residual"))]
    starts = [message for message in log if isinstance(message, StreamStarted)]
    assert sorted((m.shard, m.shards, m.layers) for m in starts) == sorted([(0, 2, (0, 1)), (1, 2, (2, 3))] * len(ids))
    shown, ended = joined(log)
    assert {name: (stream.complete, stream.end_reason) for name, stream in ended.items()} == dict.fromkeys(
        ids, (True, "finished")
    )

    lengths = {message.request_id: message.prompt_len for message in starts}
    prompts = {name: [int(token) for token in shown[name][1][: lengths[name]]] for name in ids}
    with Capturing(models["llama"]) as engine:
        alone = engine.run(
            [Ask(name, prompt, points=("residual",), params={"max_tokens": 12}) for name, prompt in prompts.items()]
        )
    for name in ids:
        stream, (where, tokens, rows) = alone[name].streams["residual"], shown[name]
        assert ([int(at) for at in where], [int(token) for token in tokens]) == (stream.positions, stream.token_ids)
        np.testing.assert_allclose(np.stack(rows), np.stack(stream.rows), rtol=1e-4, atol=1e-5)
        assert max(map(int, where)) == lengths[name] + 12 - 2, "every token but the last was computed"
        for probe, layer in ON_LAYERS.items():
            result = said[name, probe]
            best = max(float(row[layer] @ direction(layer)) for row in stream.rows)
            assert (result.complete, result.missing, result.scored) == (True, 0, len(stream.positions))
            assert result.score == pytest.approx(best, rel=1e-4)
