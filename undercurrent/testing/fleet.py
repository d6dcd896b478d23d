"""Workers that are started again when they end by themselves, as a deployment would do it.

fleet = Fleet(bench)
fleet.start(bench.configure("engine-0"))
finals = fleet.wait_finals(ids)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from undercurrent.protocol.messages import GenerationEvent
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.worker_process import WorkerProcess


@dataclass(slots=True)
class Seat:
    """A place for one worker: its configuration, and who has it now.

    Args:
        config: the file.
        worker: the process.
        wanted: whether a worker that ends is replaced.
        exits: how those ended that were replaced.
    """

    config: Path
    worker: WorkerProcess
    wanted: bool = True
    exits: list[int] = field(default_factory=list)


class Fleet:
    """Workers of a bench. Use it from one thread, which must live as long as they should.

    Args:
        bench: that starts them.
    """

    def __init__(self, bench: EngineBench) -> None:
        self.seats: list[Seat] = []
        self._bench = bench

    def start(self, config: Path) -> Seat:
        """Start a worker that is replaced when it ends by itself."""
        seat = Seat(config, self._bench.start_worker(config))
        self.seats.append(seat)
        return seat

    def tend(self) -> None:
        """Replace those that have ended."""
        for seat in self.seats:
            if seat.wanted and not seat.worker.running:
                seat.exits.append(seat.worker.wait(0.0))
                seat.worker = self._bench.start_worker(seat.config)

    def wait_finals(self, ids: Iterable[str], timeout_s: float = 60.0) -> dict[str, list[GenerationEvent]]:
        """Wait until each of these requests has a valid final, replacing workers meanwhile; return all finals."""
        wanted = set(ids)

        def all_there() -> dict[str, list[GenerationEvent]] | None:
            self.tend()
            finals = self._bench.finals()
            return finals if wanted <= finals.keys() else None

        return self._bench.wait(all_there, f"finals of {len(wanted)} requests", timeout_s)
