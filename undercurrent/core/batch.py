"""What a probe may offer beyond `Probe`: scoring many rows at once, and carrying its state elsewhere.

A host holds many streams. If their probe can score rows in bulk, it stacks the rows of all of them, scores them with
one call, and then tells each stream's instance its own scores. That gives the same outputs as one row at a time only
if a row's score has nothing to do with its neighbours: `score` is pure, row by row, and gives the same bits whatever
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from undercurrent.core.results import ProbeSignal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@runtime_checkable
class BatchProbe(Protocol):
    """A probe whose rows can be scored in bulk. It is a `Probe` as well."""

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return one score per row, float32 [n]; NaN where a row holds a value that is not finite.

        Any instance with the same settings may be asked, whichever streams the rows are from.

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
            scores: what `score` gave, float32 [n, L].

        Returns:
            A signal whose `token_pos` is the position that decided, or None.

        Raises:
            ProbeError: a score is not finite: such a block is an error, never a pass.
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
