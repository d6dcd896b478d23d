"""schemas/README.md says what the schemas say, and the schemas keep the rules that it states."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCHEMAS = sorted((ROOT / "schemas").glob("*.avsc"))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schema_readme", ROOT / "scripts" / "schema_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_what_the_generator_writes(generator: ModuleType) -> None:
    written = (ROOT / "schemas" / "README.md").read_text()
    assert written == generator.render(), "run: python scripts/schema_readme.py"


def test_readme_covers_every_schema(generator: ModuleType) -> None:
    assert sorted(generator.ORDER) == [path.stem for path in SCHEMAS]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_every_record_and_field_is_explained(path: Path, generator: ModuleType) -> None:
    for record in generator.records(json.loads(path.read_text())):
        assert record["doc"]
        for field in record["fields"]:
            assert field.get("doc"), f"{record['name']}.{field['name']} has no doc"


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_every_enum_can_grow(path: Path) -> None:
    for enum in _enums(json.loads(path.read_text())):
        assert enum["symbols"][0] == "unknown", enum["name"]
        assert enum["default"] == "unknown", enum["name"]


def _enums(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [enum for child in node for enum in _enums(child)]
    if not isinstance(node, dict):
        return []
    found = [node] if node.get("type") == "enum" else []
    return found + [enum for child in node.values() for enum in _enums(child)]
