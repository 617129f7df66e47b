"""Environments of several agents that share the policy's parameters, in the way of PettingZoo's parallel API."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from lightning_rl.environments.contract import IDLE
from lightning_rl.environments.seeding import derive_seed
from lightning_rl.nested import Nested, map_space
from lightning_rl.validation import check

Array = np.ndarray[Any, Any]


# No type arguments: VectorEnv takes none before Gymnasium 1.1.
class ParallelEnvVector(VectorEnv):
    """Copies of a parallel environment, one row for each agent of each copy.

    To the learner a row is an environment: its episode ends when its agent does. An agent that ends before the others
    of its copy is idle until all have ended: its rows are not `valid`, so nothing is learned from them. With the last
    end the copy is reset, in the same step.

    Register a function that returns one as `vector_entry_point`, and use `backend="native"`.

    Args:
        make: Makes one parallel environment.
        num_envs: Number of rows, a multiple of the number of possible agents. 1 is enough to ask for the spaces.

    Raises:
        ConfigurationError: Agents have different spaces, or the number of rows does not fit that of agents.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        first = make()
        self.agents = list(first.possible_agents)
        num_agents = len(self.agents)
        self._asks_for_spaces = num_envs == 1 < num_agents
        expected = (
            f"a multiple of the {num_agents} agents of {first}, each of which is a row; so is evaluation.num_envs"
        )
        check(num_envs % num_agents == 0 or self._asks_for_spaces, "num_envs", num_envs, expected)
        self.single_observation_space = self._common(first.observation_space, "observation", "pad_observations_v0")
        self.single_action_space = self._common(first.action_space, "action", "pad_action_space_v0")
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.copies = [first, *(make() for _ in range(num_envs // num_agents - 1))]
        self._nothing = map_space(lambda leaf: np.zeros(leaf.shape or (), leaf.dtype), self.single_observation_space)
        self._observations: Any = create_empty_array(self.single_observation_space, num_envs)
        self._rows: list[Nested] = [self._nothing] * num_envs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every copy; a seed is the root of those of all."""
        check(not self._asks_for_spaces, "num_envs", 1, f"a multiple of the {len(self.agents)} agents")
        infos: dict[str, Any] = {}
        for index in range(len(self.copies)):
            self._start(index, infos, None if seed is None else derive_seed(seed, index), options)
        return self._join(), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # noqa: ANN401
        """Step every copy, and reset those whose agents have all ended."""
        taken = list(iterate(self.action_space, actions))
        rewards = np.zeros(self.num_envs)
        terminated, truncated, idle = (np.zeros(self.num_envs, bool) for _ in range(3))
        finals = np.full(self.num_envs, None, object)
        infos: dict[str, Any] = {}
        final_infos: dict[str, Any] = {}
        for index, env in enumerate(self.copies):
            living = [(row, agent) for row, agent in self._places(index) if agent in env.agents]
            idle[[row for row, agent in self._places(index) if agent not in env.agents]] = True
            answers = env.step({agent: taken[row] for row, agent in living})
            for row, agent in living:
                observation, rewards[row], terminated[row], truncated[row], info = (x.get(agent) for x in answers)
                ended = terminated[row] or truncated[row]
                if ended:
                    finals[row] = copy.deepcopy(observation)
                self._rows[row] = self._nothing if ended else observation
                where = final_infos if ended else infos
                where |= self._add_info(where, info or {}, row)
            if not env.agents:
                self._start(index, infos)
        ended_rows = terminated | truncated
        if ended_rows.any():
            infos |= {"final_obs": finals, "_final_obs": ended_rows, "final_info": final_infos}
        if idle.any():
            infos[IDLE] = idle
        return self._join(), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Close every copy."""
        for env in self.copies:
            env.close()

    def _start(
        self, index: int, infos: dict[str, Any], seed: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        observations, of_agents = self.copies[index].reset(seed=seed, options=options)
        for row, agent in self._places(index):
            self._rows[row] = observations.get(agent, self._nothing)
            infos |= self._add_info(infos, of_agents.get(agent, {}), row)

    def _places(self, index: int) -> list[tuple[int, Any]]:
        """Return the rows of a copy, with their agents."""
        return list(enumerate(self.agents, index * len(self.agents)))

    def _join(self) -> Any:  # noqa: ANN401
        self._observations = concatenate(self.single_observation_space, self._rows, self._observations)
        return self._observations

    def _common(self, space_of: Callable[[Any], Any], what: str, padding: str) -> Any:  # noqa: ANN401
        """Return the space that all agents have."""
        spaces = {agent: space_of(agent) for agent in self.agents}
        space = spaces[self.agents[0]]
        same = all(other == space for other in spaces.values())
        check(same, f"{what}_space", spaces, f"the same one for all agents, as supersuit.{padding} makes it")
        return space
