"""Rows of shards: when they leave, with which layers, and what becomes of those that cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from undercurrent.codec import as_array, positions, token_ids
from undercurrent.protocol.joining import ShardJoin
from undercurrent.testing.streams import StreamBuilder

WIDTH = 2


def builders(*layers):
    return [
        StreamBuilder("r", layers=mine, width=WIDTH, shard=at, shards=len(layers)) for at, mine in enumerate(layers)
    ]


def rows(at, layers):
    """Rows that say where they belong: [len(at), len(layers), WIDTH], each element 100 * position + layer."""
    return np.array([[[100.0 * place + layer] * WIDTH for layer in layers] for place in at])


def joining(*layers, **options):
    join = ShardJoin(**options)
    join.start(dict(enumerate(layers)))
    return join, builders(*layers)


def give(join, builder, at, before=None):
    assert join.add(builder._identity["shard"], builder.activations(at, rows(at, builder.layers)), before)
    return list(join.joined())


def test_a_row_leaves_with_all_layers_in_ascending_order_once_every_shard_has_sent_it():
    join, (first, second, third) = joining((4, 1), (0,), (3, 2))
    assert give(join, first, [5, 6, 9]) == []
    assert give(join, third, [5, 6]) == []
    [block] = give(join, second, [5])
    assert (positions(block).tolist(), block.layers) == ([5], (0, 1, 2, 3, 4))
    assert np.array_equal(as_array(block), rows([5], range(5)))
    [block] = give(join, second, [6, 9])
    assert positions(block).tolist() == [6]
    [block] = give(join, third, [9])
    assert np.array_equal(as_array(block), rows([9], range(5)))
    assert (join.held_bytes, join.unjoined) == (0, 0)


def test_nothing_leaves_before_every_shard_has_started():
    join, (first, second) = ShardJoin(), builders((0,), (1,))
    assert give(join, first, [0]) == give(join, second, [0]) == []
    join.start({0: (0,), 1: (1,)})
    [block] = join.joined()
    assert np.array_equal(as_array(block), rows([0], (0, 1)))


def test_a_joined_row_bears_the_latest_time_and_the_token_that_both_shards_name():
    join, (first, second) = joining((0,), (1,))
    early = replace(first.activations([3], rows([3], (0,)), step=7, captured_at_us=10), token_ids=b"\x05\0\0\0")
    late = replace(second.activations([3], rows([3], (1,)), step=7, captured_at_us=30), token_ids=b"\x05\0\0\0")
    assert join.add(1, late, None)
    assert join.add(0, early, None)
    [block] = join.joined()
    assert (block.captured_at_us, block.step, token_ids(block).tolist(), block.shard) == (30, 7, [5], 0)


def test_rows_of_different_tokens_are_not_of_one_computation_and_never_leave():
    join, (first, second) = joining((0,), (1,))
    assert join.add(0, first.activations([3, 4], rows([3, 4], (0,))), None)
    other = replace(second.activations([3, 4], rows([3, 4], (1,))), token_ids=b"\x05\0\0\0" + bytes(4))
    assert join.add(1, other, None)
    [block] = join.joined()
    assert (positions(block).tolist(), join.unjoined) == ([4], 2)


def test_a_position_that_another_shard_has_passed_never_leaves_and_is_counted():
    join, (first, second) = joining((0,), (1,))
    assert give(join, first, [0, 1, 2, 3]) == []
    [block] = give(join, second, [3])
    assert (positions(block).tolist(), join.unjoined) == ([3], 3)
    join.end(1)
    assert give(join, first, [4]) == []
    assert (join.unjoined, join.held_bytes) == (4, 0)


def test_what_is_held_is_bounded_and_beyond_the_bound_nothing_leaves():
    size = 4 * WIDTH
    join, (first, second) = joining((0,), (1,), max_held_bytes=3 * size)
    assert give(join, first, [0, 1, 2]) == []
    assert (join.held_bytes, join.gave_up) == (3 * size, False)
    assert give(join, first, [3]) == []
    assert (join.held_bytes, join.gave_up, join.unjoined) == (0, True, 4)
    assert give(join, second, [0, 1, 2, 3]) == []
    assert (join.held_bytes, join.unjoined) == (0, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": b"\0\0\0"},
        {"positions": b""},
        {"data": b""},
        {"data": bytes(7)},
        {"data": bytes(64)},
        {"token_ids": bytes(8)},
        {"layers": (1,)},
        {"positions": (1).to_bytes(4, "little")},
    ],
)
def test_a_block_that_does_not_fit_is_refused_and_changes_nothing(wrong):
    join, (first, second) = joining((0,), (1,))
    assert give(join, first, [1]) == []
    assert not join.add(0, replace(first.activations([2], rows([2], (0,))), **wrong), None)
    [block] = give(join, second, [1])
    assert positions(block).tolist() == [1]
    assert join.held_bytes == 0
