"""Agents of environments with PettingZoo's parallel API as rows of a batch."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl.environments.pettingzoo import ParallelEnvVector
from lightning_rl.validation import ConfigurationError
from tests.environments.test_spec import Still
from tests.helpers import make_data, make_model, make_trainer
from tests.probes import Told, collect


class Relay:
    """Agent i lives for `lives[i]` steps and observes (episode, i, step); its reward is 10 · i + step.

    The last agent's episode is truncated, those of the others terminate.
    """

    metadata = {"name": "relay"}  # noqa: RUF012

    def __init__(self, lives=(2, 4), same_spaces=True):
        self.possible_agents = [f"runner_{i}" for i in range(len(lives))]
        self.agents = []
        self.lives, self.same_spaces = lives, same_spaces
        self.episode, self.closed, self.seeds, self.actions = -1, False, [], []

    def observation_space(self, agent):
        wider = not self.same_spaces and agent == self.possible_agents[-1]
        return spaces.Box(-np.inf, np.inf, (4 if wider else 3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.episode, self.steps, self.agents = self.episode + 1, 0, list(self.possible_agents)
        self.seeds.append(seed)
        return {agent: self.see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def see(self, agent):
        return np.array([self.episode, self.possible_agents.index(agent), self.steps], np.float32)

    def step(self, actions):
        assert list(actions) == self.agents, "exactly the living agents act"
        self.actions.append(list(actions.values()))
        self.steps += 1
        observations = {agent: self.see(agent) for agent in self.agents}
        rewards = {a: 10.0 * self.possible_agents.index(a) + self.steps for a in self.agents}
        over = {a: self.lives[self.possible_agents.index(a)] == self.steps for a in self.agents}
        last = self.possible_agents[-1]
        terminated = {a: end and a != last for a, end in over.items()}
        truncated = {a: end and a == last for a, end in over.items()}
        infos = {a: {"place": float(self.possible_agents.index(a))} for a in self.agents}
        self.agents = [agent for agent in self.agents if not over[agent]]
        return observations, rewards, terminated, truncated, infos

    def close(self):
        self.closed = True


made = []


def make_relays(num_envs, **kwargs):
    made.clear()
    return ParallelEnvVector(lambda: made.append(Relay(**kwargs)) or made[-1], num_envs)


gymnasium.register("Probe/Relay-v0", vector_entry_point=make_relays)
RELAY = {"env_id": "Probe/Relay-v0", "backend": "native"}


def test_each_agent_is_a_row_that_is_idle_until_all_agents_have_ended():
    rollout = collect(**RELAY, length=6, policy=Told(), num_envs=2)
    assert rollout.valid.T.tolist() == [[True, True, False, False, True, True], [True] * 6]
    assert rollout.rewards.T.tolist() == [[1, 2, 0, 0, 1, 2], [11, 12, 13, 14, 11, 12]]
    assert rollout.terminated.T.tolist() == [[False, True, False, False, False, True], [False] * 6]
    assert rollout.truncated.T.tolist() == [[False] * 6, [False, False, False, True, False, False]]
    first = [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0]]
    second = [[0, 1, 0], [0, 1, 1], [0, 1, 2], [0, 1, 3], [1, 1, 0], [1, 1, 1], [1, 1, 2]]
    assert rollout.observations[:, 0].tolist() == first
    assert rollout.observations[:, 1].tolist() == second
    assert rollout.final_indices.tolist() == [[3, 1]] and rollout.final_observations.tolist() == [[0, 1, 4]]
    assert rollout.num_steps == 10
    assert sorted(zip(rollout.episodes.returns, rollout.episodes.lengths, strict=True)) == [(3, 2), (3, 2), (50, 4)]


def test_only_living_agents_act_and_each_copy_has_its_own_seed():
    rollout = collect(**RELAY, length=4, policy=Told(action=lambda o: o[:, 1].long() + 1), num_envs=4)
    assert [env.actions for env in made] == [[[1, 2], [1, 2], [2], [2]]] * 2
    assert rollout.valid.T.tolist()[2] == [True, True, False, False]
    seeds = [env.seeds for env in made]
    assert seeds[0][0] != seeds[1][0] and None not in (seeds[0][0], seeds[1][0])
    assert [later for _, *later in seeds] == [[None]] * 2
    assert all(env.closed for env in made)


def test_history_of_a_row_restarts_with_its_episode():
    options = {"frame_stack": 2, "previous_reward": True}
    rollout = collect(**RELAY, length=5, policy=Still(event_dims=2), num_envs=2, env=options).observations
    assert rollout["previous_reward"][:, 0, 0].tolist() == [0, 1, 0, 0, 0, 1]
    assert rollout["previous_reward"][:, 1, 0].tolist() == [0, 11, 12, 13, 0, 11]
    assert rollout["observation"][4, 0].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert rollout["observation"][5, 0].tolist() == [[1, 0, 0], [1, 0, 1]]


def test_agents_are_trained_and_evaluated():
    data = make_data(**RELAY, num_envs=4, evaluation={"episodes": 4, "num_envs": 2}, info_keys=["place"])
    model = make_model(data)
    trainer = make_trainer(limit_val_batches=1.0, log_every_n_steps=2)
    trainer.fit(model, data)
    # In 32 steps each copy plays 8 episodes of 2 + 4 steps.
    assert model.env_steps == 2 * 8 * 6
    assert trainer.logged_metrics["rollout/place"] == pytest.approx(4 / 6)
    episodes = make_trainer().predict(model, data)[0]
    assert (
        sorted((e.length, e.episode_return, e.terminated) for e in episodes)
        == [(2, 3, True)] * 2 + [(4, 50, False)] * 2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 3}, "num_envs=3 is not valid: expected a multiple of the 2 agents"),
        ({"num_envs": 2, "same_spaces": False}, "observation_space=.* supersuit.pad_observations_v0"),
    ],
)
def test_invalid_number_of_rows_and_different_spaces_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        collect(**RELAY, length=1, policy=Told(), **options)


def test_one_row_is_enough_for_the_spaces_but_not_to_play():
    env = make_relays(1)
    assert env.single_observation_space.shape == (3,) and env.single_action_space == spaces.Discrete(5)
    with pytest.raises(ConfigurationError, match=r"^num_envs=1 is not valid: expected a multiple of the 2 agents"):
        env.reset()


def test_idle_rows_are_not_learned_from():
    """Idle rows are not in the batch, and values do not bootstrap over them."""
    rollout = collect(**RELAY, length=6, policy=Told(value=1.0), num_envs=2)
    assert torch.equal(rollout.next_values[1], torch.tensor([0.0, 1.0]))
    assert len(rollout.flatten()) == 10
