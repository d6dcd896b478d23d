"""Two pipeline ranks, a ring each, one publisher, and the probe host that joins what they captured."""

from __future__ import annotations

import numpy as np
import pytest

from engine_worker.publisher_messages import Identity
from engine_worker.publisher_streams import StreamWriter
from probe_consumers.bound import Bound
from probe_consumers.replay import Replay, Span
from undercurrent.capture.frames import decode
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.sharding import share_of
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec, as_array, positions
from undercurrent.core import Probe, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.messages import PublisherStarted, VerdictKind
from undercurrent.protocol.streams import Arrived, Closed, StreamTable
from undercurrent.spec import ExtractionPoint

LAYERS, WIDTH, MAX_ROWS = 5, 3, 16
OWNED = (range(0, 3), range(3, 5))
CODEC = Codec()


def spec(name, *layers, **fields):
    return ExtractionPoint(name=name, layers=layers, position="*", execution_mode="async", **fields)


SPECS = (
    spec("all", 0, 1, 2, 3, 4, tensor_type="residual_stream"),
    spec("first", 1, tensor_type="residual_stream"),
    spec("norm", 5, tensor_type="final_norm"),
    spec("coded", 2, 3, tensor_type="mlp_out", dtype="int8"),
)


class Rank:
    """What captures in one worker: its layers of every point, into a ring of its own."""

    def __init__(self, owned, rank, ring_bytes=1 << 18):
        shares = {item.name: share_of(item, owned, rank) for item in SPECS}
        self.points = [
            CapturePoint.of(item, layers=LAYERS, width=WIDTH, model_dtype="float32", share=shares[item.name])
            for item in SPECS
            if shares[item.name].layers
        ]
        self.ring = Ring.create(ring_bytes)
        self.reader = self.ring.reader()
        self.buffers = {group: np.zeros((MAX_ROWS, group.row_bytes), np.uint8) for group in tap_groups(self.points)}
        self.tracker = Tracker(self.points, self.buffers, self.ring.writer(), check_plans=True)

    def step(self, number, jobs):
        """One step of jobs [(engine id, positions before it, tokens in it)]."""
        ids = [name for name, _, _ in jobs]
        counts = [count for _, _, count in jobs]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        where = [at for _, before, count in jobs for at in range(before, before + count)]
        for group, buffer in self.buffers.items():
            for row, at in enumerate(where):
                rng = [np.random.default_rng([hash_of(group.tensor_type), layer, at]) for layer in group.layers]
                buffer[row] = np.concatenate([one.normal(size=WIDTH).astype("<f4") for one in rng]).view(np.uint8)
        batch = Batch(
            number,
            int(starts[-1]),
            ids,
            np.array([before for _, before, _ in jobs], np.int32),
            starts,
            np.array(where, np.int32) + 7,
        )
        self.tracker.step(batch)


def hash_of(text):
    return sum(text.encode())


class Publisher:
    """The rings of some ranks, published."""

    def __init__(self, *ranks):
        topics = {item.name: item.name for item in SPECS}
        self.ranks = ranks
        self.ended = []
        self.log = {name: [] for name in topics}
        self.streams = StreamWriter(
            CODEC, Identity(engine="e", incarnation=1, model="m"), topics, dict.fromkeys(topics, 1 << 20)
        )

    def drain(self, *numbers):
        for number in numbers or range(len(self.ranks)):
            for frame in self.ranks[number].reader.read():
                self.streams.take(decode(frame), 0, number)
            self.ranks[number].reader.release()
        cycle = self.streams.cycle()
        self.ended += cycle.ended
        for where, records in cycle.records.items():
            self.log[where.topic] += [CODEC.decode(record.value) for record in records]


def run(ranks, *, late=(), tail=1):
    """Drive some ranks through the same two requests; publish as it goes, but some rings only at the end."""
    publisher = Publisher(*ranks)
    prompt = [number for number in range(len(ranks)) if number not in late]
    steps = [
        [("a", 0, 4)],
        [("a", 4, 1), ("b", 0, 6)],
        [("b", 6, 1), ("a", 5, 1)],
        *([("b", 7 + at, 1)] for at in range(tail)),
    ]
    for number, jobs in enumerate(steps, 1):
        for rank in ranks:
            for name, before, _ in jobs:
                if before == 0:
                    order = Order(request_id=name, attempt=1, points=tuple(item.name for item in SPECS), partition=0)
                    rank.tracker.open(name, order, index=0, prompt_len=4, cached_prefix=0)
            rank.step(number, jobs)
            if number == 3:
                rank.tracker.close("a")
        publisher.drain(*prompt)
    for rank in ranks:
        rank.tracker.close("b")
    publisher.drain()
    for rank in ranks:
        rank.tracker.idle(len(steps) + 1)  # what found no room goes with the next step
    publisher.drain()
    return publisher


