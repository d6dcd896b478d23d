from __future__ import annotations

import json
import re
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from undercurrent.errors import ConfigError
from undercurrent.service.health import HealthServer, Heartbeat
from undercurrent.service.metrics import OTHER, EngineMetrics, PublisherMetrics, bounded


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_only_a_stuck_loop_fails_healthz_and_only_readyz_says_why_not() -> None:
    clock, reasons = Clock(), ["control is not read to its end"]
    beat = Heartbeat("poll", 5.0, clock=clock)
    with HealthServer(CollectorRegistry(), heartbeats=[beat], not_ready=lambda: reasons) as server:
        assert _get(server, "/healthz")[0] == 200  # no beat is expected before the first
        beat.beat()
        clock.now_s += 5.0
        assert _get(server, "/healthz") == (200, '{"status": "ok", "reasons": []}\n')
        status, body = _get(server, "/readyz")
        assert (status, json.loads(body)["reasons"]) == (503, reasons)

        clock.now_s += 0.1
        status, body = _get(server, "/healthz")
        assert status == 503
        assert json.loads(body)["reasons"] == ["poll: no sign of life for 5.1 s"]
        beat.rest()
        assert _get(server, "/healthz")[0] == 200
        reasons.clear()
        assert _get(server, "/readyz")[0] == 200
        assert _get(server, "/else")[0] == 404


def test_metrics_are_served_from_the_given_registry() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry).finished("completed", 1.5)
    with HealthServer(registry) as server:
        status, body = _get(server, "/metrics")
    assert status == 200
    assert 'undercurrent_engine_requests_total{outcome="completed"} 1.0' in body


def test_a_server_that_never_began_can_be_stopped() -> None:
    HealthServer(CollectorRegistry()).stop()


def test_an_unknown_word_counts_as_other() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.pause("backlog", on=True)
    for word in ("request-1", "request-2"):
        metrics.ack(word)
        metrics.dead_letter(word)
        metrics.finished(word, 0.1)
        metrics.abort_stage(word, 0.1)
    text = generate_latest(registry).decode()
    assert "request-" not in text
    assert f'undercurrent_engine_abort_acks_total{{outcome="{OTHER}"}} 2.0' in text
    assert 'undercurrent_engine_intake_paused{reason="backlog"} 1.0' in text
    assert bounded("a", ("a",)) == "a"


def test_names_of_braked_probes_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    for number in range(100):
        metrics.brake(f"p{number}", on=True)
    metrics.brake("p0", on=False)
    text = generate_latest(registry).decode()
    assert text.count("undercurrent_engine_probe_braked{") == 65
    assert 'undercurrent_engine_probe_braked{probe="p0"} 0.0' in text
    assert f'undercurrent_engine_probe_braked{{probe="{OTHER}"}} 1.0' in text


@pytest.mark.parametrize("metrics", [EngineMetrics, PublisherMetrics])
def test_names_have_the_prefix_and_base_units(metrics: type) -> None:
    registry = CollectorRegistry()
    metrics(registry)
    for family in registry.collect():
        assert family.name.startswith("undercurrent_")
        assert not re.search(r"_(ms|us|milliseconds|kb|mb)\b", family.name)
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        assert family.documentation.endswith(".")


def test_all_parts_fit_into_one_registry() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    publisher = PublisherMetrics(registry, ["p"])
    publisher.dropped("p", "stale_tap", 12)
    publisher.fault("bad_order", 2)
    publisher.fault("anything", 1)
    text = generate_latest(registry).decode()
    assert 'undercurrent_publisher_dropped_activations_total{point="p",reason="stale_tap"} 12.0' in text
    assert f'undercurrent_publisher_capture_faults_total{{kind="{OTHER}"}} 1.0' in text


def test_a_port_that_is_taken_is_a_wrong_configuration() -> None:
    with (
        HealthServer(CollectorRegistry()) as first,
        pytest.raises(ConfigError, match=f"127.0.0.1:{first.port} cannot be served"),
    ):
        HealthServer(CollectorRegistry(), port=first.port)
