"""What every engine adapter keeps: who may capture what, each record once and in order, and what an abort stops.

A new adapter joins by a line in `ADAPTERS`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.contracts.adapter_world import (
    ADAPTERS,
    GREEDY,
    LATE_TOKENS,
    LAYERS,
    MAX_LEN,
    VLLM_ENVIRONMENT,
    WIDTH,
    World,
    listening,
    point,
    three_letters,
)
from undercurrent.core import ProbeAction, ProbeRegistry, ProbeSignal
from undercurrent.errors import (
    BadRequestError,
    CaptureError,
    EngineDeadError,
    SpecValidationError,
    VLLMAdapterLimitationError,
    WorkerExtractionError,
)
from undercurrent.router import Router
from undercurrent.spec import TensorType
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(
        "llama", tmp_path_factory.mktemp("adapters") / "llama", layers=LAYERS, width=WIDTH, max_len=MAX_LEN
    )


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def world(request, model):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VLLM_ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        made = World(request.param, ADAPTERS[request.param](model))
        made.registry = ProbeRegistry(entry_points=list)
        made.registry.register("listening", listening(made))
        try:
            with Router(made.registry, worker_pool_size=2) as made.router:
                made.router.on_request_end(lambda request_id, results: made.results.update({request_id: dict(results)}))
                yield made
        finally:
            made.adapter.shutdown()


# Where requests end


@pytest.mark.parametrize("end", ["limit", "stop string", "abort"])
def test_no_probe_sees_a_position_past_the_last_token(world, end):
    prompt, three = three_letters(world)
    world.says["ends " + end] = lambda record: (
        ProbeSignal(ProbeAction.ABORT) if end == "abort" and record.token_pos == len(prompt) + 7 else None
    )
    sampling = {"max_tokens": 20} if end == "limit" else {"max_tokens": 200}
    sampling |= {"stop": (three,)} if end == "stop string" else {}
    chunks = world.stream("ends " + end, [point()], prompt, **sampling)
    assert chunks[-1].finish_reason == {"limit": "length", "stop string": "stop", "abort": "abort"}[end]
    length = chunks[-1].prompt_tokens + sum(len(chunk.token_ids) for chunk in chunks)
    seen = [position for position, layer in world.places("ends " + end) if layer == 0]
    # The last token was sampled; it has a row of its own only where the engine went on past it.
    assert seen in ([*range(length - 1)], [*range(length)])


# Who may capture what


def test_a_request_that_nobody_registered_is_refused(world):
    with pytest.raises(CaptureError, match="'stranger' is not registered"):
        world.adapter.generate("stranger", "a prompt", {"max_tokens": 2}, world.router)


def test_what_was_unregistered_is_gone_and_an_unknown_id_is_nothing(world):
    world.adapter.unregister_extraction("never was")
    world.adapter.register_extraction("forgotten", [point()])
    world.adapter.unregister_extraction("forgotten")
    with pytest.raises(CaptureError, match="not registered"):
        world.adapter.generate("forgotten", "a prompt", {"max_tokens": 2}, world.router)


def test_the_last_registration_counts(world):
    world.adapter.register_extraction("twice", [point("first")])
    world.run("twice", [point("second", layers=3)])
    assert not world.records["twice", "first"]
    assert len(world.records["twice", "second"]) == len("a prompt") + 5


def test_a_request_without_points_runs(world):
    assert world.run("pointless", []) == world.run("pointed", [point()])
    assert world.results["pointless"] == {}


def test_an_id_may_be_used_again(world):
    first = world.run("again", [point()])
    records = len(world.records["again", "p"])
    assert world.run("again", [point()]) == first
    assert len(world.records["again", "p"]) == 2 * records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": LAYERS}, f"'p': the model has layers 0 to {LAYERS - 1}"),
        ({"layers": 0, "tensor_type": "final_norm"}, f"'p': final_norm has one layer, {LAYERS}"),
        ({"layers": 0, "tensor_type": "router_topk"}, "'p': tensor_type router_topk"),
    ],
)
def test_a_point_that_the_model_does_not_have_is_refused_by_name(world, fields, message):
    with pytest.raises(WorkerExtractionError, match=message):
        world.adapter.register_extraction("impossible", [point(**fields)])
    with pytest.raises(CaptureError, match="not registered"):
        world.adapter.generate("impossible", "a prompt", {"max_tokens": 2}, world.router)


def test_two_points_of_one_name_are_refused(world):
    with pytest.raises(SpecValidationError):
        world.adapter.register_extraction("doubled", [point(), point()])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"heat": 1}, "unknown sampling parameters: heat"), ({"n": 2}, "n is 1"), ({"top_p": 7.0}, "top_p")],
)
def test_what_cannot_be_sampled_is_refused_and_the_request_may_run_then(world, kwargs, message):
    request_id = f"sampled {message}"
    world.adapter.register_extraction(request_id, [point()])
    with pytest.raises(BadRequestError, match=message):
        world.adapter.generate(request_id, "a prompt", kwargs, world.router)
    assert world.run(request_id, [point()])


def test_a_prompt_that_is_too_long_is_refused(world):
    with pytest.raises(BadRequestError, match=f"more than the model's {MAX_LEN}"):
        world.run("long", [point()], "x" * MAX_LEN)


# Records


def test_each_token_and_layer_is_one_record_in_order(world):
    world.run("every", [point()])
    computed = len("a prompt") + 6 - 1  # the last token was sampled, not computed
    assert world.places("every") == [(position, layer) for position in range(computed) for layer in (0, 2)]
    for record in world.records["every", "p"]:
        assert record.tensor_type is TensorType.RESIDUAL_STREAM
        assert record.is_generated is (record.token_pos >= len("a prompt"))
        assert (record.tensor.shape, record.tensor.dtype) == ((WIDTH,), np.float32)


def test_all_tensor_types_are_what_transformers_computes(world, model):
    from undercurrent.adapters.hf.oracle import HFOracle

    kinds = {"residual_stream": (0, 3), "attn_out": (1,), "mlp_out": (2,), "final_norm": (LAYERS,)}
    points = [point(kind, layers, kind) for kind, layers in kinds.items()]
    chunks = world.stream("kinds", points, "The whole prompt.")
    generated = [token for chunk in chunks for token in chunk.token_ids]
    prompt = list(world.adapter.tokenizer.encode("The whole prompt."))
    truth = HFOracle(model).activations([*prompt, *generated])
    for kind, layers in kinds.items():
        assert world.places("kinds", kind) == [
            (position, layer) for position in range(len(prompt) + 5) for layer in layers
        ]
        for record in world.records["kinds", kind]:
            expected = truth[kind][record.token_pos, 0 if kind == "final_norm" else record.layer]
            error = np.linalg.norm(record.tensor - expected) / np.linalg.norm(expected)
            assert error < 1e-4


@pytest.mark.parametrize(
    ("position", "places"),
    [
        ("prompt[-1]", [7]),
        ("prompt[0]", [0]),
        ("3", [3]),
        ("generated[0]", [8]),
        ("generated[*]", [8, 9, 10, 11, 12]),
        ("generated[1:3]", [9, 10]),
        ("generated[2:]", [10, 11, 12]),
        ("prompt[*]", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("generated[-1]", [12]),
        ("generated[-3]", [10]),
    ],
)
def test_a_selector_names_the_tokens_that_it_says(world, position, places):
    request_id = f"selected {position}"
    world.run(request_id, [point(layers=1, position=int(position) if position.isdigit() else position)])
    assert world.places(request_id) == [(place, 1) for place in places]


def test_points_of_a_request_have_records_of_their_own(world):
    world.run("several", [point("all"), point("some", (0, 2), position="generated[*]"), point("one", 0, "mlp_out")])
    assert [len(world.records["several", name]) for name in ("all", "some", "one")] == [26, 10, 13]
    some = {(r.token_pos, r.layer): r.tensor for r in world.records["several", "some"]}
    for record in world.records["several", "all"]:
        if (record.token_pos, record.layer) in some:
            assert np.array_equal(record.tensor, some[record.token_pos, record.layer])


def test_records_have_been_judged_and_results_told_before_generate_returns(world):
    world.run("told", [point(), point("queued", execution_mode="async", queue_depth=1000)])
    assert {name: result.verdict for name, result in world.results["told"].items()} == {
        "p": "saw 26",
        "queued": "saw 26",
    }


def test_calls_from_several_threads_share_the_engine_and_keep_their_records_apart(world):
    together = threading.Barrier(4)
    prompts = {f"shared {n}": "x" * (3 + 5 * n) for n in range(4)}
    alone = {name: world.run(f"{name} alone", [point()], prompt) for name, prompt in prompts.items()}

    def call(name):
        together.wait(30)
        return world.run(name, [point()], prompts[name])

    with ThreadPoolExecutor(4) as pool:
        texts = dict(zip(prompts, pool.map(call, prompts), strict=True))
    assert texts == alone
    for name, prompt in prompts.items():
        places = [(position, layer) for position in range(len(prompt) + 5) for layer in (0, 2)]
        assert world.places(name) == places
        for one, other in zip(world.records[name, "p"], world.records[f"{name} alone", "p"], strict=True):
            assert np.allclose(one.tensor, other.tensor, rtol=1e-3, atol=1e-4)


def test_one_request_cannot_run_twice_at_once(world):
    entered, leave = threading.Event(), threading.Event()

    def wait(_record):
        entered.set()
        leave.wait(30)

    world.says["running"] = wait
    world.adapter.register_extraction("running", [point()])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(world.adapter.generate, "running", "a prompt", {"max_tokens": 2, **GREEDY}, world.router)
        try:
            assert entered.wait(30)
            with pytest.raises(CaptureError, match="running already"):
                world.adapter.generate("running", "a prompt", {"max_tokens": 2}, world.router)
            with pytest.raises(CaptureError, match="is running"):
                world.adapter.register_extraction("running", [point()])
        finally:
            leave.set()
        first.result(60)


# What an abort stops


def aborting_at(position):
    return lambda record: ProbeSignal(ProbeAction.ABORT, {"why": "enough"}) if record.token_pos == position else None


def test_an_inline_abort_stops_the_text(world):
    whole = world.run("whole", [point()], max_tokens=60)
    world.says["cut"] = aborting_at(len("a prompt") + 3)
    cut = world.run("cut", [point()], max_tokens=60)
    assert whole.startswith(cut)
    assert len(cut) < len(whole)


def aborted_streams(world, name, position):
    """A few requests that stop at a position: one may be held up by whatever else runs on the machine."""
    for number in range(1 if world.kind == "hf" else 4):
        request_id = f"{name}-{number}"
        world.says[request_id] = aborting_at(position)
        chunks = world.stream(request_id, [point()], max_tokens=60)
        assert chunks[-1].finish_reason == "abort"
        # An engine that runs ahead of its probes may have handed it on before the last chunk.
        said = [signal for chunk in chunks for signal in chunk.signals if signal.signal.action is ProbeAction.ABORT]
        assert (said[0].extraction_point_name, said[0].signal.metadata["why"]) == ("p", "enough")
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        yield tokens, max(place for place, _ in world.places(request_id))


def test_an_inline_abort_comes_as_soon_as_the_engine_can(world):
    trigger = len("a prompt") + 3
    generated, last = zip(*aborted_streams(world, "soon", trigger), strict=True)
    # The token at the trigger's position is the fourth that was generated.
    assert 4 <= min(generated) <= 4 + LATE_TOKENS[world.kind]
    assert min(last) <= trigger + LATE_TOKENS[world.kind]


def test_an_abort_on_the_prompt_comes_before_the_first_token_or_just_after(world):
    generated, _ = zip(*aborted_streams(world, "unwanted", 0), strict=True)
    assert min(generated) <= LATE_TOKENS[world.kind]


def test_an_abort_ends_no_other_request(world):
    world.says["one"] = aborting_at(9)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(world.run, name, [point()], max_tokens=30) for name in ("one", "other")]
        texts = [future.result(120) for future in futures]
    assert world.results["other"]["p"].verdict == f"saw {2 * (len('a prompt') + 29)}"
    assert texts[1].startswith(texts[0])


def test_an_async_point_never_aborts(world):
    world.says["observed"] = lambda _record: ProbeSignal(ProbeAction.ABORT)
    chunks = world.stream("observed", [point(execution_mode="async", queue_depth=1000)])
    assert (sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason) == (6, "length")
    assert world.results["observed"]["p"].verdict == "saw 26"


def test_a_flag_stops_nothing_and_is_told(world):
    world.says["flagged"] = lambda _record: ProbeSignal(ProbeAction.FLAG, confidence=0.5)
    chunks = world.stream("flagged", [point(layers=1)])
    assert chunks[-1].finish_reason == "length"
    signals = [signal for chunk in chunks for signal in chunk.signals]
    assert [signal.signal.action for signal in signals] == [ProbeAction.FLAG] * 13


def test_a_probe_that_raises_stops_nothing(world):
    def raises(_record):
        raise ValueError("a bug")

    world.says["buggy"] = raises
    assert world.run("buggy", [point()]) == world.run("not buggy", [point()])


def test_who_leaves_a_stream_stops_its_request(world):
    async def inside():
        chunks = world.adapter.stream("left", "a prompt", {"max_tokens": 200, **GREEDY}, world.router)
        async for _ in chunks:
            break
        await chunks.aclose()

    world.adapter.register_extraction("left", [point(layers=1)])
    asyncio.run(inside())
    world.run("afterwards", [point()])
    assert len(world.records["left", "p"]) < 150


# One router, one model, one life


def test_a_second_router_is_served_or_refused_by_name(world):
    with Router(world.registry, worker_pool_size=1) as second:
        world.adapter.register_extraction("rerouted", [point()])

        def call():
            return world.adapter.generate("rerouted", "a prompt", {"max_tokens": 2, **GREEDY}, second)

        if world.kind == "vllm":
            with pytest.raises(VLLMAdapterLimitationError, match="one Router"):
                call()
        else:
            call()
            assert len(world.records["rerouted", "p"]) == 18


def test_a_second_model_is_refused(world, model):
    with pytest.raises(CaptureError, match="one adapter serves one model"):
        world.adapter.load_model(str(model))


def test_after_shutdown_nothing_runs_and_a_second_shutdown_is_nothing(world):
    """Last in this file: it ends the adapter that all tests share."""
    world.adapter.register_extraction("late", [point()])
    world.adapter.shutdown()
    world.adapter.shutdown()
    with pytest.raises(EngineDeadError):
        world.adapter.generate("late", "a prompt", {"max_tokens": 2}, world.router)
    with pytest.raises(EngineDeadError):
        world.adapter.register_extraction("later", [point()])
