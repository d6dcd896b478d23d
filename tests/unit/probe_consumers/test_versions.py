"""Versions of probes on streams: which runs where, what is refused, and that a swap leaves open streams alone."""

from __future__ import annotations

import numpy as np
import pytest

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.runner import BindingRunner
from probe_consumers.versions import Versions
from undercurrent.codec import Codec
from undercurrent.evaluation.diff import collect
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LinearProbe, load_binding
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import SendAbort
from undercurrent.protocol.host_position import HostMetadata, Resume
from undercurrent.protocol.messages import BindingMode, Rollout, RolloutChange, RolloutVersion, VerdictKind
from undercurrent.protocol.rollouts import Rollouts
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()


def save(folder, name, threshold, **fields):
    made = LinearProbe.from_arrays(
        [1.0, 0, 0, 0], 0.0, layer=0, tensor_type="residual_stream", threshold=threshold, name=name, **fields
    )
    made.save(folder / name)
    return made


def version(made, mode="abort", share=1.0):
    config = made.artefact.config
    return RolloutVersion(
        artefact=config.name,
        version=config.version,
        fingerprint=made.fingerprint,
        mode=BindingMode(mode),
        share=share,
    )


class World:
    """One partition under one host, and what was rolled out."""

    def __init__(self, folder):
        self.folder = folder
        self.made = {
            "own": save(folder, "own", 9.0),
            "v1": save(folder, "v1", 3.0, version="1"),
            "v2": save(folder, "v2", 2.0, version="2"),
        }
        binding = Binding(name="guard", point="residual", probe="./own", mode="flag")
        self.bounds = [Bound(binding, load_binding(binding, base=folder))]
        self.rollouts = Rollouts()
        self.now_s = 0.0
        self.start()

    def start(self, offset=0, emitted_up_to=0):
        self.versions = Versions(self.bounds, self.rollouts, self.folder, lambda: self.now_s)
        self.runner = BindingRunner(self.bounds, "g", lambda: 5, self.versions)
        self.host = ProbeHost("residual", set_fingerprint(self.bounds), self.runner, 10**18)
        self.host.assign([0])
        self.host.begin(0, Resume(offset=offset, emitted_up_to=emitted_up_to))

    def roll_out(self, **fields):
        known = self.rollouts.history("guard")
        entry = Rollout(
            probe="guard",
            sequence=len(known) + 1,
            entry_id=str(len(known)),
            change=RolloutChange.DEPLOY,
            created_at_us=0,
            **fields,
        )
        assert self.rollouts.add(self.rollouts.read_to, entry)

    def read(self, first, *values):
        batch = [incoming(CODEC, Record("t", 0, first + at, b"k", value, 1, ())) for at, value in enumerate(values)]
        actions = self.host.records(batch, 0)
        return [action.command for action in actions if isinstance(action, SendAbort)]

    def verdicts(self, *kinds):
        return [item for item in self.host.transaction().verdicts if not kinds or item.kind in kinds]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def stream(name, rollouts, peak=2.5):
    made = StreamBuilder(name, rollouts=rollouts)
    return [made.start(), made.block([0], np.array([peak, 0, 0, 0], np.float32)), made.end()]


def told(verdicts):
    return [(item.request_id, item.probe, item.probe_version, str(item.mode), str(item.action)) for item in verdicts]


def test_a_swap_leaves_open_streams_alone_and_verdicts_name_version_and_mode(world):
    first, second, third = stream("a", 0), stream("b", 1), stream("c", 2)
    world.roll_out(deployed=version(world.made["v1"]))
    world.read(0, first[0], second[0])
    world.roll_out(deployed=version(world.made["v2"]))
    commands = world.read(2, third[0], first[1], second[1], third[1], first[2], second[2], third[2])
    assert told(world.verdicts(VerdictKind.RESULT)) == [
        ("a", "guard", "1", "flag", "continue"),
        ("b", "guard", "1", "abort", "continue"),
        ("c", "guard", "2", "abort", "abort"),
    ]
    assert [(command.request_id, command.probe_version) for command in commands] == [("c", "2")]


def test_a_host_that_starts_anew_comes_to_the_same_versions_whatever_was_rolled_out_meanwhile(world):
    log = [value for name, at in (("a", 0), ("b", 1), ("c", 2)) for value in stream(name, at)]
    world.roll_out(deployed=version(world.made["v1"]))
    world.roll_out(candidate=version(world.made["v2"], "shadow"), deployed=version(world.made["v1"]))
    world.read(0, *log)
    once = world.verdicts()
    world.roll_out(deployed=version(world.made["v2"], "shadow"))
    world.start()
    world.read(0, *log)
    assert world.verdicts() == once
    assert {item.probe for item in once} == {"guard", "guard@candidate"}


