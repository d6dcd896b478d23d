"""Every message survives its bytes, and bytes that are not a message say so."""

import dataclasses
import typing
from enum import StrEnum
from types import NoneType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.codec.avro import SCHEMA_NAMES, Codec, load_fingerprint, load_schema, schema_name
from undercurrent.errors import DecodeError, EncodeError
from undercurrent.protocol import messages

CODEC = Codec()
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


def values(hint, avro):
    """Values of a dataclass field, within the range of its Avro type."""
    if isinstance(avro, list):
        return st.none() | values(next(a for a in typing.get_args(hint) if a is not NoneType), avro[1])
    kind = avro["type"] if isinstance(avro, dict) else avro
    if kind == "array":
        item = typing.get_args(hint)[0]
        return st.lists(values(item, avro["items"]), max_size=3).map(tuple)
    if kind == "map":
        return st.dictionaries(TEXT, TEXT, max_size=2)
    if kind == "record":
        return instances(hint, avro)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    bits = {"int": 31, "long": 63}.get(kind)
    if bits:
        return st.integers(-(2**bits), 2**bits - 1)
    return {
        "string": TEXT,
        "bytes": st.binary(max_size=16),
        "boolean": st.booleans(),
        "double": st.floats(allow_nan=False),
    }[kind]


def instances(cls, schema):
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f["name"]: values(hints[f["name"]], f["type"]) for f in schema["fields"]})


CLASSES = {
    ("ActivationRecord" if c is messages.ActivationBlock else c.__name__): c for c in typing.get_args(messages.Message)
}
ANY_MESSAGE = st.one_of([instances(cls, load_schema(name)) for name, cls in CLASSES.items()])


@given(ANY_MESSAGE)
@settings(max_examples=400, deadline=None)
def test_a_message_survives_its_bytes(message):
    assert CODEC.decode(CODEC.encode(message)) == message


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_schema_and_dataclass_have_the_same_fields_in_the_same_order(name):
    schema_fields = [f["name"] for f in load_schema(name)["fields"]]
    assert [f.name for f in dataclasses.fields(CLASSES[name])] == schema_fields
    assert all(f.get("doc") for f in load_schema(name)["fields"])


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_optional_fields_have_the_schema_s_default(name):
    required = {
        f.name for f in dataclasses.fields(CLASSES[name]) if f.default is f.default_factory is dataclasses.MISSING
    }
    assert required == {f["name"] for f in load_schema(name)["fields"] if "default" not in f}


def test_fingerprints_are_distinct_and_in_the_order_of_the_specification():
    assert len({load_fingerprint(name) for name in SCHEMA_NAMES}) == len(SCHEMA_NAMES)
    encoded = CODEC.encode(started())
    assert encoded[:2] == b"\xc3\x01"
    assert encoded[2:10] == load_fingerprint("EngineStarted")


def started():
    return messages.EngineStarted(engine="e", started_at_us=1, host="h", pid=2, version="0")


@given(ANY_MESSAGE, st.data())
@settings(max_examples=200, deadline=None)
def test_cut_bytes_are_refused(message, data):
    encoded = CODEC.encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(DecodeError):
        CODEC.decode(encoded[:cut])


@given(st.binary(max_size=200), st.sampled_from(SCHEMA_NAMES))
@settings(max_examples=400, deadline=None)
def test_garbage_behind_a_known_header_is_a_decode_error_or_a_message(body, name):
    try:
        outcome = schema_name(CODEC.decode(CODEC.header(name) + body))
    except DecodeError as exc:
        outcome = exc.reason.partition(":")[0]
    assert outcome == name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "tombstone"),
        (b"", "tombstone"),
        (b"{}", "not an Avro single object"),
        (b"\xc3\x01" + bytes(8), "fingerprint 0000000000000000"),
        (CODEC.encode(started()) + b"\x00", "1 bytes after the end"),
    ],
)
def test_what_cannot_be_read_says_why(data, said):
    with pytest.raises(DecodeError, match=said):
        CODEC.decode(data)


def test_a_value_that_the_schema_refuses_names_its_record():
    with pytest.raises(EncodeError, match="EngineStarted"):
        CODEC.encode(messages.EngineStarted(engine=7, started_at_us=1, host="h", pid=2, version="0"))


def test_an_integer_out_of_range_is_refused_not_wrapped():
    with pytest.raises(EncodeError, match="EngineStarted"):
        CODEC.encode(messages.EngineStarted(engine="e", started_at_us=2**63, host="h", pid=2, version="0"))
