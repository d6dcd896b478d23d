"""What somebody asks of a probe's rollout, and the entry that it makes or the reason why not."""

from __future__ import annotations

from functools import partial

import pytest

from undercurrent.errors import ConfigError
from undercurrent.protocol import rollout_changes as changes
from undercurrent.protocol.messages import BindingMode, RolloutVersion
from undercurrent.protocol.rollout_changes import Asked
from undercurrent.protocol.rollouts import Rollouts

ABORT, FLAG, SHADOW = BindingMode.ABORT, BindingMode.FLAG, BindingMode.SHADOW


def version(name, mode=SHADOW, share=1.0):
    return RolloutVersion(artefact=f"guard/{name}", version=name, fingerprint=f"f{name}", mode=mode, share=share)


class History:
    def __init__(self):
        self.rollouts = Rollouts()

    def ask(self, change):
        entry = change(Asked(probe="guard", entry_id=str(self.rollouts.read_to)), self.rollouts.history("guard"))
        assert self.rollouts.add(self.rollouts.read_to, entry)
        return entry

    def refuse(self, change, said):
        with pytest.raises(ConfigError, match=said):
            self.ask(change)


def deploy(name, **fields):
    return partial(changes.deploy, version=version(name, **fields))


def mode(name, **fields):
    return partial(changes.set_mode, mode=name, **fields)


@pytest.fixture
def history():
    return History()


def test_from_shadow_to_abort_and_back(history):
    entry = history.ask(deploy("1", share=0.05))
    assert (entry.sequence, entry.deployed, entry.candidate) == (1, None, version("1", share=0.05))
    assert history.ask(mode(FLAG)).candidate == version("1", FLAG, 0.05)
    assert history.ask(mode(ABORT, share=0.5)).candidate == version("1", ABORT, 0.5)
    entry = history.ask(changes.promote)
    assert (entry.deployed, entry.candidate) == (version("1", ABORT), None)
    history.ask(deploy("2"))
    assert history.ask(changes.rollback).candidate is None
    assert history.ask(changes.rollback).deployed is None, "what the hosts' own bindings name"
    assert history.ask(changes.rollback).deployed == version("1", ABORT), "a second one undoes the first"


def test_a_rollback_takes_the_mode_that_the_earlier_version_had_last(history):
    for step in (deploy("1"), changes.promote, mode(FLAG), deploy("2", mode=ABORT), changes.promote):
        history.ask(step)
    assert history.ask(changes.rollback).deployed == version("1", FLAG)


def test_the_mode_of_the_deployed_version_can_be_changed_beside_a_candidate(history):
    history.ask(deploy("1"))
    entry = history.ask(mode(ABORT, deployed=True))
    assert (entry.deployed.artefact, entry.deployed.mode, entry.candidate) == ("", ABORT, version("1"))


def test_a_pause_keeps_everything_and_a_resume_is_always_possible(history):
    history.ask(deploy("1", mode=FLAG))
    entry = history.ask(changes.pause)
    assert (entry.paused, entry.candidate) == (True, version("1", FLAG))
    history.refuse(changes.pause, "is paused already")
    assert history.ask(mode(ABORT)).paused, "another change does not end it"
    assert not history.ask(changes.resume).paused
    assert not history.ask(changes.resume).paused


def test_what_makes_no_sense_is_refused(history):
    history.refuse(changes.promote, "no candidate to promote")
    history.refuse(changes.rollback, "no other version was deployed before")
    history.refuse(mode(ABORT, share=0.5), "a share is a candidate's")
    for share in (0.0, 1.5, float("nan")):
        history.refuse(deploy("1", share=share), "accepted: above 0, up to 1")
    history.ask(deploy("1", mode=ABORT, share=0.5))
    history.refuse(mode(ABORT), "is in mode abort already")
    history.refuse(deploy("2"), "candidate 1 stops requests .share 0.5.*promote it or roll it back")
    history.ask(mode(SHADOW))
    history.refuse(deploy("1"), "fingerprint f1 is the candidate already")
    history.ask(changes.promote)
    history.refuse(deploy("1"), "is deployed already")
