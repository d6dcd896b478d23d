"""Every message survives its bytes, and bytes that are not a message say so."""

import dataclasses
import io
import typing
from enum import StrEnum
from types import NoneType

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.codec.avro import EARLIER, SCHEMA_NAMES, Codec, load_fingerprint, load_schema, schema_name
from undercurrent.codec.tensors import as_array
from undercurrent.errors import DecodeError, EncodeError
from undercurrent.protocol import messages

CODEC = Codec()
NAMED = {}  # a record that a schema names again is defined before
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
        NAMED[avro["name"]] = avro
        return instances(hint, avro)
    if kind in NAMED:
        return instances(hint, NAMED[kind])
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


@pytest.mark.parametrize("key", EARLIER)
def test_an_earlier_schema_has_every_field_of_today_that_has_no_default(key):
    today = {field["name"]: field for field in load_schema(key.partition(".")[0])["fields"]}
    then = {field["name"]: field for field in load_schema(key)["fields"]}
    assert load_fingerprint(key) != load_fingerprint(key.partition(".")[0])
    assert all("default" in today[name] for name in today.keys() - then.keys())
    assert all(grew(then[name]["type"], today[name]["type"]) for name in today.keys() & then.keys())


def grew(then, today):
    """Whether a type is what it was, but for words and for enums that know more."""
    if isinstance(then, dict) and isinstance(today, dict):
        more = set(today.get("symbols", ())) >= set(then.get("symbols", ()))
        keys = (then.keys() | today.keys()) - {"symbols", "doc"}
        return more and all(grew(then.get(key), today.get(key)) for key in keys)
    if isinstance(then, list) and isinstance(today, list):
        return len(then) == len(today) and all(map(grew, then, today))
    return then == today


def test_a_type_that_lost_a_symbol_or_changed_has_not_grown():
    enum = {"type": "enum", "name": "E", "symbols": ["a", "b"], "doc": "x"}
    assert grew(enum, enum | {"symbols": ["a", "b", "c"], "doc": "y"})
    assert not grew(enum, enum | {"symbols": ["a"]})
    assert not grew(["null", enum], ["null", enum | {"name": "F"}])
    assert not grew(["null", "int"], ["null", "long"])


def test_a_state_of_a_guard_that_an_earlier_reader_does_not_know_is_unknown_to_it():
    guards = tuple(messages.Guard(probe=state.value, state=state) for state in messages.GuardState)
    event = messages.GenerationEvent(
        request_id="r",
        attempt=1,
        engine="e",
        incarnation=0,
        kind=messages.GenerationKind.FINAL,
        prompt_partition=0,
        prompt_offset=0,
        guards=guards,
        emitted_at_us=0,
    )
    body = io.BytesIO(CODEC.encode(event)[10:])
    read = fastavro.schemaless_reader(body, load_schema("GenerationEvent"), load_schema("GenerationEvent.1"))
    assert [guard["state"] for guard in read["guards"]][-2:] == ["error", "unknown"]


FIRST_BLOCK = bytes.fromhex(
    "c301decdc399e28e3a28027206000270000265121e726573696475616c5f73747265616d0e666c6f61743332080400040002000e8080f2818389"
    "85061800000000010000000200000018000000000100000002000000c001000000000000803f0000004000004040000080400000a0400000c040"
    "0000e0400000004100001041000020410000304100004041000050410000604100007041000080410000884100009041000098410000a0410000"
    "a8410000b0410000b841"
)
FIRST_STARTED = bytes.fromhex(
    "c301e43540e62ab28b500272060002700002651200020400026d00000000001e726573696475616c5f73747265616d04000400080e666c6f6174"
    "33320461610202000202740a"
)

FIRST_LABEL = bytes.fromhex("c30197418e61a9e13cd7027206626164020206020a06616e6e023202000000000000d03f0e")


def test_what_the_first_version_wrote_is_read():
    """The bytes are that version's; a topic may hold them for as long as its retention says."""
    found = CODEC.decode(FIRST_BLOCK)
    assert isinstance(found, messages.ActivationBlock)
    assert (found.request_id, found.layers, found.width, found.row_shape) == ("r", (0, 2), 4, ())
    assert as_array(found).ravel().tolist() == list(range(24))
    started = CODEC.decode(FIRST_STARTED)
    assert isinstance(started, messages.StreamStarted)
    assert (started.tenant, started.unembedded_positions, started.started_at_us, started.row_shape) == (
        "t",
        (1,),
        5,
        (),
    )
    label = CODEC.decode(FIRST_LABEL)
    assert isinstance(label, messages.Label)
    assert (label.spans, label.source, label.sampling_probability) == (((3, 5),), "ann", 0.25)
    for cut in range(10, len(FIRST_STARTED)):
        with pytest.raises(DecodeError, match="StreamStarted"):
            CODEC.decode(FIRST_STARTED[:cut])


FIRST_ACK = bytes.fromhex("c30133a2b60fb9043bb402630272020402650602020e0000000a020c")
SECOND_STARTED = bytes.fromhex(
    "c30183f6690b273412450272020002700002650400020600026d0000000000046b760202001006040404000e666c6f61743332026100000a"
)


def test_what_was_written_before_there_were_rollouts_is_read():
    ack = CODEC.decode(FIRST_ACK)
    assert isinstance(ack, messages.ControlAck)
    assert (ack.outcome, ack.token_index, ack.applied_at_us, ack.probe, ack.rollouts) == ("applied", 7, 6, None, 0)
    started = CODEC.decode(SECOND_STARTED)
    assert isinstance(started, messages.StreamStarted)
    assert (started.row_shape, started.started_at_us, started.rollouts) == ((2, 2, 2), 5, 0)


SECOND_FINAL = bytes.fromhex(
    "c30106c477824b6a79e30272040202650604080000000a0204020a61626f72740002026304020270020c02000000000000e03f00060008020270"
    "0a0200020e10"
)
SECOND_ACK = bytes.fromhex("c301c0daf6c50d30ff630263027202020265060a000000000a0002066d616404")


def test_what_was_written_before_there_was_a_holdout_is_read():
    final = CODEC.decode(SECOND_FINAL)
    assert isinstance(final, messages.GenerationEvent)
    assert (final.outcome, final.abort.score, final.guards[0].clear_up_to) == ("aborted", 0.5, 5)
    assert (final.holdout, final.first_token_at_us, final.emitted_at_us) == (None, 7, 8)
    ack = CODEC.decode(SECOND_ACK)
    assert isinstance(ack, messages.ControlAck)
    assert (ack.outcome, ack.probe, ack.rollouts) == ("braked", "mad", 2)


def test_an_answer_that_an_earlier_reader_does_not_know_is_unknown_to_it():
    ack = messages.ControlAck(
        command_id="c",
        request_id="r",
        engine="e",
        incarnation=1,
        outcome=messages.AckOutcome.HELD_OUT,
        received_at_us=0,
    )
    body = io.BytesIO(CODEC.encode(ack)[10:])
    read = fastavro.schemaless_reader(body, load_schema("ControlAck"), load_schema("ControlAck.2"))
    assert read["outcome"] == "unknown"


def test_fingerprints_are_distinct_and_in_the_order_of_the_specification():
    keys = (*SCHEMA_NAMES, *EARLIER)
    assert len({load_fingerprint(key) for key in keys}) == len(keys)
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
