"""Which rank captures which layers of a point."""

from __future__ import annotations

import pytest

from undercurrent.capture.sharding import Share, share_of
from undercurrent.spec import ExtractionPoint, TensorType

OWNED = [range(0, 3), range(3, 6), range(6, 8)]


def point(*layers, tensor_type=TensorType.RESIDUAL_STREAM):
    return ExtractionPoint(
        name="p", layers=layers, tensor_type=tensor_type, position="*", probe_type="x", execution_mode="async"
    )


@pytest.mark.parametrize(
    ("layers", "shares"),
    [
        ((0, 4, 7), [Share((0,), 0, 3), Share((4,), 1, 3), Share((7,), 2, 3)]),
        ((7, 1, 0), [Share((1, 0), 0, 2), Share((), -1, 2), Share((7,), 1, 2)]),
        ((4,), [Share((), -1, 1), Share((4,), 0, 1), Share((), -1, 1)]),
    ],
)
def test_ranks_that_own_a_layer_of_a_point_write_its_shards_and_no_other_does(layers, shares):
    assert [share_of(point(*layers), OWNED, rank) for rank in range(3)] == shares


def test_the_final_norm_is_the_last_rank_s_whatever_number_its_layer_has():
    norm = point(8, tensor_type=TensorType.FINAL_NORM)
    assert [share_of(norm, OWNED, rank) for rank in range(3)] == [Share((), -1, 1), Share((), -1, 1), Share((8,), 0, 1)]


def test_one_rank_owns_everything():
    assert share_of(point(2, 0), [range(0, 3)], 0) == Share((2, 0), 0, 1)
