"""Small environments whose every number is known, and policies that act on them in a known way.

All are registered with Gymnasium under `Probe/…`. Observations of the counting ones say where they are, so that nothing
can leak from one episode into another unseen.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from lightning_rl.data.collector import Collector
from lightning_rl.environments import Backend, EnvConfig, EnvironmentBatch, EnvironmentSpec, make, make_environments
from lightning_rl.environments.contract import derive_seed
from lightning_rl.nested import leaves, space_leaves
from lightning_rl.options import changed
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import space_from_dict


class Counter(gymnasium.Env[np.ndarray, Any]):
    """Episodes of scripted lengths; the observation is (episode, step).

    Args:
        lengths: Of the episodes, in turns.
        ends: How they end, in turns: `terminated`, `truncated` or `both`.
        reward: Of every step; None: 100 · episode + step, the step that is being taken counting from 1.
        start: First of three discrete actions; None: a continuous action of two dimensions.
        reuse_buffer: Return the same array each time, overwritten.
        blind: Observe nothing: zeros.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("truncated",),
        reward: float | None = None,
        start: int | None = 0,
        reuse_buffer: bool = False,
        blind: bool = False,
    ) -> None:
        self.lengths, self.ends, self.reward, self.reuse_buffer = lengths, ends, reward, reuse_buffer
        self.blind = blind
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if start is None else spaces.Discrete(3, start=start)
        self.episode, self.count = -1, 0
        self.buffer = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return self.observe(), {"level": -1000.0, "only_reset": 1.0}

    def step(self, action: Any):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.count += 1
        reward = 100.0 * self.episode + self.count if self.reward is None else self.reward
        over = self.count == self.lengths[self.episode % len(self.lengths)]
        how = self.ends[self.episode % len(self.ends)]
        info: dict[str, Any] = {"level": 10.0 * self.episode + self.count, "name": "probe"}
        if over:
            info["score"] = float(self.count)
        return self.observe(), reward, over and how != "truncated", over and how != "terminated", info

    def observe(self) -> np.ndarray:
        values = np.array([self.episode, self.count], np.float32) * (not self.blind)
        if not self.reuse_buffer:
            return values
        self.buffer[:] = values
        return self.buffer


class Random(gymnasium.Env[np.ndarray, int]):
    """Observations, rewards and ends drawn from the environment's own generator."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return self.np_random.normal(size=3), {}

    def step(self, action: int):
        random = self.np_random
        over = random.random(2) < 0.1
        return random.normal(size=3), random.normal() + action, bool(over[0]), bool(over[1]), {}


class Echo(gymnasium.Env[np.ndarray, np.ndarray]):
    """The observation is the action that led to it."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray):
        return action.astype(np.float32), 0.0, False, False, {}


class Fragile(Random):
    """A random one that raises in the second step of one episode.

    Args:
        episode_seed: That the episode is reset with.
    """

    def __init__(self, episode_seed: int) -> None:
        self.episode_seed = episode_seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.steps_left = 2 if seed == self.episode_seed else -1
        return super().reset(seed=seed)

    def step(self, action: int):
        self.steps_left -= 1
        if not self.steps_left:
            raise ArithmeticError("the physics exploded")
        return super().step(action)


class Failing(Counter):
    """A counter that fails in one episode.

    Args:
        how: `raise`, `hang`, `exit`, `kill` (its own process), `SystemExit`, `KeyboardInterrupt`, or a value and its
            place (`nan observation`, …): a number, `none`, `text`, or an array with `few` or `many` entries.
        episode_seed: Fails in the episode that is reset with this seed; None: in each.
        at: At which step; 0 is its reset.
        lengths: Of the episodes.
        ends: How they end.
    """

    def __init__(
        self,
        how: str,
        episode_seed: int | None,
        at: int,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("truncated",),
    ) -> None:
        super().__init__(lengths, ends, reward=1.0)
        self.how, self.episode_seed, self.at = how, episode_seed, at
        self.fails_here = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.fails_here = self.episode_seed in (None, seed)
        observation, info = super().reset(seed=seed)
        return self.fail(observation, 0.0)[0], info

    def step(self, action: Any):
        observation, reward, *rest = super().step(action)
        return *self.fail(observation, reward), *rest

    def fail(self, observation: np.ndarray, reward: float) -> tuple[Any, Any]:
        if not self.fails_here or self.count != self.at:
            return observation, reward
        if self.how == "raise":
            raise ArithmeticError("the physics exploded")
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "exit":
            os._exit(3)
        if self.how == "SystemExit":
            sys.exit(0)
        if self.how == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        value, _, where = self.how.partition(" ")
        strange = {"none": None, "text": "1.0", "few": np.ones(1, np.float32), "many": np.ones(3, np.float32)}
        if value in strange:
            return (strange[value], reward) if where == "observation" else (observation, strange[value])
        if where == "reward":
            return observation, float(value)
        observation[1] = float(value)
        return observation, reward


