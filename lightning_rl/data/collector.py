"""Steps environments with a policy, stores the steps as rollouts, and restores environments when a run resumes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter, setitem
from typing import Any, TypeAlias, TypeVar, cast

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
    make_environments,
)
from lightning_rl.environments.contract import LIFE_LOST, SAMPLING, TRAINING, EnvSettings, derive_seed, listed
from lightning_rl.nested import Nested, first_leaf, map_leaves, map_space, map_stacked
from lightning_rl.policies.interface import Policy, PolicyOutput, as_recurrent, tensor_conversion, to_environment
from lightning_rl.policies.recurrent import RecurrentState
from lightning_rl.policies.values import Finals, check_shape, estimate_values, log_probs_of
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout
from lightning_rl.spaces import observation_dtype

Profile: TypeAlias = Callable[[str], contextlib.ContextDecorator]
"""`profile` of one of Lightning's profilers: measures a `with` block under a name."""
ENVIRONMENT, POLICY, TRANSFER = "rollout.environment", "rollout.policy", "rollout.transfer"
AHEAD_FROM = 2.0
"""Least ratio of environment time to policy time for acting ahead, which doubles the policy time."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def profiled(profile: Profile | None, name: str, function: _Function) -> _Function:
    """Return `function` with its calls profiled under `name`; without a profiler, `function` itself."""
    return function if profile is None else profile(name)(function)


def copy_rows(ahead: PolicyOutput, count: int, output: PolicyOutput) -> None:
    """Copy the first `count` rows of `ahead` to `output`; they only differ if a network computes across rows."""
    for name in ("action", "environment_action", "log_prob", "value"):
        if (x := getattr(output, name)) is not None:
            map_leaves(lambda other, one: other[:count].copy_(one[:count]), x, getattr(ahead, name))


class Collector:
    """Steps environments with a policy and stores the steps.

    Training calls `collect` for whole rollouts; evaluation calls `start` and `advance` for single steps. The storage is
    allocated once and reused: in the host's memory for environments of arrays, on the device for environments of
    tensors. Log-probabilities and values that `policy.act` does not return are computed at the end of the rollout.

    Args:
        environments: The environments; the first step resets them.
        length: Number of steps `T`.
        generator: Draws the actions, on the policy's device.
        dtype: Dtype of the policy's parameters. Rollouts are float64 with float64 parameters, else float32.
        info_keys: Keys of `info` whose values are collected.

    Attributes:
        observations: Arrays or tensors `[T + 1, B, ...]`; the last row is the observation after the last step.
        actions: The latest actions, in the form that the environments took.
        memory: State of a recurrent policy.
    """

    def __init__(
        self,
        environments: EnvironmentBatch,
        length: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        info_keys: Sequence[str] = (),
    ) -> None:
        self.environments = environments
        self.length = length
        self.generator = generator
        self.info_keys = info_keys
        self.memory = RecurrentState()
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._has_tensors = isinstance(environments, TensorEnvironments)
        device = generator.device if self._has_tensors else torch.device("cpu")
        self._moves_observations = device != generator.device
        num_envs = environments.num_envs

        def allocate(leaf: spaces.Space[Any]) -> Tensor:
            kind = torch.from_numpy(np.zeros(0, observation_dtype(leaf, dtype))).dtype
            return torch.zeros(length + 1, num_envs, *(leaf.shape or ()), dtype=kind, device=device)

        with torch.inference_mode(False):  # rollouts outlive the mode
            self._observed = map_space(allocate, environments.single_observation_space)
            # float64, so that sums over long episodes are exact.
            self._stored = {"rewards": torch.zeros(length, num_envs, dtype=exact_dtype(device), device=device)}
            for name in ("terminated", "truncated", "valid", "failed"):
                self._stored[name] = torch.zeros(length, num_envs, dtype=torch.bool, device=device)
            self._rows = [map_leaves(itemgetter(t), self._observed) for t in range(length + 1)]
        # Arrays on the same memory, for environments of arrays: writing to them is faster than to tensors.
        self.observations = map_leaves(self._view, self._observed)
        self._views = map_leaves(self._view, self._stored)
        self._started = self._warned = False
        # Whether the next observation is the first of an episode, and return and length of the unfinished episodes.
        self._episode_starts = np.ones(num_envs, bool)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def collect(self, policy: Policy, policy_version: int = 0, profile: Profile | None = None) -> Rollout:
        """Take `length` steps in every environment; `profile` measures environment, policy and transfer in each step.

        A failure, or an observation or reward that is not finite, raises an `EnvironmentFailure`.
        """
        begun = time.perf_counter()
        infos: dict[str, list[Tensor]] = {key: [] for key in self.info_keys}
        info_names: set[str] = set()
        frames: list[int] = []
        repeats: list[Tensor] = []
        recurrent = as_recurrent(policy)
        if isinstance(self.environments, TensorEnvironments) and getattr(policy, "fast_paths", None) == "compiled":
            self.environments.compile()
        is_first = not self._started
        self.start(fast.actor(policy) or (policy if recurrent is None else recurrent).act, profile)
        if is_first:
            self.environments.state_dict()  # a state that cannot be stored raises now, not at the first checkpoint
        if getattr(policy, "chooses_rows_alone", False):
            self._acts_ahead = self.environments.can_step_ahead
        if recurrent is not None:
            self.memory.start_rollout(recurrent, self.environments.num_envs, self.length)
        # Environments of tensors may keep tensors for later, which must not be inference tensors.
        with torch.no_grad() if self._has_tensors else torch.inference_mode():
            for t in range(self.length):
                step = self.advance(t)
                if step.frames is not None:
                    frames.append(step.frames)
                if step.repeats is not None:
                    repeats.append(torch.from_numpy(step.repeats))
                for key in infos:
                    infos[key].append(self.environments.info_values(step, key))
                if infos:
                    info_names.update(step.infos.get("final_info", step.infos))
        evaluated = time.perf_counter()
        rollout = profiled(profile, POLICY, self._make_rollout)(policy)
        self._seconds["policy"] += time.perf_counter() - evaluated
        rollout.policy_version = policy_version
        rollout.repeats = torch.stack(repeats).to(self.generator.device) if repeats else None
        rollout.infos = {key: torch.stack(values) for key, values in infos.items()} or None
        rollout.info_names = sorted(name for name in info_names if isinstance(name, str))
        rollout.frames = sum(frames) if frames else None
        rollout.seconds = time.perf_counter() - begun
        rollout.parts_of_seconds = self._seconds
        return rollout

    def start(self, act: Callable[..., PolicyOutput], profile: Profile | None = None) -> None:
        """Prepare `length` steps whose actions `act` chooses; the first call resets the environments."""
        if not self._started:
            self._put(-1, self.environments.reset())
            self._started = True
        # The last row of one rollout is the first row of the next.
        self._put(0, map_leaves(itemgetter(-1), self.observations))
        self._views["valid"][:] = True
        self._views["failed"][:] = False
        self._acted: dict[str, Nested] = {}
        self._finals: list[tuple[int, int, Nested | None]] = []
        self._seconds = {"env": 0.0, "policy": 0.0} | ({} if self._has_tensors else {"transfer": 0.0})
        self._acts_ahead = False
        self._ahead: tuple[int, PolicyOutput] | None = None
        # None of these functions refers to the collector: a cycle would keep the environments and their threads alive.
        self._act = profiled(profile, POLICY, act)
        self._step: Callable[..., Step] = profiled(profile, ENVIRONMENT, self.environments.step)
        self._to_device = profiled(profile, TRANSFER, _to_device)
        self._convert: Callable[[Nested], Nested]
        if self._has_tensors:
            device = first_leaf(cast(TensorEnvironments, self.environments).observations).device
            self._convert = tensor_conversion(self.environments.single_action_space, device)
        else:
            self._convert = profiled(profile, TRANSFER, partial(_to_arrays, self.environments.single_action_space))

    def advance(self, t: int) -> Step:
        """Take step `t` in every environment."""
        clock, seconds = time.perf_counter, self._seconds
        begun = clock()
        row = self._policy_row(t)
        moved = clock()
        state = {} if self.memory.state is None else {"memory": self.memory.before(t)}
        output = self._act(row, self.generator, **state)
        if self._ahead is not None:
            (count, ahead), self._ahead = self._ahead, None
            copy_rows(ahead, count, output)
        acted = clock()
        self._store("actions", t, output.action)
        if output.log_prob is not None and output.value is not None:
            self._store("log_probs", t, output.log_prob)
            self._store("values", t, output.value)
        self.actions = self._convert(output.environment_action)
        converted = clock()
        if self._acts_ahead and t + 1 < self.length and seconds["env"] >= AHEAD_FROM * seconds["policy"]:
            self.environments.choose_ahead(partial(self._choose_ahead, t + 1))
        step = self._step(self.actions)
        seconds["env"] += clock() - converted
        seconds["policy"] += acted - moved
        if not self._has_tensors:
            seconds["transfer"] += converted - acted + moved - begun
        self._put(t + 1, step.observations)
        for name in ("rewards", "terminated", "truncated"):
            self._views[name][t] = getattr(step, name)
        if step.valid is not None:
            self._views["valid"][t] = step.valid
            self._views["failed"][t, list(step.failed)] = True
        self._finals += [(t, index, observation) for index, observation in step.final_observations]
        if self.memory.state is not None:
            self._update_memory(t, step, output.memory)
        return step

    def _choose_ahead(self, t: int, count: int, observations: Nested) -> Nested | None:
        """Choose the actions of step `t` for the first `count` environments while the others take step `t - 1`.

        The policy acts on all `B` rows with the noise of step `t`, because a matrix product of fewer rows may round
        differently. The other rows hold the observations of step `t - 1`. Return None if the policy raised.
        """
        begun = time.perf_counter()

        def fill(rows: Any, x: Any) -> None:  # arrays of one leaf
            rows[t, :count], rows[t, count:] = x[:count], rows[t - 1, count:]

        map_leaves(fill, self.observations, observations)
        noise = self.generator.get_state()
        try:
            output = self._act(self._policy_row(t), self.generator)
            actions = self._convert(output.environment_action)
        except Exception:  # `advance` calls the policy again, and raises there
            return None
        finally:
            self.generator.set_state(noise)
            taken = time.perf_counter() - begun
            self._seconds["policy"] += taken
            self._seconds["env"] -= taken  # `environments.step`, which is timed, calls this method
        self._ahead = count, output
        return actions

    def finished_episodes(self) -> list[tuple[int, int, float, int]]:
        """Return step, environment, return and length of each episode that ended in these steps, in order.

        Call it once after the steps: it also adds the steps of unfinished episodes to their return and length. Episodes
        that an environment's failure ended are left out.
        """
        rewards, failed, steps = self._on_host("rewards"), self._on_host("failed"), self._on_host("valid").cumsum(0)
        ends = self._on_host("terminated") | self._on_host("truncated") | failed
        if not ends.any():
            self._returns += rewards.sum(0)
            self._lengths += steps[-1]
            return []
        index, t = ends.T.nonzero()  # environment by environment, in time order
        goes_on = np.diff(index, prepend=-1) != 0  # the episode began before these steps
        begins = np.where(goes_on, 0, np.roll(t, 1) + 1)
        # Sums between the places of `begins` and `t + 1` among all rewards; a 0 follows the last one.
        places = np.stack([index * self.length + begins, index * self.length + t + 1], 1)
        returns = np.add.reduceat(np.append(rewards.T, 0.0), places.ravel())[::2]
        returns += np.where(goes_on, self._returns[index], 0.0)
        lengths = steps[t, index] + np.where(goes_on, self._lengths[index], -steps[begins - 1, index])
        # The next episode begins after the last end; the assignments keep the last entry for each environment.
        first = np.zeros(len(self._returns), np.int64)
        first[index] = t + 1
        self._returns[index], self._lengths[index] = 0.0, -steps[t, index]
        self._returns += rewards.sum(0, where=np.arange(self.length)[:, None] >= first)
        self._lengths += steps[-1]
        found = zip(t.tolist(), index.tolist(), returns.tolist(), lengths.tolist(), strict=True)
        return sorted(episode for episode in found if not failed[episode[:2]])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next rollout depends on except the policy, as tensors and plain values."""
        return {
            "environments": self.environments.state_dict() if self._started else None,
            "generator": self.generator.get_state(),
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
            "episode_starts": torch.from_numpy(self._episode_starts.copy()),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int] | None:
        """Restore a state in a new collector, and return the environments that began other episodes; None for all."""
        if len(state["generator"]) == len(self.generator.get_state()):  # the same kind of device
            self.generator.set_state(state["generator"].cpu())
        restored = None if state["environments"] is None else self.environments.load_state_dict(state["environments"])
        if restored is None:
            return None
        exact, observations = restored
        self._put(-1, observations)
        self._started = True
        stored = exact[: len(state["returns"])]  # environments that the stored run did not have are not lost
        kept = np.flatnonzero(stored)
        own = {"returns": self._returns, "lengths": self._lengths, "episode_starts": self._episode_starts}
        for name, x in own.items():
            x[kept] = state[name].numpy()[kept]
        self.memory.load_state_dict(state["memory"], exact, self.generator.device)
        return np.flatnonzero(~stored).tolist()

    def _policy_row(self, t: int) -> Nested:
        return self._to_device(self._rows[t], self.generator.device) if self._moves_observations else self._rows[t]

    # `_put`, `_store` and `_to_arrays` skip `map_leaves` for flat spaces: this saves 4 of 100 µs per step of CartPole.

    def _put(self, t: int, observations: Nested) -> None:
        if isinstance(self.observations, dict | tuple):
            map_leaves(lambda rows, x: setitem(rows, t, x), self.observations, observations)
        else:
            self.observations[t] = observations

    def _store(self, name: str, t: int, x: Nested) -> None:
        """Copy a policy output `[B, ...]` of step `t`; the first step allocates the memory."""
        # Many small tensors would fragment the heap between the large tensors that a network allocates.
        if name not in self._acted:
            with torch.inference_mode(False):  # the rollout outlives the mode
                self._acted[name] = map_leaves(lambda leaf: leaf.new_empty(self.length, *leaf.shape), x)
        whole = self._acted[name]
        if isinstance(whole, Tensor):
            whole[t].copy_(x)
        else:
            map_leaves(lambda whole, leaf: whole[t].copy_(leaf), whole, x)

    def _view(self, x: Tensor) -> Any:  # an array or a tensor
        return x if self._has_tensors else x.numpy()

    def _on_host(self, name: str) -> np.ndarray[Any, Any]:
        return self._stored[name].cpu().numpy()

    def _update_memory(self, t: int, step: Step, state: Nested) -> None:
        starts = self._views["terminated"][t] | self._views["truncated"][t] | ~self._views["valid"][t]
        if LIFE_LOST in step.infos:  # evaluation plays all lives as one episode; training ends an episode with each
            starts = starts | np.asarray(step.infos[LIFE_LOST], bool)
        before = self.memory.state
        self.memory.after(t, state, starts, [index for index, _ in step.final_observations], step.failed)
        self.memory.store(t, [index for index, reached in step.final_observations if reached is None], before)

    def _truncate_failed_episodes(self) -> None:
        # If an episode failed in the first step, its last real step is in the previous rollout, which stays as it is.
        terminated, truncated, valid, failed = (
            self._views[name] for name in ("terminated", "truncated", "valid", "failed")
        )
        cut = failed[1:] & ~terminated[:-1] & ~truncated[:-1] & valid[:-1]
        truncated[:-1] |= cut
        for t, index in np.argwhere(cut).tolist():
            self._finals.append((t, index, map_leaves(itemgetter((t + 1, index)), self.observations)))

    def _final_observations(self) -> Finals:
        terminated = self._on_host("terminated")
        finals = [final for final in self._finals if not terminated[final[:2]]]
        if any(reached is None for _, _, reached in finals) and not self._warned:
            self._warned = True
            rank_zero_warn(
                "the environments do not return info['final_obs'] when they truncate an episode: its last step "
                "bootstraps from the value of the observation before it"
            )
        stack: Any = torch.stack if self._has_tensors else np.stack  # faster than a copy to each row

        def together(x: Tensor, *rows: Any) -> Tensor:
            return torch.as_tensor(stack(rows), dtype=x.dtype, device=x.device) if rows else x[0, :0]

        rows = (map_leaves(itemgetter(f[:2]), self.observations) if f[2] is None else f[2] for f in finals)
        result = map_leaves(together, self._observed, *rows)
        places = [(t, index) for t, index, _ in finals]
        device = self.generator.device
        indices = torch.tensor(places, dtype=torch.long, device=device).view(-1, 2)
        memory = None if self.memory.state is None else self.memory.at(places)
        return Finals(indices, _to_device(result, device), memory)

    def _make_rollout(self, policy: Policy) -> Rollout:
        """Return the stored steps as a rollout; computes log-probabilities and values that acting did not return."""
        device = self.generator.device
        ends = self._on_host("terminated") | self._on_host("truncated") | ~self._on_host("valid")
        starts = np.concatenate([self._episode_starts[None], ends[:-1]])
        self._episode_starts = ends[-1]
        finished = self.finished_episodes()
        if not self._has_tensors and self._views["failed"].any():
            self._truncate_failed_episodes()
        self.environments.check_finite()
        finals = self._final_observations()
        observations = _to_device(self._observed, device)
        stored = {name: self._stored[name].to(device, copy=True) for name in ("terminated", "truncated", "valid")}
        actions = self._acted["actions"]
        log_probs = self._acted.get("log_probs")
        if log_probs is None:
            log_probs = log_probs_of(policy, observations, actions)
        check_shape("log_probs", log_probs, *stored["terminated"].shape)
        values, next_values = estimate_values(
            policy, observations, self._acted.get("values"), stored["terminated"], finals, self.memory.state
        )
        rollout = Rollout(
            observations=observations,
            actions=actions,
            rewards=self._stored["rewards"].to(device, self._dtype, copy=True),
            terminated=stored["terminated"],
            truncated=stored["truncated"],
            valid=None if bool(stored["valid"].all()) else stored["valid"],
            log_probs=log_probs,
            values=values,
            next_values=next_values,
            final_indices=finals.indices,
            final_observations=finals.observations,
            starts=torch.from_numpy(starts),
            episodes=EpisodeSummary([e[2] for e in finished], [e[3] for e in finished], [e[:2] for e in finished]),
        )
        if self.memory.stored:
            rollout.memory = map_stacked(torch.stack, self.memory.stored)
            rollout.burn_in = self.memory.burn_in
        return rollout


