"""Playing whole episodes, to see how good a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from lightning_rl.environments import EnvironmentBatch, EnvironmentFailure
from lightning_rl.environments.atari import LIFE_LOST
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW
from lightning_rl.nested import Nested, map_leaves, map_space, map_stacked
from lightning_rl.policies.distributions import to_environment
from lightning_rl.policies.interface import Policy, as_recurrent
from lightning_rl.policies.recurrent_state import forget
from lightning_rl.rollouts.episode import Episode
from lightning_rl.spaces import observation_dtype


class _Slot:
    """What one environment has done in the episode that it is playing, and how many it still has to play."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.finished: list[Episode] = []
        self.failures_in_a_row = 0
        self._begin()

    def _begin(self) -> None:
        self.episode_return, self.length = 0.0, 0
        self.observations: list[Nested] = []
        self.actions: list[Nested] = []
        self.rewards: list[float] = []

    def take(self, reward: float) -> None:
        """Count a step."""
        self.episode_return += reward
        self.length += 1

    def record(self, observation: Nested, action: Nested, reward: float) -> None:
        """Keep a step."""
        self.observations.append(map_leaves(np.copy, observation))
        self.actions.append(map_leaves(np.copy, action))
        self.rewards.append(reward)

    def begin_again(self) -> bool:
        """Forget the episode: the environment failed. Return whether to play another one instead."""
        self._begin()
        self.failures_in_a_row += 1
        return self.failures_in_a_row <= MAX_RESTARTS_IN_A_ROW

    def finish(self, terminated: bool, final_observation: Nested) -> None:
        """Close the episode."""
        episode = Episode(self.episode_return, self.length, terminated)
        if self.rewards:
            episode.observations = map_stacked(np.stack, [*self.observations, final_observation])
            episode.actions, episode.rewards = map_stacked(np.stack, self.actions), np.asarray(self.rewards)
        self.finished.append(episode)
        self.remaining -= 1
        self.failures_in_a_row = 0
        self._begin()


def play(
    environments: EnvironmentBatch,
    policy: Policy,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    episodes_per_environment: Sequence[int],
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    record: bool = False,
) -> list[Episode]:
    """Play whole episodes from a fresh start.

    How many episodes each environment plays is fixed beforehand, so that short ones are not favoured. An episode in
    which an environment failed and was replaced is left out, and the next one played for it.

    Args:
        environments: Reset first.
        policy: Chooses the actions.
        observation_space: Of one environment.
        action_space: Of one environment.
        episodes_per_environment: One number for each environment.
        generator: Draws the actions of a policy that is not deterministic; its device is the policy's.
        dtype: Of the policy's parameters.
        deterministic: Take the mode of the action distribution rather than a sample.
        record: Keep observations, actions and rewards.

    Returns:
        The episodes, in the order of environments and, within one, of time.

    Raises:
        EnvironmentFailure: An environment failed; where it is replaced, in one episode after the other.
    """
    slots = [_Slot(count) for count in episodes_per_environment]
    dtypes = map_space(lambda leaf: observation_dtype(leaf, dtype), observation_space)
    observations = environments.reset() if any(episodes_per_environment) else np.empty(0)
    # A policy need not have a memory, nor know of any.
    acting: dict[str, Any] = {}
    if (recurrent := as_recurrent(policy)) is not None:
        acting["memory"] = recurrent.initial_memory(len(slots), critic=False)
    while any(slot.remaining for slot in slots):
        # A copy: the next step may write over what it got.
        observations = map_leaves(lambda dtype, x: x.astype(dtype), dtypes, observations)
        with torch.no_grad():
            tensors = map_leaves(lambda x: torch.from_numpy(x).to(generator.device), observations)
            output = policy.act(tensors, generator, deterministic, **acting)
        actions = to_environment(action_space, map_leaves(lambda x: x.cpu().numpy(), output.environment_action))
        step = environments.step(actions)
        if acting:
            # The lives of a game are one episode here; the policy learned from them as episodes of their own.
            begins = step.terminated | step.truncated | np.asarray(step.infos.get(LIFE_LOST, False), bool)
            acting["memory"] = forget(output.memory, begins if step.valid is None else begins | ~step.valid)
        finals = dict(step.final_observations)
        for index, slot in enumerate(slots):
            if not slot.remaining or (step.valid is not None and not step.valid[index]):
                continue
            reward = float(step.rewards[index])
            slot.take(reward)
            if record:
                row = itemgetter(index)
                slot.record(map_leaves(row, observations), map_leaves(row, actions), reward)
            if index in finals:
                final = map_leaves(lambda dtype, x: x.astype(dtype), dtypes, finals[index])
                slot.finish(bool(step.terminated[index]), final)
        for index in step.lost:
            if not slots[index].begin_again():
                raise EnvironmentFailure(
                    f"{environments.take_failures()[-1]}; so did the {MAX_RESTARTS_IN_A_ROW} episodes before this one, "
                    "and none was played to its end in between"
                )
        observations = step.observations
    return [episode for slot in slots for episode in slot.finished]
