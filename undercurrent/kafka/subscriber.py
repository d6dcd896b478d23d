"""A member of a consumer group whose owner decides where each partition starts, and what is committed.

    class Owner:                                             # a RebalanceHandler
        def on_assigned(self, partitions): ...               # they are paused; ask committed(), then start() each
        def on_revoked(self, partitions): ...                # still ours during the call: commit now or never
        def on_lost(self, partitions): ...                   # no longer ours: forget them

    with GroupSubscriber(settings, "probes", ["activations.p"], Owner(), assignor=Assignor.RANGE) as subscriber:
        while not stopped:
            for record in subscriber.poll_batch(500, timeout_s=0.1):
                ...
            subscriber.commit({("activations.p", 0): (120, "metadata")})

One thread polls, and only that thread may use a subscriber: the callbacks run inside `poll_batch` and `close`, and a
commit anywhere else could name a partition that is being taken away at that moment. The broker fences members, not
owners: a live member *can* commit a partition that it lost. Hence `commit` is the one way to commit, and drops what is
not assigned when it is called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from confluent_kafka import KafkaException

from undercurrent.errors import CommitError, ProbingError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import (
    Assignor,
    Isolation,
    KafkaSettings,
    error_of,
    group_consumer_config,
    make_consumer,
    reason_of,
)
from undercurrent.kafka.events import PartitionEvent
from undercurrent.kafka.fetching import Fetching
from undercurrent.kafka.records import Partition, Record, client_partition

if TYPE_CHECKING:
    from types import TracebackType

    from confluent_kafka import Consumer, KafkaError, TopicPartition

logger = logging.getLogger(__name__)

Offsets = Mapping[tuple[str, int], tuple[int, str | None]]
"""Per partition the next offset to read and the commit's metadata."""


class RebalanceHandler(Protocol):
    """Hears what the group gives and takes, on the polling thread. What it raises comes out of `poll_batch`."""

    def on_assigned(self, partitions: list[Partition]) -> None:
        """These are ours from now on, and paused until `start` says where they begin."""

    def on_revoked(self, partitions: list[Partition]) -> None:
        """These are taken away in good order: during this call they are still ours and can be committed."""

    def on_lost(self, partitions: list[Partition]) -> None:
        """These were taken away already; somebody else may own them."""


@dataclass(frozen=True)
class CommitResult:
    """What became of an asynchronous commit: `error` is None when the broker took all of `offsets`."""

    offsets: dict[Partition, int]
    error: str | None
    retriable: bool


