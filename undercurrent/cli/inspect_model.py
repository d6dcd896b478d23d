"""`undercurrent inspect-model MODEL`: layers, width, and which tensors a point can name."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.scaffold import usual_layer
from undercurrent.cli.tables import write_table
from undercurrent.errors import CaptureError, ConfigError

if TYPE_CHECKING:
    from undercurrent.adapters.hf.inspect import ModelFacts

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    """How the facts are written."""

    TABLE = "table"
    JSON = "json"


@app.command("inspect-model")
def inspect_model(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on a hub.")],
    layers: Annotated[
        str | None, typer.Option("--layers", help="Say how large a record of these layers is, for example 12 or 8,12.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How the facts are written.")] = Format.TABLE,
) -> None:
    """Show what can be captured of a model: layers, width, tensor types, what each means and whose output it is.

    The model is built from its configuration without weights; needs torch and transformers (the extra `hf`).
    """
    chosen = None if layers is None else parse_layers(layers)
    facts = read_facts(model)
    asked = (usual_layer(facts.layers),) if chosen is None else chosen
    try:
        size: int | None = facts.bytes_per_token(asked)
    except CaptureError:  # of a type that is not captured; everything else is still worth knowing
        size = None
    if form is Format.JSON:
        from undercurrent.cli.jsonl import dumps

        sys.stdout.write(dumps(as_json(facts, asked, size)) + "\n")
        return
    _write(facts, asked, size)


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers in a text like 8,12.

    Raises:
        ConfigError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--layers {text!r}: accepted: whole numbers parted by commas, each once")
    return tuple(map(int, parts))


def read_facts(model: str) -> ModelFacts:
    """Return what can be captured of a model.

    Raises:
        ConfigError: there is no such model, or what is needed to look at it is not installed.
        CaptureError: its parts are not known.
    """
    try:
        from undercurrent.adapters.hf.inspect import inspect_model as look
    except ImportError as exc:
        raise ConfigError(
            f"looking at a model needs torch and transformers: pip install 'undercurrent[hf]' ({exc})"
        ) from exc
    return look(model)


def as_json(facts: ModelFacts, asked: tuple[int, ...], size: int | None) -> dict[str, Any]:
    """Return the facts as plain data."""
    return {
        "model": facts.model,
        "architecture": facts.architecture,
        "model_type": facts.model_type,
        "tested": facts.tested,
        "layers": facts.layers,
        "hidden_width": facts.width,
        "dtype": facts.dtype,
        "parameters": facts.parameters,
        "tensor_types": [
            {
                "tensor_type": tensor.tensor_type.value,
                "layers": list(tensor.layers),
                "module": tensor.module or None,
                "meaning": tensor.meaning,
            }
            for tensor in facts.tensors
        ],
        "record": {"layers": list(asked), "bytes_per_token": size},
    }


def _write(facts: ModelFacts, asked: tuple[int, ...], size: int | None) -> None:
    from undercurrent.adapters.hf.inspect import TESTED

    untested = "" if facts.tested else f", not among the families that the tests run: {', '.join(TESTED)}"
    named = f"layer{'s' if len(asked) > 1 else ''} {','.join(map(str, asked))} (--layers for others)"
    lines = {
        "model": facts.model,
        "architecture": f"{facts.architecture} ({facts.model_type}{untested})",
        "layers": f"{facts.layers}: 0 to {facts.layers - 1}; final_norm is layer {facts.layers}",
        "hidden width": str(facts.width),
        "dtype": facts.dtype,
        "parameters": f"{facts.parameters:,}",
        "record": f"elements of type {facts.dtype} are not captured"
        if size is None
        else f"{size:,} bytes a token for {named}",
    }
    width = max(map(len, lines))
    sys.stdout.writelines(f"{name.ljust(width)}  {value}\n" for name, value in lines.items())
    sys.stdout.write("\n")
    write_table(
        [
            {
                "tensor_type": tensor.tensor_type.value,
                "layers": spans(tensor.layers) or "-",
                "module": tensor.module or "-",
                "meaning": tensor.meaning,
            }
            for tensor in facts.tensors
        ]
    )


def spans(numbers: tuple[int, ...]) -> str:
    """Return ascending numbers as spans: 0-3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
