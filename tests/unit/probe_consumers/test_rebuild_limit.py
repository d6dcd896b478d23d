"""A probe that cannot be written down ends at the same record in a host, in its replay, and in one of some requests."""

from __future__ import annotations

import itertools

import pytest

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.replay import Replay, Span
from probe_consumers.replay_partition import PassedOver
from probe_consumers.runner import BindingRunner
from undercurrent.codec import Codec
from undercurrent.core import Probe, ProbeFactory, ProbeResult
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.host_states import NEVER_BYTES, Keeping
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()


class Plain(Probe):
    """Keeps a count that nobody can take up."""

    def __init__(self):
        self.seen = 0

    def on_activation(self, record):
        self.seen += 1

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, f"saw {self.seen}")


def bounds():
    loaded = LoadedProbe(factory=ProbeFactory(Plain, {}), sample=Plain(), fingerprint="f")
    return [Bound(Binding(name="plain", point="residual", probe="p"), loaded)]


def log():
    long, values = StreamBuilder("long"), []
    values.append((long.key, long.start()))
    for at in range(30):
        values.append((long.key, long.block([at], [0, 0, 0, 0])))
        other = StreamBuilder(f"other-{at}")
        values += [(other.key, value) for value in (other.start(), other.block([0], [0, 0, 0, 0]), other.end())]
    values.append((long.key, long.end()))
    return [Record("t", 0, at, key, value, 1_000, ()) for at, (key, value) in enumerate(values)]


def said(verdicts):
    return [
        (item.kind, item.verdict, item.end_reason, item.complete, item.scored)
        for item in verdicts
        if item.request_id == "long" and item.kind is not VerdictKind.WATERMARK
    ]


def live(records, limit, step):
    host = ProbeHost(
        "residual",
        set_fingerprint(bounds()),
        BindingRunner(bounds(), "live", lambda: 0),
        10**18,
        keeping=Keeping(NEVER_BYTES, limit),
    )
    host.assign([0])
    host.begin(0, Resume(offset=0, emitted_up_to=0))
    found = []
    for at in range(0, len(records), step):
        host.records([incoming(CODEC, record) for record in records[at : at + step]], 0)
        found += host.transaction().verdicts
    return said(found)


@pytest.mark.parametrize("limit", [500, 3000, 9000, 10**6])
def test_the_limit_is_the_logs(limit):
    records = log()
    expected = live(records, limit, 1)
    assert [item[2] for item in expected] == ["finished" if limit == 10**6 else "rebuild_limit"]
    assert live(records, limit, 7) == expected
    for wanted in (None, {b"long"}, {b"long", b"other-3"}):
        replay = Replay("residual", bounds(), {0: Span(0, len(records))}, lambda: 0, max_replay_bytes=limit)
        passed_over, found = PassedOver(), []
        for at, stop in itertools.pairwise([*range(0, len(records), 11), len(records)]):
            part = records[at:stop]
            kept = [incoming(CODEC, record) for record in part if wanted is None or record.key in wanted]
            replay.take(passed_over.counted(part, kept))
            found += replay.outputs()
        assert said(found) == expected, wanted
