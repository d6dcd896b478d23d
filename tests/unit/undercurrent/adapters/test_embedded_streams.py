"""What a stream of an embedded adapter brings, and what ends it: a probe, its reader, a shutdown, a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from tests.unit.undercurrent.adapters.embedded_doubles import PROMPT, Adapter, Keeper, a_point, run
from undercurrent.adapters.arguments import sampling_of
from undercurrent.core import ProbeAction, ProbeRegistry, ProbeSignal
from undercurrent.errors import (
    BadRequestError,
    CaptureError,
    EngineDeadError,
    VLLMAdapterLimitationError,
)
from undercurrent.router import Router
from undercurrent.testing.fake_engine import generated_text


def chunks_of(adapter, router, request_id, point, limit=None, **kwargs):
    async def read():
        found = []
        stream = adapter.stream(request_id, PROMPT, kwargs, router)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                found.append(chunk)
                if limit is not None and len(found) == limit:
                    break
        return found

    adapter.register_extraction(request_id, [point])
    return asyncio.run(asyncio.wait_for(read(), 30))


def test_a_stream_brings_the_signals_of_its_tokens(adapter, router):
    chunks = chunks_of(adapter, router, "s1", a_point(), max_tokens=6)
    assert "".join(chunk.text for chunk in chunks) == generated_text("s1", 6)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    said = [[signal.signal.token_pos for signal in chunk.signals] for chunk in chunks]
    assert [place for places in said for place in places] == [8, 9, 10, 11, 12]
    # The engine may be a step ahead of its reader: a signal never comes after its token, but it may come before.
    assert all(sum(map(len, said[: n + 1])) >= n for n in range(6))
    assert chunks[-1].prompt_tokens == len(PROMPT)


def test_a_stream_that_a_probe_stops_says_which_signal_did(adapter, router):
    chunks = chunks_of(adapter, router, "s2", a_point(probe_args={"stop_at": 10}), max_tokens=3000)
    assert chunks[-1].finish_reason == "abort"
    said = [one for chunk in chunks for one in chunk.signals]
    assert [one.extraction_point_name for one in said if one.signal.action is ProbeAction.ABORT] == ["p"]


def test_a_signal_of_a_stream_says_where_it_was_given_also_where_the_probe_does_not(adapter, router):
    chunks = chunks_of(adapter, router, "s4", a_point(layers=(0, 2)), max_tokens=3)
    said = [(one.signal.token_pos, one.signal.layer) for chunk in chunks for one in chunk.signals]
    assert said == [(8, 0), (8, 2), (9, 0), (9, 2)]


def test_a_stream_that_nobody_reads_on_is_stopped(adapter, router):
    assert len(chunks_of(adapter, router, "s3", a_point(), limit=3, max_tokens=4000)) == 3
    assert run(adapter, router, "s3", a_point()) == generated_text("s3", 6)


def test_sampling_parameters_are_known_by_name():
    assert sampling_of({"stop": "x", "stop_token_ids": [1]}).stop == ("x",)
    with pytest.raises(BadRequestError, match="unknown sampling parameters: max_token; accepted: frequency_penalty"):
        sampling_of({"max_token": 1})
    with pytest.raises(BadRequestError, match="n is 1"):
        sampling_of({"n": 2})


def test_signals_that_hold_arrays_do_not_trouble_a_stream_that_they_stop(adapter):
    class Arrays(Keeper):
        def on_activation(self, record):
            return ProbeSignal(ProbeAction.ABORT, {"row": np.asarray(record.tensor)})

    registry = ProbeRegistry()
    registry.register("arrays", Arrays)
    with Router(registry) as other:
        chunks = chunks_of(adapter, other, "arr", a_point(probe_type="arrays", layers=(0, 1)), max_tokens=3000)
    assert chunks[-1].finish_reason == "abort"


def test_a_shutdown_from_a_listener_is_refused():
    errors = []

    def end(_request_id, _results):
        try:
            made.shutdown()
        except VLLMAdapterLimitationError as exc:
            errors.append(str(exc))

    registry = ProbeRegistry()
    registry.register("keep", Keeper)
    with Adapter() as made, Router(registry) as other:
        other.on_request_end(end)
        made.load_model("fake")
        run(made, other, "sl", a_point())
    assert errors == ["shutdown from a probe or a listener would wait for itself for ever"]


def test_one_adapter_serves_one_model(adapter):
    with pytest.raises(VLLMAdapterLimitationError, match="one model"):
        adapter.load_model("another")


def test_nothing_works_before_a_model_is_loaded_or_after_it_is_gone(router):
    made = Adapter()
    with pytest.raises(EngineDeadError, match="load_model"):
        made.register_extraction("x", [])
    made.load_model("fake")
    made.register_extraction("x", [])
    made.shutdown()
    made.shutdown()
    with pytest.raises(EngineDeadError, match="load_model"):
        made.generate("x", PROMPT, {}, router)


def test_a_shutdown_ends_the_requests_that_run(router):
    made = Adapter()
    made.load_model("fake")
    go = threading.Event()
    errors = []

    class First(Keeper):
        def on_activation(self, record):
            go.set()

    registry = ProbeRegistry()
    registry.register("first", First)

    def generate(other):
        made.register_extraction("long", [a_point(probe_type="first")])
        try:
            made.generate("long", PROMPT, {"max_tokens": 4000}, other)
        except EngineDeadError as exc:
            errors.append(exc)

    with Router(registry) as other:
        ended = {}
        other.on_request_end(ended.__setitem__)
        thread = threading.Thread(target=generate, args=(other,))
        thread.start()
        assert go.wait(10)
        made.shutdown()
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 1
    assert list(ended) == ["long"]


def test_an_engine_that_dies_ends_every_request_by_name(router):
    with Adapter() as made:
        made.load_model("fake")
        made.fake._step = None
        with pytest.raises(EngineDeadError, match="died"):
            run(made, router, "dead", a_point())
    assert "dead" in router.ended


def test_a_model_that_does_not_start_leaves_no_thread_behind():
    class Broken(Adapter):
        def _make_engine(self, model, ring, kwargs):
            engine = super()._make_engine(model, ring, kwargs)

            async def start():
                raise CaptureError("no such model")

            engine.start = start
            return engine

    before = set(threading.enumerate())
    made = Broken()
    with pytest.raises(CaptureError, match="no such model"):
        made.load_model("fake")
    assert set(threading.enumerate()) <= before
