"""Every way in which vLLM's scheduler can treat a request, against transformers: each position once, the right row."""

from __future__ import annotations

import numpy as np
import pytest
from harness import POINTS
from inprocess import Ask, Capturing
from lora import build_adapter, build_merged
from parity import problems

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

RANDOM = np.random.default_rng(3)


def tokens(count):
    return RANDOM.integers(0, 256, count).tolist()


@pytest.fixture(scope="module")
def oracle(models):
    return HFOracle(models["llama"])


def check(runs, oracle):
    """Assert that every captured request has exactly the records that its tokens call for."""
    for name, run in runs.items():
        if run.streams:
            truth = oracle.activations(run.sequence)
            assert problems(run.streams, run.sequence, len(run.prompt), truth) == [], name
            assert all(s.closed is not None and s.closed.reason == "finished" for s in run.streams.values())


@pytest.fixture(scope="module")
def small(models):
    """Chunks of at most 16 tokens, and a cache in which eight requests do not fit at once."""
    with Capturing(models["llama"], max_num_batched_tokens=16, num_gpu_blocks_override=14) as engine:
        yield engine


@pytest.fixture(scope="module")
def caching(models):
    with Capturing(models["llama"], enable_prefix_caching=True) as engine:
        yield engine


def mixed_load(prefix):
    """Requests of all lengths that come one after the other, every third of them without points."""
    lengths = (1, 2, 15, 16, 17, 33, 64, 90)
    return [
        Ask(f"{prefix}{i}", tokens(n), None if i % 3 else (), after=2 * i, params={"max_tokens": 5 + 7 * i})
        for i, n in enumerate(lengths)
    ]


def test_chunks_mixed_steps_and_requests_without_points(small, oracle):
    runs = small.run(mixed_load("mixed"))
    assert [name for name, run in runs.items() if not run.streams] == ["mixed0", "mixed3", "mixed6"]
    check(runs, oracle)
    steps = runs["mixed7"].streams["residual"].steps
    assert len(set(steps[:90])) > 5, "its prompt was not prefilled in chunks"


def count_preemptions(engine, monkeypatch):
    scheduler = engine.engine.engine_core.engine_core.scheduler
    original, seen = scheduler._preempt_request, []
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *a, **k: (seen.append(a[0].request_id), original(*a, **k))
    )
    return seen


def test_preempted_requests_emit_every_position_once(small, oracle, monkeypatch):
    seen = count_preemptions(small, monkeypatch)
    runs = small.run([Ask(f"pre{i}", tokens(60 + i), params={"max_tokens": 60}) for i in range(8)])
    assert len(seen) >= 3
    check(runs, oracle)


def test_running_requests_that_are_reset_emit_every_position_once(caching, oracle):
    def reset(step):
        if step in {6, 20}:
            assert caching.engine.reset_prefix_cache(reset_running_requests=True)

    runs = caching.run([Ask(f"reset{i}", tokens(40), params={"max_tokens": 40}) for i in range(3)], each_step=reset)
    check(runs, oracle)


def test_a_prefix_from_the_cache_is_a_declared_gap_unless_the_request_reads_none(caching, oracle):
    prompt = tokens(99)
    runs = caching.run([Ask("first", prompt)])
    runs |= caching.run([Ask("again", prompt)])
    runs |= caching.run([Ask("whole", prompt, params={"skip_reading_prefix_cache": True})])
    runs |= caching.run([Ask("salted", prompt, extra={"prompt_extra": {"cache_salt": "other"}})])
    cached = {name: run.streams["residual"].opened.cached_prefix for name, run in runs.items()}
    assert cached == {"first": 0, "again": 96, "whole": 0, "salted": 0}
    assert runs["again"].streams["residual"].positions[0] == 96
    check(runs, oracle)


def test_children_are_told_apart_even_from_an_id_that_imitates_one(caching, oracle):
    prompt = tokens(20)
    asks = [
        Ask("family", prompt, params={"n": 3, "temperature": 1.0, "max_tokens": 12}),
        Ask("1_family", tokens(20), params={"max_tokens": 12}),
    ]
    runs = caching.run(asks)
    assert sorted(runs["family"].children) == [0, 1, 2]
    assert sorted(runs["1_family"].children) == [0]
    for index, streams in runs["family"].children.items():
        sequence = [*prompt, *runs["family"].token_ids[index]]
        assert problems(streams, sequence, len(prompt), oracle.activations(sequence)) == []
    check({"1_family": runs["1_family"]}, oracle)
    assert caching.log.faults == []


def test_an_abort_before_the_first_step_leaves_nothing_and_its_id_can_be_used_again(caching, oracle):
    caching.run([Ask("early", tokens(30), abort_after=0)])
    assert not any(key[0] == "early" for key in caching.log.streams)
    check(caching.run([Ask("early", tokens(25))]), oracle)


