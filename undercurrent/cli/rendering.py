"""Rich text on standard output; whatever a topic says is shown as it is, never taken for markup or control codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console() -> Console:
    """Return a console on standard output; it wraps at the terminal's width, and not at all where there is none."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if terminal else 4000, highlight=False, soft_wrap=not terminal)


def text(said: str, style: str = "") -> Text:
    """Return some text in a style, control characters shown by their names."""
    from rich.text import Text

    shown = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in said
    )
    return Text(shown, style)
