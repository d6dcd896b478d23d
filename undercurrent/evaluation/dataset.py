"""A dataset of recorded activations: tables as pandas frames, tensors on their files, requests one after the other.

data = evaluation.load("DIR")
data.requests                                   # a row per request, attempt and child
data.tensor("residual", 12, "fit")              # [rows, width], memory-mapped
for block in data.blocks("residual", split="fit", label="harmful"):
    block.rows[12], block.positions, block.label
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from numpy.typing import NDArray

from undercurrent.core import StreamFacts
from undercurrent.errors import ChoiceError, DatasetError
from undercurrent.evaluation.dataset_format import (
    LABEL_PREFIX,
    LABELS,
    REQUESTS,
    STREAMS,
    check_files,
    data_file,
    read_manifest,
    read_table,
    tensor_file,
    tensor_key,
    write_manifest,
)
from undercurrent.evaluation.dataset_split import PARTS
from undercurrent.evaluation.dataset_tensors import Tensor, TensorFile

_KEY = ["request_id", "attempt", "index"]
_STREAM_FIELDS = tuple(field.name for field in fields(StreamFacts))
_ROW_COLUMNS = [*_KEY, "point", "layer", "token_pos", "is_generated", "token_id", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlock:
    """What was captured of one request at one point.

    Args:
        request_id: the request.
        attempt: its attempt.
        index: its child.
        split: fit, threshold or test.
        group: hash of its group.
        label: positive, negative or unknown; unknown where no label was asked for.
        positions: absolute, ascending, int32 [n].
        is_generated: bool [n].
        token_ids: int32 [n], -1 where one is not known.
        rows: by layer, [n, width] in the recorded element type.
        stream: what was known of its stream when it opened; None where nobody recorded it.
    """

    request_id: str
    attempt: int
    index: int
    split: str
    group: str
    label: str
    positions: NDArray[np.int32]
    is_generated: NDArray[np.bool_]
    token_ids: NDArray[np.int32]
    rows: dict[int, NDArray[Any]]
    stream: StreamFacts | None = None

    @property
    def name(self) -> str:
        """The request as figures name it: children of one request are requests of their own."""
        return self.request_id if self.index == 0 else f"{self.request_id}#{self.index}"


class Dataset:
    """A folder that `undercurrent dataset export` wrote.

    Args:
        path: the folder.

    Raises:
        DatasetError: it is none, or was not finished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = read_manifest(path)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row per request, attempt and child; `void` ones do not count."""
        return self._frame(REQUESTS)

    @cached_property
    def streams(self) -> pd.DataFrame:
        """A row per request, attempt, child and point: how its capture went."""
        return self._frame(STREAMS)

    @cached_property
    def labels(self) -> pd.DataFrame:
        """A row per label."""
        return self._frame(LABELS)

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """A row per (token, layer), with the part it is in as `split`; read whole, see `blocks` for what is large."""
        frames = [
            self._frame(data_file(part, number)).assign(split=part) for part in PARTS for number in self.shards(part)
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    @property
    def points(self) -> tuple[str, ...]:
        """Names of its extraction points."""
        return tuple(self.manifest["points"])

    def layers(self, point: str) -> tuple[int, ...]:
        """Return the layers of a point, in order.

        Raises:
            DatasetError: there is no such point.
        """
        kinds = self.manifest["points"].get(point)
        if kinds is None:
            raise ChoiceError("point", f"{self.path}: no point {point!r}; it has {', '.join(self.points) or 'none'}")
        return tuple(sorted({layer for kind in kinds for layer in kind["layers"]}))

    def shards(self, split: str) -> list[int]:
        """Return the numbers of a part's files.

        Raises:
            DatasetError: there is no such part.
        """
        if split not in PARTS:
            raise DatasetError(f"split {split!r}; accepted: {', '.join(PARTS)}")
        prefix = f"data/{split}-"
        names = [name for name in self.manifest["files"] if name.startswith(prefix)]
        return sorted(int(name.removeprefix(prefix).removesuffix(".parquet")) for name in names)

    def tensor(self, point: str, layer: int, split: str) -> Tensor:
        """Return the rows of a layer in a part, [rows, width], on the files themselves.

        Raises:
            DatasetError: there are none, or they do not go together.
        """
        if layer not in self.layers(point):
            raise DatasetError(f"{self.path}: {point}: no layer {layer}; it has {list(self.layers(point))}")
        key = tensor_key(point, layer)
        files = {number: TensorFile(self.path / tensor_file(split, number)) for number in self.shards(split)}
        pieces = {number: file.map(key) for number, file in files.items() if key in file.keys}
        return Tensor(f"{self.path}: {key} in {split}", pieces)

    def blocks(
        self,
        point: str,
        *,
        layers: Sequence[int] | None = None,
        split: str | None = None,
        label: str | None = None,
        void: bool = False,
    ) -> Iterator[RequestBlock]:
        """Yield what was captured at a point request by request, in the order in which they were complete on the topic.

        Only requests whose rows lie in several files wait; nothing else is kept.

        Args:
            point: the extraction point.
            layers: some of its layers; all by default.
            split: fit, threshold or test; all by default.
            label: name of the label to give with each.
            void: also attempts that do not count.

        Raises:
            DatasetError: there is no such point, layer, part or label, or rows are missing.
        """
        chosen = self.layers(point) if layers is None else tuple(layers)
        for layer in chosen:
            if layer not in self.layers(point):
                raise ChoiceError(
                    "layers", f"{self.path}: {point}: no layer {layer}; it has {list(self.layers(point))}"
                )
        column = None if label is None else LABEL_PREFIX + label
        if column is not None and column not in self.requests:
            known = [name.removeprefix(LABEL_PREFIX) for name in self.requests if name.startswith(LABEL_PREFIX)]
            raise ChoiceError("label", f"{self.path}: no label {label!r}; it has {', '.join(known) or 'none'}")
        wanted = self.requests if void else self.requests[~self.requests["void"]]
        facts = wanted.set_index(_KEY)[["group", *([column] if column else [])]].to_dict("index")
        mine = self.streams[self.streams["point"] == point].set_index(_KEY)
        streams, started, placed = (mine[name].to_dict() for name in ("positions", "started", "split"))
        expected = {key: count for key, count in streams.items() if key in facts and count}
        for part in PARTS if split is None else (split,):
            here = {key: count for key, count in expected.items() if placed[key] == part}
            for key, frame in self._gathered(point, part, here):
                yield RequestBlock(
                    request_id=key[0],
                    attempt=int(key[1]),
                    index=int(key[2]),
                    split=part,
                    group=facts[key]["group"],
                    label="unknown" if column is None else facts[key][column],
                    stream=stream_facts(started[key]),
                    **self._arrays(frame, point, part, chosen),
                )

    def count_test_read(self, reader: str) -> int:
        """Write into the manifest that the test part was read, and return how often it was.

        Args:
            reader: who read it and what for.
        """
        manifest = read_manifest(self.path)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest["test_reads"] = [*manifest.get("test_reads", ()), {"at": now, "reader": reader}]
        write_manifest(self.path, manifest)
        self.manifest = manifest
        return len(manifest["test_reads"])

    def verify(self) -> list[str]:
        """Return what is wrong with its files, by their sums in the manifest; empty if nothing is."""
        return check_files(self.path, self.manifest)

    def _check(self, *names: str) -> None:
        """Refuse files that are not those that were written; each is read for it once."""
        wrong = check_files(self.path, self.manifest, [name for name in names if name not in self._checked])
        if wrong:
            raise DatasetError(f"{self.path}: {wrong[0]}: it was changed or damaged after it was exported")
        self._checked.update(names)

    @cached_property
    def _checked(self) -> set[str]:
        return set()

    def _frame(self, name: str) -> pd.DataFrame:
        if name in self.manifest["files"]:
            self._check(name)
        return read_table(self.path / name).to_pandas()

    def _gathered(
        self, point: str, part: str, expected: Mapping[tuple[str, int, int], int]
    ) -> Iterator[tuple[tuple[str, int, int], pd.DataFrame]]:
        """Yield the table rows of each request, when the last file that has some was read."""
        left = dict(expected)
        waiting: defaultdict[tuple[str, int, int], list[pd.DataFrame]] = defaultdict(list)
        for number in self.shards(part):
            self._check(data_file(part, number), tensor_file(part, number))
            table = read_table(self.path / data_file(part, number), _ROW_COLUMNS)
            frame = table.filter(pc.equal(table["point"], point)).to_pandas().assign(shard=number)
            for key, mine in frame.groupby(_KEY, sort=False):
                if key not in left:
                    continue
                waiting[key].append(mine)
                if sum(piece["token_pos"].nunique() for piece in waiting[key]) >= left[key]:
                    del left[key]
                    pieces = waiting.pop(key)
                    yield key, pieces[0] if len(pieces) == 1 else pd.concat(pieces, ignore_index=True)
            # Pages of a file that was read count as this process's memory for as long as it is mapped.
            self._tensors.clear()
        if left:
            key = next(iter(waiting or left))
            found = sum(piece["token_pos"].nunique() for piece in waiting[key])
            raise DatasetError(
                f"{self.path}: {key[0]} (attempt {key[1]}) at {point}: {found} positions, {STREAMS} says {left[key]}"
            )

    def _arrays(self, frame: pd.DataFrame, point: str, part: str, layers: Sequence[int]) -> dict[str, Any]:
        # Columns as arrays: a frame for each layer of each request costs several times what the rows do.
        column = {name: frame[name].to_numpy() for name in ("layer", "token_pos", "shard", "row", "is_generated")}
        rows: dict[int, NDArray[Any]] = {}
        mine = np.arange(len(frame))
        for layer in layers:
            mine = np.flatnonzero(column["layer"] == layer)
            mine = mine[np.argsort(column["token_pos"][mine], kind="stable")]
            tensor = self._tensor(point, layer, part)
            rows[layer] = tensor[tensor.index(column["shard"][mine], column["row"][mine])]
        return {
            "rows": rows,
            "positions": column["token_pos"][mine].astype(np.int32),
            "is_generated": column["is_generated"][mine].astype(np.bool_),
            "token_ids": frame["token_id"].fillna(-1).to_numpy()[mine].astype(np.int32),
        }

    def _tensor(self, point: str, layer: int, part: str) -> Tensor:
        if (point, layer, part) not in self._tensors:
            self._tensors[point, layer, part] = self.tensor(point, layer, part)
        return self._tensors[point, layer, part]

    @cached_property
    def _tensors(self) -> dict[tuple[str, int, str], Tensor]:
        """Maps that stay open while requests are read."""
        return {}


def stream_facts(started: str) -> StreamFacts:
    """Return what was known of a stream when it opened, from the column `started` of `streams.parquet`."""
    told = json.loads(started)
    known = {name: told[name] for name in _STREAM_FIELDS if name in told}
    return StreamFacts(**known | {name: tuple(known[name]) for name in ("layers", "row_shape") if name in known})
