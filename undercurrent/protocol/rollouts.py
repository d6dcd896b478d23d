"""Which version of a probe judges a request, and what it may do: a pure function of the log.

The rollouts topic holds entries, each the whole state of one probe. When an engine is given a request it has read that
topic up to some offset, and writes this offset into the StreamStarted of every stream of the attempt. In force for a
stream is the last valid entry of the probe below it. So the boundary stands in the log itself, in the message that
opens the stream: a host that recovers, every other host and a replay years later come to the same version, whatever
they had read of the topic when, and no clock and no order between two topics is asked for anything.

Compaction keeps the last record of a key, and an older stream needs an older entry: every entry has a key of its own
(`key_of`), so that compaction deletes none, and offsets outlive it. An entry names the number that follows the one in
force when it was made; where two people changed a probe at once the second entry does not follow any more and is void.

Who runs on a request:

    paused         nobody acts: every version runs in mode shadow
    no candidate   the deployed version
    a candidate    on its share of the requests: in mode shadow or flag beside the deployed version, which goes on to
                   guard, under the name `NAME@candidate`; in mode abort in its place, under the probe's own name

The share is taken by hash of the request's id: all of its attempts, children and streams are on the same side of it,
and a share that grows takes in more requests and lets none go.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from undercurrent.errors import ProtocolError
from undercurrent.protocol.messages import BindingMode, Rollout, RolloutVersion

CANDIDATE_SUFFIX = "@candidate"
"""A binding's name has no @: nobody else is called so."""

_SHARE_BITS = 64


def key_of(entry: Rollout) -> bytes:
    """Return the key of an entry, which no other entry has."""
    return f"{entry.probe}|{entry.sequence}|{entry.entry_id}".encode()


@dataclass(frozen=True, slots=True)
class Placed:
    """A valid entry and where it stands.

    Args:
        offset: in the rollouts topic.
        entry: it.
    """

    offset: int
    entry: Rollout


class Rollouts:
    """The entries of the rollouts topic, as far as it was read.

    What was answered once stays: one thread may add while others ask about offsets below `read_to`.

    Args:
        read_to: next offset to read.
    """

    def __init__(self, read_to: int = 0) -> None:
        self._entries: dict[str, tuple[Placed, ...]] = {}
        self._read_to = read_to

    @property
    def read_to(self) -> int:
        """Next offset to read: everything below it is known."""
        return self._read_to

    @property
    def probes(self) -> tuple[str, ...]:
        """Probes that have an entry, in the order of their first ones."""
        return tuple(self._entries)

    def add(self, offset: int, entry: Rollout) -> bool:
        """Take the record at an offset; return False where it is void or known already.

        Args:
            offset: of the record; grows from call to call.
            entry: what it says.
        """
        if offset < self._read_to:
            return False
        known = self._entries.get(entry.probe, ())
        valid = entry.sequence == (known[-1].entry.sequence if known else 0) + 1
        if valid:
            self._entries[entry.probe] = (*known, Placed(offset, entry))
        self._read_to = offset + 1
        return valid

    def passed(self, offset: int) -> None:
        """Note that everything below an offset was read, where the last of it is no entry."""
        self._read_to = max(self._read_to, offset)

    def history(self, probe: str) -> tuple[Placed, ...]:
        """Return the valid entries of a probe, oldest first."""
        return self._entries.get(probe, ())

    def in_force(self, probe: str, at: int | None = None) -> Rollout | None:
        """Return the entry of a probe that is in force, None where there is none: what its binding says.

        Args:
            probe: name of its binding.
            at: `rollouts` of the StreamStarted; by default what was read so far.

        Raises:
            ProtocolError: the topic was not read so far.
        """
        if at is not None and at > self._read_to:
            raise ProtocolError(
                f"the stream's engine knew the rollouts up to offset {at}, here they are known up to {self._read_to}"
            )
        for placed in reversed(self._entries.get(probe, ())):
            if at is None or placed.offset < at:
                return placed.entry
        return None


@dataclass(frozen=True, slots=True)
class Assigned:
    """One version that runs on a request.

    Args:
        name: under which its verdicts stand.
        version: which; None for the probe that the host's binding names.
        mode: the most that it may do; None for what the binding says.
    """

    name: str
    version: RolloutVersion | None
    mode: BindingMode | None


def in_share(probe: str, request_id: str, share: float) -> bool:
    """Return whether a request is among a share of all requests; one that is stays so when the share grows.

    Args:
        probe: name of the binding: two probes on trial take different requests.
        request_id: the request.
        share: in [0, 1].
    """
    digest = hashlib.sha256(f"{probe}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[: _SHARE_BITS // 8], "big") < share * float(1 << _SHARE_BITS)


def assigned(probe: str, entry: Rollout | None, request_id: str) -> tuple[Assigned, ...]:
    """Return what runs of a probe on a request, that which guards first.

    Args:
        probe: name of its binding.
        entry: that is in force.
        request_id: the request.

    Raises:
        ProtocolError: the entry has a mode that is not known here.
    """
    if entry is None:
        return (Assigned(probe, None, None),)
    deployed = Assigned(probe, _own(entry.deployed), _mode(entry, entry.deployed))
    candidate = entry.candidate
    if candidate is None or not in_share(probe, request_id, candidate.share):
        return (deployed,)
    mode = _mode(entry, candidate)
    if candidate.mode is BindingMode.ABORT:
        return (Assigned(probe, _own(candidate), mode),)
    return deployed, Assigned(probe + CANDIDATE_SUFFIX, _own(candidate), mode)


def _own(version: RolloutVersion | None) -> RolloutVersion | None:
    return version if version is not None and version.artefact else None


def _mode(entry: Rollout, version: RolloutVersion | None) -> BindingMode | None:
    if entry.paused:
        return BindingMode.SHADOW
    if version is None:
        return None
    if version.mode is BindingMode.UNKNOWN:
        raise ProtocolError(f"rollout {entry.sequence} of {entry.probe} has a mode that this version does not know")
    return version.mode
