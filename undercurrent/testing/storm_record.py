"""What the record of a bench says as a whole: an audit of its topics, and every commit of its workers' group."""

from __future__ import annotations

from undercurrent.protocol.audit import FindingKind
from undercurrent.protocol.epochs import decode_metadata
from undercurrent.testing.commit_log import commits_of
from undercurrent.testing.engine_bench import EngineBench


def audited(bench: EngineBench) -> list[str]:
    """Return, in words, what an audit of all topics finds, without what only a probe host would have written."""
    findings = bench.audit(unjudged=bench.plan.points)
    return [str(finding) for finding in findings if finding.kind is not FindingKind.NOT_DEAD_LETTERED]


def taken_back(bench: EngineBench) -> list[str]:
    """Return, in words, every commit of the workers' group that went behind an earlier one of its partition."""
    epochs: dict[int, int] = {}
    finished: dict[int, tuple[int, frozenset[int]]] = {}
    wrong = []
    for entry in commits_of(bench.settings, f"{bench.plan.prefix}.engine"):
        number, position = entry.partition.number, decode_metadata(entry.offset, entry.metadata)
        low, above = finished.get(number, (0, frozenset()))
        lost = [o for o in above if o >= position.offset and o not in position.finished]
        if position.epoch < epochs.get(number, 0) or position.offset < low or lost:
            wrong.append(f"a commit went back: {entry} after epoch {epochs.get(number)}, offset {low}, {sorted(above)}")
        epochs[number] = position.epoch
        finished[number] = position.offset, position.finished
    return wrong
