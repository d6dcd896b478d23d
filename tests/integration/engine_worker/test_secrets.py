"""An engine worker whose connection holds secrets, when all goes well and when it does not: it repeats none of them."""

from __future__ import annotations

import psutil
import pytest

from undercurrent.testing.canaries import (
    CANARIES,
    CANARY_ENVIRONMENT,
    canary_section,
    command_lines,
    found_canaries,
)
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.servers import free_port

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

PASSWORD, KEY, TOKEN = CANARIES.values()


@pytest.fixture
def bench(embedded_broker, tmp_path):
    with EngineBench(embedded_broker.settings(), tmp_path, assignor="range") as made:
        yield made


def test_a_worker_at_work_shows_them_nowhere(bench, tmp_path):
    config = bench.configure(kafka=canary_section(bench.settings, tmp_path), logging={"level": "DEBUG"})
    worker = bench.start_worker(config, CANARY_ENVIRONMENT)
    worker.wait_ready()
    ids = bench.send(["a prompt"], max_tokens=4)
    bench.wait_finals(ids)
    family = [worker.pid, *(child.pid for child in psutil.Process(worker.pid).children(recursive=True))]
    commands = command_lines(family)
    assert "engine_worker.publisher" in commands
    pages = "\n".join(worker.get(path)[1] for path in ("/metrics", "/readyz", "/livez", "/nowhere"))
    assert "undercurrent_publisher" in pages
    assert worker.terminate() == 0
    assert found_canaries({"log": worker.log.read_text(), "pages": pages, "command lines": commands}) == []


@pytest.mark.parametrize(
    ("kafka", "said"),
    [
        ({"bootstrap_servers": "127.0.0.1:{free}"}, "127.0.0.1:{free}"),
        ({"sasl.pasword": PASSWORD}, "sasl.pasword"),
        ({"security.protocol": KEY}, "security.protocol"),
        ({"sasl.mechanism": TOKEN, "security.protocol": "sasl_plaintext"}, "sasl.mechanism"),
        ({"sasl.password": {"value": PASSWORD}}, "sasl.password"),
        ({"sasl.password_file": "/nowhere/password"}, "sasl.password_file"),
        ({"ssl.key.pem": KEY, "security.protocol": "ssl"}, "ssl.key.pem"),
        ({"acks": TOKEN}, "acks"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_one_that_cannot_start_names_the_setting_and_no_secret(bench, tmp_path, kafka, said):
    free = str(free_port())
    section = canary_section(bench.settings, tmp_path) | {k: _filled(v, free) for k, v in kafka.items()}
    worker = bench.start_worker(bench.configure(kafka=section), CANARY_ENVIRONMENT)
    assert worker.wait(60) != 0
    log = worker.log.read_text()
    assert said.replace("{free}", free) in log
    assert found_canaries({"log": log}) == []


def _filled(value, free):
    return value.replace("{free}", free) if isinstance(value, str) else value
