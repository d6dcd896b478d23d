"""Probes of a binding on joined streams: what they see, and what is said where a point's stream never came."""

from __future__ import annotations

import numpy as np

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.runner import BindingRunner
from undercurrent.codec.tensors import row_bytes, rows_of
from undercurrent.core import Probe, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.host_events import Incoming, SendAbort
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import RowFormat
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import PublisherStarted, VerdictKind
from undercurrent.testing.streams import StreamBuilder

POINTS = ("residual", "attn")
LANES = Lanes(POINTS, 1)


class Difference(Probe):
    """Aborts where the two points' values differ by more than ten."""

    facts = None
    asked = 0

    def on_start(self, context):
        type(self).facts = context.stream

    def on_activation(self, record):
        first, second = (record.tensor[part.start : part.stop] for part in type(self).facts.parts)
        apart = float(np.abs(first.reshape(2, 2) - second).max())
        return ProbeSignal("abort" if apart > 10 else "continue", score=apart)

    def on_end(self, context):
        type(self).asked += 1
        return ProbeResult(context.request_id, "residual+attn", "judged")


class Two:
    """Two logs under one host that may die."""

    def __init__(self, emitted_up_to=(0, 0)):
        Difference.asked = 0
        factory = ProbeFactory(Difference)
        loaded = LoadedProbe(factory=factory, sample=factory.spawn("", ""), fingerprint="f")
        binding = Binding(name="both", point="residual+attn", points=POINTS, probe="m:C", mode="abort")
        bounds = [Bound(binding, loaded)]
        runner = JoinRunner(BindingRunner(bounds, "g", lambda: 5), LANES, POINTS, RowFormat(row_bytes, rows_of))
        self.host = JoiningHost(POINTS, set_fingerprint(bounds), runner, LANES, 10**12)
        self.host.assign([0, 1])
        for lane in (0, 1):
            self.host.begin(lane, Resume(offset=0, emitted_up_to=emitted_up_to[lane]))
        self.places = [0, 0]

    def read(self, lane, *messages):
        """Read messages of a lane as one batch; return the verdicts that may be written, and the aborts."""
        first = self.places[lane]
        self.places[lane] += len(messages)
        batch = [Incoming(lane, first + at, 1000 * (first + at), message) for at, message in enumerate(messages)]
        actions = self.host.records(batch, 0)
        return self.host.transaction().verdicts, [item.command for item in actions if isinstance(item, SendAbort)]


def logs(far=2):
    """A request's messages at both points; from position `far` on the second one's rows are far away."""
    first = StreamBuilder("r", point="residual", layers=(3, 7), width=2, dtype="bfloat16")
    second = StreamBuilder("r", point="attn", layers=(5,), width=2)
    pairs = [(np.full((2, 2), at), np.full(2, at + (20 if at >= far else 1))) for at in range(4)]
    return (
        [first.started(), *(first.activations([at], rows) for at, (rows, _) in enumerate(pairs)), first.ended()],
        [second.started(), *(second.activations([at], rows) for at, (_, rows) in enumerate(pairs)), second.ended()],
    )


def test_a_probe_sees_the_values_of_all_points_and_which_are_whose():
    world = Two()
    first, second = logs()
    assert world.read(1, *second) == ((), [])
    verdicts, aborts = world.read(0, *first)
    facts = Difference.facts
    assert (facts.layers, facts.width, facts.dtype) == ((3,), 6, "float32")
    assert [(part.point, part.layers, part.width, part.start, part.stop) for part in facts.parts] == [
        ("residual", (3, 7), 2, 0, 4),
        ("attn", (5,), 2, 4, 6),
    ]
    assert [(item.point, item.token_pos, item.score) for item in aborts] == [("residual+attn", 2, 20.0)]
    signal, scores, result = verdicts
    assert (signal.kind, signal.source_partition, signal.source_offset) == (VerdictKind.SIGNAL, 0, 3)
    assert np.frombuffer(scores.scores, "<f4").tolist() == [1, 1, 20, 20]
    assert (result.verdict, result.complete, result.clear_up_to, result.source_offset) == ("judged", True, 3, 5)


def test_what_was_written_is_not_said_again_and_the_rest_is_the_same_whatever_came_first():
    first, second = logs()
    once = Two()
    whole = [*once.read(0, *first)[0], *once.read(1, *second)[0]]
    again = Two(emitted_up_to=(3, 6))
    assert again.read(1, *second) == ((), [])
    early, none = again.read(0, *first[:3])
    late, aborts = again.read(0, *first[3:])
    assert ((early, none), len(aborts)) == (((), []), 1)
    assert [item for item in late if item.kind is not VerdictKind.WATERMARK] == [
        item for item in whole if item.kind is not VerdictKind.WATERMARK
    ]
    rows = next(item for item in late if item.kind is VerdictKind.WATERMARK)
    assert np.frombuffer(rows.score_positions, "<i4").tolist() == [2, 3]


def test_where_one_point_never_came_the_probe_is_not_asked_and_the_result_says_so():
    world = Two()
    first, _ = logs()
    started = PublisherStarted(engine="engine", incarnation=9, started_at_us=0)
    world.read(0, *first[:3], started)
    (result,), _ = world.read(1, started)
    assert (result.kind, result.end_reason, result.complete) == (VerdictKind.RESULT, "lost", False)
    assert (result.scored, result.verdict, Difference.asked) == (0, "", 0)
