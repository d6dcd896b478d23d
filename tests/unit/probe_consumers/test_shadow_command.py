"""Verdicts of a candidate and of the deployed version, brought together by request."""

from __future__ import annotations

import pytest

from probe_consumers.shadow_command import Pairs, chosen_version, labels_for, table_of
from undercurrent.codec import Codec
from undercurrent.errors import ConfigError
from undercurrent.evaluation.shadow import shadow_report
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictAction, VerdictKind

CODEC = Codec()
CONTINUE, ABORT = VerdictAction.CONTINUE, VerdictAction.ABORT


def verdict(request_id, probe, action=CONTINUE, kind=VerdictKind.RESULT, **fields):
    named = {"attempt": 1, "service": "g", "probe_version": "2", "probe_fingerprint": "f2", "score": 1.0} | fields
    return ProbeVerdict(
        request_id=request_id,
        point="p",
        probe=probe,
        kind=kind,
        mode=BindingMode.SHADOW,
        action=action,
        source_partition=0,
        source_offset=0,
        decided_at_us=0,
        **named,
    )


def paired(*verdicts):
    pairs = Pairs("guard", "g")
    pairs.take([Record("v", 0, at, b"k", CODEC.encode(item), 0, ()) for at, item in enumerate(verdicts)], CODEC)
    return pairs


def test_a_record_that_cannot_be_read_counts_for_nothing_and_is_named():
    values = [CODEC.encode(item) for item in both("a", candidate=ABORT)]
    pairs = Pairs("guard", "g")
    pairs.take([Record("v", 0, at, b"k", value, 0, ()) for at, value in enumerate([values[0], b"?", *values])], CODEC)
    judged, failed = pairs.judged("f2")
    assert ([row.request_id for row in judged], failed) == (["a"], 0)
    assert pairs.passed_over.told().startswith("1 record cannot be read and counts for nothing: v[0] offset 1: ")


def both(request_id, deployed=CONTINUE, candidate=CONTINUE, **fields):
    return [
        verdict(request_id, "guard", deployed, **{"probe_version": "1", "probe_fingerprint": "f1"} | fields),
        verdict(request_id, "guard@candidate", candidate, **fields),
    ]


def test_a_request_counts_once_by_its_last_attempt_and_by_any_of_its_children():
    pairs = paired(
        *both("a", candidate=ABORT),
        *both("a", attempt=2),
        *both("b", index=0),
        *both("b", index=1, candidate=ABORT),
        *both("c", service="other"),
        verdict("d", "guard"),
        verdict("e", "else@candidate"),
    )
    judged, failed = pairs.judged("f2")
    assert {(row.request_id, row.deployed_acts, row.candidate_acts) for row in judged} == {
        ("a", False, False),
        ("b", False, True),
    }
    assert failed == 0


def test_an_abort_that_was_sent_cuts_and_one_that_was_not_does_not():
    signal = {"kind": VerdictKind.SIGNAL, "action": ABORT}
    pairs = paired(
        verdict("a", "guard", **signal, command_id="c"),
        *both("a", deployed=ABORT),
        verdict("b", "guard", **signal),
        *both("b", deployed=ABORT),
    )
    judged, _ = pairs.judged("f2")
    assert {row.request_id: row.cut for row in judged} == {"a": True, "b": False}
    assert "not identifiable (1 cut)" in str(table_of(shadow_report(judged, {}))[0])


def test_errors_and_missing_verdicts_are_counted_and_left_out():
    error = verdict("b", "guard@candidate", kind=VerdictKind.ERROR, error="x")
    pairs = paired(*both("a"), both("b")[0], error, verdict("c", "guard@candidate"))
    judged, failed = pairs.judged("f2")
    assert ([row.request_id for row in judged], failed) == (["a"], 2)


def test_without_a_candidate_the_deployed_version_stands_alone():
    pairs = paired(verdict("a", "guard", action=ABORT), verdict("b", "guard"))
    alone = pairs.or_deployed()
    version, fingerprint = chosen_version(alone, None, None)
    judged, failed = alone.judged(fingerprint)
    assert (version, fingerprint, failed) == (*alone.versions().most_common(1)[0][0], 0)
    [row] = table_of(shadow_report(judged, {}), alone=True)
    assert (row["n"], row["acts"].split()[0]) == (2, "1")
    assert "deployed acts" not in row
    both_judged = paired(*both("a"))
    assert both_judged.or_deployed() is both_judged


def test_which_candidate_is_said_where_it_is_unclear():
    pairs = paired(*both("a"), *both("b", probe_version="3", probe_fingerprint="f3"))
    assert chosen_version(pairs, None, "f3") == ("3", "f3")
    assert chosen_version(pairs, "2", "f3") == ("2", "f2")
    with pytest.raises(ConfigError, match=r"name one candidate with --version; there are 2 \(f2, 1 stream\), 3"):
        chosen_version(pairs, None, None)
    with pytest.raises(ConfigError, match="nothing was judged in this range by"):
        chosen_version(paired(verdict("a", "guard")), None, None)


def test_the_only_label_is_taken_and_of_several_one_has_to_be_named():
    told = {("a", "bad"): {"x": "positive", "y": "unknown"}, ("b", "bad"): {"x": "positive", "y": "negative"}}
    assert labels_for(told, ["a", "b"], None) == ("bad", {"a": "positive", "b": "unknown"})
    assert labels_for(told, ["z"], None) == (None, {})
    with pytest.raises(ConfigError, match="the labels bad, rude: name one with --label"):
        labels_for({**told, ("a", "rude"): {"x": "negative"}}, ["a"], None)
