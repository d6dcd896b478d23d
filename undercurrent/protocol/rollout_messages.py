"""The message of the rollouts topic; see `undercurrent.protocol.messages`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from undercurrent.protocol.verdict_messages import BindingMode


class RolloutChange(StrEnum):
    """What an entry of the rollouts topic was asked to change."""

    UNKNOWN = "unknown"
    DEPLOY = "deploy"
    MODE = "mode"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVersion:
    """One version of a probe, and what it may do."""

    artefact: str
    version: str = ""
    fingerprint: str = ""
    mode: BindingMode
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What is in force of a probe from here on. Topic: rollouts, key: probe|sequence|entry_id."""

    probe: str
    sequence: int
    entry_id: str
    change: RolloutChange
    paused: bool = False
    deployed: RolloutVersion | None = None
    candidate: RolloutVersion | None = None
    author: str = ""
    reason: str = ""
    created_at_us: int
