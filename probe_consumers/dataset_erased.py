"""Requests of a folder that were erased after it was written: a folder is not told, so the topic is asked."""

from __future__ import annotations

from pathlib import Path

from undercurrent.acls import Service
from undercurrent.counts import counted
from undercurrent.errors import DatasetError, UnreachableError
from undercurrent.evaluation.dataset_format import MANIFEST, read_manifest
from undercurrent.evaluation.erasing import requests_in
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.erasures import read_erasures
from undercurrent.pipeline import interactive, permitted
from undercurrent.topics import TopicPlan

_NAMED = 5
_GENERATIONS = ".generations"


def prefix_of(folder: Path) -> str | None:
    """Return the prefix of the topics that a dataset was exported from; None where it does not say.

    Raises:
        DatasetError: its manifest cannot be read.
    """
    if not (folder / MANIFEST).exists():
        return None
    topics = (read_manifest(folder).get("source") or {}).get("topics") or {}
    # The shortest: a point may have that name.
    return (
        min((name for name in topics if name.endswith(_GENERATIONS)), key=len, default="").removesuffix(_GENERATIONS)
        or None
    )


def erased_in(folder: Path, settings: KafkaSettings, *prefixes: str | None) -> list[str]:
    """Return the requests of a folder that are erased, sorted.

    Args:
        folder: a dataset, or anything with tables of requests.
        settings: the connection.
        prefixes: of pipelines whose marks count, besides that of the dataset's own topics.

    Raises:
        DatasetError: it has no table of requests, or one is damaged.
        NotAllowedError: the marks may not be read.
        UnreachableError: the marks could not be read in time.
    """
    names = requests_in(folder)
    found: set[str] = set()
    for prefix in filter(None, {prefix_of(folder), *prefixes}):
        plan = TopicPlan(prefix=prefix)
        # A topic that may not be read looks like one that is not there.
        permitted(settings, Service.REPLAY, plan, only={plan.erasures})
        erasures = read_erasures(settings, plan.erasures)
        found |= {name for name in names if name in erasures}
    return sorted(found)


def refuse_erased(folder: Path, settings: KafkaSettings, *prefixes: str | None) -> None:
    """Refuse a dataset that holds a request that is erased; see `erased_in`.

    Raises:
        DatasetError: it does, or it has no table of requests.
        UnreachableError: the marks could not be read in time.
    """
    if erased := erased_in(folder, settings, *prefixes):
        named = ", ".join(erased[:_NAMED]) + (", ..." if len(erased) > _NAMED else "")
        raise DatasetError(
            f"{folder}: holds {counted(len(erased), 'request that is', 'requests that are')} erased ({named}); "
            f"`undercurrent dataset erase {folder}` with the same --config or --bootstrap-servers takes them out"
        )


def ask_before_reading(folder: Path, settings: KafkaSettings, *prefixes: str | None) -> None:
    """Refuse a dataset that holds a request that is erased, for a command that can do `--offline`; see `refuse_erased`.

    Raises:
        DatasetError: it does, or it has no table of requests.
        UnreachableError: no broker answered, or the marks could not be read in time.
    """
    try:
        refuse_erased(folder, interactive(settings), *prefixes)
    except UnreachableError as exc:
        raise UnreachableError(
            f"{exc}; it would say whether a request of {folder} was erased since: --offline does not ask"
        ) from exc