class Unsendable(Counter):
    """A counter whose steps have something in `info` that no other process can be given."""

    def step(self, action: Any):
        return *super().step(action)[:-1], {"rest": (x for x in ())}


class Tape(NamedTuple):
    """Transitions to be played back: `[N + 1]` or `[N]` each, the first observation of each episode by its number."""

    first: list[np.ndarray]
    reached: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Replay(gymnasium.Env[np.ndarray, int]):
    """Plays a tape back, whatever the actions."""

    def __init__(self, tape: Tape, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.tape, self.observation_space, self.action_space = tape, observation_space, action_space
        self.place = self.episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.episode += 1
        return self.tape.first[self.episode].copy(), {}

    def step(self, action: int):
        self.place += 1
        t, tape = self.place, self.tape
        ends = bool(tape.terminated[t]), bool(tape.truncated[t])
        return tape.reached[t].copy(), float(tape.rewards[t]), *ends, {}


class Space(gymnasium.Env[Any, Any]):
    """Samples from any space."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any] | None = None) -> None:
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any):
        return self.observation_space.sample(), 1.0, self.np_random.random() < 0.1, False, {}


class DoubleReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Doubles rewards and cuts episodes after three steps, to see where a wrapper is applied."""

    def reset(self, **kwargs: Any):
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return observation, 2 * reward, terminated, truncated or self.steps == 3, info


class DoubleVectorReward(gymnasium.vector.VectorRewardWrapper):
    """The same, of a vector environment, without the cut."""

    def rewards(self, rewards: np.ndarray) -> np.ndarray:
        return 2 * rewards


class Aim(gymnasium.Env[np.ndarray, Any]):
    """Eight steps, in each of which another one of two goals is shown; a step that meets it earns 1.

    The reward is the mean over the components of all parts of the action. Of a choice that is whether it is right, of
    a continuous one it falls from 1 at the goal to 0 half a width of the bounds from there (1 where there are none).

    Args:
        action_space: A space, or its description.
    """

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, action_space: Any) -> None:
        self.action_space = space_from_dict(action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), {}

    def step(self, action: Any):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        parts = zip(space_leaves(self.action_space).values(), leaves(action), strict=True)
        scores = np.concatenate([self.score(space, np.asarray(part)) for space, part in parts])
        self.steps += 1
        return self.show(), float(scores.mean()), False, self.steps == 8, {}

    def show(self) -> np.ndarray:
        self.goal = int(self.np_random.integers(2))
        return np.array([2 * self.goal - 1], np.float32)

    def score(self, space: spaces.Space[Any], action: np.ndarray) -> np.ndarray:
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            low, high = (np.where(np.isfinite(x), x, d) for x, d in ((space.low, -1.0), (space.high, 1.0)))
            distance = np.abs(action - low - (high - low) * (0.25 + 0.5 * self.goal)) / (high - low)
            return (1 - 2 * distance).clip(0).ravel()
        if isinstance(space, spaces.Box):
            return (action == (space.low, space.high)[self.goal]).ravel()
        if isinstance(space, spaces.MultiBinary):
            return (action == self.goal).ravel()
        n = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return np.ravel(action == space.start + (n - 1) * self.goal)


