"""Position grammar: what each form matches, and that every form survives being written and read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.errors import PositionSyntaxError
from undercurrent.spec import PositionKind, PositionSelector, parse_position

NUMBER = st.integers(0, 40)
RAW = st.one_of(
    NUMBER,
    st.sampled_from(["*", "prompt[*]", "generated[*]"]),
    st.builds(
        lambda region, index, offset: f"{region}[{index}]{f'{offset:+d}' if offset else ''}",
        st.sampled_from(["prompt", "generated"]),
        st.integers(-40, 40),
        st.integers(-9, 9),
    ),
    st.builds(
        lambda region, start, length: f"{region}[{start}:{'' if length is None else start + length}]",
        st.sampled_from(["prompt", "generated"]),
        NUMBER,
        st.none() | st.integers(1, 40),
    ),
)


@given(RAW)
def test_to_raw_reads_back_as_the_same_selector(raw):
    selector = parse_position(raw)
    assert selector.to_raw() == raw
    assert parse_position(selector.to_raw()) == selector


@pytest.mark.parametrize(
    ("raw", "prompt_len", "total", "expected"),
    [
        (5, 3, None, 5),
        ("5", 3, None, 5),
        ("prompt[0]", 4, None, 0),
        ("prompt[-1]", 4, None, 3),
        ("prompt[-1]+2", 4, None, 5),
        ("prompt[-4]-1", 4, None, None),
        ("prompt[4]", 4, None, None),
        ("prompt[-5]", 4, None, None),
        ("generated[0]", 4, None, 4),
        ("generated[0]-1", 4, None, 3),
        ("generated[2]+3", 4, None, 9),
        ("generated[2]+3", 4, 5, None),
        ("generated[9]", 4, 5, None),
        ("generated[-1]", 4, None, None),
        ("generated[-1]", 4, 5, 8),
        ("generated[-6]", 4, 5, None),
        ("generated[-2]+1", 4, 5, 8),
        (9, 4, 5, None),
        ("generated[*]", 4, 5, None),
    ],
)
def test_single_tokens_resolve_to_absolute_positions(raw, prompt_len, total, expected):
    assert parse_position(raw).resolve_absolute(prompt_len, total) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("*", {0, 1, 2, 3, 4, 5, 6}),
        ("prompt[*]", {0, 1, 2}),
        ("prompt[1:]", {1, 2}),
        ("prompt[1:9]", {1, 2}),
        ("generated[*]", {3, 4, 5, 6}),
        ("generated[1:]", {4, 5, 6}),
        ("generated[1:3]", {4, 5}),
        ("prompt[-1]", {2}),
        ("generated[0]", {3}),
        (6, {6}),
        ("generated[-1]", set()),
    ],
)
def test_each_form_matches_its_tokens_of_three_given_and_four_generated(raw, expected):
    selector = parse_position(raw)
    assert {p for p in range(7) if selector.matches(p, p >= 3, 3)} == expected


def test_last_generated_token_matches_once_the_total_is_known():
    selector = parse_position("generated[-1]")
    assert selector.needs_final_length
    assert [p for p in range(7) if selector.matches(p, p >= 3, 3, num_generated_total=4)] == [6]
    with pytest.raises(PositionSyntaxError, match="only when the request has ended"):
        selector.bounds(3)


@pytest.mark.parametrize(
    "raw",
    [
        "", "x", "prompt", "prompt[]", "prompt[a]", "prompt[-0]", "generated[3:3]", "generated[3:1]", "generated[-3:]",
        "prompt[:3]", "prompt[1]+", "prompt[1] + 2", "prompt[*]+1", "prompt[1:2]-1", "generated[**]", "-1", "1.0", -1,
        1.0, True, None, [], {}, b"*", "prompt[99999999999]", "prompt[4294967296]", 2**40, "prompt[\u0661]",
        "prompt[1]\n+1", "9" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_accepted(raw):
    with pytest.raises(PositionSyntaxError, match="accepted: "):
        parse_position(raw)


@given(st.text(max_size=60))
def test_any_text_gives_a_selector_or_the_one_error(text):
    with contextlib.suppress(PositionSyntaxError):
        assert isinstance(parse_position(text), PositionSelector)


def test_kinds_are_named_as_the_forms_are():
    kinds = {raw: parse_position(raw).kind for raw in (3, "prompt[1]", "generated[1]", "generated[*]", "generated[2:]")}
    assert [k.value for k in kinds.values()] == [
        "absolute", "prompt_index", "generated_index", "generated_wildcard", "generated_slice",
    ]  # fmt: skip
    continuous = {kind for raw in ("*", "prompt[*]", "prompt[1:]") if (kind := parse_position(raw).kind)}
    assert continuous == {PositionKind.EVERY_TOKEN, PositionKind.PROMPT_WILDCARD, PositionKind.PROMPT_SLICE}
    assert all(parse_position(raw).is_continuous for raw in ("*", "prompt[*]", "generated[1:2]"))
