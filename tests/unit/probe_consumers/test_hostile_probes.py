"""Probes that break every rule: each ends for its own request, with a verdict that fits its topic."""

from __future__ import annotations

import numpy as np
import pytest

from probe_consumers.bound import MAX_TEXT_CHARS, MAX_WORDS, Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.runner import BindingRunner
from undercurrent.codec import Codec
from undercurrent.core import Probe, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import SendAbort
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.messages import VerdictAction, VerdictKind
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()
TOPIC_BYTES = 1_000_000
NOW_US = 1_700_000_000_000_000


class Quiet(Probe):
    """The well-behaved one."""

    def on_activation(self, record):
        return None

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "ok")


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raising(exc):
    class Raising(Quiet):
        def on_activation(self, record):
            raise exc

    return Raising


def signalling(**fields):
    class Signalling(Quiet):
        def on_activation(self, record):
            return ProbeSignal("abort", **fields)

    return Signalling


class RaisesAtEnd(Quiet):
    def on_end(self, ctx):
        raise SystemExit(3)


class Bulk(Quiet):
    def score(self, rows):
        return np.zeros(len(rows), np.float32)

    def on_scores(self, positions, layers, scores):
        return None


def joining(**fields):
    class Joining(Bulk):
        joins_blocks = True

        def on_scores(self, positions, layers, scores):
            return ProbeSignal("abort", **fields)

    return Joining


class ScoresThatAreNoNumbers(Bulk):
    def score(self, rows):
        return np.array(["x"] * len(rows), object)


class LayersThatAreNotThere(Bulk):
    def layers_to_score(self, layers):
        return (99,)


class NoLayers(Bulk):
    def layers_to_score(self, layers):
        raise ValueError("which?")


def host(cls):
    bounds = []
    for name, made in (("hostile", cls), ("quiet", Quiet)):
        factory = ProbeFactory(made)
        loaded = LoadedProbe(factory=factory, sample=factory.spawn("", ""), fingerprint=name)
        bounds.append(Bound(Binding(name=name, point="residual", probe="m:C", mode="abort"), loaded))
    core = ProbeHost("residual", set_fingerprint(bounds), BindingRunner(bounds, "s", lambda: NOW_US), 60_000_000)
    core.assign([0])
    core.begin(0, Resume(offset=0, emitted_up_to=0))
    return core


def judge(cls, *values):
    """Return what a hostile probe said of a stream, and the commands, after all of it could be written."""
    core = host(cls)
    if not values:
        stream = StreamBuilder("r", layers=(0, 1), prompt_len=1)
        values = (stream.start(), stream.block([0, 1], np.ones((2, 2, 4))), stream.end())
    batch = [incoming(CODEC, Record("t", 0, at, b"r", value, NOW_US // 1000, ())) for at, value in enumerate(values)]
    commands = [action.command for action in core.records(batch, NOW_US) if isinstance(action, SendAbort)]
    transaction = core.transaction()
    sizes = [len(CODEC.encode(message)) for message in (*transaction.verdicts, *commands)]
    assert max(sizes) < TOPIC_BYTES
    last = [item for item in transaction.verdicts if item.kind in (VerdictKind.RESULT, VerdictKind.ERROR)]
    assert [(item.kind, item.verdict) for item in last if item.probe == "quiet"] == [(VerdictKind.RESULT, "ok")]
    return [item for item in transaction.verdicts if item.probe == "hostile"], commands


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (raising(SpeechlessError()), "SpeechlessError, which cannot be shown"),
        (raising(ValueError("x" * 3_000_000)), "ValueError: xxx"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (RaisesAtEnd, "SystemExit: 3"),
        (signalling(token_pos=2**40), "token_pos 1099511627776; accepted: up to 2147483647"),
        (signalling(token_pos="two"), "token_pos 'two'; accepted: an integer"),
        (signalling(layer=1.5), "layer 1.5; accepted: an integer"),
        (signalling(score="high"), "could not convert string to float"),
        (ScoresThatAreNoNumbers, "could not convert string to float"),
        (LayersThatAreNotThere, "layers_to_score named [99]; accepted: some of [0, 1]"),
        (NoLayers, "ValueError: which?"),
    ],
)
def test_a_probe_that_fails_ends_alone_and_says_why(cls, error):
    said, commands = judge(cls)
    [last] = [item for item in said if item.kind in (VerdictKind.ERROR, VerdictKind.RESULT)]
    assert last.kind is VerdictKind.ERROR
    assert error in last.error
    assert len(last.error) <= MAX_TEXT_CHARS
    assert commands == []


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (joining(token_pos=None), "token_pos None; accepted: of the tokens that were scored, up to 1"),
        (joining(token_pos="two"), "token_pos 'two'; accepted: an integer"),
        (joining(token_pos=9), "token_pos 9; accepted: of the tokens that were scored, up to 1"),
        (joining(token_pos=1, score="high"), "could not convert string to float"),
    ],
)
def test_a_probe_that_fails_on_blocks_that_it_is_given_as_one_ends_alone_too(cls, error):
    stream = StreamBuilder("r", layers=(0, 1), prompt_len=1)
    start, *blocks = stream.start(), *(stream.block([at], np.ones((1, 2, 4))) for at in (0, 1))
    said, commands = judge(cls, start, *blocks, stream.end())
    [last] = [item for item in said if item.kind in (VerdictKind.ERROR, VerdictKind.RESULT)]
    assert last.kind is VerdictKind.ERROR
    assert error in last.error
    assert commands == []


