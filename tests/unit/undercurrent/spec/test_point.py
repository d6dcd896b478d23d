"""Extraction points: positions against a token-by-token oracle, and every combination that is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undercurrent.spec.strategies import continuous_positions, points, single_positions
from undercurrent.errors import SpecValidationError
from undercurrent.spec import (
    ExtractionPoint,
    InterventionPolicy,
    ProbeKind,
    ProbeSpec,
    TensorType,
    UntilPolicy,
)


def make(**changes):
    fields = {"name": "mid", "layers": [3], "tensor_type": "residual_stream", "position": "generated[*]"}
    return ExtractionPoint(**(fields | changes))


@given(
    position=continuous_positions | single_positions.filter(lambda raw: "generated[-" not in str(raw)),
    stride=st.integers(1, 5),
    count=st.none() | st.integers(1, 6),
    prompt_len=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6).map(sorted),
)
def test_positions_of_any_split_are_those_that_match_one_by_one(position, stride, count, prompt_len, cuts):
    point = make(position=position)
    if point.position.is_continuous:
        until = UntilPolicy("fixed_count", count) if count else UntilPolicy()
        point = make(position=position, stride=stride, until=until)
    last = cuts[-1]
    oracle = [p for p in range(last) if point.matches(p, p >= prompt_len, prompt_len)]
    edges = [0, *cuts]
    found = [p for a, b in itertools.pairwise(edges) for p in point.positions(a, b, prompt_len)]
    assert found == oracle
    if count and point.position.is_continuous:
        assert len(point.positions(0, 10_000, prompt_len)) <= count


def test_stride_counts_from_the_start_of_the_slice():
    assert list(make(position="generated[3:]", stride=4).positions(0, 30, 10)) == [13, 17, 21, 25, 29]
    assert list(make(position="prompt[1:8]", stride=3).positions(0, 30, 10)) == [1, 4, 7]


def test_position_that_needs_the_final_length_is_refused_by_name():
    point = make(position="generated[-1]")
    assert point.needs_final_length
    with pytest.raises(SpecValidationError, match="point 'mid' field 'position'"):
        point.positions(0, 5, 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"name": " "}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"layers": []}, "layers"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": [True]}, "layers"),
        ({"layers": "12"}, "layers"),
        ({"layers": None}, "layers"),
        ({"tensor_type": "resid"}, "tensor_type"),
        ({"position": "generated[2:1]"}, "position"),
        ({"stride": 0}, "stride"),
        ({"stride": True}, "stride"),
        ({"position": 4, "stride": 2}, "stride"),
        ({"position": 4, "until": UntilPolicy("fixed_count", 2)}, "until"),
        ({"until": 3}, "until"),
        ({"until": None}, "until"),
        ({"until": "never"}, "until.kind"),
        ({"until": {"fixed_count": 0}}, "until.count"),
        ({"queue_depth": 4}, "queue_depth"),
        ({"execution_mode": "async", "queue_depth": 0}, "queue_depth"),
        ({"execution_mode": "async", "probe_kind": "single_shot"}, "probe_kind"),
        ({"execution_mode": "async", "intervention": InterventionPolicy("block_until_signal", 9)}, "intervention"),
        ({"probe_type": ""}, "probe_type"),
        ({"probe_type": " "}, "probe_type"),
        ({"intervention": {"mode": "reject"}}, "intervention"),
        ({"intervention": "reject"}, "intervention"),
        ({"probe_args": {"a": float("nan")}}, "probe_args.a"),
        ({"probe_args": {"a": {1: 2}}}, "probe_args.a"),
        ({"probe_args": {"a": object()}}, "probe_args.a"),
        ({"dtype": "int4"}, "dtype"),
        ({"overflow": "spill"}, "overflow"),
        ({"token_ids": 1}, "token_ids"),
        ({"reduce": 3}, "reduce"),
        ({"reduce": {}}, "reduce"),
        ({"reduce": {"project": " "}}, "reduce.project"),
        ({"reduce": {"project": "m.npy", "mean": 1}}, "reduce"),
        ({"on_unavailable": "pray"}, "on_unavailable"),
    ],
)
def test_a_wrong_field_is_named(changes, field):
    with pytest.raises(SpecValidationError) as caught:
        make(**changes)
    assert caught.value.field == field
    assert caught.value.point == (None if field == "name" else "mid")


def test_a_point_is_frozen_and_keeps_its_own_copy_of_plain_data():
    args = {"weights": [1, 2]}
    point = make(probe_args=args)
    args["weights"].append(3)
    assert point.probe_args == {"weights": [1, 2]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.stride = 2
    assert point.tensor_type is TensorType.RESIDUAL_STREAM
    assert hash(point) == hash(make(probe_args={"weights": [1, 2]}))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, ProbeKind.TRAJECTORY),
        ({"position": "prompt[-1]"}, ProbeKind.SINGLE_SHOT),
        ({"position": "prompt[-1]", "execution_mode": "async"}, ProbeKind.TRAJECTORY),
        ({"probe_kind": "single_shot"}, ProbeKind.SINGLE_SHOT),
    ],
)
def test_probe_kind_follows_from_the_position_unless_given(changes, kind):
    assert make(**changes).probe_kind is kind


def test_point_hash_is_pinned_and_tells_points_apart():
    # Pinned: a stream's hash is compared across releases.
    assert make().point_hash() == "677730bbab374ba763a131e8cd8e77c829e7ae230655a119fbb2d1f973f26308"
    variants = [make(), make(layers=[3, 4]), make(stride=2), make(token_ids=False), make(probe_args={"a": 1})]
    assert len({point.point_hash() for point in variants}) == len(variants)


@given(points())
def test_equal_points_have_equal_hashes(point):
    assert dataclasses.replace(point).point_hash() == point.point_hash()


def test_spec_is_iterable_and_finds_points_by_name():
    spec = ProbeSpec(1, [make(), make(name="late")])
    assert [point.name for point in spec] == spec.names == ["mid", "late"]
    assert len(spec) == 2
    assert spec.get("late") is spec.extraction_points[1]
    assert spec.get("absent") is None
    with pytest.raises(SpecValidationError, match="point 'mid' field 'name'"):
        ProbeSpec(1, [make(), make()])
    for version in (2, True, "1", None):
        with pytest.raises(SpecValidationError, match="version"):
            ProbeSpec(version, [])
    with pytest.raises(SpecValidationError, match="accepted: extraction points"):
        ProbeSpec(1, [{"name": "mid"}])


def test_until_may_be_given_as_a_file_has_it():
    assert make(until={"fixed_count": 3}).until == UntilPolicy("fixed_count", 3)
    assert make(until="generation_end") == make()


def test_the_constructor_takes_its_fields_in_the_order_of_the_contract():
    point = ExtractionPoint(
        "mid", (3,), "residual_stream", "generated[*]", 2, UntilPolicy(), "p", "trajectory", "async", 8, None, {"a": 1}
    )
    assert (point.stride, point.probe_type, point.queue_depth, point.probe_args) == (2, "p", 8, {"a": 1})
