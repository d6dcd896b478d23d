"""Captured tensors are what transformers computes, on real vLLM; and the checker that says so can fail."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from harness import LAYERS, TENSOR_TYPES, WIDTH
from parity import problems, set_residual_mode

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = (3, 17, 40, 61, 77, 90, 5, 110)
GENERATED = (12, 20, 5, 16, 9, 14, 25, 7)


def prompts(seed):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).tolist() for length in LENGTHS]


def run_eight(harness, prefix, seed):
    requests = [
        harness.request(f"{prefix}{i}", prompt, max_tokens=count)
        for i, (prompt, count) in enumerate(zip(prompts(seed), GENERATED, strict=True))
    ]
    runs = harness.run(requests)
    return {name: (run, {p: harness.streams[name, 0, p] for p in TENSOR_TYPES}) for name, run in runs.items()}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def finished(request, engines, models):
    """Eight concurrent requests with all they captured, and the oracle of their model."""
    harness = engines[request.param]
    return run_eight(harness, "parity", 1), HFOracle(models[request.param]), harness


def check(finished, oracle):
    out = []
    for run, captured in finished.values():
        sequence = run.sequence
        out += problems(captured, sequence, len(run.prompt), oracle.activations(sequence))
    return out


def test_eight_requests_at_once_match_transformers(finished):
    runs, oracle, _ = finished
    assert check(runs, oracle) == []
    for run, captured in runs.values():
        assert [d.finish_reason for d in run.deltas][-1] == "length"
        for stream in captured.values():
            assert stream.closed.reason == "finished"
            assert (stream.closed.emitted, stream.closed.dropped) == (len(stream.positions), 0)
            assert not stream.losses


def test_the_load_was_what_it_should_be(finished):
    """Chunks, mixed steps and decode steps of many requests all happened, else the parity test says little."""
    runs, *_ = finished
    by_step = {}
    for name, (run, captured) in runs.items():
        stream = captured["residual"]
        for step, position in zip(stream.steps, stream.positions, strict=True):
            by_step.setdefault(step, {}).setdefault(name, []).append(position < len(run.prompt))
        assert len(run.sequence) - 1 == len(stream.positions)
    assert any(len(rows) >= 6 for rows in by_step.values())
    assert any({True, False} <= {f for part in rows.values() for f in part} for rows in by_step.values())
    longest = runs["parity7"][1]["residual"]
    chunks = {s for s, p in zip(longest.steps, longest.positions, strict=True) if p < LENGTHS[7]}
    assert len(chunks) > 1


@pytest.mark.parametrize("point", ["residual", "attention", "mlp", "norm"])
def test_control_rows_shifted_by_one_fail(finished, point):
    runs, oracle, _ = finished
    spoilt = copy.deepcopy(runs)
    rows = spoilt["parity3"][1][point].rows
    rows[:] = rows[1:] + rows[:1]
    assert len(check(spoilt, oracle)) >= len(rows) // 2


def test_control_two_requests_swapped_fail(finished):
    runs, oracle, _ = finished
    spoilt = copy.deepcopy(runs)
    one, two = spoilt["parity2"][1]["residual"], spoilt["parity3"][1]["residual"]
    one.rows[:40], two.rows[:40] = two.rows[:40], one.rows[:40]
    assert len(check(spoilt, oracle)) >= 40


def test_control_a_doubled_and_a_missing_token_fail(finished):
    runs, oracle, _ = finished
    spoilt = copy.deepcopy(runs)
    stream = spoilt["parity1"][1]["mlp"]
    stream.positions[5], stream.token_ids[5], stream.rows[5] = (
        stream.positions[4],
        stream.token_ids[4],
        stream.rows[4],
    )
    assert any("positions" in line for line in check(spoilt, oracle))


def _tap_first(worker, mode):
    """In the worker: let residual taps read h alone, or what they read before."""
    from undercurrent.adapters.vllm import compat

    return set_residual_mode(compat.runtime_of(worker)._taps, mode)


def test_control_the_residual_as_h_instead_of_h_plus_r_fails(llama, models):
    before = llama.on_worker(_tap_first, "h")
    try:
        assert before == "h + r"
        spoilt = run_eight(llama, "control", 2)
    finally:
        llama.on_worker(_tap_first, before)
    oracle = HFOracle(models["llama"])
    found = check(spoilt, oracle)
    assert sum(line.startswith("residual") for line in found) >= sum(LENGTHS)
    assert not any(line.startswith(("mlp", "attention", "norm")) for line in found)
    assert check(run_eight(llama, "again", 2), oracle) == []


def test_a_report_says_what_the_self_check_found(engines):
    kinds = {family: harness.engine.report["residual_stream"] for family, harness in engines.items()}
    assert kinds == {"llama": {"LlamaDecoderLayer": "h + r"}, "gpt2": {"GPT2Block": "tensor"}}
    info = engines["llama"].engine.info
    assert (info.layers, info.width, info.dtype) == (LAYERS, WIDTH, "float32")
    assert len(info.model_fingerprint) == 64
