"""Retention that has taken what nobody had worked on yet: what is left goes on, what is gone is declared."""

from __future__ import annotations

import pytest

from tests.faults.ring_prompts import JUDGES, POINT
from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.evaluation.diff import collect
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.protocol.messages import Outcome, ProbeVerdict, StreamEnded, StreamStarted
from undercurrent.topics import partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]


def header(letter, name):
    return next((value.decode() for key, value in letter.headers if key == f"undercurrent.{name}"), None)


def gaps(letters):
    """Return the declared gaps: first offset and the one after the last, by partition."""
    found = {}
    for letter in letters:
        if header(letter, "to_offset") is not None:
            found.setdefault(int(header(letter, "partition")), []).append(
                range(int(header(letter, "offset")), int(header(letter, "to_offset")))
            )
    return found


def test_streams_that_are_gone_before_a_host_saw_them_are_a_declared_gap(patient_broker, tmp_path):
    with RingWorld(patient_broker.settings(**QUICK), tmp_path, seed=61) as world:
        topic = world.bench.plan.activations(POINT)
        world.start_worker().wait_ready()
        host = world.start_host()
        seen = world.send(4)
        world.settle()
        assert host.terminate() == 0
        unseen = world.send(6)
        world.bench.wait_finals(world.asked)
        ends = {m.request_id: r for r, m in world.bench.messages(topic) if isinstance(m, StreamEnded)}
        starts = {m.request_id: r for r, m in world.bench.messages(topic) if isinstance(m, StreamStarted)}
        # Up to the middle of the third stream of each partition, or of what it has.
        cut = {}
        for number in range(2):
            here = sorted(starts[a.request_id].offset for a in unseen if starts[a.request_id].partition == number)
            cut[topic, number] = here[len(here) // 2] + 10
        TopicAdmin(world.bench.settings).delete_records(cut)
        world.start_host()
        late = world.send(4)
        world.bench.wait_finals(world.asked)

        def told():
            return {(key.request_id, key.probe) for key in collect(world.bench.said(ProbeVerdict))}

        world.bench.wait(
            lambda: {(a.request_id, j) for a in late for j in JUDGES} <= told(), "verdicts on what is left"
        )
        world.stop()
        declared = gaps(world.letters())
        verdicts = collect(world.bench.said(ProbeVerdict))
        for asked in [*seen, *unseen, *late]:
            first, last = starts.get(asked.request_id), ends.get(asked.request_id)
            words = {k.probe: t.last_words for k, t in verdicts.items() if k.request_id == asked.request_id}
            whole = all(len(words.get(j, ())) == 1 and words[j][0].complete for j in JUDGES)
            cut_off = first is not None and any(
                at in gap for gap in declared.get(first.partition, ()) for at in range(first.offset, last.offset + 1)
            )
            assert whole != cut_off, (asked.request_id, words, declared)
        assert {number: max(gap.stop for gap in found) for number, found in declared.items()} == {
            number: offset for (_, number), offset in cut.items()
        }


def test_prompts_that_are_gone_before_a_worker_ran_them_are_declared(patient_broker, tmp_path):
    with RingWorld(patient_broker.settings(**QUICK), tmp_path, seed=62) as world:
        topic = world.bench.plan.prompts
        worker = world.start_worker()
        worker.wait_ready()
        world.send(4)
        world.bench.wait_finals(world.asked)
        assert worker.terminate() == 0
        waiting = world.send(12)
        places = {r.key.decode(): r for r in world.bench.read(topic)}
        cut = {}
        for number in range(2):
            here = sorted(places[a.request_id].offset for a in waiting if partition_of(a.request_id, 2) == number)
            cut[topic, number] = here[len(here) // 2]
        TopicAdmin(world.bench.settings).delete_records(cut)
        worker = world.start_worker()
        gone = {
            a.request_id for a in waiting if places[a.request_id].offset < cut[topic, places[a.request_id].partition]
        }
        late = world.send(4)
        finals = world.bench.wait_finals(world.asked.keys() - gone)
        assert worker.terminate() == 0, worker.tail()
        assert finals.keys() == world.asked.keys() - gone
        assert {final.outcome for found in finals.values() for final in found} == {Outcome.COMPLETED}
        assert late
        assert gone
        declared = gaps(world.bench.dead_letters())
        for request_id in gone:
            place = places[request_id]
            assert any(place.offset in gap for gap in declared.get(place.partition, ())), (request_id, declared)
