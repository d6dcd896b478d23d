"""The embedded adapter when things go wrong: nobody waits for ever, and no record is missed without an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import numpy as np
import pytest

from tests.unit.undercurrent.adapters.embedded_doubles import PROMPT, WIDTH, Adapter, Keeper, a_point, run
from undercurrent.adapters.arguments import sampling_of
from undercurrent.core import ProbeRegistry
from undercurrent.errors import (
    BadRequestError,
    CaptureError,
    EngineDeadError,
    EngineError,
    ProbeError,
    VLLMAdapterLimitationError,
    WorkerExtractionError,
)
from undercurrent.router import Router
from undercurrent.testing.fake_engine import activation, generated_text
from undercurrent.testing.waiting import wait_until


@contextlib.contextmanager
def router_of(**probes):
    registry = ProbeRegistry()
    for name, probe in {"keep": Keeper, **probes}.items():
        registry.register(name, probe)
    with Router(registry, worker_pool_size=2) as router:
        router.ended = {}
        router.on_request_end(router.ended.__setitem__)
        yield router


@pytest.fixture
def adapter():
    with Adapter() as made:
        made.load_model("fake")
        yield made


def started(function, *args, **kwargs):
    """Call it in a thread; return the thread and where its result or error will be."""
    answer = []

    def body():
        try:
            answer.append(function(*args, **kwargs))
        except Exception as exc:
            answer.append(exc)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, answer


def answer_of(thread, answer):
    thread.join(20)
    assert not thread.is_alive(), "the call hangs"
    return answer[0]


def test_a_prompt_whose_rows_are_more_than_the_ring_holds_loses_none():
    prompt = "long " * 500
    with Adapter(adapter={"ring_bytes": 1 << 16, "tensors": "numpy"}) as made, router_of() as router:
        made.load_model("fake")
        made.register_extraction("big", [a_point(layers=(0, 1, 2, 3), position="*")])
        assert made.generate("big", prompt, {"max_tokens": 3}, router) == generated_text("big", 3)
    verdict = router.ended["big"]["p"].verdict
    wanted = [(place, layer) for place in range(len(prompt) + 2) for layer in range(4)]
    assert [(place, layer) for place, layer, _, _ in verdict] == wanted
    assert all(np.array_equal(row, activation("big", place, layer, WIDTH)) for place, layer, _, row in verdict)


@pytest.mark.parametrize("where", ["on_start", "on_end"])
def test_a_shutdown_while_a_probe_starts_or_ends_answers_the_caller(where):
    inside, go = threading.Event(), threading.Event()

    class Slow(Keeper):
        pass

    def wait(self, ctx):
        inside.set()
        assert go.wait(20)
        return getattr(Keeper, where)(self, ctx)

    setattr(Slow, where, wait)
    made = Adapter()
    made.load_model("fake")
    with router_of(slow=Slow) as router:
        call = started(run, made, router, "x", a_point(probe_type="slow"))
        assert inside.wait(10)
        session = made._session
        closing = started(made.shutdown)
        wait_until(lambda: session._closing, 10, "its requests are being cancelled")
        go.set()
        assert answer_of(*closing) is None
        assert isinstance(answer_of(*call), EngineDeadError)
        # It was registered with the router, so its end was heard.
        assert "x" in router.ended


def test_a_probe_that_never_returns_keeps_no_caller_waiting_after_a_shutdown(monkeypatch):
    inside, go = threading.Event(), threading.Event()

    class Stuck(Keeper):
        def on_start(self, ctx):
            inside.set()
            assert go.wait(30)

    monkeypatch.setattr("undercurrent.adapters.session._REQUESTS_S", 0.05)
    monkeypatch.setattr("undercurrent.adapters.background._WIND_UP_S", 0.05)
    made = Adapter()
    made.load_model("fake")
    with router_of(stuck=Stuck) as router:
        call = started(run, made, router, "x", a_point(probe_type="stuck"))
        try:
            assert inside.wait(10)
            made.shutdown()
            assert isinstance(answer_of(*call), EngineDeadError)
        finally:
            go.set()


@pytest.mark.parametrize("where", ["on_activation", "on_start", "on_end"])
def test_a_probe_that_exits_costs_its_own_request_alone(adapter, where):
    class Leaver(Keeper):
        pass

    def leave(self, _):
        raise SystemExit(3)

    setattr(Leaver, where, leave)
    with router_of(leaver=Leaver) as router:
        answer = answer_of(*started(run, adapter, router, "x", a_point(probe_type="leaver")))
        if where == "on_end":
            # The text is complete by then, and the other probes of the request are to be heard.
            assert len(answer) == 6
            assert "SystemExit" in router.ended["x"]["p"].metadata["reason"]
        else:
            assert isinstance(answer, CaptureError if where == "on_activation" else ProbeError)
            assert "SystemExit" in str(answer)
        assert answer_of(*started(run, adapter, router, "y", a_point())) == generated_text("y", 6)


@pytest.mark.parametrize("what", ["generate", "stream", "shutdown"])
def test_what_would_wait_for_the_probe_that_asks_for_it_is_refused(adapter, what):
    said = []

    def stream(other):
        async def read():
            return [chunk async for chunk in adapter.stream("inner", PROMPT, {}, other)]

        return asyncio.run(read())

    class Caller(Keeper):
        def on_activation(self, record):
            calls = {
                "generate": lambda: adapter.generate("inner", PROMPT, {}, router),
                "stream": lambda: stream(router),
                "shutdown": adapter.shutdown,
            }
            with pytest.raises(VLLMAdapterLimitationError, match=f"{what} from within a probe"):
                calls[what]()
            said.append(record.token_pos)

    adapter.register_extraction("inner", [])
    with router_of(caller=Caller) as router:
        call = started(run, adapter, router, "x", a_point(probe_type="caller"))
        assert answer_of(*call) == generated_text("x", 6)
    assert said == [8, 9, 10, 11, 12]


def test_a_probe_may_generate_where_it_starts(adapter):
    texts = []

    class Asker(Keeper):
        def on_start(self, ctx):
            texts.append(run(adapter, router, "inner", a_point()))

    with router_of(asker=Asker) as router:
        answer_of(*started(run, adapter, router, "x", a_point(probe_type="asker")))
    assert texts == [generated_text("inner", 6)]


def test_a_hundred_probes_may_generate_where_they_start(adapter):
    class Asker(Keeper):
        def on_start(self, ctx):
            run(adapter, router, f"inner-{ctx.request_id}", a_point())

    with router_of(asker=Asker) as router:
        calls = [started(run, adapter, router, f"x{n}", a_point(probe_type="asker")) for n in range(100)]
        assert [answer_of(*call) for call in calls] == [generated_text(f"x{n}", 6) for n in range(100)]


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_of_the_process_is_refused_and_costs_the_engine_nothing(adapter):
    with router_of() as router:
        adapter.register_extraction("x", [])
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    adapter.generate("x", PROMPT, {}, router)
                except EngineDeadError:
                    adapter.shutdown()
                    status = 0
            os._exit(status)
        thread, status = started(lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert answer_of(thread, status) == 0
        assert answer_of(*started(run, adapter, router, "y", a_point())) == generated_text("y", 6)


def test_a_request_that_is_cancelled_while_its_points_are_installed_costs_the_next_one_nothing(adapter):
    held, set_points = asyncio.Event(), adapter.fake.set_points
    asked = threading.Event()

    async def heard_and_slow(points):
        await set_points(points)
        asked.set()
        await held.wait()

    async def cancelled():
        chunks = adapter.stream("c", PROMPT, {}, router)
        task = asyncio.ensure_future(anext(chunks))
        while not asked.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with router_of() as router:
        run(adapter, router, "before", a_point())
        adapter.fake.set_points = heard_and_slow
        adapter.register_extraction("c", [a_point(layers=(2,))])
        asyncio.run(asyncio.wait_for(cancelled(), 20))
        adapter.fake.set_points = set_points
        answer = answer_of(*started(run, adapter, router, "after", a_point()))
        assert answer == generated_text("after", 6)
        assert len(router.ended["after"]["p"].verdict) == 5


def test_a_stream_that_is_closed_at_any_moment_has_ended_by_then(adapter):
    async def closed(turns):
        chunks = adapter.stream("c", PROMPT, {"max_tokens": 20}, router)
        task = asyncio.ensure_future(anext(chunks))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await chunks.aclose()

    with router_of() as router:
        for turns in [*range(1, 12), *range(12, 400, 25)]:
            adapter.register_extraction("c", [a_point(layers=(turns % 4,))])
            asyncio.run(asyncio.wait_for(closed(turns), 20))
            # Neither is it running for the adapter nor live for the router.
            adapter.register_extraction("c", [])
            router.register_request("c", [])
            router.end_request("c")


def test_an_engine_that_gives_a_request_up_is_an_error_not_a_short_text(adapter):
    def give_up():
        for child in adapter.fake._batch:
            child.reason = "abort"

    seen = threading.Event()

    class Watcher(Keeper):
        def on_activation(self, record):
            seen.set()

    with router_of(watch=Watcher) as router:
        call = started(run, adapter, router, "x", a_point(probe_type="watch"), tokens=3000)
        assert seen.wait(10)
        adapter._session.background.call_soon(give_up)
        answer = answer_of(*call)
    assert isinstance(answer, EngineError)
    assert "gave it up" in str(answer)


def test_two_hundred_requests_with_points_of_their_own_get_their_own_rows(adapter):
    kinds = ["*", "prompt[*]", "generated[*]", "generated[1:3]", "generated[-1]"]
    end = len(PROMPT)
    wrong = []

    def one(number):
        name, tokens = f"r{number}", 2 + number % 9
        layers, kind = [(0,), (1, 3), (0, 1, 2, 3)][number % 3], kinds[number % 5]
        run(adapter, router, name, a_point(layers=layers, position=kind), tokens=tokens)
        last = end + tokens - 1
        places = {
            "*": range(last),
            "prompt[*]": range(end),
            "generated[*]": range(end, last),
            "generated[1:3]": range(end + 1, min(end + 3, last)),
            "generated[-1]": range(last - 1, last),
        }[kind]
        verdict = router.ended[name]["p"].verdict
        if [(place, layer) for place, layer, _, _ in verdict] != [(n, layer) for n in places for layer in layers]:
            wrong.append(name)
        wrong.extend(name for n, layer, _, row in verdict if not np.array_equal(row, activation(name, n, layer, WIDTH)))

    with router_of() as router:
        calls = [started(one, number) for number in range(200)]
        assert [answer_of(*call) for call in calls] == [None] * 200
    assert wrong == []
    session = adapter._session
    assert not session._uses
    assert not session._requests
    assert not session._streams.busy


@pytest.mark.parametrize("request_id", ["", "\ud800", "x" * 1025, "é" * 600, "null\x00", 5, None])
def test_an_id_that_cannot_travel_is_refused_before_an_engine_hears_of_it(adapter, request_id):
    with pytest.raises(BadRequestError, match="request id"):
        adapter.register_extraction(request_id, [])


def test_more_points_than_an_order_names_are_refused_where_they_are_registered(adapter):
    points = [a_point(f"p{n}", position=n) for n in range(65)]
    adapter.register_extraction("x", [*points[:64], *(a_point(f"again{n}", position=n) for n in range(64))])
    with pytest.raises(WorkerExtractionError, match="65 points that capture different rows; accepted: 64"):
        adapter.register_extraction("x", points)


def test_a_request_whose_order_the_engine_refuses_says_why_at_once(adapter):
    tracker = adapter.fake._tracker

    def refuse(engine_id, order, **_):
        # As vLLM's worker does, with the id that vLLM makes of ours.
        tracker.fault("bad_order", "an order that is wrong", f"{engine_id.partition('_')[2]}-0123abcd")

    tracker.open = refuse
    with router_of() as router:
        answer = answer_of(*started(run, adapter, router, "x", a_point()))
    assert isinstance(answer, CaptureError)
    assert "an order that is wrong" in str(answer)


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", ["a"]])
def test_a_prompt_that_is_no_text_is_refused(adapter, prompt):
    adapter.register_extraction("x", [])
    with router_of() as router, pytest.raises(BadRequestError, match="the prompt is"):
        adapter.generate("x", prompt, {}, router)


def test_an_id_of_any_other_characters_is_fine(adapter):
    name = 'é🦊/\n\x01"_1-2' + "x" * 900
    with router_of() as router:
        assert run(adapter, router, name, a_point()) == generated_text(name, 6)
    assert len(router.ended[name]["p"].verdict) == 5


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": "5"},
        {"max_tokens": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"seed": 1.5},
        {"seed": 1 << 70},
        {"n": None},
        {"n": 1.0},
        {"stop": 5},
        {"stop": [5]},
        {"stop": [""]},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": [1.5]},
        {"ignore_eos": 1},
        None,
        ["max_tokens"],
    ],
)
def test_sampling_parameters_of_a_wrong_type_are_refused_by_name(given):
    with pytest.raises(BadRequestError, match=next(iter(given)) if isinstance(given, dict) else "generation_kwargs"):
        sampling_of(given)


def test_sampling_parameters_may_be_numbers_of_numpy_and_none():
    found = sampling_of({"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_p": None, "stop": None})
    assert (type(found.max_tokens), type(found.temperature)) == (int, float)
    assert (found.top_p, found.stop) == (None, ())
