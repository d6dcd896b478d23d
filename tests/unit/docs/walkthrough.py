"""Runs the code blocks of a documentation page, in order, in one folder.

A block that begins with a comment naming a file (`# drift.py`) is written there, and imported, or loaded by whatever
reads such a file. Another Python block runs by itself.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_group

from probe_consumers.config import host_config
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.core import ENTRY_POINT_GROUP, ProbeRegistry
from undercurrent.pipeline import read_sections
from undercurrent.probes import load_binding, load_bindings
from undercurrent.spec import load_yaml_file
from undercurrent.spec.yaml_text import parse_plain_yaml

_RUN_FOR_REAL = {"validate"}
"""Commands that need neither a broker nor an engine; of the others only the options are read."""

_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|yaml|toml))$")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = _FILE.match(self.text.split("\n", 1)[0])
        return found.group(1) if found else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text[: at.start()].count("\n") + 1, at.group(1), at.group(2)) for at in _FENCE.finditer(text)]


def run_block(block: Block, folder: Path) -> None:
    """Run one block; the folder is the working directory and can be imported from."""
    if block.file is not None:
        (folder / block.file).write_text(block.text, encoding="utf-8")
    try:
        _RUNNERS[block.language](block, folder)
    except BaseException as exc:
        exc.add_note(f"in the {block.language or 'unnamed'} block at {block.page.name}:{block.line}")
        raise


def _python(block: Block, folder: Path) -> None:
    if block.file is not None:
        importlib.invalidate_caches()
        importlib.import_module(Path(block.file).stem)
        return
    # Empty lines in front: a traceback names the page's own line.
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    exec(code, {"__name__": "page"})  # noqa: S102 - that is the point


def _yaml(block: Block, folder: Path) -> None:
    assert block.file, "a YAML block names its file"
    path = folder / block.file
    keys = parse_plain_yaml(block.text).keys()
    if "extraction_points" in keys:
        assert len(load_yaml_file(path))
    elif "kafka" in keys:
        assert host_config(read_sections(path), folder).bounds
    else:
        for binding in load_bindings(path):
            load_binding(binding, base=folder)


def _toml(block: Block, folder: Path) -> None:
    offered = tomllib.loads(block.text)["project"]["entry-points"][ENTRY_POINT_GROUP]
    registry = ProbeRegistry(lambda: [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in offered.items()])
    assert [registry.get(name).probe_cls for name in registry.names()]


def _console(block: Block, folder: Path) -> None:
    commands = [shlex.split(line[2:]) for line in block.text.splitlines() if line.startswith("$ ")]
    assert commands, "a console block has lines that begin with '$ '"
    for program, *words in commands:
        if program == PROG_NAME and words[0] in _RUN_FOR_REAL:
            assert run(app, PROG_NAME, words) == 0
        elif program == PROG_NAME:
            _parse_command(words)
        else:
            assert (program, words[:2]) == ("python", ["-m", "pytest"]), f"nobody checks {program!r}"
            subprocess.run([sys.executable, *words], cwd=folder, check=True, timeout=120)


def _parse_command(words: list[str]) -> None:
    """Let the command line read its options, files included, without running anything."""
    command, name, context = get_group(app), PROG_NAME, None
    while isinstance(command, TyperGroup):
        context = command.make_context(name, words, parent=context)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, words, parent=context)


_RUNNERS = {"python": _python, "yaml": _yaml, "toml": _toml, "console": _console}
