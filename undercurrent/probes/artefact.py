"""The weights and settings of a stored probe of any format but the linear one, which has `LinearArtefact`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.errors import ProbeError
from undercurrent.probes import kernels
from undercurrent.probes.folder import (
    ATTENTION,
    CONFIG_NAME,
    ENSEMBLE,
    FORMATS,
    LINEAR,
    MAHALANOBIS,
    MEAN_DIFFERENCE,
    MLP,
    WEIGHTS_NAME,
    ProbeConfig,
    check_tensors,
    make_config,
    read_parts,
    write_parts,
)

_KERNELS = MappingProxyType(
    {
        MLP: kernels.mlp,
        MEAN_DIFFERENCE: kernels.mean_difference,
        MAHALANOBIS: kernels.mahalanobis,
        ATTENTION: kernels.attention,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Artefact:
    """A probe's weights and settings, shared read-only by all instances.

    Args:
        tensors: as the format has them (`folder.FORMATS`); kept as float32.
        config: the settings.
        reference: histograms of what it was fitted on, by name without prefix.

    Raises:
        ProbeError: the tensors are not those of the format, not finite, or make no probe.
    """

    tensors: Mapping[str, NDArray[np.float32]]
    config: ProbeConfig
    reference: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    kernel: kernels.Kernel | None = field(init=False)
    ensemble: kernels.Ensemble | None = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        form = self.config.format
        if form == LINEAR:
            raise ProbeError(f"probe {self.config.name!r}: {LINEAR} is a LinearArtefact's")
        tensors = {name: np.array(array, np.float32) for name, array in self.tensors.items()}
        wide = {name: array.astype(np.float64) for name, array in tensors.items()}
        try:
            check_tensors(form, tensors)
            _check_finite(tensors)
            if form == ENSEMBLE and len(tensors["mix"]) != len(self.config.all_layers):
                raise ProbeError(f"{len(tensors['mix'])} directions for layers {list(self.config.all_layers)}")
            kernel = None if form == ENSEMBLE else _KERNELS[form](wide)
            ensemble = kernels.Ensemble(self.config.all_layers, wide) if form == ENSEMBLE else None
        except ProbeError as exc:
            raise ProbeError(f"probe {self.config.name!r}: {exc}") from exc
        arrays: list[NDArray[Any]] = [*tensors.values(), *wide.values()]
        for array in arrays:
            array.flags.writeable = False
        values = {"tensors": MappingProxyType(tensors), "kernel": kernel, "ensemble": ensemble}
        for name, value in {**values, "fingerprint": _fingerprint(self.config, tensors)}.items():
            object.__setattr__(self, name, value)

    @property
    def width(self) -> int:
        """Elements of a row that it can score."""
        name = next(name for name, shape in FORMATS[self.config.format].items() if shape[-1] == "width")
        return int(self.tensors[name].shape[-1])

    def with_threshold(self, threshold: float) -> Artefact:
        """Return the same probe with another threshold, and so with another fingerprint.

        Raises:
            ProbeError: the threshold is no finite number.
        """
        data = self.config.model_dump() | {"threshold": threshold}
        return Artefact(self.tensors, make_config(data, "threshold"), self.reference)


def make_artefact(form: str, tensors: Mapping[str, ArrayLike], settings: Mapping[str, Any], where: str) -> Artefact:
    """Return a probe from its parts; a tensor whose first size is 1 may come without it.

    Args:
        form: its format.
        tensors: by name.
        settings: fields of `probe.json`, without the format.
        where: named in an error.

    Raises:
        ProbeError: a part is wrong.
    """
    config = make_config({**settings, "format": form}, where)
    arrays = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    for name, shape in FORMATS[form].items():
        if shape[0] == 1 and name in arrays and arrays[name].ndim == len(shape) - 1:
            arrays[name] = arrays[name][np.newaxis]
    return Artefact(arrays, config)


def read_artefact(path: Path, form: str) -> Artefact:
    """Return the probe in a folder.

    Raises:
        ProbeError: a file is missing or wrong, or it is a probe of another format; the error names file and field.
    """
    config, tensors, reference = read_parts(path)
    if config.format != form:
        raise ProbeError(f"{path / CONFIG_NAME}: field 'format': {config.format!r}; accepted for this: {form}")
    try:
        return Artefact(tensors, config, reference)
    except ProbeError as exc:
        raise ProbeError(f"{path / WEIGHTS_NAME}: {exc}") from exc


def write_artefact(artefact: Artefact, path: Path) -> None:
    """Write a probe as a folder; the folder is made, its two files are replaced."""
    write_parts(path, artefact.config, artefact.tensors, artefact.reference)


def _check_finite(tensors: Mapping[str, NDArray[np.float32]]) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ProbeError(f"tensor {name!r} has a value that is not finite")


def _fingerprint(config: ProbeConfig, tensors: Mapping[str, NDArray[np.float32]]) -> str:
    digest = hashlib.sha256()
    for name in FORMATS[config.format]:
        digest.update(f"{name}{list(tensors[name].shape)}".encode())
        digest.update(tensors[name].astype("<f4").tobytes())
    digest.update(config.canonical_json().encode())
    return digest.hexdigest()