def _to_device(tensors: Nested, device: torch.device) -> Nested:
    return map_leaves(lambda x: x.to(device), tensors)


def _to_arrays(space: spaces.Space[Any], action: Nested) -> Nested:
    if isinstance(action, Tensor):
        return to_environment(space, action.cpu().numpy())
    return to_environment(space, map_leaves(lambda x: x.cpu().numpy(), action))


# Replaying more steps than this may take seconds: an Atari game has up to 27,000 steps of a millisecond each.
_MANY_STEPS = 5000


def restore(collector: Collector, states: Sequence[dict[str, Any] | None], rank: int, name: str) -> None:
    """Restore this rank's environments from the states of all ranks of the stored run; a collective call.

    Environments that cannot be restored begin new episodes; rank zero warns about them once.
    """
    fresh: list[int] | None = []
    if rank < len(states):
        state = states[rank] or {}
        environments = state.get("environments") or {}
        records = environments["environments"] if environments.get("kind") == "episodes" else []
        steps = sum(len(first_leaf(record["actions"])) for record in records if "actions" in record)
        if steps >= _MANY_STEPS:
            rank_zero_info(f"Replaying {steps:,} recorded steps of {name} to resume the unfinished episodes")
        fresh = collector.load_state_dict(state) if state else None
    ranks, lost = gather_ranks(fresh), []
    for index, indices in enumerate(ranks):
        if indices is None or indices:
            which = "the environments" if indices is None else f"environments {listed(indices)}"
            lost.append(which if len(ranks) == 1 else f"{which} on rank {index}")
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)} of {name} could not be restored: they begin new episodes, so this run is not bit for "
            "bit the same as one without the interruption"
        )


