"""Gymnasium spaces as plain data, and dtypes and layouts of their observations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.masks import ActionMask
from lightning_rl.nested import Nested, map_space
from lightning_rl.validation import ConfigurationError

SpaceDict = dict[str, Any]
SpaceOrDict = spaces.Space[Any] | SpaceDict
"""A space, or its description by `space_to_dict`."""
# Hints for unsupported observation spaces, by the end of the class name.
_WRAPPERS = {
    "MissionSpace": "; the wrapper minigrid.wrappers.ImgObsWrapper keeps the image alone",
    "Text": "; the wrapper gymnasium.wrappers.FilterObservation keeps chosen keys of a Dict",
}
_OTHER_WRAPPER = "; a gymnasium.ObservationWrapper in --data.env.wrappers can convert it"


def _bound(array: np.ndarray) -> Any:  # a number or nested lists of numbers
    return array.flat[0].item() if array.size and (array == array.flat[0]).all() else array.tolist()


def space_to_dict(space: SpaceOrDict, field: str = "space") -> SpaceDict:
    """Describe a space by plain Python values; a description is returned unchanged.

    A space is any nesting of `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, `ActionMask`, `Dict` and `Tuple`. An
    unsupported type or key, or a part without parts, raises a `ConfigurationError` with its path from `field`.
    """
    match space:
        case dict():
            return space
        case spaces.Dict() | spaces.Tuple():
            return _describe_nested(space, field)
        case spaces.Box():
            bounds = {"low": _bound(space.low), "high": _bound(space.high)}
            return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": space.dtype.name}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), **_dtype(space)}
        case spaces.MultiDiscrete():
            start = space.start.tolist()
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": start, **_dtype(space)}
        case ActionMask():
            return {"type": "ActionMask", "n": list(space.shape), "given": space.given}
        case spaces.MultiBinary():
            # Gymnasium distinguishes a number from a shape of one dimension.
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    name = type(space).__name__
    hint = next((hint for end, hint in _WRAPPERS.items() if name.endswith(end)), _OTHER_WRAPPER)
    raise ConfigurationError(
        f"{field}: {name} is not supported; expected Box, Discrete, MultiDiscrete, MultiBinary, "
        f"or a Dict or Tuple of these{hint if field.startswith('observation_space') else ''}"
    )


def _dtype(space: spaces.Discrete | spaces.MultiDiscrete) -> SpaceDict:
    # Older releases of Gymnasium have no other dtype for `Discrete`.
    return {} if space.dtype == np.int64 else {"dtype": np.dtype(space.dtype).name}


def _describe_nested(space: spaces.Dict | spaces.Tuple[Any], field: str) -> SpaceDict:
    if not len(space.spaces):
        raise ConfigurationError(f"{field}: {space} is empty; expected a space with at least one part")
    if isinstance(space, spaces.Tuple):
        parts = [space_to_dict(part, f"{field}.{index}") for index, part in enumerate(space)]
        return {"type": "Tuple", "spaces": parts}
    for key in space.spaces:
        # Parts are named by paths such as `arm.0`, and submodules after the parts.
        if not isinstance(key, str) or not key or set(key) & {".", ":"}:
            raise ConfigurationError(f"{field}: the key {key!r} is not supported; expected a name without '.' and ':'")
    return {"type": "Dict", "spaces": {key: space_to_dict(part, f"{field}.{key}") for key, part in space.items()}}


def space_from_dict(spec: SpaceOrDict) -> spaces.Space[Any]:
    """Return the space that `space_to_dict` described, or a space unchanged; else raise a `ConfigurationError`."""
    try:
        return _build(spec)
    except Exception as error:  # Gymnasium asserts, and raises errors of several types
        problem = f"is no space ({type(error).__name__}: {error})"
        raise ConfigurationError(f"space: {spec!r} {problem}: expected a description made by space_to_dict") from error


def _build(spec: SpaceOrDict) -> spaces.Space[Any]:
    if isinstance(spec, spaces.Space):
        return spec
    options = {**spec}
    match options.pop("type", None):
        case "Box":
            shape, dtype = tuple(options["shape"]), np.dtype(options["dtype"])
            low, high = (np.broadcast_to(np.asarray(options[key], dtype), shape) for key in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(**options)
        case "MultiDiscrete":
            return spaces.MultiDiscrete(**options)
        case "MultiBinary":
            return spaces.MultiBinary(**options)
        case "ActionMask":
            return ActionMask(**options)
        case "Dict":
            return spaces.Dict({key: _build(part) for key, part in options["spaces"].items()})
        case "Tuple":
            return spaces.Tuple([_build(part) for part in options["spaces"]])
    raise ValueError("it has no known type")


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether `space` holds one image: a uint8 `Box` of three dimensions."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def image_layout(shape: Sequence[int]) -> tuple[bool, int, int, int]:
    """Return whether channels come last, and the number of channels, height and width.

    Gymnasium has both orders: stacked frames have channels first, color images channels last.
    """
    first, middle, last = shape
    is_square = middle in (first, last)
    channels_last = first == middle != last if is_square else last < first
    return (True, last, first, middle) if channels_last else (False, first, middle, last)


def observation_dtype(space: spaces.Space[Any], parameter_dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype in which a rollout stores observations of a leaf.

    Integers keep their dtype; floating-point numbers are float32, or float64 with float64 parameters.
    """
    assert space.dtype is not None
    if not np.issubdtype(space.dtype, np.floating):
        return np.dtype(space.dtype)
    return np.dtype(np.float64 if parameter_dtype == torch.float64 else np.float32)


def sampled_observations(space: spaces.Space[Any], parameter_dtype: torch.dtype, num_rows: int, seed: int) -> Nested:
    """Return `num_rows` copies of one random observation, with masks that allow everything, for policies of a dtype."""

    def rows(leaf: spaces.Space[Any]) -> Tensor:
        leaf = copy.deepcopy(leaf)  # seeding changes the space
        if isinstance(leaf, spaces.Box):  # networks overflow for numbers near the largest float, which some bounds are
            leaf.bounded_below, leaf.bounded_above = leaf.low > -1e6, leaf.high < 1e6
        leaf.seed(seed)
        row = np.asarray(leaf.sample()).astype(observation_dtype(leaf, parameter_dtype))
        return torch.from_numpy(np.stack([np.ones_like(row) if isinstance(leaf, ActionMask) else row] * num_rows))

    return map_space(rows, space)
