"""What a probe may offer beyond `Probe`: scoring many rows at once, and carrying its state elsewhere.

A host holds many streams. If their probe can score rows in bulk, it stacks the rows of all of them, scores them with
one call, and then tells each stream's instance its own scores. That gives the same outputs as one row at a time only
if a row's score has nothing to do with its neighbours: `score` is pure, row by row, and gives the same bits whatever
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from undercurrent.core.results import ProbeSignal
from undercurrent.errors import ShapeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@runtime_checkable
class BatchProbe(Protocol):
    """A probe whose rows can be scored in bulk. It is a `Probe` as well."""

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return one score per row, float32 [n]; NaN where a row holds a value that is not finite.

        Any instance with the same settings may be asked, whichever streams the rows are from. A probe that keeps more
        than one number of a row gives float32 [n, C]; the first is the score that is published.

        Args:
            rows: [n, width], of any floating dtype that a stream may have, bfloat16 included.

        Raises:
            ShapeError: the rows are not as wide as the probe.
        """
        ...

    def on_scores(
        self, positions: NDArray[np.int32], layers: Sequence[int], scores: NDArray[np.float32]
    ) -> ProbeSignal | None:
        """Take the scores of one block of this stream.

        Args:
            positions: absolute positions, int32 [n], ascending.
            layers: layers of the columns [L].
            scores: what `score` gave, float32 [n, L], or [n, L, C].

        Returns:
            A signal whose `token_pos` is the position that decided, or None.

        Raises:
            ProbeError: a score is not finite: such a block is an error, never a pass.
        """
        ...


@runtime_checkable
class LayeredProbe(BatchProbe, Protocol):
    """A batch probe that scores rows of different layers in different ways."""

    def score_layers(self, rows: NDArray[Any], layers: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return what `score` would, which is not asked then.

        Args:
            rows: as of `score`.
            layers: layer of each row, int32 [n].

        Raises:
            ShapeError: the rows are not as wide as the probe.
            ProbeError: a layer is none that it scores.
        """
        ...


@runtime_checkable
class StatefulProbe(Protocol):
    """A probe whose state can be written down and taken up by a fresh instance with the same settings."""

    def state(self) -> dict[str, Any]:
        """Return the state as plain data: what JSON can hold, and finite."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state` gave.

        Raises:
            ProbeError: it is no state of this probe.
        """
        ...


def wanted_layers(probe: object, layers: Sequence[int]) -> tuple[int, ...]:
    """Return which of a stream's layers a batch probe scores: those its `layers_to_score` names, else all."""
    choose = getattr(probe, "layers_to_score", None)
    return tuple(layers) if choose is None else tuple(choose(layers))


def score_rows(probe: BatchProbe, rows: NDArray[Any], layers: Callable[[], NDArray[np.int32]]) -> NDArray[np.float32]:
    """Return the scores of rows, float32 [n] or [n, C], contiguous.

    Args:
        probe: scores them.
        rows: [n, width].
        layers: gives the layer of each row, int32 [n]; called where the probe needs it.

    Raises:
        ShapeError: the probe gave something else than scores for each row.
    """
    by_layer = getattr(probe, "score_layers", None)
    values: NDArray[np.float32] = probe.score(rows) if by_layer is None else by_layer(rows, layers())
    if values.ndim not in (1, 2) or values.shape[0] != rows.shape[0]:
        raise ShapeError(f"score gave {list(values.shape)} for {len(rows)} rows; accepted: one score per row")
    return values.astype("float32", order="C", copy=False)
