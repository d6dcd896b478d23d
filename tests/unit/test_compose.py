"""docker-compose.yml is valid, waits for what it needs, and runs commands that exist with files that load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from engine_worker.config import worker_config
from probe_consumers.__main__ import read_config
from undercurrent.cli.main import PROG_NAME, Tree, app
from undercurrent.cli.running import run
from undercurrent.pipeline import read_sections, topic_plan
from undercurrent.probes import load_bindings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("undercurrent:")}
CONFIG_MOUNT = "/etc/undercurrent"


def command_line(service: dict[str, Any]) -> list[str]:
    """The arguments after `undercurrent` that a service runs."""
    return [*service.get("entrypoint", ["undercurrent"])[1:], *service["command"]]


def test_the_file_is_what_the_compose_specification_allows() -> None:
    assert sorted(PyCompose.from_json(json.dumps(COMPOSE)).service_names()) == sorted(SERVICES)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("services", "probes", "depends_on", "topics", "condition"), "service_happy", "service_happy"),
        (("services", "probes", "healthcheck", "interval"), "soon", "duration"),
        (("services", "engine", "comand"), ["engine", "run"], "comand"),
    ],
)
def test_the_check_refuses_what_the_specification_does_not_know(
    path: tuple[str, ...], value: object, says: str
) -> None:
    broken = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    node = broken
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ValueError, match=says):
        PyCompose.from_json(json.dumps(broken))


def test_the_parts_of_the_ring_are_there() -> None:
    assert set(SERVICES) == {"kafka", "registry", "topics", "engine", "probes", "producer"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_health_or_completion_and_what_it_waits_for_can_tell(name: str) -> None:
    for needed, condition in SERVICES[name].get("depends_on", {}).items():
        if condition["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}, which has no check"
        else:
            assert condition["condition"] == "service_completed_successfully"
            assert "healthcheck" not in SERVICES[needed]


def test_whoever_uses_topics_starts_after_they_were_made() -> None:
    for name in ("engine", "probes"):
        assert SERVICES[name]["depends_on"]["topics"]["condition"] == "service_completed_successfully"
    assert set(SERVICES["producer"]["depends_on"]) == {"engine", "probes"}
    assert SERVICES["topics"]["depends_on"]["registry"]["condition"] == "service_healthy"


def test_the_producer_runs_only_when_asked_and_once() -> None:
    assert SERVICES["producer"]["profiles"] == ["once"]
    assert SERVICES["producer"]["restart"] == "no"


def test_probe_hosts_can_be_scaled() -> None:
    # A fixed name or a published port would allow one container only.
    assert not {"container_name", "ports"} & set(SERVICES["probes"])
    assert SERVICES["probes"]["deploy"]["replicas"] >= 2


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_that_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command_line(OURS[name])
    names = [argument for argument in arguments[:2] if re.fullmatch(r"[a-z]+", argument)]
    assert names[0] in Tree.table
    assert run(app, PROG_NAME, [*names, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: undercurrent {' '.join(names)}" in shown
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in shown


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_an_image_that_the_dockerfile_makes(name: str) -> None:
    target = OURS[name]["build"]["target"]
    assert OURS[name]["image"] == f"undercurrent:{target}"
    assert re.search(rf"^FROM \S+ AS {target}$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_the_dockerfile_copies_every_package_of_the_distribution() -> None:
    copied = set(re.findall(r"^COPY (\w+) \w+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {"schemas", "undercurrent", "engine_worker", "probe_consumers", "producer", "requirements"} == copied


@pytest.mark.parametrize("name", OURS)
def test_the_configuration_of_a_service_is_there(name: str) -> None:
    assert f"./deploy:{CONFIG_MOUNT}:ro" in OURS[name]["volumes"]
    for argument in command_line(OURS[name]):
        if argument.startswith(CONFIG_MOUNT):
            assert (ROOT / "deploy" / Path(argument).relative_to(CONFIG_MOUNT)).is_file()


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration files as the containers see them: address from the environment, mounts in place."""
    for name in ("UNDERCURRENT_BOOTSTRAP_SERVERS", "UNDERCURRENT_SCHEMA_REGISTRY_URL"):
        (value,) = {service["environment"][name] for service in OURS.values()}
        monkeypatch.setenv(name, value)
    (source,) = {
        volume.split(":")[0] for service in OURS.values() for volume in service["volumes"] if "/opt/vault" in volume
    }
    for path in (ROOT / "deploy").glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/vault", str(ROOT / source)))
    return tmp_path


def test_the_topics_of_both_configurations_are_the_same(deployed: Path) -> None:
    engine, probes = (topic_plan(read_sections(deployed / name), deployed) for name in ("engine.yaml", "probes.yaml"))
    assert engine == probes
    assert engine.points


def test_the_engine_workers_configuration_loads_and_names_guards_that_are_bound(deployed: Path) -> None:
    config = worker_config(read_sections(deployed / "engine.yaml"), deployed)
    assert config.kafka.bootstrap_servers == "kafka:9092"
    bindings = load_bindings(ROOT / "undercurrent" / "testing" / "vault" / "probes.yaml")
    assert set(config.own.guards.probes) == {binding.name for binding in bindings}


def test_health_is_asked_where_the_configuration_serves_it(deployed: Path) -> None:
    for name in ("engine", "probes"):
        port = read_sections(deployed / f"{name}.yaml")["metrics"]["port"]
        assert f"http://localhost:{port}/readyz" in SERVICES[name]["healthcheck"]["test"][-1]


def test_there_are_not_more_probe_hosts_than_partitions(deployed: Path) -> None:
    plan = topic_plan(read_sections(deployed / "probes.yaml"), deployed)
    assert SERVICES["probes"]["deploy"]["replicas"] <= plan.activation_partitions


def test_the_probe_hosts_configuration_loads(deployed: Path) -> None:
    config = read_config(deployed / "probes.yaml")
    assert config.kafka.bootstrap_servers == "kafka:9092"
    assert config.kafka.registry is not None
    assert config.kafka.registry.url == "http://registry:8080/apis/ccompat/v7"
    assert config.bounds
