"""A linear probe as a folder: `probe.safetensors` and `probe.json`.

    probe.safetensors   weight [1, width] float32, bias [1] float32; further tensors only as `reference.*`
    probe.json          where it reads, how it aggregates, when it acts, what it was fitted on

Nothing in it is code, so a probe from somewhere else can be opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError
from safetensors.numpy import load_file, save_file

from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import AggregationSettings, MaxSettings
from undercurrent.probes.reading import describe, read_json
from undercurrent.spec import TensorType

CONFIG_NAME = "probe.json"
WEIGHTS_NAME = "probe.safetensors"
REFERENCE_PREFIX = "reference."


class Fingerprints(BaseModel):
    """What the probe was fitted on. A stream that differs is refused; what is left out is not compared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[StrictStr, Field(min_length=1)] | None = None
    lora: StrictStr | None = None


class ProbeConfig(BaseModel):
    """The content of `probe.json`.

    Attributes:
        format: what kind of probe this is.
        name: what people call it.
        version: its version.
        point: the extraction point that it was fitted on, where it is for one only.
        layer: 0-based; the output of that decoder block.
        tensor_type: which tensor of the layer.
        aggregation: how scores of tokens become one of the request.
        threshold: aggregated score from which it acts.
        positions: which tokens count.
        mode: what it was meant to do; `flag` makes it ask for a flag rather than an abort.
        fingerprints: what it was fitted on.
        description: for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["undercurrent.linear/1"] = "undercurrent.linear/1"
    name: Annotated[StrictStr, Field(min_length=1)]
    version: Annotated[StrictStr, Field(min_length=1)] = "1"
    point: Annotated[StrictStr, Field(min_length=1)] | None = None
    layer: Annotated[StrictInt, Field(ge=0)]
    tensor_type: TensorType
    aggregation: AggregationSettings = Field(default_factory=MaxSettings)
    threshold: Annotated[float, Field(allow_inf_nan=False, strict=True)]
    positions: Literal["all", "generated", "prompt"] = "all"
    mode: Literal["shadow", "flag", "abort"] | None = None
    fingerprints: Fingerprints = Field(default_factory=Fingerprints)
    description: StrictStr = ""

    def canonical_json(self) -> str:
        """Return the content with sorted keys and without what is None: equal contents give equal texts."""
        data = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True, eq=False)
class LinearArtefact:
    """A linear probe's weights and settings, shared read-only by all instances.

    Args:
        weight: float32 [width].
        bias: added to each row's score.
        config: the settings.
        reference: histograms of what it was fitted on, by name without prefix.

    Raises:
        ProbeError: weights or bias are empty or not finite.
    """

    weight: NDArray[np.float32]
    bias: float
    config: ProbeConfig
    reference: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    weight64: NDArray[np.float64] = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        weight = np.array(self.weight, np.float32).reshape(-1)
        bias = float(np.float32(self.bias))
        if not weight.size or not np.isfinite(weight).all() or not np.isfinite(bias):
            raise ProbeError(f"probe {self.config.name!r}: weight and bias must be finite, and weight not empty")
        wide = weight.astype(np.float64)
        for array in (weight, wide):
            array.flags.writeable = False
        digest = hashlib.sha256()
        for part in (weight.astype("<f4").tobytes(), np.array([bias], "<f4").tobytes()):
            digest.update(part)
        digest.update(self.config.canonical_json().encode())
        for name, value in (
            ("weight", weight),
            ("bias", bias),
            ("weight64", wide),
            ("fingerprint", digest.hexdigest()),
        ):
            object.__setattr__(self, name, value)

    @property
    def width(self) -> int:
        """Elements of a row that it can score."""
        return int(self.weight.shape[0])

    def with_threshold(self, threshold: float) -> LinearArtefact:
        """Return the same probe with another threshold, and so with another fingerprint.

        Raises:
            ProbeError: the threshold is no finite number.
        """
        data = self.config.model_dump() | {"threshold": threshold}
        return LinearArtefact(self.weight, self.bias, make_config(data, "threshold"), self.reference)


def make_config(data: Mapping[str, Any], where: str) -> ProbeConfig:
    """Return the settings in plain data.

    Args:
        data: what `probe.json` would hold.
        where: named in an error.

    Raises:
        ProbeError: they are wrong; the error names each field and what is accepted.
    """
    try:
        return ProbeConfig.model_validate(dict(data))
    except ValidationError as exc:
        raise ProbeError(f"{where}: {describe(exc, ProbeConfig)}") from exc


def read_folder(path: Path) -> LinearArtefact:
    """Return the probe in a folder.

    Raises:
        ProbeError: a file is missing or wrong; the error names file and field.
    """
    if not path.is_dir():
        raise ProbeError(f"{path} is no folder; a probe is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")
    config = make_config(read_json(path / CONFIG_NAME), str(path / CONFIG_NAME))
    tensors = _read_tensors(path / WEIGHTS_NAME)
    weight, bias = tensors.pop("weight"), tensors.pop("bias")
    reference = {name.removeprefix(REFERENCE_PREFIX): array for name, array in tensors.items()}
    try:
        return LinearArtefact(weight[0], float(bias[0]), config, reference)
    except ProbeError as exc:
        raise ProbeError(f"{path / WEIGHTS_NAME}: {exc}") from exc


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        tensors: dict[str, NDArray[Any]] = load_file(path)
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise ProbeError(f"{path}: cannot be read as safetensors: {exc}") from exc
    for name, rank in (("weight", 2), ("bias", 1)):
        if name not in tensors:
            raise ProbeError(f"{path}: tensor {name!r} is missing; it has {', '.join(sorted(tensors)) or 'none'}")
        array = tensors[name]
        if array.dtype != np.float32 or array.ndim != rank or array.shape[0] != 1 or not array.size:
            accepted = "float32 [1, width]" if rank == 2 else "float32 [1]"
            raise ProbeError(f"{path}: tensor {name!r} is {array.dtype} {list(array.shape)}; accepted: {accepted}")
    unknown = [n for n in tensors if n not in ("weight", "bias") and not n.startswith(REFERENCE_PREFIX)]
    if unknown:
        raise ProbeError(f"{path}: unknown tensor {unknown[0]!r}; accepted: weight, bias, {REFERENCE_PREFIX}*")
    return tensors


def write_folder(artefact: LinearArtefact, path: Path) -> None:
    """Write a probe as a folder; the folder is made, its two files are replaced."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {"weight": artefact.weight.reshape(1, -1), "bias": np.array([artefact.bias], np.float32)}
    tensors |= {f"{REFERENCE_PREFIX}{name}": np.ascontiguousarray(a) for name, a in artefact.reference.items()}
    save_file(tensors, path / WEIGHTS_NAME)
    data = artefact.config.model_dump(mode="json", exclude_none=True)
    (path / CONFIG_NAME).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
