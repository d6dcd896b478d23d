"""The stored probes beside the linear one: a small MLP, mean difference, Mahalanobis, attention pooling.

All are folders (`undercurrent.probes.folder`), share aggregation, coherence and refusals with the linear probe, and
are scored over the rows of many streams at once. `FORMATS` there has the tensors of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.errors import ProbeError
from undercurrent.probes.artefact import Artefact, make_artefact, read_artefact, write_artefact
from undercurrent.probes.folder import ATTENTION, MAHALANOBIS, MEAN_DIFFERENCE, MLP
from undercurrent.probes.trajectory import TrajectoryProbe


class StoredProbe(TrajectoryProbe):
    """A probe with the tensors of one format.

    Args:
        artefact: weights and settings, shared by all instances.
        folder: where to read them from instead; `factory` reads a folder once for all instances.
        threshold: takes the place of its own.

    Raises:
        ProbeError: neither artefact nor folder is given, or both, the folder is wrong or of another format.
    """

    format: ClassVar[str]
    artefact: Artefact

    def __init__(
        self, artefact: Artefact | None = None, *, folder: str | Path | None = None, threshold: float | None = None
    ) -> None:
        super().__init__(self.resolved(artefact, folder, threshold))

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Return the probe in a folder.

        Raises:
            ProbeError: a file is missing or wrong; the error names file and field.
        """
        return cls(folder=path)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, ArrayLike], **settings: object) -> Self:
        """Return a probe from its parts.

        Args:
            tensors: those of its format, by name; kept as float32.
            **settings: fields of `probe.json`: layer (of an ensemble: layers), tensor_type, threshold, and if wanted
                name, version, aggregation, coherence, positions, fingerprints and so on.

        Raises:
            ProbeError: a part is wrong.
        """
        named = {"name": cls.format.partition("/")[0].rpartition(".")[2]} | settings
        return cls(make_artefact(cls.format, tensors, named, "from_tensors"))

    def save(self, path: str | Path) -> None:
        """Write the probe as a folder that `from_folder` reads back with the same fingerprint."""
        write_artefact(self.artefact, Path(path))

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return the scores of rows, with the same bits for a row in any batch; see `BatchProbe.score`."""
        kernel = self.artefact.kernel
        assert kernel is not None  # noqa: S101 - only an ensemble has none, and it scores by layer
        return kernel(rows)

    @classmethod
    def resolved(cls, artefact: Artefact | None, folder: str | Path | None, threshold: float | None) -> Artefact:
        """Return the artefact that is given, or is in a folder.

        Raises:
            ProbeError: neither or both are given, the folder is wrong or of another format.
        """
        if (artefact is None) is (folder is None):
            raise ProbeError(f"{cls.__name__} takes an artefact or a folder, one of both: args: {{folder: PATH}}")
        if artefact is None:
            artefact = read_artefact(Path(str(folder)), cls.format)
        elif artefact.config.format != cls.format:
            raise ProbeError(f"{cls.__name__} is given {artefact.config.format}; accepted: {cls.format}")
        return artefact if threshold is None else artefact.with_threshold(threshold)


class MlpProbe(StoredProbe):
    """One hidden layer of ReLU units; the score is the logit before any sigmoid.

    Tensors: `hidden.weight` [hidden, width], `hidden.bias` [hidden], `weight` [1, hidden], `bias` [1].
    """

    format: ClassVar[str] = MLP


class MeanDifferenceProbe(StoredProbe):
    """How far a row lies from the midpoint of two classes' means towards the positive one, in the rows' own unit.

    Tensors: `positive` [1, width], `negative` [1, width].
    """

    format: ClassVar[str] = MEAN_DIFFERENCE


class MahalanobisProbe(StoredProbe):
    """How far a row lies from what is usual: the Mahalanobis distance from a mean; it acts on what is far away.

    Tensors: `mean` [1, width], and the inverse covariance as `diag(precision) - factorsᵀ factors`: `precision`
    [1, width], `factors` [rank, width]. `from_moments` makes them from a mean and a covariance.
    """

    format: ClassVar[str] = MAHALANOBIS

    @classmethod
    def from_moments(cls, mean: ArrayLike, covariance: ArrayLike, *, rank: int = 16, **settings: object) -> Self:
        """Return the probe of a mean and a covariance, the latter kept as a diagonal and some directions.

        Each dimension is brought to variance 1 first, so that an outlier dimension does not take the directions; then
        probabilistic PCA (Tipping and Bishop, J. R. Statist. Soc. B 61, 1999): the correlation is its first `rank`
        principal directions, and the mean of the other eigenvalues in all others. With a rank of width - 1 it is exact.

        Args:
            mean: [width].
            covariance: [width, width], positive definite.
            rank: directions, at least 1 and below the width.
            **settings: as of `from_tensors`.

        Raises:
            ProbeError: the parts do not fit each other, or the covariance is not positive definite.
        """
        tensors = _precision(np.asarray(covariance, np.float64), rank)
        return cls.from_tensors({"mean": mean, **tensors}, **settings)


class AttentionProbe(StoredProbe):
    """The mean over all tokens so far of `weight · row + bias`, weighted by the softmax of `query · row`.

    The pooled score goes through the aggregation as a token's score does: with `max` it acts where the pooled score
    first reaches the threshold. `pool_min_count` tokens must have come before there is one.

    Tensors: `weight` [1, width], `bias` [1], `query` [1, width].
    """

    format: ClassVar[str] = ATTENTION


def _precision(covariance: NDArray[np.float64], rank: int) -> dict[str, NDArray[np.float64]]:
    width = len(covariance)
    if covariance.shape != (width, width) or not 1 <= rank < width:
        raise ProbeError(
            f"a covariance of shape {list(covariance.shape)} and rank {rank}; accepted: [width, width], 1 to width - 1"
        )
    variances = np.diag(covariance)
    if not np.isfinite(covariance).all() or (variances <= 0).any():
        raise ProbeError("the covariance has a variance that is not above 0, or a value that is not finite")
    scale = np.sqrt(variances)
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    rest = float(values[:-rank].mean())
    if values[0] <= 0:
        raise ProbeError(f"the covariance has an eigenvalue of {values[0]:g} where variances are 1; accepted: above 0")
    factors = (vectors[:, -rank:] * np.sqrt(1.0 / rest - 1.0 / values[-rank:])).T
    return {"precision": 1.0 / (rest * variances), "factors": factors / scale}
