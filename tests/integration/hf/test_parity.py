"""What the engine captures is what `transformers` computes for the whole sequence at once, and the check can fail."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
from hf_bench import EVERYWHERE, FAMILIES, POINTS, bench_of

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = pytest.mark.timeout(180)

TOLERANCE = 1e-5
"""Largest relative L2 distance of one row, fp32, with the attention kernel that the oracle uses."""

LENGTHS = (3, 40, 17, 90)
GENERATED = (12, 20, 5, 9)


def prompts(seed):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).tolist() for length in LENGTHS]


async def run_four(model):
    names = tuple(p.name for p in POINTS)
    # A step of 48 rows: the longer prompts come in chunks, between and beside the tokens of others.
    args = {"max_num_batched_tokens": 48, "attn_implementation": "eager"}
    async with bench_of(model, engine_args=args) as bench:
        requests = [
            bench.request(f"r{n}", prompt, names, max_tokens=count)
            for n, (prompt, count) in enumerate(zip(prompts(1), GENERATED, strict=True))
        ]
        found = await bench.run(*requests)
    sequences = [
        [*request.prompt_token_ids, *(token for delta in deltas for token in delta.token_ids)]
        for request, deltas in zip(requests, found, strict=True)
    ]
    assert [deltas[-1].finish_reason for deltas in found] == ["length"] * 4
    return bench.log, sequences


@pytest.fixture(scope="module", params=FAMILIES)
def captured(request, models):
    model = models(request.param)
    log, sequences = asyncio.run(run_four(model))
    oracle = HFOracle(model)
    return log.streams, sequences, [oracle.activations(sequence) for sequence in sequences]


def problems(streams, sequences, truths):
    found = []
    for number, (sequence, truth) in enumerate(zip(sequences, truths, strict=True)):
        for point in POINTS:
            stream = streams[f"r{number}", 0, point.name]
            wanted = list(point.positions(0, len(sequence) - 1, LENGTHS[number]))
            if stream.positions != wanted:
                found.append(f"{point.name} of r{number}: positions")
            if stream.token_ids != [sequence[position] for position in stream.positions]:
                found.append(f"{point.name} of r{number}: token ids")
            expected = truth[point.tensor_type.value]
            if point.name != "norm":
                expected = expected[:, list(point.layers)]
            for position, row in zip(stream.positions, stream.rows, strict=True):
                error = np.linalg.norm(row - expected[position], axis=-1) / np.linalg.norm(expected[position], axis=-1)
                if not error.max() <= TOLERANCE:
                    found.append(f"{point.name} of r{number}: position {position} is off by {error.max():.2g}")
    return found


def test_four_requests_at_once_match_the_oracle_in_all_tensor_types(captured):
    streams, sequences, truths = captured
    assert problems(streams, sequences, truths) == []
    for stream in streams.values():
        assert (stream.closed.reason, stream.closed.emitted, stream.losses) == ("finished", len(stream.positions), [])


def test_the_load_was_what_it_should_be(captured):
    streams, *_ = captured
    steps = [set(streams[f"r{number}", 0, "residual"].steps) for number in range(4)]
    assert len(set.intersection(*steps)) >= 1
    long = streams["r3", 0, "residual"]
    assert len({step for step, position in zip(long.steps, long.positions, strict=True) if position < 90}) >= 2


def test_the_last_layer_is_before_the_final_norm(captured):
    streams, *_ = captured
    last = np.array(streams["r1", 0, "residual"].rows)[:, -1]
    assert not np.allclose(last, np.array(streams["r1", 0, "norm"].rows)[:, 0], atol=0.1)


@pytest.mark.parametrize("point", EVERYWHERE)
def test_control_rows_shifted_by_one_fail(captured, point):
    streams, sequences, truths = captured
    spoilt = copy.deepcopy(streams)
    rows = spoilt["r1", 0, point].rows
    rows[:] = rows[1:] + rows[:1]
    assert len(problems(spoilt, sequences, truths)) >= len(rows) // 2


def test_control_two_layers_swapped_fail(captured):
    streams, sequences, truths = captured
    spoilt = copy.deepcopy(streams)
    for row in spoilt["r1", 0, "mlp"].rows:
        row[[1, 2]] = row[[2, 1]]
    assert len(problems(spoilt, sequences, truths)) >= LENGTHS[1]
