"""Check that every version of every schema reads what every other wrote: `python scripts/schema_evolution.py`.

This is what a registry calls FULL_TRANSITIVE, asked before anything is registered: whoever changes a schema hears here
what the change breaks. `make lint` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import fastavro

from undercurrent.codec.avro import SCHEMA_NAMES, load_schema, versions_of

Named = dict[str, dict[str, Any]]


def named_types(schema: Any) -> Named:  # noqa: ANN401 - an Avro type is a string, a list or an object
    """Return every record, enum and fixed that a schema defines, by its name without the namespace."""
    found: Named = {}
    if isinstance(schema, list):
        for branch in schema:
            found |= named_types(branch)
    elif isinstance(schema, Mapping):
        if "name" in schema and schema["type"] in ("record", "enum", "fixed"):
            found[_short(schema["name"])] = dict(schema)
        for inner in (schema.get("items"), schema.get("values"), *[f["type"] for f in schema.get("fields", ())]):
            found |= named_types(inner)
    return found


def problems(writer: Any, reader: Any) -> list[str]:  # noqa: ANN401
    """Return why a reader with one schema cannot read what a writer with another wrote; nothing where it can.

    Args:
        writer: schema, as the .avsc has it.
        reader: the same.
    """
    return list(_problems(writer, reader, (named_types(writer), named_types(reader)), ""))


def _problems(writer: Any, reader: Any, named: tuple[Named, Named], path: str) -> Iterator[str]:  # noqa: ANN401
    writer, reader = _resolved(writer, named[0]), _resolved(reader, named[1])
    if isinstance(writer, list) or isinstance(reader, list):
        readers = reader if isinstance(reader, list) else [reader]
        for branch in writer if isinstance(writer, list) else [writer]:
            if all(list(_problems(branch, one, named, path)) for one in readers):
                yield f"{path or 'schema'}: {_kind(branch, named[0])} was written and no branch takes it"
        return
    kinds = _kind(writer, named[0]), _kind(reader, named[1])
    if kinds[0] != kinds[1]:
        yield f"{path or 'schema'}: {kinds[0]} became {kinds[1]}"
        return
    if not isinstance(writer, Mapping):
        return
    match writer["type"]:
        case "record":
            yield from _record_problems(writer, reader, named, path)
        case "enum":
            gone = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
            if gone and "default" not in reader:
                yield f"{path}: the enum {writer['name']} has no default for {', '.join(gone)}"
        case "array":
            yield from _problems(writer["items"], reader["items"], named, f"{path}[]")
        case "map":
            yield from _problems(writer["values"], reader["values"], named, f"{path}{{}}")


def _record_problems(
    writer: Mapping[str, Any], reader: Mapping[str, Any], named: tuple[Named, Named], path: str
) -> Iterator[str]:
    written = {field["name"]: field for field in writer["fields"]}
    for field in reader["fields"]:
        where = f"{path}.{field['name']}" if path else str(field["name"])
        if field["name"] in written:
            yield from _problems(written[field["name"]]["type"], field["type"], named, where)
        elif "default" not in field:
            yield f"{where}: has no default, and not every version writes it"


def bad_defaults(schema: Mapping[str, Any]) -> list[str]:
    """Return the fields of a schema, and of what it is made of, whose default is no value of their type."""
    found, names = [], named_types(schema)
    for name, record in names.items():
        for field in record.get("fields", ()):
            first = field["type"][0] if isinstance(field["type"], list) else field["type"]
            whole = _whole(_resolved(first, names), names)
            default = field.get("default")
            # In JSON the default of bytes is text.
            value = default.encode("latin-1") if whole == "bytes" and isinstance(default, str) else default
            if "default" in field and not fastavro.validate(value, whole, raise_errors=False):
                found.append(f"{name}.{field['name']}: its default {field['default']!r} is no {_kind(first, names)}")
    return found


def _whole(schema: Any, names: Named) -> Any:  # noqa: ANN401
    """Return a type with everything in it that it names."""
    return fastavro.parse_schema(dict(schema), named_schemas=dict(names)) if isinstance(schema, Mapping) else schema


def _resolved(schema: Any, names: Named) -> Any:  # noqa: ANN401
    if isinstance(schema, str):
        return names.get(_short(schema), schema)
    if isinstance(schema, Mapping) and isinstance(schema["type"], list | Mapping):
        return _resolved(schema["type"], names)
    return schema


def _kind(schema: Any, names: Named) -> str:  # noqa: ANN401
    """Return what a type is, as far as two have to agree on it."""
    schema = _resolved(schema, names)
    if not isinstance(schema, Mapping):
        return str(schema)
    if schema["type"] in ("record", "enum", "fixed"):
        return f"{schema['type']} {_short(schema['name'])}" + (f" of {schema['size']}" if "size" in schema else "")
    return str(schema["type"])


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def all_problems(schemas: Mapping[str, list[tuple[str, dict[str, Any]]]]) -> list[str]:
    """Return what is wrong between the versions of schemas.

    Args:
        schemas: key and schema of each version, by the name.
    """
    found = []
    for versions in schemas.values():
        for key, schema in versions:
            found += [f"{key}: {text}" for text in bad_defaults(schema)]
            found += [
                f"{reader} cannot read what {key} wrote: {text}"
                for reader, other in versions
                for text in problems(schema, other)
            ]
    return found


if __name__ == "__main__":
    wrong = all_problems({name: [(key, load_schema(key)) for key in versions_of(name)] for name in SCHEMA_NAMES})
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    sys.exit(1 if wrong else 0)
