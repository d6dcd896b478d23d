"""Which rows of a slot are real once its drafts were accepted or rejected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from undercurrent.errors import CaptureError

pytestmark = pytest.mark.vllm

ENDLESS = ((), 10_000)


def rows_kept(count, drafts, computed, sampled, ends=ENDLESS):
    from undercurrent.adapters.vllm.compat.drafts import Ends, rows_kept

    return rows_kept(count, drafts, computed, sampled, Ends(*ends))


@pytest.mark.parametrize(("sampled", "kept"), [([7], 1), ([7, 8], 2), ([7, 8, 9, 1], 4)])
def test_rows_of_accepted_drafts_are_real(sampled, kept):
    assert rows_kept(4, 3, 10, sampled) == kept


def test_a_slot_may_have_more_rows_of_its_own():
    assert rows_kept(6, 2, 10, [7, 8]) == 5


def test_what_was_accepted_after_the_end_is_no_row():
    assert rows_kept(5, 4, 10, [7, 8, 9, 1, 2], ({8}, 10_000)) == 2
    # The token that ends is at the last place: it has no row anyway.
    assert rows_kept(5, 4, 10, [7, 8, 9, 1, 2], ({2}, 10_000)) == 5


@pytest.mark.parametrize(("length", "kept"), [(12, 1), (13, 2), (15, 4), (16, 5), (17, 5)])
def test_rows_end_before_the_last_token_of_the_longest_text(length, kept):
    # Position 10 is the slot's own row; the tokens that came out stand at 11 to 15.
    assert rows_kept(5, 4, 10, [7, 8, 9, 1, 2], ((), length)) == kept


@pytest.mark.parametrize(("count", "drafts", "sampled"), [(4, 3, []), (4, 3, [1] * 5), (3, 3, [1])])
def test_counts_that_cannot_be_are_refused(count, drafts, sampled):
    with pytest.raises(CaptureError, match="drafts in"):
        rows_kept(count, drafts, 10, sampled)


def state(**params):
    values = {"stop_token_ids": None, "eos_token_id": None, "max_tokens": 5} | params
    return SimpleNamespace(num_prompt_tokens=10, sampling_params=SimpleNamespace(**values))


def test_what_ends_a_request_is_what_its_parameters_say():
    from undercurrent.adapters.vllm.compat.drafts import Ends

    assert Ends.of(state(), 100).length == 15
    assert Ends.of(state(max_tokens=None), 100).length == 100
    assert Ends.of(state(), 12).length == 12
    assert {3, 4} <= set(Ends.of(state(stop_token_ids=[3], eos_token_id=4), 100).tokens)
