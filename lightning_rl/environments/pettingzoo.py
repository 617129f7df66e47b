"""Multi-agent environments with PettingZoo's parallel API; all agents use one policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from lightning_rl.environments.contract import IDLE, Array, batch_infos, derive_seed
from lightning_rl.nested import Nested, map_space
from lightning_rl.validation import check


# No type arguments: VectorEnv takes none before Gymnasium 1.1.
class ParallelEnvVector(VectorEnv):
    """A vector environment of copies of a parallel environment, with one row per agent of each copy.

    The episode of a row ends when its agent terminates or is truncated. The row is then idle (`valid` is False) until
    all agents of the copy have ended; the step that ends the last of them also resets the copy.

    Register a function that returns a `ParallelEnvVector` as `vector_entry_point`, and use `backend="native"`.

    Args:
        make: Makes one copy. Its agents must have equal spaces, or a `ConfigurationError` is raised.
        num_envs: Number of rows, a multiple of the number of possible agents; 1 if only the spaces are needed.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        first = make()
        self.agents = list(first.possible_agents)
        num_agents = len(self.agents)
        self._has_only_spaces = num_envs == 1 < num_agents
        expected = f"a multiple of the {num_agents} agents of {first}, as evaluation.num_envs must be"
        check(num_envs % num_agents == 0 or self._has_only_spaces, "num_envs", num_envs, expected)
        self.single_observation_space = self._common_space(first.observation_space, "observation", "observations")
        self.single_action_space = self._common_space(first.action_space, "action", "action_space")
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.copies = [first, *(make() for _ in range(num_envs // num_agents - 1))]
        self._zeros = map_space(lambda leaf: np.zeros(leaf.shape or (), leaf.dtype), self.single_observation_space)
        self._observations: Any = create_empty_array(self.single_observation_space, num_envs)
        self._rows: list[Nested] = [self._zeros] * num_envs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        check(not self._has_only_spaces, "num_envs", 1, f"a multiple of the {len(self.agents)} agents")
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        for index in range(len(self.copies)):
            self._start(index, infos, None if seed is None else derive_seed(seed, index), options)
        return self._concatenated(), batch_infos(infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # noqa: ANN401
        taken = list(iterate(self.action_space, actions))
        rewards = np.zeros(self.num_envs)
        terminated, truncated, idle = (np.zeros(self.num_envs, bool) for _ in range(3))
        finals = np.full(self.num_envs, None, object)
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        final_infos: list[dict[str, Any]] = [{}] * self.num_envs
        for index, env in enumerate(self.copies):
            living = [(row, agent) for row, agent in self._places(index) if agent in env.agents]
            idle[[row for row, agent in self._places(index) if agent not in env.agents]] = True
            answers = env.step({agent: taken[row] for row, agent in living})
            for row, agent in living:
                observation, rewards[row], terminated[row], truncated[row], info = (x.get(agent) for x in answers)
                ended = terminated[row] or truncated[row]
                if ended:
                    finals[row] = copy.deepcopy(observation)
                self._rows[row] = self._zeros if ended else observation
                (final_infos if ended else infos)[row] = info or {}
            if not env.agents:
                self._start(index, infos)
        batched = batch_infos(infos)
        ended_rows = terminated | truncated
        if ended_rows.any():
            batched |= {"final_obs": finals, "_final_obs": ended_rows, "final_info": batch_infos(final_infos)}
        if idle.any():
            batched[IDLE] = idle
        return self._concatenated(), rewards, terminated, truncated, batched

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ANN401
        for env in self.copies:
            env.close()

    def _start(
        self, index: int, infos: list[dict[str, Any]], seed: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        observations, agent_infos = self.copies[index].reset(seed=seed, options=options)
        for row, agent in self._places(index):
            self._rows[row] = observations.get(agent, self._zeros)
            infos[row] = agent_infos.get(agent, {})

    def _places(self, index: int) -> list[tuple[int, Any]]:
        return list(enumerate(self.agents, index * len(self.agents)))

    def _concatenated(self) -> Any:  # noqa: ANN401
        self._observations = concatenate(self.single_observation_space, self._rows, self._observations)
        return self._observations

    def _common_space(self, space_of: Callable[[Any], Any], what: str, padding: str) -> Any:  # noqa: ANN401
        spaces = {agent: space_of(agent) for agent in self.agents}
        space = spaces[self.agents[0]]
        same = all(other == space for other in spaces.values())
        check(same, f"{what}_space", spaces, f"the same space for all agents, see supersuit.pad_{padding}_v0")
        return space
