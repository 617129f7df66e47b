"""Vector environments whose observations, rewards and flags are tensors on their own device."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.environments.batch import EnvironmentBatch, Step, check_values, to_array
from lightning_rl.environments.contract import EnvironmentFailure, Unexpected, listed
from lightning_rl.environments.wrappers.transforms import RewardTransform
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves
from lightning_rl.validation import check


class TensorEnvironments(EnvironmentBatch):
    """A vector environment of tensors with the same results in every autoreset mode.

    A step copies to the host only whether any episode was truncated, and in `DISABLED` mode whether any has ended.
    `check_finite` checks all values once per rollout.

    Args:
        env: A `gymnasium.vector.VectorEnv` with tensors and `metadata["autoreset_mode"]`. In `SAME_STEP` mode
            `info["final_obs"]`, if present, has the observations `[B, ...]` before resets.
        seed: Seed of its random generator.
        transform: Scales and clips the rewards, `[B]`.
        evaluation: As in `EnvironmentBatch`. Evaluation steps have the final observations of all episodes.
        is_wrapped: As in `EnvironmentBatch`.
    """

    _own_kind = "tensors"

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        seed: int,
        transform: RewardTransform | None = None,
        evaluation: bool = False,
        is_wrapped: bool = False,
    ) -> None:
        super().__init__(env, [seed], seed, transform=transform, evaluation=evaluation, is_wrapped=is_wrapped)
        self.seed = seed
        self._evaluates = evaluation
        self._not_finite: Tensor | None = None
        self._advance = _advance

    def compile(self) -> None:
        """Compile the environment's `step` and the checks after it; code that PyTorch cannot trace runs uncompiled."""
        if self._advance is _advance:
            rank_zero_info("compiling the step of the environments, once, about 10 s (cached for the next run)")
            self._advance = torch.compile(_advance)

    def reset(self) -> Nested:
        """Reset with the seed, and return the first observations `[B, ...]`, which must be tensors."""
        self._tracker.reset()
        with self._named("reset"):
            self.observations, infos = self.env.reset(seed=self.seed)
            first = first_leaf(self.observations)
            expected = f"'native', since {self.env} returns {type(first).__name__}, no tensors"
            check(isinstance(first, Tensor), "backend", "torch", expected)
            self._device = first.device
            check_values(self.env, map_leaves(to_array, self.observations), infos)
        self._resets_next = None
        self._not_finite = None
        return self.observations

    def step(self, actions: Nested) -> Step:
        self._tracker.clock += 1
        with self._named("step"):
            observations, rewards, terminated, truncated, infos, valid, ended, cut, bad_reward, bad = self._advance(
                self.env, actions, self._resets_next, self._transform
            )
            if not self._is_checked:
                rows = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
                check_values(self.env, map_leaves(to_array, observations), infos, **map_leaves(to_array, rows))
                self._is_checked = True
        if self.mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        reached = infos.get("final_obs") if self.mode is AutoresetMode.SAME_STEP else observations
        due = ended if self._evaluates else cut
        finals = self._finals(due, reached, bad) if bool(due.any()) else []
        if self.mode is AutoresetMode.DISABLED and bool(ended.any()):
            # These may be the environment's own tensors, which its reset clears.
            rewards, terminated, truncated = rewards.clone(), terminated.clone(), truncated.clone()
            infos = {key: x.clone() if isinstance(x, Tensor) else x for key, x in infos.items()}
            with self._named("reset"):
                observations, _ = self.env.reset(options={"reset_mask": ended})
            bad = torch.where(ended & ~cut, bad_reward, bad)  # terminal states are not learned from
            for leaf in leaves(observations):
                bad = bad | _rows_not_finite(leaf)
        self.observations = observations
        self._not_finite = bad if self._not_finite is None else self._not_finite | bad
        return Step(observations, rewards, terminated, truncated, valid, finals, infos)

    def _finals(self, which: Tensor, reached: Nested | None, bad: Tensor) -> list[tuple[int, Nested | None]]:
        """Return the final observations of the episodes in the mask `which`, and mark those not finite in `bad`."""
        indices = which.nonzero().flatten()
        if reached is None:
            return [(index, None) for index in indices.tolist()]
        with self._named("step"):
            fits = map_leaves(lambda x, y: isinstance(y, Tensor) and y.shape == x.shape, self.observations, reached)
            if not all(leaves(fits)):
                raise Unexpected("returned no tensors [B, ...] with the shapes of observations, in info['final_obs']")
        rows = map_leaves(itemgetter(indices), reached)  # copies, since environments may overwrite their tensors
        for leaf in leaves(rows):
            bad[indices] |= _rows_not_finite(leaf)
        return [(index, map_leaves(itemgetter(k), rows)) for k, index in enumerate(indices.tolist())]

    def check_finite(self) -> None:
        """Raise an `EnvironmentFailure` if an observation or reward since the last call was not finite."""
        bad, self._not_finite = self._not_finite, None
        if bad is not None and bool(bad.any()):
            indices = bad.nonzero().flatten().tolist()
            who = f"{self._role}environment {listed(indices)}"
            raise EnvironmentFailure(f"{who} returned an observation or reward that is NaN or infinite")

    def load_state_dict(self, state: dict[str, Any]) -> tuple[np.ndarray[Any, Any], Nested] | None:
        restored = super().load_state_dict(state)
        if restored is None:
            return None
        self.observations = map_leaves(lambda x: x.to(self._device), self.observations)
        self._resets_next = None if self._resets_next is None else self._resets_next.to(self._device)
        return restored[0], self.observations


def _advance(
    env: VectorEnv[Any, Any, Any], actions: Nested, resets: Tensor | None, transform: RewardTransform | None
) -> tuple[Any, ...]:
    """Step all environments, and reset those in the mask `resets`.

    Return the values of `env.step`, with rewards of 0 where the step was a reset; `valid`, False there; whether the
    episode ended; whether it was truncated only; and whether the reward, or it or an observation, is NaN or infinite.
    """
    observations, rewards, terminated, truncated, infos = env.step(actions)
    terminated, truncated = terminated.bool(), truncated.bool()
    valid = None if resets is None else ~resets
    if valid is not None:
        rewards = torch.where(valid, rewards, 0)
    bad = bad_reward = ~torch.isfinite(rewards)
    for leaf in leaves(observations):
        bad = bad | _rows_not_finite(leaf)
    rewards = rewards if transform is None else transform(rewards)  # after the check, since infinity can be clipped
    ended, cut = terminated | truncated, truncated & ~terminated
    return observations, rewards, terminated, truncated, infos, valid, ended, cut, bad_reward, bad


def _rows_not_finite(x: Tensor) -> Tensor | bool:
    """Return which rows of `x`, `[N, ...]`, have an entry that is NaN or infinite, `[N]`; False for integers."""
    return ~torch.isfinite(x).reshape(len(x), -1).all(1) if x.is_floating_point() else False
