"""Ready-made probes, and how probes are named, stored and loaded."""

from undercurrent.probes.artefact import Artefact
from undercurrent.probes.bindings import Binding, load_bindings, parse_bindings
from undercurrent.probes.ensemble import EnsembleProbe
from undercurrent.probes.folder import LinearArtefact, ProbeConfig
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.loading import LoadedProbe, load_binding, load_probe
from undercurrent.probes.stored import AttentionProbe, MahalanobisProbe, MeanDifferenceProbe, MlpProbe, StoredProbe
from undercurrent.probes.trajectory import TrajectoryProbe

__all__ = [
    "Artefact",
    "AttentionProbe",
    "Binding",
    "EnsembleProbe",
    "LinearArtefact",
    "LinearProbe",
    "LoadedProbe",
    "MahalanobisProbe",
    "MeanDifferenceProbe",
    "MlpProbe",
    "ProbeConfig",
    "StoredProbe",
    "TrajectoryProbe",
    "load_binding",
    "load_bindings",
    "load_probe",
    "parse_bindings",
]