def shown(log, name):
    """Return what a reader is shown of a topic: {request: {position: values}}, and how each stream ended."""
    table, rows, ends = StreamTable(name), {}, {}
    for offset, message in enumerate(log[name]):
        for event in table.observe(offset, message):
            if isinstance(event, Arrived):
                block = event.block
                assert list(block.layers) == sorted(block.layers)
                for at, row in zip(positions(block).tolist(), as_array(block), strict=True):
                    assert at not in rows.setdefault(block.request_id, {})
                    rows[block.request_id][at] = row.tobytes()
            elif isinstance(event, Closed):
                ends[event.stream.id.request_id] = (event.stream.complete, event.stream.clear_up_to)
    return rows, ends


@pytest.mark.parametrize("late", [(), (0,), (1,)])
def test_what_two_ranks_captured_reads_like_what_one_captured(late):
    one = run([Rank([range(LAYERS)], 0)])
    two = run([Rank(OWNED, rank) for rank in range(2)], late=late)
    for item in SPECS:
        rows, ends = shown(two.log, item.name)
        assert (rows, ends) == shown(one.log, item.name)
        assert ends == {"a": (True, 5), "b": (True, 7)}
        assert sorted(rows["b"]) == list(range(8))
    assert sorted(two.ended) == sorted(one.ended)
    assert len(two.ended) == 2 * len(SPECS)


def test_only_ranks_that_own_a_layer_of_a_point_write_to_its_topic():
    two = run([Rank(OWNED, rank) for rank in range(2)])
    shards = {name: {(message.shard, message.layers) for message in log} for name, log in two.log.items()}
    assert shards == {
        "all": {(0, (0, 1, 2)), (1, (3, 4))},
        "first": {(0, (1,))},
        "norm": {(0, (5,))},
        "coded": {(0, (2,)), (1, (3,))},
    }
    counts = {message.shards for message in two.log["first"] if hasattr(message, "shards")}
    assert counts == {1}


def test_a_rank_that_loses_rows_leaves_a_gap_that_is_seen_and_nothing_is_mixed():
    ranks = [Rank(OWNED, 0), Rank(OWNED, 1, ring_bytes=4096)]
    one, two = run([Rank([range(LAYERS)], 0)], tail=30), run(ranks, late=(1,), tail=30)
    rows, ends = shown(two.log, "all")
    whole, _ = shown(one.log, "all")
    assert ends["b"][0] is False
    for request, found in rows.items():
        assert all(whole[request][at] == row for at, row in found.items())
        complete, clear = ends[request]
        assert all(at in found for at in range(clear + 1))
        assert complete == (len(found) == len(whole[request]))


class Summing(Probe):
    """Says the sum of every row that it was shown."""

    def on_start(self, ctx):
        self.total, self.seen = 0.0, []

    def on_activation(self, record):
        self.total += float(record.tensor.sum())
        self.seen.append((record.token_pos, record.layer))
        return ProbeSignal(score=float(record.tensor[0]))

    def on_end(self, ctx):
        assert self.seen == sorted(self.seen)
        return ProbeResult(self.request_id, "all", "done", metadata={"score": self.total})


def test_a_replay_of_shards_says_what_a_replay_of_one_stream_says():
    loaded = LoadedProbe(factory=ProbeFactory(Summing), sample=ProbeFactory(Summing).spawn("", ""), fingerprint="f")
    bounds = [Bound(Binding(name="sum", point="all", probe="x:Y"), loaded)]

    def replayed(publisher):
        log = [PublisherStarted(engine="e", incarnation=1, started_at_us=0), *publisher.log["all"]]
        replay = Replay("all", bounds, {0: Span(0, len(log))}, lambda: 0)
        found = replay.feed(
            [Incoming(partition=0, offset=at, timestamp_us=0, message=item) for at, item in enumerate(log)]
        )
        assert replay.dead_letters == []
        return {item.request_id: item for item in found if item.kind is VerdictKind.RESULT}

    two = replayed(run([Rank(OWNED, rank) for rank in range(2)], late=(0,)))
    one = replayed(run([Rank([range(LAYERS)], 0)]))
    assert {name: (item.score, item.scored, item.complete) for name, item in two.items()} == {
        name: (item.score, item.scored, item.complete) for name, item in one.items()
    }
    assert {item.scored for item in two.values()} == {30, 40}
