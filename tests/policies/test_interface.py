"""Conversion of actions for the environment."""

import numpy as np
import pytest
from gymnasium import spaces

from lightning_rl.policies.interface import to_environment


def test_discrete_actions_are_shifted_by_the_start_of_the_space():
    action = np.array([0, 2])
    assert to_environment(spaces.Discrete(3, start=-1), action).tolist() == [-1, 1]
    assert to_environment(spaces.Discrete(3), action) is action
    small = to_environment(spaces.Discrete(3, start=5, dtype=np.int16), action)
    assert small.tolist() == [5, 7] and small.dtype == np.int16


def test_continuous_actions_are_clipped_shaped_and_cast_in_a_copy():
    space = spaces.Box(np.array([[-1, -2]], np.float32), np.array([[1, np.inf]], np.float32), (1, 2))
    action = np.array([[3.0, -3.0], [0.25, 1e9]])
    converted = to_environment(space, action)
    assert converted.tolist() == [[[1.0, -2.0]], [[0.25, 1e9]]]
    assert converted.dtype == np.float32
    assert action.tolist() == [[3.0, -3.0], [0.25, 1e9]]
    assert all(space.contains(a) for a in converted)


def test_choices_are_shifted_shaped_and_cast():
    space = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, -1], [10, 0]], dtype=np.int32)
    converted = to_environment(space, np.array([[1, 2, 3, 4], [0, 0, 0, 0]]))
    assert converted.tolist() == [[[1, 1], [13, 4]], [[0, -1], [10, 0]]]
    assert converted.dtype == np.int32
    switches = to_environment(spaces.MultiBinary((2, 1)), np.array([[0, 1]], np.int8))
    assert switches.tolist() == [[[0], [1]]]
    assert switches.dtype == np.int8


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(np.int8, -128, 127), (np.uint8, 0, 255), (np.uint64, 2**64 - 3, 2**64 - 1), (np.int64, -(2**63), 3 - 2**63)],
)
def test_integer_box_actions_count_from_the_low_bound(dtype, low, high):
    space = spaces.Box(low, high, (2,), dtype)
    converted = to_environment(space, np.array([[0, high - low], [1, 0]]))
    assert converted.tolist() == [[low, high], [low + 1, low]]
    assert all(space.contains(row) for row in converted)


def test_boolean_box_gets_booleans():
    space = spaces.Box(0, 1, (2,), np.bool_)
    assert to_environment(space, np.array([[0, 1]])).tolist() == [[False, True]]


def test_nested_actions_are_converted_part_by_part():
    space = spaces.Dict({"b": spaces.Discrete(2, start=5), "a": spaces.Tuple([spaces.Box(0, 1, (1,))])})
    converted = to_environment(space, {"b": np.array([0, 1]), "a": (np.array([[-3.0], [0.5]]),)})
    assert converted["b"].tolist() == [5, 6]
    assert converted["a"][0].tolist() == [[0.0], [0.5]]
    assert isinstance(converted["a"], tuple)
