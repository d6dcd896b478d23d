"""What a publisher is told, and what becomes of one that does not start, or dies in the middle of a report."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from engine_worker.publishing import PublisherProcess, publisher_settings
from undercurrent.errors import CaptureError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.service.sections import LoggingSection
from undercurrent.spec import Overflow, parse_dict
from undercurrent.topics import TopicPlan


def settings() -> PublisherSettings:
    point = {"layers": [1], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async"}
    names: dict[str, dict[str, object]] = {
        "usual": {},
        "deep": {"queue_depth": 9, "overflow": "drop_oldest"},
        "stop": {"overflow": "block"},
    }
    points = [{**point, "name": name, **own} for name, own in names.items()]
    spec = parse_dict({"version": 1, "extraction_points": points})
    return publisher_settings(
        KafkaSettings(bootstrap_servers="nowhere:1"),
        TopicPlan(points=tuple(names)),
        ring="/ring",
        identity=Identity(engine="e", incarnation=3, model="m"),
        interval_ms=20.0,
        max_cycle_mib=32,
        max_buffer_mib=64,
        points=spec.extraction_points,
        logging=LoggingSection(),
    )


def test_each_point_s_depth_and_policy_reach_the_publisher() -> None:
    told = PublisherSettings.from_json(settings().to_json())
    assert told == settings()
    assert told.bounds == {
        "usual": Bound(Overflow.DROP_NEWEST, None),
        "deep": Bound(Overflow.DROP_OLDEST, 9),
        "stop": Bound(Overflow.BLOCK, None),
    }
    assert told.blocking == ["stop"]
    assert told.max_buffer_bytes == 64 << 20
    assert told.acks == TopicPlan().acks


class Heard:
    """Counts what a worker hears of its publisher."""

    def __init__(self) -> None:
        self.ready = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)

    def on_report(self, report: dict[str, Any]) -> None:
        self.ready.release(int(report["ready"]))

    def on_publisher_gone(self, error: BaseException) -> None:
        self.gone.release()


# No system takes an argument of this size.
IMPOSSIBLE = ("x" * (4 << 20),)
SAYS_HALF_A_WORD = """
import os, sys
sys.stdin.readline()
os.write(int(sys.argv[1]), b'{"ready": true}\\n{"ready": tr')
"""


def test_a_publisher_that_cannot_be_started_is_told_and_not_waited_for() -> None:
    publisher = PublisherProcess(lambda work: work(), Heard(), IMPOSSIBLE)
    starting = threading.Thread(target=publisher.start, args=(settings(),), daemon=True)
    starting.start()
    starting.join(30.0)
    assert not starting.is_alive()
    with pytest.raises(CaptureError, match="did not come up"):
        publisher.wait_ready(30.0)
    publisher.end()


def test_a_publisher_that_dies_in_the_middle_of_a_report_is_replaced() -> None:
    heard = Heard()
    publisher = PublisherProcess(lambda work: work(), heard, (sys.executable, "-c", SAYS_HALF_A_WORD))
    publisher.start(settings())
    assert all(heard.ready.acquire(timeout=30.0) for _ in range(2))
    assert heard.gone.acquire(timeout=30.0)
    publisher.end()
