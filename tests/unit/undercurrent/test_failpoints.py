"""Places at which a process may be made to die."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from undercurrent.errors import ConfigError
from undercurrent.failpoints import VARIABLE, Failpoint, FailpointError, Fault, Place

PASS = (
    "from undercurrent.failpoints import failpoint\nfor at in range(4):\n failpoint('committed'); print(at, flush=True)"
)


def python(code, armed):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | armed
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("revoke", ("revoke", 1, Fault.KILL)),
        ("revoke:7", ("revoke", 7, Fault.KILL)),
        ("revoke=hang", ("revoke", 1, Fault.HANG)),
        ("accepted:12=raise", ("accepted", 12, Fault.RAISE)),
    ],
)
def test_the_variable_names_place_passage_and_fault(text, expected):
    found = Failpoint.parse(text)
    assert found is not None
    assert (found.place, found.passage, found.fault) == expected


@pytest.mark.parametrize(
    "text", ["revoked", "revoke:0", "revoke:x", "revoke=die", "revoke:1:2", "=kill", "revoke:1=", " "]
)
def test_what_it_cannot_name_is_refused_with_what_it_can(text):
    with pytest.raises(ConfigError) as caught:
        Failpoint.parse(text)
    assert all(place in str(caught.value) for place in get_args(Place))
    assert VARIABLE in str(caught.value)


def test_only_the_passage_that_was_asked_for_fails():
    found = Failpoint.parse("accepted:2=raise")
    assert found is not None
    found.passed("revoke")
    found.passed("accepted")
    with pytest.raises(FailpointError):
        found.passed("accepted")
    found.passed("accepted")


def test_a_process_dies_at_the_third_passage_and_not_where_nothing_is_asked():
    killed = python(PASS, {VARIABLE: "committed:3"})
    assert (killed.returncode, killed.stdout.split()) == (-9, ["0", "1"])
    assert f"{VARIABLE}: kill at passage 3 of committed" in killed.stderr
    for armed in ({}, {VARIABLE: ""}, {VARIABLE: "accepted"}):
        lived = python(PASS, armed)
        assert (lived.returncode, lived.stdout.split(), lived.stderr) == (0, ["0", "1", "2", "3"], "")
