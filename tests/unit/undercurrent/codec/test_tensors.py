"""The arrays inside a block are views on its bytes, and shapes that do not fit are refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.codec.test_blocks import block
from undercurrent.codec import Codec, as_array, positions, row_shape, token_ids, views
from undercurrent.codec.tensors import bytes_of
from undercurrent.errors import DecodeError

CODEC = Codec()
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 8), st.sampled_from(sorted(DTYPES)), st.randoms())
@settings(max_examples=150, deadline=None)
def test_views_hold_every_token_and_layer_bit_for_bit(n, layers, width, dtype, rnd):
    raw = bytes(rnd.getrandbits(8) for _ in range(n * layers * width * DTYPES[dtype].itemsize))
    where = np.asarray(rnd.sample(range(1000), n), "<i4")
    sent = block(
        width=width, dtype=dtype, layers=tuple(range(layers)), positions=where.tobytes(), token_ids=b"", data=raw
    )
    got = CODEC.decode(CODEC.encode(sent))
    assert as_array(got).shape == (n, layers, width)
    assert as_array(got).tobytes() == raw
    records = list(views(got, prompt_len=500))
    assert [(r.token_pos, r.layer) for r in records] == [(int(p), layer) for p in where for layer in range(layers)]
    assert b"".join(r.tensor.tobytes() for r in records) == raw
    assert all(r.is_generated == (r.token_pos >= 500) for r in records)


def test_nothing_is_copied():
    got = CODEC.decode(CODEC.encode(block()))
    base = np.frombuffer(got.data, np.uint8)
    assert np.shares_memory(as_array(got), base)
    assert all(np.shares_memory(r.tensor, base) for r in views(got, 1))
    assert not as_array(got).flags.writeable


def test_rows_of_a_shape_of_their_own_are_views_of_that_shape():
    values = np.arange(72, dtype="<f4").reshape(3, 2, 2, 2, 3)
    got = CODEC.decode(CODEC.encode(block(width=12, row_shape=(2, 2, 3), tensor_type="kv", data=values.tobytes())))
    assert row_shape(got) == (2, 2, 3)
    assert as_array(got).shape == (3, 2, 12)
    found = [record.tensor for record in views(got, 1)]
    assert np.array_equal(np.stack(found).reshape(values.shape), values)
    assert all(np.shares_memory(tensor, np.frombuffer(got.data, np.uint8)) for tensor in found)
    assert row_shape(block()) == (4,)


@pytest.mark.parametrize("shape", [(2, 3), (4, 1, 2), (-2, -2), (0,)])
def test_a_shape_of_another_number_of_elements_is_refused(shape):
    with pytest.raises(DecodeError, match="rows of shape"):
        as_array(block(row_shape=shape))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": b"\x00" * 95}, r"95 bytes.*\[3, 2, 4\] of float32 needs 96"),
        ({"positions": b"\x00" * 8}, r"needs 64"),
        ({"dtype": "int3"}, "int3.*float32"),
        ({"width": 0}, "needs 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(DecodeError, match=said):
        as_array(block(**changes))


@pytest.mark.parametrize("read", [positions, token_ids])
def test_a_broken_int32_is_refused(read):
    with pytest.raises(DecodeError, match="5 bytes"):
        read(block(positions=b"12345", token_ids=b"12345"))


def test_int8_rows_are_multiplied_by_their_scales():
    values = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    values[1, 0] = 0
    values[2, 1, 3] = np.nan
    sent = block(
        width=4, dtype="int8", layers=(0, 1), positions=np.arange(3, dtype="<i4").tobytes(), token_ids=b"",
        data=bytes_of(values, "int8"),
    )  # fmt: skip
    got = as_array(CODEC.decode(CODEC.encode(sent)))
    assert (got.dtype, got.shape) == (np.float32, (3, 2, 4))
    assert np.isnan(got[2, 1]).all()
    assert not got[1, 0].any()
    assert np.abs(got[:2] - values[:2]).max() <= np.abs(values[:2]).max() / 127 * 0.51
    assert [r.tensor.tolist() for r in views(sent, 0)][:5] == got.reshape(6, 4)[:5].tolist()


def test_an_int8_block_of_the_wrong_size_is_refused():
    with pytest.raises(DecodeError, match=r"95 bytes.*of int8 needs 96"):
        as_array(block(dtype="int8", width=4, layers=(0, 1), positions=b"\x00" * 24, data=b"\x00" * 95))
