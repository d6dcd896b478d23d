"""int8 rows: how far off they may be, and what becomes of rows that have no scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.capture.int8 import SCALE_BYTES, dequantise, int8_row_bytes, quantise

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def there_and_back(rows):
    rows = np.asarray(rows, np.float32)
    out = np.empty((len(rows), int8_row_bytes(rows.shape[1])), np.uint8)
    kept = rows.copy()
    quantise(rows, out, np.empty_like(rows))
    assert np.array_equal(rows, kept, equal_nan=True)
    return dequantise(out.tobytes(), rows.shape[1])


@given(st.integers(1, 9).flatmap(lambda w: st.lists(st.lists(FLOATS, min_size=w, max_size=w), min_size=1, max_size=6)))
@settings(deadline=None, max_examples=300)
def test_an_element_is_off_by_half_a_step_at_most_whatever_stands_beside_its_row(rows):
    rows = np.array(rows, np.float32)
    got = there_and_back(rows)
    for row, back in zip(rows, got, strict=True):
        assert np.array_equal(back, there_and_back([row])[0], equal_nan=True)
        if not np.isfinite(row).all():
            assert np.isnan(back).all()
            continue
        step = np.float64(np.abs(row).max()) / 127
        assert np.isfinite(back).all()
        assert np.abs(back.astype(np.float64) - row).max() <= max(step * 0.5001, 1.5e-36)


def test_the_largest_of_a_row_comes_back_and_signs_are_kept():
    got = there_and_back([[1.0, -1.0, 0.0, 0.5], [0, 0, 0, -1000.0], [3e38, -3.4e38, 1.0, 0]])
    assert np.allclose(got[0], [1, -1, 0, 0.5], atol=0.004)
    assert got[1].tolist() == [0, 0, 0, pytest.approx(-1000, rel=1e-6)]
    assert np.isfinite(got[2]).all()
    assert got[2][1] == pytest.approx(-3.4e38, rel=1e-3)


def test_a_row_of_zeros_stays_one_and_what_is_not_finite_is_seen():
    got = there_and_back([[0, 0], [np.nan, 1], [1, np.inf], [-np.inf, 0], [1e-40, 0], [2, 1]])
    assert got[0].tolist() == [0, 0]
    assert np.isnan(got[1:4]).all()
    assert got[4].tolist() == [0, 0]
    assert np.isfinite(got[5]).all()


def test_the_bytes_are_a_scale_and_the_elements():
    rows = np.array([[127.0, -64.0, 0.4]], np.float32)
    out = np.empty((1, 7), np.uint8)
    quantise(rows, out, rows)
    assert np.frombuffer(out[0, :SCALE_BYTES].tobytes(), "<f4")[0] == 1.0
    assert out[0, SCALE_BYTES:].view(np.int8).tolist() == [127, -64, 0]


def test_an_outlier_costs_the_rest_of_its_own_row_alone():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 4096)).astype(np.float32)
    rows[1, 7] = 1000.0
    error = np.linalg.norm(there_and_back(rows) - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert error[0] < 0.02
    assert error[1] < 0.08
    rest = np.delete(there_and_back(rows)[1], 7)
    assert not rest.any()  # all of it lies below half a step: what int8 cannot do
