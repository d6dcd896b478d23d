"""Write schemas/README.md from the .avsc files: `python scripts/schema_readme.py`. A test holds the two together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parent.parent / "schemas"

# In the order in which a request meets them.
ORDER = (
    "PromptRequest",
    "Accepted",
    "Released",
    "GenerationEvent",
    "EngineStarted",
    "PublisherStarted",
    "StreamStarted",
    "ActivationRecord",
    "StreamInvalidated",
    "StreamEnded",
    "ControlCommand",
    "ControlAck",
    "ProbeVerdict",
    "ProbeHeartbeat",
    "ProbeState",
    "Label",
    "Rollout",
    "Erasure",
)

INTRO = """\
# The schemas

One Avro record a file; every message on a topic is one of them, framed by Avro's single-object encoding (`C3 01`, the
CRC-64-AVRO fingerprint of the schema, the body), or, where a schema registry is named, by Confluent's wire format
(`00`, the schema's id in four bytes, the body). Readers take both. Made by `scripts/schema_readme.py` from the `.avsc`
files, which hold the same words in their `doc`; a test compares the two.

## Units

Names carry the unit: `_us` is microseconds since the Unix epoch by the writer's clock (the broker's own time is each
record's timestamp), `_s` is seconds. Positions, layers, indices, sequence numbers and offsets are counted from 0.
`bytes` fields that hold numbers are little-endian and row-major; their shapes stand in square brackets. Fingerprints
and hashes are SHA-256.

## What may change

A message outlives the program that wrote it, so every version reads what every earlier one wrote, and the other way
round as far as a default reaches. Each field has one of these rules:

- **fixed**: it has no default. It stays, with its name, its type and its meaning.
- **default**: readers fill the default in when the writer did not know the field. It may be added and, once no reader
  needs it, removed; its name, type and meaning stay.
- **grows**: an enum. Symbols may be added; a reader that does not know one reads `unknown`. None is removed or reused.

A new field always has a default. A type is never changed, not even where Avro could promote it: that is a new field.
Whoever changes a schema keeps the one that was published before in `earlier/`, numbered, and names it in the codec: a
record says which schema wrote it, and each of them is read. Then `python scripts/freeze_schemas.py` keeps bytes of the
new version for the tests. `make lint` fails on a change that some version could not read
(`scripts/schema_evolution.py`), and the tests fail where a published schema was changed in its place.
"""


def records(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record schema and every record nested in it, outermost first."""
    yield schema
    for field in schema["fields"]:
        for inner in _parts(field["type"]):
            if isinstance(inner, dict) and inner["type"] == "record":
                yield from records(inner)


def _parts(kind: Any) -> Iterator[Any]:  # noqa: ANN401 - an Avro type is a string, a list or an object
    """Yield an Avro type and the types that it is made of, records not entered."""
    yield kind
    if isinstance(kind, list):
        for branch in kind:
            yield from _parts(branch)
    elif isinstance(kind, dict) and kind["type"] in ("array", "map"):
        yield from _parts(kind.get("items", kind.get("values")))


def type_text(kind: Any) -> str:  # noqa: ANN401 - an Avro type is a string, a list or an object
    """Return an Avro type as words for a table cell."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return " or ".join(type_text(branch) for branch in kind)
    if kind["type"] == "array":
        return f"array of {type_text(kind['items'])}"
    if kind["type"] == "map":
        return f"map of {type_text(kind['values'])}"
    if kind["type"] == "enum":
        return f"{kind['name']}: {', '.join(kind['symbols'])}"
    return f"{kind['name']} (below)" if kind["type"] == "record" else str(kind["name"])


def rule_of(field: dict[str, Any]) -> str:
    """Return the compatibility rule of a field."""
    enum = any(isinstance(part, dict) and part["type"] == "enum" for part in _parts(field["type"]))
    base = "default" if "default" in field else "fixed"
    return f"{base}, grows" if enum else base


def table(record: dict[str, Any]) -> str:
    """Return the table of a record's fields."""
    lines = ["| field | type | default | meaning and unit | rule |", "|---|---|---|---|---|"]
    for field in record["fields"]:
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        cells = (f"`{field['name']}`", type_text(field["type"]), default, field["doc"], rule_of(field))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def render() -> str:
    """Return the text of schemas/README.md."""
    parts = [INTRO]
    for name in ORDER:
        outer, *inner = records(json.loads((SCHEMAS / f"{name}.avsc").read_text()))
        parts.append(f"## {name}\n\n{outer['doc']}\n\n{table(outer)}\n")
        parts += [f"### {record['name']}, in {name}\n\n{record['doc']}\n\n{table(record)}\n" for record in inner]
    return "\n".join(parts)


if __name__ == "__main__":
    (SCHEMAS / "README.md").write_text(render())
