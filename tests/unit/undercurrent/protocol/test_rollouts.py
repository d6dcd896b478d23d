"""Which version of a probe is in force for a stream: a pure function of the rollouts topic and of its StreamStarted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.errors import ProtocolError
from undercurrent.protocol.messages import BindingMode, Rollout, RolloutChange, RolloutVersion
from undercurrent.protocol.rollouts import Assigned, Rollouts, assigned, in_share, key_of

V1 = RolloutVersion(artefact="guard/1", version="1", fingerprint="f1", mode=BindingMode.ABORT)
V2 = RolloutVersion(artefact="guard/2", version="2", fingerprint="f2", mode=BindingMode.SHADOW)


def entry(sequence, probe="guard", name=None, **fields):
    change = fields.pop("change", RolloutChange.DEPLOY)
    return Rollout(
        probe=probe, sequence=sequence, entry_id=name or f"e{sequence}", change=change, created_at_us=0, **fields
    )


def known(*entries, first=0):
    rollouts = Rollouts()
    for at, item in enumerate(entries):
        rollouts.add(first + at, item)
    return rollouts


def test_the_entry_in_force_is_the_last_one_below_the_stream_s_offset():
    rollouts = known(entry(1, deployed=V1), entry(1, probe="other"), entry(2, deployed=V2))
    assert rollouts.in_force("guard", 0) is None
    assert [rollouts.in_force("guard", at).sequence for at in (1, 2, 3)] == [1, 1, 2]
    assert rollouts.in_force("guard").sequence == 2
    assert rollouts.in_force("nobody", 3) is None


def test_an_entry_that_does_not_follow_is_void_wherever_it_is_read():
    first, late, next_one = entry(1, name="a"), entry(1, name="b"), entry(2, name="c")
    rollouts = Rollouts()
    assert [rollouts.add(at, item) for at, item in enumerate((first, late, next_one))] == [True, False, True]
    assert [placed.entry.entry_id for placed in rollouts.history("guard")] == ["a", "c"]
    assert rollouts.in_force("guard", 2).entry_id == "a"
    assert not rollouts.add(1, entry(3)), "an offset that was read already says nothing new"


def test_no_two_entries_have_one_key():
    entries = [entry(1, name="a"), entry(1, name="b"), entry(2, name="a"), entry(1, probe="guard2", name="a")]
    assert len({key_of(item) for item in entries}) == len(entries)


def test_what_was_not_read_yet_is_not_guessed():
    rollouts = known(entry(1))
    with pytest.raises(ProtocolError, match="up to offset 2, here they are known up to 1"):
        rollouts.in_force("guard", 2)
    rollouts.passed(2)
    assert rollouts.in_force("guard", 2).sequence == 1


@given(
    log=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 4)), max_size=12),
    cut=st.integers(0, 12),
    at=st.integers(0, 12),
)
def test_an_answer_does_not_depend_on_how_much_more_was_read(log, cut, at):
    entries = [entry(sequence, probe=probe, name=str(n)) for n, (probe, sequence) in enumerate(log)]
    whole, part = known(*entries), known(*entries[:cut])
    if at <= part.read_to:
        assert all(whole.in_force(name, at) == part.in_force(name, at) for name in ("a", "b"))


def test_without_an_entry_the_binding_is_in_force():
    assert assigned("guard", None, "r") == (Assigned("guard", None, None),)
    assert assigned("guard", entry(1), "r") == (Assigned("guard", None, None),)


@pytest.mark.parametrize("mode", [BindingMode.SHADOW, BindingMode.FLAG])
def test_a_candidate_that_stops_nobody_runs_beside_the_one_that_guards(mode):
    trial = RolloutVersion(artefact="guard/2", fingerprint="f2", mode=mode)
    assert assigned("guard", entry(1, deployed=V1, candidate=trial), "r") == (
        Assigned("guard", V1, BindingMode.ABORT),
        Assigned("guard@candidate", trial, mode),
    )


def test_a_candidate_that_may_stop_takes_the_place_of_the_other_on_its_share():
    trial = RolloutVersion(artefact="guard/2", fingerprint="f2", mode=BindingMode.ABORT, share=0.5)
    state = entry(1, deployed=V1, candidate=trial)
    found = {assigned("guard", state, f"r{n}") for n in range(100)}
    assert found == {
        (Assigned("guard", V1, BindingMode.ABORT),),
        (Assigned("guard", trial, BindingMode.ABORT),),
    }


def test_paused_every_version_only_records():
    state = entry(1, deployed=V1, candidate=V2, paused=True)
    assert [part.mode for part in assigned("guard", state, "r")] == [BindingMode.SHADOW] * 2
    assert [part.mode for part in assigned("guard", entry(1, paused=True), "r")] == [BindingMode.SHADOW]


def test_a_mode_of_the_file_s_own_probe_is_changed_without_naming_another():
    own = RolloutVersion(artefact="", mode=BindingMode.FLAG)
    assert assigned("guard", entry(1, deployed=own), "r") == (Assigned("guard", None, BindingMode.FLAG),)


def test_a_mode_that_a_newer_version_wrote_is_not_taken_for_another():
    with pytest.raises(ProtocolError, match="rollout 1 of guard has a mode"):
        assigned("guard", entry(1, deployed=RolloutVersion(artefact="x", mode=BindingMode.UNKNOWN)), "r")


def test_a_share_that_grows_takes_in_more_and_lets_none_go():
    names = [f"request-{n}" for n in range(4000)]
    shares = [0.0, 0.01, 0.05, 0.5, 0.99, 1.0]
    sides = [{name for name in names if in_share("guard", name, share)} for share in shares]
    assert all(small <= large for small, large in pairwise(sides))
    assert (len(sides[0]), len(sides[-1])) == (0, len(names))
    # 4 standard deviations of a fair draw.
    assert abs(len(sides[3]) - 2000) < 4 * 31.7
    other = {name for name in names if in_share("other", name, 0.5)}
    assert abs(len(other & sides[3]) - 1000) < 4 * 27.4, "two probes draw independently"
