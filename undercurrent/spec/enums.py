"""The closed vocabularies of a spec. Each value is the lower-case name, as a YAML file writes it."""

from __future__ import annotations

from enum import StrEnum


class TensorType(StrEnum):
    """Which tensor of a decoder layer a point captures, and the shape of one (token, layer) of it.

    Layers are 0-based. Layer l of `residual_stream` is what `transformers` calls `hidden_states[l + 1]` (but for the
    last, where that is taken after the final norm), and layer l of `layer_input` is its `hidden_states[l]`.

    Attributes:
        RESIDUAL_STREAM: [hidden]; the decoder layer's output, attention and MLP added.
        ATTN_OUT: [hidden]; what the attention module returns, before it is added.
        MLP_OUT: [hidden]; what the MLP or expert module returns, before it is added.
        KV: [2, kv_heads, head_dim]; the token's own keys, then its values, as the layer's attention is given them:
            after the rotary embedding and any norm of the keys, before a cache quantises them. Only the token's own:
            those of the tokens before it stand in their records.
        FINAL_NORM: [hidden]; the output of the norm after the last layer, addressed as the layer after the last.
        LAYER_INPUT: [hidden]; the residual stream as it enters the layer. Of layer 0 that is the embedding, scaled as
            the model scales it.
        ROUTER_TOPK: [2, k], float32; the ids of the token's experts, then their weights as the experts are summed
            with them, renormalised where the model does that. Order within the k is the router's own.
    """

    RESIDUAL_STREAM = "residual_stream"
    ATTN_OUT = "attn_out"
    MLP_OUT = "mlp_out"
    KV = "kv"
    FINAL_NORM = "final_norm"
    LAYER_INPUT = "layer_input"
    ROUTER_TOPK = "router_topk"


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
    INT8 = "int8"


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
