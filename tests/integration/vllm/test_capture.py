"""What happens to captures on a real engine when requests, or we ourselves, misbehave."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from harness import TENSOR_TYPES
from parity import problems

from undercurrent.adapters.base import CaptureOrder, EngineRequest
from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPT = list(range(30, 60))


def captured_of(harness, name, index=0):
    return {point: harness.streams[name, index, point] for point in TENSOR_TYPES}


def fine(harness, models, name):
    """Whether a request captures as it should, now."""
    run = harness.run([harness.request(name, PROMPT)])[name]
    truth = HFOracle(models["llama"]).activations(run.sequence)
    return problems(captured_of(harness, name), run.sequence, len(PROMPT), truth) == []


async def _raw(harness, name, value):
    """Send a request with whatever in its extra arguments, as a client of a bare server could."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, extra_args={"undercurrent": value})
    prompt = tokens_input(prompt_token_ids=list(PROMPT))
    return [out async for out in harness.engine._llm.generate(prompt, params, name)][-1]


BAD_ORDERS = [
    "no json",
    7,
    [1, 2],
    {"request_id": "x"},
    "[" * 9000,
    "x" * 50_000,
    json.dumps({"request_id": "x", "attempt": 1, "points": ["unknown"], "partition": 0}),
    json.dumps({"request_id": "x", "attempt": 1, "points": ["mlp"], "partition": -1}),
]


def test_malformed_orders_run_uncaptured_and_are_reported(llama, models):
    before, faults = llama.ring.stats().capture_errors, len(llama.faults)

    async def every():
        return await asyncio.gather(*(_raw(llama, f"bad{i}", value) for i, value in enumerate(BAD_ORDERS)))

    outputs = llama.call(every())
    assert all(len(o.outputs[0].token_ids) >= 1 and o.finished for o in outputs)
    llama.read_until(lambda: len(llama.faults) == faults + len(BAD_ORDERS))
    new = llama.faults[faults:]
    assert {f.kind for f in new} == {"bad_order"}
    assert {f.engine_id.rsplit("-", 1)[0] for f in new} == {f"bad{i}" for i in range(len(BAD_ORDERS))}
    assert llama.ring.stats().capture_errors == before + len(BAD_ORDERS)
    assert fine(llama, models, "after-bad-orders")


def test_two_running_requests_of_one_identity_capture_once(llama):
    faults = len(llama.faults)
    first = llama.request("twin", PROMPT, max_tokens=30)
    second = EngineRequest(
        engine_id="other:1",
        prompt_token_ids=tuple(PROMPT),
        sampling=first.sampling,
        capture=first.capture,
        skip_prefix_cache=True,
    )
    runs = llama.run([first, second])
    assert all(len(run.sequence) == 60 for run in runs.values())
    assert captured_of(llama, "twin")["mlp"].positions == list(range(59))
    assert [f.kind for f in llama.faults[faults:]] == ["bad_order"]


def _count_resumed(worker):
    runner = worker.model_runner
    original = runner.execute_model
    runner.resumed_in_test = 0

    def counting(scheduler_output, *args, **kwargs):
        runner.resumed_in_test += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = counting


def _resumed(worker):
    return worker.model_runner.resumed_in_test


def test_preempted_requests_emit_every_position_once(llama, models):
    """Eight requests of seven blocks each in a cache of 40: some must be preempted and computed again."""
    llama.on_worker(_count_resumed)
    generator = np.random.default_rng(5)
    prompts = {f"preempt{i}": generator.integers(0, 256, 90 + i).tolist() for i in range(8)}
    runs = llama.run([llama.request(name, prompt, max_tokens=120) for name, prompt in prompts.items()])
    assert llama.on_worker(_resumed) > 0
    oracle = HFOracle(models["llama"])
    for name, run in runs.items():
        captured = captured_of(llama, name)
        assert problems(captured, run.sequence, len(run.prompt), oracle.activations(run.sequence)) == []
        assert len(captured["generated"].positions) == 119


def test_a_cached_prefix_is_declared(llama, models):
    prompt = np.random.default_rng(9).integers(0, 256, 99).tolist()
    oracle = HFOracle(models["llama"])
    for name, cached in (("cold", 0), ("warm", 96)):
        run = llama.run([llama.request(name, prompt, skip_prefix_cache=False)])[name]
        captured = captured_of(llama, name)
        assert {s.opened.cached_prefix for s in captured.values()} == {cached}
        assert run.deltas[-1].cached_tokens == cached
        assert captured["residual"].positions == list(range(cached, len(run.sequence) - 1))
        assert problems(captured, run.sequence, len(prompt), oracle.activations(run.sequence)) == []
    run = llama.run([llama.request("skipped", prompt, skip_prefix_cache=True)])["skipped"]
    assert captured_of(llama, "skipped")["residual"].positions == list(range(len(run.sequence) - 1))


