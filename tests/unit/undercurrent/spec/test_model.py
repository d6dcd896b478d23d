"""From pydantic's findings to the one error that names point and field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from undercurrent.spec.model import SpecModel, accepted_keys, as_spec_error

POINT = {"name": "mid", "layers": [3], "tensor_type": "attn_out", "position": "*"}


def error_of(*points, **others):
    data = {"extraction_points": list(points), **others}
    with pytest.raises(ValidationError) as caught:
        SpecModel.model_validate(data)
    return as_spec_error(caught.value.errors(include_url=False), data)


@pytest.mark.parametrize(
    ("path", "some"),
    [
        ((), {"name", "layers", "on_unavailable"}),
        (("until",), {"kind", "count", "stop_token"}),
        (("intervention",), {"mode", "timeout_ms", "on_timeout"}),
    ],
)
def test_accepted_keys_are_those_of_the_place(path, some):
    assert some <= set(accepted_keys(path))
    assert ("name" in accepted_keys(path)) is (path == ())


def test_the_first_finding_gives_point_and_field_and_the_others_are_told():
    error = error_of(POINT, {**POINT, "name": "late", "stride": 0, "token_ids": 1}, surprise=1)
    assert (error.point, error.field) == ("late", "stride")
    text = str(error)
    assert "point 'late' field 'token_ids'" in text
    assert "field 'surprise': unknown key" in text


def test_very_many_findings_stay_readable():
    error = error_of(*({**POINT, "stride": 0, "name": f"p{n}"} for n in range(500)))
    assert error.point == "p0"
    assert str(error).count("field 'stride'") == 6
    assert len(str(error)) < 1000


def test_a_point_without_a_name_is_numbered():
    assert error_of(POINT, {"layers": 1}).point == "number 1"
