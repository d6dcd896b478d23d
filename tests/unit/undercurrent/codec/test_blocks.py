"""The hand-made encoder gives fastavro's bytes, and the hand-made decoder what fastavro reads of any bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.capture import steady
from undercurrent.codec import BlockDecoder, BlockEncoder, Codec
from undercurrent.codec.blocks import encode_in_python, read_block, read_in_python, zigzag
from undercurrent.errors import DecodeError
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()
LONGS = st.integers(0, 2**63 - 1)


def block(**changes):
    fields = {
        "request_id": "r",
        "attempt": 3,
        "point": "p",
        "engine": "e",
        "incarnation": 9,
        "tensor_type": "residual_stream",
        "dtype": "float32",
        "width": 4,
        "layers": (0, 2),
        "seq": 1,
        "step": 7,
        "captured_at_us": 1_700_000_000_000_000,
        "positions": np.arange(3, dtype="<i4").tobytes(),
        "token_ids": np.arange(3, dtype="<i4").tobytes(),
        "data": np.arange(24, dtype="<f4").tobytes(),
    }
    return ActivationBlock(**{**fields, **changes})


@given(
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 200), max_size=100).map(tuple),
    st.lists(st.integers(1, 300), max_size=4).map(tuple),
    *[LONGS] * 3,
    st.integers(0, 2**31 - 1),
    *[st.binary(max_size=300)] * 3,
)
@settings(max_examples=300, deadline=None)
def test_bytes_are_those_of_fastavro(rid, index, layers, shape, seq, step, at_us, revision, positions, token_ids, data):
    wanted = block(
        request_id=rid, index=index, layers=layers, row_shape=shape, seq=seq, step=step, captured_at_us=at_us,
        revision=revision, positions=positions, token_ids=token_ids, data=data,
    )  # fmt: skip
    encoder = BlockEncoder(CODEC, block(request_id=rid, index=index, layers=layers, row_shape=shape))
    got = encoder.encode(seq, step, at_us, memoryview(positions), token_ids, memoryview(data), revision=revision)
    assert got == CODEC.encode(wanted)
    assert got == encode_in_python(encoder.prefix, seq, revision, step, at_us, positions, token_ids, data)


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 127, 128, 2**31, 2**63 - 1, -(2**63)])
def test_zigzag_is_avro_s_long(value):
    import io

    import fastavro

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema("long"), value)
    assert zigzag(value) == out.getvalue()


def decoded(decode, value):
    """What reading some bytes gives, or what it says."""
    try:
        return decode(value)
    except DecodeError as exc:
        return str(exc)


def values_of(tokens, first=0, width=4):
    return {
        "positions": np.arange(first, first + tokens, dtype="<i4").tobytes(),
        "token_ids": np.arange(tokens, dtype="<i4").tobytes(),
        "data": np.arange(tokens * 2 * width, dtype="<f4").tobytes(),
    }


@given(st.data())
@settings(max_examples=200)
def test_a_decoder_that_knows_a_stream_reads_what_fastavro_reads(data):
    checked = []
    decoder = BlockDecoder(CODEC, checked.append)
    keys = [b"r", b"s", None]
    for _ in range(data.draw(st.integers(2, 8))):
        key = data.draw(st.sampled_from(keys))
        wanted = block(
            request_id=(key or b"t").decode(),
            attempt=data.draw(st.integers(1, 2)),
            seq=data.draw(LONGS),
            step=data.draw(LONGS),
            revision=data.draw(st.integers(0, 300)),
            **values_of(data.draw(st.integers(1, 70)), data.draw(st.integers(0, 2**31 - 100))),
        )
        found = decoder.decode(key, CODEC.encode(wanted))
        assert found == wanted
        assert type(found) is ActivationBlock
    assert len(checked) <= 2 * len(keys)


@given(st.data())
@settings(max_examples=300)
def test_bytes_that_were_changed_are_read_or_refused_as_fastavro_does(data):
    def check(found):
        if len(found.positions) % 4 or not found.positions or min(np.frombuffer(found.positions, "<i4")) < 0:
            raise DecodeError("positions")
        if len(found.data) != len(found.positions) // 4 * 32 or len(found.token_ids) not in (0, len(found.positions)):
            raise DecodeError("size")

    def by_codec(value):
        found = CODEC.decode(value)
        check(found)
        return found

    decoder = BlockDecoder(CODEC, check)
    whole = CODEC.encode(block(**values_of(5)))
    decoder.decode(b"r", whole)
    value = bytearray(CODEC.encode(block(seq=70, **values_of(data.draw(st.integers(1, 5)), 3))))
    start = len(BlockEncoder(CODEC, block()).prefix)
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(start, len(value) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(start, len(value))) if data.draw(st.booleans()) else len(value)
    changed = bytes(value[:end])
    assert decoded(lambda raw: decoder.decode(b"r", raw), changed) == decoded(by_codec, changed)


def test_streams_under_one_key_and_many_keys_are_all_read():
    decoder = BlockDecoder(CODEC, lambda _: None, most_streams=3)
    for number in range(200):
        wanted = block(request_id=f"{number % 7}", attempt=number % 20, seq=number)
        assert decoder.decode(f"{number % 7}".encode(), CODEC.encode(wanted)) == wanted
    with pytest.raises(DecodeError, match="a tombstone"):
        decoder.decode(b"r", None)


def test_what_has_ended_is_not_remembered():
    decoder = BlockDecoder(CODEC, lambda _: None)
    for number in range(50):
        stream = StreamBuilder(f"{number}")
        for value in (stream.start(), stream.block([0], np.zeros((1, 1, 4))), stream.end()):
            decoder.decode(stream.key, value)
        assert len(decoder) == 0
    decoder.decode(b"r", CODEC.encode(block()))
    assert len(decoder) == 1


class Counting(Codec):
    """Counts the bytes of blocks that it decodes."""

    read = 0

    def decode(self, data):
        found = super().decode(data)
        self.read += isinstance(found, ActivationBlock) and len(data)
        return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_start_tells_what_the_first_block_begins_with(dtype):
    codec, checked = Counting(), []
    decoder = BlockDecoder(codec, checked.append)
    for number in range(3):
        stream = StreamBuilder(f"{number}", dtype=dtype, layers=(1, 4))
        decoder.decode(stream.key, stream.start())
        value = stream.block(range(5), np.ones((5, 2, 4), np.float32))
        assert decoder.decode(stream.key, value) == CODEC.decode(value)
        if number == 0:
            first = codec.read  # how blocks are framed is known since
    assert codec.read == first == len(value)
    assert [item.request_id for item in checked] == ["0", "1", "2"]


def started_as(decoder, **fields):
    """Let a decoder know how blocks are framed, then a stream's start."""
    decoder.decode(b"x", CODEC.encode(block(request_id="x")))
    stream = StreamBuilder("r", layers=(0, 2), width=4)
    start = replace(CODEC.decode(stream.start()), **fields)
    assert decoder.decode(b"r", CODEC.encode(start)) == start
    return start