def test_children_have_streams_of_their_own(llama):
    request = llama.request("children", PROMPT, n=3, temperature=1.0, max_tokens=6)
    run = llama.run([request])["children"]
    sequences = {
        index: [*PROMPT, *(t for d in run.deltas if d.index == index for t in d.token_ids)] for index in range(3)
    }
    assert len({tuple(s) for s in sequences.values()}) == 3
    for index, sequence in sequences.items():
        stream = llama.streams["children", index, "residual"]
        assert stream.token_ids == sequence[:-1]
        assert [d.finish_reason for d in run.deltas if d.index == index and d.finish_reason] == ["length"]


def test_an_abort_ends_generation_and_streams(llama):
    request = llama.request("aborted", PROMPT, max_tokens=200)

    async def run():
        deltas = []
        async for delta in llama.engine.submit(request):
            deltas.append(delta)
            if len(deltas) == 3:
                await llama.engine.abort(request.engine_id)
        await llama.engine.abort("nobody")
        return deltas

    deltas = llama.call(run())
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["abort"]
    assert sum(len(d.token_ids) for d in deltas) < 100
    llama.read_until(lambda: all(s.closed for s in captured_of(llama, "aborted").values()))
    stream = captured_of(llama, "aborted")["residual"]
    assert stream.closed.reason == "finished"
    assert stream.positions == list(range(len(stream.positions)))


def test_one_child_is_stopped_alone(llama):
    request = llama.request("sibling", PROMPT, n=2, temperature=1.0, max_tokens=40)

    async def run():
        deltas = []
        await llama.engine.abort(request.engine_id, 1)
        async for delta in llama.engine.submit(request):
            deltas.append(delta)
            if len([d for d in deltas if d.index == 1]) == 3:
                await llama.engine.abort(request.engine_id, 1)
                await llama.engine.abort(request.engine_id, 7)
        return deltas

    deltas = llama.call(run())
    assert {d.index: d.finish_reason for d in deltas if d.finish_reason} == {0: "length", 1: "abort"}
    assert sum(len(d.token_ids) for d in deltas if d.index == 0) == 40
    llama.read_until(lambda: all(llama.streams["sibling", index, "residual"].closed for index in (0, 1)))
    assert len(llama.streams["sibling", 1, "residual"].positions) < len(PROMPT) + 30


def _break_step(worker, what):
    from undercurrent.adapters.vllm import compat

    runtime = compat.runtime_of(worker)
    if what == "tracker":
        target, name = runtime._tracker, "step"
    elif what == "open":
        target, name = runtime._tracker._tails, "open"
    elif what == "close":
        target, name = runtime._tracker, "close"
    elif what == "runner":
        target, name = runtime._runner, "batch"
    else:
        target, name = runtime._taps, "stale"

    def once(*_args, **_kwargs):
        delattr(target, name)
        if what == "stale":
            return frozenset(tap.group for tap in runtime._taps.taps if tap.group.tensor_type == "mlp_out")
        raise RuntimeError(f"injected into the {what}")

    setattr(target, name, once)


@pytest.mark.parametrize("what", ["tracker", "runner", "taps"])
def test_a_capture_error_ends_the_capture_and_not_the_request(llama, models, what):
    before = llama.ring.stats().capture_errors
    llama.on_worker(_break_step, what)
    run = llama.run([llama.request(f"broken-{what}", PROMPT)])[f"broken-{what}"]
    assert run.deltas[-1].finish_reason == "length"
    for stream in captured_of(llama, f"broken-{what}").values():
        assert stream.closed.reason == "capture_error"
        assert f"injected into the {what}" in stream.closed.detail
        assert stream.positions == []
    assert llama.ring.stats().capture_errors == before + 1
    assert fine(llama, models, f"after-{what}")


@pytest.mark.parametrize("what", ["open", "close"])
def test_an_error_while_one_request_comes_or_goes_ends_the_capture_of_that_one(llama, models, what):
    before = llama.ring.stats().capture_errors
    llama.on_worker(_break_step, what)
    names = (f"{what}-first", f"{what}-second")
    requests = [llama.request(name, PROMPT, max_tokens=8 + 8 * n) for n, name in enumerate(names)]
    runs = llama.run(requests)
    assert [run.deltas[-1].finish_reason for run in runs.values()] == ["length"] * 2
    # Nothing of the first was opened when its first stream broke: it is told as a fault.
    first = {key[2]: s.closed.reason for key, s in llama.streams.items() if key[0] == names[0]}
    assert set(first.values()) == (set() if what == "open" else {"capture_error"})
    assert {s.closed.reason for s in captured_of(llama, names[1]).values()} == {"finished"}
    assert llama.ring.stats().capture_errors == before + 1
    assert fine(llama, models, f"after-{what}")


def _spoil_tap(worker):
    """In the worker: once, during a forward pass, leave what a tap leaves that failed there."""
    from undercurrent.adapters.vllm import compat

    taps = compat.runtime_of(worker)._taps
    tap = next(t for t in taps.taps if t.group.tensor_type == "residual_stream")

    def spoil(_module, _args, output):
        if taps._armed:
            handle.remove()
            taps.error = RuntimeError("injected into a tap")

    handle = tap.module.register_forward_hook(spoil)


