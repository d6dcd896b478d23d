"""Two tensor-parallel ranks on a CPU: what they capture is whole, equal, and published once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import MAX_LEN
from inprocess import Ask, Capturing

from undercurrent.core import Probe, ProbeFactory, ProbeRegistry, ProbeResult
from undercurrent.router import Router
from undercurrent.spec import ExtractionPoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.alone]

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ASKS = [
    Ask("long", list(range(3, 60))),
    Ask("short", list(range(5, 20)), params={"max_tokens": 12}),
    Ask("late", list(range(40, 70)), after=4),
]


@pytest.fixture(scope="module")
def ranks(models):
    with Capturing(models["llama"], environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **RANKS) as engine:
        yield engine


def runtime(worker):
    from undercurrent.adapters.vllm import compat

    return type(compat.runtime_of(worker)).__name__


def holds_a_ring(_worker):
    return any(
        "undercurrent-ring" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    )


def lying(worker):
    """Let an MLP hand on its part of the sum, as some models do; return why its tap is refused."""
    from undercurrent.adapters.vllm import compat
    from undercurrent.adapters.vllm.checked_taps import CheckedTaps
    from undercurrent.capture.points import TapGroup
    from undercurrent.errors import CaptureError

    runner, config = compat.runner_for(worker), worker.vllm_config
    refused = []
    for kind, liar in (
        ("mlp_out", "mlp.down_proj"),
        ("attn_out", "self_attn.o_proj"),
        ("attn_out", "mlp.gate_up_proj"),
    ):
        module = runner.model.get_submodule(f"model.layers.1.{liar}")
        before, module.reduce_results = getattr(module, "reduce_results", None), False
        group = TapGroup(tensor_type=kind, layers=(0, 1), dtype="float32", width=64)
        taps = CheckedTaps(runner, config, (group,), 1 << 30)
        try:
            taps.when_warm(everything=False)
            refused.append("")
        except CaptureError as exc:
            refused.append(str(exc))
        finally:
            taps.drop()
            module.reduce_results = before
    return refused


def test_one_rank_publishes_and_the_other_holds_no_ring(ranks):
    assert ranks.engine.collective_rpc(runtime) == ["WorkerCapture", "SilentRank"]
    assert ranks.engine.collective_rpc(holds_a_ring) == [True, False]


def test_rows_are_those_of_one_process_and_come_once(ranks, models):
    together = ranks.run(ASKS)
    assert ranks.log.faults == []
    with Capturing(models["llama"]) as engine:
        alone = engine.run(ASKS)
    for name, expected in alone.items():
        found = together[name]
        assert found.token_ids == expected.token_ids
        assert found.streams.keys() == expected.streams.keys()
        for point, stream in expected.streams.items():
            mine = found.streams[point]
            assert (mine.positions, mine.token_ids) == (stream.positions, stream.token_ids)
            assert (mine.opened.layers, mine.opened.shards) == (stream.opened.layers, 1)
            assert mine.closed is not None
            assert mine.closed.emitted == len(stream.rows)
            np.testing.assert_allclose(np.stack(mine.rows), np.stack(stream.rows), rtol=1e-4, atol=1e-5)


def test_a_module_that_hands_on_a_part_of_a_sum_is_refused_by_name_on_every_rank(ranks):
    first, second = ranks.engine.collective_rpc(lying)
    assert first == second
    assert [text.partition(" is not the same on every rank")[0] for text in first] == [
        "mlp_out of layer 1 (LlamaMLP)",
        "attn_out of layer 1 (LlamaAttention)",
        "",
    ]


class Keeps(Probe):
    """Keeps every record that it is given."""

    def on_start(self, ctx):
        self.kept = {}

    def on_activation(self, record):
        assert (record.token_pos, record.layer) not in self.kept
        self.kept[record.token_pos, record.layer] = record.tensor.numpy().copy()

    def on_end(self, ctx):
        return ProbeResult(self.request_id, "p", "kept", metadata={"rows": self.kept})


def test_an_embedded_adapter_is_given_each_row_once(models, monkeypatch):
    from undercurrent.adapters.vllm import VLLMEngineAdapter

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    registry, results = ProbeRegistry(), {}
    registry.register("keeps", ProbeFactory(Keeps))
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    arguments = {"max_model_len": MAX_LEN, "dtype": "float32", "block_size": 32}
    with Router(registry) as router, VLLMEngineAdapter() as adapter:
        router.on_request_end(lambda name, found: results.update({name: found}))
        adapter.load_model(str(models["llama"]), tensor_parallel_size=2, allow_unsupported_executor=True, **arguments)
        asked = ExtractionPoint(
            name="p", layers=(0, 3), tensor_type="residual_stream", position="*", probe_type="keeps"
        )
        adapter.register_extraction("x", [asked])
        adapter.generate("x", "every row once", sampling, router)
        prompt = adapter.tokenizer.encode("every row once")
    rows = results["x"]["p"].metadata["rows"]
    with Capturing(models["llama"]) as engine:
        alone = engine.run([Ask("x", prompt, points=("residual",), params=sampling)])["x"].streams["residual"]
    assert sorted(rows) == [(at, layer) for at in alone.positions for layer in (0, 3)]
    for at, row in zip(alone.positions, alone.rows, strict=True):
        for layer in (0, 3):
            np.testing.assert_allclose(rows[at, layer], row[layer], rtol=1e-4, atol=1e-5)
