"""What a probe may offer beyond `Probe`, and how a host finds out."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.core.test_probe import Counting
from undercurrent.core import BatchProbe, StatefulProbe, wanted_layers
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
