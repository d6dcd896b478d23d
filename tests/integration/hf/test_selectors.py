"""Selectors, encodings and projections on an engine of the kind hf: the code that vLLM runs, in other steps."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hf_bench import ALL, WIDTH, bench_of, point

from undercurrent.codec.tensors import bytes_of, rows_of
from undercurrent.errors import CaptureError
from undercurrent.testing.wanted import wanted_positions

pytestmark = pytest.mark.timeout(120)

RESIDUAL = "residual_stream"
SELECTORS = (
    point("all", RESIDUAL, (1,)),
    point("end", RESIDUAL, (1,), "generated[-1]"),
    point("before_end", RESIDUAL, (1,), "generated[-2]-4"),
    point("prompt_last", RESIDUAL, (1,), "prompt[-1]"),
    point("five", RESIDUAL, (1,), "generated[1:]", until={"fixed_count": 5}, stride=2),
    point("until", RESIDUAL, (1,), "generated[*]", until={"stop_token": "e"}),
    point("until_prompt", RESIDUAL, (1,), "*", until={"stop_token": "x"}, stride=3),
    point("far", RESIDUAL, (1,), "generated[1000:2000]"),
)


@pytest.mark.parametrize("chunk", [7, 128])
def test_every_selector_gets_exactly_its_rows(llama, chunk):
    async def inside():
        names = tuple(p.name for p in SELECTORS)
        async with bench_of(llama, SELECTORS, engine_args={"max_num_batched_tokens": chunk}) as bench:
            prompts = {"a": b"a", "b": b"a longer prompt with an x in it", "c": b"nothing of the kind" * 3}
            requests = [
                bench.request(name, list(text), names, max_tokens=30, temperature=1.0, seed=n)
                for n, (name, text) in enumerate(prompts.items())
            ]
            requests.append(bench.request("one", b"xyz", names, max_tokens=1))
            await bench.run(*requests)
            encode = bench.engine.tokenizer.encode
        for name, text in {**prompts, "one": b"xyz"}.items():
            every = bench.log.streams[name, 0, "all"]
            assert every.positions == list(range(len(every.token_ids)))
            for spec in SELECTORS:
                stream, stop = bench.log.streams[name, 0, spec.name], spec.until.stop_token
                stop = None if stop is None else encode(stop)[0]
                expected = wanted_positions(spec, every.token_ids, len(text), stop=stop)
                assert stream.positions == expected, (name, spec.name)
                assert all(np.array_equal(r, every.rows[p]) for p, r in zip(expected, stream.rows, strict=True))

    asyncio.run(inside())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encodings_and_projections_are_those_of_the_row_that_the_model_computed(llama, tmp_path, dtype):
    matrix = np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32)
    np.save(tmp_path / "m.npy", matrix)
    encodings = ("float32", "float16", "bfloat16", "int8")
    points = [point("all", RESIDUAL, ALL), *(point(name, RESIDUAL, ALL, dtype=name) for name in encodings)]
    points.append(point("projected", RESIDUAL, ALL, reduce={"project": str(tmp_path / "m.npy")}))

    async def inside():
        names = tuple(p.name for p in points)
        async with bench_of(llama, points, engine_args={"dtype": dtype}) as bench:
            await bench.run(bench.request("r", b"some prompt", names))
        rows = {name: np.array(bench.log.streams["r", 0, name].rows) for name in names}
        every = rows.pop("all")
        assert every.dtype.name == dtype
        for name in encodings:
            expected = rows_of(bytes_of(every, name), name, WIDTH).reshape(every.shape)
            assert np.array_equal(rows[name], expected), name
        exact = every.astype(np.float64) @ matrix
        assert rows["projected"].shape == exact.shape
        assert np.abs(rows["projected"] - exact).max() <= 1e-5 * np.abs(exact).max()

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reduce": {"project": "nowhere.npy"}}, "point 'wrong', reduce.project: nowhere.npy: cannot be read"),
        ({"until": {"stop_token": "ab"}}, "'wrong': until.stop_token 'ab' is 2 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_at_start_by_name(llama, fields, reason):
    async def inside():
        async with bench_of(llama, [point("wrong", RESIDUAL, (0,), **fields)]):
            pass

    with pytest.raises(CaptureError, match=reason):
        asyncio.run(inside())
