"""The linear trajectory probe: a direction, an aggregation, a threshold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.errors import ProbeError
from undercurrent.probes.folder import LinearArtefact, make_config, read_folder, write_folder
from undercurrent.probes.scoring import row_scores, scattered_scores
from undercurrent.probes.sklearn_exchange import classifier_of, linear_parts
from undercurrent.probes.trajectory import TrajectoryProbe
from undercurrent.spec import TensorType

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression


class LinearProbe(TrajectoryProbe):
    """Scores each token's row with one direction, aggregates, and acts once, where the aggregate reaches a threshold.

    Made by `from_folder` or `from_arrays` it scores and saves; `factory` makes the instances that judge streams.

    Args:
        artefact: weights and settings, shared by all instances.
        folder: where to read them from instead; `factory` reads a folder once for all instances.
        threshold: takes the place of its own.

    Raises:
        ProbeError: neither artefact nor folder is given, or both, or the folder is wrong.
    """

    artefact: LinearArtefact

    def __init__(
        self,
        artefact: LinearArtefact | None = None,
        *,
        folder: str | Path | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__(self.resolved(artefact, folder, threshold))

    @classmethod
    def from_folder(cls, path: str | Path) -> LinearProbe:
        """Return the probe in a folder.

        Raises:
            ProbeError: a file is missing or wrong; the error names file and field.
        """
        return cls(read_folder(Path(path)))

    @classmethod
    def from_arrays(
        cls, weight: ArrayLike, bias: ArrayLike, *, layer: int, tensor_type: TensorType | str, threshold: float,
        **settings: object,
    ) -> LinearProbe:  # fmt: skip
        """Return a probe from its parts.

        Args:
            weight: [width] or [1, width]; kept as float32.
            bias: one number.
            layer: 0-based; the output of that decoder block.
            tensor_type: which tensor of the layer.
            threshold: aggregated score from which it acts.
            **settings: further fields of `probe.json`: name, version, aggregation, positions, fingerprints and so on.

        Raises:
            ProbeError: a part is wrong.
        """
        array = np.asarray(weight, np.float32)
        if array.ndim == 2 and array.shape[0] == 1:
            array = array[0]
        offset = np.asarray(bias, np.float32)
        if array.ndim != 1 or offset.size != 1:
            raise ProbeError(f"weight {list(array.shape)} and bias {list(offset.shape)}; accepted: [width] and [1]")
        data = {"name": "linear", "layer": layer, "tensor_type": tensor_type, "threshold": threshold} | settings
        return cls(LinearArtefact(array, float(offset.reshape(-1)[0]), make_config(data, "from_arrays")))

    @classmethod
    def from_sklearn(
        cls, estimator: Any, *, layer: int, tensor_type: TensorType | str, threshold: float, **settings: object  # noqa: ANN401
    ) -> LinearProbe:  # fmt: skip
        """Return a probe that scores rows as a fitted scikit-learn classifier's `decision_function` does.

        Args:
            estimator: a binary linear classifier, or a pipeline of affine steps that ends in one; see `linear_parts`.
            layer: 0-based; the output of that decoder block.
            tensor_type: which tensor of the layer.
            threshold: aggregated score from which it acts.
            **settings: as for `from_arrays`.

        Raises:
            ProbeError: the estimator is not fitted, linear or binary, or a setting is wrong.
        """
        weight, bias = linear_parts(estimator)
        return cls.from_arrays(weight, bias, layer=layer, tensor_type=tensor_type, threshold=threshold, **settings)

    def to_sklearn(self) -> LogisticRegression:
        """Return a fitted classifier over rows whose `decision_function` gives this probe's scores of tokens.

        Aggregation and threshold stay behind: scikit-learn knows rows only.
        """
        return classifier_of(self.artefact.weight64, self.artefact.bias)

    def save(self, path: str | Path) -> None:
        """Write the probe as a folder that `from_folder` reads back with the same fingerprint."""
        write_folder(self.artefact, Path(path))

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return one score per row, float32 [n], with the same bits in any batch; see `row_scores`."""
        return row_scores(rows, self.artefact.weight64, self.artefact.bias)

    def score_scattered(self, values: list[bytes], starts: bytes, rows: int, dtype: str) -> NDArray[np.float32] | None:
        """Return what `score` gives of rows that lie in many pieces; None where they have to be put together for it.

        Args:
            values: what holds the rows.
            starts: where in each they begin, int32 [len(values)]; they go on to its end.
            rows: how many there are.
            dtype: their element type.
        """
        if type(self).score is not LinearProbe.score:
            return None  # a subclass scores in a way of its own
        return scattered_scores(values, starts, rows, dtype, self.artefact.weight64, self.artefact.bias)

    @classmethod
    def resolved(
        cls, artefact: LinearArtefact | None, folder: str | Path | None, threshold: float | None
    ) -> LinearArtefact:
        """Return the artefact that is given, or is in a folder.

        Raises:
            ProbeError: neither or both are given, or the folder is wrong.
        """
        if artefact is not None and folder is not None:
            raise ProbeError("a linear probe takes an artefact or a folder, not both")
        if artefact is None:
            if folder is None:
                raise ProbeError("a linear probe needs its folder: args: {folder: PATH}")
            artefact = read_folder(Path(folder))
        return artefact if threshold is None else artefact.with_threshold(threshold)
