"""Agents of environments with PettingZoo's parallel API as rows of a batch."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl.environments.contract import EnvironmentFailure
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
    state_space = spaces.Box(0, 99, (2,), np.float32)

    def __init__(self, lives=(2, 4), sizes=(3, 3), choices=(5, 5), noise=0.0, seeded=False, max_cycles=99, joins=0):
        self.possible_agents = [f"runner_{i}" for i in range(len(lives))]
        self.agents = []
        self.lives, self.sizes, self.noise = [min(life, max_cycles) for life in lives], sizes, noise
        self.seeded, self.joins = seeded, joins  # the last agent joins after so many steps
        self.action_spaces = [spaces.Discrete(n) if isinstance(n, int) else n for n in choices]
        self.episode, self.closed, self.seeds, self.actions = -1, False, [], []

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (self.sizes[self.possible_agents.index(agent)],), np.float32)

    def action_space(self, agent):
        return self.action_spaces[self.possible_agents.index(agent)]

    def reset(self, seed=None, options=None):
        self.episode, self.steps, self.agents = self.episode + 1, 0, list(self.possible_agents)
        if self.seeded:
            self.episode = seed % 9
        self.seeds.append(seed)
        self.agents = self.agents[: -1 if self.joins else None]
        return {agent: self.see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def see(self, agent):
        index = self.possible_agents.index(agent)
        seen = [self.episode, index, self.steps + (self.noise and self.noise * np.random.rand()), 7]
        return np.array(seen[: self.sizes[index]], np.float32)

    def state(self):
        return np.array([self.episode, self.steps], np.float32)

    def step(self, actions):
        assert list(actions) == self.agents, "exactly the living agents act"
        self.actions.append(list(actions.values()))
        self.steps += 1
        if self.steps == self.joins:
            self.agents.append(self.possible_agents[-1])
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


class Masked(Relay):
    """Agent i may take only the choices from 2 · i on, which its observation, its `info` and a method tell."""

    def observation_space(self, agent):
        return spaces.Dict(own=super().observation_space(agent), mask=spaces.Box(0, 1, (5,), np.int8))

    def mask(self, agent):
        return (np.arange(5) >= 2 * self.possible_agents.index(agent)).astype(np.int8)

    def see(self, agent):
        return {"own": super().see(agent), "mask": self.mask(agent)}

    def reset(self, seed=None, options=None):
        observations, _ = super().reset(seed, options)
        return observations, {agent: {"mask": self.mask(agent)} for agent in self.agents}

    def step(self, actions):
        observations, rewards, terminated, truncated, _ = super().step(actions)
        return observations, rewards, terminated, truncated, {agent: {"mask": self.mask(agent)} for agent in actions}


BOX = spaces.Box(-1, 1, (2,), np.float32)
made = []


def make_relays(num_envs, state=None, team_reward=False, **kwargs):
    made.clear()
    make = lambda: made.append(Relay(**kwargs)) or made[-1]  # noqa: E731
    return ParallelEnvVector(make, num_envs, state=state, team_reward=team_reward)


def parallel_env(**kwargs):
    return Relay(**kwargs)


class MaskedVector(ParallelEnvVector):
    """Tells the masks of all rows by a method too, zeros for agents that are gone."""

    def masks(self):
        return np.array([env.mask(a) * (a in env.agents) for env in self.copies for a in self.agents])


def make_masked(num_envs, **kwargs):
    return MaskedVector(lambda: Masked(**kwargs), num_envs)


gymnasium.register("Probe/Relay-v0", vector_entry_point=make_relays)
gymnasium.register("Probe/MaskedRelay-v0", vector_entry_point=make_masked)
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


def test_only_living_agents_act_and_each_episode_has_its_own_seed():
    rollout = collect(**RELAY, length=4, policy=Told(action=lambda o: o[:, 1].long() + 1), num_envs=4)
    assert [env.actions for env in made] == [[[1, 2], [1, 2], [2], [2]]] * 2
    assert rollout.valid.T.tolist()[2] == [True, True, False, False]
    seeds = [seed for env in made for seed in env.seeds]
    assert len(set(seeds)) == 4 and None not in seeds  # of two episodes of each copy
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
        (
            {"env": {"kwargs": {"choices": (5, BOX)}}},
            "action_space=.* equal spaces of all agents, vectors .* supersuit",
        ),
        ({"env": {"kwargs": {"choices": (5, spaces.Discrete(4, start=1))}}}, "action_space=.* equal spaces"),
        ({"env": {"kwargs": {"state": "all"}}}, "env.kwargs.state='all' is not valid: expected joint, environment"),
    ],
)
def test_invalid_number_of_rows_spaces_and_state_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        collect(**RELAY, length=1, policy=Told(), **{"num_envs": 2} | options)


def test_vectors_of_different_sizes_are_padded_and_missing_actions_masked():
    env = make_relays(2, sizes=(4, 2), choices=(3, 5))
    assert env.single_action_space == spaces.Discrete(5)
    observations = env.reset(seed=0)[0]
    assert observations["observation"].tolist() == [[0, 0, 0, 7], [0, 1, 0, 0]]
    assert observations["action_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]


def test_agents_get_their_components_of_padded_continuous_actions():
    wide, narrow = BOX, spaces.Box(-0.5, 0.5, (1,), np.float32)
    env = make_relays(2, choices=(wide, narrow))
    assert env.single_action_space == wide
    env.reset(seed=0)
    env.step(np.array([[1, -1], [1, 1]], np.float32))
    assert [action.tolist() for action in made[0].actions[0]] == [[1, -1], [0.5]]


@pytest.mark.parametrize(
    ("state", "first", "ended", "alone"),
    [("joint", [0, 0, 0, 0, 1, 0], [0, 0, 2, 0, 1, 2], [0, 0, 0, 0, 1, 3]), ("environment", [0, 0], [0, 2], [0, 3])],
)
def test_state_shows_all_agents_until_they_leave(state, first, ended, alone):
    env = make_relays(2, state=state)
    observations = env.reset(seed=0)[0]
    assert observations["agent"].tolist() == [0, 1] and observations["state"].tolist() == [first, first]
    env.step(np.zeros(2, int))
    observations, *_, infos = env.step(np.zeros(2, int))
    assert infos["final_obs"][0]["state"].tolist() == ended == observations["state"][1].tolist()
    observations = env.step(np.zeros(2, int))[0]
    assert observations["state"].tolist() == [[0] * len(alone), alone]


def test_copy_that_fails_to_close_does_not_keep_others_open(monkeypatch):
    def close(env):
        env.closed = True
        if env is made[0]:
            raise OSError("the game has crashed")

    monkeypatch.setattr(Relay, "close", close)
    with pytest.raises(OSError, match="the game has crashed"):
        make_relays(6).close()
    assert [env.closed for env in made] == [True] * 3


def test_copies_are_closed_if_another_one_cannot_be_made_or_their_spaces_do_not_fit():
    def make():
        if len(made) == 2:
            raise OSError("the port is taken")
        made.append(Relay())
        return made[-1]

    made.clear()
    with pytest.raises(OSError, match="the port is taken"):
        ParallelEnvVector(make, 6)
    assert [env.closed for env in made] == [True] * 2
    with pytest.raises(ConfigurationError, match="action_space="):
        make_relays(2, choices=(5, BOX))
    assert [env.closed for env in made] == [True]


def test_team_reward_is_summed_once_for_all_agents(monkeypatch):
    """A sum for each of 200 agents took half of the time of a step."""
    added = []

    class Counted(float):
        def __radd__(self, other):
            added.append(self)
            return other + float(self)

    def step(env, actions, step=Relay.step):
        observations, rewards, *rest = step(env, actions)
        return observations, {agent: Counted(reward) for agent, reward in rewards.items()}, *rest

    monkeypatch.setattr(Relay, "step", step)
    env = make_relays(3, team_reward=True, lives=(4, 4, 4), sizes=(3, 3, 3), choices=(5, 5, 5))
    env.reset(seed=0)
    assert env.step(np.zeros(3, np.int64))[1].tolist() == [33.0] * 3 and len(added) == 3


def test_team_reward_is_the_sum_over_the_living_agents():
    rollout = collect(**RELAY, length=4, policy=Told(), num_envs=2, env={"kwargs": {"team_reward": True}})
    assert rollout.rewards.T.tolist() == [[12, 14, 0, 0], [12, 14, 13, 14]]


def test_replayed_copies_continue_with_the_same_steps():
    def play(env, num_steps):
        return [env.step(np.array([t % 5, 1, 2, 3]))[0]["state"].tolist() for t in range(num_steps)]

    env, resumed = (make_relays(4, state="joint") for _ in range(2))
    env.reset(seed=5)
    play(env, 3)  # the first agents have left
    exact, observations, _ = resumed.restore(env.recorded())
    assert exact.all() and observations["state"].tolist() == env._observations["state"].tolist()
    assert play(resumed, 9) == play(env, 9)
    assert made[0].seeds[1:] and env.recorded()["seed"] == resumed.recorded()["seed"] == 5


def test_copies_that_cannot_be_replayed_begin_the_next_episode():
    env, resumed = make_relays(2, noise=1.0), make_relays(2, noise=1.0)
    for one in (env, resumed):
        one.reset(seed=5)
    env.step(np.zeros(2, int))
    exact, observations, _ = resumed.restore(env.recorded())
    assert not exact.any() and observations[0, 2] < 1 and resumed.recorded()["copies"]["0"] == {"episode": 1}


def test_copies_that_raise_in_the_replay_begin_the_next_episode():
    def refuse(actions):
        raise RuntimeError("the agents have left")

    env, resumed = make_relays(2), make_relays(2)
    env.reset(seed=5)
    env.step(np.zeros(2, int))
    made[-1].step = refuse
    exact, *_ = resumed.restore(env.recorded())
    assert not exact.any() and resumed.recorded()["copies"]["0"] == {"episode": 1}


def test_copies_that_cannot_be_replayed_begin_the_next_episode_with_masks_from_info(tmp_path):
    def make():
        env = {"action_mask": "info.mask", "kwargs": {"noise": 1.0}}
        return make_data("Probe/MaskedRelay-v0", backend="native", num_envs=4, env=env)

    data, trainer = make(), make_trainer()
    model = make_model(data)
    trainer.fit(model, data)
    trainer.save_checkpoint(path := tmp_path / "run.ckpt")
    with pytest.warns(UserWarning, match="could not be restored: they begin new episodes"):
        make_trainer(max_epochs=2).fit(make_model(data := make()), data, ckpt_path=path)


def test_id_names_the_module_of_a_parallel_environment():
    data = make_data(
        "PettingZoo/tests.environments.test_pettingzoo",
        backend="native",
        num_envs=2,
        env={"kwargs": {"sizes": (2, 4), "state": "joint"}, "max_episode_steps": 1},
    )
    assert data.observation_space["observation"].shape == (4,)
    with pytest.raises(ConfigurationError, match=r"mpe2.none' cannot be imported .* expected a module"):
        _ = make_data("PettingZoo/mpe2.none", backend="native").observation_space
    with pytest.raises(ConfigurationError, match=r"env_id='PettingZoo/math' .*parallel_env; environments .* in turns"):
        _ = make_data("PettingZoo/math", backend="native").observation_space
    with pytest.raises(ConfigurationError, match=r"missing.env' needs a package that is not installed"):
        _ = make_data("PettingZoo/missing.env", backend="native").observation_space
    module = "PettingZoo/tests.environments.test_pettingzoo"
    with pytest.raises(ConfigurationError, match=r"backend='sync' is not valid: expected native \(--data.backend nat"):
        _ = make_data(module).observation_space
    with pytest.raises(ConfigurationError, match=r"unexpected keyword argument 'team_rewards'"):
        _ = make_data(module, backend="native", env={"kwargs": {"team_rewards": True}}).observation_space
    with pytest.raises(ConfigurationError, match=r"env.kwargs.module='math' is not valid: expected None, since Pett"):
        make_data(module, backend="native", env={"kwargs": {"module": "math"}})


def test_one_row_stands_for_a_copy_but_not_in_a_run():
    env = make_relays(1)
    assert env.single_observation_space.shape == (3,) and env.single_action_space == spaces.Discrete(5)
    assert len(env.reset()[0]) == env.num_envs == 2
    for name, options in (("num_envs", {"num_envs": 1}), ("evaluation.num_envs", {"evaluation": {"num_envs": 3}})):
        with pytest.raises(ConfigurationError, match=rf"^{name}=\d is not valid: expected a multiple of the 2 agents"):
            _ = make_data(**RELAY, **{"num_envs": 2} | options).observation_space


@pytest.mark.parametrize(
    ("episodes", "lives", "lengths"),
    [(2, (2, 4, 3), [2, 4]), (7, (2, 4, 3), [2, 2, 4, 3, 2, 4, 3]), (1, (1,) * 9, [1])],
)
def test_any_number_of_episodes_is_played_in_whole_copies(episodes, lives, lengths):
    sizes = {"lives": lives, "sizes": (3,) * len(lives), "choices": (5,) * len(lives)}
    options = {"env": {"kwargs": sizes}, "evaluation": {"episodes": episodes}}
    data = make_data(**RELAY, num_envs=len(lives), **options)
    played = make_trainer().predict(make_model(data), data)[0]
    assert [episode.length for episode in played] == lengths  # by row


@pytest.mark.parametrize("source", ["info.mask", "observation.mask", "method.masks"])
def test_masks_of_agents_that_leave_early_are_learned_with(source):
    env = {"action_mask": source, "previous_action": True}
    data = make_data("Probe/MaskedRelay-v0", backend="native", num_envs=4, env=env)
    model, rollouts = make_model(data), []
    model.on_train_batch_start = lambda rollout, _: rollouts.append(rollout)
    trainer = make_trainer()
    trainer.fit(model, data)
    for rollout in rollouts:
        assert rollout.valid.any(0).all() and not rollout.valid.all()
        second = rollout.actions[:, 1::2][rollout.valid[:, 1::2]]
        assert second.min() == 2 and rollout.actions[rollout.valid].min() == 0
    assert trainer.callback_metrics["train/first_ratio_error"] < 1e-5


def test_an_agent_that_joins_later_acts_on_its_first_observation():
    kwargs = {"lives": (5, 5), "joins": 2}
    rollout = collect(**RELAY, length=7, policy=Told(), num_envs=2, env={"kwargs": kwargs})
    assert rollout.valid.T.tolist() == [[True] * 7, [False, False, True, True, True, False, False]]
    assert rollout.observations[:, 1].tolist() == [
        *([0, 0, 0], [0, 0, 0], [0, 1, 2], [0, 1, 3], [0, 1, 4]),
        *([0, 0, 0], [0, 0, 0], [1, 1, 2]),
    ]


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (True, r"returned terminated=True and truncated=False for 'runner_0' and has agents=\['runner_0', 'run.*\]"),
        (False, r"returned terminated=False and truncated=False for 'runner_0' and has agents=\['runner_1'\]"),
    ],
)
def test_agents_that_end_but_stay_or_leave_without_an_end_are_errors(ends, message, monkeypatch):
    class Confused(Relay):
        def step(self, actions):
            observations, rewards, terminated, *others = super().step(actions)
            self.agents = list(actions) if ends else self.agents
            return observations, rewards, terminated if ends else dict.fromkeys(terminated, False), *others

    monkeypatch.setattr("tests.environments.test_pettingzoo.Relay", Confused)
    with pytest.raises(EnvironmentFailure, match=f"^the environments {message}: expected agents without those that ha"):
        collect(**RELAY, length=3, policy=Told(), num_envs=2)


def test_idle_rows_are_not_learned_from():
    """Idle rows are not in the batch, and values do not bootstrap over them."""
    rollout = collect(**RELAY, length=6, policy=Told(value=1.0), num_envs=2)
    assert torch.equal(rollout.next_values[1], torch.tensor([0.0, 1.0]))
    assert len(rollout.flatten()) == 10


class Numbered(Relay):
    """Agents see numbers from 1 on."""

    def observation_space(self, agent):
        return spaces.Dict(one=spaces.Discrete(9, start=1), two=spaces.MultiDiscrete([9, 9], start=[1, 2]))

    def see(self, agent):
        return {"one": self.steps + 1, "two": np.full(2, self.steps + 2)}


def test_agents_that_leave_early_may_see_numbers_from_one_on(monkeypatch):
    monkeypatch.setattr("tests.environments.test_pettingzoo.Relay", Numbered)
    data = make_data("PettingZoo/tests.environments.test_pettingzoo", backend="native", num_envs=2, rollout_length=4)
    model = make_model(data)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
