"""The next entry of a probe's rollout, from those so far and what somebody asks for.

deploy     a new candidate, beside the deployed version or, in mode abort, in its place
mode       of the candidate, or of the deployed version where there is none; and the candidate's share
promote    the candidate becomes the deployed version, on every request
rollback   the candidate goes; where there is none, back to the version that was deployed before
pause      nobody acts, everything is recorded
resume     the end of a pause, and of a brake
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from undercurrent.errors import ConfigError
from undercurrent.protocol.messages import BindingMode, Rollout, RolloutChange, RolloutVersion
from undercurrent.protocol.rollouts import Placed

MODES = (BindingMode.SHADOW, BindingMode.FLAG, BindingMode.ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who asks for a change.

    Args:
        probe: name of the binding.
        entry_id: of the new entry.
        author: who asks.
        reason: in words.
        created_at_us: microseconds since the Unix epoch.
    """

    probe: str
    entry_id: str
    author: str = ""
    reason: str = ""
    created_at_us: int = 0


def deploy(asked: Asked, history: Sequence[Placed], version: RolloutVersion) -> Rollout:
    """Return the entry that puts a version on trial.

    Raises:
        ConfigError: it is there already, its share makes no sense, or another candidate may stop requests.
    """
    last = _last(asked, history)
    _check_share(version.share)
    candidate = last.candidate
    if candidate is not None and candidate.mode is BindingMode.ABORT:
        raise ConfigError(
            f"probe {asked.probe}: candidate {candidate.version} stops requests (share {candidate.share:g}), and a new "
            "one would take its place: promote it or roll it back first"
        )
    for known, what in ((last.deployed, "deployed"), (candidate, "the candidate")):
        if known is not None and known.fingerprint == version.fingerprint:
            raise ConfigError(
                f"probe {asked.probe}: version {version.version} with fingerprint {version.fingerprint[:12]} is {what} "
                "already; its mode and share are changed with `probe mode`"
            )
    return replace(last, change=RolloutChange.DEPLOY, candidate=version)


def set_mode(
    asked: Asked,
    history: Sequence[Placed],
    mode: BindingMode,
    share: float | None = None,
    *,
    deployed: bool = False,
) -> Rollout:
    """Return the entry that changes a mode.

    Args:
        asked: who asks.
        history: entries so far.
        mode: the new one.
        share: of the candidate; as it is without.
        deployed: of the deployed version, also where there is a candidate.

    Raises:
        ConfigError: nothing would change, or a share is given and there is no candidate.
    """
    last = _last(asked, history)
    if last.candidate is not None and not deployed:
        changed = replace(last.candidate, mode=mode, share=last.candidate.share if share is None else share)
        _check_share(changed.share)
        result = replace(last, change=RolloutChange.MODE, candidate=changed)
    elif share is not None:
        raise ConfigError(f"probe {asked.probe}: a share is a candidate's; the deployed version runs on every request")
    else:
        own = last.deployed or RolloutVersion(artefact="", mode=BindingMode.UNKNOWN)
        result = replace(last, change=RolloutChange.MODE, deployed=replace(own, mode=mode))
    if (result.deployed, result.candidate) == (last.deployed, last.candidate):
        raise ConfigError(f"probe {asked.probe}: is in mode {mode.value} already")
    return result


def promote(asked: Asked, history: Sequence[Placed]) -> Rollout:
    """Return the entry that makes the candidate the deployed version.

    Raises:
        ConfigError: there is no candidate.
    """
    last = _last(asked, history)
    if last.candidate is None:
        raise ConfigError(f"probe {asked.probe}: no candidate to promote; `probe deploy` makes one")
    chosen = replace(last.candidate, share=1.0)
    return replace(last, change=RolloutChange.PROMOTE, deployed=chosen, candidate=None)


def rollback(asked: Asked, history: Sequence[Placed]) -> Rollout:
    """Return the entry that goes back: from a candidate to none, else to the version deployed before, in its last mode.

    Raises:
        ConfigError: there is nothing to go back to.
    """
    last = _last(asked, history)
    if last.candidate is not None:
        return replace(last, change=RolloutChange.ROLLBACK, candidate=None)
    now = _identity(last.deployed)
    # Before the first entry stood what the hosts' own bindings name.
    earlier = [*(placed.entry.deployed for placed in reversed(history)), None]
    for version in earlier:
        if _identity(version) != now:
            return replace(last, change=RolloutChange.ROLLBACK, deployed=version)
    raise ConfigError(f"probe {asked.probe}: has no candidate, and no other version was deployed before")


def pause(asked: Asked, history: Sequence[Placed]) -> Rollout:
    """Return the entry after which nobody acts.

    Raises:
        ConfigError: it is paused.
    """
    last = _last(asked, history)
    if last.paused:
        raise ConfigError(f"probe {asked.probe}: is paused already")
    return replace(last, change=RolloutChange.PAUSE, paused=True)


def resume(asked: Asked, history: Sequence[Placed]) -> Rollout:
    """Return the entry that ends a pause and lifts a brake."""
    return replace(_last(asked, history), change=RolloutChange.RESUME, paused=False)


def _last(asked: Asked, history: Sequence[Placed]) -> Rollout:
    """Return the entry in force, as the new one that changes nothing yet."""
    last = history[-1].entry if history else None
    return Rollout(
        probe=asked.probe,
        sequence=1 if last is None else last.sequence + 1,
        entry_id=asked.entry_id,
        change=RolloutChange.UNKNOWN,
        paused=last is not None and last.paused,
        deployed=None if last is None else last.deployed,
        candidate=None if last is None else last.candidate,
        author=asked.author,
        reason=asked.reason,
        created_at_us=asked.created_at_us,
    )


def _identity(version: RolloutVersion | None) -> tuple[str, str]:
    return ("", "") if version is None else (version.artefact, version.fingerprint)


def _check_share(share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"share {share:g}: accepted: above 0, up to 1")
