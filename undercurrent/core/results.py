"""What passes between a probe and whoever runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from undercurrent.errors import ProbeError


class ProbeAction(StrEnum):
    """What a probe asks for."""

    CONTINUE = "continue"
    FLAG = "flag"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ProbeSignal:
    """What a probe says of a record or of a block of them.

    Args:
        action: what it asks for; whoever runs it decides what it may do.
        metadata: its own words.
        confidence: how sure it is, on its own scale.
        timestamp: when it decided, seconds since the Unix epoch; no part of equality.
        token_pos: absolute position that decided, where it is not the record's own.
        layer: layer of the activation that decided.
        score: score that decided.

    Raises:
        ProbeError: the action is none there is.
    """

    action: ProbeAction = ProbeAction.CONTINUE
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    confidence: float | None = None
    timestamp: float = field(default_factory=time.time, compare=False)
    token_pos: int | None = None
    layer: int | None = None
    score: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", as_action(self.action))

    @property
    def acts(self) -> bool:
        """Whether it asks for more than to go on."""
        return self.action is not ProbeAction.CONTINUE


def as_action(value: str) -> ProbeAction:
    """Return the action that a value names.

    Raises:
        ProbeError: it names none.
    """
    try:
        return ProbeAction(value)
    except ValueError:
        raise ProbeError(f"action {value!r:.60}; accepted: {', '.join(ProbeAction)}") from None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe says of a request at its end.

    Args:
        request_id: the producer's id.
        extraction_point_name: the point whose records it saw.
        verdict: its own word.
        signal_history: the signals that it gave, in order.
        metadata: its own words; the key `score` holds the aggregated score, where there is one.
    """

    request_id: str
    extraction_point_name: str
    verdict: Any
    signal_history: list[ProbeSignal] = field(default_factory=list, hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One point's share of the rows of a stream that joins several.

    Args:
        point: the extraction point.
        layers: its layers, in the order in which their values follow one another.
        width: elements of one of them.
        tensor_type: which tensor of those layers.
        start: first element of a joined row that is its own.
        stop: element after the last one.
    """

    point: str
    layers: tuple[int, ...]
    width: int
    tensor_type: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """What is known of a stream when it opens, as far as a probe may care.

    Args:
        prompt_len: tokens of the prompt.
        layers: layers of each record, in the order of their columns.
        width: elements of one (token, layer) row.
        tensor_type: which tensor of those layers.
        dtype: NumPy name of an element.
        cached_prefix: positions before this one were not computed: no record has them.
        model: name of the model.
        model_fingerprint: SHA-256 of what the model is, hex; empty where nobody knows.
        lora: LoRA adapter, empty for none.
        quantization: quantisation, empty for none.
        row_shape: shape of one row where it is not [width]: kv and router_topk have one.
        parts: what a row is made of, where it joins several points; empty where it is of one.
    """

    prompt_len: int
    layers: tuple[int, ...]
    width: int
    tensor_type: str
    dtype: str = "float32"
    cached_prefix: int = 0
    model: str = ""
    model_fingerprint: str = ""
    lora: str = ""
    quantization: str = ""
    row_shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What of a stream its probe was not given, known when the stream ends. A cached prefix is a fact of its start.

    Args:
        missing: records that never came.
        dropped: rows were left out, or the stream was cut short, for a declared reason.
    """

    missing: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a probe is told when a request starts and when it ends.

    Args:
        request_id: the producer's id.
        prompt_metadata: what is known of the prompt, in its sender's words.
        extraction_point_config: the point, where the spec is at hand.
        stream: facts of the stream, where one is read rather than an engine's hooks.
        coverage: at the end of a stream that was read, what the probe was not given of it.
    """

    request_id: str
    prompt_metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    extraction_point_config: Any = None
    stream: StreamFacts | None = None
    coverage: Coverage | None = None
