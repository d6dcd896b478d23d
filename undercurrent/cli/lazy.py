"""A group whose commands live elsewhere and are imported only when one of them runs.

Help of the whole tree needs no import: `undercurrent --help` answers before a Kafka client or an engine is loaded, and
the layer order holds, since this package names the apps above it only as text.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """One entry of the tree.

    Args:
        target: `module:attribute`, where the attribute is a `typer.Typer`.
        help: one line for the list of commands.
        group: it is a tree of commands itself, even when it has only one.
    """

    target: str
    help: str
    group: bool = False

    def load(self) -> Any:  # noqa: ANN401 - Typer's own command class is not public
        """Import and return the command.

        Raises:
            ImportError: the module or one that it needs is not installed.
        """
        module, _, attribute = self.target.partition(":")
        app = getattr(importlib.import_module(module), attribute)
        return get_group(app) if self.group else get_command(app)


class LazyGroup(TyperGroup):
    """The group; a subclass names its `table`."""

    table: ClassVar[dict[str, LazyCommand]] = {}

    def __init__(self, **attrs: Any) -> None:  # noqa: ANN401 - handed through to Typer
        super().__init__(**attrs)
        # What help, completion and "did you mean" need to know of a command: its name and its line.
        self.commands.update({name: TyperCommand(name, help=entry.help) for name, entry in self.table.items()})

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:  # type: ignore[override]
        """Return the real command that the first argument names, and the arguments after it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        return name, self.table[name].load(), rest
