"""What a fit gives: the tensors of a stored probe's format, and how rows are scored with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.evaluation.fitting import LinearFit
from undercurrent.probes.artefact import Artefact
from undercurrent.probes.folder import LINEAR, MAHALANOBIS, MLP, LinearArtefact, make_config
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.stored import MahalanobisProbe, MlpProbe, StoredProbe

TrainableProbe = LinearProbe | StoredProbe

_CLASSES: Mapping[str, type[StoredProbe]] = {MLP: MlpProbe, MAHALANOBIS: MahalanobisProbe}


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A probe without settings.

    Args:
        format: of the folder.
        tensors: of that format, float32.
        scores: rows [n, width] to scores, float32 [n].
    """

    format: str
    tensors: Mapping[str, NDArray[np.float32]]
    scores: Callable[[NDArray[Any]], NDArray[np.float32]]

    @classmethod
    def linear(cls, fit: LinearFit) -> Fitted:
        """Return a direction."""
        tensors = {"weight": fit.weight.reshape(1, -1), "bias": np.array([fit.bias], np.float32)}
        return cls(LINEAR, tensors, fit.scores)

    @classmethod
    def stored(cls, form: str, tensors: Mapping[str, NDArray[np.floating]]) -> Fitted:
        """Return a probe of another format, scored as a deployed one is.

        Raises:
            ProbeError: the tensors are not those of the format.
        """
        narrow = {name: np.asarray(array, np.float32) for name, array in tensors.items()}
        trial = {"name": "trial", "layer": 0, "tensor_type": "residual_stream", "threshold": 0.0, "format": form}
        kernel = Artefact(narrow, make_config(trial, "trial")).kernel
        assert kernel is not None  # noqa: S101 - only an ensemble has none
        return cls(form, narrow, kernel)

    def probe(self, settings: Mapping[str, Any], reference: Mapping[str, NDArray[Any]]) -> TrainableProbe:
        """Return the probe.

        Args:
            settings: the content of `probe.json`, without the format.
            reference: histograms, by name.

        Raises:
            ProbeError: a setting is wrong.
        """
        config = make_config({**settings, "format": self.format}, f"probe {settings['name']!r}")
        if self.format == LINEAR:
            weight, bias = self.tensors["weight"][0], float(self.tensors["bias"][0])
            return LinearProbe(LinearArtefact(weight, bias, config, reference))
        return _CLASSES[self.format](Artefact(self.tensors, config, reference))
