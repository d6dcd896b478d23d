"""Outputs and the offsets they came from, written together or not at all.

    writer = TransactionalWriter(settings, "probes.0")
    writer.init(30.0)                                   # takes the id over from a dead owner
    writer.begin()
    writer.produce("verdicts", value, key=b"request-1")
    writer.send_offsets({("activations", 0): (120, "metadata")}, subscriber.consumer_group_metadata())
    writer.commit()

Every call raises one of four errors: `RetriableTransactionError` (call it again), `AbortableTransactionError` (call
`abort`, forget what was derived from the inputs and seek back), `FencedError` (another owner is there, or the client
is beyond use: close) or `StrandedError` (nobody took the id, but this client cannot go on, e.g. since it finds no
broker any more: close, and go on with another writer; what became of the open transaction is not known). One thread
uses a writer.

A broker that ends a transaction by its timeout, as one does that comes back after it, fences its owner in the same
words as one that has given the id to somebody else. Only time tells them apart: no broker does so of a transaction that
is younger than the timeout. An owner of an older one is stranded. Should it have been replaced all the same, it takes
the id back, and its heir, fenced in a young one, ends: at most one of them writes at any time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaException

from undercurrent.acls import Operation
from undercurrent.errors import (
    AbortableTransactionError,
    ConfigError,
    FencedError,
    RetriableTransactionError,
    StrandedError,
    TransactionError,
    UnreachableError,
)
from undercurrent.kafka import codes
from undercurrent.kafka.client import (
    KafkaSettings,
    error_of,
    make_producer,
    reason_of,
    transactional_producer_config,
)
from undercurrent.kafka.publisher import HeaderList, as_value
from undercurrent.kafka.records import client_partition
from undercurrent.kafka.stranding import is_stranded

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

logger = logging.getLogger(__name__)

_ASK_S = 3.0
# How much later than it should a call may come back.
_LATE_S = 2.0
_AGAIN_S = 0.02

T = TypeVar("T")

Offsets = Mapping[tuple[str, int], tuple[int, str | None]]
"""Per partition the next offset to read and the commit's metadata."""


