"""A replay's results in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probe_consumers.passed_over import PassedOver
from probe_consumers.replay_command import REPORT, ReplayResult
from probe_consumers.replay_merge import STARTED_BEFORE, SUMMARY, UNFINISHED
from undercurrent.counts import counted

_NAMED = 5


def told(out: Path, result: ReplayResult) -> str:
    """Return what was read, what of it was gone or cut, what the probes said, and how it compares."""
    return "".join(line + "\n" for line in _lines(out, result))


def _lines(out: Path, result: ReplayResult) -> Iterator[str]:
    summary = result.summary
    records = summary["records"]
    size = f"{records['bytes'] / 1e6:.1f} MB"
    yield f"{counted(records['read'], 'record')} ({size}), {counted(summary['scores'], 'score')}"
    if summary["requests"] is not None:
        others = counted(records["of_other_requests"], "record is", "records are")
        yield f"  of {counted(summary['requests'], 'request')}; {others} of others"
    yield from _gone(summary)
    for name, probe in summary["by_probe"].items():
        said = ", ".join(f"{verdict} {count}" for verdict, count in probe["verdicts"].items()) or "none"
        yield f"  {name}: {counted(probe['streams'], 'stream')}: {said}" + (
            f"; errors {probe['errors']}" if probe["errors"] else ""
        )
    if result.diff is not None:
        diff = result.diff
        state = "empty" if diff.empty else "equal" if diff.equal else counted(diff.differences_total, "difference")
        against = "nobody" if result.service is None else result.service
        yield (
            f"compared with {against}: {counted(diff.verdicts_compared, 'verdict')} and "
            f"{counted(diff.scores_compared, 'score')}: {state} "
            f"(largest difference {diff.max_abs_diff:g}, {counted(diff.decisions_changed, 'decision')} changed)"
        )
        if diff.not_judged_yet:
            named = list(dict.fromkeys(name.request_id for name in diff.waiting))
            more = " ..." if len(named) > _NAMED else ""
            yield (
                f"  {counted(diff.not_judged_yet, 'result is', 'results are')} not judged yet by {against}, which has "
                "not come that far: "
                f"{', '.join(named[:_NAMED])}{more}"
            )
        if diff.unreadable:
            yield f"  {PassedOver(diff.unreadable, diff.unreadable_first).told()}"
        yield f"{out / REPORT}"
    yield f"{out / SUMMARY}"


def _gone(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not in the results, and why."""
    for number, gone in summary["deleted"].items():
        count = "an unknown number of" if gone["offsets"] is None else f"{gone['offsets']:,}"
        left = "nothing is left" if gone["left_from"] is None else f"what is left begins at {gone['left_from']}"
        yield f"  partition {number}: retention has deleted {count} offsets; {left}"
    for where, left in summary.get("not_read", {}).items():
        count = left["end"] - left["start"]
        yield f"  {where}: {count} offsets from {left['start']} on are not read: what they join is not in the range"
    cut = summary["cut"]
    if cut[STARTED_BEFORE]["count"]:
        yield f"  {counted(cut[STARTED_BEFORE]['count'], 'stream')} started before the range: not judged"
    if cut[UNFINISHED]["count"]:
        yield f"  {counted(cut[UNFINISHED]['count'], 'stream')} open at its end: no result"
    for cause, count in summary["records"]["left_out"].items():
        yield f"  {counted(count, 'record')} left out: {cause}"
