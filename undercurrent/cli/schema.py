"""`undercurrent schema`: the JSON Schema of extraction points, for editors and other checkers."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    """How the schema is written."""

    JSON = "json"
    YAML = "yaml"


@app.command()
def schema(
    form: Annotated[Format, typer.Option("--format", help="How it is written.")] = Format.JSON,
) -> None:
    """Print the JSON Schema (draft 2020-12) of an extraction-point spec.

    An editor checks and completes a spec whose first line names the schema's file:

    # yaml-language-server: $schema=points.schema.json
    """
    from undercurrent.spec import json_schema

    if form is Format.JSON:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
        return
    import yaml

    # The dumper would write parts that are one object as anchors and aliases.
    plain = json.loads(json.dumps(json_schema()))
    sys.stdout.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
