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

A client that is stranded (see `undercurrent.kafka.stranding`) is replaced inside `poll_batch`: the handler is told that
its partitions are lost, commits under way count as failed, and the new client joins the group as a new member. It gets
partitions when the session of the old one is over, as after a crash.

A partition stands still while a schema registry has not told the schema of its next record (see
`undercurrent.kafka.gate`); nobody is told, since nothing is lost and nothing is to be done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from confluent_kafka import KafkaException

from undercurrent.acls import Operation
from undercurrent.errors import CommitError, ProbingError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import (
    Assignor,
    ClientLog,
    Isolation,
    KafkaSettings,
    error_of,
    group_consumer_config,
    make_consumer,
    reason_of,
)
from undercurrent.kafka.events import PartitionEvent
from undercurrent.kafka.fetching import Fetching
from undercurrent.kafka.gate import Gate, gate_of
from undercurrent.kafka.records import Partition, Record, client_partition
from undercurrent.kafka.stranding import Watch, abandon

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


class _Client:
    """One client of a member, and what it has told. A member has another one after this was stranded.

    Args:
        config: of the client.
        incremental: whether single partitions may be assigned.
        gate: says which records may be decoded.
    """

    def __init__(self, config: Mapping[str, Any], *, incremental: bool, gate: Gate | None) -> None:
        self.watch = Watch()
        self.log = ClientLog()
        self.under_way: list[dict[Partition, int]] = []
        self.commit_results: list[CommitResult] = []
        told = {"logger": self.log, "on_commit": self._on_commit, **self.watch.config()}
        self.consumer = make_consumer({**config, **told})
        self.fetching = Fetching(self.consumer, incremental=incremental, gate=gate)

    def give_up(self) -> list[CommitResult]:
        """End the client without waiting; return what became of commits, those under way as failed."""
        failed = [CommitResult(offsets, "the client lost its brokers", retriable=True) for offsets in self.under_way]
        results = self.commit_results + failed
        # What its last moments tell, on another thread, is nobody's any more.
        abandon(self.consumer)
        return results

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        offsets = {Partition(answer.topic, answer.partition): answer.offset for answer in partitions}
        if offsets in self.under_way:
            self.under_way.remove(offsets)
        failed = error or next((answer.error for answer in partitions if answer.error is not None), None)
        reason = f"{failed.str()} [{failed.name()}]" if failed is not None else None
        self.commit_results.append(CommitResult(offsets, reason, _retriable(failed)))


class GroupSubscriber:
    """A member of a consumer group.

    Args:
        settings: the connection.
        group_id: the group.
        topics: what to subscribe to.
        handler: hears about rebalances.
        assignor: how the group hands out partitions; all members must agree.
        isolation: which records are seen; `READ_COMMITTED` also makes `committed` wait for open transactions.
        together: see `group_consumer_config`.
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
        together: bool = False,
    ) -> None:
        self.group_id = group_id
        self._incremental = assignor.incremental
        self._gate = gate_of(settings)
        self._config = group_consumer_config(
            settings, group_id, assignor=assignor, isolation=isolation, together=together
        )
        self._topics = list(topics)
        self._handler = handler
        self._client: _Client | None = None
        self._thread_id = 0
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
        return self._client.fetching.partitions if self._client is not None else frozenset()

    def open(self) -> None:
        """Create the client and join the group; the calling thread is the polling thread from now on."""
        self._thread_id = threading.get_ident()
        self._join()

    def start(self, partition: tuple[str, int], offset: int) -> bool:
        """Deliver `partition` from `offset` on, now or as soon as the client is ready; also moves a started one.

        Returns:
            False if the partition is not ours (any more).
        """
        return self._held().start(Partition(*partition), offset)

    def position(self, partition: tuple[str, int]) -> int | None:
        """Return the next offset to be delivered; None when the partition is not ours or not started."""
        return self._client.fetching.position(Partition(*partition)) if self._client is not None else None

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
            UnreachableError: the client is beyond use, e.g. its member was fenced for good.
        """
        records = self._held().poll(max_records, timeout_s)
        client = self._opened()
        if client.log.fatal is not None:
            raise UnreachableError(f"the member of group {self.group_id!r} is beyond use: {client.log.fatal}")
        if client.watch.stranded:
            self._replace(client)
            return []  # whoever owns their partitions next reads them again
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
            answers = self._opened().consumer.committed(asked, timeout=timeout_s)
        except KafkaException as exc:
            error = error_of(exc)
            if error is None or error.fatal() or error.name().endswith("AUTHORIZATION_FAILED"):
                needs = (
                    f" ({Operation.READ} on it is needed)" if error and error.code() in codes.GROUP_NOT_ALLOWED else ""
                )
                raise UnreachableError(f"offsets of group {self.group_id!r}: {reason_of(exc)}{needs}") from exc
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
        held, client = self._held(), self._opened()
        ours = {Partition(*where): (offset, metadata) for where, (offset, metadata) in offsets.items() if where in held}
        if not ours:
            return {}
        listed = [client_partition(where, offset, metadata) for where, (offset, metadata) in ours.items()]
        try:
            if asynchronous:
                client.consumer.commit(offsets=listed, asynchronous=True)
                client.under_way.append({where: offset for where, (offset, _) in ours.items()})
            else:
                answers = client.consumer.commit(offsets=listed, asynchronous=False)
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
        if self._client is not None:
            results += self._client.commit_results
            self._client.commit_results = []
        return results

    def consumer_group_metadata(self) -> object:
        """Return what a transactional writer needs to prove that this member is still in the group."""
        return self._opened().consumer.consumer_group_metadata()

    def close(self) -> None:
        """Leave the group and end the client; harmless when it was never opened or is closed.

        `on_revoked` runs for what is still ours. What it raises is logged, since the client must end all the same.
        """
        if self._client is None:
            return
        self._on_polling_thread()
        try:
            self._client.consumer.close()
        except (KafkaException, ProbingError, RuntimeError, OSError, ValueError) as exc:
            logger.warning("closing the member of group %s: %s", self.group_id, exc)
        finally:
            self._commit_results += self._client.commit_results
            self._client = None

    def _join(self) -> None:
        self._client = _Client(self._config, incremental=self._incremental, gate=self._gate)
        self._client.consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _replace(self, stranded: _Client) -> None:
        """Give up a client that will never hear of its group again, and join anew."""
        gone = sorted(stranded.fetching.partitions)
        logger.warning(
            "the member of group %s lost its brokers for good: it joins anew, without its %d partitions",
            self.group_id,
            len(gone),
        )
        self._join()
        self._commit_results += stranded.give_up()
        if gone:
            self._handler.on_lost(gone)

    # -- on the polling thread, inside the client's calls ---------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._gave_up(consumer):
            return
        ours = _named(partitions)
        self._held().assign(ours)
        self._handler.on_assigned(ours)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._gave_up(consumer):
            return
        gone = _named(partitions)
        try:
            self._handler.on_revoked(gone)
        finally:
            self._held().unassign(gone)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._gave_up(consumer):
            return
        gone = _named(partitions)
        self._held().unassign(gone)
        self._handler.on_lost(gone)

    def _gave_up(self, consumer: Consumer) -> bool:
        """Whether this is a stranded client that ends, on another thread."""
        return self._client is None or consumer is not self._client.consumer

    def _opened(self) -> _Client:
        if self._client is None:
            raise UnreachableError(f"the member of group {self.group_id!r} is not open")
        return self._client

    def _held(self) -> Fetching:
        self._on_polling_thread()
        return self._opened().fetching

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
