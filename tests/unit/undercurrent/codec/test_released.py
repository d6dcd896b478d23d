"""Every version of every schema reads what every other wrote; a change that breaks that is found at once."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import fastavro
import pytest

from scripts.schema_evolution import all_problems, bad_defaults, problems
from undercurrent.codec import Codec
from undercurrent.codec.avro import (
    EARLIER,
    SCHEMA_NAMES,
    load_fingerprint,
    load_schema,
    schema_name,
    schema_text,
    versions_of,
)

FROZEN = json.loads((Path(__file__).parent / "frozen.json").read_text())
CODEC = Codec()
KEYS = {load_fingerprint(key): key for key in (*EARLIER, *SCHEMA_NAMES)}


def test_bytes_of_every_released_version_are_kept():
    kept = {bytes.fromhex(examples[0])[2:10] for examples in FROZEN.values()}
    gone = [name for name, examples in FROZEN.items() if bytes.fromhex(examples[0])[2:10] not in KEYS]
    assert not gone, "a released schema was changed in its place: move what it was to schemas/earlier/ and name it"
    missing = [key for fingerprint, key in KEYS.items() if fingerprint not in kept]
    assert not missing, "run: python scripts/freeze_schemas.py"


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_kept_bytes_are_read_by_every_version(name):
    for text in FROZEN[name]:
        data = bytes.fromhex(text)
        written = KEYS[data[2:10]]
        message = CODEC.decode(data)
        assert schema_name(message) == written.partition(".")[0] == name.partition(" ")[0]
        assert CODEC.decode(CODEC.encode(message)) == message
        wrote = fastavro.schemaless_reader(io.BytesIO(data[10:]), load_schema(written), None)
        for reader in versions_of(schema_name(message)):
            body = io.BytesIO(data[10:])
            read = fastavro.schemaless_reader(body, load_schema(written), load_schema(reader))
            assert body.tell() == len(data) - 10
            fields = {field["name"]: field for field in load_schema(reader)["fields"]}
            assert read.keys() == fields.keys()
            for field, value in read.items():
                if field not in wrote:
                    assert value == fields[field]["default"]
                elif not isinstance(value, str | list | dict):  # an enum may be unknown, also inside
                    assert value == wrote[field]


def test_every_version_reads_every_other_and_its_own_defaults_are_values():
    assert all_problems({name: [(key, load_schema(key)) for key in versions_of(name)] for name in SCHEMA_NAMES}) == []


def changed(name, change):
    """Return a schema and what a change makes of it."""
    now = json.loads(schema_text(name))
    then = copy.deepcopy(now)
    change(then)
    return now, then


def field_of(schema, name):
    return next(field for field in schema["fields"] if field["name"] == name)


BREAKING = {
    "a field without a default": lambda s: s["fields"].append({"name": "new", "type": "int"}),
    "a field without a default gone": lambda s: s["fields"].remove(field_of(s, "engine")),
    "a field renamed": lambda s: field_of(s, "engine").update(name="machine"),
    "a type widened": lambda s: field_of(s, "index").update(type="long"),
    "a type made optional": lambda s: field_of(s, "engine").update(type=["null", "string"]),
    "a type no longer optional": lambda s: field_of(s, "error").update(type="string", default=""),
    "another type": lambda s: field_of(s, "text").update(type="bytes", default=""),
    "a symbol gone where no default takes its place": lambda s: (
        field_of(s, "kind")["type"]["symbols"].remove("refused"),
        field_of(s, "kind")["type"].pop("default"),
    ),
    "an enum renamed": lambda s: field_of(s, "kind")["type"].update(name="Other"),
    "items of another type": lambda s: field_of(s, "token_ids").update(type={"type": "array", "items": "long"}),
    "an inner field without a default": lambda s: field_of(s, "abort")["type"][1]["fields"].append(
        {"name": "new", "type": "int"}
    ),
    "another record": lambda s: s.update(name="GenerationThing"),
}
FITTING = {
    "a field with a default": lambda s: s["fields"].insert(0, {"name": "new", "type": "int", "default": 0}),
    "a field with a default gone": lambda s: s["fields"].remove(field_of(s, "text")),
    "fields in another order": lambda s: s["fields"].reverse(),
    "a symbol more": lambda s: field_of(s, "kind")["type"]["symbols"].append("more"),
    "a symbol less": lambda s: field_of(s, "kind")["type"]["symbols"].remove("refused"),
    "an inner field with a default": lambda s: field_of(s, "abort")["type"][1]["fields"].append(
        {"name": "new", "type": ["null", "int"], "default": None}
    ),
    "other words": lambda s: s.update(doc="other"),
}


@pytest.mark.parametrize("what", BREAKING)
def test_a_change_that_breaks_a_reader_is_found(what):
    now, then = changed("GenerationEvent", BREAKING[what])
    assert problems(now, then) or problems(then, now)
    assert all_problems({"GenerationEvent": [("GenerationEvent.9", now), ("GenerationEvent", then)]})


@pytest.mark.parametrize("what", FITTING)
def test_a_change_that_breaks_nobody_is_let_through(what):
    now, then = changed("GenerationEvent", FITTING[what])
    assert problems(now, then) == problems(then, now) == []


def test_a_default_of_another_type_is_found():
    _, then = changed("GenerationEvent", lambda s: field_of(s, "error").update(default="text"))
    assert bad_defaults(then) == ["GenerationEvent.error: its default 'text' is no null"]
