"""docs/compatibility.md says what an engine asks at start, and every test that it names exists."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from undercurrent.adapters.vllm import support

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "scripts" / "compatibility.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_generator_writes(generator):
    written = generator.DOCUMENT.read_text(encoding="utf-8")
    assert generator.BEGIN in written
    assert generator.END in written
    assert written == generator.render(written), "run: python scripts/compatibility.py"


def test_every_row_of_the_table_stands_in_the_document(generator):
    written = generator.DOCUMENT.read_text(encoding="utf-8")
    for row in (*support.COMBINATIONS, *support.FEATURES, *support.MODELS):
        assert row.detail in written
