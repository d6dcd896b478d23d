"""What an engine worker works with, once all of it has been built."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.driver import EngineDriver
from engine_worker.intake import Offer
from engine_worker.member import Member
from engine_worker.observer import Observer
from engine_worker.outbox import Outbox
from engine_worker.tail import LogTail
from undercurrent.protocol.worker import WorkerCore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a worker works with.

    Args:
        core: the protocol.
        driver: runs requests.
        outbox: writes.
        member: polls and commits.
        tail: reads generations, rollouts, control and acknowledgements.
        verdicts: reads verdicts, where there are guards.
        observer: counts.
        offer: what prompts are checked against.
    """

    core: WorkerCore
    driver: EngineDriver
    outbox: Outbox
    member: Member
    tail: LogTail
    verdicts: LogTail | None
    observer: Observer
    offer: Offer
