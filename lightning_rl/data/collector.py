"""Collects rollouts from environments, and restores where the environments were."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from operator import itemgetter, setitem
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

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
from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.seeding import SAMPLING, TRAINING, derive_seed
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_space, map_stacked
from lightning_rl.policies.interface import Policy, PolicyOutput, as_recurrent, tensor_conversion, to_environment
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


AHEAD_FROM = 2.0
"""Least ratio of environment time to policy time for acting ahead, which doubles the policy time."""


def with_rows_of(ahead: PolicyOutput, count: int, output: PolicyOutput) -> PolicyOutput:
    """Return `output` with the first `count` rows of `ahead`, whose actions the environments took.

    The rows only differ if a network computes across rows.
    """
    if all(leaves(map_leaves(lambda x, y: torch.equal(x[:count], y[:count]), ahead.action, output.action))):
        return output

    def join(x: Nested, y: Nested) -> Nested:
        return None if y is None else map_leaves(lambda one, other: torch.cat([one[:count], other[count:]]), x, y)

    names = ("action", "log_prob", "value", "environment_action")
    return PolicyOutput(**{name: join(getattr(ahead, name), getattr(output, name)) for name in names})


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
    """Steps environments with a policy, and stores and counts what they give.

    Training collects rollouts of `length` steps with `collect`; evaluation calls `start` and `advance` itself, for one
    step at a time. Storage is allocated once and reused: in the host's memory for environments of arrays, on the
    policy's device for environments of tensors, from which the host reads at each step only whether an episode was cut
    off. Log-probabilities and values that acting does not give are computed for the whole rollout at its end, with the
    same parameters.

    Args:
        environments: The environments.
        observation_space: Of one environment.
        action_space: Of one environment.
        length: Number of steps `T`.
        generator: Draws the actions; on the policy's device.
        dtype: Of the policy's parameters; float64 keeps everything in float64, anything else in float32.
        info_keys: Keys of `info` whose values are wanted.

    Attributes:
        observations: Of the last `length` steps and of the one to come, `[T + 1, B, ...]`: arrays or tensors.
        memory: Of a recurrent policy.
    """

    def __init__(
        self,
        environments: EnvironmentBatch | TensorEnvironments,
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
        self.memory = RecurrentState()
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._has_tensors = isinstance(environments, TensorEnvironments)
        self._device = generator.device if self._has_tensors else torch.device("cpu")
        shape = (length, environments.num_envs)

        def allocate(leaf: spaces.Space[Any]) -> Tensor:
            kind = torch.from_numpy(np.zeros(0, observation_dtype(leaf, dtype))).dtype
            return torch.zeros(length + 1, shape[1], *(leaf.shape or ()), dtype=kind, device=self._device)

        with torch.inference_mode(False):  # rollouts outlive the mode
            self._observed = map_space(allocate, observation_space)
            # More exact than the policy's numbers, so that returns are.
            exact = exact_dtype(self._device)
            self._stored = {"rewards": torch.zeros(shape, dtype=exact, device=self._device)}
            for name in ("terminated", "truncated", "valid", "failed"):
                self._stored[name] = torch.zeros(shape, dtype=torch.bool, device=self._device)
            # The same memory, row by row: what the policy sees at each step.
            self._rows = [map_leaves(itemgetter(t), self._observed) for t in range(length + 1)]
        # The same memory, as the environments' steps are written into it.
        self.observations = map_leaves(self._view, self._observed)
        views = map_leaves(self._view, self._stored)
        self._rewards, self._terminated, self._truncated = views["rewards"], views["terminated"], views["truncated"]
        # Of steps that an environment failed in; the episodes before them have no end of their own.
        self._valid, self._failed = views["valid"], views["failed"]
        self._started = self._warned = False
        # Where the observation before the next step is an episode's first.
        self._episode_starts = np.ones(shape[1], bool)
        # Of the episodes that go on into the next steps.
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
        begun = time.perf_counter()
        infos: dict[str, list[float]] = {key: [] for key in self.info_keys}
        info_names: set[str] = set()
        frames: list[int] = []
        repeats: list[Tensor] = []
        recurrent = as_recurrent(policy)
        acts: Callable[..., PolicyOutput] = policy.act if recurrent is None else recurrent.act
        acts = fast.actor(policy) or acts
        if isinstance(self.environments, TensorEnvironments) and getattr(policy, "fast_paths", None) == "compiled":
            self.environments.compile()
        self.start(acts, profile)
        if getattr(policy, "chooses_rows_alone", False):
            self._acts_ahead = getattr(self.environments, "can_step_ahead", False)
        if recurrent is not None:
            self.memory.start_rollout(recurrent, self.environments.num_envs, self.length)
        # The tensors of environments are their own, and may not be those of inference.
        with torch.no_grad() if self._has_tensors else torch.inference_mode():
            for t in range(self.length):
                step = self.advance(t)
                if step.frames is not None:
                    frames.append(step.frames)
                if step.repeats is not None:
                    repeats.append(torch.from_numpy(step.repeats))
                for key in infos:
                    infos[key] += self.environments.info_values(step, key)
                if infos and step.final_observations:  # most is told at the end of an episode
                    info_names.update(step.infos.get("final_info", step.infos))
        evaluate = profiled(profile, POLICY, self._put_together)
        evaluated = time.perf_counter()
        rollout = evaluate(policy)
        self._seconds["policy"] += time.perf_counter() - evaluated
        rollout.policy_version = policy_version
        rollout.repeats = torch.stack(repeats).to(self.generator.device) if repeats else None
        rollout.infos = infos
        rollout.info_names = sorted((info_names or step.infos) if infos else ())
        rollout.frames = sum(frames) if frames else None
        rollout.seconds = time.perf_counter() - begun
        rollout.parts_of_seconds = self._seconds
        return rollout

    def start(self, act: Callable[..., PolicyOutput], profile: Profile | None = None) -> None:
        """Make room for `length` steps; the first time, reset the environments.

        Args:
            act: Chooses the actions of these steps.
            profile: As in `collect`.
        """
        if not self._started:
            self._put(-1, self.environments.reset())
            self._started = True
        self._put(0, map_leaves(lambda rows: rows[-1], self.observations))
        self._valid[:] = True
        self._failed[:] = False
        self._actions, self._log_probs, self._values = (StepStorage(self.length) for _ in range(3))
        self._finals: list[tuple[int, int, Nested | None]] = []
        self._seconds = {"env": 0.0, "policy": 0.0} | ({} if self._has_tensors else {"transfer": 0.0})
        self._act = profiled(profile, POLICY, act)
        self._acts_ahead = False
        self._ahead: tuple[int, PolicyOutput] | None = None
        self._step: Callable[..., Step] = profiled(profile, ENVIRONMENT, self.environments.step)
        self._to_device = profiled(profile, TRANSFER, _to_device)
        # No methods of this object: it, and the environments with it, are to go when nobody needs them any more. A
        # process that is forked would end the threads of forgotten ones, which it does not have.
        self._convert: Callable[[Nested], Nested]
        if self._has_tensors:
            device = first_leaf(cast(TensorEnvironments, self.environments).observations).device
            self._convert = tensor_conversion(self.action_space, device)
        else:
            self._convert = profiled(profile, TRANSFER, functools.partial(_to_arrays, self.action_space))

    def advance(self, t: int) -> Step:
        """Take step `t` in every environment."""
        clock, seconds, memory, row = time.perf_counter, self._seconds, self.memory, self._rows[t]
        begun = clock()
        if self._device != self.generator.device:
            row = self._to_device(row, self.generator.device)
        moved = clock()
        remembered = {} if memory.state is None else {"memory": memory.before(t)}
        output = self._act(row, self.generator, **remembered)
        if self._ahead is not None:
            (count, ahead), self._ahead = self._ahead, None
            output = with_rows_of(ahead, count, output)
        acted = clock()
        self._actions.put(t, output.action)
        if output.log_prob is not None and output.value is not None:
            self._log_probs.put(t, output.log_prob)
            self._values.put(t, output.value)
        self.actions = self._convert(output.environment_action)
        converted = clock()
        if self._acts_ahead and t + 1 < self.length and seconds["env"] >= AHEAD_FROM * seconds["policy"]:
            step = self._step(self.actions, functools.partial(self._choose_ahead, t + 1))
        else:
            step = self._step(self.actions)
        seconds["env"] += clock() - converted
        seconds["policy"] += acted - moved
        if not self._has_tensors:
            seconds["transfer"] += converted - acted + moved - begun
        self._put(t + 1, step.observations)
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid
            self._failed[t, list(step.failed)] = True
        self._finals += [(t, index, observation) for index, observation in step.final_observations]
        if memory.state is not None:
            self._remember(t, step, output.memory)
        return step

    def _choose_ahead(self, t: int, count: int, observations: Nested) -> Nested | None:
        """Choose the actions of step `t` for the first `count` environments while the others take step `t - 1`.

        The policy acts on all `B` rows with the noise of step `t`, because a matrix product of fewer rows may round
        differently. The other rows hold the observations of step `t - 1`.

        Returns:
            Actions `[B, ...]`, of which the first `count` are valid; None if the policy raised.
        """
        begun = time.perf_counter()

        def fill(rows: Any, x: Any) -> None:  # noqa: ANN401 - arrays of one leaf
            rows[t, :count], rows[t, count:] = x[:count], rows[t - 1, count:]

        map_leaves(fill, self.observations, observations)
        noise = self.generator.get_state()
        try:
            row = self._rows[t]
            if self._device != self.generator.device:
                row = self._to_device(row, self.generator.device)
            output = self._act(row, self.generator)
            actions = self._convert(output.environment_action)
        except Exception:  # `advance` calls the policy again, and raises there
            return None
        finally:
            self.generator.set_state(noise)
            taken = time.perf_counter() - begun
            self._seconds["policy"] += taken
            self._seconds["env"] -= taken
        self._ahead = count, output
        return actions

    def finished_episodes(self) -> list[tuple[int, int, float, int]]:
        """Count the steps, and return the episodes that ended in them, in order: step, environment, return, length.

        Sums are carried on to the next steps. Episodes that a failure cut off are left out: they say more about the
        failure than about the policy.
        """
        episodes = []
        first = np.zeros(len(self._returns), np.int64)
        rewards, valid, failed = (self._on_host(name) for name in ("rewards", "valid", "failed"))
        steps = valid.cumsum(0)  # of these, up to here
        for t, index in np.argwhere(self._on_host("terminated") | self._on_host("truncated") | failed).tolist():
            begin = first[index]
            if not failed[t, index]:
                episode_return = float(self._returns[index] + rewards[begin : t + 1, index].sum())
                episodes.append((t, index, episode_return, int(self._lengths[index] + steps[t, index])))
            # What comes after it is counted from there.
            self._returns[index], self._lengths[index], first[index] = 0.0, -steps[t, index], t + 1
        goes_on = np.arange(self.length)[:, None] >= first
        self._returns += rewards.sum(0, where=goes_on)
        self._lengths += steps[-1]
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """Return, as tensors and plain values, what the next rollout depends on besides the policy."""
        return {
            "environments": self.environments.state_dict() if self._started else None,
            "generator": self.generator.get_state(),
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
            "episode_starts": torch.from_numpy(self._episode_starts.copy()),
            "memory": self.memory.state_dict(),
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
        self.memory.load_state_dict(state["memory"], exact, self.generator.device)
        return [int(index) for index in np.flatnonzero(~exact)]

    def _put(self, t: int, observations: Nested) -> None:
        if isinstance(self.observations, dict | tuple):
            map_leaves(lambda rows, x: setitem(rows, t, x), self.observations, observations)
        else:  # no detour in every step
            self.observations[t] = observations

    def _view(self, x: Tensor) -> Any:  # noqa: ANN401 - an array or a tensor
        return x if self._has_tensors else x.numpy()

    def _on_host(self, name: str) -> np.ndarray[Any, Any]:
        return self._stored[name].cpu().numpy()

    def _remember(self, t: int, step: Step, state: Nested) -> None:
        """Take in what a recurrent policy remembers after a step."""
        starts = self._terminated[t] | self._truncated[t] | ~self._valid[t]
        if LIFE_LOST in step.infos:  # in evaluation, lives are one episode; the policy learned from them as several
            starts = starts | np.asarray(step.infos[LIFE_LOST], bool)
        before = self.memory.state
        self.memory.after(t, state, starts, [index for index, _ in step.final_observations], step.failed)
        self.memory.store(t, [index for index, reached in step.final_observations if reached is None], before)

    def _cut_off_episodes(self) -> None:
        """Truncate the episodes that a failure cut off at their last real step, and note where that led to."""
        # One that was cut off in the first step goes on from the last rollout, which has been learned from.
        cut = self._failed[1:] & ~self._terminated[:-1] & ~self._truncated[:-1] & self._valid[:-1]
        self._truncated[:-1] |= cut
        for t, index in np.argwhere(cut).tolist():
            self._finals.append((t, index, map_leaves(itemgetter((t + 1, index)), self.observations)))

    def _final_observations(self) -> tuple[Tensor, Nested, Nested | None]:
        """Return, of truncated steps, their places `[K, 2]`, what they reached, and the memory there, `[K, ...]`."""
        terminated = self._on_host("terminated")
        # Only a truncated episode goes on from the value of what it reached.
        finals = [final for final in self._finals if not terminated[final[:2]]]
        if any(reached is None for _, _, reached in finals) and not self._warned:
            self._warned = True
            rank_zero_warn(
                "the environments do not tell in info['final_obs'] what an episode reached that was cut off: its last "
                "step goes on from the value of the observation before it"
            )
        result = map_leaves(lambda x: x.new_zeros(len(finals), *x.shape[2:]), self._observed)
        for k, (t, index, reached) in enumerate(finals):
            reached = map_leaves(itemgetter((t, index)), self.observations) if reached is None else reached
            map_leaves(lambda x, row, k=k: setitem(self._view(x), k, row), result, reached)
        places = [(t, index) for t, index, _ in finals]
        indices = torch.tensor(places, dtype=torch.long, device=self.generator.device).view(-1, 2)
        return indices, result, None if self.memory.state is None else self.memory.at(places)

    def _put_together(self, policy: Policy) -> Rollout:
        """Compute log-probabilities and values that acting did not give, and put the rollout together."""
        device = self.generator.device
        ends = self._on_host("terminated") | self._on_host("truncated") | ~self._on_host("valid")
        starts = np.concatenate([self._episode_starts[None], ends[:-1]])
        self._episode_starts = ends[-1]
        finished = self.finished_episodes()
        if not self._has_tensors and self._failed.any():
            self._cut_off_episodes()
        self.environments.check_finite()
        indices, reached, memory = self._final_observations()
        observations, reached = map_leaves(lambda x: x.to(device), (self._observed, reached))
        stored = {name: x.to(device) for name, x in self._stored.items()}
        estimates = estimate(
            *(policy, observations, self._actions.whole, self._log_probs.whole, self._values.whole),
            *(stored["terminated"], Finals(indices, reached, memory), self.memory.state),
        )
        rollout = Rollout(
            observations=observations,
            actions=self._actions.whole,
            rewards=self._stored["rewards"].to(device, self._dtype, copy=True),
            terminated=stored["terminated"],
            truncated=stored["truncated"],
            valid=None if bool(stored["valid"].all()) else stored["valid"],
            **estimates._asdict(),
            final_indices=indices,
            final_observations=reached,
            starts=torch.from_numpy(starts),
            episodes=EpisodeSummary([episode[2] for episode in finished], [episode[3] for episode in finished]),
        )
        if self.memory.stored:
            rollout.memory = map_stacked(torch.stack, self.memory.stored)
            rollout.burn_in = self.memory.burn_in
        return rollout


def _to_device(observations: Nested, device: torch.device) -> Nested:
    return map_leaves(lambda x: x.to(device), observations)


def _to_arrays(space: spaces.Space[Any], action: Nested) -> Nested:
    """Return actions as environments with arrays take them."""
    taken = _to_numpy(action) if isinstance(action, Tensor) else map_leaves(_to_numpy, action)
    return to_environment(space, taken)


def _to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return x.cpu().numpy()


# From here on it may take some seconds: a game of Atari has up to 27,000 steps, of a millisecond each.
_MANY_STEPS = 5000


def restore(collector: Collector, states: Sequence[dict[str, Any] | None], rank: int, name: str) -> None:
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
        starts: How often environments were made in this run, by the runs that it goes on from too.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int, rollout_length: int, info_keys: Sequence[str]) -> None:
        self.spec, self.num_envs, self.rollout_length, self.info_keys = spec, num_envs, rollout_length, info_keys
        self.starts = 0
        self._collector: Collector | None = None
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
        environments = make_environments(self.spec, self.num_envs, seeds, space_pair=space_pair)
        options = (*space_pair, self.rollout_length, generator, dtype, self.info_keys)
        self._collector = Collector(environments, *options)
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
        if self.spec.env.on_failure == "restart":
            rollout.failures = self._collector.environments.pop_failures()
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
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.environments.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from, of all ranks on rank 0 alone; a collective call."""
        if self._restored and self._collector is None:  # it has not come to its first rollout
            return {"starts": self.starts, "ranks": self._restored}
        state = self._last_state if self._collector is None else self._collector.state_dict()
        return {"starts": self.starts, "ranks": gather_on_rank_zero(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier run, at the next rollout."""
        self.starts, self._restored = state["starts"], state["ranks"]
