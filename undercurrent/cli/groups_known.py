"""The consumer groups of a pipeline with all that their commits say, and how to move them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from undercurrent.errors import ConfigError, ProtocolError
from undercurrent.kafka.group_admin import Group, GroupAdmin
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.epochs import LogRange, decode_metadata
from undercurrent.protocol.group_moves import Move, move_host, move_worker
from undercurrent.protocol.host_position import Committed, HostMetadata
from undercurrent.topics import DLQ_SUFFIX, JOIN, TopicPlan

NO_METADATA = "none of ours: an operator's reset, or another tool's commit"
LETTERS = "none: it writes dead letters of what nobody can read"


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a group stands in a partition.

    Args:
        group: the group.
        where: the partition.
        committed: its last commit.
        log: first and next offset of the partition.
        owner: who has it now, empty for nobody.
    """

    group: str
    where: Partition
    committed: Committed
    log: LogRange
    owner: str

    def row(self, plan: TopicPlan) -> dict[str, Any]:
        """Return it as the cells of a table.

        Args:
            plan: tells whose commits these are.
        """
        if self.where.topic == plan.prompts:
            done, said = _of_worker(self.committed)
        elif self.where.topic in plan.swept:
            done, said = self.committed.offset, LETTERS
        else:
            done, said = _of_host(self.committed)
        return {
            "group": self.group,
            "topic": self.where.topic,
            "partition": self.where.number,
            "committed": self.committed.offset,
            "end": self.log.end,
            "lag": max(0, self.log.end - max(done, self.log.start)),
            "metadata": said,
            "owner": self.owner or "-",
        }


def _of_host(committed: Committed) -> tuple[int, str]:
    """Return up to where everything is done, and what the metadata says in words."""
    metadata = HostMetadata.from_text(committed.metadata)
    if metadata is None:
        return committed.offset, NO_METADATA
    done = max(committed.offset, metadata.emitted_up_to)
    text = f"e = {metadata.emitted_up_to}, probes {metadata.fingerprint}"
    for count, words in (
        (done - committed.offset, "offsets are read again for open streams"),
        (metadata.states, "streams go on from a state"),
        (metadata.stalled, "assignments without progress"),
        (len(metadata.quarantined), "records quarantined"),
    ):
        text += f", {count} {words}" if count else ""
    return done, text


def _of_worker(committed: Committed) -> tuple[int, str]:
    try:
        known = decode_metadata(committed.offset, committed.metadata or "")
    except ProtocolError:
        return committed.offset, NO_METADATA
    text = f"epoch {known.epoch}, generations from {known.read_from}"
    if known.finished:
        text += f", {len(known.finished)} finished above"
    if known.unexplained:
        text += f", {len(known.unexplained)} started and not accounted for"
    # What is finished above counts as done, so that the lag is what is left to do.
    return committed.offset + len(known.finished), text


def unknown_group(name: str, known: Sequence[str]) -> str:
    """Return what is wrong with the name of a group that the pipeline does not have."""
    return f"the pipeline has no group {name!r}; there are {', '.join(known) or 'none'}"


class Groups:
    """The consumer groups of a pipeline.

    Args:
        settings: the connection.
        plan: tells the prefix and the topic of prompts.
    """

    def __init__(self, settings: KafkaSettings, plan: TopicPlan) -> None:
        self._plan = plan
        self._admin = GroupAdmin(settings)
        self._lookup = OffsetLookup(settings)

    def names(self) -> list[str]:
        """Return the pipeline's groups that the cluster knows."""
        return self._admin.names(f"{self._plan.prefix}.")

    def group(self, name: str) -> Group:
        """Return a group as the broker tells it."""
        return self._admin.describe([name])[name]

    def stands(self, name: str) -> list[Stand]:
        """Return where a group stands in each partition that it has committed.

        Raises:
            UnreachableError: no broker answered in time, or a transaction of the group stays open.
        """
        group, read = self.group(name), self._read()
        committed = self._lookup.committed(name, read)
        starts, ends = self._lookup.beginning(committed), self._lookup.end(committed)
        return [
            Stand(
                name,
                where,
                Committed(offset=offset, metadata=text),
                LogRange(starts[where], ends[where]),
                group.owners.get(where, ""),
            )
            for where, (offset, text) in sorted(committed.items())
        ]

    def moves(
        self, name: str, target: str, numbers: Sequence[int] | None, *, say_again: bool
    ) -> Iterator[tuple[Stand, Move]]:
        """Yield what to commit so that a group goes on somewhere else.

        Args:
            name: of the group.
            target: `earliest`, `latest`, an offset, or `@` and milliseconds since the Unix epoch.
            numbers: of the partitions; all that it has committed by default.
            say_again: write verdicts on what is read again a second time.

        Raises:
            ConfigError: it has committed nothing there, or the target is none.
        """
        if JOIN in name and target.isdigit():
            raise ConfigError(
                f"--to {target}: {name} joins topics, in which an offset does not mean the same; "
                "accepted for it: earliest, latest, or @ and milliseconds"
            )
        stands = self.stands(name)
        if not stands and name not in (known := self.names()):
            raise ConfigError(unknown_group(name, known))
        found = [stand for stand in stands if numbers is None or stand.where.number in numbers]
        if not found:
            raise ConfigError(f"group {name!r} has committed nothing{' there' if stands else ''}")
        for stand in found:
            offset = self._offset(stand, target)
            try:
                yield stand, self._move(stand, offset, say_again)
            except ProtocolError as exc:
                raise ConfigError(f"--to: {stand.where}: {exc}") from exc

    def commit(self, name: str, moves: Sequence[tuple[Stand, Move]]) -> None:
        """Commit moves; the group must have no members.

        Raises:
            TopicError: it has, or the broker refuses otherwise.
        """
        self._admin.move(name, {stand.where: (move.offset, move.metadata) for stand, move in moves})

    def _move(self, stand: Stand, offset: int, say_again: bool) -> Move:
        if stand.where.topic != self._plan.prompts:
            return move_host(stand.committed, offset, stand.log, say_again=say_again)
        answers = Partition(self._plan.generations, stand.where.number)
        generations = LogRange(self._lookup.beginning([answers])[answers], self._lookup.end([answers])[answers])
        return move_worker(stand.committed, offset, stand.log, generations)

    def _offset(self, stand: Stand, target: str) -> int:
        if target == "earliest":
            return stand.log.start
        if target == "latest":
            return stand.log.end
        number = target.removeprefix("@")
        if not number.isdigit():
            raise ConfigError(f"--to: {target!r}; accepted: earliest, latest, an offset, or @ and milliseconds")
        if target.startswith("@"):
            return self._lookup.at_time([stand.where], int(number))[stand.where]
        return int(number)

    def _read(self) -> list[Partition]:
        """Return what groups read, as the cluster has it: no file of the points is needed, and none can be left out."""
        activations = f"{self._plan.prefix}.activations."
        named = {self._plan.prompts, *self._plan.swept}
        return [
            where
            for topic, partitions in self._lookup.topics(f"{self._plan.prefix}.").items()
            if topic in named or (topic.startswith(activations) and not topic.endswith(DLQ_SUFFIX))
            for where in partitions
        ]
