"""Every promise of the demo can be broken, and each break is said."""

import json
from dataclasses import replace
from typing import Any

import pytest

from undercurrent.cli.demo.report import Replayed, Row, broken_promises, report

FIGURES: dict[str, Any] = {
    "auroc_heldout": 0.999,
    "auroc_text_baseline": 0.51,
    "n_heldout": 600,
    "heldout_overlap": 0,
    "tpr_fpr": {"tpr": {"value": 1.0}, "fpr": {"value": 0.0}},
}
SAME = Replayed(equal=True, verdicts=8, scores=900)
STOPPED = Row(
    id="vault-1",
    label="vault",
    outcome="aborted",
    generated_tokens=12,
    reason="",
    probe_error="",
    text="First, the ",
    score_at_abort=3.5,
    abort_token_pos=70,
    abort_applied_at=11,
    latency_ms=40.0,
    stages_ms={"applied": 40.0},
    reference_text="First, the lamps were lit. Code 482913.",
    reference_secret=32,
)
LEFT = Row(
    id="other-1",
    label="other",
    outcome="completed",
    generated_tokens=30,
    reason="",
    probe_error="",
    text="First, the lamps. No code.",
    score_at_abort=None,
    abort_token_pos=None,
    abort_applied_at=None,
    latency_ms=None,
    stages_ms={},
    reference_text="First, the lamps. No code.",
    reference_secret=None,
)


def test_a_good_demo_breaks_no_promise() -> None:
    assert broken_promises([STOPPED, LEFT], FIGURES, SAME) == []
    assert STOPPED.lead_tokens == 20
    assert LEFT.lead_tokens is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": "completed"}, "should have been stopped, but ended completed"),
        ({"text": "Code 4"}, "has a digit"),
        ({"generated_tokens": 35}, "was stopped 3 tokens after its first digit"),
        ({"abort_applied_at": 34}, "was stopped 2 tokens after its first digit"),
        ({"reference_secret": None}, "gives no digit when nobody stops it"),
        ({"reference_text": "Then, the"}, "went another way"),
        ({"reference_text": None}, "went another way"),
    ],
)
def test_a_vault_request_that_was_not_stopped_in_time_is_said(change: dict[str, Any], said: str) -> None:
    broken = broken_promises([replace(STOPPED, **change), LEFT], FIGURES, SAME)
    assert any(said in line for line in broken)


@pytest.mark.parametrize("outcome", ["aborted", "failed", "unknown"])
def test_another_request_must_complete(outcome: str) -> None:
    assert any("other-1" in line for line in broken_promises([STOPPED, replace(LEFT, outcome=outcome)], FIGURES, SAME))


def test_why_a_request_failed_is_said() -> None:
    failed = replace(LEFT, outcome="failed", reason="the prompt has no tokens")
    assert any(
        "failed (the prompt has no tokens)" in line for line in broken_promises([STOPPED, failed], FIGURES, SAME)
    )


def test_a_probe_that_gave_up_is_said() -> None:
    broken = broken_promises([STOPPED, replace(LEFT, probe_error="another model")], FIGURES, SAME)
    assert broken == ["the probe gave up on other-1: another model"]


def test_a_viewers_prompt_may_end_either_way_but_not_fail() -> None:
    yours = replace(LEFT, id="yours-1", label="yours")
    for outcome, broken in (("completed", 0), ("aborted", 0), ("failed", 1)):
        rows = [STOPPED, LEFT, replace(yours, outcome=outcome)]
        assert len(broken_promises(rows, FIGURES, SAME)) == broken


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auroc_heldout": 0.95}, "held-out AUROC is 0.950"),
        ({"auroc_text_baseline": 0.65}, "text alone reaches AUROC 0.650"),
        ({"heldout_overlap": 2}, "2 people"),
    ],
)
def test_figures_below_the_promise_are_said(change: dict[str, Any], said: str) -> None:
    assert any(said in line for line in broken_promises([STOPPED, LEFT], FIGURES | change, SAME))


@pytest.mark.parametrize(
    ("replayed", "said"),
    [
        (Replayed(equal=False, verdicts=8, scores=900, summary="1 score differs"), "1 score differs"),
        (Replayed(equal=True, verdicts=0, scores=0), "compared nothing"),
        (Replayed(equal=True, verdicts=8, scores=0), "compared nothing"),
    ],
)
def test_a_replay_that_differs_or_compares_nothing_is_said(replayed: Replayed, said: str) -> None:
    assert any(said in line for line in broken_promises([STOPPED, LEFT], FIGURES, replayed))


def test_a_demo_without_one_kind_of_request_shows_nothing() -> None:
    assert any("'other'" in line for line in broken_promises([STOPPED], FIGURES, SAME))
    assert any("'vault'" in line for line in broken_promises([LEFT], FIGURES, SAME))


def test_the_report_is_json_with_the_keys_that_others_read() -> None:
    rows = [STOPPED, replace(STOPPED, id="vault-2", latency_ms=60.0, generated_tokens=20), LEFT]
    made = json.loads(json.dumps(report(rows, FIGURES, SAME, broker={"kind": "given"}, versions={"vllm": "0.32.0"})))
    assert set(made["requests"][0]) >= {
        "id",
        "label",
        "outcome",
        "generated_tokens",
        "score_at_abort",
        "first_secret_token_index",
        "abort_applied_at",
        "lead_tokens",
    }
    assert made["latency_ms"] == {"p50": 50.0, "p99": 59.8}
    assert made["least_lead_tokens"] == 12
    assert (made["replay_equal"], made["verdicts_compared"]) == (True, 8)
    assert {"auroc_heldout", "auroc_text_baseline", "n_heldout", "heldout_overlap", "tpr_fpr"} <= set(made)
    assert made["broker"] == {"kind": "given"}
