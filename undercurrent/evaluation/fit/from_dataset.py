"""The requests of a dataset, as what a probe is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset import Dataset, RequestBlock
from undercurrent.evaluation.fit.blocks import LabelledRequest, Site, TokenRule, finite, token_labels
from undercurrent.evaluation.request_facts import sampling_probability

_LOOKED_AT_ROWS = 1024
_VALUES = {"positive": True, "negative": False, "unknown": None}


@dataclass(frozen=True, kw_only=True)
class DatasetRequests:
    """One part of a dataset under one label; may be read again.

    Args:
        data: the dataset.
        point: the extraction point whose rows train.
        split: fit, threshold or test.
        label: name of the label.
        layers: some of the point's layers; all without it.
        rule: which tokens train, see `token_labels`.
        last: K of `last-K`.

    Attributes:
        left_out: rows that are not handed out since a value is not finite at one of the layers, by request; known once
            it was read.
    """

    data: Dataset
    point: str
    split: str
    label: str
    layers: Sequence[int] | None = None
    rule: TokenRule = "inherit"
    last: int = 1
    left_out: dict[str, int] = field(default_factory=dict, init=False)
    _finite: dict[str, NDArray[np.bool_] | None] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def tensor_type(self) -> str:
        """What was captured at the point.

        Raises:
            DatasetError: there is no such point, or it was several things.
        """
        self.data.layers(self.point)
        kinds = sorted({kind["tensor_type"] for kind in self.data.manifest["points"][self.point]})
        if len(kinds) != 1:
            raise DatasetError(f"{self.data.path}: point {self.point!r} has {', '.join(kinds)}; export them apart")
        return str(kinds[0])

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Where its rows were captured."""
        layers = self.data.layers(self.point) if self.layers is None else self.layers
        return tuple(Site(self.tensor_type, layer) for layer in layers)

    def __iter__(self) -> Iterator[LabelledRequest]:
        judged = self.data.labels[self.data.labels["name"] == self.label].groupby("request_id")
        known = judged.groups
        for block in self.data.blocks(self.point, layers=self.layers, split=self.split, label=self.label):
            rows = judged.get_group(block.request_id) if block.request_id in known else self.data.labels.iloc[:0]
            yield self._labelled(block, rows)

    def _labelled(self, block: RequestBlock, rows: pd.DataFrame) -> LabelledRequest:
        label = _VALUES[block.label]
        generated = block.positions[block.is_generated]
        request = LabelledRequest(
            request_id=block.name,
            positions=block.positions,
            rows={Site(self.tensor_type, layer): found for layer, found in block.rows.items()},
            label=label,
            group=block.group,
            prompt_len=int(generated[0]) if generated.size else int(block.positions[-1]) + 1,
            sampling_probability=sampling_probability(rows),
        )
        if label is None or self.rule == "inherit":
            return self._whole(request)
        spans = rows[(rows["value"] == "positive") & rows["token_start"].notna()]
        pairs = [(int(start), _end(end)) for start, end in zip(spans["token_start"], spans["token_end"], strict=True)]
        labels = token_labels(self.rule, block.positions, label, spans=pairs, last=self.last)
        return self._whole(dataclasses.replace(request, token_labels=labels))

    def _whole(self, request: LabelledRequest) -> LabelledRequest:
        """Return a request without the rows that have a value that is not finite."""
        name = request.request_id
        if name not in self._finite:
            # Looked at once: a split is read several times.
            told = _finite_rows(request)
            self._finite[name] = None if told.all() else told
            if not told.all():
                self.left_out[name] = int((~told).sum())
        kept = self._finite[name]
        if kept is None:
            return request
        return dataclasses.replace(
            request,
            positions=request.positions[kept],
            rows={site: rows[kept] for site, rows in request.rows.items()},
            token_labels=None if request.token_labels is None else request.token_labels[kept],
        )


def _finite_rows(request: LabelledRequest) -> NDArray[np.bool_]:
    """Return which rows have finite values alone at every site, bool [n]."""
    told = np.ones(len(request.positions), np.bool_)
    for rows in request.rows.values():
        for start in range(0, len(told), _LOOKED_AT_ROWS):
            part = slice(start, start + _LOOKED_AT_ROWS)
            told[part] &= finite(np.asarray(rows[part]).astype(np.float32))
    return told


def fingerprints_of(data: Dataset) -> dict[str, str]:
    """Return what the requests of a dataset were generated with, as it stands in `probe.json`.

    Raises:
        DatasetError: they are of several models or adapters.
    """
    counted = data.requests[~data.requests["void"]]
    found: dict[str, str] = {}
    for name, column in (("model", "model_fingerprint"), ("lora", "lora")):
        values = sorted(set(counted[column].fillna("")))
        if len(values) > 1:
            raise DatasetError(
                f"{data.path}: field {column!r} has {len(values)} values; a probe is fitted on one model"
            )
        if values and (values[0] or name == "lora"):
            found[name] = str(values[0])
    return found


def _end(value: Any) -> int:  # noqa: ANN401 - a cell of a table
    return int(np.iinfo(np.int32).max) if pd.isna(value) else int(value)
