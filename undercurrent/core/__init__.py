"""Probes: what judges the activations of a request."""

from undercurrent.core.batch import BatchProbe, LayeredProbe, StatefulProbe, score_rows, wanted_layers
from undercurrent.core.function import FunctionProbe, probe
from undercurrent.core.probe import Probe, ProbeFactory
from undercurrent.core.registry import (
    ENTRY_POINT_GROUP,
    ProbeRegistry,
    default_registry,
    get_probe_factory,
    list_probes,
    register_probe,
    unregister_probe,
)
from undercurrent.core.results import Coverage, Part, ProbeAction, ProbeResult, ProbeSignal, RequestContext, StreamFacts
from undercurrent.errors import ProbeNotFoundError

__all__ = [
    "ENTRY_POINT_GROUP",
    "BatchProbe",
    "Coverage",
    "FunctionProbe",
    "LayeredProbe",
    "Part",
    "Probe",
    "ProbeAction",
    "ProbeFactory",
    "ProbeNotFoundError",
    "ProbeRegistry",
    "ProbeResult",
    "ProbeSignal",
    "RequestContext",
    "StatefulProbe",
    "StreamFacts",
    "default_registry",
    "get_probe_factory",
    "list_probes",
    "probe",
    "register_probe",
    "score_rows",
    "unregister_probe",
    "wanted_layers",
]