class TransactionalWriter:
    """A transactional producer with its errors sorted.

    Args:
        settings: the connection.
        transactional_id: the id that at most one living writer holds.
        transaction_timeout_s: how long the broker lets a dead owner's transaction stand open.
        call_timeout_s: how long one call to the coordinator may take before it counts as retriable.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        transactional_id: str,
        *,
        transaction_timeout_s: float = 10.0,
        call_timeout_s: float = 10.0,
    ) -> None:
        self.transactional_id = transactional_id
        self._settings = settings
        self._config = transactional_producer_config(
            settings, transactional_id, transaction_timeout_s=transaction_timeout_s
        )
        self._transaction_timeout_s = transaction_timeout_s
        self._call_timeout_s = call_timeout_s
        self._producer: Producer | None = None
        self._pid = 0
        self._open = False
        self._begun_s = 0.0
        self._failed: str | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction was begun and neither committed nor aborted."""
        return self._open

    def init(self, timeout_s: float) -> None:
        """Take the transactional id over; an open transaction of an earlier owner is aborted.

        Raises:
            UnreachableError: no coordinator agreed within `timeout_s`.
            FencedError: the id may not be used.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._run(lambda producer: producer.init_transactions(self._share_of(deadline)), deadline=deadline)
            except (RetriableTransactionError, StrandedError) as exc:
                # "Coordinator load in progress" right after a broker's start, or the dead owner's abort still going on.
                if time.monotonic() >= deadline:
                    raise UnreachableError(
                        f"transactional id {self.transactional_id!r} could not be taken in {timeout_s:g} s: {exc}"
                    ) from exc
                if isinstance(exc, StrandedError):
                    self._producer = None  # nothing was begun: another client does as well
                time.sleep(_AGAIN_S)
            else:
                return

    def begin(self) -> None:
        """Open a transaction."""
        self._run(lambda producer: producer.begin_transaction())
        self._open, self._begun_s = True, time.monotonic()
        self._failed = None

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int = -1,
        headers: HeaderList | None = None,
    ) -> None:
        """Add one record to the open transaction.

        Raises:
            AbortableTransactionError: the record cannot be taken (too large, buffer full).
        """
        arguments: dict[str, Any] = {"on_delivery": self._delivered}
        if headers:
            arguments["headers"] = list(headers)
        try:
            self._run(lambda producer: producer.produce(topic, value, key, partition, **arguments))
        except BufferError:
            self._run(lambda producer: producer.poll(0.1))
            try:
                self._run(lambda producer: producer.produce(topic, value, key, partition, **arguments))
            except BufferError as exc:
                raise AbortableTransactionError("the client's buffer is full") from exc
        except RetriableTransactionError as exc:
            raise AbortableTransactionError(str(exc)) from exc

    def send_offsets(self, offsets: Offsets, group_metadata: object) -> None:
        """Add a group's offsets and their metadata to the open transaction.

        Raises:
            AbortableTransactionError: the group moved on and this member owns the partitions no more.
            StrandedError: the client does not come back.
        """
        positions = [client_partition(where, offset, metadata) for where, (offset, metadata) in offsets.items()]

        def send(producer: Producer) -> None:
            producer.send_offsets_to_transaction(positions, group_metadata, self._call_timeout_s)

        limit_s = self._call_timeout_s + _LATE_S
        try:
            self._run(lambda producer: _within(limit_s, lambda: send(producer)))
        except FutureTimeoutError as exc:
            logger.warning("the writer %s does not come back from its offsets", self.transactional_id)
            # Nobody may wait for this client's end: the call has not ended.
            self._producer, self._open = None, False
            raise StrandedError(f"sending offsets has not ended after {limit_s:g} s") from exc

    def flush(self) -> None:
        """Wait until the logs have the records of the open transaction; `commit` does so by itself.

        Raises:
            RetriableTransactionError: some are still under way.
        """
        left = self._run(lambda producer: producer.flush(self._call_timeout_s))
        if left:
            raise RetriableTransactionError(f"{left} records are under way")

    def commit(self) -> None:
        """Make records and offsets of the open transaction visible, all or none.

        Raises:
            RetriableTransactionError: not known yet; call `commit` again.
            AbortableTransactionError: none of it will be visible; call `abort`.
        """
        self._run(lambda producer: producer.commit_transaction(self._call_timeout_s))
        self._open = False

    def abort(self) -> None:
        """Drop the open transaction; nothing happens when none is open."""
        if not self._open:
            return
        self._run(lambda producer: producer.abort_transaction(self._call_timeout_s))
        self._open = False

    def close(self, timeout_s: float = 5.0) -> None:
        """Abort what is open if that can be done within `timeout_s`, with 0 not at all, and end the client."""
        if self._producer is None:
            return
        # Dropping the client ends it at once. Its own `close` would try an abort without a limit, also where nothing is
        # open but the id was never taken: with a broker that is gone it blocks for good.
        producer, self._producer = self._producer, None
        was_open, self._open = self._open, False
        if was_open and timeout_s > 0:
            try:
                _plainly(lambda client: client.abort_transaction(timeout_s), producer)
            except KafkaException as exc:
                logger.warning("%s ends with its transaction open: %s", self.transactional_id, reason_of(exc))

    def _client(self) -> Producer:
        if self._producer is None:
            self._producer, self._pid = make_producer(self._config), os.getpid()
        elif self._pid != os.getpid():
            raise ConfigError("a Kafka client was carried over a fork; create the writer in the process that uses it")
        return self._producer

    def _run(self, call: Callable[[Producer], T], *, deadline: float = float("inf")) -> T:
        try:
            return _plainly(call, self._client())
        except KafkaException as exc:
            error = classify(exc, self._failed)
            if _timed_out(exc) and isinstance(error, RetriableTransactionError) and self._is_stranded(deadline):
                logger.warning("the writer %s lost its brokers for good", self.transactional_id)
                # The broker ends it, by its timeout or when the id is taken over.
                self._open = False
                raise StrandedError(str(error)) from exc
            refused = error_of(exc)
            if refused is not None and refused.code() in codes.ID_NOT_ALLOWED:
                what = f"{Operation.WRITE} on transactional id {self.transactional_id} is not allowed"
                raise FencedError(what) from exc
            if isinstance(error, FencedError) and self._outlived:
                logger.warning(
                    "the broker ended the transaction of the writer %s, by its timeout", self.transactional_id
                )
                self._open = False
                raise StrandedError(f"the transaction's time was over: {error}") from exc
            raise error from exc

    @property
    def _outlived(self) -> bool:
        """Whether the open transaction is older than brokers let one be."""
        return self._open and time.monotonic() - self._begun_s > self._transaction_timeout_s

    def _share_of(self, deadline: float) -> float:
        return min(self._call_timeout_s, max(0.1, deadline - time.monotonic()))

    def _is_stranded(self, deadline: float) -> bool:
        limit_s = min(_ASK_S, deadline - time.monotonic())
        return limit_s > 0 and is_stranded(self._settings, self._client(), limit_s)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = f"{as_value(error, message.topic() or '').reason} [{error.name()}]"


def _plainly(call: Callable[[Producer], T], producer: Producer) -> T:
    """Make a call of a client and raise what it raises, also where the client comes to its end in the middle of it.

    Where records fail because the client did, confluent-kafka 2.16 raises `SystemError` with the reason as its cause.
    """
    try:
        return call(producer)
    except SystemError as exc:
        if isinstance(exc.__cause__, KafkaException):
            raise exc.__cause__ from None
        raise


def _within(limit_s: float, call: Callable[[], None]) -> None:
    """Make a call on a thread of its own, and leave both behind where it has not ended within a time.

    librdkafka 2.16 sends offsets to a group's coordinator without looking at the clock. Where the coordinator is lost
    between two states of its connection, as happens when a broker is killed and comes back, the call never ends.

    Raises:
        TimeoutError: it has not ended.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
            ended.set_result(None)
        except BaseException as exc:  # raised where it is waited for
            ended.set_exception(exc)

    threading.Thread(target=run, name="offsets", daemon=True).start()
    ended.result(limit_s)


