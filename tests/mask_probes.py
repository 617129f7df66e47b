"""Environments in which some actions are invalid, registered under `Probe/…` as those of `tests.probes`."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.nested import leaves, map_leaves, map_space, space_leaves
from lightning_rl.spaces import space_from_dict, space_to_dict

DISCRETE = spaces.Discrete(5, start=2)
RAGGED = spaces.MultiDiscrete([3, 2, 4])
PAIR = spaces.MultiDiscrete([4, 3])
HYBRID = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([3, 2]), spaces.Discrete(4)]),
        "lamps": spaces.MultiBinary(3),
        "steps": spaces.Box(-1, 1, (2,), np.int8),
    }
)
UNITS = spaces.Dict({"target": spaces.Discrete(3), "unit": spaces.Discrete(4)})
SPACES = {"discrete": DISCRETE, "ragged": RAGGED, "pair": PAIR, "hybrid": HYBRID, "units": UNITS}


def draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A mask of one component, which allows at least one choice; of each row."""
    allowed = rng.random(shape) < 0.4
    return allowed | (np.arange(shape[-1]) == rng.integers(shape[-1], size=(*shape[:-1], 1)))


def draw_leaf(space: spaces.Space[Any], rng: np.random.Generator) -> np.ndarray:
    """A mask of a leaf in the documented form."""
    if isinstance(space, spaces.Discrete):
        return draw((int(space.n),), rng)
    if isinstance(space, spaces.MultiBinary):
        return draw((*space.shape, 2), rng)
    if isinstance(space, spaces.MultiDiscrete):
        return np.concatenate([draw((int(n),), rng) for n in space.nvec.ravel()])
    if np.issubdtype(space.dtype, np.integer):
        return np.concatenate([draw((3,), rng) for _ in range(2)])
    return draw(space.shape, rng)


class Invalid(gymnasium.Env[Any, Any]):
    """Refuses actions that its mask does not allow; masks are drawn anew at every step. Episodes of three steps.

    Args:
        action_space: Description of one of `SPACES`.
        where: `info`, `observation` or `method`: what says the mask.
        conditional: The mask of the second component of `MultiDiscrete([4, 3])` depends on the first one's choice.
        scripted: Masks depend on the number of the episode; otherwise on its seed.
        nothing_at: Step of the second and later episodes at which nothing is allowed, if any.
    """

    def __init__(
        self,
        action_space: dict[str, Any],
        where: str = "info",
        conditional: bool = False,
        scripted: bool = False,
        nothing_at: int | None = None,
    ) -> None:
        self.action_space = space_from_dict(action_space)
        self.where, self.conditional, self.scripted, self.nothing_at = where, conditional, scripted, nothing_at
        self.episode, self.count = -1, 0
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if where == "observation":
            self.base = 0
            self.observation_space = spaces.Dict({"legal": space_of(self.draw()), "place": self.observation_space})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        self.base = self.episode if self.scripted else int(self.np_random.integers(2**31))
        return self.observe()

    def step(self, action: Any):
        self.check(action)
        self.count += 1
        observation, info = self.observe()
        return observation, float(sum(np.sum(x) for x in leaves(action))), False, self.count == 3, info

    def observe(self) -> tuple[Any, dict[str, Any]]:
        self.mask = self.draw()
        if self.count == self.nothing_at and self.episode > 1:
            self.mask = map_leaves(np.zeros_like, self.mask)
        # Nothing that the episode's seed does not lead to again.
        place = np.array([self.episode if self.scripted else self.base % 7, self.count], np.float32)
        if self.where == "observation":
            return {"place": place, "legal": map_leaves(lambda x: x.astype(np.float32), self.mask)}, {}
        return place, {"action_mask": self.mask} if self.where == "info" else {}

    def action_masks(self) -> Any:
        return self.mask

    def draw(self) -> Any:
        rng = np.random.default_rng([self.base, self.count])
        if self.conditional:
            first, second = (int(n) for n in (self.action_space.nvec if self.action_space == PAIR else (4, 3)))
            pair = draw((first,), rng), draw((first, second), rng)
            return {"0": pair[0], "1": pair[1]}
        masks = map_space(lambda leaf: draw_leaf(leaf, rng), self.action_space)
        return by_place(masks)

    def check(self, action: Any) -> None:
        """Raise unless the mask allows an action."""
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.conditional:
            assert self.mask["0"][action[0]] and self.mask["1"][action[0], action[1]], (action, self.mask)
            return
        masks = dict(zip(paths(self.mask), leaves(self.mask), strict=True))
        for (path, space), x in zip(space_leaves(self.action_space).items(), leaves(action), strict=True):
            if path in masks:
                assert allows(space, masks[path], x), (path, x, masks[path])


