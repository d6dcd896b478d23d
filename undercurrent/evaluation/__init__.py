"""The offline side: figures of probes and text baselines, by request, on data that no part of a probe was fitted on.

    data = evaluation.load("DIR")         # a folder that `undercurrent dataset export` wrote
    report = evaluation.evaluate(scores, labels, groups=users)

Needs the extra `eval` (scikit-learn, scipy, pandas, plotly), which do the statistics, the tables and the plots. It is
loaded with the first name that is used, since a probe host compares verdicts without it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercurrent.evaluation.comparing import Comparison, compare
    from undercurrent.evaluation.dataset import Dataset
    from undercurrent.evaluation.evaluating import evaluate
    from undercurrent.evaluation.options import Evidence, Options
    from undercurrent.evaluation.report import Report

__all__ = ["Comparison", "Evidence", "Options", "Report", "compare", "evaluate", "load"]

_HOME = {
    "Comparison": "comparing",
    "Evidence": "options",
    "Options": "options",
    "Report": "report",
    "compare": "comparing",
    "evaluate": "evaluating",
}


def load(folder: str | Path) -> Dataset:
    """Open a dataset.

    Args:
        folder: that `undercurrent dataset export` wrote.

    Raises:
        DatasetError: it is none, or was not finished.
    """
    from undercurrent.evaluation.dataset import Dataset

    return Dataset(Path(folder))


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
