"""One engine worker of a small world: a core, and everything that dies with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from undercurrent.protocol.worker import WorkerCore
from undercurrent.protocol.worker_types import Action, Prompt, Publish, RunKey, StreamKey, WorkerLimits

LIMITS = WorkerLimits(
    max_in_flight=2, max_waiting=4, handover_s=2.0, shutdown_s=2.0, stream_end_timeout_s=3.0, commit_interval_s=0.1
)


@dataclass
class EngineRun:
    """One request in a worker's engine."""

    prompt: Prompt
    children: set[int]
    aborted: set[int] = field(default_factory=set)
    steps: int = 0


@dataclass
class Worker:
    """One process: a core and everything that dies with it."""

    number: int
    core: WorkerCore
    member: bool = True
    stopping: bool = False
    view: set[int] = field(default_factory=set)
    todo: list[Action] = field(default_factory=list)
    queue: list[Publish] = field(default_factory=list)
    tails: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    fetch: dict[int, int] = field(default_factory=dict)
    control: int = 0
    acks: int = 0
    control_until: int | None = None
    engine: dict[RunKey, EngineRun] = field(default_factory=dict)
    ended: list[tuple[RunKey, StreamKey]] = field(default_factory=list)
    dead: bool = False
