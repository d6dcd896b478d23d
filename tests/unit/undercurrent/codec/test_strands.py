"""Many records read in one call: the machine code gives what Python does, of whatever bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.capture import steady
from undercurrent.codec import BlockDecoder, Codec
from undercurrent.codec.blocks import Prefix
from undercurrent.codec.strands import Found, joined, read_strands, strands_in_python
from undercurrent.testing.streams import StreamBuilder


@pytest.fixture(scope="module")
def known():
    """Three streams that are known under their keys, and one under the first one's as well."""
    decoder = BlockDecoder(Codec(), lambda _: None)
    streams = [
        StreamBuilder(name, layers=layers) for name, layers in zip("abcd", [(0,), (0, 1), (0,), (0,)], strict=True)
    ]
    for stream in streams:
        key = b"a" if stream.key == b"d" else stream.key
        decoder.decode(key, stream.block([0], np.zeros((1, len(stream.layers), 4))))
    return decoder.known, streams


def blocks(stream, count, tokens=1):
    shape = (tokens, len(stream.layers), 4)
    return [stream.block(range(at, at + tokens), np.full(shape, at)) for at in range(1, 1 + count * tokens, tokens)]


def records(pairs, offset=5):
    return [("t", 0, offset + at, key, value, 1, ()) for at, (key, value) in enumerate(pairs)]


def test_blocks_come_stream_by_stream_with_their_places(known):
    known, (a, b, _, d) = known
    a.next_seq = b.next_seq = d.next_seq = 1
    one, two, three = blocks(a, 3, tokens=2), blocks(b, 2), blocks(d, 1)
    pairs = [(b"a", one[0]), (b"b", two[0]), (b"a", three[0]), (b"a", one[1]), (b"b", two[1]), (b"a", one[2])]
    end, found = read_strands(records(pairs), 0, known)
    found = [Found(*fields) for fields in found]
    assert end == 6
    assert [strand.values for strand in found] == [one, two, three]
    assert [np.frombuffer(strand.places, "i").tolist() for strand in found] == [[0, 3, 5], [1, 4], [2]]
    assert [np.frombuffer(strand.tokens, "i").tolist() for strand in found] == [[2, 2, 2], [1, 1], [1]]
    assert np.frombuffer(found[0].positions, "<i4").tolist() == [1, 2, 3, 4, 5, 6]
    values = np.frombuffer(joined(found[1].values, found[1].starts), np.float32)
    assert values.tolist() == [1] * 8 + [2] * 8


@pytest.mark.parametrize("harm", ["offset", "key", "seq", "value", "none", "cut"])
def test_a_stretch_ends_before_what_is_not_the_next_usual_block(known, harm):
    known, (a, *_) = known
    a.next_seq = 1
    values = blocks(a, 6)
    rows = records([(b"a", value) for value in values])
    topic, number, offset, key, value, *rest = rows[3]
    rows[3] = {
        "offset": (topic, number, offset + 1, key, value, *rest),
        "key": (topic, number, offset, b"nobody's", value, *rest),
        "seq": (topic, number, offset, key, values[4], *rest),
        "value": (topic, number, offset, key, b"", *rest),
        "none": (topic, number, offset, None, None, *rest),
        "cut": (topic, number, offset, key, value[:-1], *rest),
    }[harm]
    for read in (read_strands, strands_in_python):
        end, [fields] = read(rows, 1, known)
        assert (end, Found(*fields).values) == (3, values[1:3])
        assert read(rows, 3, known)[0] == (3 if harm not in ("offset", "seq") else 4)
        assert read(rows, 6, known) == (6, [])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_machine_code_reads_what_python_does(known, data):
    known, streams = known
    pairs = []
    for stream in streams:
        stream.next_seq = data.draw(st.integers(0, 3))
        mine = blocks(stream, data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 1, 2])))
        key = data.draw(st.sampled_from([stream.key, stream.key, stream.key, b"a", None]))
        pairs += [(key, value) for value in mine]
    pairs = data.draw(st.permutations(pairs)) if data.draw(st.booleans()) else pairs
    for at in data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=3)) if pairs else []:
        key, value = pairs[at]
        value = bytearray(value)
        place = data.draw(st.integers(0, max(0, len(value) - 1)))
        kind = data.draw(st.sampled_from(["byte", "cut", "more"]))
        if kind == "byte" and value:
            value[place] = data.draw(st.integers(0, 255))
        value = value[:place] if kind == "cut" else value + bytes(kind == "more")
        pairs[at] = key, bytes(value)
    rows, at = records(pairs), 0
    while at <= len(rows):
        assert read_strands(rows, at, known) == strands_in_python(rows, at, known)
        at = read_strands(rows, at, known)[0] + 1


@given(st.binary(max_size=40), st.integers(1, 64))
@settings(max_examples=500, deadline=None)
def test_any_bytes_behind_a_prefix_are_read_alike(rest, token_bytes):
    known = {b"k": [Prefix(b"ab", token_bytes, ())]}
    rows = records([(b"k", b"ab" + rest)])
    assert read_strands(rows, 0, known) == strands_in_python(rows, 0, known)


@pytest.mark.skipif(read_strands is strands_in_python, reason="no machine code was built here")
def test_what_is_no_list_of_records_is_refused():
    for arguments in (((), 0, {}), ([], 1, {}), ([], -1, {}), ([], 0, []), ([], 0)):
        with pytest.raises((TypeError, ValueError)):
            read_strands(*arguments)
    assert read_strands([1], 0, {}) == (0, [])
    assert read_strands([("t", 0, 0, b"k", b"v")], 0, {b"k": 1}) == (0, [])
    assert read_strands([("t", 0, 0, b"k", b"v")], 0, {b"k": [(b"v",)]}) == (0, [])


def test_machine_code_is_there_where_that_of_capture_is():
    assert (read_strands is not strands_in_python) == steady.AVAILABLE
