"""Multi-agent environments with PettingZoo's parallel API: each agent is a row."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from lightning_rl.environments.contract import (
    ABSENT,
    IDLE,
    NUM_AGENTS,
    Array,
    Unexpected,
    batch_infos,
    closed_on_failure,
    derive_seed,
)
from lightning_rl.masks import ActionMask
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_space, map_stacked
from lightning_rl.validation import check

State = Literal["joint", "environment"]


# No type arguments: VectorEnv takes none before Gymnasium 1.1.
class ParallelEnvVector(VectorEnv):
    """A vector environment of copies of a parallel environment, with one row per agent of each copy.

    The episode of a row ends when its agent terminates or is truncated. The row is then idle (`valid` is False) until
    all agents of the copy have ended; the step that ends the last of them also resets the copy. The row of an agent
    that joins later is idle before.

    If the spaces of the agents differ, vectors are padded with zeros, and an action mask excludes the choices or
    components of an action that an agent does not have. With `state`, observations are a `Dict` of `observation`, the
    index of the `agent`, and `state`, which `policy.critic_only` can hide from the actor.

    Args:
        make: Makes one copy. Spaces that differ and cannot be padded raise a `ConfigurationError`.
        num_envs: Number of rows, a multiple of the number of possible agents. 1 makes all rows of one copy.
        state: `joint`: the flat observations of all agents of the copy, zeros from the step after an agent has left.
            `environment`: the result of `env.state()`. None: observations without `agent` and `state`.
        team_reward: Each agent gets the sum of the rewards of all agents.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as in Gymnasium

    def __init__(
        self, make: Callable[[], Any], num_envs: int, *, state: State | None = None, team_reward: bool = False
    ) -> None:
        self.copies = [make()]
        with closed_on_failure(self):
            self._set_up(make, num_envs, state, team_reward)

    def _set_up(self, make: Callable[[], Any], num_envs: int, state: State | None, team_reward: bool) -> None:
        first = self.copies[0]
        self.agents = list(first.possible_agents)
        num_agents = len(self.agents)
        num_envs = num_agents if num_envs == 1 else num_envs
        expected = f"a multiple of the {num_agents} agents of {first}, since each agent is a row"
        check(num_envs % num_agents == 0, "num_envs", num_envs, expected)
        self.metadata = {**self.metadata, NUM_AGENTS: num_agents}
        check(state in ("joint", "environment", None), "env.kwargs.state", state, "joint, environment or None")
        self.state, self.team_reward = state, team_reward
        self._observed = {agent: first.observation_space(agent) for agent in self.agents}
        self._taken = {agent: first.action_space(agent) for agent in self.agents}
        own, self.single_action_space = _common("observation", self._observed), _common("action", self._taken)
        sizes = {agent: spaces.flatdim(space) for agent, space in self._observed.items()}
        self._padding = {agent: max(sizes.values()) - size for agent, size in sizes.items()}
        parts = {"observation": own}
        # Parts of an agent's observations that never change.
        self._constants: dict[Any, dict[str, Any]] = {agent: {} for agent in self.agents}
        if state is not None:
            joint = spaces.Box(-np.inf, np.inf, (sum(sizes.values()),), np.float32)
            parts |= {"agent": spaces.Discrete(num_agents), "state": joint if state == "joint" else first.state_space}
            self._constants = {agent: {"agent": index} for index, agent in enumerate(self.agents)}
        widths = [spaces.flatdim(space) for space in self._taken.values()]
        if min(widths) < max(widths):
            parts["action_mask"] = ActionMask(max(widths))
            for agent, width in zip(self.agents, widths, strict=True):
                self._constants[agent]["action_mask"] = np.arange(max(widths)) < width
        self.single_observation_space = parts["observation"] if len(parts) == 1 else spaces.Dict(parts)
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._joint_action_space = batch_space(self.single_action_space, num_agents)
        self.copies += (make() for _ in range(num_envs // num_agents - 1))
        # The smallest values of discrete spaces, which may not contain 0.
        self._zeros = map_space(
            lambda leaf: np.full(leaf.shape or (), getattr(leaf, "start", 0), leaf.dtype), self.single_observation_space
        )
        self._observations: Any = create_empty_array(self.single_observation_space, num_envs)
        self._rows: list[Nested] = [self._zeros] * num_envs
        self._seed, self._episodes = 0, [-1] * len(self.copies)
        # Actions `[A, ...]` of all agents in each step of the current episodes.
        self._history: list[list[Nested]] = [[] for _ in self.copies]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        for index in range(len(self.copies)):
            self._start(index, 0, infos, options)
        return self._concatenated(), batch_infos(infos) | self._absent()

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        rewards = np.zeros(self.num_envs)
        terminated, truncated, idle = (np.zeros(self.num_envs, bool) for _ in range(3))
        finals = np.full(self.num_envs, None, object)
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        final_infos: list[dict[str, Any]] = [{}] * self.num_envs
        for index, env in enumerate(self.copies):
            rows = self._rows_of(index)
            living = {*env.agents}
            reached, *answers = self._step_copy(index, map_leaves(lambda x, rows=rows: x[rows], actions))
            remaining = {*env.agents}
            if self.team_reward:
                answers[0] = dict.fromkeys(living, sum(answers[0].values()))
            for row, agent in enumerate(self.agents, rows.start):
                if agent not in living:
                    idle[row] = True
                    if agent in remaining:  # it joins
                        self._rows[row], infos[row] = reached[agent], answers[-1].get(agent) or {}
                    continue
                rewards[row], terminated[row], truncated[row], info = (x.get(agent) for x in answers)
                ended = terminated[row] or truncated[row]
                if ended == (agent in remaining):
                    flags = f"terminated={terminated[row]} and truncated={truncated[row]} for {agent!r}"
                    expected = "agents without those that have ended, and with all others"
                    raise Unexpected(f"returned {flags} and has agents={env.agents}: expected {expected}")
                if ended:
                    finals[row] = copy.deepcopy(reached[agent])
                self._rows[row] = self._zeros if ended else reached[agent]
                # A copy, since the reset may write into the same dict.
                (final_infos if ended else infos)[row] = dict(info or {})
            if not env.agents:
                self._start(index, self._episodes[index] + 1, infos)
        batched = batch_infos(infos) | self._absent()
        ended_rows = terminated | truncated
        if ended_rows.any():
            batched |= {"final_obs": finals, "_final_obs": ended_rows, "final_info": batch_infos(final_infos)}
        if idle.any():
            batched[IDLE] = idle
        return self._concatenated(), rewards, terminated, truncated, batched

    def close_extras(self, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
            for env in self.copies:
                stack.callback(env.close)

    def recorded(self) -> dict[str, Any]:
        """Return the seed, and the number and actions of the current episodes, for `restore` to replay."""
        copies = {
            str(index): {"episode": episode} | ({"actions": map_stacked(np.stack, history)} if history else {})
            for index, (episode, history) in enumerate(zip(self._episodes, self._history, strict=True))
        }
        return {"seed": self._seed, "copies": copies, "observations": map_leaves(np.copy, self._observations)}

    def restore(self, state: dict[str, Any]) -> tuple[Array, Nested, dict[str, Any]]:
        """Replay the episodes of a state; return which rows see what they saw, `[B]`, and observations `[B, ...]`.

        Copies whose observations differ begin new episodes, with the returned `info`.
        """
        exact = np.ones(self.num_envs, bool)
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        self._seed = state["seed"]
        for index in range(len(self.copies)):
            stored, rows = state["copies"][str(index)], self._rows_of(index)
            same = False
            with contextlib.suppress(Exception):  # an episode with another course may refuse the recorded actions
                self._replay(index, stored, infos)
                pairs = zip(leaves(self._concatenated()), leaves(state["observations"]), strict=True)
                same = all(np.array_equal(x[rows], y[rows]) for x, y in pairs)
            if not same:
                exact[rows] = False
                self._start(index, stored["episode"] + 1, infos)
        return exact, self._concatenated(), batch_infos(infos) | self._absent()

    def _replay(self, index: int, stored: dict[str, Any], infos: list[dict[str, Any]]) -> None:
        env, rows = self.copies[index], self._rows_of(index)
        self._start(index, stored["episode"], infos)
        for t in range(len(first_leaf(stored["actions"])) if "actions" in stored else 0):
            reached, *_ = self._step_copy(index, map_leaves(lambda x, t=t: x[t], stored["actions"]))
            self._rows[rows] = [reached[x] if x in env.agents else self._zeros for x in self.agents]

    def _absent(self) -> dict[str, Array]:
        living = [{*env.agents} for env in self.copies]
        absent = np.array([agent not in those for those in living for agent in self.agents])
        return {ABSENT: absent} if absent.any() else {}

    def _start(
        self, index: int, episode: int, infos: list[dict[str, Any]], options: dict[str, Any] | None = None
    ) -> None:
        self._episodes[index], self._history[index] = episode, []
        seed = derive_seed(self._seed, index, episode)
        observations, agent_infos = self.copies[index].reset(seed=seed, options=options)
        reached, rows = self._see(index, observations), self._rows_of(index)
        self._rows[rows] = [reached.get(agent, self._zeros) for agent in self.agents]
        infos[rows] = [agent_infos.get(agent, {}) for agent in self.agents]

    def _step_copy(self, index: int, actions: Nested) -> tuple[dict[Any, Nested], ...]:
        """Step a copy with the actions `[A, ...]` of its agents; return the answers of `env.step` by agent."""
        env = self.copies[index]
        self._history[index].append(map_leaves(np.copy, actions))
        each, living = zip(self.agents, iterate(self._joint_action_space, actions), strict=True), {*env.agents}
        observations, *answers = env.step({agent: self._unpadded(agent, x) for agent, x in each if agent in living})
        return self._see(index, observations), *answers

    def _unpadded(self, agent: Any, action: Nested) -> Nested:
        space = self._taken[agent]
        if isinstance(space, spaces.Box) and space != self.single_action_space:
            return np.clip(action[: space.shape[0]], space.low, space.high)
        return action

    def _see(self, index: int, observations: Mapping[Any, Nested]) -> dict[Any, Nested]:
        """Return the observations of agents of a copy, padded, and with the further parts of the space."""
        further: dict[str, Any] = {}
        if self.state == "joint":
            flat: list[Any] = [
                spaces.flatten(space, observations[agent]) if agent in observations else np.zeros(spaces.flatdim(space))
                for agent, space in self._observed.items()
            ]
            further["state"] = np.concatenate(flat, dtype=np.float32)
        elif self.state == "environment":
            further["state"] = self.copies[index].state()
        seen = {}
        for agent in observations:
            own, missing = observations[agent], self._padding[agent]
            own = np.pad(own, (0, missing)) if missing else own
            parts = self._constants[agent] | further
            seen[agent] = {"observation": own} | parts if parts else own
        return seen

    def _rows_of(self, index: int) -> slice:
        return slice(index * len(self.agents), (index + 1) * len(self.agents))

    def _concatenated(self) -> Any:
        self._observations = concatenate(self.single_observation_space, self._rows, self._observations)
        return self._observations


def _common(what: str, by_agent: Mapping[Any, spaces.Space[Any]]) -> Any:  # a space
    """Return the space of all agents: the same, or the largest one, to which the others are padded."""
    all_spaces: list[Any] = list(by_agent.values())
    first = all_spaces[0]
    if all(space == first for space in all_spaces):
        return first
    if what == "action" and all(isinstance(space, spaces.Discrete) and space.start == 0 for space in all_spaces):
        return max(all_spaces, key=lambda space: space.n)
    vectors = all(isinstance(space, spaces.Box) and len(space.shape) == 1 for space in all_spaces)
    one_dtype = vectors and {space.dtype for space in all_spaces} == {first.dtype}
    suitable = one_dtype and (what == "observation" or np.issubdtype(first.dtype, np.floating))
    expected = (
        "equal spaces of all agents, vectors of one dtype (actions: floating-point), or Discrete actions; see "
        "PettingZoo's supersuit"
    )
    check(suitable, f"{what}_space", by_agent, expected)
    most = max(len(space.low) for space in all_spaces)
    low = np.min([np.pad(space.low, (0, most - len(space.low))) for space in all_spaces], 0)
    high = np.max([np.pad(space.high, (0, most - len(space.high))) for space in all_spaces], 0)
    return spaces.Box(low, high, dtype=first.dtype.type)


def make_parallel_env(
    num_envs: int,
    module: str,
    state: State | None = None,
    team_reward: bool = False,
    max_episode_steps: int | None = None,
    **options: Any,  # of `parallel_env`
) -> ParallelEnvVector:
    """Make the environments of the id `PettingZoo/<module>`, with `parallel_env` of this module."""
    parallel_env: Any = getattr(importlib.import_module(module), "parallel_env", None)
    expected = "a module with parallel_env; environments in which agents act in turns are not supported"
    check(parallel_env is not None, "env_id", f"PettingZoo/{module}", expected)
    limit = {} if max_episode_steps is None else {"max_cycles": max_episode_steps}
    make = functools.partial(parallel_env, **limit, **options)
    return ParallelEnvVector(make, num_envs, state=state, team_reward=team_reward)
