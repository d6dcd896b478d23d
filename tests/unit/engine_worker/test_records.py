"""Dead letters and lost ends."""

from __future__ import annotations

import hashlib

from engine_worker.records import letter_of, lost_ends
from undercurrent.codec import Codec
from undercurrent.kafka.records import Record
from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.messages import EndReason
from undercurrent.protocol.worker_types import DeadLetter, EndStreams, RunKey, StreamKey
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(points=("p",))


def letter(value, error="why"):
    source = Record(PLAN.prompts, 2, 7, b"key", value, 11, (("trace", b"t"), ("undercurrent.cause", b"old")))
    return letter_of(PLAN, DeadLetter(2, 7, source, "bad_request", error), "engine-0", 13)


def test_a_dead_letter_is_the_original_bytes_with_the_cause_in_its_headers():
    found = letter(b"original")
    assert (found.key, found.value) == (b"key", b"original")
    assert found.headers[0] == ("trace", b"t")
    assert dict(found.headers) == {
        "trace": b"t",
        "undercurrent.cause": b"bad_request",
        "undercurrent.detail": b"why",
        "undercurrent.service": b"engine-0",
        "undercurrent.topic": PLAN.prompts.encode(),
        "undercurrent.partition": b"2",
        "undercurrent.offset": b"7",
        "undercurrent.at_ms": b"13",
        "undercurrent.timestamp_ms": b"11",
    }


def test_what_does_not_fit_is_cut_with_its_length_and_hash():
    value = b"x" * (PLAN.letter_bytes(PLAN.prompts) + 1)
    found = letter(value, "y" * 10_000)
    headers = dict(found.headers)
    assert headers["undercurrent.length"] == str(len(value)).encode()
    assert headers["undercurrent.sha256"] == hashlib.sha256(value).hexdigest().encode()
    size = len(found.key) + len(found.value) + sum(len(name) + len(text) for name, text in found.headers)
    assert size < PLAN.letter_bytes(PLAN.prompts)


def test_a_lost_end_names_the_attempt_that_opened_the_stream():
    holder = RequestState(
        request_id="r", attempt=3, incarnation=5, engine="dead", epoch=1, points=("p", "gone"), stream_partition=2,
        n=1, prompt_partition=0, prompt_offset=0, content_hash=b"", first_offset=0,
    )  # fmt: skip
    streams = (StreamKey(0, "p"), StreamKey(0, "gone"))
    ((topic, partition, message),) = lost_ends(PLAN, EndStreams(RunKey("r", 4), holder, streams, "gone"), 9)
    assert (topic, partition) == (PLAN.activations("p"), 2)
    assert (message.attempt, message.engine, message.incarnation) == (3, "dead", 5)
    assert (message.reason, message.detail) == (EndReason.LOST, "gone")
    assert Codec().decode(Codec().encode(message)) == message
