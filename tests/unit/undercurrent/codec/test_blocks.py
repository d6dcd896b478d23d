"""The hand-made encoder gives fastavro's bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.codec import BlockEncoder, Codec
from undercurrent.codec.blocks import zigzag
from undercurrent.protocol.messages import ActivationBlock

CODEC = Codec()
LONGS = st.integers(0, 2**63 - 1)


def block(**changes):
    fields = {
        "request_id": "r",
        "attempt": 3,
        "point": "p",
        "engine": "e",
        "incarnation": 9,
        "tensor_type": "residual_stream",
        "dtype": "float32",
        "width": 4,
        "layers": (0, 2),
        "seq": 1,
        "step": 7,
        "captured_at_us": 1_700_000_000_000_000,
        "positions": np.arange(3, dtype="<i4").tobytes(),
        "token_ids": np.arange(3, dtype="<i4").tobytes(),
        "data": np.arange(24, dtype="<f4").tobytes(),
    }
    return ActivationBlock(**{**fields, **changes})


@given(
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 200), max_size=100).map(tuple),
    st.lists(st.integers(1, 300), max_size=4).map(tuple),
    *[LONGS] * 3,
    st.integers(0, 2**31 - 1),
    *[st.binary(max_size=300)] * 3,
)
@settings(max_examples=300, deadline=None)
def test_bytes_are_those_of_fastavro(rid, index, layers, shape, seq, step, at_us, revision, positions, token_ids, data):
    wanted = block(
        request_id=rid, index=index, layers=layers, row_shape=shape, seq=seq, step=step, captured_at_us=at_us,
        revision=revision, positions=positions, token_ids=token_ids, data=data,
    )  # fmt: skip
    encoder = BlockEncoder(CODEC, block(request_id=rid, index=index, layers=layers, row_shape=shape))
    got = encoder.encode(seq, step, at_us, memoryview(positions), token_ids, memoryview(data), revision=revision)
    assert got == CODEC.encode(wanted)


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 127, 128, 2**31, 2**63 - 1, -(2**63)])
def test_zigzag_is_avro_s_long(value):
    import io

    import fastavro

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema("long"), value)
    assert zigzag(value) == out.getvalue()
