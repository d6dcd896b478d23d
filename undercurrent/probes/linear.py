"""The linear trajectory probe: a direction, an aggregation, a threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.core import Probe, ProbeAction, ProbeFactory, ProbeResult, ProbeSignal, RequestContext, StreamFacts
from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import make_aggregator
from undercurrent.probes.folder import LinearArtefact, make_config, read_folder, write_folder
from undercurrent.probes.scoring import row_scores
from undercurrent.spec import ActivationRecord, ProbeKind, TensorType

_STATE_FORMAT = 1


class LinearProbe(Probe):
    """Scores each token's row with one direction, aggregates, and acts once, where the aggregate reaches a threshold.

    Made by `from_folder` or `from_arrays` it scores and saves; `factory` makes the instances that judge streams.

    Args:
        artefact: weights and settings, shared by all instances.
        folder: where to read them from instead; `factory` reads a folder once for all instances.
        threshold: takes the place of its own.

    Raises:
        ProbeError: neither artefact nor folder is given, or both, or the folder is wrong.
    """

    probe_kind: ClassVar[ProbeKind] = ProbeKind.TRAJECTORY

    def __init__(
        self,
        artefact: LinearArtefact | None = None,
        *,
        folder: str | Path | None = None,
        threshold: float | None = None,
    ) -> None:
        self.artefact = artefact = _resolve(artefact, folder, threshold)
        self._config = artefact.config
        self._aggregator = make_aggregator(artefact.config.aggregation)
        self._prompt_len: int | None = None
        self._scored = 0
        self._signal: ProbeSignal | None = None

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
    def factory(  # type: ignore[override]  # a probe's settings are its own
        cls,
        *,
        artefact: LinearArtefact | None = None,
        folder: str | Path | None = None,
        threshold: float | None = None,
    ) -> ProbeFactory:
        """Return a factory whose instances share one set of weights.

        Args:
            artefact: the probe.
            folder: where to read it from instead.
            threshold: takes the place of its own.

        Raises:
            ProbeError: neither or both are given, or the folder is wrong.
        """
        return ProbeFactory(cls, {"artefact": _resolve(artefact, folder, threshold)})

    def save(self, path: str | Path) -> None:
        """Write the probe as a folder that `from_folder` reads back with the same fingerprint."""
        write_folder(self.artefact, Path(path))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over weights and settings, hex."""
        return self.artefact.fingerprint

    @property
    def aggregate(self) -> float | None:
        """The aggregated score so far, or None where there is none yet."""
        return self._aggregator.value

    def check(self, stream: StreamFacts) -> None:
        """Refuse a stream that this probe was not fitted for.

        Raises:
            ProbeError: layer, tensor type, width or what it was fitted on differ; both sides are named.
        """
        config, prints = self._config, self._config.fingerprints
        compared = [
            ("tensor_type", config.tensor_type.value, stream.tensor_type),
            ("width", self.artefact.width, stream.width),
        ]
        if prints.model is not None:
            compared.append(("model_fingerprint", prints.model, stream.model_fingerprint))
        if prints.lora is not None:
            compared.append(("lora", prints.lora, stream.lora))
        if config.layer not in stream.layers:
            raise ProbeError(f"probe {config.name!r} reads layer {config.layer}, the stream has {list(stream.layers)}")
        for what, mine, theirs in compared:
            if mine != theirs:
                raise ProbeError(f"probe {config.name!r} was fitted on {what} {mine!r}, the stream has {theirs!r}")

    def layers_to_score(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the one layer that it scores."""
        return tuple(layer for layer in layers if layer == self._config.layer)

    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return one score per row, float32 [n], with the same bits in any batch; see `row_scores`."""
        return row_scores(rows, self.artefact.weight64, self.artefact.bias)

    def on_start(self, ctx: RequestContext) -> None:
        """Check the stream, where its facts are known.

        Raises:
            ProbeError: this probe was not fitted for it.
        """
        if ctx.stream is not None:
            self.check(ctx.stream)
            self._prompt_len = ctx.stream.prompt_len

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Score one row; other layers than the probe's are passed over.

        Raises:
            ProbeError: the score is not finite.
        """
        if record.layer != self._config.layer:
            return None
        score = float(self.score(np.asarray(record.tensor).reshape(1, -1))[0])
        return self._take(record.token_pos, score, counts=self._counts(record.is_generated))

    def on_scores(
        self, positions: NDArray[np.int32], layers: Sequence[int], scores: NDArray[np.float32]
    ) -> ProbeSignal | None:
        """Take the scores of one block, float32 [n, L]; see `BatchProbe.on_scores`.

        Raises:
            ProbeError: a score is not finite, the layer is missing, or it is unknown which tokens are the prompt's.
        """
        column = self._column(layers, scores)
        if len(column) == 1:  # a decode step: NumPy's cost per call would be most of it
            position = int(positions[0])
            return self._take(position, float(column[0]), counts=self._counts_at(position))
        finite = np.isfinite(column)
        if not finite.all():
            at = int(np.argmin(finite))
            raise self._not_finite(float(column[at]), int(positions[at]))
        self._scored += len(column)
        positions, column = self._counted(positions, column)
        aggregates = self._aggregator.update(column)
        if self._signal is not None or not len(aggregates):
            return None
        reached = aggregates >= self._config.threshold
        at = int(np.argmax(reached))
        return self._act(int(positions[at]), float(aggregates[at])) if reached[at] else None

    def _column(self, layers: Sequence[int], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            return scores[:, tuple(layers).index(self._config.layer)]
        except (ValueError, IndexError):
            message = f"probe {self._config.name!r} reads layer {self._config.layer}, the scores are of {list(layers)}"
            raise ProbeError(message) from None

    def _take(self, position: int, score: float, *, counts: bool) -> ProbeSignal | None:
        if not math.isfinite(score):
            raise self._not_finite(score, position)
        self._scored += 1
        if not counts:
            return None
        aggregate = self._aggregator.push(score)
        if self._signal is not None or aggregate < self._config.threshold:
            return None
        return self._act(position, aggregate)

    def _act(self, position: int, aggregate: float) -> ProbeSignal:
        action = ProbeAction.FLAG if self._config.mode == "flag" else ProbeAction.ABORT
        self._signal = ProbeSignal(action, token_pos=position, layer=self._config.layer, score=aggregate)
        return self._signal

    def _not_finite(self, score: float, position: int) -> ProbeError:
        return ProbeError(f"probe {self._config.name!r}: score {score} at token {position}: a value is not finite")

    def _counts(self, is_generated: bool) -> bool:
        return self._config.positions == "all" or is_generated == (self._config.positions == "generated")

    def _counts_at(self, position: int) -> bool:
        return self._config.positions == "all" or self._counts(position >= self._known_prompt_len())

    def _counted(
        self, positions: NDArray[np.int32], column: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        if self._config.positions == "all":
            return positions, column
        generated = positions >= self._known_prompt_len()
        mask = generated if self._config.positions == "generated" else ~generated
        return positions[mask], column[mask]

    def _known_prompt_len(self) -> int:
        if self._prompt_len is None:
            raise ProbeError(
                f"probe {self._config.name!r} counts {self._config.positions} tokens, but was not told the prompt's "
                f"length: on_start needs the stream's facts"
            )
        return self._prompt_len

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return `triggered`, `clear`, or `unscored` where no token counted."""
        quiet = "unscored" if self.aggregate is None else "clear"
        verdict = quiet if self._signal is None else "triggered"
        metadata = {"score": self.aggregate, "threshold": self._config.threshold, "scored": self._scored}
        history = [] if self._signal is None else [self._signal]
        return ProbeResult(self.request_id, self.extraction_point_name, verdict, history, metadata)

    def state(self) -> dict[str, Any]:
        """Return the state as plain data; see `StatefulProbe.state`."""
        signal = self._signal
        return {
            "format": _STATE_FORMAT,
            "fingerprint": self.fingerprint,
            "prompt_len": self._prompt_len,
            "scored": self._scored,
            "aggregation": self._aggregator.state(),
            "acted": None if signal is None else {"token_pos": signal.token_pos, "score": signal.score},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; see `StatefulProbe.restore`.

        Raises:
            ProbeError: it is another probe's, or damaged.
        """
        if state.get("format") != _STATE_FORMAT or state.get("fingerprint") != self.fingerprint:
            raise ProbeError(f"this is no state of probe {self._config.name!r} with fingerprint {self.fingerprint}")
        try:
            acted = state["acted"]
            self._prompt_len = None if state["prompt_len"] is None else int(state["prompt_len"])
            self._scored = int(state["scored"])
            self._aggregator.restore(state["aggregation"])
            self._signal = None
            if acted is not None:
                self._act(int(acted["token_pos"]), float(acted["score"]))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProbeError(f"the state of probe {self._config.name!r} is damaged: {exc!r}") from exc


def _resolve(artefact: LinearArtefact | None, folder: str | Path | None, threshold: float | None) -> LinearArtefact:
    if artefact is not None and folder is not None:
        raise ProbeError("a linear probe takes an artefact or a folder, not both")
    if artefact is None:
        if folder is None:
            raise ProbeError("a linear probe needs its folder: args: {folder: PATH}")
        artefact = read_folder(Path(folder))
    return artefact if threshold is None else artefact.with_threshold(threshold)
