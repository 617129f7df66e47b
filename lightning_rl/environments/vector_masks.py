"""Masks of environments that come vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.autoreset import autoreset_mode
from lightning_rl.environments.masks import MaskSource, first_info, not_found
from lightning_rl.environments.workers import WorkerFailure
from lightning_rl.nested import Nested, map_leaves, map_stacked

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
