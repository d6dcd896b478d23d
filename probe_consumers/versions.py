"""The bindings of a point in every version that is in force somewhere: which of them runs on which stream.

Which version that is, and where it begins, is decided in `undercurrent.protocol.rollouts`. An artefact is looked for in
one folder, the host's `artefacts`: an entry names a folder below it and the fingerprint that must be found there. What
is missing, is another one, or was made for another point is not guessed at: its streams are refused with an `error`
verdict that says why, and the host says so at /readyz until it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from probe_consumers.bound import Bound
from undercurrent.core import Probe, ProbeFactory, ProbeResult, ProbeSignal, RequestContext, StreamFacts
from undercurrent.errors import ProbeError, ProbingError
from undercurrent.probes import Binding, LoadedProbe, load_probe
from undercurrent.protocol.messages import BindingMode, BoundProbe, Rollout, RolloutVersion
from undercurrent.protocol.rollouts import CANDIDATE_SUFFIX, Assigned, Rollouts, assigned
from undercurrent.spec import ActivationRecord

_AGAIN_S = 2.0
"""How long a version that did not load is not tried again."""


class Versions:
    """Which bindings run on a stream. Two threads may ask.

    Args:
        bounds: the bindings of the host's file, in its order.
        rollouts: what is known of the rollouts topic; None where it does not count.
        artefacts: folder of the artefacts that entries name.
        monotonic: seconds, for how long a version that did not load is not tried again.
    """

    def __init__(
        self,
        bounds: Sequence[Bound],
        rollouts: Rollouts | None = None,
        artefacts: Path = Path(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = tuple(bounds)
        self._rollouts = rollouts
        self._artefacts = artefacts
        self._monotonic = monotonic
        self._made: dict[tuple[str, RolloutVersion | None, str], Bound] = {}
        self._refused: dict[tuple[str, str, str], Bound] = {}
        self._failed: dict[RolloutVersion, tuple[float, str]] = {}
        self._loaded: dict[tuple[str, RolloutVersion], LoadedProbe] = {}
        self._lock = threading.Lock()

    def of(self, request_id: str, rollouts: int) -> tuple[Bound, ...]:
        """Return what runs on a stream, in the order of the bindings.

        Args:
            request_id: its request.
            rollouts: of its StreamStarted.
        """
        if self._rollouts is None or not rollouts:
            return self._bounds
        known = self._rollouts
        found: list[Bound] = []
        for bound in self._bounds:
            try:
                parts = assigned(bound.binding.name, known.in_force(bound.binding.name, rollouts), request_id)
            except ProbingError as exc:
                found.append(self._refusing(bound.binding, None, exc))
            else:
                found += [self._bound(bound, part) for part in parts]
        return tuple(found)

    def summaries(self) -> tuple[BoundProbe, ...]:
        """Return what a heartbeat says of the versions that new streams get."""
        said: list[BoundProbe] = []
        for bound, entry in self._now():
            own = bound.summary()
            for version, name in _named(bound, entry):
                mode = version.mode if version is not None else own.mode
                told = version.version if version is not None and version.artefact else own.probe_version
                shown = BindingMode.SHADOW if entry is not None and entry.paused else mode
                said.append(BoundProbe(probe=name, probe_version=told, point=own.point, mode=shown))
        return tuple(said)

    def troubles(self) -> dict[str, str]:
        """Load what new streams get, and return by name why some of it cannot run."""
        found: dict[str, str] = {}
        for bound, entry in self._now():
            for version, name in _named(bound, entry):
                try:
                    if version is not None and version.artefact:
                        self._load(bound.binding, version)
                except ProbingError as exc:
                    found[name] = str(exc)
        return found

    def _now(self) -> list[tuple[Bound, Rollout | None]]:
        known = self._rollouts
        return [(bound, None if known is None else known.in_force(bound.binding.name)) for bound in self._bounds]

    def _bound(self, bound: Bound, part: Assigned) -> Bound:
        mode = bound.binding.mode if part.mode is None else part.mode.value
        key = (part.name, part.version, mode)
        made = self._made.get(key)
        if made is None:
            changed = {"name": part.name, "mode": mode}
            try:
                loaded = bound.loaded if part.version is None else self._load(bound.binding, part.version)
            except ProbingError as exc:
                return self._refusing(bound.binding.model_copy(update=changed), part.version, exc)
            made = self._made[key] = Bound(bound.binding.model_copy(update=changed), loaded)
        return made

    def _refusing(self, binding: Binding, version: RolloutVersion | None, error: ProbingError) -> Bound:
        key = (binding.name, binding.mode, str(error))
        if key not in self._refused:
            self._refused[key] = _refusing(binding, version, str(error))
        return self._refused[key]

    def _load(self, binding: Binding, version: RolloutVersion) -> LoadedProbe:
        key = (binding.point, version)
        with self._lock:
            if key in self._loaded:
                return self._loaded[key]
            tried_s, reason = self._failed.get(version, (0.0, ""))
            if reason and self._monotonic() - tried_s < _AGAIN_S:
                raise ProbeError(reason)
            try:
                loaded = load_version(self._artefacts, binding.point, version)
            except ProbingError as exc:
                self._failed[version] = self._monotonic(), str(exc)
                raise
            self._failed.pop(version, None)
            self._loaded[key] = loaded
            return loaded


def load_version(artefacts: Path, point: str, version: RolloutVersion) -> LoadedProbe:
    """Return the probe that a rollout names.

    Args:
        artefacts: the folder that its artefact is below.
        point: that it will read.
        version: what the rollout says.

    Raises:
        ProbeError: it is not there, is another one, or was made for another point.
    """
    folder = artefacts / version.artefact
    # The topic is no place to name files of the machine from.
    try:
        is_below = folder.resolve().is_relative_to(artefacts.resolve())
    except (OSError, ValueError, RuntimeError) as exc:  # no path at all, or links that lead round in a circle
        raise ProbeError(f"artefact {version.artefact!r}: {exc}; accepted: a folder below {artefacts}") from exc
    if not is_below:
        raise ProbeError(f"artefact {version.artefact!r}: accepted: a folder below {artefacts}")
    loaded = load_probe(f"./{version.artefact}", base=artefacts)
    if loaded.fingerprint != version.fingerprint:
        raise ProbeError(
            f"{folder} has fingerprint {loaded.fingerprint[:12]}; version {version.version} that was rolled out has "
            f"{version.fingerprint[:12]}"
        )
    if loaded.point not in (None, point):
        raise ProbeError(f"{folder} was made for point {loaded.point!r}, and is rolled out at {point!r}")
    return loaded


def _named(bound: Bound, entry: Rollout | None) -> list[tuple[RolloutVersion | None, str]]:
    name = bound.binding.name
    if entry is None:
        return [(None, name)]
    candidate = entry.candidate
    if candidate is None:
        return [(entry.deployed, name)]
    beside = candidate.mode is not BindingMode.ABORT
    return [(entry.deployed, name), (candidate, name + CANDIDATE_SUFFIX if beside else name)]


class _Refusing(Probe):
    """Stands for a version that cannot run."""

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self._reason = reason

    def check(self, stream: StreamFacts) -> None:
        raise ProbeError(self._reason)

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        raise ProbeError(self._reason)

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        raise ProbeError(self._reason)


def _refusing(binding: Binding, version: RolloutVersion | None, reason: str) -> Bound:
    loaded = LoadedProbe(
        factory=ProbeFactory(_Refusing, {"reason": reason}),
        sample=_Refusing(reason),
        version="" if version is None else version.version,
        fingerprint="" if version is None else version.fingerprint,
    )
    return Bound(binding, loaded)
