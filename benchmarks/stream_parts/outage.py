"""Brokers that are killed under traffic and come back: rows that are lost, and how long it takes to catch up.

64 requests, 512 records of 8 KB a second, from a ring of 16 MiB through a publisher process with its usual bounds. The
broker is killed (SIGKILL), is away for 30 s, and is started again on its own log; the traffic goes on all the time.
Then everything on the topic is read and counted.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.stream_parts import Aim, Options
from benchmarks.stream_parts.publish import PARTITIONS, REQUESTS, WIDTH, Source, publisher_settings
from engine_worker.publishing import PublisherProcess
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.reader import AssignedReader
from undercurrent.protocol.messages import ActivationBlock, StreamEnded
from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import Topic

AIMS = {"outage_lost_rows": Aim("<", 1)}

TOPIC, ACKS = "bench.outage", "bench.outage.acks"
AWAY_S, STEP_S = 30.0, 0.125


class Heard:
    """What the publisher says."""

    def __init__(self) -> None:
        self.ended = self.most_waiting = self.waiting = 0

    def on_report(self, report: dict[str, Any]) -> None:
        """Take a report."""
        self.ended += len(report["ended"])
        self.waiting = report["waiting_bytes"]
        self.most_waiting = max(self.most_waiting, self.waiting)

    def on_publisher_gone(self, error: BaseException) -> None:
        """No publisher dies here."""
        raise error


def play(source: Source, stop: threading.Event) -> None:
    """Play steps at their pace until told to stop."""
    due_s = time.monotonic()
    while not stop.is_set():
        source.fill(1)
        due_s += STEP_S
        time.sleep(max(0.0, due_s - time.monotonic()))


def measure(_: Broker, options: Options) -> dict[str, float]:
    """Return `outage_lost_rows`, and what the buffer held."""
    # A broker of its own: one that is killed reads all of its logs when it comes back, those of other parts too.
    with apache_kafka() as broker:
        return away(broker, options)


def away(broker: Broker, options: Options) -> dict[str, float]:
    """Return the figures of one absence of a broker."""
    TopicAdmin(broker.settings()).create(
        [
            Topic(name=TOPIC, partitions=PARTITIONS, retention_ms=600_000),
            Topic(name=ACKS, partitions=1, retention_ms=600_000),
        ]
    )
    kafka = broker.settings().with_room(1_048_588)
    source, heard, stop = Source(options.seed, 16 << 20), Heard(), threading.Event()
    publisher = PublisherProcess(lambda call: call(), heard)
    publisher.start(publisher_settings(source, kafka, TOPIC, ACKS))
    publisher.wait_ready(60)
    source.begin()
    engine = threading.Thread(target=play, args=(source, stop))
    engine.start()
    try:
        time.sleep(2)
        broker.kill()
        time.sleep(AWAY_S)
        broker.start()
    except BaseException:
        stop.set()
        raise
    began_s = time.monotonic()
    wait_until(lambda: heard.waiting < 1 << 20, 120, "the backlog to be written")
    catch_up_s = time.monotonic() - began_s
    stop.set()
    engine.join()
    source.end()
    wait_until(lambda: heard.ended == REQUESTS, 120, "the last acknowledgement")
    publisher.end()
    rows, declared = count(broker)
    played = source.steps * REQUESTS
    source.ring.close()
    print(f"{played:,} records of {2 * WIDTH} bytes, {rows:,} on the topic, {declared:,} declared lost")
    return {
        "outage_lost_rows": float(played - rows),
        "outage_away_s": AWAY_S,
        "outage_catch_up_s": catch_up_s,
        "outage_most_waiting_mb": heard.most_waiting / 1e6,
    }


def count(broker: Broker) -> tuple[int, int]:
    """Return the rows on the topic, each once, and those that streams' ends declare lost."""
    codec, rows, declared = Codec(), set[tuple[str, int]](), 0
    starts = {(TOPIC, number): 0 for number in range(PARTITIONS)}
    with AssignedReader(broker.settings(), starts) as reader:
        for record in reader.read_to_end(120.0):
            message = codec.decode(record.value)
            if isinstance(message, ActivationBlock):
                rows.add((message.request_id, message.seq))
            elif isinstance(message, StreamEnded):
                declared += sum(message.dropped)
    return len(rows), declared
