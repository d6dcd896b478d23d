"""Speculation with ngram: rows of rejected drafts never leave, rows of accepted ones do, once each."""

from __future__ import annotations

from collections import Counter

import pytest
from every_point import Reference, expert_model, wrong_rows
from parity import problems
from scenarios import found_by

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def oracle(models):
    return HFOracle(models["llama"])


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    return found_by("scenarios_speculation.py", models["llama"], tmp_path_factory.mktemp("ngram"))["ngram"]


def wrong(runs, oracle):
    out = {n: problems(r.streams, r.sequence, len(r.prompt), oracle.activations(r.sequence)) for n, r in runs.items()}
    return {name: lines for name, lines in out.items() if lines}


def test_drafts_were_accepted_and_rejected(found):
    assert found["drafts"]["accepted"] >= 10
    assert found["drafts"]["rejected"] >= 10


def test_rows_match_transformers(found, oracle):
    assert wrong(found["runs"], oracle) == {}
    assert found["faults"] == []
    for run in found["runs"].values():
        assert {s.closed.reason for s in run.streams.values()} == {"finished"}


def test_every_record_has_the_token_that_stands_at_its_position(found):
    for run in found["runs"].values():
        for stream in run.streams.values():
            assert stream.token_ids == [run.sequence[p] for p in stream.positions]


def test_accepted_drafts_come_in_the_step_that_accepted_them(found):
    # Which request's drafts are accepted depends on what shares its steps.
    steps = [Counter(run.streams["generated"].steps) for run in found["runs"].values()]
    assert max(max(of_run.values(), default=0) for of_run in steps) > 1


def test_nothing_after_a_stop_token_leaves_though_drafts_after_it_were_accepted(found):
    free, stopped = found["stops"]["free"], found["stops"]["stops"]
    assert stopped.finish_reasons[0] == "stop"
    assert stopped.sequence == free.sequence[: len(free.prompt) + found["stops"]["first"] + 1]
    assert stopped.streams["residual"].positions == list(range(len(stopped.sequence) - 1))
    assert stopped.streams["residual"].token_ids == stopped.sequence[:-1]


def test_the_last_row_is_the_last_accepted_one(found):
    runs = [*found["runs"].values(), found["stops"]["stops"], *found["stops"]["lengths"].values()]
    computed = [run for run in runs if run.streams["residual"].positions[-1] >= len(run.prompt)]
    assert len(computed) >= 7
    for run in computed:
        last, residual = run.streams["last"], run.streams["residual"]
        assert last.positions == residual.positions[-1:]
        assert last.token_ids == [run.sequence[-2]]
        assert (last.rows[0] == residual.rows[-1][2]).all()


def test_nothing_after_the_last_token_leaves_though_drafts_after_it_were_accepted(found):
    for length, run in found["stops"]["lengths"].items():
        assert len(run.sequence) == len(run.prompt) + length
        assert run.streams["residual"].positions == list(range(len(run.sequence) - 1))


def test_preempted_requests_are_computed_again_and_emitted_once(found, oracle):
    assert found["seen"]["preempted"] > 0
    assert wrong(found["crowd"], oracle) == {}


def test_structured_outputs_and_logprobs_go_on(found, oracle):
    guided = found["guided"]
    assert wrong(guided, oracle) == {}
    assert 6 * "ab" + 20 * "c" in guided["regex"].text[0]


def test_control_without_the_counts_rejected_rows_would_leave(found):
    """What the tests above would find if the accepted counts were ignored."""
    spoilt = [
        name
        for name, run in found["control"].items()
        for stream in run.streams.values()
        if stream.token_ids != [run.sequence[p] for p in stream.positions if p < len(run.sequence)]
    ]
    assert spoilt


def test_every_tensor_selector_and_encoding_of_accepted_drafts_is_that_of_a_plain_engine(models, tmp_path):
    ran = found_by("scenarios_drafts.py", models["llama"], tmp_path)["every"]
    assert ran["faults"] == []
    assert min(ran["drafts"].values()) >= 10
    with Reference.of(expert_model(models["llama"])) as reference:
        assert wrong_rows(ran["runs"], ran["points"], reference) == []
