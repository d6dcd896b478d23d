"""Rows as they are published: every pair of types, projections, and rows that do not fit."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest

from undercurrent.capture.encoding import FLOATS, encoder_of, published_bytes
from undercurrent.capture.int8 import dequantise
from undercurrent.capture.projection import Projection

LAYERS, WIDTH, ROWS = 3, 50, 700
TYPES = list(FLOATS)


def rows_of(dtype, *, count=ROWS):
    values = np.random.default_rng(1).normal(size=(count, LAYERS, WIDTH)).astype(np.float32) * 30
    return np.ascontiguousarray(values.astype(FLOATS[dtype]))


def encoded(values, source, target, **options):
    encoder = encoder_of("p", source, target, layers=LAYERS, width=WIDTH, **options)
    out = np.full((len(values), encoder.row_bytes), 0xEE, np.uint8)
    encoder.encode(values.view(np.uint8).reshape(len(values), -1), out)
    if target == "int8":
        return dequantise(out.tobytes(), encoder.width).reshape(len(values), LAYERS, -1)
    dtype = FLOATS["float32" if target == "model" else target]
    return np.frombuffer(out.tobytes(), dtype).reshape(len(values), LAYERS, -1)


@pytest.mark.parametrize("source", TYPES)
def test_what_the_model_computed_needs_no_encoder(source):
    assert encoder_of("p", source, "model", layers=LAYERS, width=WIDTH) is None
    assert encoder_of("p", source, source, layers=LAYERS, width=WIDTH) is None


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_a_float_is_rounded_once(source, target):
    if source == target:
        return
    values = rows_of(source)
    expected = values.astype(np.float32).astype(FLOATS[target])
    assert np.array_equal(encoded(values, source, target), expected)


@pytest.mark.parametrize("source", TYPES)
def test_int8_has_a_scale_for_each_token_and_layer(source):
    values = rows_of(source)
    values[5, 1] *= np.array(100).astype(values.dtype)
    wide = values.astype(np.float32)
    got = encoded(values, source, "int8")
    steps = np.abs(wide).max(axis=2, keepdims=True) / 127
    assert (np.abs(got - wide) <= steps * 0.5001).all()


def test_every_bfloat16_widens_exactly():
    every = np.arange(1 << 16, dtype=np.uint16)
    values = np.resize(every, (1 << 9, LAYERS, WIDTH)).view(ml_dtypes.bfloat16)
    got = encoded(values, "bfloat16", "float32")
    assert np.array_equal(got, values.astype(np.float32), equal_nan=True)


def test_float16_overflows_to_infinity_and_says_so_once(caplog):
    values = rows_of("bfloat16", count=8)
    values[3, 2, 4] = 70000.0
    values[4, 0, 0] = -1e30
    encoder = encoder_of("mid", "bfloat16", "float16", layers=LAYERS, width=WIDTH)
    out = np.empty((8, encoder.row_bytes), np.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encoder.encode(values.view(np.uint8).reshape(8, -1), out)
    got = out.view(np.float16).reshape(8, LAYERS, WIDTH)
    assert (got[3, 2, 4], got[4, 0, 0]) == (np.inf, -np.inf)
    assert np.isfinite(got).sum() == got.size - 2
    assert [("mid" in r.getMessage(), "float16" in r.getMessage()) for r in caplog.records] == [(True, True)]


@pytest.mark.parametrize("target", [*TYPES, "int8", "model"])
def test_a_projection_is_applied_in_float32_and_published_as_float32_by_default(target):
    matrix = np.random.default_rng(2).normal(size=(WIDTH, 4)).astype(np.float32)
    projection = Projection(matrix, "x")
    encoder = encoder_of("p", "bfloat16", target, layers=LAYERS, width=WIDTH, projection=projection)
    dtype = "float32" if target == "model" else target
    assert (encoder.dtype, encoder.width, encoder.row_bytes) == (dtype, 4, LAYERS * published_bytes(4, dtype))
    values = rows_of("bfloat16")
    exact = values.astype(np.float64) @ matrix
    got = encoded(values, "bfloat16", target, projection=projection).astype(np.float64)
    scale = np.abs(exact).max(axis=2, keepdims=True)
    tolerance = {"float32": 1e-5, "model": 1e-5, "float16": 2**-10, "bfloat16": 2**-7, "int8": 1 / 127}[target]
    assert (np.abs(got - exact) <= tolerance * scale).all()
    assert np.abs(got - exact).max() > 0 or target in {"float32", "model"}


def test_a_row_is_encoded_alike_alone_and_among_many():
    values = rows_of("float32")
    among = encoded(values, "float32", "int8")
    for row in (0, 1, ROWS - 1):
        assert np.array_equal(encoded(values[row : row + 1].copy(), "float32", "int8")[0], among[row])
