"""The environments that rollouts come from, and where a run is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces

from lightning_rl.collector import Collector
from lightning_rl.distributed import gather_on_rank_zero
from lightning_rl.environments import (
    EnvironmentBatch,
    EnvironmentFailure,
    EnvironmentSpec,
    TensorEnvironments,
    make_environments,
)
from lightning_rl.environments.seeding import SAMPLING, TRAINING, derive_seed
from lightning_rl.policies.interface import Policy
from lightning_rl.profiling import Profile
from lightning_rl.restoring import restore
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.tensor_collector import TensorCollector


class Sampler:
    """Makes training environments at the first rollout, when it is known what is resumed from, and keeps them.

    Args:
        spec: Of one environment.
        num_envs: How many.
        rollout_length: Steps of each in a rollout.
        info_keys: Keys of `info` whose values are wanted.

    Attributes:
        environments: None where none are open.
        starts: How often environments were made in this run, by the runs that it goes on from too.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int, rollout_length: int, info_keys: Sequence[str]) -> None:
        self.spec, self.num_envs, self.rollout_length, self.info_keys = spec, num_envs, rollout_length, info_keys
        self.environments: EnvironmentBatch | TensorEnvironments | None = None
        self.starts = 0
        self._collector: Collector | TensorCollector | None = None
        self._last_state: dict[str, Any] | None = None
        self._restored: list[Any] = []

    @property
    def started(self) -> bool:
        """Whether there are environments to collect from."""
        return self._collector is not None

    def start(
        self,
        space_pair: tuple[spaces.Space[Any], spaces.Space[Any]],
        seed: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the environments, and go on from where an earlier run was; a collective call.

        Args:
            space_pair: Observation and action space of one environment.
            seed: Root of all seeds.
            rank: Of this process.
            device: Of the policy.
            dtype: Of its parameters.
        """
        # A start that goes on from another one has new episodes, where those under way cannot be restored.
        seeds = [derive_seed(seed, TRAINING, rank, index, self.starts) for index in range(self.num_envs)]
        generator = torch.Generator(device).manual_seed(derive_seed(seed, SAMPLING, rank, self.starts))
        self.starts += 1
        self._last_state = None
        self.environments = make_environments(self.spec, self.num_envs, seeds, space_pair=space_pair)
        options = (*space_pair, self.rollout_length, generator, dtype, self.info_keys)
        if isinstance(self.environments, TensorEnvironments):
            self._collector = TensorCollector(self.environments, *options)
        else:
            self._collector = Collector(self.environments, *options)
        if self._restored:
            states, self._restored = self._restored, []
            restore(self._collector, states, rank, f"{self.spec.env_id} (backend {self.spec.backend!r})")

    def collect(self, policy: Policy, policy_version: int, profile: Profile | None = None) -> Rollout:
        """Collect one rollout from environments that were started.

        Args:
            policy: Chooses the actions.
            policy_version: Number of updates it has seen.
            profile: Measures each step's phases, if there is one.
        """
        assert self._collector is not None
        rollout = self._collector.collect(policy, policy_version, profile)
        if self.spec.on_env_failure == "restart":
            rollout.failures = take_failures(self.environments)
        return rollout

    def remember(self, in_between: bool) -> None:
        """Keep where the environments are for a later checkpoint, unless they are about to be closed.

        Args:
            in_between: Whether all that was collected has been learned from; if not, there is nothing to go on from.
        """
        if self._collector is None:
            return
        self._last_state = None
        if in_between:
            with contextlib.suppress(EnvironmentFailure):
                self._last_state = self._collector.state_dict()

    def begin_anew(self) -> bool:
        """Count a start with new episodes, wherever an earlier run was, and return whether there was one."""
        self.starts += 1
        resumed, self._restored, self._last_state = bool(self._restored), [], None
        return resumed

    def close(self) -> None:
        """Close the environments, if there are any."""
        environments, self.environments, self._collector = self.environments, None, None
        if environments is not None:
            environments.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from, of all ranks on rank 0 alone; a collective call."""
        if self._restored and self._collector is None:  # it has not come to its first rollout
            return {"starts": self.starts, "ranks": self._restored}
        state = self._last_state if self._collector is None else self._collector.state_dict()
        return {"starts": self.starts, "ranks": gather_on_rank_zero(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier run, at the next rollout."""
        self.starts, self._restored = state["starts"], state["ranks"]


def take_failures(environments: EnvironmentBatch | TensorEnvironments | None) -> list[str]:
    """Return what happened to environments that were replaced; those that speak tensors, or are not there, are not."""
    return environments.take_failures() if isinstance(environments, EnvironmentBatch) else []
