"""What a step's batch is read from: arrays of the model runner that stay where they are, until they do not."""

from types import SimpleNamespace

import numpy as np
import pytest

from undercurrent.errors import CaptureError

pytestmark = pytest.mark.vllm


def reader_of(runner):
    from undercurrent.adapters.vllm.compat import RunnerV1

    return RunnerV1(runner)


def a_runner():
    return SimpleNamespace(
        query_start_loc=SimpleNamespace(np=np.array([0, 1, 2, 0], np.int32)),
        input_ids=SimpleNamespace(np=np.array([7, 8, 0, 0], np.int32)),
        input_batch=SimpleNamespace(
            req_ids=["a", "b"], num_reqs=2, num_computed_tokens_cpu=np.array([4, 9, 0], np.int32), vocab_size=50
        ),
        max_num_tokens=4,
    )


def test_one_batch_serves_every_step_and_sees_what_the_runner_writes():
    runner = a_runner()
    reader = reader_of(runner)
    first = reader.batch(1, 2)
    runner.input_batch.num_computed_tokens_cpu[:2] = 5, 10
    runner.input_batch.req_ids = ["a", "c"]
    second = reader.batch(2, 2)
    assert second is first
    assert (second.step, second.engine_ids) == (2, ["a", "c"])
    assert np.frombuffer(second.computed_bytes, np.int32).tolist() == [5, 10, 0]


@pytest.mark.parametrize("moved", ["computed", "starts", "token_ids"])
def test_an_array_that_moved_is_seen(moved):
    runner = a_runner()
    reader = reader_of(runner)
    reader.batch(1, 2)
    new = np.array([1, 2, 3, 4], np.int32)
    match moved:
        case "computed":
            runner.input_batch.num_computed_tokens_cpu = new
        case "starts":
            runner.query_start_loc.np = new
        case "token_ids":
            runner.input_ids.np = new
    batch = reader.batch(2, 2)
    views = {"computed": batch.computed_bytes, "starts": batch.starts_bytes, "token_ids": batch.token_bytes}
    assert getattr(batch, moved) is new
    assert views[moved].tobytes() == new.tobytes()


def test_ids_that_do_not_fit_the_count_are_refused():
    runner = a_runner()
    runner.input_batch.num_reqs = 3
    with pytest.raises(CaptureError, match="2 request ids stand in a batch of 3"):
        reader_of(runner).batch(1, 2)


class OnADevice:
    """A tensor that pretends to lie on a device."""

    def __init__(self, values):
        import torch

        self._values = torch.tensor(values, dtype=torch.int32)
        self.device = torch.device("cuda")
        self.shape, self.dtype = self._values.shape, self._values.dtype

    def __getitem__(self, part):
        return self._values[part]


def test_on_a_device_token_ids_are_those_that_the_model_read():
    """With asynchronous scheduling the host's own never hear of the last step's tokens."""
    runner = a_runner()
    runner.device = SimpleNamespace(type="cuda")
    runner.input_ids.gpu = OnADevice([70, 80, 90, 0])
    reader = reader_of(runner)
    batch = reader.batch(1, 2)
    assert batch.token_ids[:2].tolist() == [70, 80]
    runner.input_ids.gpu._values[0] = 71
    assert reader.batch(2, 2) is batch
    assert np.frombuffer(batch.token_bytes, np.int32)[:2].tolist() == [71, 80]


def test_a_result_of_another_shape_is_the_step_s_error_and_not_the_engine_s():
    runner = a_runner()
    runner.speculative_config = SimpleNamespace(method="ngram")
    runner.max_model_len = 100
    runner.execute_model_state = object()
    runner.execute_model = lambda output: "ran"
    runner._bookkeeping_sync = lambda output: ("a", "b")
    reader, errors = reader_of(runner), []

    def after(_output):
        with pytest.raises(IndexError) as error:
            reader.batch(1, 2)
        errors.append(error)

    reader.wrap_steps(lambda _: None, after, lambda _: None)
    output = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1]})
    assert runner.execute_model(output) == "ran"
    assert runner._bookkeeping_sync(output) == ("a", "b")
    assert len(errors) == 1
