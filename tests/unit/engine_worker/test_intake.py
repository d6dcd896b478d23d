"""Prompts as they come off the topic."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from engine_worker.intake import Offer, content_hash_of, finished_below, read_prompt
from tests.unit import messages
from undercurrent.codec import Codec
from undercurrent.kafka.records import Record
from undercurrent.protocol.frames import HEADER_BYTES
from undercurrent.protocol.messages import PromptRequest, Sampling
from undercurrent.protocol.worker_types import Defect
from undercurrent.topics import partition_of

CODEC = Codec()
OFFER = Offer(model="m", points=("a", "b"), prompt_partitions=3, activation_partitions=5, max_children=4)
REQUEST = PromptRequest(request_id="r", prompt="text", sampling=Sampling(max_tokens=4), created_at_us=1)


def record(value, key=b"r", partition=None):
    number = partition_of(key.decode(errors="replace"), 3) if partition is None and key else partition or 0
    return Record("prompts", number, 7, key, value, 0, ())


def read(request, **fields):
    return read_prompt(CODEC, record(CODEC.encode(replace(request, **fields))), OFFER)


def test_a_good_prompt_carries_what_the_protocol_needs():
    prompt = read(REQUEST, deadline_us=99, sampling=Sampling(n=3))
    assert (prompt.request_id, prompt.offset, prompt.points, prompt.n) == ("r", 7, ("a", "b"), 3)
    assert (prompt.stream_partition, prompt.deadline_us, prompt.defect) == (partition_of("r", 5), 99, None)
    body = CODEC.encode(prompt.request)[HEADER_BYTES:]
    assert prompt.content_hash == hashlib.sha256(body).digest()


def test_points_are_taken_once_each_in_the_order_given_and_may_be_none():
    assert read(REQUEST, points=("b", "a", "b")).points == ("b", "a")
    assert read(REQUEST, points=()).points == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": None}, "exactly one"),
        ({"prompt_token_ids": (1,)}, "exactly one"),
        ({"model": "other"}, "serves 'm'"),
        ({"points": ("c", "a")}, "unknown extraction points: c; known: a, b"),
        ({"sampling": Sampling(n=0)}, "sampling.n is 0"),
        ({"sampling": Sampling(n=5)}, "accepted: 1 to 4"),
        ({"sampling": Sampling(max_tokens=0)}, "sampling.max_tokens"),
        ({"sampling": Sampling(temperature=-0.1)}, "sampling.temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": Sampling(top_p=float("nan"))}, "sampling.top_p"),
        ({"sampling": Sampling(top_k=-2)}, "sampling.top_k"),
        ({"sampling": Sampling(min_p=1.5)}, "sampling.min_p"),
        ({"sampling": Sampling(presence_penalty=3)}, "sampling.presence_penalty"),
        ({"sampling": Sampling(repetition_penalty=float("inf"))}, "sampling.repetition_penalty"),
        ({"sampling": Sampling(repetition_penalty=0)}, "sampling.repetition_penalty"),
    ],
)
def test_what_cannot_run_says_why(fields, reason):
    prompt = read(REQUEST, **fields)
    assert prompt.defect.kind == "bad_request"
    assert reason in prompt.defect.error
    assert (prompt.points, prompt.n) == ((), 1)


@pytest.mark.parametrize("fields", [{"model": "\0" * 300_000}, {"points": ("p" * 900_000,)}])
def test_the_reason_stays_short_whatever_the_prompt_holds(fields):
    """A final too large for its topic would end every worker that comes to the prompt."""
    error = read(REQUEST, **fields).defect.error
    assert 50 < len(error) <= 2000
    assert error.endswith(" ...")


def test_bytes_that_are_no_prompt_keep_their_key_as_the_request():
    started = messages.accepted()
    for value in (b"junk", b"", None, CODEC.encode(REQUEST)[:-1], CODEC.encode(started)):
        prompt = read_prompt(CODEC, record(value), OFFER)
        assert (prompt.request_id, prompt.defect.kind) == ("r", "undecodable")


@pytest.mark.parametrize(
    ("key", "partition", "kind"),
    [
        (None, 0, "bad_key"),
        (b"", 0, "bad_key"),
        (b"\xff", 0, "bad_key"),
        (b"other", None, "bad_key"),
        # Its final would repeat the id twice and fit no topic.
        (b"r" * 1025, None, "bad_key"),
    ],
)
def test_a_record_that_names_no_request_is_only_a_defect(key, partition, kind):
    found = read_prompt(CODEC, record(CODEC.encode(REQUEST), key, partition), OFFER)
    assert isinstance(found, Defect)
    assert found.kind == kind


def test_a_record_in_the_wrong_partition_is_only_a_defect():
    wrong = (partition_of("r", 3) + 1) % 3
    found = read_prompt(CODEC, record(CODEC.encode(REQUEST), partition=wrong), OFFER)
    assert isinstance(found, Defect)
    assert found.kind == "bad_partition"


def test_of_a_repeated_id_the_first_prompt_below_an_offset_is_known():
    values = [CODEC.encode(replace(REQUEST, prompt=text)) for text in ("one", "two", "three")]
    records = [
        Record("prompts", 0, number, key, values[number % 3], 0, ())
        for number, key in enumerate([b"r", None, b"r", b"s", b"t"])
    ]
    found = finished_below(4, iter(records))
    assert {name: done.offset for name, done in found.items()} == {"r": 0, "s": 3}
    assert found["r"].content_hash == content_hash_of(records[0])
