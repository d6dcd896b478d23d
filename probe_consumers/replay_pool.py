"""The parts of a replay in processes of their own, and how far they have come."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from probe_consumers.replay_order import Plan
from probe_consumers.replay_partition import Watcher, replay_parts
from probe_consumers.replay_store import part_folder, read_checkpoint, write_json
from undercurrent.errors import ProbingError, ReplayError, UnreachableError

_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1
_FAULT = "fault.json"


def run_parts(out: Path, plan: Plan, workers: int, watch: Watcher) -> None:
    """Replay every part that is not done.

    Args:
        out: folder of the results, with the plan in it.
        plan: the plan.
        workers: processes at a time; with one, or one part, this process does it itself.
        watch: called about five times a second, and after each part.

    Raises:
        ReplayError: a part failed, or its process was killed; what is done stays.
    """
    left = [number for number in plan.numbers if not _is_done(out, number)]
    if workers == 1 or len(left) < 2:
        replay_parts(out, left, watch)
        return
    _Pool(out, left, workers, watch).run()


def _is_done(out: Path, number: int) -> bool:
    found = read_checkpoint(part_folder(out, number))
    return found is not None and found.done


class _Pool:
    """Runs parts in processes of their own, a process a part.

    Args:
        out: folder of the results.
        numbers: of the parts.
        workers: processes at a time.
        watch: called now and then.
    """

    def __init__(self, out: Path, numbers: Sequence[int], workers: int, watch: Watcher) -> None:
        self._out, self._workers, self._watch = out, workers, watch
        self._waiting = list(numbers)
        self._running: dict[int, BaseProcess] = {}
        # Never a fork: a Kafka client's threads do not survive it.
        self._context = multiprocessing.get_context("spawn")

    def run(self) -> None:
        """Run all; where one fails, end the others."""
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._workers:
                    self._start(self._waiting.pop(0))
                wait([item.sentinel for item in self._running.values()], _LOOK_S)
                for number in [number for number, item in self._running.items() if not item.is_alive()]:
                    self._ended(number, self._running.pop(number))
                self._watch()
        finally:
            for process in self._running.values():
                process.kill()
                process.join()

    def _start(self, number: int) -> None:
        process = self._context.Process(target=_work, args=(str(self._out), number, os.getpid()), daemon=True)
        process.start()
        self._running[number] = process

    def _ended(self, number: int, process: BaseProcess) -> None:
        process.join()
        if process.exitcode == 0:
            return
        fault = part_folder(self._out, number) / _FAULT
        if fault.exists():
            told = json.loads(fault.read_text(encoding="utf-8"))
            fault.unlink()
            raise (UnreachableError if told["is_unreachable"] else ReplayError)(told["message"])
        raise ReplayError(
            f"the process that replays partition {number} ended with {process.exitcode}; run the command again to go on"
        )


def _work(out: str, number: int, parent: int) -> None:
    """Replay a part, in a process that dies with its parent: nobody else may write where it writes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this one
    try:
        replay_parts(Path(out), [number], lambda: None)
    except ProbingError as exc:
        told = {"message": str(exc), "is_unreachable": isinstance(exc, UnreachableError)}
        write_json(part_folder(Path(out), number) / _FAULT, told)
        sys.exit(1)
    except OSError as exc:  # on a full disk the fault could not be written either
        sys.stderr.write(f"partition {number}: {exc}\n")
        sys.exit(1)
