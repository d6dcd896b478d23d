from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.probes import LinearProbe

Captured = pytest.CaptureFixture[str]

POINT = {
    "name": "residual",
    "layers": [2],
    "tensor_type": "residual_stream",
    "position": "*",
    "execution_mode": "async",
}
SHARED = {"kafka": {"bootstrap_servers": "file:1"}, "points": "points.yaml"}
ENGINE = {**SHARED, "engine": {"kind": "fake"}}
HOST = {**SHARED, "probes": "probes.yaml", "service": {"name": "safety"}}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which nothing is wrong."""
    probe = LinearProbe.from_arrays([1.0], 0.0, layer=2, tensor_type="residual_stream", threshold=1.0)
    probe.save(tmp_path / "guard")
    binding = {"name": "guard", "point": "residual", "probe": "./guard"}
    write(tmp_path / "points.yaml", {"extraction_points": [POINT]})
    write(tmp_path / "probes.yaml", {"bindings": [binding]})
    write(tmp_path / "engine.yaml", ENGINE)
    write(tmp_path / "host.yaml", HOST)
    return tmp_path


def write(path: Path, data: object) -> None:
    path.write_text(yaml.safe_dump(data))


def check(where: Path, *options: str) -> int:
    return run(app, PROG_NAME, ["config", "check", str(where), *options])


def checked(where: Path, capsys: Captured, code: int = 0) -> dict[str, dict[str, Any]]:
    assert check(where, "--json") == code
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {Path(result["file"]).name: result for result in found}


def settings(result: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {setting["key"]: (setting["value"], setting["source"]) for setting in result["settings"]}


def test_each_file_is_known_for_what_it_is(folder: Path, capsys: Captured) -> None:
    (folder / "docker-compose.yml").write_text("services: {}")
    write(folder / "topics.yaml", {"kafka": {"bootstrap_servers": "file:1"}, "topics": {"prefix": "other"}})
    write(folder / "capture.yaml", {**SHARED, "engine": {"name": "chat-0"}, "capture": {"static": ["residual"]}})
    write(folder / "workflow.yaml", {"jobs": {}})
    (folder / "notes.txt").write_text("{")
    assert {name: result["kind"] for name, result in checked(folder, capsys).items()} == {
        "capture.yaml": "bare vLLM server",
        "engine.yaml": "engine worker",
        "host.yaml": "probe host",
        "points.yaml": "extraction points",
        "probes.yaml": "bindings",
        "topics.yaml": "sections that apps share",
        "workflow.yaml": "not a configuration of Undercurrent",
    }


def test_every_value_has_its_source(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCURRENT_BOOTSTRAP_SERVERS", "variable:2")
    monkeypatch.setenv("UNDERCURRENT_LIMITS__MAX_IN_FLIGHT", "3")
    monkeypatch.setenv("NAME", "seven")
    monkeypatch.delenv("ABSENT", raising=False)
    (folder / "pw").write_text("hunter2\n")
    engine = {
        **ENGINE,
        "kafka": {
            "bootstrap_servers": "file:1",
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "me",
            "sasl.password_file": "pw",
        },
        "engine": {"kind": "fake", "name": "${NAME}", "args": {"hf_token": "abc", "tokenizer": "t", "note_file": "pw"}},
        "guards": {"probes": ["a-${ABSENT:-b}"]},
        "topics": {"prompt_partitions": 8},
    }
    write(folder / "engine.yaml", engine)
    assert check(folder / "engine.yaml", "--json") == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "abc" not in out
    found = settings(json.loads(out))
    assert found["kafka.bootstrap_servers"] == ("variable:2", "environment UNDERCURRENT_BOOTSTRAP_SERVERS")
    assert found["kafka.sasl.password"] == ("********", "sasl.password_file pw")
    assert found["kafka.sasl.username"] == ("me", "engine.yaml")
    assert found["engine.name"] == ("seven", "engine.yaml, environment NAME")
    assert found["engine.args.hf_token"] == ("********", "engine.yaml")
    assert found["engine.args.tokenizer"] == ("t", "engine.yaml")
    assert found["engine.args.note"] == ("********", "note_file pw")
    assert found["guards.probes"] == (["a-b"], "engine.yaml, ABSENT not set")
    assert found["limits.max_in_flight"] == (3, "environment UNDERCURRENT_LIMITS__MAX_IN_FLIGHT")
    assert found["limits.handover_s"] == (5.0, "default")
    assert found["topics.prompt_partitions"] == (8, "engine.yaml")
    assert found["topics.verdict_partitions"] == (4, "default")
    assert found["points"] == ("points.yaml", "engine.yaml")


def test_the_file_of_a_bare_server_is_judged_by_the_servers_own_rules(folder: Path, capsys: Captured) -> None:
    server = {**SHARED, "capture": {"static": False}, "publisher": {"ring_mib": 8}}
    write(folder / "capture.yaml", server)
    found = settings(checked(folder / "capture.yaml", capsys)["capture.yaml"])
    assert found["capture.static"] == (False, "capture.yaml")
    assert found["publisher.ready_s"] == (60.0, "default")
    write(folder / "capture.yaml", {**server, "capture": {"static": ["nowhere"]}})
    assert check(folder / "capture.yaml") == 2
    assert "capture.yaml: capture.static: no extraction point 'nowhere'" in capsys.readouterr().err


def test_librdkafkas_own_name_of_the_address_has_its_source_too(folder: Path, capsys: Captured) -> None:
    write(folder / "engine.yaml", {**ENGINE, "kafka": {"bootstrap.servers": "file:1", "options": {"client.id": "x"}}})
    found = settings(checked(folder / "engine.yaml", capsys)["engine.yaml"])
    assert found["kafka.bootstrap_servers"] == ("file:1", "engine.yaml")
    assert found["kafka.client.id"] == ("x", "engine.yaml")


def test_what_json_cannot_say_is_shown_as_text(folder: Path, capsys: Captured) -> None:
    write(
        folder / "engine.yaml", {**ENGINE, "engine": {"kind": "fake", "args": {"a": float("inf"), "b": [float("nan")]}}}
    )
    found = settings(checked(folder / "engine.yaml", capsys)["engine.yaml"])
    assert (found["engine.args.a"][0], found["engine.args.b"][0]) == ("inf", "[nan]")


def test_a_person_gets_tables(folder: Path, capsys: Captured) -> None:
    assert check(folder) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{folder / 'engine.yaml'}: engine worker, ok\n" in out
    assert f"{folder / 'points.yaml'}: extraction points, ok: residual\n" in out
    assert f"{folder / 'probes.yaml'}: bindings, ok: guard (shadow)\n" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["service.name", "safety", "host.yaml"] in rows
    assert ["engine.served_name", "-", "default"] in rows


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("engine.yaml", {"limits": {"max_inflight": 1}}, "limits.max_inflight: unknown key"),
        ("engine.yaml", {"limits": {"max_in_flight": 0}}, "limits.max_in_flight: "),
        ("engine.yaml", {"engine": {"kind": "vllm"}}, "engine.model: is missing"),
        ("engine.yaml", {"guard": {}}, "guard: unknown key"),
        ("engine.yaml", {"topics": {"partitions": 1}}, "topics: unknown key 'partitions'"),
        ("engine.yaml", {"kafka": {}}, "kafka.bootstrap_servers: no broker named"),
        ("engine.yaml", {"kafka": {"bootstrap_servers": "x:1", "acks": 1}}, "kafka: Kafka key 'acks'"),
        ("engine.yaml", {"points": "absent.yaml"}, "points: "),
        ("engine.yaml", {"engine": {"kind": "fake", "name": "${NOBODY_SETS_THIS}"}}, "engine.name: .*NOBODY_SETS_THIS"),
        ("engine.yaml", {"engine": {"kind": "fake", "args": {"key_file": "no"}}}, "engine.args.key_file: .*No such"),
        ("host.yaml", {"service": {"name": "a b"}}, "service.name: "),
        ("host.yaml", {"from": "now"}, "from: "),
        ("host.yaml", {"bindings": []}, "probes: .*one of the two"),
        ("host.yaml", {"points": None}, "points: is missing"),
        ("host.yaml", {"topics": {"activation_partitions": 9}}, "topics.activation_partitions: 9, but engine.yaml .*4"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_once_with_file_and_key(
    name: str, changes: dict[str, Any], says: str, folder: Path, capsys: Captured
) -> None:
    write(folder / name, {**(ENGINE if name == "engine.yaml" else HOST), **changes})
    assert check(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"undercurrent config check: {re.escape(str(folder / name))}: {says}", line)


def test_a_wrong_point_or_probe_is_told_where_it_stands_and_where_it_is_used(folder: Path, capsys: Captured) -> None:
    write(folder / "points.yaml", {"extraction_points": [{**POINT, "layers": []}]})
    found = checked(folder, capsys, code=2)
    stands = f"{folder / 'points.yaml'}: point 'residual' field 'layers': is empty; name at least one layer"
    assert found["points.yaml"]["errors"] == [stands]
    for name in ("engine.yaml", "host.yaml"):
        assert found[name]["errors"] == [f"{folder / name}: points: {stands}"]
    write(folder / "points.yaml", {"extraction_points": [POINT]})
    (folder / "guard" / "probe.json").write_text("{}")
    found = checked(folder, capsys, code=2)
    assert "binding 'guard'" in found["probes.yaml"]["errors"][0]
    assert found["host.yaml"]["errors"][0].startswith(f"{folder / 'host.yaml'}: probes: binding 'guard'")
    assert found["engine.yaml"]["ok"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"\x00\x01\xff\xfe", "utf-8"),
        (b"- a\n- b\n", "expected keys and values, found list"),
        (b"just text", "expected keys and values, found str"),
        (b"{", "not YAML"),
        (b"a: &a [*a]", "contains itself"),
        (b"kafka: 1\nkafka: 2", "stands twice"),
        (b"kafka: !!python/name:os.system", "not plain data"),
        (b"engin: {}\nkafka: {bootstrap_servers: 'x:1'}", "engin: unknown key"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(content: bytes, says: str, folder: Path, capsys: Captured) -> None:
    (folder / "engine.yaml").write_bytes(content)
    assert check(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"undercurrent config check: {folder / 'engine.yaml'}: ")
    assert says in line


def test_a_folder_and_a_broken_link_called_like_a_file_are_one_line_each(folder: Path, capsys: Captured) -> None:
    (folder / "x.yaml").mkdir()
    (folder / "y.yaml").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "z.yaml")  # nobody ever writes to it
    assert check(folder) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "x.yaml: cannot be read: Is a directory" in first
    assert "y.yaml: cannot be read: No such file or directory" in second


def test_nothing_to_check_is_an_error(tmp_path: Path, capsys: Captured) -> None:
    for where, says in ((tmp_path, "holds no configuration"), (tmp_path / "nowhere", "No such file or directory")):
        assert check(where) == 2
        assert f"undercurrent: {where}: " in (err := capsys.readouterr().err)
        assert says in err