def test_a_tap_error_of_the_forward_pass_ends_the_capture_and_not_the_request(llama, models):
    llama.on_worker(_spoil_tap)
    run = llama.run([llama.request("tap-error", PROMPT)])["tap-error"]
    assert run.deltas[-1].finish_reason == "length"
    closed = {s.closed.reason for s in captured_of(llama, "tap-error").values()}
    assert closed == {"capture_error"}
    assert fine(llama, models, "after-tap-error")


def test_a_stale_tap_is_declared_and_never_emitted(llama):
    llama.on_worker(_break_step, "stale")
    run = llama.run([llama.request("stale", PROMPT)])["stale"]
    assert run.deltas[-1].finish_reason == "length"
    captured = captured_of(llama, "stale")
    assert captured["mlp"].positions == list(range(30, 37))
    assert [(x.messages, x.rows, x.first_pos, x.last_pos) for x in captured["mlp"].losses] == [(1, 30, 0, 29)]
    assert (captured["mlp"].closed.emitted, captured["mlp"].closed.dropped) == (7, 30)
    assert captured["residual"].positions == list(range(37))


def _dump_layer(worker, layer):
    """In the worker: keep what a layer returns, and which rows of which request that was, for every step."""
    runner = worker.model_runner
    runner.dump_in_test = []
    kept = []

    def keep(_module, _args, output):
        kept[:] = [(output[0] + output[1]).clone()]

    runner.get_model().model.layers[layer].register_forward_hook(keep, prepend=True)
    original = runner.execute_model

    def execute_model(scheduler_output, *args, **kwargs):
        result = original(scheduler_output, *args, **kwargs)
        rows = 0
        for slot, name in enumerate(runner.input_batch.req_ids if scheduler_output.num_scheduled_tokens else ()):
            count = scheduler_output.num_scheduled_tokens[name]
            start = int(runner.input_batch.num_computed_tokens_cpu[slot])
            for k in range(count):
                runner.dump_in_test.append((name, start + k, kept[0][rows + k].numpy().tobytes()))
            rows += count
        return result

    runner.execute_model = execute_model


def _dumped(worker):
    return worker.model_runner.dump_in_test


def test_records_equal_a_dump_of_the_same_run_bit_for_bit(llama):
    llama.on_worker(_dump_layer, 2)
    generator = np.random.default_rng(11)
    prompts = {f"bits{i}": generator.integers(0, 256, 20 + 7 * i).tolist() for i in range(5)}
    llama.run([llama.request(name, prompt, max_tokens=10) for name, prompt in prompts.items()])
    dump = {(name.split(":")[0], position): row for name, position, row in llama.on_worker(_dumped)}
    compared = 0
    for name in prompts:
        stream = llama.streams[name, 0, "residual"]
        for position, row in zip(stream.positions, stream.rows, strict=True):
            assert dump[name, position] == row[2].tobytes()
            compared += 1
    assert compared == len(dump) == sum(len(p) + 9 for p in prompts.values())


def bad(**changes):
    values = {"engine_id": "x", "prompt_token_ids": (1, 2, 3)}
    return EngineRequest(**(values | changes))


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (bad(prompt="both"), "exactly one"),
        (bad(prompt_token_ids=None), "exactly one"),
        (bad(prompt_token_ids=()), "no tokens"),
        (bad(prompt_token_ids=(1, 320)), "outside 0 to 319"),
        (bad(prompt_token_ids=(1, -1)), "outside"),
        (bad(prompt_token_ids=(1,) * 256), "more than the model's 256"),
        (bad(sampling=Sampling(max_tokens=254)), "more than the model's 256"),
        (bad(sampling=Sampling(temperature=-1.0)), "temperature"),
        (bad(sampling=Sampling(top_p=2.0)), "top_p"),
        (bad(sampling=Sampling(max_tokens=0)), "max_tokens"),
        (bad(sampling=Sampling(n=0)), "n must"),
        (bad(sampling=Sampling(seed=7, temperature=1.0)), "seed stops vLLM on a CPU"),
        (bad(lora="some"), "LoRA"),
        (
            bad(capture=CaptureOrder(request_id="r", attempt=1, points=("nope", "mlp"), partition=0)),
            "unknown extraction points: nope",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused_with_its_reason(llama, request_, match):
    with pytest.raises(BadRequestError, match=match):
        llama.call(llama.engine.check(request_))


def test_a_good_request_comes_back_as_it_is(llama):
    assert llama.call(llama.engine.check(bad())).prompt_token_ids == bad().prompt_token_ids


def test_a_prompt_is_tokenized_once(llama, monkeypatch):
    request = EngineRequest(engine_id="text", prompt="five!", sampling=Sampling(max_tokens=2))
    checked = llama.call(llama.engine.check(request))
    assert (checked.prompt, len(checked.prompt_token_ids)) == (None, 5)

    async def run():
        monkeypatch.setattr(llama.engine._llm, "get_tokenizer", None)
        return [delta async for delta in llama.engine.submit(checked)]

    assert {delta.prompt_tokens for delta in llama.call(run())} == {5}


def test_steps_grow_with_and_without_capture(llama):
    before = llama.engine.steps
    llama.run([llama.request("uncaptured", PROMPT, points=())])
    assert llama.engine.steps >= before + 8
