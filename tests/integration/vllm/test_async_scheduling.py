"""Asynchronous scheduling: the scheduler is one step ahead of what it knows, and the rows are right all the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from every_point import Reference, every_points, expert_model, load, stops_met, wrong_rows
from inprocess import Ask
from parity import problems
from scenarios import Ahead, crowded, mixed, stopped, watch

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def oracle(models):
    return HFOracle(models["llama"])


@pytest.fixture(scope="module")
def ahead(models):
    with Ahead(models["llama"], num_gpu_blocks_override=13) as engine:
        assert engine.engine.vllm_config.scheduler_config.async_scheduling
        yield engine


def check(runs, oracle):
    for name, run in runs.items():
        if run.streams:
            assert problems(run.streams, run.sequence, len(run.prompt), oracle.activations(run.sequence)) == [], name
        for stream in run.streams.values():
            assert (stream.closed.reason, stream.losses) == ("finished", [])


# First: vLLM makes the groups of processes that experts need for the first engine of a process alone.
def test_every_tensor_selector_and_encoding_a_step_ahead_is_that_of_a_plain_engine(models):
    model = expert_model(models["llama"])
    points = every_points(model)
    with Ahead(model, points) as engine:
        runs = engine.run(load())
        assert engine.log.faults == []
    with Reference.of(model) as reference:
        assert wrong_rows(runs, points, reference) == []
    assert stops_met(runs) >= 3


def test_rows_match_transformers(ahead, oracle):
    runs = ahead.run(mixed())
    assert sum(bool(run.streams) for run in runs.values()) == 5
    check(runs, oracle)


def test_preempted_requests_are_computed_again_and_emitted_once(ahead, oracle):
    seen = watch(ahead)
    runs = ahead.run(crowded(80))
    assert seen["preempted"] > 0
    check(runs, oracle)


def test_a_request_that_stopped_runs_one_more_step_whose_row_is_its_last_token(ahead):
    runs = ahead.run(stopped())
    assert [runs[name].finish_reasons[0] for name in ("stop-token", "stop-token-too")] == ["stop", "stop"]
    for name, run in runs.items():
        stream = run.streams["residual"]
        assert stream.closed.reason == "finished"
        assert stream.positions == list(range(len(stream.positions)))
        same = min(len(run.sequence), len(stream.positions))
        assert stream.token_ids[:same] == run.sequence[:same]
        if name.startswith("stop"):
            # The step was under way when the last token came: this is that token's row, and none lies past it.
            assert len(stream.positions) == len(run.sequence)


def test_a_request_whose_input_goes_on_loses_its_capture_and_runs(ahead):
    """A session with more input comes as a new request of the same id, which no other request does."""
    from undercurrent.adapters.vllm import compat

    runtime = compat.runtime_of(ahead.worker)

    def more(step):
        if step == 4:
            live = [name for name in runtime._tracker._table.by_id if name.startswith("session")]
            runtime._open(SimpleNamespace(req_id=live[0]))

    run = ahead.run([Ask("session", [1, 2, 3], params={"max_tokens": 20})], each_step=more)["session"]
    assert len(run.sequence) == 23
    for stream in run.streams.values():
        assert (stream.closed.reason, "more input came" in stream.closed.detail) == ("capture_error", True)
        assert stream.token_ids == [run.sequence[p] for p in stream.positions]
