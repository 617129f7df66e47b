"""One environment for every kind of observation with every kind of action, registered as `Probe/Combined-v0`."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.spaces import space_from_dict, space_to_dict
from tests import mask_probes
from tests.nested_probes import PAIR

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (6, 6, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete([3, 2], start=[1, 0]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "dict": spaces.Dict({"place": spaces.Box(-1, 1, (2,)), "door": spaces.Discrete(3)}),
    "nested": PAIR,
}
"""The last one has an image among its leaves."""

ACTIONS: dict[str, tuple[spaces.Space[Any], Any]] = {
    "discrete": (spaces.Discrete(3), None),
    "discrete_start": (spaces.Discrete(4, start=-2), None),
    "ragged": (spaces.MultiDiscrete([3, 2, 4], start=[0, 5, -1]), None),
    "autoregressive": (mask_probes.PAIR, "autoregressive"),
    "multi_binary": (spaces.MultiBinary(3), None),
    "integer_box": (spaces.Box(-1, 1, (2,), np.int8), None),
    "hybrid": (spaces.Dict({"move": spaces.Discrete(3, start=1), "arm": spaces.Box(-1, 1, (2,))}), None),
    "nested": (mask_probes.HYBRID, {"arm.0": "beta"}),
    "gaussian": (spaces.Box(-1, 1, (2,)), None),
    "squashed": (spaces.Box(-2, 3, (2,)), "squashed_gaussian"),
    "beta": (spaces.Box(0, 5, (2, 1), np.float64), "beta"),
    "half_bounded": (spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 1]), dtype=np.float64), None),
}
"""Action space and what `action_distribution` is set to."""

MASKABLE = ("discrete", "discrete_start", "ragged", "autoregressive", "multi_binary", "integer_box", "hybrid", "nested")
"""Those with parts that have choices; of `autoregressive` the second mask depends on the first choice."""


class Combined(mask_probes.Invalid):
    """Observes samples, earns what the action adds up to, and refuses actions that are not valid.

    Episodes of three steps are truncated or terminated, as their seeds say.

    Args:
        observation: One of `OBSERVATIONS`.
        action: One of `ACTIONS`.
        masked: Whether `info` has masks.
    """

    def __init__(self, observation: str, action: str, masked: bool) -> None:
        self.masked = masked
        super().__init__(space_to_dict(ACTIONS[action][0]), conditional=masked and action == "autoregressive")
        # One of its own: a space has a generator.
        self.observation_space = space_from_dict(space_to_dict(OBSERVATIONS[observation]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.observation_space.seed(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any):
        observation, reward, _, over, info = super().step(action)
        terminates = self.base % 2 == 0
        return observation, reward, over and terminates, over and not terminates, info

    def observe(self) -> tuple[Any, dict[str, Any]]:
        self.mask = self.draw() if self.masked else {}
        return self.observation_space.sample(), {"action_mask": self.mask} if self.masked else {}

    def check(self, action: Any) -> None:
        if self.masked:
            super().check(action)
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"


gymnasium.register("Probe/Combined-v0", Combined)


class Combination(NamedTuple):
    """Names of the kinds, whether the policy has a memory, and whether there are masks."""

    observation: str
    action: str
    memory: bool
    masked: bool

    def __str__(self) -> str:
        """Without what there is not."""
        return "-".join([*self[:2], *(name for name in self._fields[2:] if getattr(self, name))])


SAMPLE = [
    Combination("vector", "discrete", memory=False, masked=True),
    Combination("vector", "half_bounded", memory=True, masked=False),
    Combination("scalar", "beta", memory=False, masked=False),
    Combination("image", "gaussian", memory=True, masked=False),
    Combination("image", "autoregressive", memory=True, masked=True),
    Combination("discrete", "discrete_start", memory=True, masked=True),
    Combination("multi_discrete", "multi_binary", memory=False, masked=True),
    Combination("multi_binary", "integer_box", memory=True, masked=True),
    Combination("dict", "ragged", memory=True, masked=True),
    Combination("dict", "hybrid", memory=False, masked=True),
    Combination("nested", "squashed", memory=False, masked=False),
    Combination("nested", "nested", memory=True, masked=True),
]
"""Every kind of observation and of action is in it, with and without memory and masks."""


def data_options(combination: Combination) -> dict[str, Any]:
    """Of a `RolloutDataModule` with short rollouts."""
    observation, action, _, masked = combination
    return {
        "env_id": "tests.combination_probes:Probe/Combined-v0",
        "env": {
            "kwargs": {"observation": observation, "action": action, "masked": masked},
            "action_mask": "info.action_mask" if masked else None,
        },
        "rollout_length": 8,
    }


def model_options(combination: Combination) -> dict[str, Any]:
    """Of an algorithm with a small network."""
    memory = {"kind": "gru", "hidden_size": 4, "sequence_length": 4} if combination.memory else None
    distribution = ACTIONS[combination.action][1]
    return {"policy": {"hidden_sizes": (4,), "action_distribution": distribution, "memory": memory}}
