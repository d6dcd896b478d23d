"""Keys and values, and the choice of experts, of `transformers`: in chunks, with a cache, three requests at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hf_bench import ALL, bench_of, point
from transformers import DynamicCache

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.errors import CaptureError
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = pytest.mark.timeout(180)

POINTS = (point("kv", "kv", ALL), point("entering", "layer_input", (0,)))
EXPERTS = point("experts", "router_topk", ALL)
LENGTHS = (3, 40, 70)


@pytest.fixture(scope="module", params=["llama", "gemma2", "mixtral"])
def folder(request, tmp_path_factory):
    return build_tiny_model(request.param, tmp_path_factory.mktemp(request.param) / "model", width=128)


def points_of(folder):
    return (*POINTS, EXPERTS) if "mixtral" in str(folder) else POINTS


async def run(folder, prompts):
    points = points_of(folder)
    args = {"max_num_batched_tokens": 32, "attn_implementation": "eager"}
    async with bench_of(folder, points, engine_args=args) as bench:
        requests = [
            bench.request(f"r{n}", prompt, [p.name for p in points], max_tokens=8) for n, prompt in enumerate(prompts)
        ]
        found = await bench.run(*requests)
        shapes = dict(bench.engine.info.row_shapes)
    sequences = [
        [*p, *(t for delta in deltas for t in delta.token_ids)] for p, deltas in zip(prompts, found, strict=True)
    ]
    return bench.log.streams, sequences, shapes


def rows_of(stream):
    opened = stream.opened
    return np.stack(stream.rows).reshape(-1, len(opened.layers), *(opened.row_shape or (opened.width,)))


def test_rows_are_those_of_one_pass_over_the_whole_sequence(folder):
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 256, length).tolist() for length in LENGTHS]
    streams, sequences, shapes = asyncio.run(run(folder, prompts))
    assert shapes["kv"] == (2, 2, 32)
    assert ("router_topk" in shapes) == ("mixtral" in str(folder))
    oracle = HFOracle(folder)
    for number, sequence in enumerate(sequences):
        every = list(range(len(sequence) - 1))
        for name in (p.name for p in points_of(folder)):
            stream = streams[f"r{number}", 0, name]
            assert (stream.positions, stream.closed.reason) == (every, "finished")
        truth = oracle.keys_values(sequence)[:-1]
        assert np.abs(rows_of(streams[f"r{number}", 0, "kv"]) - truth).max() <= 1e-4
        # A control: heads swapped are off by far more than that.
        assert np.abs(rows_of(streams[f"r{number}", 0, "kv"])[..., ::-1, :] - truth).max() > 0.1
        if "mixtral" in str(folder):
            experts = oracle.router_topk(sequence)
            wanted = np.stack([experts[layer] for layer in ALL], axis=1)[:-1]
            assert np.abs(rows_of(streams[f"r{number}", 0, "experts"]) - wanted).max() <= 1e-4


def test_the_oracle_s_keys_and_values_are_those_that_stand_in_the_cache(folder):
    oracle, sequence = HFOracle(folder), list(range(20))
    cache = DynamicCache()
    with torch.inference_mode():
        oracle._model(torch.tensor([sequence]), past_key_values=cache, use_cache=True)
    found = oracle.keys_values(sequence)
    for layer in ALL:
        kept = cache.layers[layer]
        for half, tensor in enumerate((kept.keys, kept.values)):
            assert np.array_equal(found[:, layer, half], tensor[0].transpose(0, 1).numpy())


def test_a_model_without_experts_says_so(tmp_path):
    folder = build_tiny_model("llama", tmp_path / "model")

    async def start():
        async with bench_of(folder, (EXPERTS,)):
            pass

    with pytest.raises(CaptureError, match="'experts': tensor_type router_topk is not captured"):
        asyncio.run(start())
