"""The messages of every topic, as frozen dataclasses.

One class per schema in `schemas/`, with the same fields in the same types; each field's meaning and unit stand in the
schema. `int32 little-endian [n]` fields stay bytes here: `undercurrent.codec.tensors` gives views on them.
"""

from __future__ import annotations

from undercurrent.protocol.control_messages import (
    AckOutcome,
    CommandKind,
    ControlAck,
    ControlCommand,
    EngineStarted,
)
from undercurrent.protocol.erasure_messages import Erasure
from undercurrent.protocol.generation_messages import (
    AbortCause,
    Accepted,
    CommandSource,
    GenerationEvent,
    GenerationKind,
    Guard,
    GuardState,
    Holdout,
    Outcome,
    PromptRequest,
    Released,
    ReleaseReason,
    Sampling,
)
from undercurrent.protocol.rollout_messages import Rollout, RolloutChange, RolloutVersion
from undercurrent.protocol.state_messages import ProbeState, RunState
from undercurrent.protocol.stream_messages import (
    ActivationBlock,
    EndReason,
    PublisherStarted,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
)
from undercurrent.protocol.verdict_messages import (
    BindingMode,
    BoundProbe,
    Label,
    LabelSpan,
    LabelValue,
    ProbeHeartbeat,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)

__all__ = [
    "AbortCause",
    "Accepted",
    "AckOutcome",
    "ActivationBlock",
    "BindingMode",
    "BoundProbe",
    "CommandKind",
    "CommandSource",
    "ControlAck",
    "ControlCommand",
    "EndReason",
    "EngineStarted",
    "Erasure",
    "GenerationEvent",
    "GenerationKind",
    "Guard",
    "GuardState",
    "Holdout",
    "Label",
    "LabelSpan",
    "LabelValue",
    "Message",
    "Outcome",
    "ProbeHeartbeat",
    "ProbeState",
    "ProbeVerdict",
    "PromptRequest",
    "PublisherStarted",
    "ReleaseReason",
    "Released",
    "Rollout",
    "RolloutChange",
    "RolloutVersion",
    "RunState",
    "Sampling",
    "StreamEnded",
    "StreamInvalidated",
    "StreamStarted",
    "VerdictAction",
    "VerdictKind",
]

Message = (
    PromptRequest
    | Accepted
    | Released
    | GenerationEvent
    | EngineStarted
    | PublisherStarted
    | StreamStarted
    | ActivationBlock
    | StreamInvalidated
    | StreamEnded
    | ControlCommand
    | ControlAck
    | ProbeVerdict
    | ProbeHeartbeat
    | ProbeState
    | Label
    | Rollout
    | Erasure
)
"""Anything that stands on a topic."""
