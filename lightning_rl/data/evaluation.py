"""Plays evaluation episodes in environments that are kept between evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gymnasium import spaces

from lightning_rl.data.collector import Collector
from lightning_rl.environments import (
    EnvironmentBatch,
    EnvironmentFailure,
    EnvironmentSpec,
    FilmMaker,
    cameras,
    make_environments,
)
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW
from lightning_rl.environments.seeding import derive_seed
from lightning_rl.nested import Nested, map_leaves, map_stacked
from lightning_rl.policies.interface import Policy, as_recurrent
from lightning_rl.rollouts.episode import Episode
from lightning_rl.validation import check_bool, check_positive_int


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of evaluation: of validation, test and prediction.

    Args:
        episodes: Number of evaluation episodes, over all ranks.
        num_envs: Number of evaluation environments on each rank; None: as many as it has episodes to play, 8 at the
            most.
        deterministic: Evaluate the mode of the policy rather than samples from it.
    """

    episodes: int = 10
    num_envs: int | None = None
    deterministic: bool = True

    def check(self) -> None:
        """Raise where an option is out of range.

        Raises:
            ConfigurationError: Names the option as `evaluation.episodes`.
        """
        check_positive_int("evaluation.episodes", self.episodes)
        if self.num_envs is not None:
            check_positive_int("evaluation.num_envs", self.num_envs)
        check_bool("evaluation.deterministic", self.deterministic)


if TYPE_CHECKING:
    EvaluationOptions = EvaluationConfig | Mapping[str, Any]
else:  # the command line knows the fields of the class alone
    EvaluationOptions = EvaluationConfig


class _Slot:
    """The episodes that one environment still has to play, those it has played, and the recorded steps of this one."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.finished: list[Episode] = []
        self.failures_in_a_row = 0
        self.steps: list[tuple[Nested, Nested, float]] = []

    def restart(self) -> bool:
        """Forget the episode: the environment failed. Return whether to play another one instead."""
        self.steps = []
        self.failures_in_a_row += 1
        return self.failures_in_a_row <= MAX_RESTARTS_IN_A_ROW

    def finish(self, episode: Episode, final_observation: Nested) -> None:
        """Close the episode."""
        if self.steps:
            observations, actions, rewards = zip(*self.steps, strict=True)
            episode.observations = map_stacked(np.stack, [*observations, final_observation])
            episode.actions, episode.rewards = map_stacked(np.stack, actions), np.asarray(rewards)
        self.finished.append(episode)
        self.remaining -= 1
        self.failures_in_a_row = 0
        self.steps = []


def run_episodes(
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
    collector = Collector(environments, observation_space, action_space, 1, generator, dtype)
    # A policy need not have a memory, nor know of any.
    if (recurrent := as_recurrent(policy)) is not None:
        collector.memory.state = recurrent.initial_memory(len(slots), critic=False)
    act = partial(policy.act, deterministic=deterministic)
    while any(slot.remaining for slot in slots):
        collector.start(act)
        with torch.no_grad():
            step = collector.advance(0)
        if record:
            for index, slot in enumerate(slots):
                if slot.remaining and (step.valid is None or step.valid[index]):
                    row, taken = itemgetter((0, index)), itemgetter(index)
                    observed = map_leaves(lambda x, row=row: np.copy(row(x)), collector.observations)
                    acted = map_leaves(lambda x, taken=taken: np.copy(taken(x)), collector.actions)
                    slot.steps.append((observed, acted, float(step.rewards[index])))
        finals = dict(step.final_observations)
        for _, index, episode_return, length in collector.finished_episodes():
            if slots[index].remaining:
                final = map_leaves(lambda like, x: np.asarray(x, like.dtype), collector.observations, finals[index])
                slots[index].finish(Episode(episode_return, length, bool(step.terminated[index])), final)
        for index in step.failed:
            if not slots[index].restart():
                raise EnvironmentFailure(
                    f"{environments.pop_failures()[-1]}; so did the {MAX_RESTARTS_IN_A_ROW} episodes before this one, "
                    "and none was played to its end in between"
                )
    return [episode for slot in slots for episode in slot.finished]


_MOST_ENVIRONMENTS = 8


class Evaluator:
    """Makes environments when episodes are first asked for, and keeps them for the next time.

    Args:
        spec: Of one environment.
        num_envs: How many; None takes as many as there are episodes to play, 8 at the most.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int | None) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.environments: EnvironmentBatch | None = None
        self._made_for: tuple[tuple[int, ...], int] = ((), 0)

    def run_episodes(
        self,
        policy: Policy,
        space_pair: tuple[spaces.Space[Any], spaces.Space[Any]],
        num_episodes: int,
        path: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool,
        record: bool,
        films: FilmMaker | None = None,
        first_number: int = 0,
    ) -> list[Episode]:
        """Play episodes.

        Args:
            policy: Chooses the actions.
            space_pair: Observation and action space of one environment.
            num_episodes: How many.
            path: Of the node of the tree of seeds that all of them come from.
            device: Of the policy.
            dtype: Of its parameters.
            deterministic: Take the mode of the action distribution rather than a sample.
            record: Keep observations, actions and rewards.
            films: Takes the frames of each episode, by its place among those that are returned; `spec` is then filmed.
            first_number: What the first of them is counted as.
        """
        num_envs = min(num_episodes, self.num_envs or _MOST_ENVIRONMENTS)
        if not num_envs:
            return []
        if self.spec.backend == "envpool" or (path, num_envs) != self._made_for:  # EnvPool cannot be seeded again
            self.close()
        if self.environments is None:
            self._made_for = path, num_envs
            seeds = [derive_seed(*path, index) for index in range(num_envs)]
            self.environments = cast(EnvironmentBatch, make_environments(self.spec, num_envs, seeds))
        shares = [len(range(index, num_episodes, num_envs)) for index in range(num_envs)]
        if films is not None:
            number = first_number
            for camera, share in zip(cameras(self.environments.env), shares, strict=True):
                camera.begin(films, range(number, number + share))
                number += share
        return run_episodes(
            self.environments,
            policy,
            *space_pair,
            shares,
            torch.Generator(device).manual_seed(derive_seed(*path)),
            dtype=dtype,
            deterministic=deterministic,
            record=record,
        )

    def close(self) -> None:
        """Close the environments, if there are any."""
        environments, self.environments = self.environments, None
        if environments is not None:
            environments.close()
