"""The closed vocabularies of a spec. Each value is the lower-case name, as a YAML file writes it."""

from __future__ import annotations

from enum import StrEnum


class TensorType(StrEnum):
    """Which tensor of a decoder layer a point captures."""

    RESIDUAL_STREAM = "residual_stream"
    ATTN_OUT = "attn_out"
    MLP_OUT = "mlp_out"
    KV = "kv"
    FINAL_NORM = "final_norm"


class ProbeKind(StrEnum):
    """Whether a probe judges one record by itself, or a whole trajectory of them."""

    SINGLE_SHOT = "single_shot"
    TRAJECTORY = "trajectory"


class ExecutionMode(StrEnum):
    """Whether generation waits for the probe (inline) or goes on (async)."""

    INLINE = "inline"
    ASYNC = "async"


class UntilKind(StrEnum):
    """What ends the capture of a continuous position."""

    GENERATION_END = "generation_end"
    FIXED_COUNT = "fixed_count"
    STOP_TOKEN = "stop_token"  # noqa: S105 - the name of a rule, not a secret


class InterventionMode(StrEnum):
    """How an inline probe may hold up a generation."""

    REJECT = "reject"
    BLOCK_UNTIL_SIGNAL = "block_until_signal"


class TimeoutAction(StrEnum):
    """What stands in for a probe that did not answer in time."""

    CONTINUE = "continue"
    ABORT = "abort"


class PositionKind(StrEnum):
    """The forms that a position selector takes."""

    ABSOLUTE = "absolute"
    PROMPT_INDEX = "prompt_index"
    GENERATED_INDEX = "generated_index"
    GENERATED_WILDCARD = "generated_wildcard"
    GENERATED_SLICE = "generated_slice"
    PROMPT_WILDCARD = "prompt_wildcard"
    PROMPT_SLICE = "prompt_slice"
    EVERY_TOKEN = "every_token"  # noqa: S105 - a form of selector


class CaptureDtype(StrEnum):
    """Element type in which a point's values are published; `model` is what the model computed, bit for bit."""

    MODEL = "model"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Overflow(StrEnum):
    """What happens to a point's records when its buffer is full."""

    DROP_NEWEST = "drop_newest"
    DROP_OLDEST = "drop_oldest"
    BLOCK = "block"


class OnUnavailable(StrEnum):
    """What an engine does with requests while no probe guards the point."""

    CONTINUE = "continue"
    HOLD_INTAKE = "hold_intake"
    ABORT = "abort"
