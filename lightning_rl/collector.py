"""Policy and environments put together: rollouts to learn from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import itemgetter, setitem
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl import fast
from lightning_rl.environments import EnvironmentBatch, Step
from lightning_rl.nested import Nested, map_leaves, map_space, map_stacked
from lightning_rl.policies.distributions import to_environment
from lightning_rl.policies.interface import Policy, PolicyOutput, as_recurrent
from lightning_rl.policies.recurrent_state import EpisodeMemory
from lightning_rl.policies.values import Finals, estimate
from lightning_rl.profiling import ENVIRONMENT, POLICY, TRANSFER, Profile, profiled
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout
from lightning_rl.spaces import observation_dtype
from lightning_rl.step_storage import StepStorage


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
        self._lost = np.zeros(shape, bool)
        self._started = False
        self._memory = EpisodeMemory()
        # Where the observation before the next step is an episode's first.
        self._begins = np.ones(shape[1], bool)
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
        self._lost.fill(False)
        clock, in_env, in_policy, in_transfer = time.perf_counter, 0.0, 0.0, 0.0
        recurrent = as_recurrent(policy)
        acts: Callable[..., PolicyOutput] = policy.act if recurrent is None else recurrent.act
        acts = fast.actor(policy) or acts
        act = profiled(profile, POLICY, acts)
        take_step = profiled(profile, ENVIRONMENT, self.environments.step)
        to_device, to_arrays = profiled(profile, TRANSFER, _to_device), profiled(profile, TRANSFER, _to_arrays)
        if recurrent is not None:
            self._memory.begin_rollout(recurrent, len(self._begins), self.length)
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
                    begins = self._terminated[t] | self._truncated[t] | ~self._valid[t]
                    self._memory.after(t, output.memory, begins, truncated, step.lost)
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
        begins = self._terminated | self._truncated | ~self._valid
        starts, self._begins = np.concatenate([self._begins[None], begins[:-1]]), begins[-1]
        episodes = self._finished_episodes()
        if self._lost.any():
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
            "begins": torch.from_numpy(self._begins.copy()),
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
        stored = state["begins"].numpy()[: len(exact)]
        self._begins[: len(stored)] = stored | ~exact[: len(stored)]
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
            self._lost[t, list(step.lost)] = True

    def _cut_off_episodes(self) -> list[tuple[int, int, Any]]:
        """Truncate the episodes that a failure cut off at their last real step, and return where that led to."""
        # One that was cut off in the first step goes on from the last rollout, which has been learned from.
        cut = self._lost[1:] & ~self._terminated[:-1] & ~self._truncated[:-1] & self._valid[:-1]
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
        for t, index in np.argwhere(ends | self._lost).tolist():
            begin = first[index]
            if not self._lost[t, index]:
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
