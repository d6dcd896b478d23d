"""The commands on real brokers, each as the process that a user starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.producer.kafka_double import CODEC
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.protocol.messages import Accepted, GenerationEvent, GenerationKind, Message, Outcome
from undercurrent.testing.brokers import Broker
from undercurrent.testing.servers import free_port
from undercurrent.testing.waiting import wait_until

pytestmark = pytest.mark.kafka

TIMEOUT_S = 60

POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [2], tensor_type: residual_stream, position: "*", execution_mode: async, queue_depth: 8}
"""


class Cli:
    """Runs `undercurrent` with one configuration."""

    def __init__(self, config: Path) -> None:
        self.config = config

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "undercurrent.cli", *arguments, "--config", str(self.config)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=self.config.parent)

    def run(self, *arguments: str, given: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(given, timeout=TIMEOUT_S)
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, code, out, err)

    def lines(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments).stdout.splitlines()]


@pytest.fixture
def cli(broker: Broker, topic_prefix: str, tmp_path: Path) -> Cli:
    """The commands on a broker whose topics were applied."""
    (tmp_path / "points.yaml").write_text(POINTS)
    config = tmp_path / "pipeline.yaml"
    kafka = {"bootstrap_servers": broker.bootstrap_servers, **broker.settings().options}
    sections = {"kafka": kafka, "topics": {"prefix": topic_prefix, "prompt_partitions": 3}, "points": "points.yaml"}
    config.write_text(json.dumps(sections))
    made = Cli(config)
    made.run("topics", "apply")
    return made


@pytest.fixture
def answers(broker: Broker) -> Iterator[Publisher]:
    publisher = Publisher(broker.settings())
    yield publisher
    publisher.close()


def answer(
    publisher: Publisher, prefix: str, prompt: dict[str, Any], text: str, outcome: Outcome = Outcome.COMPLETED
) -> None:
    """Write what an engine worker writes about a prompt, as `tail` shows it."""
    common = {
        "request_id": prompt["request_id"],
        "attempt": 1,
        "engine": "e",
        "incarnation": 1,
        "prompt_partition": prompt["partition"],
        "prompt_offset": prompt["offset"],
    }
    messages: list[Message] = [
        Accepted(**common, epoch=1, content_hash=b"", points=(), stream_partition=0, accepted_at_us=1),
        GenerationEvent(**common, kind=GenerationKind.TOKENS, text=text, emitted_at_us=2),
        GenerationEvent(**common, kind=GenerationKind.FINAL, outcome=outcome, emitted_at_us=3),
    ]
    for message in messages:
        publisher.produce(
            f"{prefix}.generations",
            CODEC.encode(message),
            key=prompt["request_id"].encode(),
            partition=prompt["partition"],
        )
    assert publisher.flush(20.0) == 0


def test_topics_are_applied_once_and_listed_as_planned(cli: Cli, topic_prefix: str) -> None:
    assert "19 of 19 topics were as planned" in cli.run("topics", "apply").stdout
    rows = cli.lines("topics", "list", "--json", "--check")
    assert {row["state"] for row in rows} == {"as planned"}
    assert {row["topic"]: row["partitions"] for row in rows}[f"{topic_prefix}.prompts"] == 3
    assert [row["topic"] for row in cli.lines("topics", "plan", "--json")] == [row["topic"] for row in rows]


def test_another_partition_count_is_refused_and_shown(cli: Cli, topic_prefix: str) -> None:
    cli.config.write_text(cli.config.read_text().replace('"prompt_partitions": 3', '"prompt_partitions": 5'))
    assert "3 partitions, planned 5" in cli.run("topics", "apply", code=1).stderr
    assert "3 partitions, planned 5" in cli.run("topics", "list", "--check", code=1).stdout
    assert "has 3 partitions, the configuration says 5" in cli.run("prompts", "send", "x", code=1).stderr


def test_a_file_is_sent_but_for_its_bad_lines(cli: Cli, topic_prefix: str) -> None:
    good = [json.dumps({"prompt": f"p{i}", "request_id": f"r{i}"}) for i in range(50)]
    done = cli.run("prompts", "send", "--seed", "7", given="\n".join([*good, '{"prompt": 1}', "nope"]), code=2)
    assert sorted(done.stdout.split()) == sorted(f"r{i}" for i in range(50))
    assert [line.split(" ")[0] for line in done.stderr.splitlines()] == ["<stdin>:51:", "<stdin>:52:"]
    shown = cli.lines("tail", f"{topic_prefix}.prompts")
    assert {line["key"]: line["prompt"] for line in shown} == {f"r{i}": f"p{i}" for i in range(50)}
    assert {line["sampling"]["seed"] for line in shown} == {7}


