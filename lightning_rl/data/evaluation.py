"""Plays evaluation episodes in environments that are kept between evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.data.collector import Collector
from lightning_rl.environments import (
    EnvironmentBatch,
    EnvironmentFailure,
    EnvironmentSpec,
    FilmMaker,
    make_environments,
)
from lightning_rl.environments.batch import to_array
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW, derive_seed
from lightning_rl.nested import Nested, map_leaves, map_stacked
from lightning_rl.options import OrDict
from lightning_rl.policies.interface import Policy, as_recurrent
from lightning_rl.rollouts.rollout import Episode
from lightning_rl.validation import PositiveInt

_MAX_ENVIRONMENTS = 8
_STEPS_BEFORE_HINT = 100_000


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of validation, test and prediction.

    Args:
        episodes: Number of evaluation episodes, over all ranks.
        num_envs: Number of evaluation environments on each rank. None: one for each of the rank's episodes, at most 8.
        deterministic: Evaluate the mode of the policy rather than samples from it.
    """

    episodes: PositiveInt = 10
    num_envs: PositiveInt | None = None
    deterministic: bool = True


EvaluationOptions = OrDict[EvaluationConfig]


@dataclass
class _Slot:
    """Progress of one environment: its finished episodes, and the recorded steps of the current one."""

    remaining: int
    finished: list[Episode] = field(default_factory=list)
    failures_in_a_row: int = 0
    steps: list[tuple[Nested, Nested, float]] = field(default_factory=list)
    infos: list[list[float]] = field(default_factory=list)

    def finish(self, episode: Episode, reached: Nested | None, info_keys: Sequence[str]) -> None:
        if self.steps:
            observations, actions, rewards = zip(*self.steps, strict=True)
            final = observations[-1]  # if tensor environments do not return the observation that was reached
            if reached is not None:
                final = map_leaves(lambda like, x: np.asarray(to_array(x), like.dtype), final, reached)
            episode.observations = map_stacked(np.stack, [*observations, final])
            episode.actions, episode.rewards = map_stacked(np.stack, actions), np.asarray(rewards)
        if info_keys:
            episode.infos = dict(zip(info_keys, np.array(self.infos).T, strict=True))
        self.finished.append(episode)
        self.remaining, self.failures_in_a_row, self.steps, self.infos = self.remaining - 1, 0, [], []


def run_episodes(
    environments: EnvironmentBatch,
    policy: Policy,
    episodes_per_environment: Sequence[int],
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    record: bool = False,
    info_keys: Sequence[str] = (),
) -> list[Episode]:
    """Reset the environments and play whole episodes; return them by environment, then in the order of time.

    The number of episodes of each environment is fixed beforehand, so that short episodes are not favored. If an
    environment fails and is replaced, its next episode counts instead; after several failures an `EnvironmentFailure`
    is raised. The `generator`, on the policy's device, draws the actions unless `deterministic` takes the mode of each
    distribution; `record` keeps observations, actions and rewards; `dtype` is the dtype of the policy's parameters.
    """
    slots = [_Slot(count) for count in episodes_per_environment]
    collector = Collector(environments, 1, generator, dtype)
    if (recurrent := as_recurrent(policy)) is not None:
        collector.memory.state = recurrent.initial_memory(len(slots), critic=False)
    act = partial(policy.act, deterministic=deterministic)
    steps = 0  # since an episode that counts ended
    while any(slot.remaining for slot in slots):
        collector.start(act)
        with torch.no_grad():
            step = collector.advance(0)
        environments.check_finite()
        infos = [environments.info_values(step, key).tolist() for key in info_keys]
        for index, slot in enumerate(slots if record or info_keys else ()):
            if not slot.remaining or not (step.valid is None or step.valid[index]):
                continue
            slot.infos.append([values[index] for values in infos])
            if record:
                observed = map_leaves(lambda x, index=index: np.copy(to_array(x[0, index])), collector.observations)
                acted = map_leaves(lambda x, index=index: np.copy(to_array(x[index])), collector.actions)
                slot.steps.append((observed, acted, float(step.rewards[index])))
        finals = dict(step.final_observations)
        steps = 0 if any(slots[index].remaining for index in finals) else steps + 1
        if steps == _STEPS_BEFORE_HINT:
            rank_zero_warn(
                f"no evaluation episode has ended in {steps:,} steps: if episodes may never end, "
                "env.max_episode_steps truncates them"
            )
        for _, index, episode_return, length in collector.finished_episodes():
            if slots[index].remaining:
                terminated = bool(step.terminated[index])
                episode = Episode(episode_return=episode_return, length=length, terminated=terminated)
                slots[index].finish(episode, finals[index], info_keys)
        for slot in (slots[index] for index in step.failed if slots[index].remaining):
            slot.steps, slot.infos, slot.failures_in_a_row = [], [], slot.failures_in_a_row + 1
            if slot.failures_in_a_row > MAX_RESTARTS_IN_A_ROW:
                raise EnvironmentFailure(
                    f"{environments.pop_failures()[-1]}; the {MAX_RESTARTS_IN_A_ROW} episodes before failed too"
                )
    return [episode for slot in slots for episode in slot.finished]


class Evaluator:
    """Makes evaluation environments for the first episodes, and keeps them for the next ones.

    `films` receives the frames of each episode; `spec` must then be for filming.
    """

    def __init__(self, spec: EnvironmentSpec, films: FilmMaker | None = None) -> None:
        self.spec, self.films = spec, films
        self.environments: EnvironmentBatch | None = None
        self._made_for: tuple[tuple[int, ...], int] = ((), 0)

    def run_episodes(
        self,
        policy: Policy,
        numbers: range,
        path: tuple[int, ...],
        device: torch.device,
        num_agents: int,
        max_envs: int | None = None,
        **options: Any,  # of the function `run_episodes`
    ) -> list[Episode]:
        """Play one whole episode for each of the `numbers`, by which films are numbered; see `run_episodes`.

        All seeds derive from `path`, a path in the tree of seeds. Copies with several agents are complete.
        """
        most = max_envs or max(_MAX_ENVIRONMENTS, num_agents) // num_agents * num_agents
        num_envs = min(len(numbers), most)
        if not num_envs:
            return []
        num_envs += -num_envs % num_agents
        if self.spec.backend == "envpool" or (path, num_envs) != self._made_for:  # EnvPool cannot be seeded again
            self.close()
        if self.environments is None:
            self._made_for = path, num_envs
            seeds = [derive_seed(*path, index) for index in range(num_envs)]
            self.environments = make_environments(self.spec, num_envs, seeds)
        shares = [len(numbers[index::num_envs]) for index in range(num_envs)]
        if self.films is not None:
            pool: Any = self.environments.env.unwrapped
            number = iter(numbers)
            pool.call_each("film", [(self.films, itertools.islice(number, share)) for share in shares])
        generator = torch.Generator(device).manual_seed(derive_seed(*path))
        return run_episodes(self.environments, policy, shares, generator, **options)

    def close(self) -> None:
        environments, self.environments = self.environments, None
        if environments is not None:
            environments.close()
