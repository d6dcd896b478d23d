"""Groups as a cluster has them: settings of the broker-side protocol, and offsets that are moved with metadata."""

from __future__ import annotations

import json
import logging

import pytest

from undercurrent.acls import letters_group
from undercurrent.cli.groups import app as groups_app
from undercurrent.cli.running import run
from undercurrent.cli.topics import app as topics_app
from undercurrent.errors import TopicError
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.group_admin import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, GroupAdmin
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.records import Partition
from undercurrent.protocol.epochs import Position, encode_metadata
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.topics import TopicPlan

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _heard():
    """Commands silence the client library for their process; here that is everybody's."""
    log = logging.getLogger("undercurrent.kafka.client")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def config(apache_broker, topic_prefix, tmp_path):
    (tmp_path / "points.yaml").write_text(
        "version: 1\nextraction_points:\n  - {name: p, layers: [0], tensor_type: residual_stream, position: '*', "
        "execution_mode: async, queue_depth: 8, probe_type: linear, probe_kind: trajectory}\n"
    )
    path = tmp_path / "pipeline.yaml"
    topics = {"prefix": topic_prefix, "prompt_partitions": 1, "activation_partitions": 1, "session_timeout_ms": 9000}
    sections = {"kafka": apache_broker.settings().keys(), "topics": topics, "points": "points.yaml"}
    path.write_text(json.dumps(sections))
    return path


def said(capsys, app, *arguments, code=0):
    done = run(app, "undercurrent", list(arguments))
    out, err = capsys.readouterr()
    assert done == code, out + err
    return out + err


def test_apply_sets_the_session_timeout_of_each_group(apache_broker, config, topic_prefix, capsys):
    shown = said(capsys, topics_app, "plan", "--config", str(config))
    assert f"~ group {topic_prefix}.probes.p: {SESSION_TIMEOUT}" in shown
    assert "; 3 groups" in said(capsys, topics_app, "apply", "--config", str(config))
    assert "nothing to change" in said(capsys, topics_app, "plan", "--config", str(config))
    admin = GroupAdmin(apache_broker.settings())
    for group in (f"{topic_prefix}.engine", f"{topic_prefix}.probes.p"):
        found = admin.settings(group)
        assert (found[SESSION_TIMEOUT], found[HEARTBEAT_INTERVAL]) == ("9000", "3000")
    with pytest.raises(TopicError, match=r"settings of group .* cannot be changed.*session"):
        admin.change(f"{topic_prefix}.engine", {SESSION_TIMEOUT: "10"})


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_group_is_shown_and_moved_with_what_its_commits_know(
    apache_broker, config, topic_prefix, capsys, members, assignor
):
    plan, settings = TopicPlan(prefix=topic_prefix, points=("p",)), apache_broker.settings()
    said(capsys, topics_app, "apply", "--config", str(config))
    publisher = Publisher(settings)
    for topic in (plan.prompts, plan.activations("p")):
        for at in range(20):
            publisher.produce(topic, b"x", key=str(at).encode(), partition=0)
    assert publisher.flush(60.0) == 0
    publisher.close()
    engine, probes = f"{topic_prefix}.engine", f"{topic_prefix}.probes.p"
    prompts, streams = Partition(plan.prompts, 0), Partition(plan.activations("p"), 0)
    position = Position(offset=8, epoch=7, read_from=0, finished=frozenset({10}))
    admin = GroupAdmin(settings)
    admin.move(engine, {prompts: (8, encode_metadata(position))})
    metadata = HostMetadata(emitted_up_to=15, fingerprint="abc")
    admin.move(probes, {streams: (9, metadata.to_text())})

    rows = [
        json.loads(line)
        for line in said(capsys, groups_app, "describe", "--json", "--config", str(config)).splitlines()
    ]
    without = ("describe", "--json", "--prefix", topic_prefix, "--bootstrap-servers", apache_broker.bootstrap_servers)
    assert [json.loads(line) for line in said(capsys, groups_app, *without).splitlines()] == rows, "no file is needed"
    found = {row["group"]: row for row in rows}
    assert (found[engine]["lag"], found[probes]["lag"]) == (11, 5)
    assert "epoch 7" in found[engine]["metadata"]
    assert "e = 15, probes abc, 6 offsets are read again" in found[probes]["metadata"]

    back = ("reset", probes, "--to", "earliest", "--config", str(config))
    assert "nothing was changed: add --execute" in said(capsys, groups_app, *back)
    lookup = OffsetLookup(settings)
    assert lookup.committed(probes, [streams]) == {streams: (9, metadata.to_text())}
    said(capsys, groups_app, *back, "--execute")
    assert lookup.committed(probes, [streams]) == {streams: (0, metadata.to_text())}
    forward = ("reset", engine, "--to", "latest", "--config", str(config), "--execute")
    assert "--skip: is missing; 11 records" in said(capsys, groups_app, *forward, code=2)
    said(capsys, groups_app, *forward, "--skip")
    ((offset, text),) = lookup.committed(engine, [prompts]).values()
    assert offset == 20
    assert json.loads(text or "")["e"] == 7
    assert "committed nothing there" in said(capsys, groups_app, *back, "--partition", "7", code=2)
    assert "not in the log" in said(capsys, groups_app, "reset", probes, "--to", "99", "--config", str(config), code=2)

    member = members(apache_broker, probes, plan.activations("p"), assignor)
    member.wait_assigned(1)
    assert "has members: stop them first" in said(capsys, groups_app, *back, "--execute", code=1)
    assert lookup.committed(probes, [streams]) == {streams: (0, metadata.to_text())}


def test_the_group_that_writes_dead_letters_is_shown_and_moved(apache_broker, config, topic_prefix, capsys):
    plan, settings = TopicPlan(prefix=topic_prefix, points=("p",)), apache_broker.settings()
    said(capsys, topics_app, "apply", "--config", str(config))
    publisher = Publisher(settings)
    for _ in range(5):
        publisher.produce(plan.verdicts, b"x", key=b"r", partition=1)
    assert publisher.close(60.0) == 0
    letters, verdicts = letters_group(plan), Partition(plan.verdicts, 1)
    GroupAdmin(settings).move(letters, {verdicts: (3, ""), Partition(plan.control, 0): (0, "")})

    shown = said(capsys, groups_app, "describe", "--json", "--config", str(config))
    rows = {(row["group"], row["topic"]): row for row in map(json.loads, shown.splitlines())}
    row = rows[letters, plan.verdicts]
    assert (row["partition"], row["committed"], row["end"], row["lag"]) == (1, 3, 5, 2)
    assert row["metadata"] == "none: it writes dead letters of what nobody can read"
    assert rows[letters, plan.control]["lag"] == 0
    assert letters in said(capsys, groups_app, "describe", letters, "--config", str(config))

    reset = ("reset", letters, "--partition", "1", "--config", str(config), "--execute", "--to")
    assert "--skip: is missing; 2 records would be left behind that nobody has looked at" in said(
        capsys, groups_app, *reset, "latest", code=2
    )
    assert "of 3 records each that nobody can read would become a dead letter a second time" in said(
        capsys, groups_app, *reset, "earliest", code=2
    )
    assert "1 partition moved" in said(capsys, groups_app, *reset, "earliest", "--say-again")
    assert OffsetLookup(settings).committed(letters, [verdicts])[verdicts][0] == 0
