"""The record that probe code sees."""

from __future__ import annotations

import dataclasses
import time

import pytest

from undercurrent.spec import ActivationRecord, TensorType


def test_metadata_is_everything_but_the_tensor():
    before = time.time()
    record = ActivationRecord("r", "mid", 3, 17, TensorType.ATTN_OUT, [1.0], True)
    metadata = record.metadata()
    assert before <= metadata.pop("timestamp") <= time.time()
    assert metadata == {
        "request_id": "r", "extraction_point_name": "mid", "layer": 3, "token_pos": 17,
        "tensor_type": TensorType.ATTN_OUT, "is_generated": True,
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(record)}
    assert set(record.metadata()) == names - {"tensor"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.layer = 4
