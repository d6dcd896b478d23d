"""The layout of a step as read from a model runner of the right shape, and the refusal of any other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from undercurrent.adapters.vllm.introspection import (
    StepBatchMetadata,
    VLLMIntrospectionError,
    check_introspection_compatible,
    extract_step_batch_metadata,
)


def a_runner(**batch):
    values = {
        "req_ids": ["a", "b", "c"],
        "num_reqs": 3,
        "num_computed_tokens_cpu": np.array([4, 0, 7], np.int32),
        "vocab_size": 10,
    }
    buffer = SimpleNamespace(np=np.zeros(4, np.int32))
    return SimpleNamespace(
        input_batch=SimpleNamespace(**{**values, **batch}), query_start_loc=buffer, input_ids=buffer, max_num_tokens=8
    )


def scheduled(**counts):
    return SimpleNamespace(num_scheduled_tokens=counts)


def test_only_scheduled_requests_count_in_the_order_of_their_slots():
    layout = extract_step_batch_metadata(a_runner(), scheduled(c=1, a=2))
    assert layout == StepBatchMetadata(("a", "c"), (2, 1), (4, 7))


def test_a_scheduled_request_without_a_slot_is_an_error():
    with pytest.raises(VLLMIntrospectionError, match="1 scheduled requests stand in no slot"):
        extract_step_batch_metadata(a_runner(), scheduled(d=1))


@pytest.mark.parametrize(
    ("runner", "output"),
    [
        (SimpleNamespace(), scheduled(a=1)),
        (a_runner(num_computed_tokens_cpu=np.zeros(1, np.int32)), scheduled(c=1)),
        (a_runner(), SimpleNamespace()),
        (a_runner(req_ids=None), scheduled(a=1)),
    ],
)
def test_another_shape_is_an_error(runner, output):
    with pytest.raises(VLLMIntrospectionError, match="another shape than expected"):
        extract_step_batch_metadata(runner, output)


def test_a_runner_of_the_right_shape_passes():
    check_introspection_compatible(a_runner())


def test_what_a_runner_lacks_is_named():
    runner = a_runner()
    del runner.input_batch.req_ids
    del runner.max_num_tokens
    with pytest.raises(VLLMIntrospectionError, match=r"has no input_batch.req_ids, max_num_tokens"):
        check_introspection_compatible(runner)


def test_a_layout_that_contradicts_itself_is_an_error():
    with pytest.raises(VLLMIntrospectionError, match="2 requests with 1 row counts"):
        StepBatchMetadata(("a", "b"), (1,), (0, 0))
    with pytest.raises(VLLMIntrospectionError, match="negative"):
        StepBatchMetadata(("a",), (-1,), (0,))
