"""The sample is bounded, seeded, the same in any order, and gives each request the same weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit import LabelledRequest, Site
from undercurrent.evaluation.fit.sample import Sample, SampleBuilder

SITE = Site("residual_stream", 0)


def block(number: int, tokens: int, label: bool | None, **more: Any) -> LabelledRequest:
    """A request whose rows tell who they are: (request, token)."""
    rows = np.column_stack([np.full(tokens, number), np.arange(tokens)]).astype(np.float32)
    return LabelledRequest(request_id=f"r{number}", positions=np.arange(tokens), rows={SITE: rows}, label=label, **more)


def draw(blocks: Sequence[LabelledRequest], *, per_request: int = 8, seed: int = 0, max_bytes: int = 1 << 20) -> Sample:
    builder = SampleBuilder([SITE], positions="all", tokens_per_request=per_request, seed=seed, max_bytes=max_bytes)
    for each in blocks:
        builder.take(each)
    return builder.finish()


BLOCKS = [block(number, 3 + 7 * number, number % 3 == 0) for number in range(12)]


def test_each_request_gives_so_many_tokens_and_weighs_the_same() -> None:
    sample = draw(BLOCKS)
    counts = np.bincount(sample.owners)
    assert counts.tolist() == [min(8, facts.tokens) for facts in sample.requests]
    np.testing.assert_allclose(np.bincount(sample.owners, sample.weights), 1.0)
    for row, owner, label in zip(sample.rows[SITE], sample.owners, sample.labels, strict=True):
        facts = sample.requests[owner]
        assert facts.request_id == f"r{int(row[0])}"
        assert label == facts.label
    drawn = {tuple(row) for row in sample.rows[SITE].tolist()}
    assert len(drawn) == len(sample.labels)


def test_neither_order_nor_company_changes_what_is_drawn() -> None:
    sample, turned = draw(BLOCKS), draw(BLOCKS[::-1])
    np.testing.assert_array_equal(sample.rows[SITE], turned.rows[SITE])
    np.testing.assert_array_equal(sample.owners, turned.owners)
    alone = draw(BLOCKS[:5])
    of_five = [sample.requests[owner].request_id in {"r0", "r1", "r2", "r3", "r4"} for owner in sample.owners]
    np.testing.assert_array_equal(sample.rows[SITE][of_five], alone.rows[SITE])
    assert not np.array_equal(draw(BLOCKS, seed=1).rows[SITE], sample.rows[SITE])


def test_tokens_are_drawn_evenly() -> None:
    blocks = [block(number, 50, number % 2 == 0) for number in range(800)]
    tokens = draw(blocks, per_request=5).rows[SITE][:, 1].astype(int)
    counts = np.bincount(tokens, minlength=50)
    # 4,000 draws over 50 tokens: 80 each, within five standard deviations.
    assert np.abs(counts - 80).max() < 5 * np.sqrt(80)


def test_a_bound_halves_the_draw_in_any_order_and_keeps_a_part_of_it() -> None:
    whole = draw(BLOCKS)
    bound = whole.rows[SITE].nbytes - 1
    small, turned = draw(BLOCKS, max_bytes=bound), draw(BLOCKS[::-1], max_bytes=bound)
    assert small.tokens_per_request == turned.tokens_per_request == 4
    assert small.rows[SITE].nbytes <= bound
    np.testing.assert_array_equal(small.rows[SITE], turned.rows[SITE])
    assert {tuple(row) for row in small.rows[SITE].tolist()} < {tuple(row) for row in whole.rows[SITE].tolist()}
    assert len(small.labels) == len(small.owners) == len(small.rows[SITE])


def test_a_bound_below_one_token_each_is_an_error() -> None:
    with pytest.raises(ProbeError, match="one token of each of 3 requests at 1 sites is more than"):
        draw(BLOCKS, max_bytes=16)


def test_unknown_requests_and_tokens_are_left_out_and_counted() -> None:
    builder = SampleBuilder([SITE], positions="generated", tokens_per_request=8, seed=0, max_bytes=1 << 20)
    labels = np.array([-1, -1, -1, 1, 0, -1], np.int8)
    builder.take(block(0, 6, True, prompt_len=2, token_labels=labels))
    builder.take(block(1, 6, None))
    builder.take(block(2, 6, False, prompt_len=6))
    assert builder.take(block(3, 6, False, prompt_len=4)).tolist() == [4, 5]
    assert (builder.unknown, builder.empty, builder.tokens) == (1, 1, 4)
    sample = builder.finish()
    assert sorted(sample.rows[SITE].tolist()) == [[0, 3], [0, 4], [3, 4], [3, 5]]
    assert {
        (row[1], bool(label)) for row, label in zip(sample.rows[SITE], sample.labels, strict=True) if not row[0]
    } == {
        (3.0, True),
        (4.0, False),
    }


def test_one_class_alone_is_an_error_that_counts() -> None:
    with pytest.raises(ProbeError, match=r"0 positive and 2 negative requests .* \(1 unlabelled, 0 without"):
        draw([block(0, 4, False), block(1, 4, False), block(2, 4, None)])


def test_another_width_is_named() -> None:
    wide = LabelledRequest(request_id="r9", positions=np.arange(2), rows={SITE: np.ones((2, 5))}, label=True)
    with pytest.raises(ProbeError, match="request 'r9': rows at layer 0 of residual_stream are 5 wide, of 'r0' 2"):
        draw([block(0, 4, False), wide])
