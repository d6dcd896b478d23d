"""The engine of the kind hf: the engine contract, on a tiny Llama."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hf_bench import ALL, EVERYWHERE, POINTS, WIDTH, bench_of, point

from undercurrent.adapters.base import EngineRequest
from undercurrent.adapters.hf import HFEngine
from undercurrent.errors import BadRequestError, CaptureError, ConfigError, EngineDeadError
from undercurrent.protocol.messages import Sampling

pytestmark = pytest.mark.timeout(120)


def within(coroutine, timeout_s=60):
    async def bounded():
        async with asyncio.timeout(timeout_s):
            return await coroutine

    return asyncio.run(bounded())


def tokens(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def text(deltas, index=0):
    return "".join(delta.text for delta in deltas if delta.index == index)


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


def test_a_stop_string_ends_it_and_what_was_computed_was_captured(llama):
    async def inside():
        async with bench_of(llama) as bench:
            (free,) = await bench.run(bench.request("free", b"hello", max_tokens=30))
            whole = text(free)
            assert len(whole) > 12
            stop = whole[8:11]
            (deltas,) = await bench.run(bench.request("r", b"hello", max_tokens=30, stop=(stop,)))
            assert text(deltas) == whole[: whole.index(stop)]
            assert deltas[-1].finish_reason == "stop"
            assert tokens(deltas) == tokens(free)[: len(tokens(deltas))]
            rows = bench.log.streams["r", 0, "residual"].positions
            assert rows == list(range(len(b"hello") + len(tokens(deltas)) - 1))

    within(inside())


def test_an_abort_ends_one_request_and_no_other(llama):
    async def inside():
        async with bench_of(llama) as bench:
            goes_on = asyncio.create_task(bench.deltas(bench.request("other", b"abc", max_tokens=40)))
            deltas = []
            request = await bench.engine.check(bench.request("r", b"abc", max_tokens=100))
            async for delta in bench.engine.submit(request):
                deltas.append(delta)
                if len(deltas) == 3:
                    await bench.engine.abort("r#1")
                    await bench.engine.abort("nobody")
            assert deltas[-1].finish_reason == "abort"
            assert len(tokens(deltas)) < 100
            assert len(tokens(await goes_on)) == 40
            bench.log.read()
            stream = bench.log.streams["r", 0, "residual"]
            assert stream.closed.reason == "finished"
            assert len(stream.positions) - len(b"abc") in {len(tokens(deltas)) - 1, len(tokens(deltas))}

    within(inside())


def test_one_child_can_be_aborted_alone(llama):
    async def inside():
        async with bench_of(llama) as bench:
            deltas = []
            request = await bench.engine.check(bench.request("r", b"abc", n=2, max_tokens=60))
            async for delta in bench.engine.submit(request):
                deltas.append(delta)
                if len(deltas) == 2:
                    await bench.engine.abort("r#1", 1)
            ends = {d.index: d.finish_reason for d in deltas if d.finish_reason}
            assert ends == {0: "length", 1: "abort"}

    within(inside())


def test_an_abort_from_after_a_step_comes_before_the_next_token(llama):
    """The token whose row is at hand is the last that was computed, and nothing is chosen after it."""

    async def inside():
        steps = 0

        def after_step():
            nonlocal steps
            steps += 1
            if steps == 5:
                bench.engine.abort_now("r#1")

        async with bench_of(llama, after_step=after_step) as bench:
            (deltas,) = await bench.run(bench.request("r", b"abc", max_tokens=50))
            assert deltas[-1].finish_reason == "abort"
            assert len(tokens(deltas)) == 4
            stream = bench.log.streams["r", 0, "residual"]
            assert stream.token_ids == [*b"abc", *tokens(deltas)]

    within(inside())


def test_what_fails_after_a_step_is_said_and_ends_nothing(llama, caplog):
    def fails():
        raise ZeroDivisionError

    async def inside():
        async with bench_of(llama, after_step=fails) as bench:
            (deltas,) = await bench.run(bench.request("r", b"abc", max_tokens=5))
            assert deltas[-1].finish_reason == "length"

    within(inside())
    assert "what is called after each step failed" in caplog.text


def test_an_abort_in_the_middle_of_a_step_comes_before_the_next_forward_pass(llama):
    """The first of two requests is in its forward pass when the second is aborted: the second has none in this step."""

    async def inside():
        async with bench_of(llama) as bench:
            at = []

            def abort_the_other(_module, _args, _output):
                if bench.engine.steps == 6 and not at:
                    at.append(bench.engine.steps)
                    bench.engine.abort_now("second#1")

            hook = bench.engine._alive().loaded.model.lm_head.register_forward_hook(abort_the_other)
            first = asyncio.create_task(bench.deltas(bench.request("first", b"abc", max_tokens=60)))
            second = asyncio.create_task(bench.deltas(bench.request("second", b"abc", max_tokens=60)))
            ends = [deltas[-1].finish_reason for deltas in await asyncio.gather(first, second)]
            hook.remove()
            bench.log.read()
            steps = bench.log.streams["second", 0, "residual"].steps
            assert (ends, at, max(steps)) == (["length", "abort"], [6], 5)

    within(inside())


def test_who_goes_away_stops_its_request(llama):
    async def inside():
        async with bench_of(llama, engine_args={"max_num_seqs": 1}) as bench:
            request = await bench.engine.check(bench.request("r", b"abc", max_tokens=150))
            stream = bench.engine.submit(request)
            await anext(stream)
            await stream.aclose()
            await bench.run(bench.request("next", b"abc", max_tokens=2))
            assert len(bench.log.streams["r", 0, "residual"].positions) < 100

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


def test_a_hook_that_fails_ends_one_capture_and_no_generation(llama):
    async def inside():
        async with bench_of(llama) as bench:
            (good,) = await bench.run(bench.request("good", b"abc", max_tokens=6))
            # The engine's thread is idle now: nothing else touches the model.
            model = bench.engine._alive().loaded.model
            mlp, forward = model.model.layers[1].mlp, model.model.layers[1].mlp.forward
            mlp.forward = lambda x: (forward(x)[:, :0], forward(x))  # what the hook sees has no rows
            wrapped = mlp.register_forward_hook(lambda _m, _a, out: out[1])
            (bad,) = await bench.run(bench.request("bad", b"abc", max_tokens=6))
            wrapped.remove()
            mlp.forward = forward
            (again,) = await bench.run(bench.request("again", b"abc", max_tokens=6))
            assert tokens(good) == tokens(bad) == tokens(again)
            for name, reason in (("good", "finished"), ("bad", "capture_error"), ("again", "finished")):
                assert bench.log.streams[name, 0, "mlp"].closed.reason == reason
            assert "a hook failed" in bench.log.streams["bad", 0, "mlp"].closed.detail

    within(inside())


def test_logits_that_are_no_numbers_end_their_request_alone(llama):
    async def inside():
        async with bench_of(llama) as bench:
            head = bench.engine._alive().loaded.model.lm_head
            spoil = head.register_forward_hook(lambda _m, _a, out: out * float("nan"))
            (bad,) = await bench.run(bench.request("bad", b"abc", temperature=1.0))
            spoil.remove()
            (good,) = await bench.run(bench.request("good", b"abc", temperature=1.0))
            assert [deltas[-1].finish_reason for deltas in (bad, good)] == ["abort", "length"]

    within(inside())


def test_an_error_of_the_model_ends_every_request_and_the_engine(llama):
    async def inside():
        async with bench_of(llama, engine_args={"max_num_seqs": 2}) as bench:

            def broken(*_args, **_kwargs):
                raise ZeroDivisionError("weights on fire")

            requests = [await bench.engine.check(bench.request(f"r{n}", b"abc", max_tokens=100)) for n in range(3)]
            streams = [bench.engine.submit(request) for request in requests]
            await anext(streams[0])
            bench.engine._alive().loaded.model.forward = broken
            for stream in streams:
                with pytest.raises(EngineDeadError, match="weights on fire"):
                    async for _ in stream:
                        pass
            for call in (bench.engine.check(requests[0]), bench.engine.set_points(())):
                with pytest.raises(EngineDeadError, match="weights on fire"):
                    await call

    within(inside())


def test_closing_ends_requests_that_run_and_those_that_come(llama):
    async def inside():
        async with bench_of(llama) as bench:
            request = await bench.engine.check(bench.request("r", b"abc", max_tokens=150))
            stream = bench.engine.submit(request)
            await anext(stream)
            await bench.engine.close()
            with pytest.raises(EngineDeadError, match="closed"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError, match="closed"):
                await bench.engine.check(request)
            assert not [t for t in threading.enumerate() if t.name == "undercurrent-model"]

    within(inside())


def test_a_ring_that_nobody_reads_costs_rows_and_says_how_many(llama):
    async def inside():
        async with bench_of(llama, [point("residual", "residual_stream", ALL)], 64 << 10) as bench:
            deltas = await bench.deltas(bench.request("r", b"a" * 60, ("residual",), max_tokens=60))
            # The last frames found no room, and come when there is some, though nothing runs any more.
            async with asyncio.timeout(30):
                while "r" not in {key[0] for key in bench.log.streams} or not bench.log.all_closed:
                    bench.log.read()
                    await asyncio.sleep(0.005)
            stream = bench.log.streams["r", 0, "residual"]
            assert deltas[-1].finish_reason == "length"
            assert stream.closed.emitted == len(stream.positions) < 119
            assert stream.closed.emitted + stream.closed.dropped == 119

    within(inside())


def test_a_long_prompt_goes_through_a_small_ring_whose_reader_keeps_up(llama):
    async def inside():
        async with bench_of(
            llama,
            [point("residual", "residual_stream", ALL, overflow="block")],
            64 << 10,
            after_step=lambda: bench.log.read(),
        ) as bench:
            await bench.run(bench.request("r", b"a" * 120, ("residual",), max_tokens=4))
            assert bench.log.streams["r", 0, "residual"].positions == list(range(123))

    within(inside())


def test_bfloat16_rows_come_as_they_are(llama):
    async def inside():
        async with bench_of(llama, engine_args={"dtype": "bfloat16"}) as bench:
            await bench.run(bench.request("r", b"abc", EVERYWHERE, max_tokens=2))
            stream = bench.log.streams["r", 0, "residual"]
            assert (stream.opened.dtype, stream.rows[0].dtype.name) == ("bfloat16", "bfloat16")
            assert np.isfinite(np.array(stream.rows, np.float32)).all()

    within(inside())


def test_what_it_cannot_start_with_is_said(llama, tmp_path):
    async def start(engine):
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineDeadError, match="cannot load"):
        within(start(HFEngine(str(tmp_path))))
    with pytest.raises(ConfigError, match="max_model_len is 9999; the model has positions for 256"):
        within(start(HFEngine(str(llama), engine_args={"max_model_len": 9999})))
    with pytest.raises(ConfigError, match="need a ring"):
        HFEngine(str(llama), points=POINTS)


def test_buffers_beyond_the_limit_are_refused(llama):
    async def inside():
        async with bench_of(llama, max_tap_bytes=1000):
            pass

    with pytest.raises(CaptureError, match="more than max_tap_bytes = 1000"):
        within(inside())
