"""Row scores: exact where float64 is, and the same bits in every batch."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.capture import steady
from undercurrent.errors import ShapeError
from undercurrent.probes.scoring import (
    machine_code,
    products_by_numpy,
    row_products,
    row_scores,
    row_sums,
    row_totals,
    scattered_scores,
)

needs_it = pytest.mark.skipif(machine_code() is None, reason="there is no C compiler here, so NumPy multiplies")
DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]


def rows_of(seed, count, width, dtype):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 3, (count, width))
    return (rng.standard_normal((count, width)) * scale).astype(np.float32).astype(dtype)


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 70),
    width=st.sampled_from([1, 2, 7, 8, 9, 127, 128, 129, 1000, 4096, 8193]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_split_and_any_company_gives_the_same_bits(seed, count, width, dtype, data):
    rows = rows_of(seed, count, width, dtype)
    weight = np.random.default_rng(seed + 1).standard_normal(width).astype(np.float32).astype(np.float64)
    # Sums, not scores: rounding to float32 would hide most differences.
    whole = row_sums(rows, weight)
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {0, count})
    pieces = [row_sums(rows[a:b], weight) for a, b in itertools.pairwise(cuts)]
    order = np.random.default_rng(seed + 2).permutation(count)
    singly = [row_sums(rows[i : i + 1].copy(), weight) for i in range(count)]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()
    assert np.concatenate(singly).tobytes() == whole.tobytes()
    assert row_sums(rows[order], weight).tobytes() == whole[order].tobytes()
    assert row_scores(rows, weight, 0.25).tobytes() == (whole + 0.25).astype(np.float32).tobytes()


def test_another_order_of_summation_would_be_seen():
    rows = rows_of(1, 64, 1000, np.float32)
    weight = np.random.default_rng(2).standard_normal(1000)
    assert row_sums(rows, weight).tobytes() != row_sums(rows[:, ::-1], weight[::-1]).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_directions_at_once_give_the_bits_of_each_alone(dtype):
    rows, weights = rows_of(3, 41, 515, dtype), np.random.default_rng(4).standard_normal((6, 515))
    together = row_products(rows, weights)
    assert together.tobytes() == b"".join(row_sums(rows, weight).tobytes() for weight in weights)
    singly = [row_products(rows[at : at + 1], weights) for at in range(41)]
    assert np.concatenate(singly, axis=1).tobytes() == together.tobytes()


def test_totals_of_rows_do_not_depend_on_layout_or_company():
    values = np.random.default_rng(5).standard_normal((300, 16)) * 10.0 ** np.random.default_rng(6).integers(0, 9, 16)
    whole = row_totals(values)
    assert row_totals(np.asfortranarray(values)).tobytes() == whole.tobytes()
    assert np.concatenate([row_totals(values[at : at + 1]) for at in range(300)]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_and_alignment_do_not_matter(dtype):
    rows = rows_of(5, 33, 515, dtype)
    weight = np.random.default_rng(6).standard_normal(515)
    whole = row_sums(rows, weight).tobytes()
    shifted = np.frombuffer(b"\0" + rows.tobytes(), dtype, offset=1, count=rows.size).reshape(rows.shape)
    wide = np.zeros((33, 2, 515), dtype)
    wide[:, 1] = rows
    for other in (np.asfortranarray(rows), shifted, wide[:, 1], np.repeat(rows, 2, axis=1)[:, ::2]):
        assert row_sums(other, weight).tobytes() == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_the_rounded_float64_product(dtype):
    rows = rows_of(7, 50, 300, dtype)
    weight = np.random.default_rng(8).standard_normal(300)
    expected = rows.astype(np.float64) @ weight - 1.5
    np.testing.assert_allclose(row_scores(rows, weight, -1.5), expected, rtol=1e-6, atol=1e-9 * np.abs(rows).max())


def test_every_bfloat16_value_is_read_as_it_is():
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    values = values[np.isfinite(values.astype(np.float32))]
    scores = row_scores(values.reshape(-1, 1), np.ones(1), 0.0)
    assert np.array_equal(scores, values.astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighs", [1.0, 0.0])
def test_a_value_that_is_not_finite_spoils_its_own_row_and_no_other(value, dtype, weighs):
    rows = rows_of(9, 6, 40, dtype)
    weight = np.ones(40)
    weight[17] = weighs
    clean = row_scores(rows, weight, 0.0)
    rows[3, 17] = value
    scores = row_scores(rows, weight, 0.0)
    assert not np.isfinite(scores[3])
    kept = [0, 1, 2, 4, 5]
    assert scores[kept].tobytes() == clean[kept].tobytes()


def test_a_score_beyond_float32_is_not_finite():
    assert np.isinf(row_scores(np.full((1, 2), 1e38, np.float32), np.array([9.0, 9.0]), 0.0))[0]


@pytest.mark.parametrize("rows", [np.zeros((2, 3), np.float32), np.zeros(4, np.float32), np.zeros((2, 4), np.int32),
                                  np.zeros((1, 2, 4), np.float32), np.zeros((2, 4), np.complex64)])  # fmt: skip
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(ShapeError):
        row_scores(rows, np.ones(4), 0.0)


def test_no_rows_give_no_scores():
    assert row_scores(np.zeros((0, 4), np.float32), np.ones(4), 0.0).shape == (0,)


def test_machine_code_is_there_wherever_that_of_a_step_is():
    assert (machine_code() is not None) == steady.AVAILABLE, "build it: make setup"


@needs_it
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 5),
    width=st.integers(1, 300) | st.sampled_from([1000, 4096, 5120, 8193]),
    many=st.integers(1, 3),
    dtype=st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16]),
    value=st.sampled_from([None, -0.0, np.inf, np.nan, 1e-40]),
)
def test_machine_code_has_the_bits_of_numpy(seed, count, width, many, dtype, value):
    rows = rows_of(seed, count, width, dtype)
    if value is not None:
        rows[: count // 2 + 1, width // 2 :] = value
    weights = np.random.default_rng(seed).standard_normal((many, width))
    expected = products_by_numpy(rows, weights)
    assert row_products(rows, weights).tobytes() == expected.tobytes()
    assert row_products(np.asfortranarray(rows), weights).tobytes() == expected.tobytes()
    wide = np.zeros((count, 2 * width), dtype)
    wide[:, ::2] = rows
    assert row_products(wide[:, ::2], weights).tobytes() == expected.tobytes()


@needs_it
@pytest.mark.parametrize(
    ("size", "type_number", "width", "weights", "sums"),
    [
        (32, 0, 0, 8, 8), (32, 0, -4, 4, 2), (32, 3, 4, 4, 2), (32, -1, 4, 4, 2), (31, 0, 4, 4, 4), (32, 0, 4, 3, 4),
        (32, 0, 4, 4, 3), (32, 0, 4, 4, 5), (32, 0, 4, 8, 4), (32, 0, 2**60, 4, 4), (0, 0, 4, 0, 1), (32, 0, 4, 0, 4),
    ],
)  # fmt: skip
def test_machine_code_refuses_what_does_not_fit(size, type_number, width, weights, sums):
    from undercurrent.probes import _rows

    with pytest.raises(ValueError, match="fit"):
        _rows.products(bytes(size), type_number, width, np.zeros(weights), np.zeros(sums))


def scattered(rows, cuts, ahead):
    """Rows in pieces, each behind some other bytes."""
    pieces = [rows[a:b].tobytes() for a, b in itertools.pairwise(cuts)]
    starts = np.arange(len(pieces), dtype=np.int32) % 3 * ahead
    return [b"x" * start + piece for start, piece in zip(starts, pieces, strict=True)], starts.tobytes()


@needs_it
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 200),
    width=st.sampled_from([1, 7, 128, 129, 301]),
    dtype=st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16]),
    ahead=st.integers(0, 9),
    data=st.data(),
)
def test_rows_in_pieces_have_the_bits_of_rows_in_one(seed, count, width, dtype, ahead, data):
    rows = rows_of(seed, count, width, dtype)
    weight = np.random.default_rng(seed + 1).standard_normal(width)
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {0, count})
    values, starts = scattered(rows, cuts, ahead)
    name = rows.dtype.name
    assert scattered_scores(values, starts, count, name, weight, 0.25).tobytes() == (
        row_scores(rows, weight, 0.25).tobytes()
    )
    views = [memoryview(value) for value in values]
    assert scattered_scores(views, starts, count, name, weight, 0.25) is not None
    for wrong in (count - 1, count + 1):
        assert scattered_scores(values, starts, wrong, name, weight, 0.25) is None
    assert scattered_scores(values, starts, count, name, np.tile(weight, 2), 0.25) is None
    assert scattered_scores(values[:-1], starts, count, name, weight, 0.25) is None
    assert scattered_scores([*values[:-1], b""], starts, count, name, weight, 0.25) is None


@needs_it
def test_rows_in_pieces_are_put_together_where_that_takes_numpy():
    rows = rows_of(1, 4, 8, np.float32)
    weight = np.ones(8)
    values, starts = scattered(rows, [0, 2, 4], 0)
    assert scattered_scores(values, starts, 4, "float32", weight, 0.0) is not None
    assert scattered_scores(values, starts, 8, "float16", weight, 0.0) is None
    rows[3, 3] = np.nan
    values, starts = scattered(rows, [0, 2, 4], 0)
    assert scattered_scores(values, starts, 4, "float32", weight, 0.0) is None
    for start in (-1, 1, 2**31 - 1):
        assert scattered_scores(values, np.int32([0, start]).tobytes(), 4, "float32", weight, 0.0) is None
