"""What `undercurrent init` writes, run as its README says: by the apps, on a real broker and a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from undercurrent.codec import Codec
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.reader import AssignedReader
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictKind
from undercurrent.testing import demo_model
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.brokers import Broker
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

TIMEOUT_S = 120


def undercurrent(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "undercurrent.cli", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def environment(apache_broker: Broker, topic_prefix: str) -> dict[str, str]:
    """What differs from a deployment: the address, topics and ports of the test's own."""
    return {
        "UNDERCURRENT_BOOTSTRAP_SERVERS": apache_broker.bootstrap_servers,
        "UNDERCURRENT_TOPICS__PREFIX": topic_prefix,
        "UNDERCURRENT_METRICS__PORT": "0",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def folder(tmp_path: Path, environment: dict[str, str]) -> Path:
    """The written files, checked, and the topics made."""
    made = tmp_path / "ring"
    undercurrent("init", str(made), "--model", str(demo_model.folder() / "model"), environment=environment)
    undercurrent("config", "check", str(made), environment=environment)
    undercurrent("topics", "apply", "--config", str(made / "engine.yaml"), environment=environment)
    return made


@pytest.fixture
def apps(folder: Path, environment: dict[str, str]) -> Iterator[list[AppProcess]]:
    engine, host = folder / "engine.yaml", folder / "host.yaml"
    running = [
        AppProcess("engine_worker", engine, folder / "engine.log", environment, ["--engine", "hf"]),
        AppProcess("probe_consumers", host, folder / "host.log", environment),
    ]
    yield running
    for app in running:
        app.close()


def test_the_apps_run_what_was_written(
    folder: Path, apps: list[AppProcess], environment: dict[str, str], apache_broker: Broker, topic_prefix: str
) -> None:
    config = ["--config", str(folder / "engine.yaml")]
    options = ["--max-tokens", "8", "--request-id", "r1", "--follow", "--timeout", "100"]
    try:
        undercurrent("prompts", "send", "Tell me about Velmora.", *options, *config, environment=environment)
    except (AssertionError, subprocess.TimeoutExpired) as exc:
        raise AssertionError("\n".join(app.tail() for app in apps)) from exc
    topic, codec = f"{topic_prefix}.verdicts", Codec()
    starts = {(topic, number): 0 for number in range(4)}

    def results() -> list[ProbeVerdict]:
        with AssignedReader(apache_broker.settings(), starts, isolation=Isolation.READ_COMMITTED) as reader:
            said = [codec.decode(record.value) for record in reader.read_to_end(30.0)]
        return [v for v in said if isinstance(v, ProbeVerdict) and v.kind is VerdictKind.RESULT]

    wait_until(lambda: bool(results()), TIMEOUT_S, "the first probe's result")
    (result,) = results()
    assert (result.request_id, result.probe, result.mode) == ("r1", "loud-tokens", BindingMode.SHADOW)
    for app in apps:
        assert app.running, app.tail()
        assert app.terminate() == 0
