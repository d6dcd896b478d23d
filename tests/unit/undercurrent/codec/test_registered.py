"""Both kinds of frame are read whichever is written, and a schema that is not ours is an error with a name."""

from __future__ import annotations

import contextlib
import io
import json

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.codec import BlockDecoder, BlockEncoder, Codec
from undercurrent.codec.avro import EARLIER, SCHEMA_NAMES, load_schema, schema_text
from undercurrent.codec.registered import RegistryFraming, recognised
from undercurrent.errors import DecodeError, UnreachableError
from undercurrent.protocol.frames import body_of, registry_id
from undercurrent.protocol.messages import ActivationBlock, ControlAck, EngineStarted, StreamStarted
from undercurrent.testing.streams import StreamBuilder

SINGLE = Codec()
STARTED = EngineStarted(engine="e", started_at_us=1, host="h", pid=2, version="0")


class Ids:
    """A registry that gives schemas the ids 1, 2, 3, ..."""

    def __init__(self, **more: str) -> None:
        self.texts = {at: schema_text(key) for at, key in enumerate((*EARLIER, *SCHEMA_NAMES), 1)}
        self.ids = {key: at for at, key in enumerate((*EARLIER, *SCHEMA_NAMES), 1)}
        for key, text in more.items():
            self.ids[key] = number = len(self.texts) + 1
            self.texts[number] = text
        self.asked: list[int] = []

    def text_of(self, number: int) -> str:
        self.asked.append(number)
        if number not in self.texts:
            raise DecodeError(f"schema id {number} is unknown")
        return self.texts[number]

    def codec(self) -> Codec:
        return Codec(RegistryFraming(self.ids.__getitem__, self.text_of))


def framed(number: int, schema: dict, fields: dict) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, fields)
    return b"\x00" + number.to_bytes(4, "big") + out.getvalue()


def test_what_one_framing_writes_both_kinds_of_frame_are_read_of():
    ids = Ids()
    codec = ids.codec()
    value = codec.encode(STARTED)
    assert value[:5] == b"\x00" + ids.ids["EngineStarted"].to_bytes(4, "big")
    assert codec.decode(value) == codec.decode(SINGLE.encode(STARTED)) == STARTED
    assert body_of(value) == body_of(SINGLE.encode(STARTED)) == SINGLE.encode_body(STARTED)
    codec.decode(value)
    assert ids.asked == [ids.ids["EngineStarted"]], "a schema is asked for once"


def test_bytes_of_a_registry_are_refused_with_its_name_where_none_is_named():
    with pytest.raises(DecodeError, match=r"id 7 of a schema registry.*schema\.registry\.url"):
        SINGLE.decode(b"\x00\x00\x00\x00\x07abc")


@pytest.mark.parametrize("value", [None, b""])
def test_a_tombstone_and_an_empty_value_are_no_message_in_either_framing(value):
    for codec in (SINGLE, Ids().codec()):
        with pytest.raises(DecodeError, match="tombstone"):
            codec.decode(value)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_decode_error(data):
    codec = Ids().codec()
    for value in (data, b"\x00" + data, b"\x00\x00\x00\x00" + data):
        with contextlib.suppress(DecodeError):
            assert codec.decode(value) is not None


def test_a_registry_that_does_not_answer_is_no_decode_error():
    def down(_: object) -> str:
        raise UnreachableError("down")

    codec = Codec(RegistryFraming(down, down))
    with pytest.raises(UnreachableError):
        codec.decode(b"\x00\x00\x00\x00\x01abc")
    with pytest.raises(UnreachableError):
        codec.encode(STARTED)


def test_every_version_s_schema_is_recognised_by_its_canonical_form_whatever_its_words_are():
    for key in (*EARLIER, *SCHEMA_NAMES):
        schema = json.loads(schema_text(key))
        assert recognised(json.dumps({**schema, "doc": "other words"}), 1) == (key, None)


