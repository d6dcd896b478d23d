"""The publisher's loop on a real ring: it reads on while the broker is at work, and outlives its producer."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from engine_worker.publisher_loop import PublisherLoop
from tests.integration.engine_worker.publisher_scene import CODEC, Scene, spec_points
from undercurrent.codec import positions
from undercurrent.errors import ProducerFatalError, UnreachableError
from undercurrent.kafka.bulk import Refused
from undercurrent.kafka.publisher import DeliveryError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import ActivationBlock, PublisherStarted, StreamEnded, StreamStarted
from undercurrent.topics import TopicPlan


class Nowhere:
    """A broker's address."""

    def settings(self):
        return KafkaSettings(bootstrap_servers="nowhere:1")


class Bulk:
    """Takes what `fate` lets through: it is asked before each write, and may play the engine meanwhile."""

    def __init__(self, log, fate):
        self.log, self._fate, self.ended = log, fate, ""

    def write(self, batches, *, waiting):
        assert not self.ended
        refused = self._fate(batches, waiting) or []
        lost = {id(one.record) for one in refused}
        for partition, records in batches.items():
            self.log += [(partition.number, CODEC.decode(one.value)) for one in records if id(one) not in lost]
        return refused

    def close(self):
        self.ended = self.ended or "closed"

    def abandon(self):
        self.ended = "abandoned"


class Line:
    """A scene whose loop runs here, and ends when it has published everything."""

    def __init__(self, fate, renew=None, turns=(), **options):
        points = options.pop("points", None) or spec_points(["p"])
        plan = TopicPlan(prefix="t", points=tuple(point.name for point in points), activation_partitions=2)
        self.scene = Scene(Nowhere(), plan, points, spawn=False, **options)
        self.log, self.reports = [], []
        self.bulk = Bulk(self.log, fate)
        # Each time when it asks whether to end, the next turn is played; it ends after the last one.
        left = list(turns)
        self.loop = PublisherLoop(
            self.scene.settings, self.scene.ring.reader(), self.bulk, self.reports.append,
            lambda _: not left or bool(left.pop(0)()), renew=renew,
        )  # fmt: skip

    def total(self, name):
        return sum((Counter(getattr(report, name)) for report in self.reports), Counter())

    def messages(self, request):
        return [message for _, message in self.log if getattr(message, "request_id", "") == request]


