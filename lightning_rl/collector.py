"""Policy and environments put together: rollouts to learn from, episodes to evaluate on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.distributions import to_environment
from lightning_rl.environments import EnvironmentBatch, EnvironmentFailure, Step
from lightning_rl.environments.batch import info_values
from lightning_rl.policy import Policy, observation_dtype
from lightning_rl.rollout import EpisodeSummary, Rollout

Array = np.ndarray[Any, Any]

# Rows per forward pass where a whole rollout is evaluated at once, so that memory stays bounded.
_MAX_ROWS = 8192


class Collector:
    """Collects rollouts of fixed length, episode after episode.

    Storage is allocated once and reused. Only what acting needs is computed step by step; log-probabilities and values that
    the policy does not give on the way are computed for the whole rollout at its end, with the same parameters.

    Args:
        environments: The environments.
        observation_space: Of one environment.
        action_space: Of one environment.
        length: Number of steps `T`.
        generator: Draws the actions; on the policy's device.
        dtype: Of the policy's parameters; float64 keeps everything in float64, anything else in float32.
        info_keys: Keys of `info` whose values are wanted.
    """

    def __init__(
        self,
        environments: EnvironmentBatch,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        length: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        info_keys: Sequence[str] = (),
    ) -> None:
        self.environments = environments
        self.action_space = action_space
        self.length = length
        self.generator = generator
        self.info_keys = info_keys
        shape = (length, environments.num_envs)
        floating = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        space_shape = observation_space.shape or ()
        self._observations = np.zeros((length + 1, shape[1], *space_shape), observation_dtype(observation_space, dtype))
        self._rewards = np.zeros(shape, floating)
        self._terminated, self._truncated, self._valid = (np.zeros(shape, bool) for _ in range(3))
        self._checks_observations = np.issubdtype(self._observations.dtype, np.floating)
        self._started = False
        # Of the episodes that go on into the next rollout.
        self._returns = np.zeros(shape[1])
        self._lengths = np.zeros(shape[1], np.int64)

    def collect(self, policy: Policy, policy_version: int = 0) -> Rollout:
        """Take `length` steps in every environment.

        Args:
            policy: Chooses the actions.
            policy_version: Number of updates it has seen.

        Raises:
            EnvironmentFailure: An environment failed, or returned an observation or reward that is not finite.
        """
        start = time.perf_counter()
        if not self._started:
            self._observations[-1] = self.environments.reset()
            self._check_observations(0, self._observations[-1])
            self._started = True
        self._observations[0] = self._observations[-1]
        device = self.generator.device
        actions: list[Tensor] = []
        log_probs: list[Tensor] = []
        values: list[Tensor] = []
        finals: list[tuple[int, int, Any]] = []
        infos: dict[str, list[float]] = {key: [] for key in self.info_keys}
        self._valid.fill(True)
        with torch.inference_mode():
            for t in range(self.length):
                output = policy.act(torch.from_numpy(self._observations[t]).to(device), self.generator)
                actions.append(output.action)
                if output.log_prob is not None and output.value is not None:
                    log_probs.append(output.log_prob)
                    values.append(output.value)
                step = self.environments.step(to_environment(self.action_space, output.action.cpu().numpy()))
                self._store(t, step)
                for index, observation in step.final_observations:
                    if not step.terminated[index]:  # only a truncated episode goes on from the value of what it reached
                        finals.append((t, index, observation))
                for key in self.info_keys:
                    infos[key] += info_values(step, key)
        self._check_rewards()
        rollout = self._evaluate(policy, actions, log_probs, values, finals)
        rollout.policy_version = policy_version
        rollout.episodes = self._finished_episodes()
        rollout.infos = infos
        rollout.seconds = time.perf_counter() - start
        return rollout

    def _store(self, t: int, step: Step) -> None:
        self._observations[t + 1] = step.observations
        self._check_observations(t + 1, self._observations[t + 1])
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid

    def _evaluate(
        self,
        policy: Policy,
        actions: list[Tensor],
        log_probs: list[Tensor],
        values: list[Tensor],
        finals: list[tuple[int, int, Any]],
    ) -> Rollout:
        """Compute log-probabilities and values that acting did not give, and put the rollout together."""
        device = self.generator.device
        observations = torch.from_numpy(self._observations).to(device)
        indices = torch.tensor([(t, index) for t, index, _ in finals], dtype=torch.long, device=device).view(-1, 2)
        final_array = np.zeros((len(finals), *self._observations.shape[2:]), self._observations.dtype)
        for k, (_, _, observation) in enumerate(finals):
            final_array[k] = observation
        final_observations = torch.from_numpy(final_array).to(device)
        stacked_actions = torch.stack(actions)
        with torch.no_grad():
            if values:
                log_prob = torch.stack(log_probs)
                all_values = torch.cat([torch.stack(values), policy.value(observations[-1:])])
            else:
                log_prob = torch.cat(
                    [
                        policy.log_prob(o, a)
                        for o, a in zip(self._chunks(observations[:-1]), self._chunks(stacked_actions), strict=True)
                    ]
                )
                all_values = torch.cat([policy.value(o) for o in self._chunks(observations)])
            next_values = all_values[1:].clone()
            if finals:
                next_values[indices[:, 0], indices[:, 1]] = policy.value(final_observations).to(next_values.dtype)
        return Rollout(
            observations=observations,
            actions=stacked_actions,
            rewards=torch.from_numpy(self._rewards).to(device),
            terminated=torch.from_numpy(self._terminated).to(device),
            truncated=torch.from_numpy(self._truncated).to(device),
            valid=None if self._valid.all() else torch.from_numpy(self._valid).to(device),
            log_probs=log_prob,
            values=all_values[:-1],
            next_values=next_values,
            final_indices=indices,
            final_observations=final_observations,
        )

    def _chunks(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(max(1, _MAX_ROWS // x.shape[1]))

    def _finished_episodes(self) -> EpisodeSummary:
        """Return the episodes that ended in this rollout, in order; sums are float64 and carried between rollouts."""
        rewards = self._rewards.astype(np.float64)
        summary = EpisodeSummary([], [])
        ends = self._terminated | self._truncated
        first = np.zeros(len(self._returns), np.int64)
        for t, index in np.argwhere(ends):
            span = slice(first[index], t + 1)
            summary.returns.append(float(self._returns[index] + rewards[span, index].sum()))
            summary.lengths.append(int(self._lengths[index] + self._valid[span, index].sum()))
            self._returns[index], self._lengths[index], first[index] = 0.0, 0, t + 1
        for index, begin in enumerate(first):
            self._returns[index] += rewards[begin:, index].sum()
            self._lengths[index] += self._valid[begin:, index].sum()
        return summary

    def _check_observations(self, t: int, observations: Array) -> None:
        # The sum of squares is finite unless an entry is not, or is huge: only then look closely.
        flat = observations.ravel()
        if self._checks_observations and not np.isfinite(flat @ flat):
            bad = np.argwhere(~np.isfinite(observations))
            if len(bad):
                raise self._not_finite("observation", t - 1, int(bad[0][0]), observations[tuple(bad[0])])

    def _check_rewards(self) -> None:
        if not np.isfinite(self._rewards).all():
            t, index = np.argwhere(~np.isfinite(self._rewards))[0]
            raise self._not_finite("reward", int(t), int(index), self._rewards[t, index])

    def _not_finite(self, what: str, t: int, index: int, value: float) -> EnvironmentFailure:
        where = f"after step {t} of the rollout" if t >= 0 else "after reset"
        return EnvironmentFailure(
            f"{what} of environment {index} is {value} {where}; the environment is now at: {self.environments.label(index)}"
        )


class Episode:
    """One episode played for evaluation.

    Attributes:
        episode_return: Undiscounted sum of raw rewards.
        length: Number of steps.
        terminated: Whether it ended in a terminal state rather than by a time limit.
        observations: `[length + 1, ...]`, the final one included; None unless recorded.
        actions: `[length, ...]`, as the environment got them; None unless recorded.
        rewards: `[length]`; None unless recorded.
    """

    def __init__(self, episode_return: float, length: int, terminated: bool) -> None:
        self.episode_return = episode_return
        self.length = length
        self.terminated = terminated
        self.observations: Array | None = None
        self.actions: Array | None = None
        self.rewards: Array | None = None

    def __repr__(self) -> str:
        return f"Episode(episode_return={self.episode_return:g}, length={self.length}, terminated={self.terminated})"


class _Slot:
    """What one environment has done in the episode that it is playing, and how many it still has to play."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.clear()

    def clear(self) -> None:
        self.episode_return, self.length = 0.0, 0
        self.observations: list[Array] = []
        self.actions: list[Array] = []
        self.rewards: list[float] = []


