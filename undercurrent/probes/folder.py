"""A probe as a folder: `probe.safetensors` and `probe.json`.

    probe.safetensors   float32 tensors as its format has them (`FORMATS`); further ones only as `reference.*`
    probe.json          its format, where it reads, how it aggregates, when it acts, what it was fitted on

Nothing in it is code, so a probe from somewhere else can be opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator
from safetensors.numpy import load_file, save

from undercurrent.errors import ProbeError
from undercurrent.files import together, write_bytes, write_text
from undercurrent.probes.aggregators import AggregationSettings, MaxSettings
from undercurrent.probes.course import CoherenceSettings
from undercurrent.probes.reading import describe, read_json
from undercurrent.spec import TensorType

CONFIG_NAME = "probe.json"
WEIGHTS_NAME = "probe.safetensors"
REFERENCE_PREFIX = "reference."

LINEAR = "undercurrent.linear/1"
MLP = "undercurrent.mlp/1"
MEAN_DIFFERENCE = "undercurrent.mean_difference/1"
MAHALANOBIS = "undercurrent.mahalanobis/1"
ENSEMBLE = "undercurrent.ensemble/1"
ATTENTION = "undercurrent.attention/1"

FORMATS: Mapping[str, Mapping[str, tuple[int | str, ...]]] = MappingProxyType(
    {
        LINEAR: {"weight": (1, "width"), "bias": (1,)},
        MLP: {"hidden.weight": ("hidden", "width"), "hidden.bias": ("hidden",), "weight": (1, "hidden"), "bias": (1,)},
        MEAN_DIFFERENCE: {"positive": (1, "width"), "negative": (1, "width")},
        MAHALANOBIS: {"mean": (1, "width"), "precision": (1, "width"), "factors": ("rank", "width")},
        ENSEMBLE: {"weight": ("layers", "width"), "bias": ("layers",), "mix": ("layers",)},
        ATTENTION: {"weight": (1, "width"), "bias": (1,), "query": (1, "width")},
    }
)
"""The tensors of each format, float32, with their shapes; what has the same name has the same size."""

Format = Literal[
    "undercurrent.linear/1",
    "undercurrent.mlp/1",
    "undercurrent.mean_difference/1",
    "undercurrent.mahalanobis/1",
    "undercurrent.ensemble/1",
    "undercurrent.attention/1",
]


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
        layer: 0-based; the output of that decoder block. Of an ensemble the last of its layers.
        layers: of an ensemble, and of no other: those that it reads, ascending.
        tensor_type: which tensor of the layer.
        coherence: what support a token needs of its neighbours before it counts.
        pool_min_count: of an attention probe, and of no other: tokens before which there is no pooled score.
        aggregation: how scores of tokens become one of the request.
        threshold: aggregated score from which it acts.
        positions: which tokens count.
        mode: what it was meant to do; `flag` makes it ask for a flag rather than an abort.
        fingerprints: what it was fitted on.
        description: for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Format = "undercurrent.linear/1"
    name: Annotated[StrictStr, Field(min_length=1)]
    version: Annotated[StrictStr, Field(min_length=1)] = "1"
    point: Annotated[StrictStr, Field(min_length=1)] | None = None
    layer: Annotated[StrictInt, Field(ge=0)]
    layers: Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(min_length=1)] | None = None
    tensor_type: TensorType
    coherence: CoherenceSettings | None = None
    pool_min_count: Annotated[StrictInt, Field(ge=1)] | None = None
    aggregation: AggregationSettings = Field(default_factory=MaxSettings)
    threshold: Annotated[float, Field(allow_inf_nan=False, strict=True)]
    positions: Literal["all", "generated", "prompt"] = "all"
    mode: Literal["shadow", "flag", "abort"] | None = None
    fingerprints: Fingerprints = Field(default_factory=Fingerprints)
    description: StrictStr = ""

    @model_validator(mode="before")
    @classmethod
    def _last_layer(cls, data: Any) -> Any:  # noqa: ANN401 - whatever somebody wrote there
        layers = data.get("layers") if isinstance(data, dict) else None
        return {"layer": layers[-1], **data} if isinstance(layers, list | tuple) and layers else data

    @model_validator(mode="after")
    def _goes_together(self) -> ProbeConfig:
        is_ensemble, is_attention = self.format == ENSEMBLE, self.format == ATTENTION
        if (self.layers is not None) is not is_ensemble:
            raise ValueError(f"'layers' goes with {ENSEMBLE}, which needs it; a probe of one layer has 'layer'")
        if self.layers and (list(self.layers) != sorted(set(self.layers)) or self.layer != self.layers[-1]):
            raise ValueError(f"layers {list(self.layers)} and layer {self.layer}; accepted: ascending, and the last")
        if self.pool_min_count is not None and not is_attention:
            raise ValueError(f"'pool_min_count' goes with {ATTENTION} alone")
        if self.coherence is not None and is_attention:
            raise ValueError(f"'coherence' does not go with {ATTENTION}, which pools all tokens already")
        return self

    @property
    def all_layers(self) -> tuple[int, ...]:
        """The layers that it reads."""
        return self.layers or (self.layer,)

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
    """Return the linear probe in a folder.

    Raises:
        ProbeError: a file is missing or wrong; the error names file and field.
    """
    config, tensors, reference = read_parts(path)
    if config.format != LINEAR:
        raise ProbeError(f"{path / CONFIG_NAME}: field 'format': {config.format!r}; accepted for this: {LINEAR}")
    try:
        return LinearArtefact(tensors["weight"][0], float(tensors["bias"][0]), config, reference)
    except ProbeError as exc:
        raise ProbeError(f"{path / WEIGHTS_NAME}: {exc}") from exc


def read_config(path: Path) -> ProbeConfig:
    """Return the settings of the probe in a folder.

    Raises:
        ProbeError: there is no folder, or they are wrong; the error names file and field.
    """
    if not path.is_dir():
        raise ProbeError(f"{path} is no folder; a probe is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")
    return make_config(read_json(path / CONFIG_NAME), str(path / CONFIG_NAME))


Tensors = dict[str, NDArray[Any]]


def read_parts(path: Path) -> tuple[ProbeConfig, Tensors, Tensors]:
    """Return what is in a folder: settings, the tensors of its format, and its references by name without prefix.

    Raises:
        ProbeError: a file is missing or wrong; the error names file and field.
    """
    config = read_config(path)
    where = path / WEIGHTS_NAME
    try:
        tensors: Tensors = load_file(where)
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise ProbeError(f"{where}: cannot be read as safetensors: {exc}") from exc
    reference = {name: tensors.pop(name) for name in list(tensors) if name.startswith(REFERENCE_PREFIX)}
    try:
        check_tensors(config.format, tensors)
    except ProbeError as exc:
        raise ProbeError(f"{where}: {exc}") from exc
    return config, tensors, {name.removeprefix(REFERENCE_PREFIX): array for name, array in reference.items()}


def check_tensors(form: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Refuse tensors that are not those of a format.

    Raises:
        ProbeError: naming the tensor and what is accepted.
    """
    sizes: dict[int | str, int] = {1: 1}
    for name, shape in FORMATS[form].items():
        if name not in tensors:
            raise ProbeError(f"tensor {name!r} is missing; it has {', '.join(sorted(tensors)) or 'none'}")
        array = tensors[name]
        fits = array.dtype == np.float32 and array.ndim == len(shape) and array.size
        if not fits or any(sizes.setdefault(dim, size) != size for dim, size in zip(shape, array.shape, strict=True)):
            accepted = ", ".join(f"{dim}={sizes[dim]}" if dim != 1 and dim in sizes else str(dim) for dim in shape)
            raise ProbeError(f"tensor {name!r} is {array.dtype} {list(array.shape)}; accepted: float32 [{accepted}]")
    unknown = [name for name in tensors if name not in FORMATS[form]]
    if unknown:
        raise ProbeError(f"unknown tensor {unknown[0]!r}; accepted: {', '.join(FORMATS[form])}, {REFERENCE_PREFIX}*")


def write_folder(artefact: LinearArtefact, path: Path) -> None:
    """Write a linear probe as a folder; the folder is made, its two files are replaced."""
    tensors = {"weight": artefact.weight.reshape(1, -1), "bias": np.array([artefact.bias], np.float32)}
    write_parts(path, artefact.config, tensors, artefact.reference)


def write_parts(
    path: Path, config: ProbeConfig, tensors: Mapping[str, NDArray[Any]], reference: Mapping[str, NDArray[Any]]
) -> None:
    """Write a probe as a folder; the folder is made, its two files are replaced.

    Raises:
        OSError: naming the file that cannot be written; a probe that was there is as it was.
    """
    named = {**tensors, **{f"{REFERENCE_PREFIX}{name}": array for name, array in reference.items()}}
    data = config.model_dump(mode="json", exclude_none=True)
    with together(path, last=CONFIG_NAME) as fresh:
        write_bytes(fresh / WEIGHTS_NAME, save({name: np.ascontiguousarray(array) for name, array in named.items()}))
        write_text(fresh / CONFIG_NAME, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
