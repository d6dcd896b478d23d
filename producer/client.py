"""The producer as a library: prompts out, their generations back."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from producer.connection import FETCH_RECORDS, POLL_S, Client, Reader
from producer.follow import Follower
from producer.prompts import Prompt, check
from producer.requeue import requeued
from undercurrent.counts import counted
from undercurrent.errors import ConfigError, ProbingError, TopicError, UnreachableError
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.publisher import Delivery, DeliveryError
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.labels import label_key
from undercurrent.protocol.messages import GenerationEvent, Label, PromptRequest
from undercurrent.topics import partition_of

logger = logging.getLogger(__name__)


class SubmitError(ProbingError):
    """A prompt, or a label of one, did not reach the topic.

    Args:
        request_id: its id; of a label its key, `request_id|name|source`.
        reason: what the client or the broker said.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        self.request_id = request_id
        super().__init__(f"prompt {request_id}: {reason}")


class PromptProducer(Client):
    """Sends prompts and follows what becomes of them. One thread uses it; see `Client` for its arguments.

    Raises:
        TopicError: the prompts topic is missing, or has not the configured number of partitions.
        UnreachableError: no broker answers.
    """

    def _begin(self) -> None:
        self._partitions = self._count_partitions()
        # An answer is always written after its prompt: whoever reads from here misses nothing of what is sent below.
        self._starts = self._connection.lookup.end([(self._topics.generations, n) for n in range(self._partitions)])
        self._pending: set[str] = set()
        self._failed: dict[str, str] = {}
        self._offsets: dict[str, int] = {}

    @property
    def pending(self) -> int:
        """Prompts that are neither acknowledged nor failed."""
        return len(self._pending)

    @property
    def failed(self) -> Mapping[str, str]:
        """Why prompts and labels did not reach their topics, by request id and label's key."""
        return self._failed

    def submit(self, prompt: str | Prompt | PromptRequest, **fields: Any) -> str:  # noqa: ANN401 - fields of Prompt
        """Send one prompt and return its request id; its acknowledgement is awaited by `flush` and `follow`.

        Args:
            prompt: the text, or a whole prompt or message.
            fields: beside a text, fields of `Prompt`: `request_id`, `max_tokens`, `points`, `metadata`, ...

        Raises:
            ConfigError: a field is wrong.
            EncodeError: a message of the caller's own making does not fit its schema.
            SubmitError: the client refuses this prompt, as too large; `failed` has it too.
            UnreachableError: the client took no more records for `send_timeout_s`.
        """
        request, labels = self._request(prompt, fields)
        request_id = request.request_id
        value = self._codec.encode(request)
        self._send(self._topics.prompts, request_id, value, partition_of(request_id, self._partitions))
        for label in labels:
            key = label_key(label.request_id, label.name, label.source)
            self._send(self._topics.labels, key, self._codec.encode(label), -1)
        return request_id

    def requeue(self, request_id: str) -> str:
        """Run a failed request again, under a new id, which is returned; `flush` and `follow` await it.

        Raises:
            RequeueError: it has not failed, or its prompt is not on the topic any more.
            UnreachableError: the topics could not be read in time.
        """
        number = partition_of(request_id, self._partitions)
        prompts, generations = (
            self._whole(Partition(topic, number)) for topic in (self._topics.prompts, self._topics.generations)
        )
        return self.submit(requeued(request_id, prompts, generations, self._codec, now_us=self._now_us()))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every prompt is acknowledged.

        Args:
            timeout_s: seconds; `send_timeout_s` by default.

        Raises:
            SubmitError: a prompt failed; `failed` names them all.
            UnreachableError: some prompts are still not acknowledged.
        """
        wait_s = self._settings.send_timeout_s if timeout_s is None else timeout_s
        self._settle({*self._pending, *self._failed}, wait_s)

    def follow(
        self, request_ids: Collection[str], *, timeout_s: float | None = None, from_start: bool | None = None
    ) -> Iterator[GenerationEvent]:
        """Yield the events that count of some requests, until each has a valid final for every child.

        Args:
            request_ids: the requests.
            timeout_s: longest silence to bear, in seconds; None bears any.
            from_start: read the log from its beginning; by default only for requests that were not sent here.

        Raises:
            SubmitError: a prompt of this producer did not reach the topic.
            UnreachableError: nothing was heard for `timeout_s`.
            TopicError: the log cannot be read.
        """
        follower = self.follower(request_ids)
        heard = time.monotonic()
        for events in self.batches(follower, from_start=from_start):
            yield from events
            if events:
                heard = time.monotonic()
            elif timeout_s is not None and time.monotonic() - heard > timeout_s:
                waiting = (
                    f", {len(follower.waiting)} of them not accepted by any engine worker" if follower.waiting else ""
                )
                raise UnreachableError(
                    f"nothing heard of {counted(len(follower.open), 'request')} for {timeout_s:g} s{waiting}"
                )

    def follower(self, request_ids: Collection[str]) -> Follower:
        """Return what follows some requests, for use with `batches`; prompts sent here are acknowledged first.

        Raises:
            SubmitError: a prompt did not reach the topic.
            UnreachableError: a prompt was not acknowledged.
        """
        self._settle(request_ids, self._settings.send_timeout_s)
        return Follower(request_ids, self._codec, self._offsets)

    def batches(self, follower: Follower, *, from_start: bool | None = None) -> Iterator[list[GenerationEvent]]:
        """Yield the events of each poll, about every 0.1 s when there are none, until the follower's requests ended."""
        ours = all(request_id in self._offsets for request_id in follower.open)
        starts = self._log_starts(follower.open, from_start=not ours if from_start is None else from_start)
        reader = self._connection.reader(starts)
        try:
            while follower.open:
                records = reader.poll_batch(FETCH_RECORDS, POLL_S)
                yield [event for record in records if (event := follower.feed(record)) is not None]
                for number in follower.take_rewinds():
                    self._rewind(reader, (self._topics.generations, number))
                for problem in reader.take_events():
                    self._mend(reader, problem)
        finally:
            reader.close()

    def _whole(self, where: Partition) -> Iterator[Record]:
        """Yield every record of a partition up to its present end."""
        lookup = self._connection.lookup
        position, end = lookup.beginning([where])[where], lookup.end([where])[where]
        reader = self._connection.reader({where: position})
        heard = time.monotonic()
        try:
            while position < end:
                for record in reader.poll_batch(FETCH_RECORDS, POLL_S):
                    yield record
                    position, heard = record.offset + 1, time.monotonic()
                for problem in reader.take_events():
                    self._mend(reader, problem)
                if time.monotonic() - heard > self._settings.send_timeout_s:
                    raise UnreachableError(f"{where} was not read beyond offset {position} of {end}")
        finally:
            reader.close()

    def _settle(self, request_ids: Collection[str], wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not self._pending.isdisjoint(request_ids) and (left_s := deadline - time.monotonic()) > 0:
            self._connection.writer.poll(min(POLL_S, left_s))
        for request_id in request_ids:
            if request_id in self._failed:
                raise SubmitError(request_id, self._failed[request_id])
        late = len(self._pending.intersection(request_ids))
        if late:
            raise UnreachableError(f"{counted(late, 'prompt was', 'prompts were')} not acknowledged in {wait_s:g} s")

    def _send(self, topic: str, key: str, value: bytes, partition: int) -> None:
        self._pending.add(key)
        deadline = time.monotonic() + self._settings.send_timeout_s
        while (error := self._produce(topic, key, value, partition)) is not None:
            if not error.queue_full:
                self._pending.discard(key)
                self._failed[key] = error.reason
                raise SubmitError(key, error.reason)
            if time.monotonic() >= deadline:
                self._pending.discard(key)
                raise UnreachableError(
                    f"no room for prompt {key} in {self._settings.send_timeout_s:g} s: {error.reason}"
                )
            self._connection.writer.poll(POLL_S)
        self._connection.writer.poll(0.0)

    def _request(
        self, prompt: str | Prompt | PromptRequest, fields: Mapping[str, Any]
    ) -> tuple[PromptRequest, list[Label]]:
        if isinstance(prompt, PromptRequest):
            return prompt, []
        made = check({"prompt": prompt, **fields}) if isinstance(prompt, str) else prompt
        if isinstance(made, str):
            raise ConfigError(made)
        request = made.request(self._now_us())
        return request, made.label_messages(request)

    def _produce(self, topic: str, key: str, value: bytes, partition: int) -> DeliveryError | None:
        def delivered(delivery: Delivery) -> None:
            self._pending.discard(key)
            if delivery.error is not None:
                self._failed[key] = delivery.error.reason
            elif topic == self._topics.prompts:
                self._offsets[key] = delivery.offset

        return self._connection.writer.produce(
            topic, value, key=key.encode(), partition=partition, on_delivery=delivered
        )

    def _count_partitions(self) -> int:
        wanted, lookup = self._settings.prompt_partitions, self._connection.lookup
        found = len(lookup.partitions(self._topics.prompts))
        if wanted is not None and found != wanted:
            raise TopicError(f"{self._topics.prompts} has {found} partitions, the configuration says {wanted}")
        answers = len(lookup.partitions(self._topics.generations))
        if answers != found:
            raise TopicError(
                f"{self._topics.prompts} has {found} partitions and {self._topics.generations} {answers}; a request's "
                "answers stand in the partition of its prompt's number, so they must be equal"
            )
        return found

    def _log_starts(self, request_ids: Collection[str], *, from_start: bool) -> dict[tuple[str, int], int]:
        numbers = {partition_of(request_id, self._partitions) for request_id in request_ids}
        wanted = [Partition(self._topics.generations, number) for number in sorted(numbers)]
        found = self._connection.lookup.beginning(wanted) if from_start else self._starts
        return {partition: found[partition] for partition in wanted}

    def _rewind(self, reader: Reader, partition: tuple[str, int]) -> None:
        reader.add(partition, self._connection.lookup.beginning([partition])[Partition(*partition)])

    def _mend(self, reader: Reader, problem: PartitionEvent) -> None:
        if problem.problem is not PartitionProblem.OUT_OF_RANGE:
            raise TopicError(f"{problem.partition} cannot be read: {problem.reason}")
        logger.warning("%s: offset %d is gone, reading on from the log's start", problem.partition, problem.position)
        self._rewind(reader, problem.partition)
