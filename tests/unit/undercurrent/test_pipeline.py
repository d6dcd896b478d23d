from __future__ import annotations

from pathlib import Path

import pytest

from undercurrent.errors import ConfigError
from undercurrent.pipeline import connection, read_sections, topic_plan

POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [2], tensor_type: residual_stream, position: "*", execution_mode: async, queue_depth: 8}
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)


def config(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_an_option_wins_over_the_file_and_keeps_its_other_keys() -> None:
    sections = {"kafka": {"bootstrap.servers": "file:1", "client.id": "me"}}
    assert connection(sections, None).bootstrap_servers == "file:1"
    settings = connection(sections, "option:1")
    assert settings.bootstrap_servers == "option:1"
    assert settings.options == {"client.id": "me"}


def test_no_address_anywhere_says_where_to_give_one() -> None:
    with pytest.raises(ConfigError, match="UNDERCURRENT_BOOTSTRAP_SERVERS"):
        connection({}, None)


def test_a_variable_reaches_the_topics_and_the_file_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERCURRENT_TOPICS__PROMPT_PARTITIONS", "16")
    (tmp_path / "secret").write_text("hunter2\n")
    path = config(tmp_path, "kafka: {bootstrap_servers: 'a:1', sasl.password_file: secret}\ntopics: {prefix: other}\n")
    sections = read_sections(path)
    assert connection(sections, None).options == {"sasl.password": "hunter2"}
    plan = topic_plan(sections, tmp_path)
    assert (plan.prefix, plan.prompt_partitions) == ("other", 16)


def test_the_points_file_lies_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "points.yaml").write_text(POINTS)
    plan = topic_plan(read_sections(config(tmp_path, "points: points.yaml\n")), tmp_path)
    assert plan.points == ("residual",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topics: {partitions: 3}", "topics: unknown key 'partitions'"),
        ("topics: {prompt_partitions: many}", r"topics\.prompt_partitions"),
        ("topics: {prompts_retention_ms: 999999999999}", "topics: retention"),
        ("topics: [1]", "topics: expected keys and values"),
        ("kafka: {bootstrap_servers: 'a:1', acks: 1}", "acks"),
        ("kafka: {bootstrap_servers: 'a:1', clientid: 1}", "clientid"),
        ("[1]", "expected keys and values"),
        ("kafka: ${NOBODY_SETS_THIS}", "NOBODY_SETS_THIS"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str, tmp_path: Path) -> None:
    def use() -> None:
        sections = read_sections(config(tmp_path, text))
        topic_plan(sections, tmp_path)
        connection(sections, None)

    with pytest.raises(ConfigError, match=says):
        use()
