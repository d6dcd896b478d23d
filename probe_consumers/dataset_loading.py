"""A dataset onto the topics of a cluster."""

from __future__ import annotations

from pathlib import Path

from probe_consumers.dataset_erased import refuse_erased
from probe_consumers.dataset_import import DatasetImport, Imported
from undercurrent.counts import counted
from undercurrent.errors import DatasetError, TopicError, UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan, partition_of

_FLUSH_S = 60.0


def import_folder(folder: Path, settings: KafkaSettings, plan: TopicPlan) -> Imported:
    """Write the streams of a dataset onto a pipeline's topics.

    Raises:
        DatasetError: the folder is no dataset, holds a request that is erased, or a point that the pipeline has not.
        TopicError: a topic holds records already.
        UnreachableError: a record was not acknowledged.
    """
    publisher = Publisher(settings)
    failed: list[str] = []

    def delivered(delivery: Delivery) -> None:
        if delivery.error is not None:
            failed.append(f"{delivery.topic}: {delivery.error.reason}")

    def send(point: str, request_id: str, value: bytes) -> None:
        topic, number = plan.activations(point), partition_of(request_id, plan.activation_partitions)
        key = request_id.encode()
        while (error := publisher.produce(topic, value, key=key, partition=number, on_delivery=delivered)) is not None:
            if not error.queue_full:
                raise UnreachableError(f"{topic}: {error.reason}")
            publisher.poll(0.1)
        publisher.poll(0.0)
        _raise(failed)

    run = DatasetImport(folder, block_bytes=plan.activation_bytes // 2, codec=codec_of(settings, plan))
    unknown = [point for point in run.points if point not in plan.points]
    if unknown:
        raise DatasetError(
            f"{folder}: point {unknown[0]!r} is none of the pipeline's: {', '.join(plan.points) or 'none'}"
        )
    refuse_erased(folder, settings, plan.prefix)
    _prepare(settings, plan, run.points)
    try:
        for item in run.messages():
            send(item.point, item.request_id, item.value)
        left = publisher.flush(_FLUSH_S)
        _raise(failed)
        if left:
            raise UnreachableError(f"{counted(left, 'record was', 'records were')} not acknowledged in {_FLUSH_S:g} s")
    finally:
        publisher.close()
    return run.result


def _prepare(settings: KafkaSettings, plan: TopicPlan, points: tuple[str, ...]) -> None:
    """Create the topics, and refuse those that hold records."""
    names = {plan.activations(point) for point in points}
    admin = TopicAdmin(settings)
    wanted = [topic for topic in plan.topics() if topic.name in names]
    admin.create(wanted, replication_factor=plan.replication_factor)
    admin.check_partitions(wanted)
    lookup = OffsetLookup(settings)
    for topic in wanted:
        ends = lookup.end(lookup.partitions(topic.name))
        if any(ends.values()):
            raise TopicError(
                f"{topic.name} holds {counted(sum(ends.values()), 'record')} already: streams of one name would be "
                "mixed; use another --prefix"
            )


def _raise(failed: list[str]) -> None:
    if failed:
        raise UnreachableError(f"{failed[0]} ({counted(len(failed), 'record')} refused)")
