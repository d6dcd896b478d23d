"""YAML as plain data: what bombs, tags and odd scalars come to."""

from __future__ import annotations

import time

import pytest

from undercurrent.errors import SpecValidationError
from undercurrent.spec.values import MAX_DEPTH, MAX_NODES
from undercurrent.spec.yaml_text import MAX_TEXT_CHARS, parse_plain_yaml


def chain(length):
    """Each line an alias of the one before: flat text, deep data."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, length))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", None),
        ("# nothing", None),
        ("a: [1, 2.5, true, ~, x]", {"a": [1, 2.5, True, None, "x"]}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("a: !!str 1", {"a": "1"}),
        ("'on': x", {"on": "x"}),
    ],
)
def test_plain_data_is_read(text, data):
    assert parse_plain_yaml(text) == data


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('a: !!int ""', "cannot be read"),
        ("a: !!int _", "cannot be read"),
        ("a: !!float abc", "cannot be read"),
        ("a: !!bool maybe", "cannot be read"),
        ("a: !!int [1]", "not YAML"),
        ("a: !!map x", "not YAML"),
        ("a: !local x", "'!local' is not plain data"),
        ("a: !!python/object/apply:os.system [x]", "not plain data"),
        ("a: !!omap []", "not plain data"),
        ("a: =", "put it in quotes"),
        ("a: 2024-01-01", "put it in quotes"),
        ("a: 0x" + "f" * 600, "number of 602 characters"),
        ("a: 1" + ":59" * 200, "number of 601 characters"),
        ("a: '\\ud800'\nb: \"\\ud800\"", "not YAML|cannot be read"),
        ("a: \ud800", "cannot be read|not YAML"),
        ("a: &x [*x]", "contains itself at line 1"),
        ("<<: [1]", "not YAML"),
        ("a: 1\nb: 2\na: 3", "'a' stands twice at line 3"),
        (chain(MAX_DEPTH + 2), "nested deeper"),
        ("[" + "x," * (MAX_NODES + 9) + "]", "more than"),
        ("- []\n" * (MAX_NODES + 9), "more than"),
        ("x" * (MAX_TEXT_CHARS + 1), "too long"),
    ],
)
def test_anything_more_is_refused_in_one_line(text, words):
    start = time.thread_time()
    with pytest.raises(SpecValidationError, match=words) as caught:
        parse_plain_yaml(text)
    assert time.thread_time() - start < 10
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("given", [b"a: 1", None, 3, ["a: 1"]])
def test_only_text_is_read(given):
    with pytest.raises(SpecValidationError, match="accepted: YAML text"):
        parse_plain_yaml(given)


def test_a_chain_of_aliases_within_bounds_is_read():
    assert parse_plain_yaml(chain(MAX_DEPTH - 2))["a1"] == [["x"]]
