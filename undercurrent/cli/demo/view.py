"""What a viewer sees: a live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from undercurrent.cli.demo.story import Story, Teller
from undercurrent.counts import counted
from undercurrent.protocol.messages import Outcome

TEXT_COLUMNS = 56
_PLAIN_EVERY_S = 1.0
_STYLES = {Outcome.ABORTED: "bold red", Outcome.COMPLETED: "green", Outcome.FAILED: "bold yellow"}


class View(Protocol):
    """How the demo is shown."""

    def phase(self, title: str, following: str) -> None:
        """Say what happens now and what comes next."""

    def done(self, fact: str) -> None:
        """Say how the phase went."""

    def show(self, *renderables: RenderableType) -> None:
        """Print something that stays."""

    def requests(self, story: Story, threshold: float) -> AbstractContextManager[None]:
        """Show requests while the context is open."""

    def tick(self, changed: Iterable[Teller] = ()) -> None:
        """Bring what is shown up to date; called a few times a second."""


class PlainView:
    """One line per fact, with the time since the start; for logs and pipes.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._story: Story | None = None
        self._threshold = 0.0
        self._told: set[tuple[str, str]] = set()
        self._last = 0.0

    def phase(self, title: str, following: str) -> None:
        """Say what happens now and what comes next."""
        self._line(f"{title}{f' (next: {following})' if following else ''}")

    def done(self, fact: str) -> None:
        """Say how the phase went."""
        self._line(f"  {fact}")

    def show(self, *renderables: RenderableType) -> None:
        """Print something that stays."""
        for renderable in renderables:
            self._console.print(renderable)

    def requests(self, story: Story, threshold: float) -> AbstractContextManager[None]:
        """Tell of requests from now on."""
        self._story, self._threshold = story, threshold
        return _Nothing()

    def tick(self, changed: Iterable[Teller] = ()) -> None:
        """Tell of aborts and ends at once, of progress once a second."""
        for teller in changed:
            if teller.applied_at_us is not None:
                self._once(teller, "abort", f"abort applied after {_ms(teller.latency_ms)}")
            if teller.outcome is not None:
                score = _score(teller.score_at_abort)
                by = f" at score {score}" if teller.outcome is Outcome.ABORTED else ""
                by = f": {teller.reason}" if teller.outcome is Outcome.FAILED else by
                self._once(teller, "final", f"{teller.outcome.value} after {counted(teller.tokens, 'token')}{by}")
        now = time.monotonic()
        running = [teller for teller in self._story or () if teller.outcome is None and teller.tokens]
        if running and now - self._last >= _PLAIN_EVERY_S:
            self._last = now
            parts = (f"{t.request_id} {counted(t.tokens, 'token')}, score {_score(t.latest_score)}" for t in running)
            self._line("  " + "; ".join(parts))

    def _once(self, teller: Teller, what: str, text: str) -> None:
        if (teller.request_id, what) not in self._told:
            self._told.add((teller.request_id, what))
            self._line(f"  {teller.request_id}: {text}")

    def _line(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, soft_wrap=True)


class LiveView:
    """A picture that is redrawn: phase and elapsed time, and the requests while they run.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._phase_started = self._started
        self._title = ""
        self._following = ""
        self._live: Live | None = None
        self._story: Story | None = None
        self._threshold = 0.0
        self._spinner = Spinner("dots")

    def phase(self, title: str, following: str) -> None:
        """Say what happens now and what comes next."""
        self._title, self._following = title, following
        self._phase_started = time.monotonic()
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=12, transient=True)
            self._live.start()

    def done(self, fact: str) -> None:
        """Replace the spinner by a line that stays."""
        took = time.monotonic() - self._phase_started
        line = Text.assemble(("✓ ", "green"), self._title, ("  " + fact, "dim"), (f"  {took:.1f} s", "cyan"))
        self._stop()
        self._console.print(line)

    def show(self, *renderables: RenderableType) -> None:
        """Print something that stays, above what is live."""
        for renderable in renderables:
            self._console.print(renderable)

    def requests(self, story: Story, threshold: float) -> AbstractContextManager[None]:
        """Show requests while the context is open, and leave the last picture on the screen."""
        self._story, self._threshold = story, threshold
        return _Leave(self)

    def tick(self, changed: Iterable[Teller] = ()) -> None:
        """Do nothing: the picture is redrawn by its own clock."""

    def close(self) -> None:
        """End what is live; the terminal is as before."""
        self._stop()

    def leave_requests(self) -> None:
        """Print the requests as they are, for good."""
        story, self._story = self._story, None
        if story is not None:
            self._console.print(requests_table(story, self._threshold))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        now = time.monotonic()
        self._spinner.update(
            text=Text.assemble(
                (self._title, "bold"),
                (f"  {now - self._phase_started:.0f} s", "cyan"),
                (f"   next: {self._following}" if self._following else "", "dim"),
                (f"   {now - self._started:.0f} s in all", "dim"),
            )
        )
        if self._story is None:
            return self._spinner
        return Group(requests_table(self._story, self._threshold), self._spinner)


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return


class _Leave(AbstractContextManager[None]):
    def __init__(self, view: LiveView) -> None:
        self._view = view

    def __exit__(self, *_: object) -> None:
        self._view.leave_requests()


def requests_table(story: Story, threshold: float) -> Table:
    """Return the requests with their latest tokens and the probe's scores."""
    table = Table(expand=True, title=f"score of the probe at the latest token; it acts at {threshold:+.1f}")
    table.add_column("request", no_wrap=True)
    table.add_column("asked", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("generated", no_wrap=True, overflow="crop", ratio=4)
    table.add_column("tokens", justify="right")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for teller in story:
        score = teller.score_at_abort if teller.score_at_abort is not None else teller.latest_score
        hot = score is not None and score >= threshold
        state = Text("waits", "dim") if not teller.tokens else Text("runs", "cyan")
        if teller.outcome is not None:
            state = Text(teller.outcome.value, _STYLES.get(teller.outcome, ""))
        elif teller.applied_at_us is not None:
            state = Text("stopping", "bold red")
        table.add_row(
            teller.request_id,
            Text(teller.prompt, "dim"),
            Text(("…" if len(teller.text) > TEXT_COLUMNS else "") + teller.text[-TEXT_COLUMNS:].replace("\n", " ")),
            str(teller.tokens),
            Text(_score(score), "bold red" if hot else ""),
            state,
        )
    return table


def final_table(rows: Sequence[Sequence[str]]) -> Table:
    """Return the table at the end; see `undercurrent.cli.demo.report.Row.cells`."""
    table = Table(title="what became of each request")
    for name in ("request", "label", "outcome", "tokens", "first digit at", "lead in tokens", "score at abort"):
        table.add_column(name, justify="left" if name in ("request", "label", "outcome") else "right", no_wrap=True)
    table.add_column("captured -> applied", justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row[2] == Outcome.ABORTED.value else ("yellow" if row[2] == Outcome.FAILED.value else "")
        table.add_row(*row, style=style)
    return table


def panel(title: str, lines: Iterable[str]) -> Panel:
    """Return a few lines in a box."""
    return Panel(Text("\n".join(lines)), title=title, title_align="left", expand=False)


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} ms"
