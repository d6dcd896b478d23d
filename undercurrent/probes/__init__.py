"""Ready-made probes, and how probes are named, stored and loaded."""

from undercurrent.probes.bindings import Binding, load_bindings, parse_bindings
from undercurrent.probes.folder import LinearArtefact, ProbeConfig
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.loading import LoadedProbe, load_binding, load_probe

__all__ = [
    "Binding",
    "LinearArtefact",
    "LinearProbe",
    "LoadedProbe",
    "ProbeConfig",
    "load_binding",
    "load_bindings",
    "load_probe",
    "parse_bindings",
]