def test_killed_after_any_record_the_next_host_says_the_rest_though_another_version_is_in_force_by_then(world):
    first, second, third = stream("a", 0), stream("b", 1), stream("c", 2)
    log = [first[0], second[0], first[1], third[0], second[1], first[2], third[1], third[2], second[2]]
    world.roll_out(deployed=version(world.made["v1"]))
    world.roll_out(deployed=version(world.made["v2"]))
    world.read(0, *log)
    once = collect(world.verdicts())
    assert {item.last_words[0].probe_version for item in once.values()} == {"1", "2"}
    world.roll_out(deployed=version(world.made["v1"], "shadow"))
    for cut in range(len(log) + 1):
        world.start()
        world.read(0, *log[:cut])
        transaction = world.host.transaction()
        # What it reads after that, and dies with, is in no transaction.
        world.read(cut, *log[cut : cut + 2])
        offset, text = transaction.offsets.get(0, (0, None))
        world.start(offset, HostMetadata.from_text(text).emitted_up_to if text else 0)
        world.read(offset, *log[offset:])
        told = collect([*transaction.verdicts, *world.verdicts()])
        assert told == once, cut


def test_beside_the_deployed_version_a_candidate_says_what_it_would_have_done_and_stops_nobody(world):
    world.roll_out(deployed=version(world.made["v1"]), candidate=version(world.made["v2"], "shadow"))
    assert world.read(0, *stream("a", 1)) == []
    assert told(world.verdicts(VerdictKind.RESULT)) == [
        ("a", "guard", "1", "abort", "continue"),
        ("a", "guard@candidate", "2", "shadow", "abort"),
    ]


def test_paused_nobody_is_stopped_and_the_record_goes_on(world):
    world.roll_out(deployed=version(world.made["v2"]), paused=True)
    assert world.read(0, *stream("a", 1)) == []
    assert told(world.verdicts(VerdictKind.RESULT)) == [("a", "guard", "2", "shadow", "abort")]


def test_a_version_that_is_not_there_is_refused_and_taken_when_it_is(world):
    missing = version(world.made["v1"])
    world.roll_out(deployed=missing)
    (world.folder / "v1").rename(world.folder / "away")
    world.read(0, *stream("a", 1))
    [refusal] = world.verdicts()
    assert (refusal.kind, refusal.probe, refusal.probe_version, str(refusal.mode)) == ("error", "guard", "1", "abort")
    assert "v1" in refusal.error
    assert refusal.probe_fingerprint == missing.fingerprint
    assert list(world.versions.troubles()) == ["guard"]
    (world.folder / "away").rename(world.folder / "v1")
    world.now_s += 3.0
    assert world.versions.troubles() == {}
    world.read(3, *stream("b", 1))
    assert [item.kind for item in world.verdicts()] == ["watermark", "result"]


def test_another_artefact_in_its_place_is_refused(world):
    world.roll_out(deployed=version(world.made["v1"]))
    save(world.folder, "v1", 1.0)
    world.read(0, *stream("a", 1))
    [refusal] = world.verdicts()
    assert refusal.kind is VerdictKind.ERROR
    assert f"version 1 that was rolled out has {world.made['v1'].fingerprint[:12]}" in refusal.error


@pytest.mark.parametrize("artefact", ["../v1", "/etc", "v1/../../x", "v1\0", "round/1"])
def test_an_entry_cannot_name_a_folder_elsewhere(world, artefact):
    (world.folder / "round").symlink_to("round")
    world.roll_out(deployed=RolloutVersion(artefact=artefact, fingerprint="f", mode=BindingMode.ABORT))
    world.read(0, *stream("a", 1))
    [refusal] = world.verdicts()
    assert "accepted: a folder below" in refusal.error


def test_a_probe_that_was_made_for_another_point_is_refused(world):
    world.roll_out(deployed=version(save(world.folder, "elsewhere", 1.0, point="other")))
    world.read(0, *stream("a", 1))
    [refusal] = world.verdicts()
    assert "was made for point 'other', and is rolled out at 'residual'" in refusal.error


def test_a_stream_that_knows_more_than_the_topic_has_is_refused(world):
    world.roll_out(deployed=version(world.made["v1"]))
    world.read(0, *stream("a", 7))
    [refusal] = world.verdicts()
    assert "knew the rollouts up to offset 7, here they are known up to 1" in refusal.error


def test_a_heartbeat_names_what_new_streams_get(world):
    def said():
        return [(item.probe, item.probe_version, str(item.mode)) for item in world.versions.summaries()]

    assert said() == [("guard", "1", "flag")]
    world.roll_out(deployed=version(world.made["v1"]), candidate=version(world.made["v2"], "shadow"))
    assert said() == [("guard", "1", "abort"), ("guard@candidate", "2", "shadow")]
    world.roll_out(deployed=version(world.made["v1"]), candidate=version(world.made["v2"], "abort"), paused=True)
    assert said() == [("guard", "1", "shadow"), ("guard", "2", "shadow")]
