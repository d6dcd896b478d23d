"""Every block of the page on probes does what the page says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.docs.walkthrough import blocks_of, run_block
from undercurrent.core import default_registry

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "write-a-probe.md"
PAGES = (PAGE, DOCS / "joining-probes.md")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in; what its modules register and import is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(default_registry, "_factories", dict(default_registry._factories))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(folder, page):
    for block in blocks_of(page):
        run_block(block, folder)


def test_every_fence_of_the_page_is_a_block_and_every_kind_is_there():
    blocks = blocks_of(PAGE)
    assert PAGE.read_text(encoding="utf-8").count("```") == 2 * len(blocks)
    assert {block.language for block in blocks} == {"python", "yaml", "toml", "console"}
    files = [block.file for block in blocks if block.file]
    assert len(files) == len(set(files))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    anchors = {"".join(c for c in head.lower().replace(" ", "-") if c.isalnum() or c == "-") for head in headings}
    named = {part.split(")")[0] for part in text.split("](#")[1:]}
    assert named == anchors


POINTS = "```yaml\n# points.yaml\nextraction_points:\n  - {name: p, layers: [1], tensor_type: attn_out, %s: '*'}\n```\n"
ENTRY = '```toml\n[project.entry-points."undercurrent.probes"]\np = "json:nothing"\n```\n'


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python\nassert 1 + 1 == 3\n```\n", "AssertionError"),
        ("```python\n# wrong.py\nimport nothing_of_this_name\n```\n", "ModuleNotFoundError"),
        (POINTS % "positoin", "SpecValidationError"),
        ("```yaml\n# probes.yaml\nbindings:\n  - {name: p, point: q, probe: nobody}\n```\n", "ProbeNotFoundError"),
        ("```yaml\n# host.yaml\nkafka: {bootstrap_servers: 'k:1'}\n```\n", "ConfigError"),
        (ENTRY, "ProbeError"),
        ("```console\n$ undercurrent probes walk\n```\n", "UsageError"),
        ("```console\n$ undercurrent tail a --folow\n```\n", "NoSuchOption"),
        ("```console\n$ undercurrent probes run --config nowhere.yaml\n```\n", "BadParameter"),
        ("```console\n$ undercurrent validate page.md\n```\n", "AssertionError"),
        ("```console\n$ rm -r .\n```\n", "AssertionError"),
        ("```console\n$ python -m pytest nothing.py\n```\n", "CalledProcessError"),
        ("```\nno language\n```\n", "KeyError"),
    ],
)
def test_a_block_that_is_wrong_fails_and_names_its_line(folder, page, error):
    path = folder / "page.md"
    path.write_text(f"# A page\n\n{page}", encoding="utf-8")
    [block] = blocks_of(path)
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - of many kinds, compared by name
        run_block(block, folder)
    assert error in [kind.__name__ for kind in type(raised.value).__mro__]
    assert "page.md:3" in raised.value.__notes__[0]


def test_a_block_that_is_right_passes(folder):
    path = folder / "page.md"
    path.write_text(POINTS % "position", encoding="utf-8")
    [block] = blocks_of(path)
    run_block(block, folder)
