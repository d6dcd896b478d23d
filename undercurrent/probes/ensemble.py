"""A stored probe that reads several layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from undercurrent.core import ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import ProbeError
from undercurrent.probes.artefact import Artefact
from undercurrent.probes.folder import ENSEMBLE
from undercurrent.probes.kernels import Ensemble
from undercurrent.probes.stored import StoredProbe
from undercurrent.spec import ActivationRecord


class EnsembleProbe(StoredProbe):
    """One direction per layer; a token's score is the sum of its layers' scores, each times the layer's share.

    The scores of the layers are published; the token's own is aggregated. Signals name the last of the layers.

    Tensors: `weight` [layers, width], `bias` [layers], `mix` [layers], rows in the order of `layers` in `probe.json`.
    """

    format: ClassVar[str] = ENSEMBLE

    def __init__(
        self, artefact: Artefact | None = None, *, folder: str | Path | None = None, threshold: float | None = None
    ) -> None:
        super().__init__(artefact, folder=folder, threshold=threshold)
        self._pending: dict[int, float] = {}  # of a token whose layers come one by one
        self._pending_at = -1

    @property
    def _ensemble(self) -> Ensemble:
        ensemble = self.artefact.ensemble
        assert ensemble is not None  # noqa: S101 - an artefact of this format has one
        return ensemble

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Refuse: a row's score depends on its layer; see `score_layers`.

        Raises:
            ProbeError: always.
        """
        raise ProbeError(f"probe {self._config.name!r} needs the layer of each row: score_layers")

    def score_layers(self, rows: NDArray[Any], layers: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return each row's score under the direction of its layer, float32 [n]; see `LayeredProbe.score_layers`."""
        return self._ensemble.member_scores(rows, layers)

    def on_scores(
        self, positions: NDArray[np.int32], layers: Sequence[int], scores: NDArray[np.float32]
    ) -> ProbeSignal | None:
        """Take the scores of one block; see `BatchProbe.on_scores`."""
        self._complete()
        return super().on_scores(positions, layers, scores)

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Score one row; the token is judged when the last of its layers has come.

        Raises:
            ProbeError: the score is not finite, or the token before lacks a layer.
        """
        if record.layer not in self._layers:
            return None
        if self._pending and record.token_pos != self._pending_at:
            self._complete()
        rows, layer = np.asarray(record.tensor).reshape(1, -1), np.array([record.layer], np.int32)
        self._pending_at = record.token_pos
        self._pending[record.layer] = float(self.score_layers(rows, layer)[0])
        if len(self._pending) < len(self._layers):
            return None
        row = np.array([[self._pending[layer] for layer in self._layers]], np.float32)
        self._pending.clear()
        values = self._column(self._layers, row)[0]
        return self._take(record.token_pos, values, counts=self._counts(record.is_generated))

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return the result; a last token that lacks a layer is not judged, and makes it partial."""
        result = super().on_end(ctx)
        if not self._pending:
            return result
        metadata = {**result.metadata, "partial": True}
        return ProbeResult(
            result.request_id, result.extraction_point_name, result.verdict, result.signal_history, metadata
        )

    def state(self) -> dict[str, Any]:
        """Return the state as plain data; see `StatefulProbe.state`."""
        pending = [[layer, score] for layer, score in self._pending.items()]
        return super().state() | {"pending": pending, "pending_at": self._pending_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; see `StatefulProbe.restore`.

        Raises:
            ProbeError: it is another probe's, or damaged.
        """
        super().restore(state)
        try:
            self._pending = {int(layer): float(score) for layer, score in state["pending"]}
            self._pending_at = int(state["pending_at"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ProbeError(f"the state of probe {self._config.name!r} is damaged: {exc!r}") from exc

    def _column(self, layers: Sequence[int], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        given = list(layers)
        absent = [layer for layer in self._layers if layer not in given]
        if absent:
            raise ProbeError(f"probe {self._config.name!r} reads layer {absent[0]}, the scores are of {given}")
        # A layer that is not finite shows in the sum whatever its share: 0 times an infinity is no number.
        return self._ensemble.mixed(scores[:, [given.index(layer) for layer in self._layers]])

    def _complete(self) -> None:
        if self._pending:
            absent = [layer for layer in self._layers if layer not in self._pending]
            raise ProbeError(f"probe {self._config.name!r}: token {self._pending_at} lacks layers {absent}")
