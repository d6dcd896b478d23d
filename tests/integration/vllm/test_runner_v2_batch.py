"""What is read of the V2 runner, on stand-ins: what its real one never does on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from undercurrent.errors import CaptureError, VLLMIntrospectionError

pytestmark = pytest.mark.vllm


def reader_of(runner):
    from undercurrent.adapters.vllm.compat import RunnerV2

    return RunnerV2(runner)


def a_runner(**changes):
    values = {
        "adaptive_verification": None,
        "execute_model_state": None,
        "max_num_reqs": 4,
        "max_num_tokens": 8,
        "num_speculative_steps": 0,
        "vocab_size": 50,
        "input_buffers": SimpleNamespace(
            input_ids=torch.arange(8, dtype=torch.int32), positions=torch.tensor([5, 0, 1, 2, 0, 0, 0, 0])
        ),
        "model_state": SimpleNamespace(prepare_inputs=None),
    }
    return SimpleNamespace(**(values | changes))


def ran(runner, computed=(5, 0), tokens=4, **changes):
    buffers = runner.input_buffers
    values = {
        "req_ids": ["a", "b"],
        "num_reqs": 2,
        "num_tokens": tokens,
        "query_start_loc_np": np.array([0, 1, 4, 4, 4], np.int32),
        "num_computed_tokens_np": np.array(computed, np.int32),
        "input_ids": buffers.input_ids[:6],
        "positions": buffers.positions[:6],
    }
    runner.execute_model_state = SimpleNamespace(input_batch=SimpleNamespace(**(values | changes)))


def test_a_batch_is_what_the_step_had_without_its_padding():
    runner = a_runner()
    reader = reader_of(runner)
    ran(runner)
    batch = reader.batch(3, 4)
    assert (batch.step, batch.rows, batch.engine_ids) == (3, 4, ["a", "b"])
    assert (batch.computed[:2].tolist(), batch.starts[:3].tolist()) == ([5, 0], [0, 1, 4])
    assert batch.token_ids[:4].tolist() == [0, 1, 2, 3]
    assert reader.batch(4, 4) is batch


def test_positions_are_the_devices_where_the_host_knows_a_bound_alone():
    runner = a_runner(num_speculative_steps=2)
    ran(runner, computed=(7, 0))
    assert reader_of(runner).batch(1, 4).computed[:2].tolist() == [5, 0]


def test_host_and_device_that_contradict_each_other_are_refused():
    runner = a_runner()
    ran(runner, computed=(7, 0))
    with pytest.raises(CaptureError, match="disagree"):
        reader_of(runner).batch(1, 4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"tokens": 3}, "3 tokens stand"), ({"num_reqs": 3}, "batch of 3"), ({"req_ids": ["a"]}, "1 request ids")],
)
def test_a_batch_that_does_not_fit_its_step_is_refused(changes, match):
    runner = a_runner()
    ran(runner, **changes)
    with pytest.raises(CaptureError, match=match):
        reader_of(runner).batch(1, 4)


def test_other_buffers_than_the_runners_are_refused():
    runner = a_runner()
    ran(runner, positions=torch.zeros(6, dtype=torch.int64))
    with pytest.raises(CaptureError, match="other token ids and positions"):
        reader_of(runner).batch(1, 4)


def test_a_step_whose_batch_is_gone_is_refused():
    with pytest.raises(CaptureError, match="does not say what it ran"):
        reader_of(a_runner()).batch(1, 4)


def test_adaptive_verification_is_refused():
    with pytest.raises(CaptureError, match="adaptive verification"):
        reader_of(a_runner(adaptive_verification=object()))


def test_another_shape_of_runner_is_refused_by_name():
    runner = a_runner()
    del runner.execute_model_state, runner.input_buffers
    with pytest.raises(
        VLLMIntrospectionError, match=r"execute_model_state, input_buffers.input_ids, input_buffers.pos"
    ):
        reader_of(runner)
    runner = a_runner(input_buffers=SimpleNamespace(input_ids=torch.zeros(1), positions=torch.zeros(1)))
    with pytest.raises(VLLMIntrospectionError, match="not int32"):
        reader_of(runner)


def output(*requests, finished=()):
    new = [SimpleNamespace(req_id=name, prompt_len=length) for name, length in requests]
    return SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=new)


def names(found):
    return [request.req_id for request in found]


def test_a_preempted_request_is_new_once_and_its_id_may_come_again_when_it_has_ended():
    reader = reader_of(a_runner())
    assert names(reader.new_requests(output(("a", 5), ("b", 7)))) == ["a", "b"]
    assert names(reader.new_requests(output(("a", 5), ("c", 5)))) == ["c"]
    assert names(reader.new_requests(output(("a", 5), finished=["a"]))) == ["a"]
    assert names(reader.new_requests(output(finished=["a", "b", "c"]))) == []
    assert names(reader.new_requests(output(("b", 7)))) == ["b"]


def test_a_request_that_comes_again_with_another_prompt_is_new():
    reader = reader_of(a_runner())
    reader.new_requests(output(("a", 5)))
    assert names(reader.new_requests(output(("a", 9)))) == ["a"]


def test_a_dummy_run_is_no_step():
    calls = []
    runner = a_runner()
    runner.execute_model = lambda output, tensors=None, dummy_run=False: calls.append(("ran", dummy_run))
    reader = reader_of(runner)
    reader.wrap_steps(lambda _: calls.append("before"), lambda _: calls.append("after"), lambda ns: None)
    runner.execute_model("step")
    runner.execute_model("step", None, True)
    runner.execute_model("step", dummy_run=True)
    assert calls == ["before", ("ran", False), "after", ("ran", True), ("ran", True)]


class OnADevice:
    """A tensor that pretends to lie on a device."""

    def __init__(self, values):
        self._values = values
        self.device = torch.device("cuda")
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, part):
        return self._values[part]

    def data_ptr(self):
        return self._values.data_ptr()


@pytest.mark.parametrize(("drafts", "computed"), [(0, (5, 0)), (2, (9, 3))])
def test_on_a_device_the_step_is_copied_and_positions_too_where_the_host_knows_a_bound_alone(drafts, computed):
    buffers = a_runner().input_buffers
    on_device = SimpleNamespace(input_ids=OnADevice(buffers.input_ids), positions=OnADevice(buffers.positions))
    runner = a_runner(num_speculative_steps=drafts, input_buffers=on_device)
    reader = reader_of(runner)
    buffers.input_ids[0] = 44
    ran(runner, computed=computed)
    batch = reader.batch(1, 4)
    assert batch.token_ids[:4].tolist() == [44, 1, 2, 3]
    assert batch.computed[:2].tolist() == [5, 0]
