"""What a probe may offer beyond `Probe`, and how a host finds out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.undercurrent.core.test_probe import Counting
from undercurrent.core import BatchProbe, LayeredProbe, StatefulProbe, score_rows, wanted_layers
from undercurrent.errors import ShapeError
from undercurrent.probes import LinearProbe


class Picky(Counting):
    def layers_to_score(self, layers):
        return [layer for layer in layers if layer % 2]


def linear():
    return LinearProbe.from_arrays([1.0, 2.0], 0.0, layer=3, tensor_type="residual_stream", threshold=1.0)


@pytest.mark.parametrize(("probe", "offers"), [(Counting(), False), (linear(), True)])
def test_a_host_sees_what_a_probe_offers(probe, offers):
    assert isinstance(probe, BatchProbe) is offers
    assert isinstance(probe, StatefulProbe) is offers


def test_layers_are_all_unless_the_probe_chooses():
    assert wanted_layers(Counting(), [1, 2, 3]) == (1, 2, 3)
    assert wanted_layers(Picky(), [1, 2, 3]) == (1, 3)
    assert wanted_layers(linear(), [1, 2, 3]) == (3,)


class OfLayers:
    def score_layers(self, rows, layers):
        return np.stack([layers, rows[:, 0]], axis=1)

    def score(self, rows):
        return np.zeros(len(rows) - 1)

    def on_scores(self, positions, layers, scores):
        return None


def test_a_probe_that_needs_the_layers_is_given_them_and_others_are_not_asked_for():
    rows = np.ones((2, 2), np.float32)
    assert isinstance(OfLayers(), LayeredProbe)
    assert not isinstance(linear(), LayeredProbe)
    values = score_rows(OfLayers(), rows, lambda: np.array([3, 5], np.int32))
    assert (values.tolist(), values.dtype) == ([[3, 1], [5, 1]], np.float32)
    assert score_rows(linear(), rows, lambda: pytest.fail("it does not need them")).tolist() == [3, 3]


def test_scores_of_other_rows_are_refused():
    class Short(OfLayers):
        score_layers = None

    with pytest.raises(ShapeError, match=r"gave \[1\] for 2 rows"):
        score_rows(Short(), np.ones((2, 2), np.float32), list)
