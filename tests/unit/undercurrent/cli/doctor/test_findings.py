"""What the doctor finds: nothing in right records, and every kind of wrong one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from undercurrent.cli.doctor.findings import Rows, bookkeeping, compare

RANDOM = np.random.default_rng(1)
LAYERS, WIDTH = 3, 16


def request(name, length, prefix=()):
    sequence = (*prefix, *RANDOM.integers(0, 500, length - len(prefix)).tolist())
    count = length - 1
    values = RANDOM.normal(size=(count, LAYERS, WIDTH)).astype(np.float32)
    return Rows(name, sequence, tuple(range(count)), sequence[:-1], values)


@pytest.fixture
def right():
    return [request("a", 9), request("b", 14), request("c", 2)]


def truth_of(rows):
    noise = {r.request: RANDOM.normal(size=r.values.shape).astype(np.float32) * 1e-4 for r in rows}
    return {r.request: r.values + noise[r.request] for r in rows}


def test_right_records_have_nothing_wrong(right):
    found = compare(right, truth_of(right), 1e-3)
    assert (found.rows, found.strangers, found.problems, found.sound) == (8 + 13 + 1, 0, [], True)
    assert 0 < found.worst < 1e-3
    assert [bookkeeping(one) for one in right] == [[], [], []]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_rows_shifted_by_one_in_any_layer_are_strangers(right, layer):
    truth = truth_of(right)
    right[1].values[:, layer] = np.roll(right[1].values[:, layer], 1, axis=0)
    found = compare(right, truth, 1e-3)
    assert found.strangers == 13
    assert not found.sound
    assert "b, position 0: off by" in found.problems[0]


def test_rows_of_two_requests_swapped_are_strangers(right):
    truth = truth_of(right)
    right[0].values[3], right[1].values[3] = right[1].values[3].copy(), right[0].values[3].copy()
    found = compare(right, truth, 10.0)
    assert found.strangers == 2 * LAYERS
    assert "a, position 3: nearer to b, position 3" in found.problems


def test_a_row_that_is_not_finite_is_wrong(right):
    truth = truth_of(right)
    right[0].values[2, 1, 5] = np.nan
    found = compare(right, truth, 1e-3)
    assert found.worst == np.inf
    assert any("a, position 2" in line for line in found.problems)


def test_equal_prefixes_are_no_strangers_to_each_other():
    one = request("one", 6)
    other = replace(request("other", 8, one.sequence[:4]))
    other.values[:4] = one.values[:4]
    assert compare([one, other], truth_of([one, other]), 1e-3).strangers == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: replace(r, positions=(0, 2, 2, *r.positions[3:])), "[1] are missing, 1 come twice"),
        (lambda r: replace(r, positions=(*r.positions[:-1], 20)), "[20] are past the end"),
        (lambda r: replace(r, token_ids=(-1, *r.token_ids[1:])), "token ids at positions [0]"),
        (lambda r: replace(r, lost=3), "3 rows were declared lost"),
    ],
)
def test_wrong_positions_and_token_ids_are_told(right, change, said):
    assert said in " ".join(bookkeeping(change(right[0])))
