"""Probabilities that are right are found right, and wrong ones wrong."""

import numpy as np
import pytest
from scipy.special import expit

from undercurrent.evaluation.calibration import calibrate, expected_error, to_prevalence
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Sample

OPTIONS = Options(rounds=200)


def _drawn(n: int, seed: int, shift: float = 0.0) -> tuple[Sample, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n) * 2
    labels = rng.random(n) < expit(scores + shift)
    return Sample(labels, np.arange(n), np.ones(n)), scores


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_what_is_calibrated_is_off_by_chance_alone(kind) -> None:
    found, chance = calibrate(*_drawn(4000, 1), *_drawn(4000, 2), Options(rounds=200, calibration=kind))
    # What is fitted on so many requests is itself off by a little.
    assert found.ece.value <= 1.3 * found.ece_by_chance
    assert found.brier.low < found.brier.value < found.brier.high < found.brier_of_base_rate
    assert sum(part.n for part in found.bins) == chance.size == 4000


def test_a_shift_of_prevalence_puts_probabilities_off() -> None:
    found, chance = calibrate(*_drawn(4000, 1), *_drawn(4000, 2, shift=-2.0), OPTIONS)
    assert found.ece.value > 2 * found.ece_by_chance
    placing, test = _drawn(4000, 1)[0], _drawn(4000, 2, shift=-2.0)[0]
    moved = to_prevalence(chance, placing.labels.mean(), test.labels.mean())
    ones = np.ones(4000)
    assert expected_error(moved, test.labels.astype(float), ones) < expected_error(
        chance, test.labels.astype(float), ones
    )


def test_expected_error_of_constant_probabilities_is_their_distance_from_the_share() -> None:
    outcomes = np.array([1.0, 0.0, 0.0, 0.0])
    assert expected_error(np.full(4, 0.75), outcomes, np.ones(4)) == pytest.approx(0.5)


def test_probabilities_of_an_empty_bin_are_none_and_not_zero() -> None:
    found, _ = calibrate(*_drawn(400, 1), *_drawn(30, 2), OPTIONS)
    assert all(part.observed is None for part in found.bins if part.n == 0)


def test_a_small_threshold_part_calibrates_nothing() -> None:
    found, chance = calibrate(*_drawn(60, 1), *_drawn(400, 2), OPTIONS)
    assert chance is None
    assert str(found.brier) == "n/a (needs >= 100 requests in the threshold part, has 60)"
