"""The publisher process: a real ring, a real broker, real bytes."""

import signal

import numpy as np
import psutil
import pytest

from tests.integration.engine_worker.publisher_scene import read_all, scene
from undercurrent.codec import as_array, positions, token_ids
from undercurrent.protocol.messages import ActivationBlock, PublisherStarted, StreamEnded, StreamStarted
from undercurrent.testing.waiting import wait_until

pytestmark = pytest.mark.kafka


def test_rows_arrive_bit_for_bit_and_their_end_is_reported_after_they_are_on_the_log(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.open("r1", partition=1)
        rows = s.run("r1", 40)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        log = read_all(broker, s.topic)
        assert s.end() == 0
    assert sorted(p for p, m in log if isinstance(m, PublisherStarted)) == [0, 1]
    stream = [m for p, m in log if p == 1 and not isinstance(m, PublisherStarted)]
    assert isinstance(stream[0], StreamStarted)
    assert isinstance(stream[-1], StreamEnded)
    assert [m.seq for m in stream] == list(range(42))
    blocks = [m for m in stream if isinstance(m, ActivationBlock)]
    assert np.concatenate([positions(b) for b in blocks]).tolist() == list(range(40))
    assert b"".join(as_array(b).tobytes() for b in blocks) == rows.tobytes()


def test_a_prefill_larger_than_a_record_may_be_arrives_in_parts(broker, topic_prefix):
    with scene(broker, topic_prefix, ring_bytes=16 << 20, width=4096) as s:
        s.until("ready")
        s.open("r1", prompt_len=64)
        rows = s.prefill("r1", 64)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        log = [m for _, m in read_all(broker, s.topic) if not isinstance(m, PublisherStarted)]
        assert s.end() == 0
    assert rows.nbytes == 2 << 20
    started, *blocks, ended = log
    assert (type(started), type(ended)) == (StreamStarted, StreamEnded)
    assert [m.seq for m in log] == list(range(len(blocks) + 2))
    assert {b.step for b in blocks} == {1}
    # Two of them would hold it if their other fields took no room.
    assert [len(positions(b)) for b in blocks] == [31, 31, 2]
    assert np.concatenate([positions(b) for b in blocks]).tolist() == list(range(64))
    assert np.concatenate([token_ids(b) for b in blocks]).tolist() == list(range(64))
    assert b"".join(as_array(b).tobytes() for b in blocks) == rows.tobytes()
    assert (ended.emitted, ended.dropped, ended.last_pos) == ((64, 64), (0, 0), 63)


def test_what_is_in_the_ring_is_published_before_it_ends(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 500)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.end() == 0
    assert sum(isinstance(m, ActivationBlock) for _, m in read_all(broker, s.topic)) == 500


def test_signals_to_the_whole_group_do_not_end_it_before_its_parent_says_so(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.process.send_signal(signal.SIGTERM)
        s.process.send_signal(signal.SIGINT)
        s.open("r1")
        s.run("r1", 5)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        assert s.end() == 0


def test_a_parent_that_is_gone_takes_it_along(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.reports.close()
        s.open("r1")
        s.run("r1", 3)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.process.wait(30) != 0


def test_a_full_ring_is_a_declared_gap_and_the_engine_goes_on(broker, topic_prefix):
    with scene(broker, topic_prefix, ring_bytes=64 << 10) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 4)
        publisher = psutil.Process(s.process.pid)
        publisher.suspend()
        try:
            s.run("r1", 3000, first=4)
        finally:
            publisher.resume()
        s.tracker.close("r1")
        # What finds no room waits with the writer, which tries again in each of its steps.
        wait_until(lambda: s.tracker.idle(s.steps) or s.ring.stats().pending_controls == 0, 60, "room in the ring")
        s.until("ended")
        assert s.end() == 0
        log = [m for _, m in read_all(broker, s.topic)]
    ended = next(m for m in log if isinstance(m, StreamEnded))
    blocks = [m for m in log if isinstance(m, ActivationBlock)]
    assert ended.emitted == (len(blocks),) * 2
    assert ended.dropped == (3004 - len(blocks),) * 2
    assert ended.dropped[0] > 0
    assert ended.seq - 1 - len(blocks) == ended.dropped[0]