def play(
    environments: EnvironmentBatch,
    policy: Policy,
    action_space: spaces.Space[Any],
    episodes_per_environment: Sequence[int],
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    record: bool = False,
) -> list[Episode]:
    """Play whole episodes from a fresh start.

    How many episodes each environment plays is fixed beforehand, so that short ones are not favoured.

    Args:
        environments: Reset first.
        policy: Chooses the actions.
        action_space: Of one environment.
        episodes_per_environment: One number for each environment.
        generator: Draws the actions of a policy that is not deterministic; its device is the policy's.
        dtype: Of the policy's parameters.
        deterministic: Take the mode of the action distribution rather than a sample.
        record: Keep observations, actions and rewards.

    Returns:
        The episodes, in the order of environments and, within one, of time.
    """
    slots = [_Slot(count) for count in episodes_per_environment]
    finished: list[list[Episode]] = [[] for _ in slots]
    observations = environments.reset() if any(episodes_per_environment) else np.empty(0)
    while any(slot.remaining for slot in slots):
        if not np.issubdtype(observations.dtype, np.integer):
            observations = observations.astype(np.float64 if dtype == torch.float64 else np.float32)
        if record:
            observations = observations.copy()
        with torch.no_grad():
            tensor = torch.from_numpy(observations).to(generator.device)
            action = policy.act(tensor, generator, deterministic).action
        actions = to_environment(action_space, action.cpu().numpy())
        step = environments.step(actions)
        final_observations = dict(step.final_observations)
        for index, slot in enumerate(slots):
            if not slot.remaining or (step.valid is not None and not step.valid[index]):
                continue
            slot.episode_return += float(step.rewards[index])
            slot.length += 1
            if record:
                slot.observations.append(observations[index])
                slot.actions.append(actions[index].copy())
                slot.rewards.append(float(step.rewards[index]))
            if index in final_observations:
                episode = Episode(slot.episode_return, slot.length, bool(step.terminated[index]))
                if record:
                    episode.observations = np.stack([*slot.observations, final_observations[index]])
                    episode.actions, episode.rewards = np.stack(slot.actions), np.asarray(slot.rewards)
                finished[index].append(episode)
                slot.remaining -= 1
                slot.clear()
        observations = step.observations
    return [episode for episodes in finished for episode in episodes]
