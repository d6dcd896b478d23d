from __future__ import annotations

from pathlib import Path

import pytest

from undercurrent.errors import ConfigError
from undercurrent.service.reading import Source, overrides, read_mapping, read_sourced

TEXT = """
plain: 1
section:
  text: x${A}y
  list: ["${A}", {"inner": "${B:-b}"}]
  secret_file: pw
  empty: {}
other: ${B:-b}
"""


def test_each_value_has_one_source(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text(TEXT)
    (tmp_path / "pw").write_text("hidden\n")
    environment = {
        "A": "a",
        "UNDERCURRENT_SECTION__TEXT": "over",
        "UNDERCURRENT_NEW__KEY": "n",
        "UNDERCURRENT_PLAIN": "2",
    }
    read = read_sourced(tmp_path / "engine.yaml", environment, frozenset({"plain"}))
    assert read.sections == {
        "plain": "2",
        "section": {"text": "over", "list": ["a", {"inner": "b"}], "secret": "hidden", "empty": {}},
        "other": "b",
        "new": {"key": "n"},
    }
    assert read.sources == {
        ("plain",): Source("environment UNDERCURRENT_PLAIN"),
        ("section", "text"): Source("environment UNDERCURRENT_SECTION__TEXT"),
        ("section", "list"): Source("engine.yaml, environment A"),
        ("section", "list", "1", "inner"): Source("engine.yaml, B not set"),
        ("section", "secret"): Source("secret_file pw", secret=True),
        ("other",): Source("engine.yaml, B not set"),
        ("new", "key"): Source("environment UNDERCURRENT_NEW__KEY"),
    }


def test_a_lone_name_counts_only_where_it_is_a_key() -> None:
    environment = {"UNDERCURRENT_A": "1", "UNDERCURRENT_B": "2", "UNDERCURRENT_": "3", "UNDERCURRENT_A__": "4"}
    assert overrides(environment, frozenset({"a"})) == [("UNDERCURRENT_A", ("a",), "1")]


@pytest.mark.parametrize("text", ["", "# nothing", "~"])
def test_an_empty_file_has_no_keys(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert read_mapping(tmp_path / "a.yaml") == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "utf-8"),
        (b"- 1", "found list"),
        (b"0", "found int"),
        (b"a: 1\na: 1", "stands twice"),
        (b"1: 1", "put it in quotes"),
        (b"a: &a [x, x, x]\n" + b"\n".join(b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]" % (c, c, *[c - 1] * 8)
                                          for c in b"bcdefghij"), "more than"),
    ],
)  # fmt: skip
def test_what_is_no_mapping_of_plain_data_is_refused_with_the_files_name(
    content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a\.yaml: .*{says}"):
        read_mapping(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "sasl.password: hunter2",
        "sasl.password: 12345678",
        "sasl.password: 'hunter2${NOT_SET:-hunter2}'",
        "sasl.oauthbearer.client.secret: hunter2",
        "sasl.oauthbearer.assertion.private.key.passphrase: hunter2",
        "ssl.key.pem: hunter2",
    ],
)
@pytest.mark.parametrize("section", ["kafka", "publisher: {kafka", "registry"])
def test_a_secret_in_the_file_itself_is_refused_and_not_repeated(tmp_path: Path, section: str, line: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"{section}: {{{line}}}{'}' if '{' in section else ''}\n")
    key = line.split(":")[0]
    with pytest.raises(ConfigError) as caught:
        read_sourced(path, {}, frozenset())
    assert f"{key}: a secret may not stand in the file itself" in str(caught.value)
    assert f"{key}_file" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_secrets_come_from_files_and_the_environment_and_what_is_public_stands_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("hunter2\n")
    path = tmp_path / "a.yaml"
    path.write_text(
        "kafka:\n"
        "  sasl.password_file: pw\n"
        "  ssl.key.password: ${KEY}\n"
        "  sasl.oauthbearer.token.endpoint.url: https://issuer/token\n"
        "  ssl.ca.pem: '-----BEGIN CERTIFICATE-----'\n"
        "  ssl.key.location: client.key\n"
        "  sasl.oauthbearer.client.secret: ''\n"
    )
    kafka = read_sourced(path, {"KEY": "k"}, frozenset()).sections["kafka"]
    assert kafka["sasl.password"] == "hunter2"
    assert kafka["ssl.key.password"] == "k"
    assert kafka["sasl.oauthbearer.token.endpoint.url"] == "https://issuer/token"
