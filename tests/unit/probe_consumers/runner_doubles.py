"""Bindings on one partition under one host, and what they are fed with."""

from __future__ import annotations

import struct

import numpy as np

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.runner import BindingRunner
from undercurrent.codec import Codec
from undercurrent.core import ProbeFactory
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import SendAbort
from undercurrent.protocol.host_position import Resume

POINT = "residual"
NOW_US = 1_700_000_000_000_000
CODEC = Codec()


def linear(weight=(1.0, 0.0, 0.0, 0.0), layer=0, threshold=1.0, mode="abort", name="guard", **fields):
    probe = LinearProbe.from_arrays(
        weight, 0.0, layer=layer, tensor_type="residual_stream", threshold=threshold, **fields
    )
    loaded = LoadedProbe(
        factory=LinearProbe.factory(artefact=probe.artefact), sample=probe, version="1", fingerprint=probe.fingerprint
    )
    return Bound(Binding(name=name, point=POINT, probe="p", mode=mode), loaded)


def python(cls, name="code", mode="abort"):
    factory = ProbeFactory(cls)
    loaded = LoadedProbe(factory=factory, sample=factory.spawn("", ""), fingerprint=cls.__name__)
    return Bound(Binding(name=name, point=POINT, probe="m:C", mode=mode), loaded)


class Log:
    """One partition under one host."""

    def __init__(self, *bounds, emitted_up_to=0):
        self.runner = BindingRunner(bounds, "service", lambda: NOW_US)
        self.host = ProbeHost(POINT, set_fingerprint(bounds), self.runner, abort_max_age_us=60_000_000)
        self.host.assign([0])
        self.host.begin(0, Resume(offset=0, emitted_up_to=emitted_up_to))
        self.offset = 0

    def append(self, *values, age_s=0):
        """Read some records as one batch; return the aborts."""
        batch = []
        for value in values:
            record = Record("t", 0, self.offset, b"k", value, NOW_US // 1000 - age_s * 1000, ())
            batch.append(incoming(CODEC, record))
            self.offset += 1
        actions = self.host.records(batch, NOW_US)
        return [action.command for action in actions if isinstance(action, SendAbort)]

    def verdicts(self, *kinds):
        found = self.host.transaction().verdicts
        return [verdict for verdict in found if not kinds or verdict.kind in kinds]


def rows(*firsts, layers=1, width=4):
    values = np.zeros((len(firsts), layers, width), np.float32)
    values[:, :, 0] = np.asarray(firsts, np.float32)[:, None]
    return values


def scores_of(verdicts):
    found = []
    for item in verdicts:
        positions = struct.unpack(f"<{len(item.score_positions) // 4}i", item.score_positions)
        values = np.frombuffer(item.scores, "<f4").reshape(len(positions), -1) if positions else []
        found += [(position, *map(float, row)) for position, row in zip(positions, values, strict=True)]
    return found