def until_decided(call: Callable[[], None], deadline_s: float) -> None:
    """Repeat a call of a writer until it is decided.

    Args:
        call: what to do.
        deadline_s: how long it may stay undecided.

    Raises:
        StrandedError: it stayed so: nor can the transaction be aborted, which would conflict with the call under way.
        TransactionError: it failed otherwise.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            call()
        except RetriableTransactionError as exc:
            if time.monotonic() >= deadline:
                raise StrandedError(f"undecided for {deadline_s:g} s: {exc}") from exc
            time.sleep(_AGAIN_S)  # some of these errors come at once
        else:
            return


def _timed_out(exc: KafkaException) -> bool:
    error = error_of(exc)
    return error is not None and error.code() == codes.TIMED_OUT


def classify(exc: KafkaException, first_failure: str | None = None) -> TransactionError:
    """Return which of the errors a failed transactional call is.

    Args:
        exc: what the client raised.
        first_failure: the first record of the transaction that failed, which says more than the call.
    """
    error = error_of(exc)
    message = reason_of(exc) + (f"; first failed record: {first_failure}" if first_failure else "")
    if error is None:
        return AbortableTransactionError(message)
    if error.fatal() and error.code() == codes.TRANSACTION_GONE:
        return StrandedError(message)
    if error.fatal() or error.code() in codes.FENCED:
        return FencedError(message)
    if error.txn_requires_abort() or error.code() in codes.ABORTABLE:
        return AbortableTransactionError(message)
    if error.retriable() or error.code() in codes.RETRIABLE:
        return RetriableTransactionError(message)
    return AbortableTransactionError(message)
