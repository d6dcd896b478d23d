"""What stored probes have in common: they score rows, aggregate over tokens, and act once, at a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undercurrent.core import (
    Coverage,
    Probe,
    ProbeAction,
    ProbeFactory,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    StreamFacts,
)
from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import make_aggregator
from undercurrent.probes.artefact import Artefact
from undercurrent.probes.course import AttentionPool, Coherence, Course, Stage
from undercurrent.probes.folder import ATTENTION, LinearArtefact, ProbeConfig
from undercurrent.spec import ActivationRecord, ProbeKind

_STATE_FORMAT = 1


class Followed(NamedTuple):
    """What tokens make of a request's score.

    Args:
        positions: of the tokens that count, absolute, int32 [m].
        scores: of each token, float32 [m].
        aggregates: of the request after each, float64 [m], -inf where there is none yet.
    """

    positions: NDArray[np.int32]
    scores: NDArray[np.float32]
    aggregates: NDArray[np.float64]


class TrajectoryProbe(Probe):
    """Scores each token's row, aggregates, and acts once, where the aggregate reaches a threshold.

    Args:
        artefact: weights and settings, shared by all instances.
    """

    probe_kind: ClassVar[ProbeKind] = ProbeKind.TRAJECTORY
    joins_blocks: ClassVar[bool] = True
    """`on_scores` says the same of tokens however they are cut into blocks; a subclass of which that is not true says
    False, and is given each block as it was captured."""

    artefact: LinearArtefact | Artefact

    def __init__(self, artefact: LinearArtefact | Artefact) -> None:
        self.artefact = artefact
        self._config = artefact.config
        self._layers = artefact.config.all_layers
        self._course = Course(make_aggregator(artefact.config.aggregation), _stage(artefact.config))
        self._prompt_len: int | None = None
        self._lacks_prefix = False
        self._scored = 0
        self._signal: ProbeSignal | None = None

    @classmethod
    def factory(  # type: ignore[override]  # a probe's settings are its own
        cls,
        *,
        artefact: Any = None,  # noqa: ANN401 - of the class's own kind
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
        return ProbeFactory(cls, {"artefact": cls.resolved(artefact, folder, threshold)})

    @classmethod
    @abstractmethod
    def resolved(cls, artefact: Any, folder: str | Path | None, threshold: float | None) -> LinearArtefact | Artefact:  # noqa: ANN401
        """Return the artefact that the arguments of `factory` mean."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over weights and settings, hex."""
        return self.artefact.fingerprint

    @property
    def aggregate(self) -> float | None:
        """The aggregated score so far, or None where there is none yet."""
        return self._course.value

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
        absent = [layer for layer in self._layers if layer not in stream.layers]
        if absent:
            raise ProbeError(f"probe {config.name!r} reads layer {absent[0]}, the stream has {list(stream.layers)}")
        for what, mine, theirs in compared:
            if mine != theirs:
                raise ProbeError(f"probe {config.name!r} was fitted on {what} {mine!r}, the stream has {theirs!r}")

    def layers_to_score(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return those layers that it scores."""
        return tuple(layer for layer in layers if layer in self._layers)

    @abstractmethod
    def score(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return one score per row, float32 [n], or [n, C], with the same bits in any batch; see `BatchProbe.score`."""

    def on_start(self, ctx: RequestContext) -> None:
        """Check the stream, where its facts are known.

        Raises:
            ProbeError: this probe was not fitted for it.
        """
        if ctx.stream is not None:
            self.check(ctx.stream)
            self._prompt_len = ctx.stream.prompt_len
            # Its positions are the prompt's first ones.
            self._lacks_prefix = ctx.stream.cached_prefix > 0 and self._config.positions != "generated"

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Score one row; other layers than the probe's are passed over.

        Raises:
            ProbeError: the score is not finite.
        """
        if record.layer != self._config.layer:
            return None
        values = self.score(np.asarray(record.tensor).reshape(1, -1))[0]
        return self._take(record.token_pos, values, counts=self._counts(record.is_generated))

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
            return self._take(position, column[0], counts=self._counts_at(position))
        taken = self._follow(positions, column)
        if self._signal is not None or not len(taken.aggregates):
            return None
        reached = taken.aggregates >= self._config.threshold
        at = int(reached.argmax())
        return self._act(int(taken.positions[at]), float(taken.aggregates[at])) if reached[at] else None

    def follow(self, positions: NDArray[np.int32], layers: Sequence[int], scores: NDArray[np.float32]) -> Followed:
        """Take the scores of a block as `on_scores` does, act on none, and return the aggregate after each token.

        Raises:
            ProbeError: as `on_scores` does.
        """
        return self._follow(positions, self._column(layers, scores))

    def _follow(self, positions: NDArray[np.int32], column: NDArray[np.float32]) -> Followed:
        finite = np.isfinite(column) if column.ndim == 1 else np.isfinite(column).all(axis=1)
        if not finite.all():
            at = int(np.argmin(finite))
            raise self._not_finite(column[at], int(positions[at]))
        self._scored += len(column)
        positions, column = self._counted(positions, column)
        aggregates = self._course.update(positions, column)
        return Followed(positions, column if column.ndim == 1 else column[:, 0], aggregates)

    def _column(self, layers: Sequence[int], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            return scores[:, tuple(layers).index(self._config.layer)]
        except (ValueError, IndexError):
            message = f"probe {self._config.name!r} reads layer {self._config.layer}, the scores are of {list(layers)}"
            raise ProbeError(message) from None

    def _take(self, position: int, values: np.float32 | NDArray[np.float32], *, counts: bool) -> ProbeSignal | None:
        plain: Any = values.tolist()
        several = isinstance(plain, list)
        if not (all(map(math.isfinite, plain)) if several else math.isfinite(plain)):
            raise self._not_finite(values, position)
        self._scored += 1
        if not counts:
            return None
        aggregate = self._course.push(position, tuple(plain) if several else plain)
        if self._signal is not None or aggregate < self._config.threshold:
            return None
        return self._act(position, aggregate)

    def _act(self, position: int, aggregate: float) -> ProbeSignal:
        action = ProbeAction.FLAG if self._config.mode == "flag" else ProbeAction.ABORT
        self._signal = ProbeSignal(action, token_pos=position, layer=self._config.layer, score=aggregate)
        return self._signal

    def _not_finite(self, values: np.float32 | NDArray[np.float32], position: int) -> ProbeError:
        shown = values.tolist()
        return ProbeError(f"probe {self._config.name!r}: score {shown} at token {position}: a value is not finite")

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
        """Return `triggered`, `clear`, or `unscored` where no token counted.

        Its metadata say whether the verdict is `partial`: a position that counts may be missing, because of a cached
        prefix, a drop or a gap.
        """
        quiet = "unscored" if self.aggregate is None else "clear"
        verdict = quiet if self._signal is None else "triggered"
        coverage = ctx.coverage or Coverage()
        partial = self._lacks_prefix or coverage.dropped or coverage.missing > 0
        metadata = {
            "score": self.aggregate,
            "threshold": self._config.threshold,
            "scored": self._scored,
            "partial": partial,
        }
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
            "lacks_prefix": self._lacks_prefix,
            **self._course.state(),
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
            self._lacks_prefix = bool(state["lacks_prefix"])
            self._course.restore(state)
            self._signal = None
            if acted is not None:
                self._act(int(acted["token_pos"]), float(acted["score"]))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProbeError(f"the state of probe {self._config.name!r} is damaged: {exc!r}") from exc


def _stage(config: ProbeConfig) -> Stage | None:
    if config.format == ATTENTION:
        return AttentionPool(config.pool_min_count or 1)
    return None if config.coherence is None else Coherence(config.coherence)
