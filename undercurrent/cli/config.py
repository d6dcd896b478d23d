"""`undercurrent config`: configuration files as they will be understood."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.running import EXIT_USAGE, complain
from undercurrent.cli.tables import write_table

if TYPE_CHECKING:
    from undercurrent.cli.config_files import Checked

app = typer.Typer(help="Check configuration files.", no_args_is_help=True, add_completion=False)

PROG_NAME = "undercurrent config check"


@app.callback()
def root() -> None:
    """Check configuration files."""


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of configuration files, or one of them.")],
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON line a file instead of tables.")] = False,
) -> int:
    """Show each setting of each file with its value and where that comes from; exit with 2 if anything is wrong.

    The sources are the file, a variable of the environment, a file of its own (keys that end in _file), and the
    default. Secrets are masked. Nothing is started, and no broker is asked.
    """
    # Imported here: `--help` needs none of the models behind the files.
    from undercurrent.cli.config_files import check_folder

    results = check_folder(folder, os.environ)
    for result in results:
        if json_lines:
            from undercurrent.cli.jsonl import dumps

            sys.stdout.write(dumps(result.as_json()) + "\n")
        else:
            _show(result)
    return EXIT_USAGE if any(result.errors for result in results) else 0


def _show(result: Checked) -> None:
    sys.stdout.write(f"{result.path}: {result.kind}, {'wrong' if result.errors else result.summary}\n")
    write_table([setting.cells() for setting in result.settings])
    sys.stdout.write("\n" if result.settings else "")
    sys.stdout.flush()  # errors go elsewhere, and belong below this
    for error in result.errors:
        complain(PROG_NAME, error)
