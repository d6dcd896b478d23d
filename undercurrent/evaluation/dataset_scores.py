"""One pass of a probe over a dataset, and what of it an evaluation keeps: never the rows of more than one request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from undercurrent.errors import DatasetError, EvaluationError
from undercurrent.evaluation.dataset import Dataset, RequestBlock, stream_facts
from undercurrent.evaluation.evaluating import LISTED_WRONG
from undercurrent.evaluation.fit.blocks import NEGATIVE, UNKNOWN, TokenRule, token_labels
from undercurrent.evaluation.inputs import POSITIVE as POSITIVE_WORD
from undercurrent.evaluation.inputs import UNKNOWN as UNKNOWN_WORD
from undercurrent.evaluation.scoring import ScoredRequest, score_request, stream_of
from undercurrent.evaluation.spans import token_offsets
from undercurrent.probes import LoadedProbe
from undercurrent.probes.trajectory import TrajectoryProbe

FEATURE_BYTES = 1 << 30
"""Of the rows that baselines and controls are fitted on, beyond which they are left out."""

Spans = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What of the pass is kept.

    Args:
        facts: of the requests, see `request_facts`.
        spans: by recorded request.
        rule: which tokens are labelled and how; None: none are.
        features: keep the mean row of each request.
        shown: keep the tokens of those that the probe is most wrong about.
        tokenizer: a `tokenizers.Tokenizer`: gives tokens their texts, and cuts texts at the decision.
    """

    facts: pd.DataFrame
    spans: Spans = field(default_factory=dict)
    rule: TokenRule | None = None
    features: bool = True
    shown: bool = False
    tokenizer: Any = None


@dataclass(slots=True, kw_only=True)
class Pass:
    """What a pass has left.

    Args:
        scores: by name, NaN where there is none.
        stop_at: tokens generated when the probe asked to stop, NaN where it never did.
        texts: up to the decision, where a tokenizer could tell; `cut_alike` cuts those without one.
        ends: where the text of each generated token ends, int32 [generated], of requests on which the probe never acts.
        features: mean row of the tokens that count, float32 [width], by name.
        tokens: of requests with an onset, and of those that the probe is most wrong about.
        labelled: tokens of which it is known what they are.
        without_span: positives of the test part that have no span.
        without_token_ids: requests whose texts a tokenizer could not cut, since their records carry no token ids.
        errors: why the probe refused or raised, by name.
    """

    scores: dict[str, float] = field(default_factory=dict)
    stop_at: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    ends: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    features: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    tokens: list[pd.DataFrame] = field(default_factory=list)
    labelled: list[pd.DataFrame] = field(default_factory=list)
    without_span: int = 0
    without_token_ids: int = 0
    errors: dict[str, str] = field(default_factory=dict)


