"""The requests of a dataset, as what a probe is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset import Dataset, RequestBlock
from undercurrent.evaluation.fit.blocks import LabelledRequest, Site, TokenRule, token_labels

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
    """

    data: Dataset
    point: str
    split: str
    label: str
    layers: Sequence[int] | None = None
    rule: TokenRule = "inherit"
    last: int = 1

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
        # Children of one request are requests of their own, in one group.
        name = block.request_id if block.index == 0 else f"{block.request_id}#{block.index}"
        request = LabelledRequest(
            request_id=name,
            positions=block.positions,
            rows={Site(self.tensor_type, layer): found for layer, found in block.rows.items()},
            label=label,
            group=block.group,
            prompt_len=int(generated[0]) if generated.size else int(block.positions[-1]) + 1,
            sampling_probability=_sampling_probability(block.request_id, rows),
        )
        if label is None or self.rule == "inherit":
            return request
        spans = rows[(rows["value"] == "positive") & rows["token_start"].notna()]
        pairs = [(int(start), _end(end)) for start, end in zip(spans["token_start"], spans["token_end"], strict=True)]
        labels = token_labels(self.rule, block.positions, label, spans=pairs, last=self.last)
        return dataclasses.replace(request, token_labels=labels)


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


def _sampling_probability(request_id: str, rows: pd.DataFrame) -> float:
    values = set(rows["sampling_probability"].dropna())
    if len(values) > 1:
        raise DatasetError(
            f"request {request_id!r}: field 'sampling_probability': labels say {sorted(values)}; accepted: one value"
        )
    return float(values.pop()) if values else 1.0
