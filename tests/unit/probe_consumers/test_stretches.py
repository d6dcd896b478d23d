"""Records taken many at once: a host says, and holds, what it does of each record by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import Decoder
from probe_consumers.runner import BindingRunner
from undercurrent.core import Probe, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.messages import EndReason
from undercurrent.protocol.strands import Stretch
from undercurrent.testing.streams import StreamBuilder, publisher_started

POINT, TOPIC, NOW_US = "residual", "undercurrent.activations.residual", 1_700_000_000_000_000


class OneByOne(Probe):
    """Sees each record, and flags one in ten."""

    def on_start(self, ctx):
        self.seen = []

    def on_activation(self, record):
        self.seen.append((record.token_pos, record.layer, record.tensor.tobytes()))
        if record.token_pos == 13:
            raise ValueError("thirteen")
        return ProbeSignal.flag(score=float(record.token_pos)) if record.token_pos % 10 == 9 else None

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, str(hash(tuple(self.seen))), [], {})


def bounds():
    linear = LinearProbe.from_arrays(
        [1, -1, 0.5, 0.25], 0.1, layer=0, tensor_type="residual_stream", threshold=1.5, aggregation={"kind": "max"}
    )
    loaded = LoadedProbe(
        factory=LinearProbe.factory(artefact=linear.artefact), sample=linear, fingerprint=linear.fingerprint
    )
    code = ProbeFactory(OneByOne)
    seeing = LoadedProbe(factory=code, sample=code.spawn("", ""), fingerprint="code")
    return [
        Bound(Binding(name="guard", point=POINT, probe="p", mode="abort"), loaded),
        Bound(Binding(name="each", point=POINT, probe="m:C", mode="flag"), seeing),
    ]


class Host:
    """A core with its probes; `batch` decodes."""

    def __init__(self, many, emitted_up_to=0):
        self.runner = BindingRunner(bounds(), "service", lambda: NOW_US)
        self.core = ProbeHost(POINT, set_fingerprint(bounds()), self.runner, 60_000_000)
        self.core.assign([0, 1])
        for number in (0, 1):
            self.core.begin(number, Resume(offset=0, emitted_up_to=emitted_up_to))
        self.decoder, self.many, self.taken = Decoder(), many, 0

    def take(self, records):
        decoder = self.decoder
        batch = decoder.batch(records) if self.many else [decoder.incoming(record) for record in records]
        self.taken += sum(len(item.records) for item in batch if type(item) is Stretch)
        return self.core.records(batch, NOW_US)


def by_stream(items, of):
    found = {}
    for item in items:
        found.setdefault(of(item), []).append(item)
    return found


def rows(rng, stream, count):
    return (rng.integers(-3, 4, (count, len(stream.layers), 4)) / 2).astype(np.float32)


def harmed(rng, stream, other, tag):
    """One thing that may happen to a stream beside its next usual block."""
    number = rng.integers(0, 12)
    if number == 0:
        stream.next_seq += 1  # one never comes
        return [stream.block([stream.position], rows(rng, stream, 1))]
    if number == 1:
        return [stream.block([stream.position], rows(rng, stream, 1))] * 2  # repeated
    if number == 2:
        return [stream.end(EndReason.FINISHED)]
    if number == 3:
        return [stream.start()]
    if number == 4:
        return [b"\xc3\x01" + rng.bytes(40)]
    if number == 5:
        whole = stream.block([stream.position], rows(rng, stream, 1))
        return [whole[: int(rng.integers(1, len(whole)))], whole]
    if number == 6:
        return [publisher_started("engine", 1)]
    if number == 7:
        values = rows(rng, stream, 3)
        values[1, 0, 2] = np.nan
        return [stream.block([stream.position, stream.position + 1, stream.position + 2], values)]
    if number == 8:
        return [stream.block([1], rows(rng, stream, 1))]  # backwards
    if number == 9:
        return [(tag, other.block([other.position], rows(rng, other, 1)))]  # under a key that is not its own
    if number == 10:
        return [stream.block(list(range(stream.position, stream.position + 4)), rows(rng, stream, 4))]
    return [None]


def make_log(seed, length=400):
    """Records of two partitions: streams of four requests, now and then something else."""
    rng = np.random.default_rng(seed)
    logs, streams, made = ([], []), [], 0

    def put(partition, key, values):
        for value in values:
            own, value = value if isinstance(value, tuple) else (key, value)
            logs[partition].append((own, value))

    def fresh(partition):
        nonlocal made
        made += 1
        layers = (0,) if rng.integers(0, 4) else (0, 2)
        again = rng.integers(0, 5) == 0 and made > 4
        stream = StreamBuilder(f"r{made - 4 * again}", layers=layers, attempt=1 + int(again), prompt_len=2)
        stream.partition, stream.position = partition, 0
        put(partition, stream.key, [stream.start()])
        return stream

    streams = [fresh(number % 2) for number in range(6)]
    harms = rng.choice([0.0, 0.01, 0.1])
    while sum(map(len, logs)) < length:
        at = int(rng.integers(0, len(streams)))
        stream = streams[at]
        if rng.random() < harms:
            put(stream.partition, stream.key, harmed(rng, stream, streams[at - 1], b"another"))
        elif rng.random() < 0.01:
            put(stream.partition, stream.key, [stream.end()])
            streams[at] = fresh(stream.partition)
        else:
            tokens = int(rng.choice([1, 1, 1, 3]))
            places = range(stream.position, stream.position + tokens)
            put(stream.partition, stream.key, [stream.block(list(places), rows(rng, stream, tokens))])
            stream.position += tokens
    return [
        [Record(TOPIC, number, offset, *item, 1_700_000_000_000 + offset, ()) for offset, item in enumerate(log)]
        for number, log in enumerate(logs)
    ]


def batches(log, seed):
    """Both partitions in batches, cut and mixed by chance; offsets are passed over at times, and come again."""
    rng, places = random.Random(seed), [0, 0]
    while any(place < len(mine) for place, mine in zip(places, log, strict=True)):
        batch = []
        for _ in range(rng.randrange(1, 4)):
            number = rng.randrange(2)
            count = rng.choice([1, 5, 40, 200])
            if rng.random() < 0.2:  # the client passes one over
                batch += log[number][places[number] + 1 : places[number] + 8]
                continue
            batch += log[number][places[number] : places[number] + count]
            places[number] = min(len(log[number]), places[number] + count)
        yield batch


def state_of(host):
    return [
        (host.core.mark(number), [(stream.id, stream.shards, stream.clear_up_to, stream.shown_up_to, stream.missing)
                                  for stream in host.core.open_streams(number)])
        for number in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_a_host_says_the_same_of_many_records_at_once_as_of_each(seed):
    log, emitted_up_to = make_log(seed), seed % 3 * 57
    many, each = Host(True, emitted_up_to), Host(False, emitted_up_to)
    for number, batch in enumerate(batches(log, seed)):
        said, wanted = many.take(batch), each.take(batch)
        # Streams of two partitions have nothing to do with one another.
        assert sorted(map(str, said)) == sorted(map(str, wanted))
        assert state_of(many) == state_of(each)
        if number % 3 == 0:
            got, plain = many.core.transaction(), each.core.transaction()
            assert [got.dead_letters, got.offsets, got.states] == [plain.dead_letters, plain.offsets, plain.states]
            assert by_stream(got.verdicts, lambda item: item.source_partition) == by_stream(
                plain.verdicts, lambda item: item.source_partition
            )
        assert many.core.take_counts() == each.core.take_counts()
    assert each.taken == 0 < many.taken


def test_usual_blocks_are_taken_together():
    host = Host(True)
    stream = [StreamBuilder(f"r{number}") for number in range(4)]
    values = [one.start() for one in stream]
    values += [one.block([at], [[1, 2, 3, 4]]) for at in range(50) for one in stream]
    host.take([Record(TOPIC, 0, at, stream[at % 4].key, value, 5, ()) for at, value in enumerate(values)])
    assert host.taken == 4 * 49  # but for the first of each
    assert host.core.mark(0)[1] == len(values)


def test_a_stretch_is_passed_over_where_its_partition_is_not_there_or_does_not_go_on_with_it():
    stream = StreamBuilder("r")
    values = [stream.start(), *[stream.block([at], [[1, 2, 3, 4]]) for at in range(50)]]
    records = [Record(TOPIC, 0, at, stream.key, value, 5, ()) for at, value in enumerate(values)]
    host = Host(True)
    host.take(records[:10])
    assert [action.offset for action in host.take(records[20:])] == [10]
    assert host.core.mark(0)[1] == 10
    host.take(records[5:])
    assert host.core.mark(0)[1] == 51
    host.core.revoke([0])
    assert host.take(records) == []


def test_blocks_of_one_stream_under_two_keys_are_taken_one_by_one():
    stream = StreamBuilder("r")
    log = [(b"r", stream.start())]
    blocks = [stream.block([at], [[1, 2, 3, 4]]) for at in range(5)]
    log += [(b"r", blocks[0]), (b"other", blocks[1])]
    log += [(key, value) for key in (b"r", b"other") for value in blocks[2:]]
    many, each = Host(True), Host(False)
    for host in (many, each):
        for first, last in ((0, 3), (3, len(log))):
            host.take([Record(TOPIC, 0, at, *log[at], 5, ()) for at in range(first, last)])
    letters = many.core.transaction().dead_letters
    assert [(letter.offset, letter.cause) for letter in letters] == [(at, "repeated") for at in (6, 7, 8)]
    assert state_of(many) == state_of(each)
