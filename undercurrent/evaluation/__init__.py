"""The offline side: figures of probes and text baselines, by request, on data that no part of a probe was fitted on.

    data = evaluation.load("DIR")         # a folder that `undercurrent dataset export` wrote

Needs the extra `eval` (scikit-learn, scipy, pandas), which do the statistics and the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercurrent.evaluation.dataset import Dataset

__all__ = ["load"]


def load(folder: str | Path) -> Dataset:
    """Open a dataset.

    Args:
        folder: that `undercurrent dataset export` wrote.

    Raises:
        DatasetError: it is none, or was not finished.
    """
    # Imported here: a probe host reads `evaluation.diff` and needs no pandas.
    from undercurrent.evaluation.dataset import Dataset

    return Dataset(Path(folder))
