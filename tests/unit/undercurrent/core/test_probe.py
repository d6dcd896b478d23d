"""Probe classes: fresh instances, no shared state, and what is refused where a class is defined."""

from __future__ import annotations

import array
import collections
import dataclasses
import threading
import types

import numpy as np
import pytest

from undercurrent.core import Probe, ProbeAction, ProbeFactory, ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import ProbeError
from undercurrent.spec import ActivationRecord, ProbeKind, TensorType


class Counting(Probe):
    probe_kind = ProbeKind.TRAJECTORY

    def __init__(self, limit=3, seen=None):
        self.limit = limit
        self.seen = [] if seen is None else seen

    def on_activation(self, record):
        self.seen.append(record.token_pos)
        return ProbeSignal("abort") if len(self.seen) >= self.limit else None

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, len(self.seen))


def record(token_pos=0):
    return ActivationRecord("r1", "mid", 0, token_pos, TensorType.RESIDUAL_STREAM, np.zeros(2, np.float32), False)


def test_spawned_instances_share_nothing_and_know_their_request():
    factory = ProbeFactory(Counting, {"limit": 2, "seen": []})
    first, second = factory.spawn("r1", "mid"), factory.spawn("r2", "late", limit=9)
    first.on_start(RequestContext("r1"))
    assert first.on_activation(record(0)) is None
    assert first.on_activation(record(1)).action is ProbeAction.ABORT
    assert (first.request_id, first.extraction_point_name) == ("r1", "mid")
    assert first.on_end(RequestContext("r1")) == ProbeResult("r1", "mid", 2)
    assert (second.seen, second.limit, second.request_id) == ([], 9, "r2")
    assert factory.spawn("r3", "mid").seen == []


def test_an_unspawned_instance_has_no_request():
    with pytest.raises(RuntimeError, match=r"spawn\(\)"):
        _ = Counting().request_id
    with pytest.raises(RuntimeError, match=r"spawn\(\)"):
        _ = Counting().extraction_point_name


class Settable:
    """Has a hash, as a torch tensor has, and yet its items can be set."""

    def __setitem__(self, key, value):
        raise NotImplementedError


@pytest.mark.parametrize(
    "value",
    [[], {}, set(), bytearray(), collections.deque(), np.zeros(2), [1, 2], collections.Counter(), array.array("i"),
     collections.defaultdict(list), ([],), (1, ({},)), Settable()],
)  # fmt: skip
def test_a_mutable_class_attribute_is_refused_where_the_class_is_defined(value):
    with pytest.raises(TypeError, match=r"seen is a mutable class attribute"):
        type("Bad", (Counting,), {"seen": value})


def test_a_mutable_class_attribute_is_refused_further_down_too():
    middle = type("Middle", (Counting,), {})
    with pytest.raises(TypeError, match=r"Bad\.cache is a mutable class attribute \(dict\)"):
        type("Bad", (middle,), {"cache": {}})


def test_immutable_class_attributes_are_fine():
    members = {"words": ("a", ("b",)), "names": frozenset("ab"), "limit": 3, "__slots__": [], "kind": ProbeKind,
               "view": types.MappingProxyType({"a": 1}), "lock": threading.Lock(), "helper": staticmethod(len),
               "size": property(len), "inner": list}  # fmt: skip
    made = type("Good", (Counting,), members)
    assert made().words == ("a", ("b",))


def test_a_dataclass_may_be_a_probe():
    @dataclasses.dataclass
    class Recording(Probe):
        limit: int = 2
        seen: list = dataclasses.field(default_factory=list)

        def on_activation(self, record):
            self.seen.append(record.token_pos)

        def on_end(self, ctx):
            return ProbeResult(self.request_id, self.extraction_point_name, self.seen)

    first, second = Recording.spawn("r1", "mid", limit=3), Recording.spawn("r2", "mid")
    first.on_activation(record(4))
    assert (first.limit, first.seen, second.seen) == (3, [4], [])


def test_settings_are_copied_for_each_instance_but_arrays_are_shared():
    weights = np.zeros(2)
    factory = ProbeFactory(Counting, {"limit": ({"deep": []},), "seen": weights})
    first, second = factory.spawn("r1", "mid"), factory.spawn("r2", "mid")
    first.limit[0]["deep"].append(1)
    assert second.limit == ({"deep": []},)
    assert first.seen is second.seen is weights


def test_what_the_factory_was_given_may_change_afterwards():
    settings = {"limit": 2}
    factory = ProbeFactory(Counting, settings)
    settings["limit"] = 9
    assert factory.spawn("r", "mid").limit == 2


def test_a_probe_must_judge_and_conclude():
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Probe,), {"on_activation": lambda self, record: None})()


@pytest.mark.parametrize("cls", [int, "Counting", None, Counting()])
def test_a_factory_takes_only_probe_classes(cls):
    with pytest.raises(ProbeError, match="no subclass of Probe"):
        ProbeFactory(cls)


def test_signals_compare_by_what_they_say_not_by_when():
    assert ProbeSignal() == ProbeSignal("continue", timestamp=0.0)
    assert not ProbeSignal().acts
    assert ProbeSignal("flag").acts
    assert ProbeSignal("flag") != ProbeSignal("abort")
    with pytest.raises(ProbeError, match="accepted: continue, flag, abort"):
        ProbeSignal("stop")
