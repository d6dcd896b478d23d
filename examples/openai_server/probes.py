"""The probes of a spec: found, made and checked when the server starts, not at the first request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from undercurrent.adapters.base import EngineInfo
from undercurrent.core import ProbeFactory, ProbeRegistry, ProbeSignal, StreamFacts
from undercurrent.errors import ConfigError, ProbeError
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.loading import LoadedProbe, load_probe
from undercurrent.spec import ActivationRecord, ExtractionPoint, ProbeSpec


class ReportingLinearProbe(LinearProbe):
    """A linear probe that tells its aggregated score at each token, the one that its threshold is compared with."""

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Return what the probe says, or else its score so far."""
        signal = super().on_activation(record)
        if signal is not None or record.layer != self.artefact.config.layer or self.aggregate is None:
            return signal
        return ProbeSignal(token_pos=record.token_pos, layer=record.layer, score=self.aggregate)


@dataclass(frozen=True, slots=True)
class BoundProbes:
    """The points of a server with their probes.

    Args:
        points: each names its own entry of the registry.
        registry: for the router.
        names: what each point's probe is called in the spec, by the point's name.
        loaded: the probes, by the point's name.
    """

    points: tuple[ExtractionPoint, ...]
    registry: ProbeRegistry
    names: Mapping[str, str]
    loaded: Mapping[str, LoadedProbe]

    def check(self, info: EngineInfo) -> None:
        """Refuse a model that a probe was not made for.

        Raises:
            ProbeError: naming the point.
        """
        for point in self.points:
            facts = StreamFacts(
                prompt_len=0,
                layers=point.layers,
                width=info.width,
                tensor_type=point.tensor_type.value,
                model=info.model,
                model_fingerprint=info.model_fingerprint,
            )
            try:
                self.loaded[point.name].check(facts)
            except ProbeError as exc:
                raise ProbeError(f"point {point.name!r}: {exc}") from exc


def bind(spec: ProbeSpec, folder: Path, chosen: Mapping[str, str]) -> BoundProbes:
    """Load the probe of each point.

    A `probe_type` is a registered name, `module:Class`, or the folder of a linear probe; what is chosen comes first.

    Args:
        spec: the points.
        folder: of the spec: relative folders start there, and modules beside it can be imported.
        chosen: folder or `module:Class` of a probe type, by its name.

    Raises:
        ConfigError: a point has no probe, or a probe that was chosen is nobody's.
        ProbeError: a probe does not load, or was made for another point.
    """
    registry, loaded, names = ProbeRegistry(), {}, {}
    for point in spec:
        if point.probe_type is None:
            raise ConfigError(f"point {point.name!r} has no probe_type: nothing would judge it")
        reference = chosen.get(point.probe_type)
        base = folder if reference is None else Path()
        probe = load_probe(reference or point.probe_type, point.probe_args, base=base)
        if probe.point not in {None, point.name}:
            raise ProbeError(f"point {point.name!r}: its probe was made for point {probe.point!r}")
        # Under the point's name: two points may have one probe with different settings.
        registry.register(point.name, _reporting(probe.factory))
        loaded[point.name], names[point.name] = probe, point.probe_type
    unused = sorted(set(chosen) - set(names.values()))
    if unused:
        used = ", ".join(sorted(set(names.values()))) or "none"
        raise ConfigError(f"--probe {unused[0]}: no point has this probe_type; there are: {used}")
    points = tuple(replace(point, probe_type=point.name, probe_args={}) for point in spec)
    return BoundProbes(points, registry, names, loaded)


def _reporting(factory: ProbeFactory) -> ProbeFactory:
    if factory.probe_cls is not LinearProbe:
        return factory
    return ProbeFactory(ReportingLinearProbe, factory.probe_kwargs)
