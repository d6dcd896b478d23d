from __future__ import annotations

import subprocess
import sys

import pytest

from undercurrent.cli.main import PROG_NAME, Tree, app
from undercurrent.cli.running import run

HEAVY = ("torch", "vllm", "transformers")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, PROG_NAME, ["--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in Tree.table.items():
        assert f" {name} " in text
        assert entry.help in " ".join(text.replace("│", " ").split())


def test_a_typo_is_answered_with_the_command_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, PROG_NAME, ["brokee", "up"]) == 2
    assert "Did you mean 'broker'?" in capsys.readouterr().err


def test_no_arguments_show_the_help_and_are_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "undercurrent.cli"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Usage: undercurrent" in done.stdout + done.stderr


def loaded_by(*arguments: str) -> set[str]:
    """The modules that a command line has imported when it ended."""
    code = (
        "import sys\n"
        "from undercurrent.cli.main import PROG_NAME, app\n"
        "from undercurrent.cli.running import run\n"
        f"assert run(app, PROG_NAME, {list(arguments)!r}) == 0\n"
        "sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


def test_help_of_the_tree_loads_no_client_no_array_and_no_engine() -> None:
    loaded = loaded_by("--help")
    assert "undercurrent.cli.lazy" in loaded
    assert loaded.isdisjoint({"confluent_kafka", "numpy", "fastavro", *HEAVY})


@pytest.mark.parametrize("name", Tree.table)
def test_help_of_a_command_loads_no_engine(name: str) -> None:
    assert loaded_by(name, "--help").isdisjoint(HEAVY)
