"""Records of twenty kinds that nobody can work on: each becomes a dead letter, once, as it came."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from tests.faults.nonsense import Planted
from tests.faults.ring_prompts import POINT
from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.codec import Codec
from undercurrent.errors import DecodeError
from undercurrent.failpoints import VARIABLE
from undercurrent.kafka.publisher import Publisher
from undercurrent.protocol.audit_findings import FindingKind
from undercurrent.protocol.messages import GenerationEvent, Label, LabelValue, Outcome, PromptRequest, Sampling
from undercurrent.testing.bare_publisher import bare_publisher
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.streams import StreamBuilder
from undercurrent.topics import partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

EACH = 500
CODEC = Codec()


class Poison(NamedTuple):
    """One record that nobody can work on, and its partition where the key does not say it."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None


def prompt(name: str, **changes: object) -> bytes:
    request = PromptRequest(request_id=name, prompt="poison", sampling=Sampling(max_tokens=4), created_at_us=0)
    return CODEC.encode(replace(request, **changes))


def of_prompts(number: int, rng: random.Random) -> Iterator[Poison]:
    """Yield one record of each of ten kinds."""
    name = f"poison-{number}"
    key, good = name.encode(), prompt(name)
    yield Poison(None, good, 0)
    yield Poison(b"\xff\xfe" + key, good, 0)
    yield Poison(key + b"-far" + b"x" * 1100, good, 0)
    yield Poison(f"{name}-astray".encode(), prompt(f"{name}-astray"), 1 - partition_of(f"{name}-astray", 2))
    yield Poison(f"{name}-other".encode(), good)
    yield Poison(f"{name}-empty".encode(), b"")
    yield Poison(f"{name}-tombstone".encode(), None)
    yield Poison(f"{name}-noise".encode(), rng.randbytes(rng.randint(1, 200)))
    yield Poison(f"{name}-cut".encode(), prompt(f"{name}-cut")[:-3])
    yield Poison(f"{name}-none".encode(), prompt(f"{name}-none", sampling=Sampling(n=0)))


def of_streams(number: int, rng: random.Random) -> Iterator[Poison]:
    """Yield one record of each of ten kinds."""
    name = f"poison-{number}"
    stream = StreamBuilder(name, layers=(0, 2), width=4)
    stream.skip()
    rows = np.zeros((1, 2, 4), np.float32)
    block = stream.activations([0], rows)
    good = CODEC.encode(block)
    yield Poison(stream.key, good)  # no stream of its name is open
    yield Poison(stream.key, good[:-1])
    yield Poison(stream.key, good + b"\0")
    yield Poison(stream.key, b"")
    yield Poison(stream.key, None)
    yield Poison(stream.key, rng.randbytes(rng.randint(1, 200)))
    yield Poison(stream.key, b"\xc3\x01" + rng.randbytes(8) + good[10:])
    yield Poison(stream.key, CODEC.encode(replace(block, data=block.data[:-4])))
    yield Poison(stream.key, CODEC.encode(replace(block, layers=(2, 2))))
    yield Poison(stream.key, prompt(name))  # readable, and no message of a stream


def test_ten_thousand_records_of_twenty_kinds_are_dead_letters_and_good_ones_go_on(patient_broker, tmp_path):
    rng = random.Random(4)
    with RingWorld(patient_broker.settings(**QUICK), tmp_path, seed=41, tokens=(20, 60)) as world:
        worker = world.start_worker()
        world.start_host()
        worker.wait_ready()
        plan = world.bench.plan
        with Poisoner(world) as poisoner:
            for number in range(EACH):
                for poison in of_prompts(number, rng):
                    poisoner.write(plan.prompts, poison)
                for poison in of_streams(number, rng):
                    poisoner.write(plan.activations(POINT), poison)
                if number % 50 == 0:
                    world.send(2)
        assert len(world.poison) == 20 * EACH
        world.settle()
        world.bench.wait(lambda: len(world.letters()) >= 20 * EACH, "dead letters", 120)
        world.stop()
        figures = world.check()
        assert figures["dead_letters"] == 20 * EACH
        assert figures["completed"] + figures["aborted"] == len(world.asked)


def test_nonsense_on_any_other_topic_is_a_dead_letter_once_though_its_finder_dies(patient_broker, tmp_path):
    with EngineBench(patient_broker.settings(**QUICK), tmp_path) as bench:
        planted, plan = Planted(bench, seed=5), bench.plan
        # What is in order is nobody's letter, nor what takes a label back.
        label = Label(request_id="r", name="n", value=LabelValue.POSITIVE, source="s", created_at_us=0)
        bench.write(plan.labels, 0, b"r", CODEC.encode(label))
        bench.write(plan.labels, 0, b"r", None)
        planted.plant()
        armed = bench.start_worker(bench.configure("engine-1"), {VARIABLE: "letters_sent"})
        assert armed.wait(120.0) == -9
        worker = bench.start_worker(bench.configure("engine-0"))
        planted.wait()
        planted.plant()
        planted.wait()
        serves(bench)
        for topic in plan.swept:
            name = topic.removeprefix(f"{plan.prefix}.")
            assert f'engine_unreadable_records_total{{topic="{name}"}} 40.0' in worker.get("/metrics")[1]
        assert [finding for finding in bench.audit() if finding.kind is FindingKind.NOT_DEAD_LETTERED] == []
        assert worker.terminate() == 0, worker.tail()


def test_bare_servers_write_these_letters_too_once_between_them_and_once_beside_an_engine_worker(
    patient_broker, tmp_path
):
    with EngineBench(patient_broker.settings(**QUICK), tmp_path) as bench, ExitStack() as stack:
        planted, plan = Planted(bench, seed=6), bench.plan
        planted.plant()
        config = bench.configure_server()
        for name in ("engine-8", "engine-9"):
            stack.enter_context(bare_publisher(config, f"{name}.dp0", tmp_path / f"{name}.log"))
        planted.wait(plan.swept_by_servers)
        # The text of engine workers is not theirs to read.
        assert set(plan.swept) - set(plan.swept_by_servers) == {plan.generations}
        worker = bench.start_worker(bench.configure("engine-0"))
        planted.wait()
        # Whichever of the three has a partition now.
        planted.plant()
        planted.wait()
        assert worker.terminate() == 0, worker.tail()


def serves(bench):
    """Send a prompt, and wait for its final among what can be read."""
    (request_id,) = bench.send(["a prompt"], max_tokens=8)

    def final():
        for record in bench.read(bench.plan.generations):
            with suppress(DecodeError):
                message = CODEC.decode(record.value)
                if isinstance(message, GenerationEvent) and message.request_id == request_id and message.outcome:
                    return message.outcome
        return None

    assert bench.wait(final, "a final", 120.0) is Outcome.COMPLETED


class Poisoner:
    """Writes poison, and notes where it lies."""

    def __init__(self, world: RingWorld) -> None:
        self._world = world
        self._publisher = Publisher(world.bench.settings)

    def __enter__(self) -> Poisoner:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._publisher.flush(60.0) == 0
        self._publisher.close()

    def write(self, topic: str, poison: Poison) -> None:
        partition = poison.partition
        if partition is None:
            partition = partition_of((poison.key or b"").decode(), 2)

        def lies(delivery) -> None:
            assert delivery.error is None
            self._world.poison[topic, partition, delivery.offset] = poison.value

        refused = self._publisher.produce(topic, poison.value, key=poison.key, partition=partition, on_delivery=lies)
        assert refused is None
        self._publisher.poll(0)
