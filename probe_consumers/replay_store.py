"""What a replay has done of one partition, on disk: three logs, and a checkpoint that says how much of them counts."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from probe_consumers.replay import LeftOut, Mark
from probe_consumers.replay_tables import (
    LEFT_OUT,
    SCORES,
    VERDICTS,
    TableLog,
    left_out_batch,
    score_batch,
    verdict_batch,
)
from undercurrent.errors import ReplayError
from undercurrent.files import write_text
from undercurrent.protocol.messages import ProbeVerdict
from undercurrent.protocol.streams import StreamId

SCHEMAS: dict[str, pa.Schema] = {"verdicts": VERDICTS, "scores": SCORES, "left_out": LEFT_OUT}
_CHECKPOINT = "checkpoint.json"
_LOCK_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """How far the replay of a partition has come.

    Args:
        low: offset from which a reader comes to the same open streams.
        position: first offset whose outputs are not in the logs.
        others: the same of the further lanes, where points are joined, in their order.
        records: read so far.
        skipped: of these, those of requests that were not asked for.
        read_bytes: of the records.
        lengths: bytes of each log that count.
        unfinished: streams that are open at the range's end, each with its partition, or lane.
        done: the whole range is in the logs.
    """

    low: int
    position: int
    others: tuple[Mark, ...] = ()
    records: int = 0
    skipped: int = 0
    read_bytes: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    unfinished: tuple[tuple[StreamId, int], ...] = ()
    done: bool = False

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Where to go on, by lane."""
        return Mark(self.low, self.position), *self.others


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - plain data
    """Write plain data in one step: it is there whole, or as it was."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def part_folder(out: Path, partition: int) -> Path:
    """Return where the progress of a partition is kept."""
    return out / "progress" / f"{partition:05d}"


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return a partition's checkpoint, None where there is none.

    Raises:
        ReplayError: it cannot be read.
    """
    path = folder / _CHECKPOINT
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        unfinished = tuple((StreamId(**name), lane) for name, lane in told.pop("unfinished"))
        others = tuple(Mark(**mark) for mark in told.pop("others"))
        return Checkpoint(**told, unfinished=unfinished, others=others)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ReplayError(f"{path}: cannot be read: {exc}: remove the folder and start again") from exc


class PartStore:
    """The progress of one partition, written by one process at a time.

    Args:
        folder: where; it is made.
        firsts: first offset of the range, of each lane.

    Raises:
        ReplayError: another process writes there, or what is there is damaged.
    """

    def __init__(self, folder: Path, firsts: Sequence[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = _locked(folder / "lock", _LOCK_WAIT_S)
        first, *others = (Mark(first, first) for first in firsts)
        fresh = Checkpoint(low=first.low, position=first.position, others=tuple(others))
        self.checkpoint = read_checkpoint(folder) or fresh
        lengths = self.checkpoint.lengths
        self._logs = {
            name: TableLog(folder / f"{name}.arrows", schema, lengths.get(name, 0)) for name, schema in SCHEMAS.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for log in self._logs.values():
            log.close()
        os.close(self._lock)

    def commit(
        self,
        verdicts: Sequence[ProbeVerdict],
        left_out: Sequence[LeftOut],
        reached: Checkpoint,
        others: Callable[[ProbeVerdict], tuple[int, ...] | None] = lambda _: None,
    ) -> None:
        """Add outputs, and with them how far they go; a process that dies in between has added nothing.

        Args:
            verdicts: what was said.
            left_out: records that no stream took.
            reached: how far both go.
            others: see `Replay.other_offsets`.
        """
        self._logs["verdicts"].append(verdict_batch(verdicts, others))
        self._logs["scores"].append(score_batch(verdicts))
        self._logs["left_out"].append(left_out_batch(left_out))
        lengths = {name: log.length for name, log in self._logs.items()}
        told = asdict(reached) | {"lengths": lengths}
        write_json(self._folder / _CHECKPOINT, told)
        self.checkpoint = replace(reached, lengths=lengths)


def lock_folder(folder: Path) -> int:
    """Take a folder for this process, until the descriptor that is returned is closed.

    Raises:
        ReplayError: another process has it.
    """
    return _locked(folder / "lock", 0.0)


def _locked(path: Path, wait_s: float) -> int:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(held)
                raise ReplayError(f"{path.parent}: another replay is writing there") from None
            time.sleep(0.05)
        else:
            return held
