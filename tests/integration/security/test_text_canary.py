"""No log, metric, page or error repeats what somebody wrote: a canary is planted wherever text comes in."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import replace

import psutil
import pytest
import yaml

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.protocol.messages import ProbeVerdict, VerdictKind
from undercurrent.spec import ExecutionMode, ExtractionPoint, TensorType, parse_position
from undercurrent.testing.brokers import free_port
from undercurrent.testing.canaries import TEXT_CANARY, command_lines, found_texts, text_forms
from undercurrent.testing.canary_prompts import FAILED, LETTERS, plant_texts, words_on_topics
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

POINT = ExtractionPoint(
    "residual",
    (0, 2),
    TensorType.RESIDUAL_STREAM,
    parse_position("*"),
    execution_mode=ExecutionMode.ASYNC,
    queue_depth=1024,
)
PROBE = """
from undercurrent.core import Probe, ProbeSignal


class Broken(Probe):
    probe_kind = "trajectory"

    def on_start(self, ctx):
        self.seen = ctx

    def on_activation(self, record):
        raise RuntimeError(f"cannot judge {self.seen} {record}")

    def on_end(self, ctx):
        raise RuntimeError(f"cannot judge {self.seen}")
"""


@pytest.fixture
def bench(embedded_broker, tmp_path):
    points = [replace(POINT, name="residual", token_ids=False), replace(POINT, name="told")]
    with EngineBench(embedded_broker.settings(), tmp_path, assignor="range", partitions=1, points=points) as made:
        yield made


def page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30.0) as answer:
        return answer.read().decode()


def test_the_canary_is_nowhere_but_on_the_topics(bench, monkeypatch, capsys):
    (bench.folder / "broken.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(bench.folder), os.environ.get("PYTHONPATH", ""))))
    ports = {"host": free_port()}
    bindings = [{"name": "broken", "point": "residual", "probe": "broken:Broken", "mode": "flag"}]
    # To its end, so that a producer's own mistakes come up as well.
    worker = bench.start_worker(bench.configure(logging={"level": "DEBUG"}))
    host = bench.start_host(
        bench.configure_host(*bindings, logging={"level": "DEBUG"}, metrics={"port": ports["host"]})
    )
    worker.wait_ready(120.0)
    ids = plant_texts(bench, tuple(TEXT_CANARY.encode()))
    finals = bench.wait_finals(ids, 120.0)
    assert {name for name in ids if finals[name][0].error} >= FAILED
    bench.wait(lambda: len(bench.dead_letters()) >= LETTERS, "dead letters of prompts", 120.0)
    bench.wait(
        lambda: [v for v in bench.said(ProbeVerdict) if v.kind is VerdictKind.ERROR and v.request_id == ids[0]],
        "the probe's error",
        120.0,
    )
    dead = bench.plan.dlq(bench.plan.activations("residual"))
    bench.wait(lambda: bench.read(dead), "the dead letter of an activation", 120.0)

    family = [worker.pid, host.pid, *(child.pid for child in psutil.Process(worker.pid).children(recursive=True))]
    texts = {
        "command lines": command_lines(family),
        "worker's pages": "\n".join(worker.get(path)[1] for path in ("/metrics", "/readyz", "/livez", "/nowhere")),
        "host's metrics": page(ports["host"], "/metrics"),
        **words_on_topics(bench),
        **commands(bench, ids[0], monkeypatch, capsys),
    }
    assert worker.terminate() == 0
    assert host.terminate() == 0
    texts |= {"worker's log": worker.log.read_text(), "host's log": host.log.read_text()}
    assert found_texts(texts) == []
    # They are looked for where they are: on the topics.
    assert {"text", "JSON"} <= {form.split(" in ")[0] for form in found_texts({"topic": stored(bench)})}
    # Records of a point without token ids hold no text; those of another one do, as ids.
    bare, told = (activations(bench, point) for point in ("residual", "told"))
    assert found_texts({"records": bare}) == []
    assert found_texts({"records": told}) == ["int32 in records"]


def commands(bench, request_id: str, monkeypatch, capsys) -> dict[str, str]:
    """Run what reads recordings, and what is told wrong prompts; return what they say of themselves."""
    pipeline = yaml.safe_load((bench.folder / "engine-0.yaml").read_text())
    shared = {key: pipeline[key] for key in ("kafka", "topics", "points")}
    (bench.folder / "pipeline.yaml").write_text(yaml.safe_dump(shared))
    monkeypatch.chdir(bench.folder)
    config = ("--config", "pipeline.yaml")
    wrong = [
        {"prompt": TEXT_CANARY, "max_tokens": "many"},
        {"prompt": [TEXT_CANARY]},
        {"prompt": TEXT_CANARY, "metadata": {"a": {"b": TEXT_CANARY}}},
        {"promt": TEXT_CANARY},
    ]
    (bench.folder / "wrong.jsonl").write_text("\n".join([*map(json.dumps, wrong), f'{{"{TEXT_CANARY}']))
    said = {}
    for arguments in (
        ("prompts", "send", "--file", "wrong.jsonl", *config),
        ("dataset", "export", "d", *config),
        ("dataset", "info", "d", "--verify"),
        ("labels", "add", request_id, "bad", "positive", *config),
        ("replay", "--config", "host.yaml", "--out", "r", "--compare", "none"),
    ):
        run(app, PROG_NAME, arguments)
        captured = capsys.readouterr()
        said[" ".join(arguments[:2])] = captured.out + captured.err
    assert "wrong.jsonl:5: not JSON" in said["prompts send"]
    return said


def activations(bench, point: str) -> bytes:
    """Return every record of a point that an engine wrote."""
    written = (record.value for record in bench.read(bench.plan.activations(point)))
    return b"".join(value for value in written if value != TEXT_CANARY.encode())


def stored(bench) -> bytes:
    prompts = b"".join(record.value or b"" for record in bench.read(bench.plan.prompts))
    assert text_forms()["text"] in prompts
    return prompts
