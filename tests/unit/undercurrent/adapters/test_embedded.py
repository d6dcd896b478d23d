"""The embedded adapter over the scripted engine: real frames, a real ring, a real router; no model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest

from undercurrent.adapters.arguments import sampling_of
from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.adapters.routing import numpy_rows, torch_rows
from undercurrent.core import Probe, ProbeAction, ProbeRegistry, ProbeResult, ProbeSignal
from undercurrent.errors import (
    BadRequestError,
    CaptureError,
    EngineDeadError,
    RouterError,
    VLLMAdapterLimitationError,
    WorkerExtractionError,
)
from undercurrent.router import Router
from undercurrent.spec import (
    ExecutionMode,
    ExtractionPoint,
    InterventionPolicy,
    TensorType,
    UntilPolicy,
)
from undercurrent.testing.fake_engine import FakeEngine, activation, generated_text
from undercurrent.testing.waiting import wait_until

LAYERS, WIDTH = 4, 16
PROMPT = "a prompt"


class Keeper(Probe):
    """Keeps what it saw, and stops at a position if told to."""

    def __init__(self, stop_at=None, wait=None):
        self.seen = []
        self.stop_at = stop_at
        self.wait = wait

    def on_activation(self, record):
        if self.wait is not None:
            assert self.wait.wait(10)
        self.seen.append((record.token_pos, record.layer, record.is_generated, np.asarray(record.tensor)))
        if record.token_pos == self.stop_at:
            return ProbeSignal(ProbeAction.ABORT, score=1.0, token_pos=record.token_pos)
        return ProbeSignal(score=0.0, token_pos=record.token_pos)

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, self.seen)


class Raiser(Keeper):
    def on_activation(self, record):
        raise ValueError("no")


class Adapter(EmbeddedAdapter):
    def __init__(self, **options):
        super().__init__(**options.pop("adapter", {}))
        self.options = options
        self.fake = None

    def _make_engine(self, model, ring, kwargs):
        self.fake = FakeEngine(
            open_points=True, ring=ring, layers=LAYERS, width=WIDTH, step_s=0.001, **self.options, **kwargs
        )
        return self.fake


def a_point(name="p", layers=(1,), position="generated[*]", **fields):
    fields = {"tensor_type": TensorType.RESIDUAL_STREAM, "probe_type": "keep", **fields}
    return ExtractionPoint(name=name, layers=layers, position=position, **fields)


@pytest.fixture
def router():
    registry = ProbeRegistry()
    registry.register("keep", Keeper)
    registry.register("raise", Raiser)
    with Router(registry, worker_pool_size=2) as made:
        made.ended = {}
        made.on_request_end(made.ended.__setitem__)
        yield made


@pytest.fixture(scope="module")
def adapter():
    with Adapter() as made:
        made.load_model("fake")
        yield made


@contextlib.contextmanager
def waiting_router(go):
    registry = ProbeRegistry()
    registry.register("keep", Keeper, {"wait": go})
    with Router(registry) as made:
        made.ended = {}
        made.on_request_end(made.ended.__setitem__)
        yield made


def run(adapter, router, request_id, *points, tokens=6, **kwargs):
    adapter.register_extraction(request_id, list(points))
    try:
        return adapter.generate(request_id, PROMPT, {"max_tokens": tokens, **kwargs}, router)
    finally:
        adapter.unregister_extraction(request_id)


def positions(router, request_id, name="p"):
    return [(position, layer) for position, layer, _, _ in router.ended[request_id][name].verdict]


def test_every_wanted_row_is_routed_in_order_before_generate_returns(adapter, router):
    text = run(adapter, router, "r1", a_point(layers=(0, 2), position="*"))
    assert text == generated_text("r1", 6)
    total = len(PROMPT) + 5  # the last token is sampled, not computed
    assert positions(router, "r1") == [(n, layer) for n in range(total) for layer in (0, 2)]
    for position, layer, is_generated, tensor in router.ended["r1"]["p"].verdict:
        assert is_generated == (position >= len(PROMPT))
        assert np.array_equal(tensor, activation("r1", position, layer, WIDTH))


def test_records_hold_float32_tensors_of_their_own(adapter, router):
    import torch

    kept = []

    class Kind(Keeper):
        def on_activation(self, record):
            kept.append(record.tensor)

    registry = ProbeRegistry()
    registry.register("kind", Kind)
    with Router(registry) as other:
        run(adapter, other, "t1", a_point(probe_type="kind"), tokens=40)
    assert all(isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 for tensor in kept)
    assert np.array_equal(kept[0].numpy(), activation("t1", len(PROMPT), 1, WIDTH))


def test_numpy_rows_are_given_where_they_are_asked_for(router):
    with Adapter(adapter={"tensors": "numpy"}) as made:
        made.load_model("fake")
        run(made, router, "n1", a_point())
    tensor = router.ended["n1"]["p"].verdict[0][3]
    assert type(tensor) is np.ndarray
    assert tensor.dtype == np.float32


@pytest.mark.parametrize(
    ("position", "wanted"),
    [
        ("prompt[-1]", [7]),
        ("prompt[0]", [0]),
        ("prompt[*]", list(range(8))),
        ("generated[1]", [9]),
        ("generated[1:3]", [9, 10]),
        ("generated[-1]", [12]),
        ("generated[-2]", [11]),
        ("generated[-2]+1", [12]),
        ("generated[-1]-1", [11]),
        ("generated[-1]-6", [6]),
        (3, [3]),
    ],
)
def test_positions_are_what_the_selector_says(adapter, router, position, wanted):
    run(adapter, router, "sel", a_point(position=position))
    assert [place for place, _ in positions(router, "sel")] == wanted


def test_the_last_token_of_a_request_that_computed_none_has_no_record(adapter, router):
    run(adapter, router, "one", a_point(position="generated[-1]"), tokens=1)
    assert positions(router, "one") == []


def test_a_stop_token_that_a_stride_skips_ends_its_point_all_the_same(adapter, router):
    until = UntilPolicy("stop_token", stop_token=ord(generated_text("sd", 12)[3]))
    run(adapter, router, "sd", a_point(until=until, stride=2), tokens=12)
    assert [place for place, _ in positions(router, "sd")] == [8, 10]


@pytest.mark.parametrize("by_text", [True, False])
def test_a_stop_token_ends_its_point_and_is_the_last_one_captured(adapter, router, by_text):
    letter = generated_text("st", 6)[2]
    until = UntilPolicy("stop_token", stop_token=letter if by_text else ord(letter))
    run(adapter, router, "st", a_point(until=until), a_point("q"))
    assert [place for place, _ in positions(router, "st")] == [8, 9, 10]
    assert len(positions(router, "st", "q")) == 5


def test_a_stop_token_that_is_several_tokens_is_refused(adapter):
    with pytest.raises(WorkerExtractionError, match=r"until\.stop_token 'ab' is 2 tokens"):
        adapter.register_extraction("st2", [a_point(until=UntilPolicy("stop_token", stop_token="ab"))])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_probe_gets_float32_with_the_values_that_its_point_publishes(adapter, router, dtype):
    run(adapter, router, "enc", a_point(dtype=dtype), a_point("q"))
    coded, exact = (np.stack([row for *_, row in router.ended["enc"][name].verdict]) for name in ("p", "q"))
    assert coded.dtype == np.float32
    assert coded.shape == exact.shape == (5, WIDTH)
    assert 0 < np.abs(coded - exact).max() <= np.abs(exact).max() / 127


def test_a_probe_of_a_reduced_point_gets_the_projection(adapter, router, tmp_path):
    matrix = np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32)
    np.save(tmp_path / "m.npy", matrix)
    run(adapter, router, "red", a_point(reduce={"project": str(tmp_path / "m.npy")}), a_point("q"))
    small, exact = (np.stack([row for *_, row in router.ended["red"][name].verdict]) for name in ("p", "q"))
    assert np.abs(small - exact @ matrix).max() < 1e-5
    missing = a_point(reduce={"project": str(tmp_path / "none.npy")})
    with pytest.raises(WorkerExtractionError, match=r"point 'p', reduce\.project: .*none\.npy: cannot be read"):
        adapter.register_extraction("red2", [missing])


def test_points_that_need_the_same_rows_share_a_stream(adapter, router):
    run(adapter, router, "share", a_point("a"), a_point("b"), a_point("c", position="generated[-1]"))
    assert positions(router, "share", "a") == positions(router, "share", "b")
    assert positions(router, "share", "c") == positions(router, "share", "a")[-1:]


def test_calls_of_several_threads_keep_their_records_apart(adapter, router):
    def one(number):
        run(adapter, router, f"many-{number}", a_point(layers=(number % LAYERS,)), tokens=8 + number)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(12):
        verdict = router.ended[f"many-{number}"]["p"].verdict
        assert [place for place, *_ in verdict] == list(range(8, 8 + 8 + number - 1))
        for position, layer, _, tensor in verdict:
            assert np.array_equal(tensor, activation(f"many-{number}", position, layer, WIDTH))


def test_an_abort_stops_the_request_soon(adapter, router):
    text = run(adapter, router, "ab", a_point(probe_args={"stop_at": 10}), tokens=2000)
    assert 3 <= len(text) < 1000
    seen = [place for place, _ in positions(router, "ab")]
    assert seen[:3] == [8, 9, 10]


def test_an_async_point_never_stops_anything(adapter, router):
    point = a_point(probe_args={"stop_at": 9}, execution_mode=ExecutionMode.ASYNC, queue_depth=100)
    assert run(adapter, router, "as", point, tokens=20) == generated_text("as", 20)
    assert len(positions(router, "as")) == 19


def test_a_probe_that_raises_does_not_stop_its_request(adapter, router):
    assert run(adapter, router, "ra", a_point(probe_type="raise")) == generated_text("ra", 6)


def test_a_request_may_run_again_under_its_id_right_after_an_abort(adapter, router):
    for _ in range(5):
        run(adapter, router, "again", a_point(probe_args={"stop_at": 9}), tokens=2000)
        seen = [place for place, _ in positions(router, "again")]
        assert seen[:2] == [8, 9]
        assert seen == sorted(set(seen))


def test_a_request_that_was_not_registered_is_refused(adapter, router):
    with pytest.raises(CaptureError, match="'nobody' is not registered: call register_extraction"):
        adapter.generate("nobody", PROMPT, {}, router)


def test_a_request_may_run_without_points(adapter, router):
    assert len(run(adapter, router, "none")) == 6
    assert router.ended["none"] == {}


def test_the_points_of_a_running_request_cannot_change(adapter):
    go = threading.Event()
    with waiting_router(go) as router:
        thread = threading.Thread(target=run, args=(adapter, router, "busy", a_point()))
        thread.start()
        try:
            wait_until(lambda: "busy" in adapter._running, 10, "a running request")
            with pytest.raises(CaptureError, match="'busy' is running"):
                adapter.register_extraction("busy", [a_point()])
        finally:
            go.set()
            thread.join(30)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layers": (9,)}, "point 'p': the model has layers 0 to 3"),
        ({"tensor_type": TensorType.KV}, "point 'p': tensor_type kv"),
        ({"tensor_type": TensorType.FINAL_NORM}, "final_norm has one layer, 4"),
    ],
)
def test_what_cannot_be_captured_is_refused_where_it_is_registered(adapter, fields, text):
    with pytest.raises(WorkerExtractionError, match=text):
        adapter.register_extraction("bad", [a_point(**fields)])


def test_a_bad_prompt_leaves_nothing_behind(adapter, router):
    adapter.register_extraction("empty", [a_point()])
    with pytest.raises(BadRequestError, match="no tokens"):
        adapter.generate("empty", "", {}, router)
    assert "empty" not in router.ended
    assert adapter.generate("empty", PROMPT, {"max_tokens": 3}, router) == generated_text("empty", 3)


def test_an_unknown_probe_leaves_nothing_behind(adapter, router):
    from undercurrent.errors import ProbeNotFoundError

    with pytest.raises(ProbeNotFoundError, match="nope"):
        run(adapter, router, "unknown", a_point(probe_type="nope"))
    assert run(adapter, router, "unknown", a_point()) == generated_text("unknown", 6)


def test_a_request_that_the_router_has_already_is_refused(adapter, router):
    router.register_request("taken", [a_point()])
    with pytest.raises(RouterError, match="taken"):
        run(adapter, router, "taken", a_point())
    router.end_request("taken")


def test_a_slow_probe_loses_no_row():
    go = threading.Event()
    with Adapter(adapter={"ring_bytes": 1 << 16}) as made, waiting_router(go) as router:
        made.load_model("fake")
        threading.Timer(0.3, go.set).start()
        run(made, router, "slow", a_point(layers=(0, 1, 2, 3)), tokens=400)
    assert len(positions(router, "slow")) == 4 * 399


def test_a_point_that_waits_for_its_probe_is_warned_of_once(router, caplog):
    waits = a_point(intervention=InterventionPolicy("block_until_signal", timeout_ms=1000))
    with Adapter() as made:
        made.load_model("fake")
        run(made, router, "w1", waits)
        run(made, router, "w2", waits)
    assert sum("block_until_signal" in message for message in caplog.messages) == 1
    assert len(positions(router, "w2")) == 5


@pytest.mark.parametrize("position", ["prompt[0]", "generated[*]"])
def test_an_abort_that_comes_when_nobody_waits_for_it_any_more_still_stops_its_request(position):
    said = threading.Event()

    class Slow(Keeper):
        def on_activation(self, record):
            if said.is_set():
                return None
            # Longer than the router waits, shorter than the request runs.
            time.sleep(0.1)
            said.set()
            return ProbeSignal(ProbeAction.ABORT)

    registry = ProbeRegistry()
    registry.register("slow", Slow)
    waits = InterventionPolicy("block_until_signal", timeout_ms=5)
    with Adapter() as made, Router(registry) as other:
        made.load_model("fake")
        made.register_extraction("late", [a_point(position=position, probe_type="slow", intervention=waits)])

        async def read():
            return [chunk async for chunk in made.stream("late", PROMPT, {"max_tokens": 4000}, other)]

        chunks = asyncio.run(read())
    assert chunks[-1].finish_reason == "abort"
    assert ProbeAction.ABORT in [one.signal.action for chunk in chunks for one in chunk.signals]


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


@pytest.mark.parametrize("rows", [numpy_rows, torch_rows], ids=["numpy", "torch"])
def test_rows_have_the_shape_of_their_type(rows):
    values = np.arange(24, dtype=np.float32)
    found = rows(memoryview(bytearray(values.tobytes())), "float32", (2, 3, 2))
    assert [tuple(row.shape) for row in found] == [(2, 3, 2)] * 2
    assert np.array_equal(np.stack([np.asarray(row) for row in found]).ravel(), values)


class LateFake(FakeEngine):
    """Computes past the end of a request, and says what it has generated only while `gate` is open."""

    def __init__(self, gate, **options):
        super().__init__(overrun=4, **options)
        self.gate = gate

    async def submit(self, request):
        async for delta in super().submit(request):
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
            yield delta


class LateAdapter(EmbeddedAdapter):
    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _make_engine(self, model, ring, kwargs):
        self.fake = LateFake(self.gate, open_points=True, ring=ring, layers=LAYERS, width=WIDTH, step_s=0.001)
        return self.fake


@pytest.fixture(scope="module")
def late():
    with LateAdapter() as made:
        made.load_model("fake")
        yield made


def positions_of(router, request_id):
    return [position for position, *_ in router.ended[request_id]["p"].verdict]


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_no_probe_sees_a_row_past_the_last_token(late, router, tokens):
    for number in range(3):
        name = f"past-{tokens}-{number}"
        late.register_extraction(name, [a_point(position="*")])
        late.generate(name, PROMPT, {"max_tokens": tokens}, router)
        seen, length = positions_of(router, name), len(PROMPT) + tokens
        # The last token has a row of its own where the engine went on for long enough.
        assert seen in (list(range(length - 1)), list(range(length)))


def test_a_probe_that_stops_a_request_sees_nothing_past_what_was_generated(late, router):
    name = "past-stopped"
    late.register_extraction(name, [a_point(position="*", probe_args={"stop_at": len(PROMPT) + 4})])
    text = late.generate(name, PROMPT, {"max_tokens": 200}, router)
    assert positions_of(router, name)[-1] < len(PROMPT) + len(text) < len(PROMPT) + 100


def test_rows_wait_for_an_adapter_that_is_slower_than_its_engine(late, router):
    name = "waits"
    late.register_extraction(name, [a_point(position="*")])
    late.gate.clear()
    before = late.fake.steps
    runner = threading.Thread(target=late.generate, args=(name, PROMPT, {"max_tokens": 30}, router))
    runner.start()
    wait_until(lambda: late.fake.steps >= before + 34, 10, "the engine to have gone past the end")
    late.gate.set()
    runner.join(10)
    assert positions_of(router, name) == list(range(len(PROMPT) + 30))