class Sampler:
    """Owns the training environments: makes them for the first rollout, and saves and restores them.

    `starts` counts how often this run and the runs it resumed from have made environments.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int, rollout_length: int, info_keys: Sequence[str]) -> None:
        self.spec, self.num_envs, self.rollout_length, self.info_keys = spec, num_envs, rollout_length, info_keys
        self.starts = 0
        self.settings: EnvSettings = {}, {}
        self._collector: Collector | None = None
        self._last_state: dict[str, Any] | None = None
        self._restored: list[Any] = []

    @property
    def started(self) -> bool:
        return self._collector is not None

    def start(self, seed: int, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the environments, with the policy's device and dtype, and restore them on resume; a collective call."""
        # The count is in the seeds: environments that cannot be restored do not repeat their first episodes.
        seeds = [derive_seed(seed, TRAINING, rank, index, self.starts) for index in range(self.num_envs)]
        generator = torch.Generator(device).manual_seed(derive_seed(seed, SAMPLING, rank, self.starts))
        self.starts += 1
        self._last_state = None
        environments = make_environments(self.spec, self.num_envs, seeds)
        self._collector = Collector(environments, self.rollout_length, generator, dtype, self.info_keys)
        if any(self.settings):
            environments.set_env_settings(self.settings)
        if self._restored:
            states, self._restored = self._restored, []
            restore(self._collector, states, rank, f"{self.spec.env_id} (backend {self.spec.backend!r})")

    def collect(self, policy: Policy, policy_version: int, profile: Profile | None = None) -> Rollout:
        assert self._collector is not None
        rollout = self._collector.collect(policy, policy_version, profile)
        if self.spec.env.on_failure == "restart":
            rollout.failures = self._collector.environments.pop_failures()
        return rollout

    def set_env_settings(self, settings: EnvSettings) -> None:
        """Change the environments, also those that are made later; see `RolloutDataModule.set_env_settings`."""
        self.settings = settings
        if self._collector is not None:
            self._collector.environments.set_env_settings(settings)

    def restart_episodes(self) -> bool:
        """Count a start without restoring environments; return whether the run was resumed."""
        self.starts += 1
        resumed, self._restored, self._last_state = bool(self._restored), [], None
        return resumed

    def close(self, keeps_state: bool = False) -> None:
        """Close the environments; their state may be kept for a checkpoint that is saved later."""
        collector, self._collector = self._collector, None
        if collector is not None:
            if keeps_state:
                with contextlib.suppress(EnvironmentFailure):
                    self._last_state = collector.state_dict()
            collector.environments.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments of all ranks, complete on rank 0 only; a collective call."""
        if self._restored and self._collector is None:  # the resumed run has not collected a rollout yet
            return {"starts": self.starts, "ranks": self._restored}
        state = self._last_state if self._collector is None else self._collector.state_dict()
        return {"starts": self.starts, "ranks": gather_on_rank_zero(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.starts, self._restored = state["starts"], state["ranks"]
