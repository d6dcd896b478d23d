"""Anything at all: a spec, or the parser's one error, and soon.

The time limits are far above what is needed (`benchmarks/spec_fuzz.py` measures that): they catch what blows up.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import random
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.spec_fuzz import YAML_KINDS, shared
from tests.unit.undercurrent.spec.strategies import specs
from undercurrent.errors import PositionSyntaxError, SpecValidationError
from undercurrent.spec import (
    PositionSelector,
    ProbeSpec,
    json_schema,
    load_spec,
    load_yaml_file,
    parse_dict,
    parse_position,
    parse_yaml,
    probe_spec_to_dict,
    to_yaml,
)

LIMIT_S = 5.0
"""For one parse on this thread, whatever else the machine does."""

fuzz = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


class Spiteful:
    """Raises from whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")

    def __eq__(self, other):
        raise RuntimeError("eq")

    def __bool__(self):
        raise RuntimeError("bool")

    __hash__ = None


def ends_well(parse, given):
    start = time.thread_time()
    spec = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with contextlib.suppress(SpecValidationError):
            spec = parse(given)
            assert isinstance(spec, ProbeSpec)
    assert time.thread_time() - start < LIMIT_S
    if spec is not None:  # what was accepted can be written, and is what it was
        assert parse_dict(probe_spec_to_dict(spec)) == spec
        assert parse_yaml(to_yaml(spec)) == spec


KEYS = st.sampled_from([
    "version", "extraction_points", "name", "layers", "layer", "tensor", "tensor_type", "position", "until", "kind",
    "count", "stop_token", "fixed_count", "intervention", "mode", "timeout_ms", "on_timeout", "stride", "every_n",
    "probe_args", "probe_type", "probe_kind", "execution_mode", "queue_depth", "dtype", "overflow", "token_ids",
    "reduce", "on_unavailable",
])  # fmt: skip
WORDS = st.sampled_from([
    "*", "prompt[0]", "prompt[-1]+2", "generated[*]", "generated[2:5]", "attn_out", "final_norm", "fixed_count",
    "stop_token", "async", "inline", "block_until_signal", "reject", "abort", "trajectory", "single_shot", "1", "1.0",
    "generation_end",
])  # fmt: skip
# By index: Hypothesis prints its strategies, and some of these cannot be printed.
ODD_SCALARS = (10**5000, -(10**5000), 2**63, float("nan"), float("inf"), "\ud800", "\x00", "\u2028", "9" * 5000)
ODD_OBJECTS = (
    b"x", {1, 2}, frozenset(), object(), Spiteful(), print, int, range(10**12), np.zeros(3), np.float64("nan"),
    np.int64(3), np.array(["a"]), datetime.date(2024, 1, 1), ..., NotImplemented, iter([1]), 1j, bytearray(b"y"),
    memoryview(b"z"), lambda: None,
)  # fmt: skip


def one_of(values):
    return st.integers(0, len(values) - 1).map(lambda index: values[index])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), WORDS, one_of(ODD_SCALARS)
)  # fmt: skip
OBJECTS = one_of(ODD_OBJECTS)
DATA = st.recursive(
    SCALARS | OBJECTS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.text(max_size=4) | st.integers() | st.none(), inner, max_size=8)
    ),
    max_leaves=30,
)
VALID = {"name": "mid", "layers": [3], "tensor_type": "attn_out", "position": "*"}


@fuzz
@given(DATA)
def test_any_object_is_a_spec_or_refused(data):
    ends_well(parse_dict, data)
    ends_well(parse_dict, {"extraction_points": data})
    ends_well(load_spec, data)


@fuzz
@given(st.dictionaries(KEYS, DATA, min_size=1, max_size=3))
def test_any_field_of_a_point_is_right_or_refused(changes):
    ends_well(parse_dict, {"extraction_points": [VALID | changes]})


ODD_CASES = (
    Spiteful(),
    {"version": np.zeros(2), "extraction_points": []},
    {"version": 10**5000, "extraction_points": []},
    {"version": True, "extraction_points": []},
    {10**5000: 1, "extraction_points": []},
    {"extraction_points": Spiteful()},
    {"extraction_points": [Spiteful()]},
    *({"extraction_points": [VALID | change]} for change in (
        {"name": Spiteful()}, {"name": "\ud800"}, {"layers": range(10**12)}, {"layers": [10**5000]},
        {"layers": itertools.count()}, {"until": {"stop_token": 10**5000}}, {"probe_args": {"a": 10**5000}},
        {"probe_args": {"a": "\ud800"}}, {"probe_type": "\ud800"}, {"queue_depth": True}, {"dtype": Spiteful()},
        {10**5000: 1}, {"x" * 10**6: 1}, {"position": "9" * 10**6}, {"position": 10**5000},
    )),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD_CASES)))
def test_an_odd_object_is_refused(number):
    with pytest.raises(SpecValidationError) as caught:
        parse_dict(ODD_CASES[number])
    assert len(str(caught.value)) < 2000


@fuzz
@given(st.text(max_size=400) | st.text("[]{}:,-&*!? \n'\"<|>%@`ab1.~#\\\t", max_size=600))
def test_any_text_is_a_spec_or_refused(text):
    ends_well(parse_yaml, text)
    ends_well(load_spec, text)


@fuzz
@given(specs(), st.data())
def test_a_right_text_with_a_hole_or_a_patch_is_a_spec_or_refused(spec, data):
    text = to_yaml(spec)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 8)))
    patch = data.draw(st.text("[]{}:,-&*!? \n'\"x1", max_size=8) | WORDS)
    ends_well(parse_yaml, text[:start] + patch + text[end:])


@fuzz
@given(content=st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-16")))
def test_any_file_is_a_spec_or_refused_by_its_name(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    ends_well(load_yaml_file, path)
    with contextlib.suppress(SpecValidationError):
        load_yaml_file(path)
        return
    with pytest.raises(SpecValidationError, match=r"fuzzed\.yaml: "):
        load_yaml_file(path)


@fuzz
@given(SCALARS | OBJECTS | DATA | st.text("prompt[]generated:*+-0123456789 ", max_size=40))
def test_any_position_is_a_selector_or_refused(value):
    with contextlib.suppress(PositionSyntaxError):
        selector = parse_position(value)
        assert isinstance(selector, PositionSelector)
        assert parse_position(selector.to_raw()) == selector


@pytest.mark.parametrize("kind", YAML_KINDS)
def test_ten_kilobytes_of_garbage_do_not_blow_up(kind):
    for seed in range(3):
        text = YAML_KINDS[kind](random.Random(seed))
        start = time.thread_time()
        with contextlib.suppress(SpecValidationError):
            parse_yaml(text)
        assert time.thread_time() - start < LIMIT_S


def test_lists_that_share_lists_do_not_blow_up():
    start = time.thread_time()
    with pytest.raises(SpecValidationError, match="more than"):
        parse_dict(shared(random.Random()))
    assert time.thread_time() - start < LIMIT_S


def test_data_that_contains_itself_is_refused():
    data = {"extraction_points": [VALID]}
    data["extraction_points"].append(data)
    with pytest.raises(SpecValidationError, match="nested too deep"):
        parse_dict(data)


def test_the_schema_is_the_same_each_time_and_may_be_changed():
    first = json_schema()
    first["properties"].clear()
    assert json_schema()["properties"]