class GroupSubscriber:
    """A member of a consumer group.

    Args:
        settings: the connection.
        group_id: the group.
        topics: what to subscribe to.
        handler: hears about rebalances.
        assignor: how the group hands out partitions; all members must agree.
        isolation: which records are seen; `READ_COMMITTED` also makes `committed` wait for open transactions.
        instance_id: the name of a static member.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group_id: str,
        topics: Sequence[str],
        handler: RebalanceHandler,
        *,
        assignor: Assignor = Assignor.COOPERATIVE_STICKY,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        instance_id: str | None = None,
    ) -> None:
        self.group_id = group_id
        self._incremental = assignor.incremental
        self._config = group_consumer_config(
            settings, group_id, assignor=assignor, isolation=isolation, instance_id=instance_id
        )
        self._config["on_commit"] = self._on_commit
        self._topics = list(topics)
        self._handler = handler
        self._consumer: Consumer | None = None
        self._thread_id = 0
        self._fetching: Fetching | None = None
        self._commit_results: list[CommitResult] = []

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def assigned(self) -> frozenset[Partition]:
        """The partitions that are ours at this moment, started or not."""
        return self._fetching.partitions if self._fetching is not None else frozenset()

    def open(self) -> None:
        """Create the client and join the group; the calling thread is the polling thread from now on."""
        self._thread_id = threading.get_ident()
        self._consumer = make_consumer(self._config)
        self._fetching = Fetching(self._consumer, incremental=self._incremental)
        self._consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def start(self, partition: tuple[str, int], offset: int) -> bool:
        """Deliver `partition` from `offset` on, now or as soon as the client is ready; also moves a started one.

        Returns:
            False if the partition is not ours (any more).
        """
        return self._held().start(Partition(*partition), offset)

    def position(self, partition: tuple[str, int]) -> int | None:
        """Return the next offset to be delivered; None when the partition is not ours or not started."""
        return self._fetching.position(Partition(*partition)) if self._fetching is not None else None

    def pause(self, partition: tuple[str, int]) -> bool:
        """Deliver nothing of `partition` until `resume`; False if it is not ours."""
        return self._held().pause(Partition(*partition))

    def resume(self, partition: tuple[str, int]) -> bool:
        """Undo `pause`; a partition that was not started stays still. False if it is not ours."""
        return self._held().resume(Partition(*partition))

    def poll_batch(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return what has arrived of started partitions, at most `max_records`; wait `timeout_s` for the first record.

        Rebalance callbacks run inside. Call it at least every few seconds, or the group gives the partitions away.

        Raises:
            UnreachableError: the client is beyond use, e.g. fenced as a static member.
        """
        records = self._held().poll(max_records, timeout_s)
        if (fatal := self._config["logger"].fatal) is not None:
            raise UnreachableError(f"the member of group {self.group_id!r} is beyond use: {fatal}")
        return records

    def take_events(self) -> list[PartitionEvent]:
        """Return the problems of partitions since the last call.

        A partition that is `OUT_OF_RANGE` stands still until `start` is called for it again.
        """
        return self._held().take_events()

    def committed(
        self, partitions: Iterable[tuple[str, int]], timeout_s: float
    ) -> dict[Partition, tuple[int | None, str | None]]:
        """Return the group's committed offset and metadata per partition; (None, None) where nothing was committed.

        A partition that is absent from the answer is not known *yet*: the coordinator did not answer in time, or (with
        `READ_COMMITTED`) a transaction that holds offsets of the group is open. Ask again.

        Raises:
            UnreachableError: the client may not ask, or is beyond use.
        """
        asked = [client_partition(where) for where in partitions]
        if not asked:
            return {}
        try:
            answers = self._client().committed(asked, timeout=timeout_s)
        except KafkaException as exc:
            error = error_of(exc)
            if error is None or error.fatal() or error.name().endswith("AUTHORIZATION_FAILED"):
                raise UnreachableError(f"offsets of group {self.group_id!r}: {reason_of(exc)}") from exc
            return {}
        return {
            Partition(answer.topic, answer.partition): (
                (answer.offset, answer.metadata) if answer.offset >= 0 else (None, None)
            )
            for answer in answers
            if answer.error is None
        }

    def commit(self, offsets: Offsets, *, asynchronous: bool = True) -> dict[Partition, int]:
        """Commit, of the offsets given, those whose partition is ours at this moment.

        Args:
            offsets: per partition the next offset to read, and metadata of at most 4 kB.
            asynchronous: return at once; `take_commit_results` tells later. Else wait for the broker, which during a
                rebalance of a classic group takes until it is over.

        Returns:
            What was committed, or handed over to be.

        Raises:
            CommitError: the broker or the client refused; nothing is known to be committed.
        """
        held = self._held()
        ours = {Partition(*where): (offset, metadata) for where, (offset, metadata) in offsets.items() if where in held}
        if not ours:
            return {}
        listed = [client_partition(where, offset, metadata) for where, (offset, metadata) in ours.items()]
        try:
            if asynchronous:
                self._client().commit(offsets=listed, asynchronous=True)
            else:
                answers = self._client().commit(offsets=listed, asynchronous=False)
                _raise_first(answers)
        except KafkaException as exc:
            error = error_of(exc)
            raise CommitError(
                f"commit of group {self.group_id!r}: {reason_of(exc)}", retriable=_retriable(error)
            ) from exc
        return {where: offset for where, (offset, _) in ours.items()}

    def take_commit_results(self) -> list[CommitResult]:
        """Return what became of asynchronous commits since the last call."""
        results, self._commit_results = self._commit_results, []
        return results

    def consumer_group_metadata(self) -> object:
        """Return what a transactional writer needs to prove that this member is still in the group."""
        return self._client().consumer_group_metadata()

    def close(self) -> None:
        """Leave the group and end the client; harmless when it was never opened or is closed.

        `on_revoked` runs for what is still ours. What it raises is logged, since the client must end all the same.
        """
        if self._consumer is None:
            return
        self._on_polling_thread()
        consumer = self._consumer
        try:
            consumer.close()
        except (KafkaException, ProbingError, RuntimeError, OSError, ValueError) as exc:
            logger.warning("closing the member of group %s: %s", self.group_id, exc)
        finally:
            self._consumer = self._fetching = None

    # -- on the polling thread, inside the client's calls ---------------------------------------------------------

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        ours = _named(partitions)
        self._held().assign(ours)
        self._handler.on_assigned(ours)

    def _on_revoke(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = _named(partitions)
        try:
            self._handler.on_revoked(gone)
        finally:
            self._held().unassign(gone)

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = _named(partitions)
        self._held().unassign(gone)
        self._handler.on_lost(gone)

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        failed = error or next((answer.error for answer in partitions if answer.error is not None), None)
        self._commit_results.append(
            CommitResult(
                {Partition(answer.topic, answer.partition): answer.offset for answer in partitions},
                f"{failed.str()} [{failed.name()}]" if failed is not None else None,
                _retriable(failed),
            )
        )

    def _client(self) -> Consumer:
        if self._consumer is None:
            raise UnreachableError(f"the member of group {self.group_id!r} is not open")
        return self._consumer

    def _held(self) -> Fetching:
        self._on_polling_thread()
        if self._fetching is None:
            raise UnreachableError(f"the member of group {self.group_id!r} is not open")
        return self._fetching

    def _on_polling_thread(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("a GroupSubscriber is used by its polling thread alone")


def _named(partitions: Iterable[TopicPartition]) -> list[Partition]:
    return [Partition(where.topic, where.partition) for where in partitions]


def _raise_first(answers: Iterable[TopicPartition]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)


def _retriable(error: KafkaError | None) -> bool:
    return error is not None and (error.retriable() or error.code() in codes.RETRIABLE_COMMIT)
