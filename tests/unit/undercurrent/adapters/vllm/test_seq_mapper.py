"""Rows of flattened steps against what a reader would say they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.adapters.vllm.introspection import StepBatchMetadata
from undercurrent.adapters.vllm.seq_mapper import SeqIdMapper, SeqMapperError, TokenRowMapping


def mapper_of(**prompts):
    mapper = SeqIdMapper()
    for request_id, prompt_len in prompts.items():
        mapper.register_request(request_id, prompt_len)
    return mapper


def test_a_prefill_in_one_piece():
    rows = mapper_of(a=3).resolve_step(StepBatchMetadata(["a"], [3], [0]))
    assert rows == [TokenRowMapping(n, "a", n, False, None) for n in range(3)]


def test_a_prefill_in_chunks_goes_on_where_it_stopped():
    mapper = mapper_of(a=5)
    mapper.resolve_step(StepBatchMetadata(["a"], [3], [0]))
    assert [row.token_index for row in mapper.resolve_step(StepBatchMetadata(["a"], [2], [3]))] == [3, 4]
    assert mapper.num_generated_so_far("a") == 0


def test_a_decode_step_is_a_generated_token():
    mapper = mapper_of(a=3)
    mapper.resolve_step(StepBatchMetadata(["a"], [3], [0]))
    assert mapper.resolve_step(StepBatchMetadata(["a"], [1], [3])) == [TokenRowMapping(0, "a", 3, True, 0)]
    assert mapper.num_generated_so_far("a") == 1


def test_two_requests_share_a_step_in_the_order_of_their_slots():
    mapper = mapper_of(a=2, b=4)
    mapper.resolve_step(StepBatchMetadata(["a"], [2], [0]))
    rows = mapper.resolve_step(StepBatchMetadata(["b", "a"], [4, 1], [0, 2]))
    assert [(row.row, row.request_id, row.token_index) for row in rows] == [
        (0, "b", 0),
        (1, "b", 1),
        (2, "b", 2),
        (3, "b", 3),
        (4, "a", 2),
    ]


def test_a_request_that_sat_out_a_step_comes_back_where_it_was():
    mapper = mapper_of(a=2, b=2)
    mapper.resolve_step(StepBatchMetadata(["a", "b"], [2, 2], [0, 0]))
    mapper.resolve_step(StepBatchMetadata(["b"], [1], [2]))
    rows = mapper.resolve_step(StepBatchMetadata(["b", "a"], [1, 1], [3, 2]))
    assert [(row.request_id, row.generated_index) for row in rows] == [("b", 1), ("a", 0)]


def test_a_preempted_request_counts_no_token_twice():
    mapper = mapper_of(a=2)
    mapper.resolve_step(StepBatchMetadata(["a"], [2], [0]))
    mapper.resolve_step(StepBatchMetadata(["a"], [1], [2]))
    rows = mapper.resolve_step(StepBatchMetadata(["a"], [3], [0]))
    assert [row.is_generated for row in rows] == [False, False, True]
    assert mapper.num_generated_so_far("a") == 1


def test_a_slot_is_used_again_by_another_request():
    mapper = mapper_of(a=2)
    mapper.resolve_step(StepBatchMetadata(["a"], [2], [0]))
    mapper.unregister_request("a")
    mapper.register_request("b", 7)
    assert [row.request_id for row in mapper.resolve_step(StepBatchMetadata(["b"], [1], [0]))] == ["b"]


def test_a_row_of_nobody_is_never_guessed():
    mapper = mapper_of(a=2)
    with pytest.raises(SeqMapperError, match="'b' is not registered"):
        mapper.resolve_step(StepBatchMetadata(["a", "b"], [2, 1], [0, 9]))
    assert mapper.num_generated_so_far("a") == 0


@pytest.mark.parametrize("call", ["prompt_len", "num_generated_so_far"])
def test_an_unknown_request_is_an_error(call):
    with pytest.raises(SeqMapperError, match="not registered"):
        getattr(SeqIdMapper(), call)("a")


def test_registration_is_once_and_with_a_length():
    mapper = mapper_of(a=2)
    assert mapper.is_registered("a")
    assert mapper.prompt_len("a") == 2
    with pytest.raises(SeqMapperError, match="registered already"):
        mapper.register_request("a", 2)
    for length in (0, -1, True, 2.0):
        with pytest.raises(SeqMapperError, match="accepted: 1 or more"):
            mapper.register_request("b", length)
    mapper.unregister_request("a")
    mapper.unregister_request("a")
    assert not mapper.is_registered("a")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5), st.randoms())
def test_every_position_of_every_request_is_resolved_once(requests, random):
    mapper = SeqIdMapper()
    left, found = {}, []
    for number, (prompt_len, total) in enumerate(requests):
        mapper.register_request(f"r{number}", prompt_len)
        left[f"r{number}"] = (0, prompt_len + total)
    while left:
        step = [request_id for request_id in left if random.random() < 0.7]
        counts = [random.randint(1, left[request_id][1] - left[request_id][0]) for request_id in step]
        rows = mapper.resolve_step(StepBatchMetadata(step, counts, [left[request_id][0] for request_id in step]))
        assert [row.row for row in rows] == list(range(sum(counts)))
        found += [(row.request_id, row.token_index) for row in rows]
        for request_id, count in zip(step, counts, strict=True):
            done, total = left.pop(request_id)
            if done + count < total:
                left[request_id] = (done + count, total)
    wanted = [(f"r{n}", p) for n, (prompt_len, total) in enumerate(requests) for p in range(prompt_len + total)]
    assert sorted(found) == sorted(wanted)
