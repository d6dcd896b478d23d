"""How far a live host has come, as its commits tell it, and when what it said up to there can be read."""

from __future__ import annotations

from probe_consumers.inputs import Inputs
from probe_consumers.replay import Span
from probe_consumers.replay_live import LivePositions
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.records import Partition
from undercurrent.protocol.host_position import HostMetadata

TOPIC, VERDICTS = "activations", "verdicts"


class Answers:
    """Says what is committed, more with each question, and lets transactions end."""

    def __init__(self, committed, decided=(5,)) -> None:
        self._committed, self._decided = list(committed), list(decided)

    def committed(self, group, partitions):
        assert group == "hosts"
        told = self._committed.pop(0) if len(self._committed) > 1 else self._committed[0]
        return {where: told[where.number] for where in partitions if where.number in told}

    def partitions(self, topic):
        return [Partition(topic, 0)]

    def end(self, partitions, *, isolation=Isolation.READ_UNCOMMITTED):
        is_decided = isolation is Isolation.READ_COMMITTED
        return dict.fromkeys(partitions, self._decided.pop(0) if is_decided else 5)


def positions(answers):
    return LivePositions(answers, Inputs(("p",), (TOPIC,), (TOPIC,)), VERDICTS)


def text(emitted):
    return HostMetadata(emitted_up_to=emitted).to_text()


def test_outputs_go_up_to_what_the_metadata_says_or_to_an_operators_offset():
    answers = Answers([{0: (3, text(9)), 1: (4, None), 2: (7, "not ours")}])
    assert positions(answers).judged_up_to("hosts", [0, 1, 2, 3]) == {0: 9, 1: 4, 2: 7}


def test_a_host_is_waited_for_until_it_has_come_to_the_end_of_every_part():
    spans = {0: Span(0, 9), 1: Span(5, 5)}
    answers = Answers([{}, {0: (2, text(4))}, {0: (2, text(9))}])
    assert positions(answers).wait("hosts", spans, 60.0) == {0: 9}


def test_a_host_that_does_not_come_is_waited_for_no_longer_than_asked():
    assert positions(Answers([{0: (2, text(4))}])).wait("hosts", {0: Span(0, 9)}, 0.0) == {0: 4}


def test_verdicts_are_read_when_no_transaction_holds_any_back():
    answers = Answers([{}], decided=[3, 4, 5])
    positions(answers).settle()
    assert not answers._decided
