"""The audit of probes that join several points."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.protocol.record_world import RecordWorld
from undercurrent.protocol.audit import Audit, FindingKind
from undercurrent.protocol.messages import (
    ActivationBlock,
    ProbeHeartbeat,
)


@pytest.fixture
def world():
    return RecordWorld()


# --- nothing is wrong


BOTH = ("residual", "attn")


def test_streams_that_are_judged_joined_are_in_order_and_forgotten(world):
    world.heartbeat("residual+attn")
    for number in range(20):
        world.joined(f"r{number}", BOTH)
    audit = world.audit()
    assert (list(audit.findings()), len(audit)) == ([], 0)


def test_a_joined_stream_without_a_verdict_is_found(world):
    world.heartbeat("residual+attn", "attn", "residual")
    world.joined("r", BOTH, said=False)
    for point in BOTH:
        world.verdict("r", point=point)
    (found,) = world.findings()
    assert (found.request_id, found.kind, found.attempt, found.index, found.point) == (
        "r", FindingKind.NO_VERDICT, 1, 0, "residual+attn",
    )  # fmt: skip
    assert world.kinds(unjudged=["residual+attn"]) == []


def test_a_joined_stream_is_missed_also_where_its_probe_is_read_of_last(world):
    world.heartbeat("residual+attn")
    world.joined("r", BOTH, said=False)
    for point in BOTH:
        world.verdict("r", point=point)
    audit = Audit("t", whole=True)
    # Topics are read side by side, in any order between them.
    for heard in sorted(world.in_order(), key=lambda heard: isinstance(heard.message, ProbeHeartbeat)):
        audit.take(heard)
    assert [(item.kind, item.point) for item in audit.findings()] == [(FindingKind.NO_VERDICT, "residual+attn")]
    assert list(audit.findings(before_ms=3)) == []  # it may be under way


def test_a_request_without_all_points_of_a_join_needs_no_verdict_of_it(world):
    world.heartbeat("residual+attn")
    world.joined("half", ("residual",), said=False)
    world.joined("other", ("attn",), said=False)
    assert world.kinds() == []
    # A probe that reads one of them alone has to say something of each from then on.
    world.heartbeat("attn")
    world.joined("later", ("attn",), said=False)
    audit = Audit("t", whole=True)
    for heard in sorted(world.in_order(), key=lambda heard: isinstance(heard.message, ProbeHeartbeat)):
        audit.take(heard)
    for found in (world.findings(), list(audit.findings())):
        assert [(item.request_id, item.kind, item.point) for item in found] == [
            ("later", FindingKind.NO_VERDICT, "attn")
        ]


def test_what_was_over_before_a_probe_joined_anything_needs_no_verdict_of_it(world):
    world.joined("r", BOTH, said=False)
    for point in BOTH:
        world.verdict("r", point=point)
    world.heartbeat("residual+attn")
    world.joined("later", BOTH)
    for point in BOTH:
        world.verdict("later", point=point)
    assert world.kinds() == []
    audit = Audit("t", whole=True)
    for heard in sorted(world.in_order(), key=lambda heard: not isinstance(heard.message, ProbeHeartbeat)):
        audit.take(heard)
    assert list(audit.findings()) == []


def test_a_joined_result_is_no_more_complete_than_what_it_joins(world):
    world.heartbeat("residual+attn")
    world.joined("r", BOTH, complete=True)
    assert world.kinds() == []
    world.change("activations.attn", lambda message: isinstance(message, ActivationBlock), lambda _: None)
    assert sorted(world.kinds()) == ["false_complete", "undeclared_gap"]


def test_a_joined_verdict_needs_a_stream_of_one_of_its_points(world):
    world.heartbeat("residual+attn")
    world.joined("r", BOTH)
    world.joined("s", ("residual",), complete=False)
    assert world.kinds() == []
    world.prompt("t")
    world.verdict("t", point="residual+attn")
    assert (FindingKind.VERDICT_UNFOUNDED, "t") in {(item.kind, item.request_id) for item in world.findings()}
