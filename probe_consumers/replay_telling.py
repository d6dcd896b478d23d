"""A replay's results in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probe_consumers.passed_over import PassedOver
from probe_consumers.replay_command import REPORT, ReplayResult
from probe_consumers.replay_merge import STARTED_BEFORE, SUMMARY, UNFINISHED

_NAMED = 5


def told(out: Path, result: ReplayResult) -> str:
    """Return what was read, what of it was gone or cut, what the probes said, and how it compares."""
    return "".join(line + "\n" for line in _lines(out, result))


def _lines(out: Path, result: ReplayResult) -> Iterator[str]:
    summary = result.summary
    records = summary["records"]
    yield f"{records['read']} records ({records['bytes'] / 1e6:.1f} MB), {summary['scores']} scores"
    if summary["requests"] is not None:
        yield f"  of {summary['requests']} requests; {records['of_other_requests']} records are of others"
    yield from _gone(summary)
    for name, probe in summary["by_probe"].items():
        said = ", ".join(f"{verdict} {count}" for verdict, count in probe["verdicts"].items()) or "none"
        yield f"  {name}: {probe['streams']} streams: {said}" + (
            f"; errors {probe['errors']}" if probe["errors"] else ""
        )
    if result.diff is not None:
        diff = result.diff
        state = "empty" if diff.empty else "equal" if diff.equal else f"{diff.differences_total} differences"
        against = "nobody" if result.service is None else result.service
        yield (
            f"compared with {against}: {diff.verdicts_compared} verdicts and {diff.scores_compared} scores: {state} "
            f"(largest difference {diff.max_abs_diff:g}, {diff.decisions_changed} decisions changed)"
        )
        if diff.not_judged_yet:
            named = list(dict.fromkeys(name.request_id for name in diff.waiting))
            more = " ..." if len(named) > _NAMED else ""
            yield (
                f"  {diff.not_judged_yet} results are not judged yet by {against}, which has not come to them: "
                f"{', '.join(named[:_NAMED])}{more}"
            )
        if diff.unreadable:
            yield f"  {PassedOver(diff.unreadable, diff.unreadable_first).told()}"
        yield f"{out / REPORT}"
    yield f"{out / SUMMARY}"


def _gone(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not in the results, and why."""
    for number, gone in summary["deleted"].items():
        count = "an unknown number of" if gone["offsets"] is None else str(gone["offsets"])
        left = "nothing is left" if gone["left_from"] is None else f"what is left begins at {gone['left_from']}"
        yield f"  partition {number}: retention has deleted {count} offsets; {left}"
    cut = summary["cut"]
    if cut[STARTED_BEFORE]["count"]:
        yield f"  {cut[STARTED_BEFORE]['count']} streams started before the range: not judged"
    if cut[UNFINISHED]["count"]:
        yield f"  {cut[UNFINISHED]['count']} streams are open at its end: no result"
    for cause, count in summary["records"]["left_out"].items():
        yield f"  {count} records are left out: {cause}"
