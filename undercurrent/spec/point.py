"""Extraction points: what is captured of a request, and how it is handed on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undercurrent.errors import PositionSyntaxError, SpecValidationError
from undercurrent.spec.dump import extraction_point_to_dict
from undercurrent.spec.enums import (
    CaptureDtype,
    ExecutionMode,
    InterventionMode,
    OnUnavailable,
    Overflow,
    ProbeKind,
    TensorType,
    UntilKind,
)
from undercurrent.spec.policies import InterventionPolicy, UntilPolicy, as_until
from undercurrent.spec.position import PositionSelector, parse_position
from undercurrent.spec.values import as_count, as_enum, as_layers, as_plain, as_reduction, as_text, shown


@dataclass(frozen=True, slots=True)
class ExtractionPoint:
    """One place where activations are captured.

    Enums may be given by value, layers as one number, the position as text, `until` as a file has it.

    Args:
        name: how prompts, probes and topics call it.
        layers: 0-based; a layer means that decoder block's output.
        tensor_type: which tensor of the layer.
        position: which tokens.
        stride: of a continuous position: every n-th token, counted from the start of its slice.
        until: of a continuous position: what ends it.
        probe_type: registered name of the probe that the in-process router runs; pipelines bind probes elsewhere.
        probe_kind: None derives it: single_shot for one token that is judged inline, else trajectory.
        execution_mode: whether generation waits for the probe.
        queue_depth: of an async point: records of one request that may wait.
        intervention: of an inline point: what its probe may hold up; None leaves it to the router.
        probe_args: plain data for the probe's constructor.
        dtype: element type of published values; `model` is what the model computed, bit for bit.
        overflow: what happens to records when a buffer is full; None leaves it to whoever runs the buffer.
        token_ids: whether records carry the input token ids.
        reduce: `{"project": FILE}`: rows are multiplied in the engine with the float matrix [width, k] in a file (.npy,
            or .safetensors), and published as [n, layers, k], in float32 unless `dtype` says otherwise. A path in a
            spec file starts from that file's folder.
        on_unavailable: what the engine does while no probe guards this point.

    Raises:
        SpecValidationError: a field is wrong or fields do not fit together.
    """

    name: str
    layers: tuple[int, ...]
    tensor_type: TensorType
    position: PositionSelector
    stride: int = 1
    until: UntilPolicy = field(default_factory=UntilPolicy)
    probe_type: str | None = None
    probe_kind: ProbeKind | None = None
    execution_mode: ExecutionMode = ExecutionMode.INLINE
    queue_depth: int | None = None
    intervention: InterventionPolicy | None = None
    probe_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: CaptureDtype = CaptureDtype.MODEL
    overflow: Overflow | None = None
    token_ids: bool = True
    reduce: Mapping[str, Any] | None = field(default=None, hash=False)
    on_unavailable: OnUnavailable = OnUnavailable.CONTINUE

    def __post_init__(self) -> None:
        as_text(self.name, "name")
        self._coerce()
        self._check_position_rules()
        self._check_mode_rules()

    def _coerce(self) -> None:
        name = self.name
        values: dict[str, object] = {
            "layers": as_layers(self.layers, name),
            "tensor_type": as_enum(TensorType, self.tensor_type, "tensor_type", name),
            "stride": as_count(self.stride, "stride", name),
            "until": as_until(self.until, name),
            "execution_mode": as_enum(ExecutionMode, self.execution_mode, "execution_mode", name),
            "probe_args": as_plain(self.probe_args, "probe_args", name),
            "dtype": as_enum(CaptureDtype, self.dtype, "dtype", name),
            "on_unavailable": as_enum(OnUnavailable, self.on_unavailable, "on_unavailable", name),
        }
        try:
            values["position"] = parse_position(self.position)
        except PositionSyntaxError as exc:
            raise SpecValidationError(str(exc), point=name, field="position") from exc
        if self.queue_depth is not None:
            values["queue_depth"] = as_count(self.queue_depth, "queue_depth", name)
        if self.overflow is not None:
            values["overflow"] = as_enum(Overflow, self.overflow, "overflow", name)
        if self.reduce is not None:
            values["reduce"] = as_reduction(self.reduce, name)
        for key, value in values.items():
            object.__setattr__(self, key, value)
        kind = self._derived_kind() if self.probe_kind is None else self.probe_kind
        object.__setattr__(self, "probe_kind", as_enum(ProbeKind, kind, "probe_kind", name))
        self._check_types()

    def _derived_kind(self) -> ProbeKind:
        alone = not self.position.is_continuous and self.execution_mode is ExecutionMode.INLINE
        return ProbeKind.SINGLE_SHOT if alone else ProbeKind.TRAJECTORY

    def _check_types(self) -> None:
        expected = {
            "token_ids": (bool, "true or false"),
            "intervention": (InterventionPolicy | None, "an InterventionPolicy"),
        }
        for key, (kind, what) in expected.items():
            value = getattr(self, key)
            if not isinstance(value, kind):
                raise SpecValidationError(f"{shown(value)}; accepted: {what}", point=self.name, field=key)
        if self.probe_type is not None:
            as_text(self.probe_type, "probe_type", self.name)

    def _check_position_rules(self) -> None:
        if self.position.is_continuous:
            return
        one = f"position {self.position.to_raw()!r} is a single token"
        if self.stride != 1:
            raise SpecValidationError(f"{one}: it has no stride", point=self.name, field="stride")
        if self.until.kind is not UntilKind.GENERATION_END:
            raise SpecValidationError(f"{one}: nothing needs to end it", point=self.name, field="until")

    def _check_mode_rules(self) -> None:
        if self.execution_mode is ExecutionMode.INLINE:
            if self.queue_depth is not None:
                raise SpecValidationError("only execution_mode async has a queue", point=self.name, field="queue_depth")
            return
        if self.probe_kind is ProbeKind.SINGLE_SHOT:
            raise SpecValidationError(
                "single_shot answers in place: accepted with execution_mode async: trajectory",
                point=self.name,
                field="probe_kind",
            )
        if self.intervention is not None and self.intervention.mode is not InterventionMode.REJECT:
            raise SpecValidationError(
                "execution_mode async never holds up a generation: accepted: mode reject",
                point=self.name,
                field="intervention",
            )

    @property
    def needs_final_length(self) -> bool:
        """Whether its position is known only when the request has ended."""
        return self.position.needs_final_length

    def matches(
        self,
        token_index: int,
        is_generated: bool,
        prompt_len: int,
        generated_index: int | None = None,
        num_generated_total: int | None = None,
    ) -> bool:
        """Return whether this point wants a token: selector, stride and `until: fixed_count` together.

        Args:
            token_index: absolute position of the token.
            is_generated: whether the token was generated rather than given.
            prompt_len: tokens of the prompt.
            generated_index: its index among the generated tokens; by default `token_index - prompt_len`.
            num_generated_total: generated tokens of the finished request, if known.
        """
        selector = self.position
        if not selector.matches(token_index, is_generated, prompt_len, generated_index, num_generated_total):
            return False
        if not selector.is_continuous:
            return True
        position = token_index if generated_index is None else prompt_len + generated_index
        nth, beside = divmod(position - selector.bounds(prompt_len)[0], self.stride)
        return beside == 0 and (self.until.count is None or nth < self.until.count)

    def positions(self, start: int, stop: int, prompt_len: int) -> range:
        """Return the absolute positions within [start, stop) that this point wants, ascending.

        Selector, stride and `until: fixed_count` are in it; `until: stop_token` needs token ids and is not.

        Args:
            start: first position of the span.
            stop: the position behind its last.
            prompt_len: tokens of the prompt.

        Raises:
            SpecValidationError: the position is known only when the request has ended.
        """
        first, end = self._bounds(prompt_len)
        low = first if start <= first else first + -(-(start - first) // self.stride) * self.stride
        high = stop if end is None else min(stop, end)
        return range(low, max(low, high), self.stride)

    def _bounds(self, prompt_len: int) -> tuple[int, int | None]:
        try:
            first, end = self.position.bounds(prompt_len)
        except PositionSyntaxError as exc:
            raise SpecValidationError(str(exc), point=self.name, field="position") from exc
        if self.until.count is not None:
            last = first + (self.until.count - 1) * self.stride + 1
            end = last if end is None else min(end, last)
        return first, end

    def point_hash(self) -> str:
        """Return the SHA-256 of the point's canonical dict, hex: equal points have equal hashes in every process."""
        text = json.dumps(extraction_point_to_dict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """The extraction points of a deployment, in the order given.

    Args:
        version: format of the spec; 1 is the only one there is.
        extraction_points: the points; names are unique.

    Raises:
        SpecValidationError: an unknown version or a doubled name.
    """

    version: int = 1
    extraction_points: Sequence[ExtractionPoint] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extraction_points", tuple(self.extraction_points))
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version != 1:
            raise SpecValidationError(f"{shown(self.version)}; accepted: 1", field="version")
        seen: set[str] = set()
        for point in self.extraction_points:
            if not isinstance(point, ExtractionPoint):
                raise SpecValidationError(f"{shown(point)}; accepted: extraction points", field="extraction_points")
            if point.name in seen:
                raise SpecValidationError("another point has this name", point=point.name, field="name")
            seen.add(point.name)

    def __iter__(self) -> Iterator[ExtractionPoint]:
        return iter(self.extraction_points)

    def __len__(self) -> int:
        return len(self.extraction_points)

    @property
    def names(self) -> list[str]:
        """Names of the points, in order."""
        return [point.name for point in self.extraction_points]

    def get(self, name: str) -> ExtractionPoint | None:
        """Return the point of that name, or None."""
        return next((point for point in self.extraction_points if point.name == name), None)
