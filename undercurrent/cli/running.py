"""Run a command and turn what it raises into one clear line and an exit code.

0    done
1    it failed
2    usage: an option, a configuration file or a spec is wrong
3    a broker or an engine does not answer
130  Ctrl-C
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from typer.main import get_command, get_group

from undercurrent.errors import ConfigError, ProbingError, SpecError, UnreachableError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_MINE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def exit_code(error: ProbingError) -> int:
    """Return the exit code that an error ends a command with."""
    if isinstance(error, ConfigError | SpecError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_FAILED


def run(app: typer.Typer, prog_name: str, argv: Sequence[str] | None = None, *, group: bool = True) -> int:
    """Run a command line and return its exit code; never raises for what the errors of this package say.

    Args:
        app: the commands.
        prog_name: name that usage lines show.
        argv: arguments without the program's name; the process's own by default.
        group: the app is a tree of commands, even when it has only one; False for a single command.
    """
    command = get_group(app) if group else get_command(app)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = command.main(args=arguments, prog_name=prog_name, standalone_mode=False)
        sys.stdout.flush()
    except ProbingError as exc:
        complain(prog_name, str(exc))
        return exit_code(exc)
    except typer.TyperException as exc:
        return _usage(exc, prog_name)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as `| head` does. What is still buffered would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as exc:
        # A full disk, or a folder that may not be written: nothing that a traceback would help with.
        complain(prog_name, _said(exc))
        return EXIT_FAILED
    # A command that ended by `typer.Exit` gives its code here, any other what it returned.
    return code if isinstance(code, int) else 0


def _said(error: OSError) -> str:
    """Return which file an error is about, what is wrong with it, and what helps.

    Whoever writes a file names it (`undercurrent.files`); what is printed has no name.
    """
    where = "standard output" if error.filename is None and error.errno in _NO_ROOM else error.filename
    if where is None or not error.strerror:
        return str(error)
    helps = ""
    if error.errno in _NO_ROOM:
        helps = ": make room there, or name a place on another disk"
    elif error.errno in _NOT_MINE:
        helps = ": let this user write there, or name another place"
    return f"{where}: {error.strerror}{helps}"


def complain(prog_name: str, message: str) -> None:
    """Write one error line to stderr."""
    sys.stderr.write(f"{Path(prog_name).name}: {message}\n")


def _usage(error: typer.TyperException, prog_name: str) -> int:
    """Report a wrong command line; without any arguments the help itself is the answer."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(error.format_message() + "\n")
    else:
        path = context.command_path if context is not None else prog_name
        # Of what an option is parsed with, which puts its own words in front.
        message = error.format_message().replace(": Value error, ", ": ")
        complain(path, f"{message} (see {path} --help)")
    return error.exit_code
