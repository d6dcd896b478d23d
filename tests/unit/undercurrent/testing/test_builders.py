"""Records and streams from arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.codec import Codec, views
from undercurrent.errors import DecodeError, SpecValidationError
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamStarted
from undercurrent.spec import TensorType, check_pipeline, parse_dict, probe_spec_to_dict
from undercurrent.spec.point import ProbeSpec
from undercurrent.testing import make_context, make_point, make_record, make_records, stream_messages


def test_records_come_token_by_token_and_layer_by_layer():
    tensors = np.arange(24, dtype=np.float64).reshape(3, 2, 4)
    records = make_records(tensors, layers=[8, 3], prompt_len=2, request_id="r", point="p", tensor_type="mlp_out")
    assert [(item.token_pos, item.layer) for item in records] == [(0, 8), (0, 3), (1, 8), (1, 3), (2, 8), (2, 3)]
    assert [item.is_generated for item in records] == [False] * 4 + [True] * 2
    assert {(item.request_id, item.extraction_point_name, item.tensor_type) for item in records} == {
        ("r", "p", TensorType.MLP_OUT)
    }
    assert np.array_equal(np.stack([item.tensor for item in records]), tensors.reshape(6, 4))
    assert records[0].tensor.dtype == np.float32


def test_one_layer_needs_no_axis_and_positions_may_skip():
    records = make_records(np.ones((2, 4)), positions=[5, 9], prompt_len=6)
    assert [(item.token_pos, item.layer, item.is_generated) for item in records] == [(5, 0, False), (9, 0, True)]


def test_rows_are_read_only_as_in_a_host_and_copies_of_their_own_for_a_tensor_library():
    [plain] = make_records(np.ones((1, 4)))
    with pytest.raises(ValueError, match="read-only"):
        plain.tensor[0] = 2.0
    own = [record.tensor for record in make_records(np.ones((2, 4)), as_tensor=lambda row: row)]
    assert [row.flags.writeable and row.flags.owndata for row in own] == [True, True]


def test_tensors_of_torch_stand_for_an_embedded_engine_and_stream_alike():
    torch = pytest.importorskip("torch")
    records = make_records(np.ones((2, 4)), as_tensor=torch.from_numpy)
    assert [type(record.tensor) for record in records] == [torch.Tensor] * 2
    assert stream_messages(records) == stream_messages(make_records(np.ones((2, 4))))


def test_rows_of_a_shape_of_their_own_keep_it_to_the_stream_and_back():
    rows = np.arange(48, dtype=np.float32).reshape(2, 1, 2, 3, 4)
    records = make_records(rows, layers=[3], tensor_type="kv", prompt_len=1)
    assert [record.tensor.shape for record in records] == [(2, 3, 4)] * 2
    started, *blocks, _ = stream_messages(records)
    assert (started.width, started.row_shape) == (24, (2, 3, 4))
    again = [record.tensor for block in blocks for record in views(block, started.prompt_len)]
    assert np.array_equal(np.stack(again), rows[:, 0])
    facts = make_context(records).stream
    assert facts is not None
    assert (facts.width, facts.row_shape) == (24, (2, 3, 4))
    assert make_context(make_records(np.ones((2, 4)))).stream.row_shape == ()


def test_the_arrays_given_stay_as_they_were():
    rows = np.ones((2, 4), np.float32)
    records = make_records(rows)
    rows[:] = 7.0
    assert rows.flags.writeable
    assert float(records[0].tensor[0]) == 1.0


def test_bfloat16_is_bfloat16():
    [record] = make_records(np.full((1, 4), 1.0 + 2**-10), dtype="bfloat16")
    assert record.tensor.dtype == np.dtype(ml_dtypes.bfloat16)
    assert float(record.tensor[0]) == 1.0


@pytest.mark.parametrize(
    ("tensors", "more", "error"),
    [
        (np.ones(4), {}, ValueError),
        (np.ones((2, 0)), {}, ValueError),
        (np.ones((2, 2, 4)), {"layers": [1]}, ValueError),
        (np.ones((2, 2, 4)), {"layers": [1, 1]}, ValueError),
        (np.ones((2, 4)), {"positions": [3]}, ValueError),
        (np.ones((2, 4)), {"positions": [3, 3]}, ValueError),
        (np.ones((2, 4)), {"dtype": "float8"}, DecodeError),
    ],
)
def test_what_does_not_fit_together_is_refused(tensors, more, error):
    with pytest.raises(error, match=r"accepted|known"):
        make_records(tensors, **more)


def test_one_record_keeps_the_tensor_that_it_is_given():
    tensor = np.ones(4, np.float16)
    assert make_record(tensor).tensor is tensor
    assert make_record([1.0, 2.0]).tensor.dtype == np.float32


def test_a_point_is_one_that_a_pipeline_takes():
    point = make_point(layers=[3, 12])
    check_pipeline(ProbeSpec(1, [point]))
    assert (point.name, point.layers) == ("residual", (3, 12))
    inline = make_point("p", layers=2, position="prompt[-1]", execution_mode="inline", probe_type="x")
    assert parse_dict(probe_spec_to_dict(ProbeSpec(1, [inline]))).extraction_points[0] == inline
    with pytest.raises(SpecValidationError, match="stride"):
        make_point(stride=0)


def test_a_context_has_the_facts_that_follow_from_the_records():
    records = make_records(np.ones((5, 2, 4)), layers=[3, 12], prompt_len=2, dtype="float16")
    ctx = make_context(records, prompt_metadata={"lang": "en"}, model_fingerprint="ab")
    facts = ctx.stream
    assert (facts.prompt_len, facts.layers, facts.width, facts.dtype) == (2, (3, 12), 4, "float16")
    assert (facts.tensor_type, facts.model_fingerprint) == ("residual_stream", "ab")
    assert ctx.prompt_metadata == {"lang": "en"}
    assert make_context(make_records(np.ones((3, 4)), prompt_len=9)).stream.prompt_len == 3
    assert make_context(make_records(np.ones((3, 4)), prompt_len=9), prompt_len=9).stream.prompt_len == 9


@pytest.mark.parametrize(
    "change",
    [
        lambda records: [],
        lambda records: records[:-1],
        lambda records: records[::-1],
        lambda records: [*records[:2], records[3], records[2]],
        lambda records: records + make_records(np.ones((1, 2, 4)), layers=[3, 12], positions=[9], request_id="other"),
        lambda records: records + make_records(np.ones((1, 2, 4)), layers=[3, 12], positions=[9], point="other"),
        lambda records: records + make_records(np.ones((1, 2, 5)), layers=[3, 12], positions=[9]),
        lambda records: records + make_records(np.ones((1, 2, 4)), layers=[3, 12], positions=[9], prompt_len=10),
    ],
)
def test_a_stream_is_made_of_one_request_whose_tokens_all_have_the_same_layers(change):
    records = make_records(np.ones((3, 2, 4)), layers=[3, 12], prompt_len=1)
    with pytest.raises(ValueError, match=r"accepted|no records|does not fit|same shape|cannot reshape"):
        stream_messages(change(records))


def test_a_stream_is_a_start_the_prompt_in_one_block_a_block_for_each_token_and_an_end():
    started, *blocks, ended = stream_messages(make_records(np.ones((5, 4)), layers=[12], prompt_len=3))
    assert (started.prompt_len, started.layers, started.width, started.seq) == (3, (12,), 4, 0)
    assert [np.frombuffer(block.positions, "<i4").tolist() for block in blocks] == [[0, 1, 2], [3], [4]]
    assert [block.seq for block in blocks] == [1, 2, 3]
    assert (ended.seq, ended.emitted, ended.reason) == (4, (5,), EndReason.FINISHED)


def test_a_stream_may_be_cut_elsewhere_and_stay_open():
    records = make_records(np.ones((5, 4)))
    kinds = [type(item) for item in stream_messages(records, blocks=2, reason=None)]
    assert kinds == [StreamStarted, ActivationBlock, ActivationBlock, ActivationBlock]
    assert type(stream_messages(records, reason=EndReason.CAPTURE_ERROR)[-1]) is StreamEnded
    for wrong in (0, [2, 2], [5, 0], [3, -1, 3]):
        with pytest.raises(ValueError, match="accepted"):
            stream_messages(records, blocks=wrong)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 5)),
    prompt_len=st.integers(0, 10),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    size=st.none() | st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_what_an_engine_would_publish_reads_back_as_the_same_records(shape, prompt_len, dtype, size, seed):
    rows = np.random.default_rng(seed).normal(size=shape)
    records = make_records(rows, layers=range(5, 5 + shape[1]), prompt_len=prompt_len, dtype=dtype)
    codec = Codec()
    messages = [codec.decode(codec.encode(item)) for item in stream_messages(records, blocks=size)]
    started = messages[0]
    back = [view for item in messages if isinstance(item, ActivationBlock) for view in views(item, started.prompt_len)]
    assert [item.metadata() for item in back] == [item.metadata() for item in records]
    assert [item.tensor.tobytes() for item in back] == [item.tensor.tobytes() for item in records]