def point_of(data: Dataset, loaded: LoadedProbe, point: str | None) -> str:
    """Return the point whose streams a probe is to judge: the one named, its own, or the only one that it takes.

    Raises:
        DatasetError: there is no such point.
        EvaluationError: several would do, or none; the error says why.
    """
    wanted = point or loaded.point
    if wanted is not None:
        data.layers(wanted)
        return wanted
    refusals = {name: refusal(data, loaded, name) for name in data.points}
    fitting = [name for name, why in refusals.items() if why is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise EvaluationError(f"{data.path}: the probe takes {', '.join(fitting)}; name one of these points")
    raise EvaluationError(f"{data.path}: {next(filter(None, refusals.values()), 'no point was captured')}")


def refusal(data: Dataset, loaded: LoadedProbe, point: str) -> str | None:
    """Return why a probe refuses every stream of a point, None where it takes one of them."""
    why = None
    for started in dict.fromkeys(data.streams.loc[data.streams["point"] == point, "started"]):
        try:
            loaded.check(stream_facts(started))
        except Exception as exc:  # a probe's own check may raise anything
            why = why or str(exc)
        else:
            return None
    return why or f"point {point!r} has no stream"


def run(
    data: Dataset,
    loaded: LoadedProbe,
    point: str,
    keeping: Keeping,
    *,
    told: Callable[[Iterable[RequestBlock], int], Iterable[RequestBlock]] = lambda blocks, _: blocks,
) -> Pass:
    """Score every request of a dataset that counts.

    Args:
        data: the dataset.
        loaded: the probe.
        point: whose streams.
        keeping: what is kept.
        told: given the blocks and their number, returns them, and may show how far they are.

    Raises:
        DatasetError: the dataset's files do not go together.
    """
    layers = _layers(data, loaded, point)
    keeping = _within_bounds(data, point, keeping)
    found, wrong = Pass(), _Wrong()
    for block in told(data.blocks(point, layers=layers), len(keeping.facts)):
        if block.name not in keeping.facts.index:
            raise DatasetError(f"{data.path}: {block.name!r} has rows at {point} and is no request that counts")
        fact = keeping.facts.loc[block.name]
        scored = score_request(loaded, block)
        _note(found, scored, block, fact, keeping)
        if keeping.shown and fact["part"] == "test":
            wrong.consider(scored, block, fact["label"])
    known = {str(frame["request_id"].iloc[0]) for frame in found.tokens}
    found.tokens += [frame for frame in wrong.frames(keeping.tokenizer) if frame["request_id"].iloc[0] not in known]
    cut_alike(found)
    return found


def cut_alike(found: Pass) -> None:
    """Cut the texts of requests on which the probe never acts after as many tokens as it took on others.

    Left whole beside texts that end where the probe acted, their length alone would give the answer away. Each takes
    the number of a request on which the probe acts, drawn by the hash of its own name.
    """
    acted = np.array([found.stop_at[name] for name in sorted(found.texts) if np.isfinite(found.stop_at[name])])
    if not acted.size:
        return
    for name, ends in found.ends.items():
        drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % acted.size
        tokens = min(int(acted[drawn]), len(ends))
        found.texts[name] = found.texts[name][: int(ends[tokens - 1])] if tokens else ""


def _note(found: Pass, scored: ScoredRequest, block: RequestBlock, fact: pd.Series, keeping: Keeping) -> None:
    name, prompt_len = scored.name, stream_of(block).prompt_len
    found.scores[name] = scored.score
    decided = scored.decided_at
    found.stop_at[name] = np.nan if decided is None else float(max(0, decided - prompt_len + 1))
    if scored.error:
        found.errors[name] = scored.error
    if keeping.features and len(scored.positions):
        rows = block.rows[max(block.rows)][np.isin(block.positions, scored.positions)]
        found.features[name] = rows.astype(np.float32).mean(axis=0)
    found.without_token_ids += keeping.tokenizer is not None and bool((block.token_ids < 0).any())
    if keeping.tokenizer is not None and "text" in keeping.facts:
        ends = ends_of_tokens(keeping.tokenizer, block, fact["text"])
        if ends is not None:
            found.texts[name] = fact["text"]
            if decided is None:
                found.ends[name] = ends
            else:
                before = int((block.positions[block.is_generated] <= decided).sum())
                found.texts[name] = fact["text"][: int(ends[before - 1])] if before else ""
    if fact["part"] != "test" or fact["label"] == UNKNOWN_WORD or not len(scored.positions):
        return
    if fact["label"] == POSITIVE_WORD and np.isfinite(fact["onset"]):
        found.tokens.append(_frame(scored, block, keeping.tokenizer))
    if keeping.rule is not None:
        _label_tokens(found, scored, fact, keeping)


def _label_tokens(found: Pass, scored: ScoredRequest, fact: pd.Series, keeping: Keeping) -> None:
    positive, spans = fact["label"] == POSITIVE_WORD, keeping.spans.get(fact["recorded_id"], ())
    if positive and not spans:
        found.without_span += 1
        return
    assert keeping.rule is not None  # noqa: S101 - asked before
    kinds = token_labels(keeping.rule, scored.positions, positive, spans=spans)
    used = kinds != UNKNOWN
    frame = {"score": scored.scores[used], "positive": kinds[used] != NEGATIVE}
    found.labelled.append(pd.DataFrame({"request_id": scored.name, **frame}))


def ends_of_tokens(tokenizer: Any, block: RequestBlock, text: object) -> NDArray[np.int32] | None:  # noqa: ANN401
    """Return after which character of the text each generated token ends, int32 [generated].

    None where the recorded tokens do not make that text, or no token ids were recorded.
    """
    ids = block.token_ids[block.is_generated]
    if not isinstance(text, str) or not len(ids) or (ids < 0).any():
        return None
    decoded, offsets = token_offsets(tokenizer, ids.tolist())
    if not text.startswith(decoded[: len(text)]):
        return None
    return np.array([end for _, end in offsets], np.int32)


class _Wrong:
    """The requests of the test part that a probe is most wrong about."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[float, ScoredRequest, RequestBlock]]] = {"false stop": [], "miss": []}

    def consider(self, scored: ScoredRequest, block: RequestBlock, label: str) -> None:
        """Keep a request if it is one of them so far."""
        acted, positive = scored.decided_at is not None, label == POSITIVE_WORD
        if label == UNKNOWN_WORD or acted == positive or not np.isfinite(scored.score):
            return
        kept = self._kept["false stop" if acted else "miss"]
        kept.append((scored.score if acted else -scored.score, scored, replace(block, rows={})))
        if len(kept) > 2 * LISTED_WRONG:
            kept.sort(key=lambda item: -item[0])
            del kept[LISTED_WRONG:]

    def frames(self, tokenizer: Any) -> list[pd.DataFrame]:  # noqa: ANN401
        """Return their tokens."""
        kept = [sorted(found, key=lambda item: -item[0])[:LISTED_WRONG] for found in self._kept.values()]
        return [_frame(scored, block, tokenizer) for found in kept for _, scored, block in found]


def _frame(scored: ScoredRequest, block: RequestBlock, tokenizer: Any) -> pd.DataFrame:  # noqa: ANN401
    frame = pd.DataFrame(
        {
            "request_id": scored.name,
            "token_pos": scored.positions,
            "score": scored.scores.astype(np.float64),
            "running": scored.aggregates,
        }
    )
    if tokenizer is not None:
        ids = block.token_ids[np.isin(block.positions, scored.positions)]
        frame["token"] = _texts(tokenizer, ids)
    return frame


def _texts(tokenizer: Any, ids: NDArray[np.int32]) -> list[str]:  # noqa: ANN401
    """Return what each token added to the text; a character of several tokens stands at the last of them."""
    if (ids < 0).any():
        return ["?"] * len(ids)
    decoded, offsets = token_offsets(tokenizer, ids.tolist())
    later = [*offsets[1:], (len(decoded), len(decoded) + 1)]
    return [decoded[start:end] if (start, end) != after else "" for (start, end), after in zip(
        offsets, later, strict=True)]  # fmt: skip


def _layers(data: Dataset, loaded: LoadedProbe, point: str) -> tuple[int, ...]:
    sample, there = loaded.sample, data.layers(point)
    wanted = sample.artefact.config.all_layers if isinstance(sample, TrajectoryProbe) else there
    return tuple(layer for layer in wanted if layer in there)


def _within_bounds(data: Dataset, point: str, keeping: Keeping) -> Keeping:
    widths = [kind["width"] for kind in data.manifest["points"][point]]
    if not keeping.features or max(widths, default=0) * 4 * len(keeping.facts) <= FEATURE_BYTES:
        return keeping
    return replace(keeping, features=False)
