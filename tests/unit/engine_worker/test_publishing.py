"""What a publisher is told: the bounds of a spec's points, and settings that survive the way to its process."""

from __future__ import annotations

from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from engine_worker.publishing import publisher_settings
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
