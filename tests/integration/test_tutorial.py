"""docs/tutorial.md, done as it says, on a real vLLM and a real Apache Kafka: it makes the probe that the demo ships."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from undercurrent import evaluation
from undercurrent.evaluation.scoring import score_requests
from undercurrent.probes.folder import LinearArtefact, read_folder
from undercurrent.testing import demo_model
from undercurrent.testing.brokers import Broker

pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.alone, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
_FENCE = re.compile(r"^```(\w+)(?: (terminal|by-hand))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEAD = """\
set -euo pipefail
trap 'kill -TERM $(jobs -p) 2>/dev/null; wait' EXIT
"""


def script_of(page: str) -> str:
    """Return the page as one script: a file for each block that names one, a background job for each terminal."""
    lines = [_HEAD]
    for language, how, text in _FENCE.findall(page):
        if language != "console":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a {language} block names its file in its first line"
            lines.append(f"cat > {name[1]} <<'END_OF_FILE'\n{text}END_OF_FILE\n")
            continue
        for command in re.findall(r"^\$ (.*)", text, re.MULTILINE):
            # The broker is the test's own.
            if how == "by-hand" or command == "undercurrent broker up":
                continue
            lines.append(f"echo {shlex.quote('$ ' + command)}")
            lines.append(f"{command} &> terminal-{len(lines)}.log &" if how == "terminal" else command)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def done(apache_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the ring after the last step, and what the steps printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "UNDERCURRENT_BOOTSTRAP_SERVERS": apache_broker.bootstrap_servers,
        "UNDERCURRENT_METRICS__PORT": "0",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", script_of(PAGE.read_text(encoding="utf-8"))],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.rglob("terminal-*.log"))
    assert process.returncode == 0, printed[-6000:] + logs
    return folder / "ring", printed


def linear(folder: Path) -> LinearArtefact:
    found = read_folder(folder)
    assert isinstance(found, LinearArtefact)
    return found


def test_it_makes_the_probe_of_the_demo_again(done: tuple[Path, str]) -> None:
    ring, _ = done
    made, shipped = linear(ring / "probes" / "vault-guard"), linear(demo_model.folder() / "probe")
    assert made.config.layer == shipped.config.layer
    cosine = made.weight64 @ shipped.weight64 / np.linalg.norm(made.weight64) / np.linalg.norm(shipped.weight64)
    assert cosine >= 0.999
    assert made.config.threshold == pytest.approx(shipped.config.threshold, rel=0.01)
    data = evaluation.load(ring / "data")
    acted = [
        score_requests(folder, data.blocks("residual", split="test"))["decided_at"].notna()
        for folder in (ring / "probes" / "vault-guard", demo_model.folder() / "probe")
    ]
    assert len(acted[0]) >= 60
    assert acted[0].any()
    assert not acted[0].all()
    assert acted[0].equals(acted[1])


def test_it_stops_those_who_would_be_told_the_code(done: tuple[Path, str]) -> None:
    ring, printed = done
    texts: dict[str, str] = {}
    with (ring / "watched-events.jsonl").open(encoding="utf-8") as file:
        for event in map(json.loads, file):
            texts[event["request_id"]] = texts.get(event["request_id"], "") + event["text"]
    told = {name.removeprefix("watched-") for name, text in texts.items() if demo_model.first_digit(text) is not None}
    assert 0 < len(told) < len(texts) == 16
    ends = dict(re.findall(r"^--- guarded-(\d+): (\w+)", printed, re.MULTILINE))
    assert {number for number, end in ends.items() if end == "aborted"} == told
    assert set(ends.values()) == {"aborted", "completed"}
    summary = json.loads((ring / "replayed" / "report.json").read_text(encoding="utf-8"))
    assert (summary["differences"], summary["verdicts_compared"]) == ([], 32)
