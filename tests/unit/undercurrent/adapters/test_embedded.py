"""The embedded adapter over the scripted engine: real frames, a real ring, a real router; no model."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from tests.unit.undercurrent.adapters.embedded_doubles import (
    LAYERS,
    PROMPT,
    WIDTH,
    Adapter,
    Keeper,
    a_point,
    positions,
    run,
    waiting_router,
)
from undercurrent.adapters.routing import numpy_rows, torch_rows
from undercurrent.core import ProbeAction, ProbeRegistry, ProbeSignal
from undercurrent.errors import (
    BadRequestError,
    CaptureError,
    RouterError,
    WorkerExtractionError,
)
from undercurrent.router import Router
from undercurrent.spec import (
    ExecutionMode,
    InterventionPolicy,
    TensorType,
    UntilPolicy,
)
from undercurrent.testing.fake_engine import activation, generated_text
from undercurrent.testing.waiting import wait_until


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


@pytest.mark.parametrize("rows", [numpy_rows, torch_rows], ids=["numpy", "torch"])
def test_rows_have_the_shape_of_their_type(rows):
    values = np.arange(24, dtype=np.float32)
    found = rows(memoryview(bytearray(values.tobytes())), "float32", (2, 3, 2))
    assert [tuple(row.shape) for row in found] == [(2, 3, 2)] * 2
    assert np.array_equal(np.stack([np.asarray(row) for row in found]).ravel(), values)
