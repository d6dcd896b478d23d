"""The publisher process: reads the ring, writes the activations topics, tells its parent what is acknowledged.

    python -m engine_worker.publisher REPORT_FD       # its settings, one JSON line, come on standard input

It is self-clocked. Every `interval_ms` it drains the ring, produces all of it, and waits until the broker has
acknowledged all before it produces more. What comes meanwhile waits in its own memory, within bounds: by bytes, and by
what one request may have waiting at a point; beyond them each point's overflow policy decides (`backlog`). Rows whose
tokens the worker has not seen yet wait, and none past the end of its request is published
(`undercurrent.capture.holding`). A producer that breaks is replaced under another incarnation. The end of standard
input asks it to drain the ring once more and to end; it dies with its parent.

It imports neither torch nor vLLM: another Python thread inside the engine would cost the engine more than this process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

from engine_worker.announcing import announce_and_wait
from engine_worker.publisher_loop import Clients, PublisherLoop
from engine_worker.publisher_telling import PublisherSettings, Report
from undercurrent.acls import Operation, Resource, Right, Service
from undercurrent.capture.ring import Ring
from undercurrent.errors import ProbingError, TopicError, UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.bulk import BulkPublisher
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.permits import require
from undercurrent.kafka.publisher import Publisher
from undercurrent.service.logging import setup_logging
from undercurrent.service.processes import keep_freed_memory, spare_collector
from undercurrent.subjects import codec_of

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_LIMIT = "max.message.bytes"


def main() -> int:
    """Run until the parent ends; return the exit status."""
    # A terminal and a service manager signal the whole group: the parent says when, by ending standard input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    report_fd = int(sys.argv[1])
    settings = PublisherSettings.from_json(sys.stdin.buffer.readline().decode())
    setup_logging(settings.log_format, settings.log_level, service="publisher")
    keep_freed_memory(2 * settings.max_cycle_bytes)
    try:
        rings = [Ring.open(path) for path in (settings.ring, *settings.more_rings)]
        writes = [*settings.topics.values(), settings.acks]
        needed = [Right(Resource.TOPIC, topic, Operation.WRITE) for topic in writes]
        require(KafkaSettings.model_validate(settings.kafka), Service.PUBLISHER, needed)
        settings = fitted(settings)
        renew = clients(settings)
        if settings.late:
            # It is not the one that the worker announced.
            bulk, incarnation = renew()
            settings = replace(settings, identity=replace(settings.identity, incarnation=incarnation))
        else:
            bulk = bulk_publisher(settings)
        loop = PublisherLoop(
            settings,
            rings[0].reader(),
            bulk,
            _reporter(report_fd),
            _stdin_ended,
            [ring.reader() for ring in rings[1:]],
            rings[0].lengths,
            renew=renew,
            codec=codec_of(KafkaSettings.model_validate(settings.kafka)),
        )
        spare_collector()
        loop.run()
        loop.close()
    except BrokenPipeError:
        return 1
    except ProbingError:
        logger.exception("the publisher ends")
        return 1
    return 0


def fitted(settings: PublisherSettings) -> PublisherSettings:
    """Return settings whose records and batches the topics take as they are now, whatever was planned.

    The broker refuses a batch above a topic's `max.message.bytes` as a whole: a client that makes larger ones would
    lose records that are small enough. Where the broker does not tell (it takes the right to describe the topics'
    settings) the plan is believed.

    Args:
        settings: as told by the parent.
    """
    kafka = KafkaSettings.model_validate(settings.kafka)
    try:
        actual = TopicAdmin(kafka).describe(settings.topics.values())
    except (TopicError, UnreachableError) as exc:
        logger.info("the topics' largest messages are taken from the plan: %s", exc)
        return settings
    most = dict(settings.max_record_bytes)
    for point, topic in settings.topics.items():
        limit = actual[topic].config.get(_LIMIT, "") if topic in actual else ""
        if limit.isdigit() and int(limit) < most[point]:
            logger.warning(
                "%s takes messages of %s bytes, planned are %d: larger ones are split", topic, limit, most[point]
            )
            most[point] = int(limit)
    if most == settings.max_record_bytes:
        return settings
    return replace(settings, max_record_bytes=most, kafka={**settings.kafka, "message.max.bytes": min(most.values())})


def bulk_publisher(settings: PublisherSettings) -> BulkPublisher:
    """Return the client that writes the cycles.

    Args:
        settings: as told by the parent.
    """
    kafka = KafkaSettings.model_validate(settings.kafka)
    return BulkPublisher(kafka, max_buffer_bytes=settings.max_cycle_bytes, look_s=_LOOK_S)


def clients(settings: PublisherSettings) -> Clients:
    """Return what makes a producer under a new incarnation, which it announces first.

    Args:
        settings: as told by the parent.
    """

    def renew() -> tuple[BulkPublisher, int]:
        kafka = KafkaSettings.model_validate(settings.kafka)
        publisher = Publisher(kafka)
        try:
            incarnation = announce_and_wait(publisher, settings.acks, settings.identity.engine, codec_of(kafka))
        finally:
            publisher.close()
        return bulk_publisher(settings), incarnation

    return renew


def _reporter(fd: int) -> Callable[[Report], None]:
    def send(report: Report) -> None:
        line = json.dumps(asdict(report), separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(fd, line) :]

    return send


def _stdin_ended(timeout_s: float) -> bool:
    readable, _, _ = select.select([sys.stdin.buffer], [], [], timeout_s)
    return bool(readable)


if __name__ == "__main__":
    sys.exit(main())
