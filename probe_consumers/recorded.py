"""Recorded requests as input of a command, wherever they are: a dataset's folder, or topics that become one first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from probe_consumers.dataset_export import ExportOrder, Progress, export, unseen
from probe_consumers.dataset_source import Source
from undercurrent.evaluation.dataset import Dataset
from undercurrent.topics import TopicPlan


@dataclass(frozen=True, slots=True)
class TopicRange:
    """What of a pipeline's topics is read.

    Args:
        source: opens them.
        plan: their names.
        order: points, range and split.
    """

    source: Source
    plan: TopicPlan
    order: ExportOrder


@contextmanager
def recorded(source: Path | TopicRange, *, keep: Path | None = None, progress: Progress = unseen) -> Iterator[Dataset]:
    """Give recorded requests as a dataset.

    Topics are exported first, bounded in memory; without `keep` into a temporary folder (of TMPDIR) that is gone
    afterwards.

    Args:
        source: a dataset's folder, or topics.
        keep: folder in which the dataset of topics stays.
        progress: shows how far the export is.

    Raises:
        DatasetError: the folder is no dataset, or `keep` holds something else.
        TopicError: a point has no topic.
        ReplayError: a part of a topic cannot be read.
    """
    if isinstance(source, Path):
        yield Dataset(source)
    elif keep is not None:
        export(source.source, source.plan, source.order, keep, progress)
        yield Dataset(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="undercurrent-") as folder:
            export(source.source, source.plan, source.order, Path(folder), progress)
            yield Dataset(Path(folder))
