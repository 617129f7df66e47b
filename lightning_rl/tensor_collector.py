"""Rollouts of environments that speak tensors: nothing goes through NumPy on the way to the update."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl import fast
from lightning_rl.distributed import exact_dtype
from lightning_rl.environments import TensorEnvironments, TensorStep
from lightning_rl.nested import Nested, map_leaves, map_space, map_stacked
from lightning_rl.policies.distributions import tensor_conversion
from lightning_rl.policies.interface import Policy, PolicyOutput, as_recurrent
from lightning_rl.policies.recurrent_state import EpisodeMemory
from lightning_rl.policies.values import Finals, estimate
from lightning_rl.profiling import ENVIRONMENT, POLICY, Profile, profiled
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout
from lightning_rl.spaces import observation_dtype
from lightning_rl.step_storage import StepStorage


class TensorCollector:
    """Collects rollouts as `Collector` does, from environments whose observations, rewards and flags are tensors.

    They stay on the policy's device. What the host reads is, at each step, whether any episode was cut off, and once
    per rollout the returns of finished episodes.

    Args:
        environments: The environments.
        observation_space: Of one environment.
        action_space: Of one environment.
        length: Number of steps `T`.
        generator: Draws the actions; on the policy's device.
        dtype: Of the policy's parameters; float64 keeps everything in float64, anything else in float32.
        info_keys: Keys of `info` whose values are wanted: a number, or one for each environment.
    """

    def __init__(
        self,
        environments: TensorEnvironments,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        length: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        info_keys: Sequence[str] = (),
    ) -> None:
        self.environments = environments
        self.length = length
        self.generator = generator
        self.info_keys = info_keys
        device, num_envs = generator.device, environments.num_envs
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def allocate(leaf: spaces.Space[Any]) -> Tensor:
            kind = torch.from_numpy(np.zeros(0, observation_dtype(leaf, dtype))).dtype
            return torch.zeros(length + 1, num_envs, *(leaf.shape or ()), dtype=kind, device=device)

        self._observations = map_space(allocate, observation_space)
        shape = (length, num_envs)
        self._rewards = torch.zeros(shape, dtype=self._dtype, device=device)
        flags = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(4))
        self._terminated, self._truncated, self._valid, self._starts = flags
        self._action_space = action_space
        self._conversion: Nested | None = None
        self._started = False
        self._memory = EpisodeMemory()
        # Where the observation before the next step is an episode's first.
        self._begins = torch.ones(num_envs, dtype=torch.bool, device=device)
        # Of the episodes that go on into the next rollout.
        self._returns = torch.zeros(num_envs, dtype=exact_dtype(device), device=device)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._told = False

    def collect(self, policy: Policy, policy_version: int = 0, profile: Profile | None = None) -> Rollout:
        """Take `length` steps in every environment.

        Args:
            policy: Chooses the actions.
            policy_version: Number of updates it has seen.
            profile: Measures each step's phases under their names, if there is one.

        Raises:
            EnvironmentFailure: An observation or reward was not finite.
        """
        start = time.perf_counter()
        if not self._started:
            self._put(-1, self.environments.reset())
            self._started = True
        self._put(0, map_leaves(lambda storage: storage[-1].clone(), self._observations))
        acting = _Acting(self.length)
        in_env = 0.0
        recurrent = as_recurrent(policy)
        acts: Callable[..., PolicyOutput] = policy.act if recurrent is None else recurrent.act
        acts = fast.actor(policy) or acts
        act = profiled(profile, POLICY, acts)
        take_step = profiled(profile, ENVIRONMENT, self.environments.step)
        if recurrent is not None:
            self._memory.begin_rollout(recurrent, self.environments.num_envs, self.length)
        # Not `inference_mode`: the tensors of the environments are their own.
        with torch.no_grad():
            for t in range(self.length):
                row = map_leaves(itemgetter(t), self._observations)
                remembered = {} if recurrent is None else {"memory": self._memory.before(t)}
                output = act(row, self.generator, **remembered)
                acting.actions.put(t, output.action)
                if output.log_prob is not None and output.value is not None:
                    acting.log_probs.put(t, output.log_prob)
                    acting.values.put(t, output.value)
                acted = time.perf_counter()
                step = take_step(self._convert(output.environment_action))
                in_env += time.perf_counter() - acted
                self._store(t, step)
                self._count(t, step, acting)
                truncated = self._truncated[t] & ~self._terminated[t]
                indices = truncated.nonzero().flatten() if bool(truncated.any()) else truncated.new_zeros(0).long()
                if len(indices):
                    self._keep_finals(t, indices, row, step, acting)
                if recurrent is not None:
                    before, places = self._memory.state, indices.tolist()
                    self._memory.after(t, output.memory, self._begins, places, ())
                    if step.reached is None:
                        self._memory.keep(t, places, before)
        rollout = profiled(profile, POLICY, self._put_together)(policy, acting)
        rollout.policy_version = policy_version
        rollout.info_names = sorted(step.infos if self.info_keys else ())
        if recurrent is not None:
            rollout.memory = map_stacked(torch.stack, self._memory.stored)
            rollout.burn_in = self._memory.burn_in
        rollout.seconds = time.perf_counter() - start
        # On a GPU both only give orders: Lightning's profiler of PyTorch tells them apart.
        rollout.parts_of_seconds = {"env": in_env, "policy": rollout.seconds - in_env}
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return, as tensors and plain values, what the next rollout depends on besides the policy."""
        last = map_leaves(lambda storage: storage[-1].to("cpu", copy=True), self._observations)
        return {
            "environments": self.environments.state_dict() if self._started else None,
            "observations": last,
            "generator": self.generator.get_state(),
            "returns": self._returns.to("cpu", copy=True),
            "lengths": self._lengths.to("cpu", copy=True),
            "begins": self._begins.to("cpu", copy=True),
            "memory": self._memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int] | None:
        """Go on from the end of a rollout that was collected elsewhere; see `Collector.load_state_dict`."""
        if len(state["generator"]) == len(self.generator.get_state()):  # the same kind of device
            self.generator.set_state(state["generator"].cpu())
        environments, num_envs = state["environments"], self.environments.num_envs
        if environments is None or len(state["returns"]) != num_envs:
            return None
        device = self.generator.device
        if not self.environments.load_state_dict(environments):
            return None
        self._put(-1, map_leaves(lambda x: x.to(device), state["observations"]))
        self._started = True
        self._returns = state["returns"].to(device, self._returns.dtype)
        self._lengths, self._begins = state["lengths"].to(device), state["begins"].to(device)
        self._memory.load_state_dict(state["memory"], np.ones(num_envs, bool), device)
        return []

    def _put(self, t: int, observations: Nested) -> None:
        map_leaves(lambda storage, x: storage[t].copy_(x), self._observations, observations)

    def _convert(self, action: Nested) -> Nested:
        if self._conversion is None:
            self._conversion = tensor_conversion(self._action_space, self.environments.device)
        return map_leaves(lambda convert, x: convert(x), self._conversion, action)

    def _store(self, t: int, step: TensorStep) -> None:
        self._put(t + 1, step.observations)
        self._rewards[t].copy_(step.rewards)
        self._terminated[t].copy_(step.terminated)
        self._truncated[t].copy_(step.truncated)
        self._starts[t].copy_(self._begins)
        if step.valid is None:
            self._valid[t] = True
        else:
            self._valid[t].copy_(step.valid)

    def _count(self, t: int, step: TensorStep, acting: _Acting) -> None:
        """Add a step to the episodes under way, and close those that it ends."""
        ended = self._terminated[t] | self._truncated[t]
        self._returns = self._returns + step.rewards.to(self._returns)
        self._lengths = self._lengths + self._valid[t]
        acting.returns.append(self._returns)
        acting.lengths.append(self._lengths)
        self._returns = self._returns.masked_fill(ended, 0)
        self._lengths = self._lengths.masked_fill(ended, 0)
        self._begins = ended | ~self._valid[t]
        for key in self.info_keys:
            if key in step.infos:
                value = step.infos[key]
                # The environments may write the next step's over it.
                value = value.clone() if isinstance(value, Tensor) else copy.copy(value)
                acting.infos.setdefault(key, []).append((value, step.valid))

    def _keep_finals(self, t: int, indices: Tensor, row: Nested, step: TensorStep, acting: _Acting) -> None:
        """Keep what episodes reached that were cut off with this step."""
        reached = step.reached
        if reached is None:
            reached = row
            if not self._told:
                self._told = True
                rank_zero_warn(
                    "the environments do not tell in info['final_obs'] what an episode reached that was cut off: its "
                    "last step goes on from the value of the observation before it"
                )
        acting.indices.append(torch.stack([torch.full_like(indices, t), indices], 1))
        acting.finals.append(map_leaves(lambda storage, x: x[indices].to(storage), self._observations, reached))

    def _put_together(self, policy: Policy, acting: _Acting) -> Rollout:
        device = self.generator.device
        none = map_leaves(lambda storage: storage[0, :0], self._observations)
        indices = torch.cat(acting.indices) if acting.indices else torch.zeros(0, 2, dtype=torch.long, device=device)
        final_observations = map_stacked(torch.cat, [none, *acting.finals])
        self.environments.check_finite(indices[:, 1], final_observations)
        actions = acting.actions.whole
        estimates = estimate(
            *(policy, self._observations, actions, acting.log_probs.whole, acting.values.whole, self._terminated),
            Finals(indices, final_observations, self._memory.at(indices.tolist())),
            self._memory.state,
        )
        rollout = Rollout(
            observations=self._observations,
            actions=actions,
            rewards=self._rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            valid=None if bool(self._valid.all()) else self._valid,
            **estimates._asdict(),
            final_indices=indices,
            final_observations=final_observations,
        )
        rollout.starts = self._starts.cpu()
        rollout.episodes = acting.finished(rollout.ends)
        rollout.infos = {key: acting.info_values(key) for key in self.info_keys}
        return rollout


class _Acting:
    """What one rollout has collected so far, an entry for each step."""

    def __init__(self, length: int) -> None:
        self.actions, self.log_probs, self.values = (StepStorage(length) for _ in range(3))
        self.returns: list[Tensor] = []
        self.lengths: list[Tensor] = []
        self.indices: list[Tensor] = []
        self.finals: list[Nested] = []
        self.infos: dict[str, list[tuple[Any, Tensor | None]]] = {}

    def finished(self, ends: Tensor) -> EpisodeSummary:
        """Return the episodes that ended, in the order of time."""
        returns, lengths = torch.stack(self.returns)[ends], torch.stack(self.lengths)[ends]
        return EpisodeSummary(returns.tolist(), lengths.tolist())

    def info_values(self, key: str) -> list[float]:
        """Return the numbers that real steps reported."""
        found: list[float] = []
        for value, valid in self.infos.get(key, []):
            numbers = torch.as_tensor(value).to("cpu", torch.float64)
            if numbers.dim() and valid is not None:
                numbers = numbers[valid.cpu()]
            found += numbers.flatten().tolist()
        return found
