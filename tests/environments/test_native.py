"""Gymnasium's own vectorised CartPole."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.native import BinaryActions
from tests.probes import make_batch

ACTIONS = {
    "of 0 and 1": np.array([0, 1, 1]),
    "too large": np.array([0, 1, 2]),
    "too large in one bit of several": np.array([0, 1, 3]),
    "negative": np.array([0, 1, -1]),
    "narrower": np.array([0, 1, 1], np.int8),
    "narrower and too large": np.array([0, 2, 1], np.int8),
    "of floats": np.array([0.0, 1.0, 1.0]),
    "too few": np.array([0, 1]),
    "with one axis more": np.array([[0, 1, 1]]),
    "a list": [0, 1, 1],
    "a list that is too long": [0, 1, 1, 1],
    "no array": "011",
}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_binary_actions_contain_is_what_gymnasium_says(name: str) -> None:
    actions: Any = ACTIONS[name]
    assert BinaryActions(3).contains(actions) == spaces.MultiDiscrete([2, 2, 2]).contains(actions)


def test_binary_actions_equal_the_space_of_the_batch() -> None:
    environments = make_batch("CartPole-v1", 3, backend="native")
    assert type(environments.env.action_space) is BinaryActions
    assert environments.env.action_space == spaces.MultiDiscrete([2, 2, 2])
    environments.close()


@pytest.mark.parametrize("wrong", [2, -1])
def test_an_action_that_cartpole_does_not_have_ends_with_its_own_complaint(wrong: int) -> None:
    environments = make_batch("CartPole-v1", 3, backend="native")
    environments.reset()
    environments.step(np.array([0, 1, 0]))
    with pytest.raises(EnvironmentFailure, match=r"raised in step: AssertionError: array\(\[ ?0, +1, +-?\d\]\)"):
        environments.step(np.array([0, 1, wrong]))
    environments.close()