class RepeatFirst(gymnasium.Env[np.ndarray, int]):
    """One of two goals is shown once; every later step in which it is named earns an equal part of 1.

    Args:
        length: Steps of an episode, which then terminates.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps, self.goal = 0, int(self.np_random.integers(2))
        return np.array([2 * self.goal - 1, 1], np.float32), {}

    def step(self, action: int):
        self.steps += 1
        reward = float(action == self.goal) / (self.length - 1) if self.steps > 1 else 0.0
        return np.zeros(2, np.float32), reward, self.steps == self.length, False, {}


for probe in (Counter, Random, Echo, Fragile, Failing, Unsendable, Replay, Space, Aim, RepeatFirst):
    gymnasium.register(f"Probe/{probe.__name__}-v0", probe)


class Told:
    """A policy that does what it is told: a function of the observation gives the action, another the value.

    Deterministic, so that steps on which nothing happens do not change what comes after.
    """

    def __init__(self, value: Any = 0.0, action: Any = 0) -> None:
        self.of_value = value if callable(value) else lambda o: torch.full(o.shape[:-1], float(value))
        self.of_action = action if callable(action) else lambda o: torch.full(o.shape[:-1], int(action))
        self.seen: list[Tensor] = []

    def act(self, observations: Tensor, generator: Any = None, deterministic: bool = False) -> PolicyOutput:
        self.seen.append(observations.clone())
        return PolicyOutput(self.of_action(observations))

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        return torch.zeros(actions.shape[: observations.dim() - 1])

    def value(self, observations: Tensor) -> Tensor:
        return self.of_value(observations)


class Greedy:
    """An actor-critic that always takes the mode, so that its actions depend on the observations alone."""

    def __init__(self, policy: ActorCritic) -> None:
        self.policy = policy
        self.log_prob, self.value = policy.log_prob, policy.value

    def act(self, observations: Tensor, generator: Any = None, deterministic: bool = False) -> PolicyOutput:
        return self.policy.act(observations, generator, deterministic=True)


def step_timeout(how: str, backend: str = "async") -> float | None:
    """Return a time limit for `Probe/Failing-v0`: short if it hangs; on a busy machine a step may take a second."""
    if backend != "async":
        return None
    return 1.0 if how == "hang" else 20.0


def make_batch(
    env_id: str,
    num_envs: int = 1,
    *,
    env: Mapping[str, Any] | None = None,
    backend: Backend = "sync",
    evaluation: bool = False,
    mode: AutoresetMode = AutoresetMode.SAME_STEP,
    seed: int = 0,
    **kwargs: Any,
) -> EnvironmentBatch:
    """Environments with seeds from the tree; `env` has options of `EnvConfig`, `kwargs` are the environment's.

    The vector environments of Gymnasium take the place of the package's own in other modes than `SAME_STEP`.
    """
    config = changed("env", EnvConfig(kwargs=kwargs), env or {})
    spec = EnvironmentSpec(env_id, config, backend, evaluation)
    seeds = seeds_of(num_envs, seed)
    if mode is AutoresetMode.SAME_STEP:
        return make_environments(spec, num_envs, seeds)
    of_gymnasium = {
        "LocalVectorEnv": lambda factories: SyncVectorEnv(factories, autoreset_mode=mode),
        "WorkerPool": lambda factories, *_: AsyncVectorEnv(factories, autoreset_mode=mode),
    }
    with mock.patch.multiple(make, **of_gymnasium):
        return make_environments(spec, num_envs, seeds)


def seeds_of(num_envs: int, seed: int = 0) -> list[int]:
    """The seeds that `make_batch` gives."""
    return [derive_seed(seed, index) for index in range(num_envs)]


def make_collector(
    environments: EnvironmentBatch, length: int, dtype: torch.dtype = torch.float32, info_keys: Sequence[str] = ()
) -> Collector:
    """A collector whose actions come from a generator seeded with 0."""
    return Collector(environments, length, torch.Generator().manual_seed(0), dtype, info_keys)


def collect(env_id: str, length: int, policy: Any, num_envs: int = 1, **options: Any) -> Rollout:
    """One rollout."""
    environments = make_batch(env_id, num_envs, **options)
    try:
        return make_collector(environments, length).collect(policy)
    finally:
        environments.close()
