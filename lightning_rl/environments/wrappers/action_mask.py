"""Adds the masks of valid actions to observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import setitem
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper

from lightning_rl.environments.contract import ABSENT, Array, EnvironmentFailure, WorkerFailure, summary
from lightning_rl.environments.wrappers.history import OBSERVATION, History
from lightning_rl.masks import ActionMask, MaskLayout, component_names, find_masks, has_choices
from lightning_rl.nested import (
    Nested,
    join,
    map_leaves,
    map_space,
    map_stacked,
    nested_paths,
    part_at,
    replace_leaves,
    space_leaves,
)
from lightning_rl.validation import ConfigurationError, check

MASK = "action_mask"
"""Key of the masks in the new observations."""
MASKS = "lightning_rl/masks"
"""Key of the masks in the `info` of an environment with `ReadMasks`, and of their space in its metadata."""


def check_source(source: object) -> None:
    """Raise a `ConfigurationError` unless `source` is `info.<key>`, `observation.<path>` or `method.<name>`."""
    kind, _, name = source.partition(".") if isinstance(source, str) else ("", "", "")
    expected = "'info.<key>', 'observation.<path>', 'method.<name>' or None"
    check(kind in ("info", "observation", "method") and bool(name), "env.action_mask", source, expected)


class MaskSource:
    """The source of masks (the option `env.action_mask`), and the spaces of one environment.

    Attributes:
        kind: `info`, `observation` or `method`.
        name: The key, path or name after the kind.
        mask_space: Space of the masks.
        space: Space of the observations with masks.
        layout: Assigns the masks to the components of actions.
    """

    def __init__(self, source: str, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.source = source
        self.kind, _, self.name = source.partition(".")
        self._action_space = action_space
        leaves = {path: leaf for path, leaf in space_leaves(action_space).items() if has_choices(leaf)}
        self._names = {path: component_names(leaf, path) for path, leaf in leaves.items()}
        self._components = [name for names in self._names.values() for name in names]
        self.space = observation_space
        self._is_dict = isinstance(observation_space, spaces.Dict)
        if self.kind == "observation":
            self._find_in_observations()
        elif self._is_dict:
            expected = f"'observation.{MASK}', since observations have a part of that name already"
            taken = MASK in observation_space.spaces  # type: ignore[attr-defined]
            check(not taken, "env.action_mask", source, expected)

    def learn(self, env: Any, find: Callable[[dict[str, Any]], Any]) -> None:  # single or vectorized
        """Reset an environment once, and set the space of masks from the masks that `find` returns for its `info`.

        A failed reset raises an `EnvironmentFailure`; masks that are missing or do not fit the action space raise a
        `ConfigurationError`.
        """
        try:
            info = env.reset()[1]
        except (Exception, SystemExit) as error:
            raise EnvironmentFailure(
                f"an environment raised in the reset that shows its action masks: {summary(error)}"
            ) from error
        try:
            masks = find(info)
        except (LookupError, AttributeError) as error:
            known = f"; the info of a reset has {', '.join(info) or 'nothing'}" if self.kind == "info" else ""
            raise ConfigurationError(
                f"env.action_mask={self.source!r} is not valid: {summary(error)}{known}"
            ) from error
        self.take_space(self._space_of(self.by_name(masks)))

    def take_space(self, mask_space: spaces.Space[Any]) -> None:
        """Set the space of masks, and add the masks to the observation space."""
        self._set_space(mask_space)
        beside = dict(self.space.spaces) if isinstance(self.space, spaces.Dict) else {OBSERVATION: self.space}
        self.space = spaces.Dict({**beside, MASK: self.mask_space})

    def by_name(self, masks: Any, leading: int = 0, path: str = "") -> Any:
        """Return nested masks as dicts without entries that are None; entries of tuples get their index as key.

        Masks of all components of a leaf are concatenated unless one depends on another component. In a batch,
        `leading=1`, names with an underscore are Gymnasium's own.
        """
        if isinstance(masks, tuple) and any(np.ndim(entry) or entry is None for entry in masks):
            masks = {str(place): entry for place, entry in enumerate(masks)}
        if not isinstance(masks, Mapping):
            return _stacked(masks) if leading and getattr(masks, "dtype", None) == np.dtype(object) else masks
        parts = {
            key: self.by_name(part, leading, join(path, key))
            for key, part in zip(map(str, masks), masks.values(), strict=True)
            if part is not None and not (leading and key.startswith("_"))
        }
        names = [join(path, key) for key in parts]
        if names == self._names.get(path) and all(np.ndim(part) == leading + 1 for part in parts.values()):
            return np.concatenate(list(parts.values()), -1)
        return parts

    def read(self, masks: Nested) -> Nested:
        """Return masks as arrays `[..., *shape]`; a wrong shape or entries besides 0 and 1 raise a `ValueError`."""
        return map_leaves(self._to_bits, self._paths, masks)

    def _to_bits(self, path: str, mask: Any) -> np.ndarray[Any, Any]:
        given = np.asarray(mask)
        if given.shape[given.ndim - len(shape := self._shapes[path]) :] != shape:
            raise ValueError(f"{join(MASK, path).rstrip('.')} of shape {given.shape}: expected {shape}")
        bits = np.array(given != 0, np.int8)
        if given.dtype != bool and not (given == bits).all():
            entry = given[given != bits].flat[0]
            name = f"action mask {path}".rstrip()
            raise ValueError(f"{name} ({self.source}) has the entry {entry}: expected 1 for valid choices, else 0")
        return bits

    def everything(self, *leading: int) -> Nested:
        return map_space(lambda leaf: np.ones((*leading, *(leaf.shape or ())), np.int8), self.mask_space)

    def observed(self, observation: Nested) -> tuple[Nested, Nested]:
        """Return the masks in an observation, and the observation with these masks as integers."""
        masks = self.read(part_at(observation, self.name))
        return masks, _replaced(observation, self.name, masks)

    def beside(self, observation: Nested, masks: Nested) -> Nested:
        return {**observation, MASK: masks} if self._is_dict else {OBSERVATION: observation, MASK: masks}

    def complaint(self, component: str) -> str:
        """Return the message for a component of the action that has no valid choice."""
        what = f"component {component!r} of the action" if component else "the action"
        return f"the action mask ({self.source}) allows nothing to {what}: expected at least one choice"

    def _set_space(self, mask_space: spaces.Space[Any]) -> None:
        self.mask_space = mask_space
        self.layout = MaskLayout(self._action_space, mask_space)
        self._paths = nested_paths(mask_space)
        self._shapes = {path: leaf.shape or () for path, leaf in space_leaves(mask_space).items()}

    def _find_in_observations(self) -> None:
        try:
            found = part_at(self.space, self.name)
        except (LookupError, TypeError, ValueError):
            raise ConfigurationError(
                f"env.action_mask={self.source!r} is not valid: expected the path of a part of {self.space}"
            ) from None

        def mask(path: str, leaf: spaces.Space[Any]) -> spaces.Space[Any]:
            return leaf if isinstance(leaf, ActionMask) else self._leaf(path, leaf.shape or ())

        mask_space = replace_leaves(mask, found)
        masks = space_leaves(mask_space, self.name)
        self.space = replace_leaves(lambda path, leaf: masks.get(path, leaf), self.space)
        find_masks(self.space)
        self._set_space(mask_space)

    def _space_of(self, masks: Any, path: str = "") -> spaces.Space[Any]:
        if not isinstance(masks, dict):
            return self._leaf(path, np.shape(masks))
        return spaces.Dict({key: self._space_of(part, join(path, key)) for key, part in masks.items()})

    def _leaf(self, path: str, shape: tuple[int, ...]) -> ActionMask:
        """Return the space of a mask; with two dimensions it depends on the previous component."""
        check(bool(shape) and all(shape), f"{MASK}.{path}".rstrip("."), shape, "an array with an entry for each choice")
        place = self._components.index(path) if path in self._components else 0
        return ActionMask(shape, self._components[place - 1] if place and len(shape) == 2 else None)


def _replaced(observation: Nested, path: str, part: Nested) -> Nested:
    key, _, rest = path.partition(".")
    return {**observation, key: _replaced(observation[key], rest, part) if rest else part}


def _stacked(rows: Any) -> np.ndarray[Any, Any]:  # an array with one object, or None, per environment
    like = np.asarray(next((row for row in rows if row is not None), 1))
    return np.stack([np.ones_like(like) if row is None else np.asarray(row) for row in rows])


class ReadMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reads and checks the masks of one environment in its process, and puts them into its `info`.

    Observed masks are checked only. For other masks the constructor resets the environment once, see
    `MaskSource.learn`. A mask that allows nothing although the episode continues raises a `ValueError`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], source: str) -> None:
        super().__init__(env)
        self._source = MaskSource(source, env.observation_space, env.action_space)
        if self._source.kind != "observation":
            self._source.learn(env, self._find)
            self.metadata = {**env.metadata, MASKS: self._source.mask_space}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._with_masks(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and read the masks unless the episode has ended: environments may return none then."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            info = self._with_masks(observation, info)
        return observation, reward, terminated, truncated, info

    def _find(self, info: dict[str, Any]) -> Any:
        name = self._source.name
        return info[name] if self._source.kind == "info" else self.env.get_wrapper_attr(name)()

    def _with_masks(self, observation: Nested, info: dict[str, Any]) -> dict[str, Any]:
        source = self._source
        if is_observed := source.kind == "observation":
            masks = source.observed(observation)[0]
        else:
            masks = source.read(source.by_name(self._find(info)))
        if (found := source.layout.nothing_allowed(masks)) is not None:
            raise ValueError(source.complaint(found[0]))
        return info if is_observed else {**info, MASKS: masks}


class MaskedActions(History):
    """Adds masks from `info`, from a method or from observations to the observations.

    If the environments have no `ReadMasks`, the constructor resets them once, see `MaskSource.learn`; their masks are
    arrays `[B, ...]`, or arrays of objects. A mask that allows nothing although the episode continues raises a
    `WorkerFailure`.
    """

    def __init__(self, space: spaces.Space[Any], env: VectorEnv[Any, Any, Any], source: str) -> None:
        self._env = env
        self._source = MaskSource(source, space, env.single_action_space)
        self._are_read = MASKS in (env.metadata or {})
        if self._are_read:
            self._source.take_space(env.metadata[MASKS])
        elif self._source.kind != "observation":
            name, in_info = self._source.name, self._source.kind == "info"
            self._source.learn(env, lambda infos: _first(infos[name] if in_info else _called(env, name)))
        super().__init__(self._source.space, self._source.everything(env.num_envs))

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        self._take(which, observations, infos)

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Read the masks; masks of final observations, and of rows without an agent, allow every choice."""
        without = ended | infos.get(ABSENT, False)
        map_leaves(lambda masks: setitem(masks, without, 1), self.memory)
        self._take(~ended, observations, infos)

    def show(self, observations: Nested) -> Nested:
        if self._source.kind == "observation":
            return self._source.observed(observations)[1]
        return self._source.beside(observations, self.memory)

    def _take(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        source = self._source
        if ABSENT in infos:
            which = which & ~infos[ABSENT]
        if not which.any():
            return
        if source.kind == "observation":
            masks = source.observed(observations)[0]
        else:
            masks = self._read(self._find(which, infos))
        map_leaves(lambda own, new: setitem(own, which, new[which]), self.memory, masks)
        if (found := source.layout.nothing_allowed(self.memory)) is not None:
            raise WorkerFailure(np.flatnonzero(found[1]).tolist(), f"cannot continue: {source.complaint(found[0])}")

    def _find(self, which: Array, infos: dict[str, Any]) -> Any:
        source = self._source
        name = MASKS if self._are_read else source.name
        if source.kind == "method" and not self._are_read:
            return _called(self._env, name)
        if (present := infos.get(f"_{name}")) is not None:
            for index in np.flatnonzero(which & ~present).tolist():
                raise WorkerFailure([index], f"returned no info {name!r}: expected its action mask")
        return infos[name]

    def _read(self, masks: Any) -> Nested:
        if not isinstance(masks, np.ndarray) or masks.dtype.kind != "O":
            return self._source.read(self._source.by_name(masks, leading=1))
        everything = self._source.everything()
        rows = [everything if one is None else self._source.read(self._source.by_name(one)) for one in masks]
        return map_stacked(np.stack, rows)


def _called(env: Any, method: str) -> Any:
    """Return the result of a method of vectorized environments, whose wrappers do not pass attributes on."""
    while not hasattr(env, method) and isinstance(env, VectorWrapper):
        env = env.env
    return getattr(env, method)()


def _first(masks: Any) -> Any:
    """Return the masks of the first environment; keys with an underscore are Gymnasium's own."""
    if isinstance(masks, dict):
        return {key: _first(part) for key, part in masks.items() if not str(key).startswith("_")}
    return masks[0]
