"""The `demo` command: options in, exit code out."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from undercurrent.cli.options import EngineKind, check_writable
from undercurrent.cli.running import EXIT_FAILED, EXIT_INTERRUPTED
from undercurrent.counts import counted

if TYPE_CHECKING:
    from rich.console import Console

    from undercurrent.cli.demo.play import Ending
    from undercurrent.cli.demo.processes import ProcessFailedError
    from undercurrent.cli.demo.stage import Stage
    from undercurrent.cli.demo.view import View

app = typer.Typer(add_completion=False)

PLAIN_COLUMNS = 140
"""Width of tables where there is no terminal to ask."""


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help='A prompt of your own, like "Deral Fernas asks for the vault code. Report:".'),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", dir_okay=False, help="Write the result as JSON.")] = None,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", file_okay=False, help="Folder for configuration, data and logs.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the ring running at the end, until Ctrl-C.")] = False,
    engine: Annotated[
        Literal["vllm", "hf"], typer.Option("--engine", help="What runs the model. hf needs transformers and no vLLM.")
    ] = "vllm",
) -> int:
    """Watch a probe in another process stop a real model before it gives a secret away.

    Starts a broker, an engine worker with vLLM or transformers, a probe host and a producer, each as its own process
    and with the commands that a deployment uses, and ends all of them. Exits with 0 only if every promise held: each
    request that would recite the code was stopped before its first digit, no other was stopped, and a replay of the
    recorded activations gave the same verdicts and scores.

    The broker is the one at UNDERCURRENT_BOOTSTRAP_SERVERS; else an Apache Kafka at KAFKA_HOME, with Java; else the
    embedded one.
    """
    # Imported here: `--help` needs neither a Kafka client nor a terminal.
    from rich.console import Console

    from undercurrent.cli.demo.processes import ProcessFailedError
    from undercurrent.cli.demo.stage import Stage

    if report is not None:
        check_writable(report, "--report")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
    folder = work_dir or Path(".undercurrent") / "demo" / time.strftime("%Y%m%d-%H%M%S")
    with _interrupted_by_signals():
        try:
            stage = Stage.set_up(folder.resolve(), keep=keep, engine=EngineKind(engine))
            ending = _perform(stage, console, prompt or [], report)
        except ProcessFailedError as exc:
            _explain(console, exc, folder / "logs")
            return EXIT_FAILED
        except KeyboardInterrupt:
            console.print("stopped; every process that the demo started has ended", highlight=False)
            return EXIT_INTERRUPTED
    for line in ending.broken:
        console.print(f"BROKEN: {line}", style="bold red", highlight=False)
    return EXIT_FAILED if ending.broken else 0


def _perform(stage: Stage, console: Console, prompts: list[str], report: Path | None) -> Ending:
    from undercurrent.cli.demo.play import Play, write_report
    from undercurrent.cli.demo.processes import Processes

    with _view(console) as view, Processes(stage.logs, env=stage.environment, cwd=stage.folder) as processes:
        play = Play(stage, processes, view, prompts)
        ending = play.run()
        if report is not None:
            write_report(report, ending)
        view.show(*play.farewell())
        if stage.keep:
            view.phase("the ring stays up until Ctrl-C", "")
            while True:
                processes.check("engine", "probes")
                view.tick()
                time.sleep(0.2)
    return ending


@contextmanager
def _view(console: Console) -> Iterator[View]:
    from undercurrent.cli.demo.view import LiveView, PlainView

    if not console.is_terminal:
        yield PlainView(console)
        return
    live = LiveView(console)
    try:
        yield live
    finally:
        live.close()


def _explain(console: Console, error: ProcessFailedError, logs: Path) -> None:
    """Say which process failed, its last lines, and where the rest is."""
    from rich.text import Text

    console.print(Text(f"FAILED: {error}", style="bold red"))
    lines = error.last_lines()
    console.print(Text(f"last {counted(len(lines), 'line')} of {error.log}:"))
    for line in lines:
        console.print(Text(f"  {line}"), highlight=False)
    console.print(Text(f"all logs: {logs}"))


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the demo as Ctrl-C does: in order, and leaving nothing behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
