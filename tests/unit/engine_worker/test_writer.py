"""What the worker writes of its runs, and what it takes back."""

from __future__ import annotations

from types import SimpleNamespace

from engine_worker.deltas import DeltaBuffer, Origin
from engine_worker.outbox import Outbox
from engine_worker.writer import Writer
from tests.unit.engine_worker.test_outbox import Client
from undercurrent.codec import Codec
from undercurrent.protocol.messages import Released, ReleaseReason
from undercurrent.protocol.worker_types import RunKey
from undercurrent.topics import TopicPlan

CODEC = Codec()
KEY, OTHER = RunKey("r", 1), RunKey("s", 1)


def released(key, partition):
    return Released(
        request_id=key.request_id,
        attempt=key.attempt,
        engine="e",
        incarnation=9,
        prompt_partition=partition,
        prompt_offset=4,
        reason=ReleaseReason.LOST_PARTITION,
        released_at_us=1,
    )


def test_tokens_that_were_gathered_follow_on_none_that_were_taken_back():
    client, deltas = Client(), DeltaBuffer()
    outbox = Outbox(client, lambda work: work(), lambda _: None)
    observer = SimpleNamespace(generation=lambda _: None)
    writer = Writer("e", TopicPlan(prefix="t", points=("p",)), CODEC, outbox, observer, deltas)
    for key, partition in ((KEY, 0), (OTHER, 1)):
        deltas.open(key, Origin(engine="e", incarnation=9, partition=partition, offset=4))
    for token in range(3):
        # The client has the first ones; the second ones wait before it; the third ones are gathered.
        deltas.add(KEY, 0, (token,), "a")
        deltas.add(OTHER, 0, (token,), "a")
        if token < 2:
            writer.flush()
    writer.purge(0)
    for key, partition in ((KEY, 0), (OTHER, 1)):
        writer.generation(partition, released(key, partition))
    found = {"r": [], "s": []}
    while client.sent:
        for value in client.values():
            message = CODEC.decode(value)
            tokens = () if isinstance(message, Released) else message.token_ids
            found[message.request_id].append(tokens)
        client.acknowledge(len(client.sent))
    assert found == {"r": [(0,), ()], "s": [(0,), (1,), (2,), ()]}
