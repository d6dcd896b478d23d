"""Each service on a broker that checks rights: it runs with those of the table alone, and says what it lacks."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from undercurrent.acls import Names, Operation, Resource, Service, rights
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.errors import FencedError, NotAllowedError
from undercurrent.kafka.acl_admin import withdraw
from undercurrent.kafka.permits import missing, require
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.probes import LinearProbe
from undercurrent.protocol.dead_letters import Place, origin
from undercurrent.protocol.messages import Outcome, ProbeVerdict
from undercurrent.testing.bare_publisher import bare_publisher
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

NAMES = Names()


@pytest.fixture(scope="module")
def bench(kafka, tmp_path_factory):
    """A pipeline whose every service has the rights of the table and no others."""
    folder = tmp_path_factory.mktemp("rights")
    with EngineBench(kafka.admin, folder) as made:
        for service in Service:
            kafka.grant(service.value, rights(made.plan, service, NAMES))
        LinearProbe.from_arrays(
            [1.0] * 16, 0.0, layer=0, tensor_type="residual_stream", threshold=1e9, name="guard"
        ).save(folder / "guard")
        yield made


def by_file(settings, folder) -> dict:
    """Return a connection as a file's `kafka` section, its secrets in files of their own."""
    section = settings.keys()
    for key in ("sasl.password", "sasl.oauthbearer.client.secret"):
        if key in section:
            path = folder / f"{settings.options.get('sasl.username', 'client')}-{key}"
            path.write_text(section.pop(key) + "\n")
            section[f"{key}_file"] = str(path)
    return section


@pytest.fixture(scope="module")
def worker_config(kafka, bench):
    own = {k: v for k, v in by_file(kafka.scram("publisher"), bench.folder).items() if k.startswith("sasl")}
    return bench.configure(
        kafka=by_file(kafka.scram("engine"), bench.folder), publisher={"kafka": own}, guards={"probes": ["guard"]}
    )


@pytest.fixture(scope="module")
def host_config(kafka, bench):
    binding = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"}
    return bench.configure_host(binding, kafka=kafka.mutual_tls("probes").keys())


def command(bench, capsys, settings, *arguments, **sections):
    """Run the command line with a connection of its own, in this process; return what it said."""
    path = bench.folder / "command.yaml"
    topics = yaml.safe_load((bench.folder / "engine-0.yaml").read_text())["topics"]
    path.write_text(yaml.safe_dump({"kafka": by_file(settings, bench.folder), "topics": topics, **sections}))
    code = run(app, PROG_NAME, [*arguments, "--config", str(path)])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    return said.out


def test_the_whole_ring_runs_with_these_rights_alone(kafka, bench, worker_config, host_config, tmp_path, capsys):
    plan = bench.plan
    nonsense = {
        topic: bench.write(topic, 0, b"k", b"nonsense") for topic in (plan.control, plan.rollouts, plan.probe_state)
    }
    worker = bench.start_worker(worker_config)
    host = bench.start_host(host_config)
    worker.wait_ready(120.0)
    sending = ("prompts", "send", "a prompt", "--request-id", "r-1", "--max-tokens", "8", "--follow", "--json")
    assert "completed" in command(bench, capsys, kafka.oauth("producer"), *sending)
    request_id = "r-1"
    finals = bench.wait_finals([request_id], 120.0)
    assert finals[request_id][0].outcome is Outcome.COMPLETED
    bench.wait(lambda: [v for v in bench.said(ProbeVerdict) if v.request_id == request_id], "a verdict", 120.0)
    topic = bench.plan.generations
    assert request_id in command(bench, capsys, kafka.scram("operator"), "tail", topic)
    command(bench, capsys, kafka.scram("operator"), "labels", "add", request_id, "harmful", "negative")
    out = tmp_path / "dataset"
    command(bench, capsys, kafka.scram("replay"), "dataset", "export", str(out), points="points.yaml")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["counts"]["requests"] == 1
    assert all(manifest["source"]["topics"].values()), "a topic beside the activations was not read"
    command(bench, capsys, kafka.scram("admin"), "topics", "apply", points="points.yaml")
    for topic, offset in nonsense.items():
        found = bench.wait(lambda topic=topic: bench.read(plan.dlq(topic)), f"a dead letter of {topic}", 120.0)
        assert [origin(record.headers) for record in found] == [Place(topic, 0, offset)]
    assert worker.terminate() == 0
    assert host.terminate() == 0
    logs = worker.log.read_text() + host.log.read_text()
    assert "authorization failed" not in logs
    assert kafka.passwords["engine"] not in logs


def test_a_bare_servers_publisher_writes_dead_letters_with_its_rights_alone(kafka, bench, tmp_path):
    def letters(topic):
        return [origin(record.headers) for record in bench.read(plan.dlq(topic))]

    plan, log = bench.plan, tmp_path / "publisher.log"
    written = {topic: bench.write(topic, 0, b"k", b"nonsense") for topic in plan.swept_by_servers}
    with bare_publisher(bench.configure_server(kafka=by_file(kafka.scram("server"), bench.folder)), "chat-0.dp0", log):
        for topic, offset in written.items():
            place = Place(topic, 0, offset)
            bench.wait(lambda place=place: place in letters(place.topic), f"a dead letter of {topic}", 120.0)
    assert "not allowed" not in log.read_text()
    assert kafka.passwords["server"] not in log.read_text()