def test_a_file_may_be_a_dash_and_may_hold_lines_that_are_no_text(cli: Cli, tmp_path: Path) -> None:
    assert cli.run("prompts", "send", "--file", "-", given='{"prompt": "p", "request_id": "r"}').stdout == "r\n"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "p", "request_id": "a"}\n{"prompt": "\xff"}\n{"prompt": "p", "request_id": "b"}\n')
    done = cli.run("prompts", "send", "--file", str(path), code=2)
    assert (done.stdout, done.stderr) == ("a\nb\n", f"{path}:2: not UTF-8 text at character 12\n")
    assert "nowhere: No such file" in cli.run("prompts", "send", "--file", str(tmp_path / "nowhere"), code=2).stderr


def test_what_is_generated_is_shown_while_it_is_written_and_afterwards(
    cli: Cli, answers: Publisher, topic_prefix: str
) -> None:
    sender = cli.start("prompts", "send", "hello", "--follow", "--timeout", "30")
    (prompt,) = cli.lines("tail", f"{topic_prefix}.prompts", "--follow", "--count", "1")
    answer(answers, topic_prefix, prompt, "good day")
    out, err = sender.communicate(timeout=TIMEOUT_S)
    assert (sender.returncode, out) == (0, "good day\n")
    assert "completed" in err
    shown = cli.lines("prompts", "follow", prompt["request_id"], "--json")
    assert [line["kind"] for line in shown] == ["tokens", "final"]


def test_a_bad_line_is_what_the_exit_code_tells_though_a_request_failed_too(
    cli: Cli, answers: Publisher, topic_prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "p"}\nnope\n')
    sender = cli.start("prompts", "send", "--file", str(path), "--follow", "--timeout", "30")
    (prompt,) = cli.lines("tail", f"{topic_prefix}.prompts", "--follow", "--count", "1")
    answer(answers, topic_prefix, prompt, "", Outcome.FAILED)
    out, err = sender.communicate(timeout=TIMEOUT_S)
    assert "failed" in out + err
    assert sender.returncode == 2, out + err


def test_tail_shows_where_a_message_lies_and_what_is_no_message(
    cli: Cli, answers: Publisher, broker: Broker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}.verdicts"
    answers.produce(topic, b"rubbish", key=b"k", partition=1)
    assert answers.flush(20.0) == 0
    (shown,) = cli.lines("tail", topic, "--partition", "1")
    assert (shown["partition"], shown["offset"], shown["key"], shown["bytes"]) == (1, 0, "k", 7)
    assert shown["undecodable"]
    assert cli.lines("tail", topic, "--partition", "0") == []
    assert "has partitions 0 to 3, not 9" in cli.run("tail", topic, "--partition", "9", code=1).stderr
    if broker.is_apache:  # the embedded broker makes a topic of every name that it is asked for
        assert "there is no topic 'none'; `undercurrent topics apply` makes" in cli.run("tail", "none", code=1).stderr


def test_tail_shows_what_is_not_committed_only_when_it_is_asked_to(cli: Cli, broker: Broker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}.verdicts"
    writer = TransactionalWriter(broker.settings(), topic_prefix)
    writer.init(30.0)
    writer.begin()
    writer.produce(topic, b"said", key=b"k", partition=1)
    writer.commit()
    writer.begin()
    writer.produce(topic, b"undecided", key=b"k", partition=1)

    def sizes(*more: str) -> list[int]:
        return [line["bytes"] for line in cli.lines("tail", topic, "--partition", "1", *more)]

    wait_until(lambda: sizes("--uncommitted") == [4, 9], TIMEOUT_S, "the open transaction's record")
    wait_until(lambda: sizes() == [4], TIMEOUT_S, "the decision on the first one")
    writer.abort()
    writer.close()
    assert (sizes(), sizes("--uncommitted")) == ([4], [4, 9])


def test_following_ends_at_ctrl_c_without_a_word(cli: Cli, topic_prefix: str) -> None:
    process = cli.start("tail", f"{topic_prefix}.prompts", "--follow")
    cli.run("prompts", "send", "hello")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["prompt"] == "hello"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, "", "")


def test_nobody_at_the_address_is_exit_code_3_and_one_line() -> None:
    command = [sys.executable, "-m", "undercurrent.cli", "tail", "t", "-b", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "no Kafka broker answered at 127.0.0.1:" in line


def test_a_broker_comes_up_prints_its_address_and_ends_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "undercurrent.cli", "broker", "up", "--kind", "embedded"]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert "development only" in process.stderr.readline()
        plan = [sys.executable, "-m", "undercurrent.cli", "topics", "apply", "-b", address]
        subprocess.run(plan, capture_output=True, timeout=TIMEOUT_S, check=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_named(cli: Cli) -> None:
    assert "the pipeline has no group 'nope'" in cli.run("groups", "describe", "nope", code=2).stderr
    assert "the pipeline has no group 'nope'" in cli.run("groups", "reset", "nope", "--to", "latest", code=2).stderr
    assert "no engine has started" in cli.run("engines", "list").stderr
    assert "expected TOPIC:PARTITION:OFFSET" in cli.run("dlq", "show", "x", code=2).stderr
    assert "--request-id: is empty" in cli.run("erase", "--request-id", "", code=2).stderr
    assert "no topic holds a record of nobody" in cli.run("erase", "--request-id", "nobody").stderr
