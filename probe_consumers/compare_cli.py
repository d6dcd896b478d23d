"""`undercurrent probe compare A B [SOURCE]`: two probes on the same requests, or two evaluations of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probe_consumers.recording_options import SOURCE_HELP, JudgingOptions
from undercurrent.cli import progress as shown
from undercurrent.cli.evaluation_options import CaseOptions, check_out, named, plain_console, progress
from undercurrent.cli.grouping import with_options
from undercurrent.cli.probe_options import OutFolder, options_named
from undercurrent.counts import counted
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from undercurrent.evaluation.comparing import Comparison
    from undercurrent.evaluation.dataset import Dataset
    from undercurrent.evaluation.dataset_evaluation import Case
    from undercurrent.evaluation.report import Report

app = typer.Typer(help="Compare two probes on the same requests.", add_completion=False)


@app.command()
@with_options("read", JudgingOptions)
@with_options("judge", CaseOptions)
def compare(
    first: Annotated[str, typer.Argument(help="A probe; or, without SOURCE, a folder of `probe evaluate`.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    out: OutFolder,
    source: Annotated[str | None, typer.Argument(help=SOURCE_HELP)] = None,
    *,
    judge: CaseOptions,
    read: JudgingOptions,
) -> None:
    """Tell how two probes differ: paired bootstrap, McNemar, and the requests on which they disagree.

    With SOURCE, a dataset's folder or topic:POINT, both probes are judged on its test part first, at their own
    thresholds, and their reports are written to OUT/first and OUT/second. Without it, FIRST and SECOND are folders of
    earlier evaluations of the same test part. Writes compare.html, compare.json with its schema, and
    disagreements.parquet.
    """
    check_out(out, judge.force, "compare.json")
    from undercurrent.evaluation.comparing import compare as compare_reports
    from undercurrent.evaluation.comparing_page import write
    from undercurrent.evaluation.resampling import Bootstrap

    if source is None:
        read.check_unused("two evaluations are compared")
        reports = [_read(folder) for folder in (first, second)]
    else:
        from probe_consumers.recorded import recorded
        from undercurrent.evaluation.dataset_evaluation import Case

        reading = judge.reading(read.regrouped(source))
        case = Case(reading=reading, options=judge.options(reading), point=judge.point, split_file=judge.split_file)
        with (
            options_named(),
            recorded(read.recording(source), keep=read.dataset, progress=partial(shown.progress, "exporting")) as data,
        ):
            reports = [_judged(probe, data, case) for probe in (first, second)]
        for report, place in zip(reports, ("first", "second"), strict=True):
            report.write(out / place)
    found = compare_reports(*reports, bootstrap=Bootstrap(judge.rounds, judge.seed, judge.confidence))
    write(found, reports[0], reports[1], out)
    _tell(found)
    sys.stdout.write(f"{out / 'compare.html'}\n")


def _read(folder: str) -> Report:
    from undercurrent.evaluation.report import Report

    if (Path(folder) / "probe.json").exists():
        raise ConfigError(f"{folder} is a probe: name the SOURCE to judge it on, or two folders of `probe evaluate`")
    return Report.read(Path(folder))


def _judged(probe: str, data: Dataset, case: Case) -> Report:
    from undercurrent.evaluation.dataset_evaluation import judge_on
    from undercurrent.evaluation.scoring import as_loaded

    loaded = as_loaded(probe)
    name = named(loaded, probe)
    mine = replace(case, options=replace(case.options, name=name))
    reader = f"compare {name} ({loaded.fingerprint[:12]}) on label {case.reading.label}"
    return judge_on(data, loaded, mine, reader, told=progress).report


def _tell(found: Comparison) -> None:
    console = plain_console()
    console.print(
        f"{found.first} minus {found.second}, on {counted(found.n, 'request')} of both test parts", markup=False
    )
    rows = (("AUROC", found.auroc, None), ("TPR", found.tpr, found.positives), ("FPR", found.fpr, found.negatives))
    for name, figure, test in rows:
        chance = "" if test is None or test.p is None else f", McNemar p = {test.p:.3g}"
        console.print(f"{name} {figure}{chance}", markup=False)
    console.print(f"they disagree on {counted(len(found.disagreements), 'request')}", markup=False)