def test_an_id_that_is_used_again_right_after_an_abort_gets_its_own_rows(caching, oracle):
    prompts = [tokens(30), tokens(34)]
    again = Ask("twice", prompts[1], attempt=2)
    done = []

    def replace(step):
        if step == 5:
            caching.engine.abort_request(["twice"])
            done.append(dict(caching.log.streams))
            caching.add(again)

    runs = caching.run([Ask("twice", prompts[0], params={"max_tokens": 50})], each_step=replace)
    (first,) = done
    assert first["twice", 0, "residual"].positions == list(range(30 + 4))
    assert first["twice", 0, "residual"].closed.reason == "finished"
    second = caching.log.streams["twice", 0, "residual"]
    assert second.opened.attempt == 2
    sequence = [*prompts[1], *runs["twice"].token_ids[0]]
    captured = {p.name: caching.log.streams["twice", 0, p.name] for p in POINTS}
    assert problems(captured, sequence, len(prompts[1]), oracle.activations(sequence)) == []


def test_two_running_requests_of_one_identity_are_captured_once(caching, oracle):
    before = len(caching.log.faults)
    asks = [Ask("one", tokens(20)), Ask("other", tokens(20), order={})]
    same = {"extra_args": {"undercurrent": _order_of("one")}}
    runs = caching.run([asks[0], Ask("other", asks[1].prompt, params=same)])
    assert [f.kind for f in caching.log.faults[before:]] == ["bad_order"]
    check({"one": runs["one"]}, oracle)


def _order_of(name):
    from undercurrent.capture.points import Order

    return Order(request_id=name, attempt=1, points=("residual",), partition=0).to_json()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_tokens": 1}, "length"),
        ({"max_tokens": 9}, "length"),
        ({"max_tokens": 60, "stop_token_ids": "third"}, "stop"),
        ({"max_tokens": 60, "eos": True}, "stop"),
    ],
)
def test_no_row_is_past_the_final_token(caching, oracle, params, reason):
    """However a request ends: its rows are those of its tokens but the last, which is sampled and never computed."""
    prompt, params = tokens(21), dict(params)
    free = caching.run([Ask("free", prompt, (), params={"max_tokens": 60})])["free"].token_ids[0]
    if params.pop("eos", False):
        # What it samples third is declared to be its end-of-text token.
        params["stop_token_ids"], params["ignore_eos"] = [free[2]], False
    elif "stop_token_ids" in params:
        params["stop_token_ids"] = [free[2]]
    runs = caching.run([Ask("ends", prompt, params=params), Ask("beside", tokens(30), params={"max_tokens": 70})])
    assert runs["ends"].finish_reasons == {0: reason}
    check(runs, oracle)
    assert runs["ends"].streams["residual"].positions[-1] == len(runs["ends"].sequence) - 2


def test_new_weights_end_a_stream_and_the_next_one_says_so(models):
    with Capturing(models["llama"]) as engine:

        def reload(step):
            if step == 8:
                engine.engine.collective_rpc("reload_weights")

        old = engine.run([Ask("old", tokens(20), params={"max_tokens": 30})], each_step=reload)["old"]
        closed = {name: (s.closed.reason, s.closed.last_pos) for name, s in old.streams.items()}
        assert closed["residual"] == ("superseded", 26)
        assert {reason for reason, _ in closed.values()} == {"superseded"}
        assert old.streams["residual"].closed.detail == "the model's weights changed: reload_weights"
        assert old.streams["residual"].opened.weights_version == ""
        assert len(old.token_ids[0]) == 30, "generation went on"
        new = engine.run([Ask("new", tokens(20))])["new"]
        assert new.streams["residual"].opened.weights_version == "1"
        assert new.streams["residual"].closed.reason == "finished"


def test_two_adapters_and_the_base_in_one_batch(models, oracle, tmp_path):
    from vllm.lora.request import LoRARequest

    model = models["llama"]
    adapters = {name: build_adapter(model, tmp_path / name, seed) for seed, name in enumerate(("red", "blue"), 1)}
    oracles = {
        name: HFOracle(build_merged(model, path, tmp_path / f"{name}-merged")) for name, path in adapters.items()
    }
    oracles["base"] = oracle
    # On a CPU vLLM computes requests without an adapter with its last slot: a third one, which stays empty.
    with Capturing(model, enable_lora=True, max_loras=3, max_lora_rank=8) as engine:
        requests = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)}
        prompt = tokens(25)
        asks = [
            Ask(name, prompt, params={"max_tokens": 15}, extra={"lora_request": requests.get(name)}) for name in oracles
        ]
        runs = engine.run(asks)
    for name, run in runs.items():
        assert {s.opened.lora for s in run.streams.values()} == {"" if name == "base" else name}
        assert problems(run.streams, run.sequence, len(prompt), oracles[name].activations(run.sequence)) == [], name
    others = problems(runs["red"].streams, runs["red"].sequence, len(prompt), oracle.activations(runs["red"].sequence))
    assert others, "the adapter changes nothing: the test says nothing"
