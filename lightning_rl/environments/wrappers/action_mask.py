"""Action masks in observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.contract import EnvironmentFailure, WorkerFailure, autoreset_mode, is_failure, summary
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

MASK, OBSERVATION = "action_mask", "observation"
"""Where masks, and observations that are no `Dict`, are in the observations that have masks beside them."""


def check_source(source: object) -> None:
    """Raise unless `source` says where masks come from.

    Raises:
        ConfigurationError: It is of another form.
    """
    kind, _, name = source.partition(".") if isinstance(source, str) else ("", "", "")
    expected = "'info.<key>', 'observation.<path>', 'method.<name>' or None"
    check(kind in ("info", "observation", "method") and bool(name), MASK, source, expected)


class MaskSource:
    """Where masks come from, and the spaces that follow from it.

    Args:
        source: `info.<key>`, `observation.<path>` or `method.<name>`.
        observation_space: Of one environment, as it is.
        action_space: Of one environment.

    Attributes:
        kind: The first part of `source`.
        name: The second part.
        mask_space: Of the masks.
        space: Of observations with masks.
        layout: What masks say of each component.
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
            self._retype()
        elif self._is_dict:
            expected = f"'observation.{MASK}', since observations have a part of that name already"
            check(MASK not in observation_space.spaces, MASK, source, expected)  # type: ignore[attr-defined]

    def learn(self, masks: Any) -> None:  # noqa: ANN401 - whatever an environment gives
        """Take the space of masks from those of a first step.

        Raises:
            ConfigurationError: They do not fit the action space.
        """
        self._set_space(self._space_of(self.by_name(masks)))
        beside = dict(self.space.spaces) if isinstance(self.space, spaces.Dict) else {OBSERVATION: self.space}
        self.space = spaces.Dict({**beside, MASK: self.mask_space})

    def by_name(self, masks: Any, leading: int = 0, path: str = "") -> Any:  # noqa: ANN401
        """Return what an environment gives as dicts, without what is None; entries of tuples are called by their place.

        Masks of all components of a leaf, none of which depends on another, become one.

        Args:
            masks: Arrays, lists, and dicts and tuples of these.
            leading: Number of dimensions before those of a mask; names with an underscore are then Gymnasium's own.
            path: Where they are.
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
        """Return masks as arrays `[..., *shape]`, nested as their space is.

        Raises:
            ValueError: An entry is neither 0 nor 1, as of masks that are added to logits.
        """
        return map_leaves(self._to_bits, self._paths, masks)

    def _to_bits(self, path: str, mask: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
        given = np.asarray(mask)
        bits = np.array(given != 0, np.int8)
        if given.dtype != bool and not (given == bits).all():
            entry = given[given != bits].flat[0]
            name = f"action mask {path}".rstrip()
            raise ValueError(f"{name} ({self.source}) has the entry {entry}: expected 1 for valid choices, else 0")
        return bits

    def everything(self, *leading: int) -> Nested:
        """Return masks `[*leading, *shape]` that allow everything."""
        return map_space(lambda leaf: np.ones((*leading, *(leaf.shape or ())), np.int8), self.mask_space)

    def observed(self, observation: Nested) -> tuple[Nested, Nested]:
        """Return the masks that are in an observation, and the observation with them as numbers of their type."""
        masks = self.read(part_at(observation, self.name))
        return masks, _put(observation, self.name, masks)

    def beside(self, observation: Nested, masks: Nested) -> Nested:
        """Return an observation with masks put beside it."""
        return {**observation, MASK: masks} if self._is_dict else {OBSERVATION: observation, MASK: masks}

    def complaint(self, component: str) -> str:
        """Say that masks allow nothing to a component."""
        what = f"component {component!r} of the action" if component else "the action"
        return f"the action mask ({self.source}) allows nothing to {what}: expected at least one choice"

    def _set_space(self, mask_space: spaces.Space[Any]) -> None:
        self.mask_space = mask_space
        self.layout = MaskLayout(self._action_space, mask_space)
        self._paths = nested_paths(mask_space)

    def _retype(self) -> None:
        """Find masks among what is observed, and make their spaces known as such."""
        try:
            found = part_at(self.space, self.name)
        except (LookupError, TypeError, ValueError):
            raise ConfigurationError(
                f"action_mask={self.source!r} is not valid: expected the path of a part of {self.space}"
            ) from None

        def mask(path: str, leaf: spaces.Space[Any]) -> spaces.Space[Any]:
            return leaf if isinstance(leaf, ActionMask) else self._leaf(path, leaf.shape or ())

        mask_space = replace_leaves(mask, found)
        masks = {join(self.name, path): leaf for path, leaf in space_leaves(mask_space).items()}
        masks |= {self.name: mask_space} if not isinstance(found, spaces.Dict | spaces.Tuple) else {}
        self.space = replace_leaves(lambda path, leaf: masks.get(path, leaf), self.space)
        find_masks(self.space)
        self._set_space(mask_space)

    def _space_of(self, masks: Any, path: str = "") -> spaces.Space[Any]:  # noqa: ANN401
        if not isinstance(masks, dict):
            return self._leaf(path, np.shape(masks))
        return spaces.Dict({key: self._space_of(part, join(path, key)) for key, part in masks.items()})

    def _leaf(self, path: str, shape: tuple[int, ...]) -> ActionMask:
        """Return the space of the masks of a part; with two dimensions a component depends on the one before it."""
        check(bool(shape) and all(shape), f"{MASK}.{path}".rstrip("."), shape, "an array with an entry for each choice")
        place = self._components.index(path) if path in self._components else 0
        return ActionMask(shape, self._components[place - 1] if place and len(shape) == 2 else None)


def _put(observation: Nested, path: str, part: Nested) -> Nested:
    """Return nested dicts with another part at `path`."""
    key, _, rest = path.partition(".")
    return {**observation, key: _put(observation[key], rest, part) if rest else part}


def _stacked(rows: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 - an array of one object, or None, for each environment
    like = np.asarray(next(row for row in rows if row is not None))
    return np.stack([np.ones_like(like) if row is None else np.asarray(row) for row in rows])


class MaskedEnvironment(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations with the masks that an environment says in `info`, by a method, or in the observation already.

    Args:
        env: The environment; it is reset once, to see its masks.
        source: `info.<key>`, `observation.<path>` or `method.<name>`.

    Raises:
        ConfigurationError: No masks are found, or such as do not fit the action space.
        ValueError: In `reset` and `step`: a mask allows nothing, and the episode goes on.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], source: str) -> None:
        super().__init__(env)
        self._masks = MaskSource(source, env.observation_space, env.action_space)
        if self._masks.kind != "observation":
            info = first_info(env)
            try:
                masks = self._find(info)
            except (LookupError, AttributeError) as error:
                raise not_found(source, error, info) from error
            self._masks.learn(masks)
        self.observation_space = self._masks.space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_masks(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated or truncated)
        return self._with_masks(observation, info, over), reward, terminated, truncated, info

    def _find(self, info: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever an environment gives
        source = self._masks
        return info[source.name] if source.kind == "info" else self.env.get_wrapper_attr(source.name)()

    def _with_masks(self, observation: Nested, info: dict[str, Any], over: bool = False) -> Nested:
        source = self._masks
        if source.kind == "observation":
            masks, observation = source.observed(observation)
        elif over:  # nothing is done there, and an environment need not say what could be
            masks = source.everything()
            observation = source.beside(observation, masks)
        else:
            masks = source.read(source.by_name(self._find(info)))
            observation = source.beside(observation, masks)
        if not over and (found := source.layout.nothing_allowed(masks)) is not None:
            raise ValueError(source.complaint(found[0]))
        return observation


def first_info(env: Any) -> dict[str, Any]:  # noqa: ANN401 - of either kind
    """Return the `info` of a reset, before anything counts.

    Raises:
        EnvironmentFailure: The environment raised.
    """
    try:
        return env.reset()[1]  # type: ignore[no-any-return]
    except BaseException as error:
        if not is_failure(error):
            raise
        what = summary(error)
        raise EnvironmentFailure(f"an environment raised in the reset that shows its action masks: {what}") from error


def not_found(source: str, error: Exception, info: Mapping[str, Any]) -> ConfigurationError:
    """Return the error for an environment that does not say its masks."""
    known = ", ".join(info) or "nothing"
    return ConfigurationError(
        f"action_mask={source!r} is not valid: {type(error).__name__}: {error}; the info of a reset has {known}"
    )


Array = np.ndarray[Any, Any]


class MaskedVectorEnvironment(VectorWrapper):
    """`MaskedEnvironment` for environments that come vectorised; masks are arrays `[B, ...]`, or one object for each.

    Args:
        env: A vector environment, or EnvPool's; it is reset once, to see its masks.
        source: `info.<key>`, `observation.<path>` or `method.<name>`.

    Raises:
        ConfigurationError: No masks are found, or such as do not fit the action space.
        WorkerFailure: In `reset` and `step`: a mask allows nothing, and the episode goes on.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], source: str) -> None:
        super().__init__(env)
        # EnvPool keeps the spaces of one environment where Gymnasium keeps those of the batch.
        single = getattr(env, "single_observation_space", env.observation_space)
        self._masks = MaskSource(source, single, getattr(env, "single_action_space", env.action_space))
        if self._masks.kind != "observation":
            infos = first_info(env)
            try:
                masks = self._find(infos)
            except (LookupError, AttributeError) as error:
                raise not_found(source, error, infos) from error
            self._masks.learn(_first(masks))
        self._last: Nested = self._masks.everything(self.num_envs)
        self._over = np.zeros(self.num_envs, bool)
        self._same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
        self.single_observation_space = self._masks.space
        self.observation_space = batch_space(self._masks.space, self.num_envs)

    def reset(
        self,
        *,
        seed: Any = None,  # noqa: ANN401 - as the environment takes it
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        given = {"seed": seed, "options": options}
        which = (options or {}).get("reset_mask")  # environments take it out
        observations, infos = self.env.reset(**{name: value for name, value in given.items() if value is not None})
        began = np.ones(self.num_envs, bool) if which is None else which
        return self._with_masks(observations, infos, self._over & ~began, began), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step every environment."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        over = ended & (not self._same_step)
        if self._same_step and "final_obs" in infos and self._masks.kind != "observation":
            infos = {**infos, "final_obs": self._final(infos["final_obs"])}
        present = np.ones(self.num_envs, bool)
        return self._with_masks(observations, infos, over, present), rewards, terminated, truncated, infos

    def _find(self, infos: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever an environment gives
        source = self._masks
        return infos[source.name] if source.kind == "info" else getattr(self.env, source.name)()

    def _with_masks(self, observations: Nested, infos: dict[str, Any], over: Array, new: Array) -> Nested:
        """Return observations with masks.

        Args:
            observations: `[B, ...]`.
            infos: What came with them.
            over: Environments whose episode is over, so that nothing is done before they are reset, `[B]`.
            new: Those that said something, `[B]`.
        """
        source = self._masks
        everything = source.everything(self.num_envs)
        self._over = over
        if source.kind == "observation":
            masks, observations = source.observed(observations)
            self._check(map_leaves(lambda x, one: _where(over, one, x), masks, everything))
            return observations
        masks = everything if over.all() else self._read(self._find(infos))
        taken = new & ~over
        if source.kind == "info" and (present := infos.get(f"_{source.name}")) is not None:
            for index in np.flatnonzero(taken & ~present).tolist():
                raise WorkerFailure([index], f"returned no info {source.name!r}, where its action mask should be")
        # What others said before holds on; where an episode is over it does not matter.
        kept = map_leaves(lambda x, last: _where(new, x, last), masks, self._last)
        self._last = map_leaves(lambda x, one: _where(over, one, x), kept, everything)
        self._check(self._last)
        return source.beside(observations, self._last)

    def _read(self, masks: Any) -> Nested:  # noqa: ANN401
        if not isinstance(masks, np.ndarray) or masks.dtype.kind != "O":
            return self._masks.read(self._masks.by_name(masks, leading=1))
        everything = self._masks.everything()
        rows = [everything if one is None else self._masks.read(self._masks.by_name(one)) for one in masks]
        return map_stacked(np.stack, rows)

    def _final(self, reached: Any) -> Any:  # noqa: ANN401 - a batch, or an array of one observation for each
        source = self._masks
        if not isinstance(reached, np.ndarray) or reached.dtype != object:
            return source.beside(reached, source.everything(self.num_envs))
        found = np.empty_like(reached)
        for index, one in enumerate(reached):
            found[index] = None if one is None else source.beside(one, source.everything())
        return found

    def _check(self, masks: Nested) -> None:
        if (found := self._masks.layout.nothing_allowed(masks)) is not None:
            raise WorkerFailure(np.flatnonzero(found[1]).tolist(), f"cannot go on: {self._masks.complaint(found[0])}")


def _first(masks: Any) -> Any:  # noqa: ANN401 - whatever a vector environment gives
    """Return those of the first environment; Gymnasium marks with an underscore who said something."""
    if isinstance(masks, dict):
        return {key: _first(part) for key, part in masks.items() if not str(key).startswith("_")}
    return masks[0]


def _where(which: Array, x: Array, other: Array) -> Array:
    return np.where(which.reshape(-1, *(1,) * (x.ndim - 1)), x, other)
