"""The engine of the kind hf: the engine contract, on a tiny Llama."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from deltas import tokens, within
from hf_bench import EVERYWHERE, POINTS, WIDTH, bench_of, point

from undercurrent.adapters.base import EngineRequest
from undercurrent.errors import BadRequestError, CaptureError
from undercurrent.protocol.messages import Sampling

pytestmark = pytest.mark.timeout(120)


def test_it_says_what_it_is(llama):
    async def inside():
        async with bench_of(llama, served_name="tiny") as bench:
            info = bench.engine.info
            assert (info.model, info.layers, info.width, info.dtype, info.max_model_len) == (
                "tiny",
                4,
                WIDTH,
                "float32",
                160,
            )
            assert len(info.model_fingerprint) == 64
            assert set(info.versions) == {"torch", "transformers"}
            assert bench.engine.tokenizer.decode(bench.engine.tokenizer.encode("ab")) == "ab"

    within(inside())


def test_greedy_text_is_that_of_transformers_own_generate(llama):
    import torch
    from transformers import AutoModelForCausalLM

    async def inside():
        async with bench_of(llama) as bench:
            (deltas,) = await bench.run(bench.request("r", list(range(40, 70)), max_tokens=20))
            return tokens(deltas)

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompt = torch.tensor([list(range(40, 70))])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=256)
    assert within(inside()) == expected[0, 30:].tolist()


def test_gemma_2_keeps_the_cap_on_its_attention(models):
    """The default attention of transformers leaves it out, and says nothing."""
    from undercurrent.adapters.hf.oracle import HFOracle

    async def inside():
        async with bench_of(models("gemma2")) as bench:
            await bench.run(bench.request("r", list(range(60, 90)), max_tokens=2))
            return bench.log.streams["r", 0, "residual"]

    stream = within(inside())
    truth = HFOracle(models("gemma2")).activations(stream.token_ids)["residual_stream"]
    assert np.linalg.norm(np.array(stream.rows) - truth) / np.linalg.norm(truth) < 1e-5


def test_company_changes_neither_tokens_nor_rows(llama):
    """Each request is a forward pass of its own, so what it gives is equal to the last bit."""

    async def inside():
        requests = [("a", b"first"), ("b", b"the second"), ("c", b"third and longest of all")]
        async with bench_of(llama) as bench:
            made = [bench.request(n, list(p), max_tokens=12, temperature=1.0, seed=3) for n, p in requests]
            together = await bench.run(*made)
        async with bench_of(llama) as alone:
            for (name, prompt), expected in zip(requests, together, strict=True):
                request = alone.request(name, list(prompt), max_tokens=12, temperature=1.0, seed=3)
                (deltas,) = await alone.run(request)
                assert tokens(deltas) == tokens(expected)
        for key, stream in bench.log.streams.items():
            assert np.array_equal(np.array(stream.rows), np.array(alone.log.streams[key].rows))

    within(inside())


def test_more_requests_than_places_wait_their_turn(llama):
    async def inside():
        async with bench_of(llama, engine_args={"max_num_seqs": 2}) as bench:
            found = await bench.run(*(bench.request(f"r{n}", b"abc", max_tokens=5) for n in range(7)))
            assert [len(tokens(deltas)) for deltas in found] == [5] * 7
            by_step = {}
            for (name, _, point_name), stream in bench.log.streams.items():
                if point_name == "residual":
                    for step in stream.steps:
                        by_step.setdefault(step, set()).add(name)
            assert max(len(names) for names in by_step.values()) == 2

    within(inside())


def test_the_more_urgent_request_goes_first(llama):
    async def inside():
        async with bench_of(llama, engine_args={"max_num_seqs": 1}) as bench:
            ended = []

            async def run(name, priority):
                request = bench.request(name, b"abc", max_tokens=20)
                request = await bench.engine.check(
                    EngineRequest(
                        engine_id=request.engine_id,
                        prompt_token_ids=request.prompt_token_ids,
                        sampling=request.sampling,
                        priority=priority,
                    )
                )
                async for _ in bench.engine.submit(request):
                    pass
                ended.append(name)

            await asyncio.gather(run("first", 5), run("late", 5), run("urgent", -1))
            assert ended.index("urgent") < ended.index("late")

    within(inside())


def test_children_differ_and_have_streams_of_their_own(llama):
    async def inside():
        async with bench_of(llama) as bench:
            (deltas,) = await bench.run(bench.request("r", b"hello", n=3, temperature=1.0, seed=1, max_tokens=10))
            assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
            made = [tokens(deltas, index) for index in range(3)]
            assert len({tuple(child) for child in made}) == 3
            for index in range(3):
                stream = bench.log.streams["r", index, "residual"]
                assert stream.token_ids == [*b"hello", *made[index][:-1]]

    within(inside())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": ()}, "no tokens"),
        ({"prompt_token_ids": (1, 320)}, "outside 0 to 319"),
        ({"prompt_token_ids": tuple(b"a" * 155)}, "155 prompt tokens and 8 to generate are more than the model's 160"),
        ({"prompt": "x", "prompt_token_ids": (1,)}, "exactly one"),
        ({"prompt": "x", "lora": "fine"}, "LoRA adapter 'fine'"),
        ({"prompt": "x", "sampling": Sampling(top_p=2.0)}, "top_p"),
    ],
)
def test_what_cannot_run_is_refused_by_check(llama, fields, message):
    async def inside():
        async with bench_of(llama, ()) as bench:
            values = {"sampling": Sampling(max_tokens=8), **fields}
            with pytest.raises(BadRequestError, match=message):
                await bench.engine.check(EngineRequest(engine_id="r", **values))

    within(inside())


def test_an_unknown_point_and_a_second_request_of_an_id_are_refused(llama):
    async def inside():
        async with bench_of(llama) as bench:
            with pytest.raises(BadRequestError, match="unknown extraction points: nowhere"):
                await bench.engine.check(bench.request("r", b"abc", ("nowhere",)))
            request = await bench.engine.check(bench.request("r", b"abc", max_tokens=100))
            first = bench.engine.submit(request)
            await anext(first)
            with pytest.raises(BadRequestError, match="running already"):
                await anext(bench.engine.submit(request))
            await first.aclose()

    within(inside())


def test_points_may_change_while_requests_run_and_theirs_stay(llama):
    async def inside():
        async with bench_of(llama, (), open_points=True) as bench:
            await bench.engine.set_points(POINTS[:1])
            request = await bench.engine.check(bench.request("old", b"abc", ("residual",), max_tokens=60))
            stream = bench.engine.submit(request)
            await anext(stream)
            await bench.engine.set_points([point("other", "mlp_out", (1,))])
            await bench.deltas(bench.request("new", b"abc", ("other",), max_tokens=3))
            with pytest.raises(BadRequestError, match="residual"):
                await bench.engine.check(bench.request("late", b"abc", ("residual",)))
            rest = [delta async for delta in stream]
            bench.log.read()
            old = bench.log.streams["old", 0, "residual"]
            assert (rest[-1].finish_reason, old.positions, old.losses) == ("length", list(range(62)), [])
            assert bench.log.streams["new", 0, "other"].positions == [0, 1, 2, 3, 4]

    within(inside())


def test_points_that_cannot_be_captured_are_named_and_the_old_ones_stay(llama):
    async def inside():
        async with bench_of(llama, POINTS[:1], open_points=True) as bench:
            for wrong, message in (
                (point("deep", "residual_stream", (9,)), "'deep': the model has layers 0 to 3"),
                (point("experts", "router_topk", (0,)), "'experts': tensor_type router_topk"),
            ):
                with pytest.raises(CaptureError, match=message):
                    await bench.engine.set_points([wrong])
            await bench.run(bench.request("r", b"abc", ("residual",), max_tokens=2))
            assert len(bench.log.streams["r", 0, "residual"].positions) == 4

    within(inside())


def test_bfloat16_rows_come_as_they_are(llama):
    async def inside():
        async with bench_of(llama, engine_args={"dtype": "bfloat16"}) as bench:
            await bench.run(bench.request("r", b"abc", EVERYWHERE, max_tokens=2))
            stream = bench.log.streams["r", 0, "residual"]
            assert (stream.opened.dtype, stream.rows[0].dtype.name) == ("bfloat16", "bfloat16")
            assert np.isfinite(np.array(stream.rows, np.float32)).all()

    within(inside())
