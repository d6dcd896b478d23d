from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from undercurrent.cli.running import run
from undercurrent.errors import (
    BadRequestError,
    ConfigError,
    PositionSyntaxError,
    ProbingError,
    SpecValidationError,
    UnreachableError,
)


def app_that(action: Callable[[], object]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def go(count: int = 0) -> object:
        return action()

    return app


def raising(error: BaseException) -> typer.Typer:
    def action() -> None:
        raise error

    return app_that(action)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such key"), 2),
        (SpecValidationError("wrong", point="p", field="layers"), 2),
        (PositionSyntaxError("bad"), 2),
        (UnreachableError("nobody answers"), 3),
        (BadRequestError("too long"), 1),
        (ProbingError("anything"), 1),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (typer.Exit(7), 7),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert run(raising(error), "tool", ["go"]) == code


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run(raising(UnreachableError("no broker at nowhere:1")), "tool", ["go"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "tool: no broker at nowhere:1\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["go", "--nope"], "--nope"),
        (["go", "--count", "x"], "--count"),
        (["gone"], "gone"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_points_to_the_help(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app_that(lambda: None), "tool", argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "--help" in line


def test_success_is_zero_and_a_returned_code_is_kept() -> None:
    assert run(app_that(lambda: None), "tool", ["go"]) == 0
    assert run(app_that(lambda: 5), "tool", ["go"]) == 5
    assert run(app_that(lambda: 5), "tool", [], group=False) == 5


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(OSError(errno.ENOSPC, "No space left on device", "r/x")), "u", [], group=False) == 1
    told = "u: r/x: No space left on device: make room there, or name a place on another disk\n"
    assert capsys.readouterr().err == told


def test_a_folder_that_may_not_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(PermissionError(errno.EACCES, "Permission denied", "r/x")), "u", [], group=False) == 1
    told = "u: r/x: Permission denied: let this user write there, or name another place\n"
    assert capsys.readouterr().err == told


def program(lines: int) -> str:
    """Return the text of a program with one command, that writes so many lines."""
    return (
        "import sys, typer\n"
        "from undercurrent.cli.running import run\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def go():\n"
        f"    for _ in range({lines}): sys.stdout.write('line\\n')\n"
        "sys.exit(run(app, 'tool', [], group=False))\n"
    )


def test_a_full_disk_under_standard_output_is_one_line() -> None:
    code = program(lines=1)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    told = "tool: standard output: No space left on device: make room there, or name a place on another disk\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_is_not_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()), "tool", ["go"])


def test_a_reader_that_went_away_ends_the_command_quietly() -> None:
    code = program(lines=100_000)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 1