def test_a_later_version_s_message_is_read_without_what_is_new():
    later = json.loads(schema_text("ControlAck"))
    later["fields"].insert(2, {"name": "mood", "type": "string", "default": ""})
    outcome = next(field for field in later["fields"] if field["name"] == "outcome")
    outcome["type"]["symbols"].append("postponed")
    ids = Ids(later=json.dumps(later))
    ack = ControlAck(
        command_id="c", request_id="r", engine="e", incarnation=1, outcome="applied", received_at_us=0, token_index=3
    )
    body = io.BytesIO(SINGLE.encode_body(ack))
    fields = fastavro.schemaless_reader(body, load_schema("ControlAck"), None)
    value = framed(ids.ids["later"], fastavro.parse_schema(later, named_schemas={}), {**fields, "mood": "fine"})
    assert ids.codec().decode(value) == ack
    value = framed(ids.ids["later"], fastavro.parse_schema(later, named_schemas={}), {**fields, "outcome": "postponed"})
    read = ids.codec().decode(value)
    assert isinstance(read, ControlAck)
    assert read.outcome == "unknown"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "no Avro schema"),
        ("[" * 5000, "no Avro schema"),
        ('{"type": "record"}', "no Avro schema"),
        ('"string"', "none of our messages|no Avro schema"),
        (
            '{"type": "record", "name": "Order", "namespace": "shop", "fields": []}',
            "shop.Order.*none of ours|none of our",
        ),
        (
            '{"type": "record", "name": "Label", "namespace": "undercurrent", "fields": []}',
            "Label",
        ),  # ours by name, and nothing that our reader can read
    ],
)
def test_a_schema_that_is_none_of_ours_is_said(text, said):
    ids = Ids(other=text)
    with pytest.raises(DecodeError, match=said):
        ids.codec().decode(b"\x00" + ids.ids["other"].to_bytes(4, "big") + b"abc")


def test_an_id_that_the_registry_does_not_have_is_said():
    with pytest.raises(DecodeError, match="schema id 4242 is unknown"):
        Ids().codec().decode(b"\x00" + (4242).to_bytes(4, "big"))
    assert registry_id(b"\x00\x00\x00\x10\x92") == 4242
    assert registry_id(b"\x00\x00\x00\x10") is None


def test_blocks_of_either_frame_take_the_fast_way_from_the_second_on():
    ids = Ids()
    registered = ids.codec()
    stream = StreamBuilder("r", layers=(0, 2), width=4)
    blocks = [stream.block([at], np.full((1, 2, 4), at)) for at in range(3)]
    template = SINGLE.decode(blocks[0])
    assert isinstance(template, ActivationBlock)
    encoder = BlockEncoder(registered, template)
    assert encoder.prefix[:5] == b"\x00" + ids.ids["ActivationRecord"].to_bytes(4, "big")
    for frame in (lambda value: value, lambda value: registered.header("ActivationRecord") + body_of(value)):
        decoder = BlockDecoder(registered, lambda block: None)
        values = [frame(value) for value in blocks]
        assert [decoder.decode(b"r", value) for value in values] == [SINGLE.decode(value) for value in blocks]
        # From the second one on the data are a view of the record.
        assert isinstance(decoder.decode(b"r", values[2]).data, memoryview)


def test_a_stream_of_mixed_frames_is_read_whole():
    registered = Ids().codec()
    stream = StreamBuilder("r")
    started = SINGLE.decode(stream.start())
    assert isinstance(started, StreamStarted)
    decoder = BlockDecoder(registered, lambda block: None)
    values = [stream.block([at], np.ones((1, 1, 4))) for at in range(4)]
    mixed = [registered.header("ActivationRecord") + body_of(v) if at % 2 else v for at, v in enumerate(values)]
    for _ in range(2):
        assert [decoder.decode(b"r", value) for value in mixed] == [SINGLE.decode(value) for value in values]
