"""What each kind of stored probe computes, against the formula in plain NumPy, SciPy or scikit-learn."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
from sklearn.decomposition import FactorAnalysis
from sklearn.neural_network import MLPClassifier

from undercurrent.errors import ProbeError, ShapeError
from undercurrent.probes import AttentionProbe, EnsembleProbe, MahalanobisProbe, MeanDifferenceProbe, MlpProbe
from undercurrent.probes.kernels import mlp

SETTINGS = {"layer": 1, "tensor_type": "residual_stream", "threshold": 1.0}
WIDTH = 24


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def rows_with_outlier(count, width=WIDTH):
    rows = normal(0, count, width)
    rows[:, 3] = 1000 + 1000 * rows[:, 3]
    return rows.astype(np.float32)


def moments(rows):
    return rows.astype(np.float64).mean(axis=0), np.cov(rows.astype(np.float64), rowvar=False)


def test_an_mlp_scores_as_scikit_learns_does():
    rows = normal(1, 300, WIDTH)
    labels = (rows[:, 0] * rows[:, 1] > 0).astype(int)
    model = MLPClassifier(hidden_layer_sizes=(16,), max_iter=2000, random_state=0).fit(rows, labels)
    (hidden, out), (hidden_bias, bias) = model.coefs_, model.intercepts_
    tensors = {"hidden.weight": hidden.T, "hidden.bias": hidden_bias, "weight": out.T, "bias": bias}
    probe = MlpProbe.from_tensors(tensors, **SETTINGS)
    probability = model.predict_proba(rows)[:, 1]
    scores = probe.score(rows.astype(np.float32))
    np.testing.assert_allclose(scipy.special.expit(scores.astype(float)), probability, atol=1e-5)


def test_a_unit_at_minus_infinity_is_not_silent():
    tensors = {
        "hidden.weight": np.ones((2, 4)), "hidden.bias": np.zeros(2), "weight": np.ones((1, 2)), "bias": np.zeros(1)
    }  # fmt: skip
    scores = mlp(tensors)(np.array([[-np.inf, 0, 0, 0], [1, 0, 0, 0]], np.float32))
    assert np.isnan(scores[0])
    assert scores[1] == 2.0


def test_a_mean_difference_is_the_distance_from_the_midpoint_along_the_means():
    positive, negative = normal(2, WIDTH).astype(np.float32), normal(3, WIDTH).astype(np.float32)
    probe = MeanDifferenceProbe.from_tensors({"positive": positive, "negative": negative}, **SETTINGS)
    ends = probe.score(np.stack([positive, negative, (positive + negative) / 2]))
    apart = np.linalg.norm(positive.astype(float) - negative)
    np.testing.assert_allclose(ends, [apart / 2, -apart / 2, 0.0], atol=1e-6)


def test_a_mahalanobis_distance_of_full_rank_is_scipys():
    rows = rows_with_outlier(400)
    mean, covariance = moments(rows)
    probe = MahalanobisProbe.from_moments(mean, covariance, rank=WIDTH - 1, **SETTINGS)
    inverse = np.linalg.inv(covariance)
    expected = [scipy.spatial.distance.mahalanobis(row, mean, inverse) for row in rows.astype(float)]
    np.testing.assert_allclose(probe.score(rows), expected, rtol=1e-4)


def test_a_mahalanobis_probe_takes_the_precision_of_any_factor_analysis():
    rows = normal(4, 500, WIDTH) + normal(5, 500, 3) @ normal(6, 3, WIDTH) * 3
    model = FactorAnalysis(3, random_state=0).fit(rows)
    precision = 1 / model.noise_variance_
    # Woodbury: the inverse of FᵀF + diag(v) is diag(1/v) - GᵀG with G = (I + F diag(1/v) Fᵀ)^-1/2 F diag(1/v).
    inner = np.linalg.cholesky(np.eye(3) + (model.components_ * precision) @ model.components_.T)
    factors = np.linalg.solve(inner, model.components_ * precision)
    tensors = {"mean": model.mean_, "precision": precision, "factors": factors}
    probe = MahalanobisProbe.from_tensors(tensors, **SETTINGS)
    centred = rows - model.mean_
    expected = np.sqrt(np.einsum("ij,jk,ik->i", centred, model.get_precision(), centred))
    np.testing.assert_allclose(probe.score(rows.astype(np.float32)), expected, rtol=1e-4)


def test_an_outlier_dimension_does_not_take_the_directions():
    rows = rows_with_outlier(600)
    rows[:, 5] = rows[:, 4] + 0.05 * rows[:, 5]  # a thin direction: to leave it is unusual
    mean, covariance = moments(rows)
    probe = MahalanobisProbe.from_moments(mean, covariance, rank=2, **SETTINGS)
    usual = probe.score(rows)
    strange = rows[:200].copy()
    strange[:, 4] += 3.0
    strange[:, 5] -= 3.0
    assert np.median(probe.score(strange)) > np.quantile(usual, 0.95)


def test_attention_gives_value_and_logit():
    tensors = {"weight": normal(7, WIDTH), "query": normal(8, WIDTH), "bias": [0.5]}
    probe = AttentionProbe.from_tensors(tensors, **SETTINGS)
    rows = normal(9, 20, WIDTH).astype(np.float32)
    expected = np.stack([rows @ tensors["weight"] + 0.5, rows @ tensors["query"]], axis=1)
    np.testing.assert_allclose(probe.score(rows), expected, rtol=1e-4, atol=1e-5)


def test_an_ensemble_scores_each_row_by_its_layer():
    tensors = {"weight": normal(10, 2, WIDTH), "bias": [1.0, -1.0], "mix": [0.5, 2.0]}
    probe = EnsembleProbe.from_tensors(tensors, **(SETTINGS | {"layers": [3, 7], "layer": 7}))
    rows = normal(11, 6, WIDTH).astype(np.float32)
    layers = np.array([7, 3, 3, 7, 7, 3], np.int32)
    expected = [row @ tensors["weight"][int(layer == 7)] + (1 if layer == 3 else -1)
                for row, layer in zip(rows, layers, strict=True)]  # fmt: skip
    np.testing.assert_allclose(probe.score_layers(rows, layers), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ProbeError, match=r"layers \[3, 5\]; accepted: \[3, 7\]"):
        probe.score_layers(rows[:2], np.array([3, 5], np.int32))
    with pytest.raises(ProbeError, match="needs the layer"):
        probe.score(rows)


def every_kind(width=WIDTH):
    yield MlpProbe.from_tensors(
        {"hidden.weight": normal(1, 7, width), "hidden.bias": normal(2, 7), "weight": normal(3, 7), "bias": [0.1]},
        **SETTINGS,
    )
    yield MeanDifferenceProbe.from_tensors({"positive": normal(4, width), "negative": normal(5, width)}, **SETTINGS)
    yield MahalanobisProbe.from_tensors(
        {"mean": normal(6, width), "precision": np.full(width, 2.0), "factors": normal(7, 3, width) / width}, **SETTINGS
    )
    yield AttentionProbe.from_tensors(
        {"weight": normal(8, width), "query": normal(9, width), "bias": [0.1]}, **SETTINGS
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width", [1, 129, 4096])
def test_scores_are_the_same_bits_in_any_batch_layout_and_order(dtype, width):
    rows = (normal(12, 37, width) * 10.0 ** np.random.default_rng(13).integers(-2, 3, (37, width))).astype(np.float32)
    rows = rows.astype(dtype)
    order = np.random.default_rng(14).permutation(37)
    for probe in every_kind(width):
        whole = probe.score(rows)
        singly = np.concatenate([probe.score(rows[at : at + 1].copy()) for at in range(37)])
        assert singly.tobytes() == whole.tobytes()
        assert probe.score(rows[order]).tobytes() == whole[order].tobytes()
        assert probe.score(np.asfortranarray(rows)).tobytes() == whole.tobytes()
        assert probe.score(rows[:0]).shape[0] == 0


def test_no_order_of_summation_but_one_is_used():
    # Rows that the directions cancel: what is left is rounding, which another order would change for all to see.
    for probe in every_kind(128):
        named = probe.artefact.tensors
        directions = {"hidden.weight", "weight", "query", "factors"} & set(named) - (
            {"weight"} if "hidden.weight" in named else set()
        )
        across = np.concatenate([named[name].astype(float) for name in sorted(directions)] or
                                [named["positive"].astype(float) - named["negative"]])  # fmt: skip
        rows = normal(15, 64, 128) * 1e13
        rows -= rows @ np.linalg.pinv(across) @ across
        whole = probe.score(rows)
        assert np.concatenate([probe.score(rows[at : at + 1]) for at in range(64)]).tobytes() == whole.tobytes()
        if not isinstance(probe, MahalanobisProbe):  # a sum of squares, in which nothing cancels
            # The rounding is there to be seen.
            assert len(np.unique(whole)) > 8


def test_rows_that_do_not_fit_are_refused():
    for probe in every_kind():
        with pytest.raises(ShapeError, match=f"width {WIDTH}"):
            probe.score(np.zeros((2, WIDTH + 1), np.float32))
        with pytest.raises(ShapeError, match="int32"):
            probe.score(np.zeros((2, WIDTH), np.int32))
