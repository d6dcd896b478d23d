"""Play the demo and keep its picture: `python docs/pictures/demo.py` writes demo.svg beside this file.

What is drawn is one real run: the requests at the moment when the first were stopped and others still ran, and the
table at the end.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from undercurrent.cli.demo.play import Play
from undercurrent.cli.demo.processes import Processes
from undercurrent.cli.demo.stage import Stage
from undercurrent.cli.demo.story import Story, Teller
from undercurrent.cli.demo.view import PlainView, requests_table
from undercurrent.protocol.messages import Outcome

COLUMNS = 132
TOKENS_OF_A_RUNNING_ONE = 60


class Camera(PlainView):
    """A view that keeps what a terminal would show at the most telling moment, and every table printed."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.shot: Table | None = None
        self.tables: list[Table] = []

    def tick(self, changed: Iterable[Teller] = ()) -> None:
        """Take the picture once some requests are stopped and the others are well under way."""
        super().tick(changed)
        if self.shot is None and self._story is not None and _telling(self._story):
            self.shot = requests_table(self._story, self._threshold)

    def show(self, *renderables: RenderableType) -> None:
        """Keep tables, print the rest."""
        super().show(*renderables)
        self.tables += [renderable for renderable in renderables if isinstance(renderable, Table)]


def _telling(story: Story) -> bool:
    stopped = [teller for teller in story if teller.outcome is Outcome.ABORTED]
    running = [teller for teller in story if teller.outcome is None]
    return len(stopped) >= 3 and bool(running) and all(t.tokens >= TOKENS_OF_A_RUNNING_ONE for t in running)


def main() -> None:
    """Play the demo, then draw."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage.set_up(Path(folder), keep=False)
        camera = Camera(Console(width=COLUMNS))
        with Processes(stage.logs, env=stage.environment, cwd=stage.folder) as processes:
            ending = Play(stage, processes, camera, []).run()
    if ending.broken or camera.shot is None:
        raise SystemExit(f"no picture: {'; '.join(ending.broken) or 'the moment did not come'}")
    canvas = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    canvas.print(camera.shot, "", *camera.tables, sep="\n")
    Path(__file__).with_name("demo.svg").write_text(canvas.export_svg(title="undercurrent demo"), encoding="utf-8")


if __name__ == "__main__":
    main()