def space_of(masks: Any) -> spaces.Space[Any]:
    """Numbers, which nothing tells from others."""
    if isinstance(masks, dict):
        return spaces.Dict({key: space_of(part) for key, part in masks.items()})
    return spaces.Box(0, 1, masks.shape, np.float32)


def by_place(masks: Any) -> Any:
    """Tuples as dicts: a form that can be a part of an observation too."""
    if isinstance(masks, tuple):
        masks = {str(place): part for place, part in enumerate(masks)}
    if isinstance(masks, dict):
        return {key: by_place(part) for key, part in masks.items()}
    return masks


def paths(masks: Any, path: str = "") -> list[str]:
    if isinstance(masks, dict):
        return [p for key, part in masks.items() for p in paths(part, f"{path}.{key}".strip("."))]
    return [path]


def allows(space: spaces.Space[Any], mask: np.ndarray, action: Any) -> bool:
    """Whether the mask of a leaf allows an action."""
    if isinstance(space, spaces.Discrete):
        return bool(mask[action - space.start])
    if isinstance(space, spaces.MultiBinary):
        return all(row[bit] for row, bit in zip(mask, action, strict=True))
    if np.issubdtype(space.dtype, np.floating):
        return not action[mask == 0].any()
    counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else (3, 3)
    start = space.start if isinstance(space, spaces.MultiDiscrete) else space.low
    offsets = np.cumsum([0, *counts[:-1]])
    return bool(mask[offsets + (np.asarray(action) - start).astype(int)].all())


class InvalidVector(SyncVectorEnv):
    """Several of them, as an environment that comes vectorised.

    Args:
        num_envs: How many.
        resets: How it does.
        kwargs: Of each.
    """

    def __init__(self, num_envs: int, resets: str = "NextStep", **kwargs: Any) -> None:
        super().__init__([lambda: Invalid(**kwargs)] * num_envs, autoreset_mode=AutoresetMode(resets))

    def action_masks(self) -> np.ndarray:
        return np.stack([env.action_masks() for env in self.envs])


class AddMask(gymnasium.vector.VectorWrapper):
    """Says that a vector environment of two actions only takes the first one."""

    def reset(self, **kwargs: Any):
        observations, infos = self.env.reset(**kwargs)
        return observations, {**infos, "only": np.array([[True, False]] * self.num_envs)}

    def step(self, actions: Any):
        observations, *rest, infos = self.env.step(actions)
        return observations, *rest, {**infos, "only": np.array([[True, False]] * self.num_envs)}


class Lights(gymnasium.Env[int, int]):
    """One of many lights is on; pressing its own button earns 1. Ten steps an episode; most buttons are invalid.

    Args:
        size: Number of lights.
        valid: Number of valid buttons at each step, the right one among them.
    """

    def __init__(self, size: int = 80, valid: int = 5) -> None:
        self.size, self.valid = size, valid
        self.observation_space = self.action_space = spaces.Discrete(size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.count = 0
        self.light = int(self.np_random.integers(self.size))
        return self.light, {}

    def step(self, action: int):
        reward = float(action == self.light)
        self.count += 1
        self.light = int(self.np_random.integers(self.size))
        return self.light, reward, False, self.count == 10, {}

    def action_masks(self) -> np.ndarray:
        mask = np.zeros(self.size, bool)
        mask[self.np_random.permutation(self.size)[: self.valid - 1]] = True
        mask[self.light] = True
        return mask


def kwargs_of(name: str, **more: Any) -> dict[str, Any]:
    """Arguments of an `Invalid` with one of `SPACES`."""
    return {"action_space": space_to_dict(SPACES[name]), **more}


def source_of(where: str) -> str:
    """The option for what an `Invalid` says."""
    return {"info": "info.action_mask", "observation": "observation.legal", "method": "method.action_masks"}[where]


gymnasium.register("Probe/Invalid-v0", Invalid, vector_entry_point=InvalidVector)
gymnasium.register("Probe/Lights-v0", Lights)
CASES: Sequence[tuple[str, dict[str, Any]]] = (
    ("discrete", {}),
    ("ragged", {}),
    ("hybrid", {}),
    ("pair", {"conditional": True}),
)
"""A space, and arguments."""