def as_started(start, **fields):
    names = ["request_id", "attempt", "point", "engine", "incarnation", "tensor_type", "dtype", "width", "layers"]
    return block(**{name: getattr(start, name) for name in names} | fields)


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"width": 8}, {"layers": (0,)}, {"data": bytes(90)}])
def test_a_block_that_is_not_as_its_start_says_is_checked_itself(fields):
    checked = []
    decoder = BlockDecoder(CODEC, checked.append)
    wanted = as_started(started_as(decoder), **fields)
    checked.clear()
    assert decoder.decode(b"r", CODEC.encode(wanted)) == wanted
    assert checked == [wanted]


@pytest.mark.parametrize(
    "fields",
    [{}, {"layers": (0, 0)}, {"layers": ()}, {"width": 2**31 - 1}, {"width": -4}, {"width": 0}, {"dtype": "float99"}],
    ids=str,
)
def test_a_start_that_is_wrong_lets_no_block_pass_unchecked(fields):
    def check(found):
        if found.request_id == "r":
            raise DecodeError("refused")

    decoder = BlockDecoder(CODEC, check)
    start = started_as(decoder, **fields)
    with pytest.raises(DecodeError, match="refused"):
        decoder.decode(b"r", CODEC.encode(as_started(start)))


needs_it = pytest.mark.skipif(read_block is read_in_python, reason="there is no C compiler here, so Python reads")
# Of any length, too long ones and endless ones among them.
HOSTILE_LONGS = LONGS.map(zigzag) | st.binary(max_size=14).map(lambda raw: bytes(byte | 0x80 for byte in raw) + b"\x01")
SAME = ("request_id", "r", "attempt", 1, "layers", (0, 1))


def test_machine_code_is_there_wherever_that_of_a_step_is():
    assert (read_block is not read_in_python) == steady.AVAILABLE, "build it: make setup"


@needs_it
@given(
    numbers=st.tuples(*[HOSTILE_LONGS] * 4),
    arrays=st.tuples(*[st.binary(max_size=20) | st.just(bytes(8))] * 3),
    lengths=st.tuples(*[st.none() | HOSTILE_LONGS] * 3),
    cut=st.integers(0, 12),
    token_bytes=st.sampled_from([4, 1, 0, -8, 2**62]),
)
@settings(max_examples=500)
def test_machine_code_reads_what_python_reads(numbers, arrays, lengths, cut, token_bytes):
    sizes = [zigzag(len(array)) if size is None else size for array, size in zip(arrays, lengths, strict=True)]
    value = b"prefix" + b"".join(numbers) + b"".join(part for pair in zip(sizes, arrays, strict=True) for part in pair)
    value = value[: len(value) - cut] if cut < 10 else value

    def whole(read):
        found = read(value, 6, token_bytes, _Fields, SAME)
        return None if found is None else vars(found)

    assert whole(read_block) == whole(read_in_python)


class _Fields:
    """Takes any field; a block takes only its own."""

    def __init__(self, **fields):
        vars(self).update(fields)


@needs_it
@pytest.mark.parametrize("at", [-1, 1000, 2**62])
def test_machine_code_reads_nothing_outside_of_the_bytes(at):
    assert read_block(bytes(40), at, 8, ActivationBlock, SAME) is None


@needs_it
def test_a_block_of_machine_code_is_as_frozen_as_any():
    read = read_block(b"\0\0\0\0\x08\0\0\0\0\0\x08abcd", 0, 4, ActivationBlock, SAME)
    assert (read.seq, read.request_id, read.positions, bytes(read.data)) == (0, "r", bytes(4), b"abcd")
    with pytest.raises(AttributeError):
        read.seq = 1


@pytest.mark.skipif(read_block is read_in_python, reason="no machine code was built here")
def test_what_is_no_block_is_not_encoded():
    from undercurrent.codec import _blocks

    usual = (b"prefix", 1, 0, -1, -(2**63), b"abcd", memoryview(b""), b"x" * 200)
    assert _blocks.encode(*usual) == encode_in_python(*usual)
    for place, wrong in ((0, "text"), (1, "1"), (4, 2**63), (5, "text"), (6, None), (7, memoryview(b"abcd")[::2])):
        with pytest.raises((TypeError, OverflowError, BufferError)):
            _blocks.encode(*usual[:place], wrong, *usual[place + 1 :])
    with pytest.raises(TypeError):
        _blocks.encode(*usual[:7])
