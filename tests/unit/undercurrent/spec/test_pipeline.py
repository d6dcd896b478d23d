"""What a pipeline refuses, by name."""

from __future__ import annotations

import dataclasses

import pytest

from undercurrent.errors import SpecValidationError
from undercurrent.spec import CaptureDtype, ExtractionPoint, ProbeSpec, UntilPolicy, check_pipeline

POINT = ExtractionPoint("mid", 3, "residual_stream", "generated[*]", execution_mode="async")


def test_an_async_point_runs():
    others = [
        dataclasses.replace(POINT, name="prompt", position="prompt[-1]"),
        dataclasses.replace(POINT, name="end", position="generated[-2]"),
        dataclasses.replace(POINT, name="sentence", until=UntilPolicy("stop_token", None, ".")),
    ]
    check_pipeline(ProbeSpec(1, [POINT, *others]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"execution_mode": "inline"}, "execution_mode"),
        ({"name": "über/punkt"}, "name"),
        ({"name": ".hidden"}, "name"),
        ({"name": "x" * 151}, "name"),
    ],
)
def test_what_it_cannot_honour_is_refused_by_name(changes, field):
    point = dataclasses.replace(POINT, **changes)
    with pytest.raises(SpecValidationError) as caught:
        check_pipeline(ProbeSpec(1, [dataclasses.replace(POINT, name="fine"), point]))
    assert (caught.value.point, caught.value.field) == (point.name, field)


@pytest.mark.parametrize("dtype", CaptureDtype)
def test_every_encoding_is_accepted(dtype):
    check_pipeline(ProbeSpec(1, [dataclasses.replace(POINT, dtype=dtype, reduce={"project": "m.npy"})]))
