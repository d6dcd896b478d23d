"""What counts as the same, and what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from undercurrent.evaluation.diff import LISTED_DIFFERENCES, collect, compare
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictAction, VerdictKind


def verdict(kind=VerdictKind.RESULT, request="r", probe="p", **fields):
    fields = {"action": VerdictAction.CONTINUE, "verdict": "clear", "score": 0.5} | fields
    return ProbeVerdict(
        request_id=request,
        attempt=1,
        point="residual",
        probe=probe,
        service="s",
        kind=kind,
        mode=BindingMode.SHADOW,
        source_partition=0,
        source_offset=9,
        decided_at_us=fields.pop("decided_at_us", 0),
        **fields,
    )


def scores(values, first=0, layers=(3,), **fields):
    values = np.asarray(values, "<f4").reshape(-1, len(layers))
    positions = np.arange(first, first + len(values), dtype="<i4")
    return verdict(
        VerdictKind.WATERMARK,
        score_positions=positions.tobytes(),
        score_layers=layers,
        scores=values.tobytes(),
        **fields,
    )


LIVE = (scores([1, 2]), scores([3], first=2), verdict())


def diff(live, replay):
    return compare(collect(live), collect(replay))


def test_equal_is_equal_however_the_scores_were_cut():
    report = diff(LIVE, [scores([1, 2, 3]), verdict(decided_at_us=99)])
    assert (report.equal, report.empty) == (True, False)
    assert (report.verdicts_compared, report.scores_compared, report.differences_total) == (1, 3, 0)


def test_one_flipped_bit_of_a_score_is_a_difference():
    flipped = np.nextafter(np.float32(2), np.float32(3))
    report = diff(LIVE, [scores([1, flipped, 3]), verdict()])
    assert not report.equal
    [found] = report.differences
    assert (found.what, found.token_pos, found.layer, found.live) == ("score", 1, 3, 2.0)
    assert report.max_abs_diff == pytest.approx(float(flipped) - 2)
    assert report.decisions_changed == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_scores_are_compared_by_their_bits(value):
    assert diff([scores([value]), verdict()], [scores([value]), verdict()]).equal
    report = diff([scores([value]), verdict()], [scores([0.0]), verdict()])
    assert [item.what for item in report.differences] == ["score"]


@pytest.mark.parametrize(
    ("fields", "what", "decisions"),
    [
        ({"verdict": "triggered"}, ["verdict"], 1),
        ({"action": VerdictAction.ABORT}, ["action"], 1),
        ({"score": 0.25}, ["score"], 0),
        ({"token_pos": 4}, ["token_pos"], 0),
        ({"complete": False, "missing": 1}, ["complete", "missing"], 0),
        ({"kind": VerdictKind.ERROR, "error": "x"}, ["kind", "error"], 0),
    ],
)
def test_every_word_of_a_result_is_compared(fields, what, decisions):
    report = diff(LIVE, [*LIVE[:2], replace(LIVE[2], **fields)])
    assert [item.what for item in report.differences] == what
    assert report.decisions_changed == decisions


def test_what_one_side_lacks_or_has_twice_is_a_difference():
    other = [replace(item, request_id="q") for item in LIVE]
    assert [item.what for item in diff([*LIVE, *other], LIVE).differences] == ["absent_replay"]
    assert [item.what for item in diff(LIVE, [*LIVE, *other]).differences] == ["absent_live"]
    assert [item.what for item in diff(LIVE, LIVE[1:]).differences] == ["score_absent_replay"] * 2
    assert [item.what for item in diff(LIVE[1:], LIVE).differences] == ["score_absent_live"] * 2
    assert [item.what for item in diff([*LIVE, LIVE[2]], LIVE).differences] == ["doubled_live"]
    assert [item.what for item in diff(LIVE, [LIVE[1], *LIVE]).differences] == ["doubled_replay"]


def test_nothing_is_empty_never_equal():
    for live, replay in (([], []), (LIVE, []), ([], LIVE), (LIVE[:2], LIVE[:2])):
        report = diff(live, replay)
        assert (report.empty, report.equal) == (True, False)


def test_differences_are_all_counted_and_not_all_listed():
    count = LISTED_DIFFERENCES + 10
    report = diff([scores(np.zeros(count)), verdict()], [scores(np.ones(count)), verdict()])
    assert (report.differences_total, len(report.differences)) == (count, LISTED_DIFFERENCES)
    assert report.to_dict()["differences_total"] == count
