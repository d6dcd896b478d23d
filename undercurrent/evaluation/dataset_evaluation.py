"""From a probe and a dataset to a report: the dataset's own split, every reading of its test part counted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from undercurrent.counts import counted
from undercurrent.errors import ConfigError, EvaluationError
from undercurrent.evaluation import dataset_scores
from undercurrent.evaluation.dataset import Dataset, RequestBlock
from undercurrent.evaluation.dataset_scores import Keeping, Pass
from undercurrent.evaluation.dataset_split import PARTS, SplitRule
from undercurrent.evaluation.evaluating import evaluate
from undercurrent.evaluation.figures import LEAST
from undercurrent.evaluation.fit.blocks import TokenRule
from undercurrent.evaluation.inputs import NEGATIVE, POSITIVE, UNKNOWN
from undercurrent.evaluation.layers import LayerCell
from undercurrent.evaluation.options import Evidence, Options
from undercurrent.evaluation.report import Report
from undercurrent.evaluation.request_facts import Reading, other_labels, recorded_share, request_facts, spans
from undercurrent.evaluation.splits import StoredSplit
from undercurrent.probes import LoadedProbe
from undercurrent.probes.trajectory import TrajectoryProbe

Told = Callable[[Iterable[RequestBlock], int], Iterable[RequestBlock]]

_EVIDENCE_COLUMNS = (
    "prompt", "text", "length", "time", "outcome", "judged", "holdout", "stop_at", "sampling_probability", "onset",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a probe is judged on a dataset.

    Args:
        reading: what is the truth.
        options: of the evaluation; its name, threshold and latency are filled in where they are not given.
        point: extraction point; found by what the probe reads where it is not given.
        split_file: a stored split that comes before the dataset's own for the groups that it knows; made if absent.
        token_rule: how spans label tokens.
        tokenizer: a `tokenizers.Tokenizer` of the model.
        layers: figures by layer, as the training left them.
    """

    reading: Reading
    options: Options
    point: str | None = None
    split_file: Path | None = None
    token_rule: TokenRule = "spans"  # noqa: S105 - no password
    tokenizer: Any = None
    layers: tuple[LayerCell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What came of it.

    Args:
        report: the report.
        point: whose streams were judged.
        requests: that count.
        test_reads: how often the dataset's test part was read, this time included.
        remarks: what a reader should know beside the report's notes.
    """

    report: Report
    point: str
    requests: int
    test_reads: int
    remarks: tuple[str, ...] = field(default=())


def judge_on(
    data: Dataset, loaded: LoadedProbe, case: Case, reader: str, *, told: Told = lambda blocks, _: blocks
) -> Judged:
    """Return what a probe is worth on a dataset's test part, and count the reading in its manifest.

    Args:
        data: the dataset.
        loaded: the probe.
        case: how it is judged.
        reader: who reads the test part, for the manifest.
        told: given the blocks and their number, returns them, and may show how far they are.

    Raises:
        DatasetError: there is no such label, source, key, point, or files do not go together.
        EvaluationError: the probe refuses every request, there is no test part, or it has one class only.
    """
    point = dataset_scores.point_of(data, loaded, case.point)
    why = dataset_scores.refusal(data, loaded, point)
    if why is not None:
        raise EvaluationError(f"{data.path}: the probe refuses every request at {point}: {why}")
    facts = request_facts(data, case.reading)
    stored = None if case.split_file is None else _stored_split(data, case.split_file, facts)
    if stored is not None:
        facts["part"] = _earliest(facts["part"], stored.place(list(facts["group"])), facts["group"], stored)
    _check_parts(data, facts, case.reading)
    keeping = Keeping(
        facts=facts,
        spans=spans(data, case.reading),
        rule=case.token_rule if facts["onset"].notna().any() else None,
        features=case.options.baselines,
        shown=case.options.with_text,
        tokenizer=case.tokenizer,
    )
    found = dataset_scores.run(data, loaded, point, keeping, told=told)
    if not any(map(math.isfinite, found.scores.values())):
        reason = next(iter(found.errors.values()), "no token that it counts was captured")
        raise EvaluationError(f"{data.path}: the probe gives no request at {point} a score: {reason}")
    reads = len(data.manifest.get("test_reads", ())) + 1
    counted = reads if stored is None else stored.test_reads + 1
    report = _report(data, loaded, case, facts, found, counted)
    _check_classes(data, report, case.reading)
    data.count_test_read(reader)
    if stored is not None and case.split_file is not None:
        stored.test_reads = counted
        stored.save(case.split_file)
    remarks = tuple(_remarks(data, case, facts, found))
    return Judged(report=report, point=point, requests=len(facts), test_reads=reads, remarks=remarks)


def too_few(report: Report) -> str | None:
    """Return why the test part gives no figure at all, None where it gives some."""
    return None if report.findings.auroc.value is not None else report.findings.auroc.unavailable


def dataset_facts(data: Dataset) -> dict[str, Any]:
    """Return which data a figure is of: where they lay, when they were exported, and the SHA-256 over their files."""
    content = json.dumps(data.manifest["files"], sort_keys=True).encode()
    return {
        "path": str(data.path),
        "exported_at": data.manifest.get("created_at"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _report(
    data: Dataset, loaded: LoadedProbe, case: Case, facts: pd.DataFrame, found: Pass, test_reads: int
) -> Report:
    scores = pd.Series([found.scores.get(name, math.nan) for name in facts.index], index=facts.index)
    columns = [name for name in (*_EVIDENCE_COLUMNS, *case.reading.slices) if name in facts or name == "stop_at"]
    requests = facts.assign(stop_at=[found.stop_at.get(name, math.nan) for name in facts.index])[columns]
    if "text" in requests:
        requests = requests.assign(text=[found.texts.get(name, text) for name, text in requests["text"].items()])
    evidence = Evidence(
        requests=requests,
        tokens=pd.concat(found.tokens, ignore_index=True) if found.tokens else None,
        layers=case.layers or None,
        features=_features(facts, found),
        labelled_tokens=pd.concat(found.labelled, ignore_index=True) if found.labelled else None,
        other_labels=other_labels(data, case.reading, facts),
        test_reads=test_reads,
    )
    options = _options(data, loaded, case, whole="text" in requests and len(found.texts) < len(facts))
    return evaluate(
        scores, facts["label"], groups=facts["group"], split=facts["part"], evidence=evidence, options=options
    )


def _options(data: Dataset, loaded: LoadedProbe, case: Case, *, whole: bool) -> Options:
    given: dict[str, Any] = {"whole_texts": whole, "slices": case.reading.slices}
    if isinstance(loaded.sample, TrajectoryProbe) and case.options.threshold is None:
        given["threshold"] = loaded.sample.artefact.config.threshold
    if case.reading.holdout_share is None and case.options.holdout_share is None:
        given["holdout_share"] = recorded_share(data)
    if case.options.abort_latency_tokens is None:
        given["abort_latency_tokens"] = measured_latency(data)
    return replace(case.options, **given)


def measured_latency(data: Dataset) -> int | None:
    """Return the tokens between a probe's decision and the end of the requests that it stopped: their median.

    None with fewer than ten such requests.
    """
    rows = data.requests[~data.requests["void"] & data.requests["aborted_at"].notna()]
    tokens = (rows["prompt_len"] + rows["generated_tokens"] - 1 - rows["aborted_at"]).dropna()
    return math.ceil(max(0.0, float(tokens.median()))) if len(tokens) >= LEAST else None


def _features(facts: pd.DataFrame, found: Pass) -> Any:  # noqa: ANN401 - float32 [n, width], or None
    if not found.features:
        return None
    middle = np.mean(list(found.features.values()), axis=0, dtype=np.float64).astype(np.float32)
    return np.stack([found.features.get(name, middle) for name in facts.index])


def _stored_split(data: Dataset, path: Path, facts: pd.DataFrame) -> StoredSplit:
    if path.exists():
        stored = StoredSplit.load(path)
        if not set(facts["group"]) & set(stored.parts):
            raise EvaluationError(
                f"{path}: none of its {len(stored.parts):,} groups has a request in {data.path}: it is another "
                f"dataset's split, or groups were formed otherwise (here by {data.manifest['split']['group_by']})"
            )
        return stored
    if not path.parent.is_dir():
        raise ConfigError(f"--split-file {path}: there is no folder {path.parent}")
    told = data.manifest["split"]
    stored = StoredSplit(SplitRule(shares=tuple(told["shares"][part] for part in PARTS), salt=str(told["salt"])))
    stored.keep(list(facts["group"]), facts["part"].to_numpy(str))
    return stored


def _earliest(own: pd.Series, placed: Any, groups: pd.Series, stored: StoredSplit) -> list[str]:  # noqa: ANN401
    """Return the earlier of two parts, since what was fitted on anywhere is no test; a new group stands as it does."""
    found = [
        mine if group not in stored.parts else min(mine, str(theirs), key=PARTS.index)
        for mine, theirs, group in zip(own, placed, groups, strict=True)
    ]
    stored.keep(list(groups), np.array(found))
    return found


def _check_parts(data: Dataset, facts: pd.DataFrame, reading: Reading) -> None:
    counts = facts["part"].value_counts()
    if not counts.get("test", 0):
        there = ", ".join(f"{part} {counts.get(part, 0)}" for part in PARTS)
        raise EvaluationError(
            f"{data.path}: no test part ({there}); export it with shares such as --split 0.6,0.2,0.2, "
            f"and fit no probe on its test part"
        )
    told = facts.loc[facts["part"] == "test", "label"]
    if (told == UNKNOWN).all():
        raise EvaluationError(
            f"{data.path}: no request of the test part has the label {reading.label!r}"
            f"{f' by {reading.source}' if reading.source else ''}; {len(told):,} are unlabelled or undecided"
        )
    _one_class(data, reading, {word: int((told == word).sum()) for word in (POSITIVE, NEGATIVE)}, "")


def _check_classes(data: Dataset, report: Report, reading: Reading) -> None:
    found = report.findings
    part = next(part for part in found.split.parts if part.part == "test")
    reasons = {
        "labels are of requests that were cut short (--judged-by)": found.censoring.labels_dropped,
        "requests share a group or text with another part and were moved there": found.split.moved,
        "requests outside the holdout are a selection by aborts": found.censoring.aborted_outside,
    }
    why = ", ".join(f"{count:,} {what}" for what, count in reasons.items() if count)
    _one_class(data, reading, {POSITIVE: part.positives, NEGATIVE: part.negatives}, f"; {why}" if why else "")


def _one_class(data: Dataset, reading: Reading, counts: Mapping[str, int], why: str) -> None:
    absent = [word for word, count in counts.items() if not count]
    if absent:
        there = ", ".join(f"{count:,} {word}" for word, count in counts.items())
        raise EvaluationError(
            f"{data.path}: label {reading.label!r}: the test part has {there} requests with a usable label; figures "
            f"need both{why}"
        )


def _remarks(data: Dataset, case: Case, facts: pd.DataFrame, found: Pass) -> Iterable[str]:
    rows = data.labels[data.labels["name"] == case.reading.label]
    sources = sorted(set(rows["source"]))
    if case.reading.source is None and len(sources) > 1:
        yield f"labels are of {', '.join(sources)} together; --source NAME takes one and compares it with the others"
    shares = data.requests["holdout_share"].dropna().unique() if "holdout_share" in data.requests else ()
    if case.reading.holdout_share is None and len(shares) > 1:
        told = ", ".join(f"{share:g}" for share in sorted(shares))
        yield f"the holdout's share changed while this was recorded ({told}): it leans to the time of the larger one"
    if found.errors:
        name, why = next(iter(found.errors.items()))
        yield f"the probe refused or raised on {len(found.errors):,} of {counted(len(facts), 'request')}; {name}: {why}"
    if found.without_span:
        told = counted(found.without_span, "positive")
        yield f"{told} of the test part without a span of tokens, and so in no token figure"
    if "text" in facts and case.options.baselines and len(found.texts) < len(facts):
        yield "texts are whole, which favours the text baseline; --tokenizer cuts them at the decision"
    if found.without_token_ids:
        yield (
            f"records of {counted(found.without_token_ids, 'request')} carry no token ids (token_ids: false): their "
            "texts are not cut at the decision, and their tokens are shown without text"
        )
    bare = len(facts) - len(found.scores)
    if bare:
        yield f"of {counted(bare, 'request')} nothing was captured at this point: no score"
    if case.options.baselines and not found.features:
        yield "rows of all requests would take over 1 GiB: no random direction and no shuffled labels"
