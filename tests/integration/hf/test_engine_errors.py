"""What goes wrong in the engine of kind hf, or in its reader, and what is refused at its start."""

from __future__ import annotations

import asyncio
import threading

import pytest
from deltas import tokens, within
from hf_bench import ALL, POINTS, bench_of, point

from undercurrent.adapters.hf import HFEngine
from undercurrent.errors import CaptureError, ConfigError, EngineDeadError

pytestmark = pytest.mark.timeout(120)


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