@pytest.fixture
def line():
    made = []

    def make(*args, **options):
        made.append(Line(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.scene.kill()


def on_write(number, act):
    """Return a fate that lets everything through, and acts in one write: the first says that there is a publisher."""
    count = itertools.count(1)
    return lambda batches, waiting: act(batches, waiting) if next(count) == number else None


def test_what_is_captured_while_the_broker_is_away_waits_and_is_not_lost(line):
    steps = 5_000

    def away(_, waiting):
        """The broker answers after the ring has been filled ten times over."""
        for turn in range(100):
            made.scene.run("r1", steps // 100, first=1 + turn * steps // 100)
            waiting(0.02 * turn)
            assert made.scene.ring.stats().used_bytes == 0
        made.scene.close("r1")

    made = line(on_write(2, away), ring_bytes=64 << 10, points=spec_points(["p"], queue_depth=5_000))
    made.scene.open("r1")
    made.scene.run("r1", 1)
    made.loop.run()
    started, *blocks, ended = made.messages("r1")
    assert isinstance(started, StreamStarted)
    assert [positions(block).tolist() for block in blocks] == [[at] for at in range(steps + 1)]
    assert (ended.emitted, ended.dropped) == ((steps + 1,) * 2, (0, 0))


def test_it_says_how_far_behind_it_is(line):
    told, away_s = [], []

    def away(_, waiting):
        made.scene.run("r1", 3, first=1)
        away_s.append(time.monotonic())
        for _ in range(3):
            time.sleep(0.3)
            waiting(0.3)
            told.append(time.monotonic() - made.reports[-1].written_to_s)
        made.scene.close("r1")
        away_s.append(time.monotonic())

    made = line(on_write(2, away))
    made.scene.open("r1")
    made.scene.run("r1", 1)
    made.loop.run()
    began_s, over_s = away_s
    assert 0.3 <= told[0] < told[1] < told[2]
    assert made.reports[-1].written_to_s > over_s
    # What says that it has come past an end says whose it was, at the latest.
    (at,) = [at for at, report in enumerate(made.reports) if report.ended]
    assert all(report.written_to_s < began_s for report in made.reports[:at])


@pytest.mark.parametrize("overflow", ["drop_newest", "drop_oldest"])
def test_no_policy_but_block_lets_a_long_absence_hold_up_the_engine(line, overflow):
    def away(_, waiting):
        for turn in range(40):
            made.scene.run("r1", 25, first=1 + 25 * turn)
            waiting(0.02 * turn)
            assert made.scene.ring.stats().used_bytes < 16 << 10, "the ring is read on"
        made.scene.close("r1")

    points = spec_points(["p"], overflow=overflow, queue_depth=8)
    made = line(on_write(2, away), ring_bytes=64 << 10, points=points)
    made.scene.open("r1")
    made.scene.run("r1", 1)
    made.loop.run()
    *_, ended = made.messages("r1")
    assert (ended.emitted, ended.dropped) == ((9, 9), (992, 992))
    assert made.scene.ring.stats().dropped_rows == 0


def test_a_blocking_point_leaves_the_ring_to_fill(line):
    def away(_, waiting):
        for turn in range(20):
            made.scene.run("r1", 5, first=1 + 5 * turn)
            waiting(0.02 * turn)
        assert made.scene.ring.stats().used_bytes > 10_000
        made.scene.close("r1")

    made = line(on_write(2, away), ring_bytes=64 << 10, points=spec_points(["p"], overflow="block", queue_depth=8))
    made.scene.open("r1")
    made.scene.run("r1", 1)
    made.loop.run()
    _, *blocks, ended = made.messages("r1")
    assert [positions(block)[0] for block in blocks] == list(range(101))
    assert ended.dropped == (0, 0)


def refusal(partition, record):
    return Refused(partition, record, DeliveryError("MSG_SIZE_TOO_LARGE", "Message size too large", fatal=False))


def test_a_refused_batch_is_sent_one_by_one_and_only_what_is_too_large_is_lost(line):
    def strict(batches, _):
        """A broker takes no batch of more than 4,000 bytes."""
        over = [key for key, records in batches.items() if sum(len(one.value) for one in records) > 4_000]
        return [refusal(key, one) for key in over for one in batches[key]]

    made = line(strict)
    made.scene.open("small")
    made.scene.run("small", 9)
    made.scene.open("big", prompt_len=64)
    made.scene.prefill("big", 64)
    for request in ("small", "big"):
        made.scene.close(request)
    made.loop.run()
    assert [message.seq for message in made.messages("small")] == list(range(11))
    assert [message.seq for message in made.messages("big")] == [0, 2]
    assert made.total("refused") == {"p": 1}
    # Whether the end of the other is right is for its worker to say.
    assert [ended for report in made.reports for ended in report.ended] == [("small", 1, 0, "p")]


def test_a_broken_producer_is_replaced_and_what_nobody_saw_goes_out_under_the_new_incarnation(line):
    renewed = []

    def broken(_, waiting):
        made.scene.run("old", 3, first=2)
        made.scene.open("new")
        made.scene.run("new", 4)
        waiting(0.02)
        raise ProducerFatalError("fenced")

    def renew():
        renewed.append(made.bulk.ended)
        if len(renewed) < 3:
            raise UnreachableError("not yet")
        made.scene.run("old", 2, first=5)
        made.scene.run("new", 1, first=4)
        for request in ("old", "new"):
            made.scene.close(request)
        return Bulk(made.log, lambda *_: None), 77

    def one_more():
        made.scene.run("old", 1, first=1)

    # The first cycle is written; the next one breaks, and it is asked twice whether to wait for another producer.
    made = line(on_write(3, broken), renew, [lambda: None, one_more, *[lambda: None] * 3])
    made.scene.open("old")
    made.scene.run("old", 1)
    made.loop.run()
    assert renewed == ["abandoned"] * 3
    assert [m.seq for m in made.messages("old")] == [0, 1]
    assert isinstance(made.messages("old")[0], StreamStarted)
    started = [(number, m.incarnation) for number, m in made.log if isinstance(m, PublisherStarted)]
    assert started == [(0, 3), (1, 3), (0, 77), (1, 77)]
    new = made.messages("new")
    assert {message.incarnation for message in new} == {77}
    assert [message.seq for message in new] == list(range(7))
    assert isinstance(new[-1], StreamEnded)
    assert all(isinstance(block, ActivationBlock) for block in new[1:-1])
    assert made.total("unknown") == {"p": 1}
    assert sum(report.renewed for report in made.reports) == 1
    ended = [end for report in made.reports for end in report.ended]
    assert sorted(ended) == [("new", 1, 0, "p"), ("old", 1, 0, "p")]
    dropped = Counter()
    for report in made.reports:
        dropped.update(report.counts.get("p", {}).get("dropped", {}))
    assert dropped == {"cut_off": 2 * 5}


def test_a_broken_producer_ends_the_loop_where_nobody_makes_another(line):
    def broken(*_):
        raise ProducerFatalError("fenced")

    made = line(on_write(2, broken))
    made.scene.open("r1")
    made.scene.run("r1", 1)
    with pytest.raises(ProducerFatalError, match="fenced"):
        made.loop.run()
