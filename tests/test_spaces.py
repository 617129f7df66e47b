"""Conversion of spaces to plain data and back."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from lightning_rl.masks import ActionMask
from lightning_rl.spaces import space_from_dict, space_to_dict
from lightning_rl.validation import ConfigurationError

SPACES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    spaces.Box(np.array([-0.1, -np.inf], np.float32), np.array([1 / 3, 5], np.float32)),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(0, 1, (), np.float32),
    spaces.Box(0, 1, (0,), np.float32),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiDiscrete([[3, 4], [5, 6]]),
    spaces.Discrete(4, start=1, dtype=np.int32),
    spaces.MultiDiscrete([3, 4], dtype=np.uint8),
    spaces.MultiBinary(5),
    spaces.MultiBinary([2, 3]),
    ActionMask(4),
    ActionMask([3, 4], given="arm.0"),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (1,)))),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Dict({"c": spaces.MultiBinary(2)})}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_space_equals_itself_after_plain_data(space, tmp_path):
    description = space_to_dict(space)
    assert space_from_dict(description) == space
    assert space_from_dict(description).dtype == space.dtype
    assert space_from_dict(json.loads(json.dumps(description))) == space
    torch.save(description, tmp_path / "space.pt")
    assert space_from_dict(torch.load(tmp_path / "space.pt", weights_only=True)) == space


def test_description_is_short_where_all_bounds_agree():
    image = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    expected = {"type": "Box", "low": 0, "high": 255, "shape": [84, 84, 4], "dtype": "uint8"}
    assert space_to_dict(image) == expected
    assert space_to_dict(spaces.Discrete(3, start=1)) == {"type": "Discrete", "n": 3, "start": 1}


@pytest.mark.parametrize("space", SPACES[:2], ids=str)
def test_descriptions_and_spaces_are_returned_unchanged(space):
    description = space_to_dict(space)
    assert space_to_dict(description) is description
    assert space_from_dict(space) is space


def test_unsupported_space_is_refused():
    with pytest.raises(ConfigurationError, match=r"^space.name: Text is not supported; expected Box, Discrete"):
        space_to_dict(spaces.Dict(name=spaces.Text(5)))


@pytest.mark.parametrize("description", [{"type": "Ball"}, {}, {"type": "Discrete"}, {"type": "Box", "low": 0}])
def test_invalid_description_is_refused(description):
    with pytest.raises(ConfigurationError, match=r"^space: .*expected a description made by space_to_dict$"):
        space_from_dict(description)


def test_action_masks_differ_from_multi_binary_and_work_in_vector_environments():
    mask = ActionMask(3)
    assert ActionMask(spaces.Discrete(3).n) == mask  # an integer of NumPy, as spaces have
    assert mask == ActionMask([3]) and mask not in (ActionMask(4), spaces.MultiBinary(3), ActionMask(3, given="a"))
    assert spaces.MultiBinary([3]) != mask
    batch = create_empty_array(mask, 2)
    concatenate(mask, [np.array([1, 0, 1], np.int8)] * 2, batch)
    assert batch.tolist() == [[1, 0, 1]] * 2 and batch.dtype == np.int8
    assert batch_space(mask, 2).contains(batch) and mask.contains(mask.sample())
