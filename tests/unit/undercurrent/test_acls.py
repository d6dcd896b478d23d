"""The table of rights: who may do what, and how it is printed."""

from __future__ import annotations

import json

import pytest

from undercurrent.acls import Names, Operation, Resource, Right, Service, commands, rights, topics_of
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(points=("a", "b"))
POINTS = """
version: 1
extraction_points:
  - {name: a, layers: [2], tensor_type: residual_stream, position: "*", execution_mode: async, queue_depth: 8}
"""


def written(service: Service) -> set[str]:
    return {
        right.name
        for right in rights(PLAN, service)
        if right.resource is Resource.TOPIC and right.operation is Operation.WRITE
    }


def test_who_reads_recordings_writes_nothing_and_a_publisher_reads_nothing() -> None:
    assert written(Service.REPLAY) == set()
    assert written(Service.PUBLISHER) == {PLAN.acks, PLAN.activations("a"), PLAN.activations("b")}
    assert {right.operation for right in rights(PLAN, Service.PUBLISHER)} == {
        Operation.WRITE,
        Operation.DESCRIBE_CONFIGS,
    }


def test_prompts_come_from_producers_and_operators_alone_and_verdicts_from_probes() -> None:
    assert {service for service in Service if PLAN.prompts in written(service)} == {Service.PRODUCER, Service.OPERATOR}
    assert {service for service in Service if PLAN.verdicts in written(service)} == {Service.PROBES}
    assert {service for service in Service if PLAN.generations in written(service)} == {Service.ENGINE}


def test_probe_hosts_see_neither_prompts_nor_generations() -> None:
    seen = {topic.name for topic in topics_of(PLAN, Service.PROBES)}
    assert {PLAN.prompts, PLAN.generations, PLAN.labels}.isdisjoint(seen)


def test_a_bare_server_writes_letters_of_what_it_reads_and_sees_no_text_of_others() -> None:
    held = [right for right in rights(PLAN, Service.SERVER) if right.resource is Resource.TOPIC]
    read = {right.name for right in held if right.operation is Operation.READ}
    assert {PLAN.prompts, PLAN.generations, *map(PLAN.activations, PLAN.points)}.isdisjoint(read)
    activations = {*map(PLAN.activations, PLAN.points)}
    assert written(Service.SERVER) == {PLAN.acks, *activations, *map(PLAN.dlq, read - {PLAN.erasures})}


@pytest.mark.parametrize("service", list(Service))
def test_no_right_goes_beyond_the_pipeline(service: Service) -> None:
    topics = {topic.name for topic in PLAN.topics()}
    for right in rights(PLAN, service):
        if right.resource is Resource.TOPIC:
            assert right.name in topics
            assert not right.prefixed
        elif right.name != "undercurrent-reader-":
            assert right.name.startswith(f"{PLAN.prefix}.")


def test_groups_have_the_names_of_the_deployment() -> None:
    names = Names(engine_group="gpu", probe_services=("safety",))
    groups = {r.name for s in Service for r in rights(PLAN, s, names) if r.resource is Resource.GROUP}
    assert groups == {
        "undercurrent.gpu",
        "undercurrent.gpu.letters",
        "undercurrent.safety.a",
        "undercurrent.safety.b",
        "undercurrent-reader-",
    }


def test_what_is_joined_has_a_group_and_transactions_of_its_own() -> None:
    names = Names(joined=("a+b",))
    added = set(rights(PLAN, Service.PROBES, names)) - set(rights(PLAN, Service.PROBES))
    assert {(right.resource, right.name, right.prefixed) for right in added} == {
        (Resource.GROUP, "undercurrent.probes.a+b", False),
        (Resource.TRANSACTIONAL_ID, "undercurrent.probes.a+b.", True),
    }


def test_one_line_for_each_topic() -> None:
    granted = (
        Right(Resource.TOPIC, "p.generations", Operation.READ),
        Right(Resource.TOPIC, "p.generations", Operation.WRITE),
        Right(Resource.TRANSACTIONAL_ID, "p.probes.", Operation.WRITE, prefixed=True),
    )
    start = "kafka-acls.sh --bootstrap-server b:1 --add --allow-principal 'User:e' "
    assert commands("User:e", granted, "b:1") == [
        f"{start}--operation Read --operation Write --topic 'p.generations'",
        f"{start}--operation Write --transactional-id 'p.probes.' --resource-pattern-type prefixed",
    ]


def test_the_command_takes_names_from_the_configuration(tmp_path, capsys) -> None:
    (tmp_path / "points.yaml").write_text(POINTS)
    config = tmp_path / "engine.yaml"
    config.write_text("points: points.yaml\ntopics: {prefix: mine}\ngroup: {name: gpu}\n")
    arguments = ["topics", "acls", "--config", str(config), "--service", "engine"]
    assert run(app, PROG_NAME, [*arguments, "--principal", "engine=User:CN=e", "-b", "b:1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# engine"
    assert (
        "kafka-acls.sh --bootstrap-server b:1 --add --allow-principal 'User:CN=e' --operation Read --group 'mine.gpu'"
        in printed
    )
    assert run(app, PROG_NAME, [*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["principal"] for row in rows} == {"User:undercurrent-engine"}
    assert {"mine.activations.a", "mine.prompts.dlq"} <= {row["name"] for row in rows if row["operation"] == "Write"}


def test_what_is_joined_is_taken_from_the_bindings_of_a_configuration_or_an_option(tmp_path, capsys) -> None:
    (tmp_path / "points.yaml").write_text(POINTS + POINTS.partition("points:\n")[2].replace("name: a", "name: b"))
    (tmp_path / "probes.yaml").write_text("bindings: [{name: j, points: [b, a], probe: x}]\n")
    config = tmp_path / "host.yaml"
    shared = "points: points.yaml\nservice: {name: s}\n"
    groups = []
    for text, options in ((f"{shared}probes: probes.yaml\n", []), (shared, ["--joined", "a+b"])):
        config.write_text(text)
        assert run(app, PROG_NAME, ["topics", "acls", "--config", str(config), "--json", *options]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        groups.append({row["name"] for row in rows if row["resource"] == "group" and "+" in row["name"]})
    assert groups == [{"undercurrent.s.b+a"}, {"undercurrent.s.a+b"}]
    assert run(app, PROG_NAME, ["topics", "acls", "--config", str(config), "--joined", "a+c"]) == 2
    assert "--joined a+c: accepted: points with + between them, of a, b" in capsys.readouterr().err


def test_rights_without_any_point_say_that_they_are_not_all(capsys) -> None:
    assert run(app, PROG_NAME, ["topics", "acls", "--service", "publisher"]) == 0
    said = capsys.readouterr()
    assert "no extraction point is named" in said.err
    assert "activations" not in said.out
    assert run(app, PROG_NAME, ["erase", "--request-id", "r", "-b", "b:1"]) == 2
    assert "no activations would be looked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--service", "engines"], "--service engines: there is no such service; there are engine, publisher"),
        (["--principal", "engine=e"], "--principal engine=e: expected SERVICE=User:NAME"),
        (["--principal", "nobody=User:e"], "--principal nobody: there is no such service"),
    ],
)
def test_a_wrong_option_is_named(capsys, arguments: list[str], said: str) -> None:
    assert run(app, PROG_NAME, ["topics", "acls", *arguments]) == 2
    assert said in capsys.readouterr().err
