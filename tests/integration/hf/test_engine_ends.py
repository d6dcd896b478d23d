"""How requests of the engine of kind hf end: stop strings, aborts at every moment, who goes away."""

from __future__ import annotations

import asyncio

import pytest
from deltas import text, tokens, within
from hf_bench import bench_of

pytestmark = pytest.mark.timeout(120)


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
