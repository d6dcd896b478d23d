from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from undercurrent.errors import ConfigError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.service.config import MASK, load, read_sections, shown, validated


class Topics(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_partitions: int = Field(default=4, ge=1)
    prefix: str = "undercurrent"


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kafka: KafkaSettings
    topics: Topics = Topics()
    max_tokens: int = 8
    api_key: SecretStr | None = None
    probes: list[Topics] = []


def _file(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


BASE = "kafka: {bootstrap_servers: 'h:1'}\n"


def test_variables_defaults_and_dollars_are_put_in(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "kafka: {bootstrap_servers: '${HOST}:${PORT:-9092}'}\n"
        "topics: {prefix: 'a$$b${EMPTY:-}c${BLANK:-d}', prompt_partitions: '${COUNT}'}\n",
    )
    settings = load(Settings, path, {"HOST": "kafka", "COUNT": "12", "BLANK": ""})
    assert settings.kafka.bootstrap_servers == "kafka:9092"
    assert settings.topics == Topics(prefix="a$bcd", prompt_partitions=12)


def test_a_missing_variable_is_named_with_its_place(tmp_path: Path) -> None:
    path = _file(tmp_path, "topics:\n  prefix: ${NOWHERE}\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml: topics\.prefix: .*NOWHERE"):
        load(Settings, path, {})


def test_secrets_come_from_files_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("s3cret\n")
    path = _file(
        tmp_path,
        "kafka:\n  bootstrap_servers: h:1\n  security.protocol: sasl_plaintext\n  sasl.mechanism: SCRAM-SHA-512\n"
        "  sasl.username: probe\n  sasl.password_file: pw\n",
    )
    settings = load(Settings, path, {})
    assert settings.kafka.options["sasl.password"] == "s3cret"
    assert shown(settings)["kafka"]["options"]["sasl.password"] == MASK
    assert shown(settings)["kafka"]["options"]["sasl.username"] == "probe"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a_file: missing", r"engine\.yaml: a_file: .*missing"),
        ("a_file: engine.yaml\na: x", "given together with a_file"),
        ("- 1", "expected keys and values"),
        ("a: [", "engine.yaml"),
        ("a: &x [*x]", r"engine\.yaml: .*alias contains itself"),
        ("a: " + "[" * 3000 + "]" * 3000, r"engine\.yaml: .*nesting"),
        ("a: " + "[" * 50 + "]" * 50, r"engine\.yaml: YAML nested deeper"),
        ("a: 1\nb: 2\na: 3", r"engine\.yaml: YAML key 'a' stands twice at line 3"),
        ("a: !!python/name:os.system", r"engine\.yaml: .* not plain data"),
        ("a: " + "1" * 5000, r"engine\.yaml: "),
    ],
)
def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(Settings, _file(tmp_path, text), {})
    with pytest.raises(ConfigError, match="nowhere"):
        load(Settings, tmp_path / "nowhere.yaml", {})


@pytest.mark.parametrize(
    ("text", "place", "accepted"),
    [
        ("topic: {}", "topic: unknown key", "did you mean 'topics'"),
        ("topics: {prompts: 3}", "topics.prompts: unknown key", "accepted here: prefix, prompt_partitions"),
        ("probes: [{}, {prefx: a}]", "probes.1.prefx: unknown key", "did you mean 'prefix'"),
        ("topics: {prompt_partitions: 0}", "topics.prompt_partitions: ", "greater than or equal to 1"),
        ("topics: {prompt_partitions: many}", "topics.prompt_partitions: ", "valid integer"),
    ],
)
def test_a_wrong_key_is_named_with_file_path_and_what_would_be_right(
    tmp_path: Path, text: str, place: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Settings, _file(tmp_path, BASE + text), {})
    assert str(caught.value).startswith(f"{tmp_path / 'engine.yaml'}: {place}")
    assert accepted in str(caught.value)


def test_a_wrong_librdkafka_key_names_the_file_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.yaml: .*'lingr\.ms'"):
        load(Settings, _file(tmp_path, "kafka: {bootstrap_servers: 'h:1', lingr.ms: 3}"), {})


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kafka: .*required.*topics\.x: .*unknown"):
        load(Settings, _file(tmp_path, "topics: {x: 1}"), {})


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, BASE + "max_tokens: 1\ntopics: {prompt_partitions: 2, prefix: p}\n")
    settings = load(
        Settings,
        path,
        {
            "UNDERCURRENT_BOOTSTRAP_SERVERS": "other:9",
            "UNDERCURRENT_MAX_TOKENS": "64",
            "UNDERCURRENT_TOPICS__PROMPT_PARTITIONS": "16",
            "UNDERCURRENT_UNRELATED": "x",
            "UNDERCURRENT_": "x",
        },
    )
    assert (settings.kafka.bootstrap_servers, settings.max_tokens) == ("other:9", 64)
    assert settings.topics == Topics(prompt_partitions=16, prefix="p")


def test_a_wrong_name_in_a_sections_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"topics\.prompts: unknown key"):
        load(Settings, None, {"UNDERCURRENT_BOOTSTRAP_SERVERS": "h:1", "UNDERCURRENT_TOPICS__PROMPTS": "1"})


def test_sections_can_be_read_without_a_model(tmp_path: Path) -> None:
    assert read_sections(_file(tmp_path, BASE + "a: {b: ['${X}']}"), {"X": "1"}) == {
        "kafka": {"bootstrap_servers": "h:1"},
        "a": {"b": ["1"]},
    }
    assert read_sections(None, {}) == {}
    assert read_sections(_file(tmp_path, ""), {}) == {}
    with pytest.raises(ConfigError, match=r"^topics\.x: unknown key"):
        validated(Topics, {"x": 1}, name="topics")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"a_password": "x", "token": "y", "n": {"client.secret": "z"}},
            {"a_password": MASK, "token": MASK, "n": {"client.secret": MASK}},
        ),
        (
            {"max_tokens": 5, "token_ids": True, "password": None},
            {"max_tokens": 5, "token_ids": True, "password": None},
        ),
        ([SecretStr("x"), ("a",)], [MASK, ["a"]]),
    ],
)
def test_secrets_are_masked_when_shown(value: Any, expected: Any) -> None:
    assert shown(value) == expected
