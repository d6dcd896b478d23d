"""Training a probe from labelled requests: bounded memory, and a threshold for a wanted false positive rate."""

from undercurrent.evaluation.fit.artefact import TrainedProbe
from undercurrent.evaluation.fit.blocks import LabelledRequest, Site, token_labels
from undercurrent.evaluation.fit.estimators import Kind
from undercurrent.evaluation.fit.settings import TrainSettings
from undercurrent.evaluation.fit.sums import ClassMoments, Moments
from undercurrent.evaluation.fit.training import train

__all__ = [
    "ClassMoments",
    "Kind",
    "LabelledRequest",
    "Moments",
    "Site",
    "TrainSettings",
    "TrainedProbe",
    "token_labels",
    "train",
]
