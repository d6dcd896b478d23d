"""Options that several commands share as one value: written once, as the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def with_options(parameter: str, group: Callable[..., Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that gives a command the fields of a dataclass as options and hands them over as one.

    Args:
        parameter: of the command; its own options keep their places.
        group: the dataclass; each field is annotated as an option and has a default.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        options = get_type_hints(group, include_extras=True)
        hints = get_type_hints(command, include_extras=True)

        @functools.wraps(command)
        def run(**given: Any) -> R:  # noqa: ANN401 - Typer gives what the signature below asks for
            return command(**{parameter: group(**{name: given.pop(name) for name in options})}, **given)

        def shown() -> list[inspect.Parameter]:
            found: list[inspect.Parameter] = []
            for own in inspect.signature(command).parameters.values():
                if own.name != parameter:
                    found.append(own.replace(annotation=hints[own.name], kind=inspect.Parameter.KEYWORD_ONLY))
                    continue
                for name, option in inspect.signature(group).parameters.items():
                    found.append(option.replace(annotation=options[name], kind=inspect.Parameter.KEYWORD_ONLY))
            return found

        signature = inspect.Signature(shown())
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: item.annotation for name, item in signature.parameters.items()}
        return run

    return decorate
