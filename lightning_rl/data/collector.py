"""Collects rollouts from environments, and restores where the environments were."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from operator import itemgetter, setitem
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl import fast
from lightning_rl.distributed import exact_dtype, gather_on_rank_zero, gather_ranks
from lightning_rl.environments import (
    EnvironmentBatch,
    EnvironmentFailure,
    EnvironmentSpec,
    Step,
    TensorEnvironments,
    TensorStep,
    make_environments,
)
from lightning_rl.environments.seeding import SAMPLING, TRAINING, derive_seed
from lightning_rl.nested import Nested, first_leaf, map_leaves, map_space, map_stacked
from lightning_rl.policies.distributions import tensor_conversion, to_environment
from lightning_rl.policies.interface import Policy, PolicyOutput, as_recurrent
from lightning_rl.policies.recurrent_state import RecurrentState
from lightning_rl.policies.values import Finals, estimate
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout
from lightning_rl.spaces import observation_dtype

Profile: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""Opens what is measured under a name: `profile` of Lightning's profilers."""
ENVIRONMENT, POLICY, TRANSFER = "rollout.environment", "rollout.policy", "rollout.transfer"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def profiled(
    profile: Profile | None, name: str, function: Callable[_Arguments, _Result]
) -> Callable[_Arguments, _Result]:
    """Return a function that does the same and is measured; the function itself, at no cost, where nothing measures.

    Args:
        profile: What measures.
        name: What calls of it are called.
        function: The function.
    """
    if profile is None:
        return function
    opened = profile

    @wraps(function)
    def measured(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with opened(name):
            return function(*args, **kwargs)

    return measured


class StepStorage:
    """Memory for what the steps of a rollout give one by one, allocated at the first of them.

    Small tensors that are kept one by one would come to lie between the images that an encoder makes and forgets at
    each step, and hold the heap in pieces.

    Args:
        length: Number of steps `T`.

    Attributes:
        whole: `[T, B, ...]`, nested as what was put in; None where nothing was.
    """

    def __init__(self, length: int) -> None:
        self.whole: Nested | None = None
        self._length = length

    def put(self, t: int, x: Nested) -> None:
        """Store `x`, `[B, ...]`, without gradient, as what step `t` gave."""
        if self.whole is None:
            with torch.inference_mode(False):  # the rollout outlives the mode
                self.whole = map_leaves(lambda leaf: leaf.new_empty(self._length, *leaf.shape), x)
        if isinstance(self.whole, Tensor):  # not nested, as most actions are
            self.whole[t].copy_(x)
        else:
            map_leaves(lambda whole, leaf: whole[t].copy_(leaf), self.whole, x)


class Collector:
    """Collects rollouts of fixed length, episode after episode.

    Storage is allocated once and reused. Only what acting needs is computed step by step; log-probabilities and values
    that the policy does not give on the way are computed for the whole rollout at its end, with the same parameters.

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
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        shape = (length, environments.num_envs)
        # An array for each leaf.
        self._observations = map_space(
            lambda leaf: np.zeros((length + 1, shape[1], *(leaf.shape or ())), observation_dtype(leaf, dtype)),
            observation_space,
        )
        # The same memory, row by row: what the policy sees at each step.
        tensors = map_leaves(torch.from_numpy, self._observations)
        self._rows = [map_leaves(itemgetter(t), tensors) for t in range(length + 1)]
        self._rewards = np.zeros(shape)  # float64 whatever the policy's, so that returns are exact
        self._terminated, self._truncated, self._valid = (np.zeros(shape, bool) for _ in range(3))
        # Of steps that an environment failed in; the episodes before them have no end of their own.
        self._failed = np.zeros(shape, bool)
        self._started = False
        self._memory = RecurrentState()
        # Where the observation before the next step is an episode's first.
        self._episode_starts = np.ones(shape[1], bool)
        # Of the episodes that go on into the next rollout.
        self._returns = np.zeros(shape[1])
        self._lengths = np.zeros(shape[1], np.int64)

    def collect(self, policy: Policy, policy_version: int = 0, profile: Profile | None = None) -> Rollout:
        """Take `length` steps in every environment.

        Args:
            policy: Chooses the actions.
            policy_version: Number of updates it has seen.
            profile: Measures each step's phases under their names, if there is one.

        Raises:
            EnvironmentFailure: An environment failed, or returned an observation or reward that is not finite.
        """
        start = time.perf_counter()
        if not self._started:
            self._put(-1, self.environments.reset())
            self._started = True
        self._put(0, map_leaves(itemgetter(-1), self._observations))
        device = self.generator.device
        actions, log_probs, values = (StepStorage(self.length) for _ in range(3))
        finals: list[tuple[int, int, Any]] = []
        infos: dict[str, list[float]] = {key: [] for key in self.info_keys}
        info_names: set[str] = set()
        repeats, frames = self.environments.frames_per_step > 1 or self.environments.learned_repeats, 0
        taken_times: list[Tensor] = []
        self._valid.fill(True)
        self._failed.fill(False)
        clock, in_env, in_policy, in_transfer = time.perf_counter, 0.0, 0.0, 0.0
        recurrent = as_recurrent(policy)
        acts: Callable[..., PolicyOutput] = policy.act if recurrent is None else recurrent.act
        acts = fast.actor(policy) or acts
        act = profiled(profile, POLICY, acts)
        take_step = profiled(profile, ENVIRONMENT, self.environments.step)
        to_device, to_arrays = profiled(profile, TRANSFER, _to_device), profiled(profile, TRANSFER, _to_arrays)
        if recurrent is not None:
            self._memory.start_rollout(recurrent, len(self._episode_starts), self.length)
        with torch.inference_mode():
            for t in range(self.length):
                begun, row = clock(), self._rows[t]
                row = row if device.type == "cpu" else to_device(row, device)
                moved = clock()
                remembered = {} if recurrent is None else {"memory": self._memory.before(t)}
                output = act(row, self.generator, **remembered)
                acted = clock()
                actions.put(t, output.action)
                if output.log_prob is not None and output.value is not None:
                    log_probs.put(t, output.log_prob)
                    values.put(t, output.value)
                taken = to_arrays(output.environment_action)
                taken_at = clock()
                step = take_step(to_environment(self.action_space, taken))
                in_env += clock() - taken_at
                in_policy += acted - moved
                in_transfer += taken_at - acted + moved - begun
                self._store(t, step)
                if recurrent is not None:
                    truncated = np.flatnonzero(step.truncated & ~step.terminated).tolist()
                    episode_starts = self._terminated[t] | self._truncated[t] | ~self._valid[t]
                    self._memory.after(t, output.memory, episode_starts, truncated, step.failed)
                for index, observation in step.final_observations:
                    if not step.terminated[index]:  # only a truncated episode goes on from the value of what it reached
                        finals.append((t, index, observation))
                frames += self.environments.count_frames(step) if repeats else 0
                if self.environments.learned_repeats:
                    taken_times.append(torch.from_numpy(self.environments.repeats(step)))
                for key in infos:
                    infos[key] += self.environments.info_values(step, key)
                if infos and step.final_observations:  # most is told at the end of an episode
                    info_names.update(step.infos.get("final_info", step.infos))
        episode_starts = self._terminated | self._truncated | ~self._valid
        starts, self._episode_starts = (
            np.concatenate([self._episode_starts[None], episode_starts[:-1]]),
            episode_starts[-1],
        )
        episodes = self._finished_episodes()
        if self._failed.any():
            finals += self._cut_off_episodes()
        evaluated = clock()
        evaluate = profiled(profile, POLICY, self._evaluate)
        rollout = evaluate(policy, actions.whole, log_probs.whole, values.whole, finals)
        in_policy += clock() - evaluated
        rollout.starts = torch.from_numpy(starts)
        if recurrent is not None:
            rollout.memory = map_stacked(torch.stack, self._memory.stored)
            rollout.burn_in = self._memory.burn_in
        rollout.policy_version = policy_version
        rollout.repeats = torch.stack(taken_times).to(device) if taken_times else None
        rollout.episodes = episodes
        rollout.infos = infos
        rollout.info_names = sorted((info_names or step.infos) if infos else ())
        rollout.frames = frames if repeats else None
        rollout.seconds = time.perf_counter() - start
        rollout.parts_of_seconds = {"env": in_env, "policy": in_policy, "transfer": in_transfer}
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return, as tensors and plain values, what the next rollout depends on besides the policy."""
        return {
            "environments": self.environments.state_dict() if self._started else None,
            "generator": self.generator.get_state(),
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
            "episode_starts": torch.from_numpy(self._episode_starts.copy()),
            "memory": self._memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int] | None:
        """Go on from the end of a rollout that was collected elsewhere.

        Returns:
            The environments that have begun new episodes, since they could not be restored or were not there; None if
            none could be restored.
        """
        if len(state["generator"]) == len(self.generator.get_state()):  # the same kind of device
            self.generator.set_state(state["generator"].cpu())
        if state["environments"] is None:
            return None
        restored = self.environments.load_state_dict(state["environments"])
        if restored is None:
            return None
        exact, observations = restored
        self._put(-1, observations)
        self._started = True
        for own, name in ((self._returns, "returns"), (self._lengths, "lengths")):
            stored = state[name].numpy()[: len(own)]
            own[: len(stored)] = np.where(exact[: len(stored)], stored, 0)
        stored = state["episode_starts"].numpy()[: len(exact)]
        self._episode_starts[: len(stored)] = stored | ~exact[: len(stored)]
        self._memory.load_state_dict(state["memory"], exact, self.generator.device)
        return [int(index) for index in np.flatnonzero(~exact)]

    def _put(self, t: int, observations: Nested) -> None:
        if isinstance(self._observations, np.ndarray):  # not nested: no detour in every step
            self._observations[t] = observations
        else:
            map_leaves(lambda storage, x: setitem(storage, t, x), self._observations, observations)

    def _store(self, t: int, step: Step) -> None:
        self._put(t + 1, step.observations)
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid
            self._failed[t, list(step.failed)] = True

    def _cut_off_episodes(self) -> list[tuple[int, int, Any]]:
        """Truncate the episodes that a failure cut off at their last real step, and return where that led to."""
        # One that was cut off in the first step goes on from the last rollout, which has been learned from.
        cut = self._failed[1:] & ~self._terminated[:-1] & ~self._truncated[:-1] & self._valid[:-1]
        self._truncated[:-1] |= cut
        places = [(int(t), int(index)) for t, index in np.argwhere(cut)]
        return [(t, index, map_leaves(itemgetter((t + 1, index)), self._observations)) for t, index in places]

    def _evaluate(
        self,
        policy: Policy,
        actions: Nested,
        log_probs: Tensor | None,
        values: Tensor | None,
        finals: list[tuple[int, int, Any]],
    ) -> Rollout:
        """Compute log-probabilities and values that acting did not give, and put the rollout together."""
        device = self.generator.device
        observations = map_leaves(lambda x: torch.from_numpy(x).to(device), self._observations)
        indices = torch.tensor([(t, index) for t, index, _ in finals], dtype=torch.long, device=device).view(-1, 2)
        final_arrays = map_leaves(lambda x: np.zeros((len(finals), *x.shape[2:]), x.dtype), self._observations)
        for k, (_, _, observation) in enumerate(finals):
            map_leaves(lambda storage, x, k=k: setitem(storage, k, x), final_arrays, observation)
        final_observations = map_leaves(lambda x: torch.from_numpy(x).to(device), final_arrays)
        terminated = torch.from_numpy(self._terminated).to(device)
        memory = self._memory.at([(t, index) for t, index, _ in finals])
        estimates = estimate(
            *(policy, observations, actions, log_probs, values, terminated),
            Finals(indices, final_observations, memory),
            self._memory.state,
        )
        return Rollout(
            observations=observations,
            actions=actions,
            rewards=torch.from_numpy(self._rewards).to(device, self._dtype, copy=True),
            terminated=terminated,
            truncated=torch.from_numpy(self._truncated).to(device),
            valid=None if self._valid.all() else torch.from_numpy(self._valid).to(device),
            **estimates._asdict(),
            final_indices=indices,
            final_observations=final_observations,
        )

    def _finished_episodes(self) -> EpisodeSummary:
        """Return the episodes that ended in this rollout, in order; sums are float64 and carried between rollouts.

        Those that a failure cut off are left out: they say more about the failure than about the policy.
        """
        summary = EpisodeSummary([], [])
        ends = self._terminated | self._truncated
        first = np.zeros(len(self._returns), np.int64)
        steps = self._valid.cumsum(0)  # of the rollout, up to here
        for t, index in np.argwhere(ends | self._failed).tolist():
            begin = first[index]
            if not self._failed[t, index]:
                summary.returns.append(float(self._returns[index] + self._rewards[begin : t + 1, index].sum()))
                summary.lengths.append(int(self._lengths[index] + steps[t, index]))
            # What comes after it is counted from there.
            self._returns[index], self._lengths[index], first[index] = 0.0, -steps[t, index], t + 1
        goes_on = np.arange(self.length)[:, None] >= first
        self._returns += self._rewards.sum(0, where=goes_on)
        self._lengths += steps[-1]
        return summary


def _to_device(observations: Nested, device: torch.device) -> Nested:
    return map_leaves(lambda x: x.to(device), observations)


def _to_arrays(actions: Nested) -> Nested:
    return _to_numpy(actions) if isinstance(actions, Tensor) else map_leaves(_to_numpy, actions)


def _to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return x.cpu().numpy()


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
        self._memory = RecurrentState()
        # Where the observation before the next step is an episode's first.
        self._episode_starts = torch.ones(num_envs, dtype=torch.bool, device=device)
        # Of the episodes that go on into the next rollout.
        self._returns = torch.zeros(num_envs, dtype=exact_dtype(device), device=device)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._warned = False

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
            self._memory.start_rollout(recurrent, self.environments.num_envs, self.length)
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
                    self._memory.after(t, output.memory, self._episode_starts, places, ())
                    if step.reached is None:
                        self._memory.store(t, places, before)
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
            "episode_starts": self._episode_starts.to("cpu", copy=True),
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
        self._lengths, self._episode_starts = state["lengths"].to(device), state["episode_starts"].to(device)
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
        self._starts[t].copy_(self._episode_starts)
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
        self._episode_starts = ended | ~self._valid[t]
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
            if not self._warned:
                self._warned = True
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
        rollout.episodes = acting.finished(rollout.dones)
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


# From here on it may take some seconds: a game of Atari has up to 27,000 steps, of a millisecond each.
_MANY_STEPS = 5000


def restore(
    collector: Collector | TensorCollector, states: Sequence[dict[str, Any] | None], rank: int, name: str
) -> None:
    """Take the environments of a rank back to where a checkpoint left them; a collective call.

    What could not be taken back begins new episodes, and is said once for all ranks.

    Args:
        collector: Has the environments of this rank.
        states: Of the ranks that there were; a further one begins anew.
        rank: This one.
        name: Of the environments.
    """
    fresh: list[int] | None = []
    if rank < len(states):
        state = states[rank]
        if (steps := _recorded_steps(state)) >= _MANY_STEPS:
            rank_zero_info(f"Playing {steps:,} recorded steps of {name} again, to go on with the episodes under way")
        fresh = None if state is None else collector.load_state_dict(state)
        if state is not None and fresh:  # those that were not there before are not missed
            fresh = [index for index in fresh if index < len(state["returns"])]
    ranks = gather_ranks(fresh)
    lost = [_which(indices, index, len(ranks)) for index, indices in enumerate(ranks) if indices is None or indices]
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)} of {name} could not be taken back to where they were: they begin new episodes, so this "
            "run is not bit for bit what it would have been"
        )


def _recorded_steps(state: Mapping[str, Any] | None) -> int:
    environments = (state or {}).get("environments") or {}
    records = environments["environments"] if environments.get("kind") == "episodes" else []
    return sum(len(first_leaf(record["actions"])) for record in records if "actions" in record)


def _which(indices: list[int] | None, rank: int, num_ranks: int) -> str:
    """Name environments of a rank; None stands for all."""
    which = "the environments" if indices is None else f"environments {', '.join(map(str, indices))}"
    return which if num_ranks == 1 else f"{which} on rank {rank}"


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
            rollout.failures = pop_failures(self.environments)
        return rollout

    def store_state(self, in_between: bool) -> None:
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

    def restart_episodes(self) -> bool:
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


def pop_failures(environments: EnvironmentBatch | TensorEnvironments | None) -> list[str]:
    """Return what happened to environments that were replaced; those that speak tensors, or are not there, are not."""
    return environments.pop_failures() if isinstance(environments, EnvironmentBatch) else []
