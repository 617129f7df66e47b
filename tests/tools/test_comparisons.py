"""Comparisons over runs and environments, against numbers of rliable."""

import numpy as np
import pytest

from lightning_rl.tools.curves import (
    interquartile_mean,
    interval,
    min_max_normalized,
    performance_profile,
    probability_of_improvement,
)
from tests.vectors.load import load

RLIABLE = load("rliable/rliable")
SCORES = {name: np.array(scores) for name, scores in RLIABLE["scores"].items()}
THRESHOLDS = np.array(RLIABLE["thresholds"])


def check(statistic, scores, value, bounds):
    low, high = interval(statistic, *scores, resamples=RLIABLE["resamples"])
    np.testing.assert_allclose(statistic(*scores), np.squeeze(value), rtol=0, atol=1e-6)
    np.testing.assert_allclose([low, high], np.squeeze(bounds), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_performance_profiles_and_their_intervals_equal_rliable(name):
    def profile(scores):
        return performance_profile(scores, THRESHOLDS)

    check(profile, [SCORES[name]], RLIABLE["profiles"][name], RLIABLE["profile_intervals"][name])


@pytest.mark.parametrize("name", SCORES)
def test_interquartile_means_and_their_intervals_equal_rliable(name):
    check(
        interquartile_mean,
        [SCORES[name]],
        RLIABLE["interquartile_means"][name],
        RLIABLE["interquartile_mean_intervals"][name],
    )


@pytest.mark.parametrize("pair", RLIABLE["improvements"])
def test_probabilities_of_improvement_and_their_intervals_equal_rliable(pair):
    scores = [SCORES[name] for name in pair.split(",")]
    check(probability_of_improvement, scores, RLIABLE["improvements"][pair], RLIABLE["improvement_intervals"][pair])


def test_probabilities_of_improvement_of_a_pair_add_up_to_one():
    forth = probability_of_improvement(SCORES["first"], SCORES["third"])
    back = probability_of_improvement(SCORES["third"], SCORES["first"])
    assert forth + back == pytest.approx(1)
    assert probability_of_improvement(SCORES["first"], SCORES["first"]) == pytest.approx(0.5)


def test_scores_are_normalized_by_the_lowest_and_highest_of_each_environment():
    normalized = min_max_normalized({"a": np.array([[0.0, 5.0], [10.0, 5.0]]), "b": np.array([[5.0, 5.0]])})
    assert normalized["a"].tolist() == [[0, 0], [1, 0]]
    assert normalized["b"].tolist() == [[0.5, 0]]
