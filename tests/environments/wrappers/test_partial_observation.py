"""A wrapper that hides entries of an observation."""

import gymnasium
import numpy as np
import pytest

from lightning_rl.environments import PartialObservation, SplitObservation
from lightning_rl.validation import ConfigurationError


def test_only_the_given_entries_are_visible():
    whole, partial = gymnasium.make("CartPole-v1"), PartialObservation(gymnasium.make("CartPole-v1"), [2, 0])
    space = partial.observation_space
    assert np.array_equal(space.high, whole.observation_space.high[[2, 0]]) and space.dtype == np.float32
    assert np.array_equal(partial.reset(seed=0)[0], whole.reset(seed=0)[0][[2, 0]])
    for action in (0, 1, 1):
        shown, expected = partial.step(action)[0], whole.step(action)[0]
        assert np.array_equal(shown, expected[[2, 0]]) and shown in space


@pytest.mark.parametrize(
    ("env_id", "indices", "message"),
    [
        ("CartPole-v1", [4], r"indices=\[4\] is not valid: expected some of the entries 0 to 3"),
        ("CartPole-v1", [], r"indices=\[\] is not valid"),
        ("CartPole-v1", [-1], r"indices=\[-1\] is not valid"),
        ("FrozenLake-v1", [0], "expected observations that are vectors, not Discrete"),
    ],
)
def test_invalid_entries_and_observations_are_errors(env_id, indices, message):
    with pytest.raises(ConfigurationError, match=message):
        PartialObservation(gymnasium.make(env_id), indices)


def test_parts_of_a_vector_are_a_dict():
    whole = gymnasium.make("CartPole-v1")
    split = SplitObservation(gymnasium.make("CartPole-v1"), {"position": [0, 2], "velocity": [3, 1]})
    observation, _ = whole.reset(seed=1)
    parts, _ = split.reset(seed=1)
    assert parts["position"].tolist() == observation[[0, 2]].tolist()
    assert parts["velocity"].tolist() == observation[[3, 1]].tolist()
    assert split.observation_space["position"].high.tolist() == whole.observation_space.high[[0, 2]].tolist()


@pytest.mark.parametrize("parts", [{}, {"a": []}, {"a": [4]}, {"a": [0], "b": [-1]}])
def test_parts_must_exist(parts):
    with pytest.raises(ConfigurationError, match="parts"):
        SplitObservation(gymnasium.make("CartPole-v1"), parts)