def test_positions_that_are_numpy_integers_are_positions():
    said, commands = judge(signalling(token_pos=np.int64(1), layer=np.int32(0), score=np.float32(0.5)))
    assert [(item.kind, item.token_pos, item.layer) for item in said if item.action is VerdictAction.ABORT] == [
        (VerdictKind.SIGNAL, 1, 0),
        (VerdictKind.RESULT, 1, 0),
    ]
    assert [command.token_pos for command in commands] == [1]


def test_a_talkative_probe_is_cut_short_but_its_abort_stands():
    said, commands = judge(signalling(metadata={f"key {n}": "y" * 1_000_000 for n in range(40)}))
    [signal] = [item for item in said if item.kind is VerdictKind.SIGNAL]
    assert len(commands) == 1
    assert signal.metadata["..."] == f"{40 - MAX_WORDS} more"
    assert {len(value) for key, value in signal.metadata.items() if key != "..."} == {MAX_TEXT_CHARS}


def test_an_aggregate_that_is_no_number_is_left_out():
    class Odd(Quiet):
        def aggregate(self):
            return 1.0

    class Raising(Quiet):
        @property
        def aggregate(self):
            raise ValueError("none yet")

    for cls in (Odd, Raising):
        said, _ = judge(cls)
        assert [(item.kind, item.score) for item in said] == [(VerdictKind.WATERMARK, None), (VerdictKind.RESULT, None)]


def test_numbers_that_add_up_to_more_than_a_field_holds_are_the_most_it_holds():
    shards = [StreamBuilder("r", shard=number, shards=2, layers=(number,)) for number in (0, 1)]
    values = [shard.start() for shard in shards]
    for shard in shards:
        shard.skip(2**63 - 10)
    values += [shard.end() for shard in shards]
    said, _ = judge(Quiet, *values)
    assert [item.missing for item in said if item.kind is VerdictKind.RESULT] == [2**63 - 1]


def test_a_block_of_another_shape_than_its_stream_is_an_error():
    stream, other = (StreamBuilder("r", tensor_type="kv", row_shape=shape) for shape in ((2, 1, 4), (2, 2, 2)))
    other.skip()
    batch = [stream.start(), other.block([0], np.ones((1, 1, 8)))]
    core = host(Quiet)
    core.records([incoming(CODEC, Record("t", 0, n, b"r", v, 0, ())) for n, v in enumerate(batch)], NOW_US)
    (said,) = {item.error for item in core.transaction().verdicts if item.kind is VerdictKind.ERROR}
    assert said == "ProbeError: a block of float32 kv, [2, 2, 2] in a stream of float32 kv, [2, 1, 4]"


def test_a_probe_sees_keys_and_values_in_their_shape():
    seen = []

    class Keen(Quiet):
        def on_activation(self, record):
            seen.append((record.tensor_type, record.tensor.shape, record.tensor[1, 0].tolist()))

    stream = StreamBuilder("r", tensor_type="kv", row_shape=(2, 1, 2))
    judge(Keen, stream.start(), stream.block([0], np.arange(4.0)), stream.end())
    assert seen == [("kv", (2, 1, 2), [2.0, 3.0])]


def test_a_block_of_layers_that_its_stream_has_not_is_an_error_and_no_clear_verdict():
    stream, other = (StreamBuilder("r", layers=layers) for layers in ((0, 1), (7,)))
    values = [stream.start(), stream.block([0], np.ones((1, 2, 4)))]
    other.skip(2)
    stream.skip()
    batch = [*values, other.block([1], np.ones((1, 1, 4))), stream.end()]
    core = host(Bulk)
    core.records([incoming(CODEC, Record("t", 0, n, b"r", v, 0, ())) for n, v in enumerate(batch)], NOW_US)
    last = [item for item in core.transaction().verdicts if item.kind in (VerdictKind.RESULT, VerdictKind.ERROR)]
    assert {item.error for item in last} == {"ProbeError: a block of layers [7] in a stream of layers [0, 1]"}
    assert {item.clear_up_to for item in last} == {0}
