"""Where assigned partitions go on: their committed offsets, the bounds of their logs, and states of long streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from probe_consumers.inputs import Inputs
from probe_consumers.states import ReadStates
from undercurrent.errors import ProbingError
from undercurrent.kafka.records import Partition
from undercurrent.protocol.host_position import Committed, Declaration, Resume, StartFrom, resume_from
from undercurrent.protocol.messages import ProbeState

logger = logging.getLogger(__name__)


# The other partitions wait meanwhile, so a question is short at first; an unanswered one is asked again, longer.
_TIMEOUT_S = 0.1
_LONGEST_S = 1.0
_INTERVAL_S = 0.2

Answers = Mapping[Partition, tuple[int | None, str | None]]
AskCommitted = Callable[[Sequence[Partition], float], Answers]


class Lookup(Protocol):
    """Knows where logs begin and end."""

    def beginning(self, partitions: Iterable[tuple[str, int]]) -> Mapping[Partition, int]:
        """Return first offsets."""
        ...

    def end(self, partitions: Iterable[tuple[str, int]]) -> Mapping[Partition, int]:
        """Return the offsets after the last records."""
        ...


class Ready(NamedTuple):
    """A partition that can begin; it is called by its lane."""

    partition: int
    resume: Resume
    states: Sequence[ProbeState]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRules:
    """What is the same for all partitions.

    Args:
        fingerprint: of the probe set.
        start_from: where a new group begins.
        change: another probe set may go on where the last one stopped.
    """

    fingerprint: str
    start_from: StartFrom
    change: bool = False


class Resuming:
    """The partitions that are assigned and do not flow yet, called by their lanes.

    Args:
        inputs: what is read.
        rules: what is the same for all.
        lookup: knows the bounds of logs.
        read_states: reads states of long streams; None where none are kept.
        executor: reads them, while other partitions go on.
    """

    def __init__(
        self, inputs: Inputs, rules: ResumeRules, lookup: Lookup, read_states: ReadStates | None, executor: Executor
    ) -> None:
        self._inputs = inputs
        self._rules = rules
        self._lookup = lookup
        self._read_states = read_states
        self._executor = executor
        self._asked: set[int] = set()
        self._reading: dict[int, tuple[Resume, Future[Sequence[ProbeState]]]] = {}
        self._next_s = 0.0
        self._timeout_s = _TIMEOUT_S

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._asked) + len(self._reading)

    @property
    def waiting(self) -> list[int]:
        """Their numbers."""
        return sorted({*self._asked, *self._reading})

    @property
    def may_ask(self) -> bool:
        """Whether it is time for a question; an unanswered one is not asked again at once."""
        return time.monotonic() >= self._next_s

    def rest(self) -> None:
        """Ask nothing for a moment."""
        self._next_s = time.monotonic() + _INTERVAL_S

    def add(self, partition: int) -> None:
        """Take a partition, or begin anew with it."""
        self._reading.pop(partition, None)
        self._asked.add(partition)

    def drop(self, partitions: Iterable[int]) -> None:
        """Give partitions up."""
        for partition in partitions:
            self._asked.discard(partition)
            self._reading.pop(partition, None)

    def ask(self, committed: AskCommitted) -> list[Ready]:
        """Ask for committed offsets; return which partitions can begin now. What the broker does not know yet waits.

        Args:
            committed: asks for some partitions, for so many seconds.

        Raises:
            ProbeSetChangedError: another probe set committed one.
            UnreachableError: nobody told the bounds of the logs.
        """
        if not self._asked:
            return []
        answers = committed(list(map(self._inputs.place, sorted(self._asked))), self._timeout_s)
        if not answers:
            self.rest()
            self._timeout_s = min(_LONGEST_S, 2 * self._timeout_s)
            return []
        self._timeout_s = _TIMEOUT_S
        return self._answered(answers)

    def _answered(self, answers: Answers) -> list[Ready]:
        starts, ends = self._lookup.beginning(answers), self._lookup.end(answers)
        ready: list[Ready] = []
        for where, (offset, text) in answers.items():
            committed = None if offset is None else Committed(offset=offset, metadata=text)
            rules = self._rules
            resume = resume_from(
                committed, starts[where], ends[where], rules.fingerprint, rules.start_from, change=rules.change
            )
            lane = self._inputs.lane(where)
            self._asked.discard(lane)
            if resume.states and self._read_states is not None:
                self._reading[lane] = resume, self._executor.submit(self._read_states, lane, resume.states_from)
            else:
                ready.append(Ready(lane, resume, ()))
        return ready

    def read(self) -> list[Ready]:
        """Return the partitions whose states have been read by now."""
        ready: list[Ready] = []
        for number, (resume, reading) in list(self._reading.items()):
            if not reading.done():
                continue
            del self._reading[number]
            try:
                ready.append(Ready(number, resume, reading.result()))
            except ProbingError as exc:
                logger.warning("states of %s: %s; asked for again", self._inputs.place(number), exc)
                self._asked.add(number)
        return ready


def tell(where: Partition, item: Declaration) -> None:
    """Log what is declared about a partition's position."""
    log = logger.warning if item.notice.is_loss else logger.info
    log("%s[%d]: %s, offsets %d to %d", where.topic, where.number, item.notice, item.from_offset, item.to_offset)