def test_a_service_with_no_rights_ends_and_says_what_it_lacks(kafka, bench, worker_config, host_config):
    nobody = by_file(kafka.scram("stranger"), bench.folder)
    plan = bench.plan
    engine = yaml.safe_load(worker_config.read_text())
    worker = bench.start_worker(bench.configure("engine-9", **{**engine, "kafka": nobody}))
    probes_config = bench.folder / "host-9.yaml"
    probes_config.write_text(yaml.safe_dump({**yaml.safe_load(host_config.read_text()), "kafka": nobody}))
    probes = bench.start_host(probes_config)
    bare = {k: v for k, v in nobody.items() if k.startswith("sasl")}
    publishing = bench.start_worker(bench.configure("engine-8", **{**engine, "publisher": {"kafka": bare}}))
    for process, lacks in (
        (worker, (f"Read on topic {plan.prompts}", f"Read on group {plan.prefix}.engine", "--service engine")),
        (probes, (f"Write on topic {plan.verdicts}", f"Read on group {bench.plan.prefix}.probes.residual")),
        (publishing, (f"Write on topic {plan.activations('residual')}", "--service publisher")),
    ):
        assert process.wait(120.0) != 0
        log = process.log.read_text()
        assert "stranger is not allowed: " in log
        assert [text for text in lacks if text not in log] == []


@pytest.mark.parametrize(
    ("arguments", "lacks"),
    [
        (("prompts", "send", "a prompt"), "Write on topic {p}.prompts"),
        (("prompts", "follow", "r-1"), "Read on topic {p}.generations"),
        (("abort", "r-1", "--reason", "x"), "Write on topic {p}.control"),
        (("labels", "add", "r-1", "bad", "positive"), "Write on topic {p}.labels"),
        (("dataset", "export", "nowhere", "--points", "points.yaml"), "Read on topic {p}.activations.residual"),
        (("erase", "--request-id", "r-1", "--points", "points.yaml"), "Write on topic {p}.erasures"),
        (
            ("tail", "{p}.generations"),
            "there is no topic '{p}.generations', or this client has no right to Describe it",
        ),
        (("topics", "acls", "--apply"), "CLUSTER_AUTHORIZATION_FAILED"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_command_with_no_rights_says_what_it_lacks(kafka, bench, worker_config, capsys, arguments, lacks):
    topics = yaml.safe_load(worker_config.read_text())["topics"]
    config = bench.folder / "nobody.yaml"
    config.write_text(yaml.safe_dump({"kafka": by_file(kafka.scram("stranger"), bench.folder), "topics": topics}))
    filled = [argument.format(p=bench.plan.prefix) for argument in arguments]
    filled = [str(bench.folder / item) if item in ("nowhere", "points.yaml") else item for item in filled]
    assert run(app, PROG_NAME, [*filled, "--config", str(config)]) == 1
    assert lacks.format(p=bench.plan.prefix) in capsys.readouterr().err


def askable(plan, service):
    """Return the rights of a service that a broker can be asked about, without those that follow from others."""
    own = [r for r in rights(plan, service, NAMES) if not r.prefixed and r.resource is not Resource.TRANSACTIONAL_ID]
    return [
        right
        for right in own
        if right.operation is not Operation.DESCRIBE or all(o.name != right.name or o == right for o in own)
    ]


@pytest.mark.parametrize("service", list(Service))
def test_a_service_without_one_right_is_told_which(kafka, bench, service):
    own, settings = askable(bench.plan, service), kafka.scram(service.value)
    assert missing(settings, own) == []
    # Another one of each service, so that reading, writing and groups all come up.
    lacking = own[list(Service).index(service) % len(own)]
    withdraw(kafka.admin, f"User:{service.value}", [lacking])
    try:
        wait_until(lambda: lacking in missing(settings, own), 60.0, f"{service} to lack {lacking}")
        with pytest.raises(NotAllowedError, match=re.escape(str(lacking))):
            require(settings, service, rights(bench.plan, service, NAMES))
    finally:
        kafka.grant(service.value, [lacking])
    wait_until(lambda: not missing(settings, own), 60.0, f"{service} to have {lacking}")


def test_a_transactional_id_that_may_not_be_used_is_named(kafka, bench):
    ids = [r for r in rights(bench.plan, Service.PROBES, NAMES) if r.resource is Resource.TRANSACTIONAL_ID]
    assert len(ids) == 2
    name = f"{ids[0].name}slot-0"
    allowed = TransactionalWriter(kafka.scram("probes"), name)
    allowed.init(60.0)
    allowed.close()
    refused = TransactionalWriter(kafka.scram("producer"), name)
    with pytest.raises(FencedError, match=re.escape(f"Write on transactional id {name} is not allowed")):
        refused.init(60.0)
    refused.close()


def test_a_stranger_lacks_everything(kafka, bench):
    everything = [right for service in Service for right in askable(bench.plan, service)]
    assert set(missing(kafka.scram("stranger"), everything)) == set(everything)
    assert missing(kafka.admin, everything) == []
