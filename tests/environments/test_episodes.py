"""Records of episodes, and replays that detect differences."""

import enum
import tracemalloc
from types import SimpleNamespace
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import FrameStackObservation, OrderEnforcing, TimeLimit

from lightning_rl.environments import episodes, workers
from lightning_rl.environments.atari import EpisodicLife
from lightning_rl.environments.episodes import RestartingEpisodes, SeededEpisodes
from lightning_rl.validation import ConfigurationError
from tests.probes import Counter, Echo, Random, Told, make_batch, make_collector


class Drifting(gymnasium.Wrapper):
    """Returns rewards or ends that depend on earlier episodes; observations do not."""

    def __init__(self, env, what):
        super().__init__(env)
        self.what, self.resets = what, 0

    def reset(self, **kwargs):
        self.resets += 1
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.what == "reward":
            reward += 2.0**-40 * self.resets
        elif self.what == "terminated":
            terminated = self.resets > 1
        return observation, reward, terminated, truncated, info


class Owner(Counter):
    """A counter with its own state."""

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def played(env, steps=3):
    """Return an environment in the middle of its second episode."""
    env = SeededEpisodes(env)
    env.reset(seed=7)
    env.step(1)
    env.reset()
    for _ in range(steps):
        env.step(0)
    return env


@pytest.mark.parametrize(("what", "exact"), [("nothing", True), ("reward", False), ("terminated", False)])
def test_replay_detects_state_of_earlier_episodes(what, exact):
    env = played(Drifting(Counter(lengths=(9,)), what))
    again = SeededEpisodes(Drifting(Counter(lengths=(9,)), what))
    again.env.env.episode = 0  # the observation contains the number of episodes
    assert again.restore(env.recorded())[0] == exact
    # After an inexact replay the next episode begins.
    assert (again.episode, again.step_count) == ((1, 3) if exact else (2, 0))


class CountingResets(gymnasium.ObservationWrapper):
    """Adds the number of all resets to the observation."""

    def __init__(self, env):
        super().__init__(env)
        self.resets = 0
        self.observation_space = spaces.Dict({"count": env.observation_space, "resets": spaces.Box(0, 9, (1,))})

    def reset(self, **kwargs):
        self.resets += 1
        return super().reset(**kwargs)

    def observation(self, observation):
        return {"count": observation, "resets": np.array([self.resets], np.float32)}


@pytest.mark.parametrize(("resets", "exact"), [(1, True), (0, False)])
def test_replay_detects_a_single_part_of_the_observation_that_differs(resets, exact):
    env, again = played(CountingResets(Counter(lengths=(9,)))), SeededEpisodes(CountingResets(Counter(lengths=(9,))))
    again.env.env.episode = 0
    again.env.resets = resets
    assert again.restore(env.recorded())[0] == exact


class Refusing(gymnasium.Wrapper):
    """Refuses the second step of an episode that follows too few others."""

    def __init__(self, env):
        super().__init__(env)
        self.resets = 0

    def reset(self, **kwargs):
        self.resets, self.steps = self.resets + 1, 0
        return self.env.reset(**kwargs)

    def step(self, action):
        self.steps += 1
        if self.resets == 1 and self.steps == 2:
            raise RuntimeError("call reset first")
        return self.env.step(action)


def test_replay_that_raises_begins_the_next_episode():
    env = played(Refusing(Counter(lengths=(9,))))
    again = SeededEpisodes(Refusing(Counter(lengths=(9,))))
    assert not again.restore(env.recorded())[0] and (again.episode, again.step_count) == (2, 0)
    again.step(0)


def test_record_has_the_actions_and_the_sum_of_rewards():
    record = played(Random()).recorded()
    again = played(Random())
    assert record["episode"] == record["first_episode"] == 1 and record["step_count"] == 3
    assert record["actions"].tolist() == [0, 0, 0] and record["resets"] == []
    rewards = []
    twin = SeededEpisodes(Random())
    twin.reset(seed=7)
    twin.reset()
    for _ in range(3):
        rewards.append(twin.step(0)[1])
    assert record["reward_sum"] == 0.0 + rewards[0] + rewards[1] + rewards[2]
    assert type(record["reward_sum"]) is float
    assert again.recorded()["reward_sum"] == record["reward_sum"]


def test_ends_are_recorded():
    env = SeededEpisodes(Counter(lengths=(2,), ends=("both",)))
    env.reset(seed=0)
    env.step(0)
    assert env.recorded()["ends"] == []
    env.step(0)
    assert env.recorded()["ends"] == [[2, True, True]]
    env.reset()
    assert env.recorded()["ends"] == []


def test_log_of_actions_is_bounded(monkeypatch):
    monkeypatch.setattr(episodes, "MAX_LOGGED_ACTIONS", 5)
    assert played(Random(), 4).recorded()["actions"].tolist() == [0] * 4
    env = played(Random(), 50)
    assert env.recorded() == {"stream_seed": 7, "episode": 1}
    again = SeededEpisodes(Random())
    exact, observation, _ = again.restore(env.recorded())
    assert not exact
    env.reset()
    env.step(0)
    # Both begin the next episode of the same stream.
    assert again.episode == 2
    np.testing.assert_array_equal(again.step(0)[0], env.recorded()["observation"])
    assert not np.array_equal(observation, env.recorded()["observation"])
    assert env.recorded()["actions"].tolist() == [0]


def test_logged_actions_take_little_memory_and_none_once_the_episode_is_too_long(monkeypatch):
    monkeypatch.setattr(episodes, "MAX_LOGGED_ACTIONS", 6000)
    env = SeededEpisodes(Echo())
    env.reset(seed=7)
    tracemalloc.start()
    try:
        for step in range(5500):
            env.step(np.full(2, step, np.float32))
        assert tracemalloc.get_traced_memory()[0] < 5500 * 8 + 120_000  # the numbers, and single arrays at the end
        assert env.recorded()["actions"].tolist() == [[step] * 2 for step in range(5500)]
        for step in range(5500, 7000):
            env.step(np.full(2, step, np.float32))
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
    assert env.recorded() == {"stream_seed": 7, "episode": 0}


def test_environment_with_own_state_is_restored_without_a_log(monkeypatch):
    monkeypatch.setattr(episodes, "MAX_LOGGED_ACTIONS", 2)
    record = played(Owner(lengths=(9,))).recorded()
    assert record["own"] == {"count": 3}
    exact, observation, _ = SeededEpisodes(Owner(lengths=(9,))).restore(record)
    assert exact and observation.tolist() == [1, 3]


@pytest.mark.parametrize("steps", [3, episodes._BLOCK])
def test_checkpoint_of_an_environment_with_own_state_has_no_actions(steps):
    record = played(Owner(lengths=(9, 2000)), steps).recorded()
    assert record["own"] == {"count": steps} and len(record["actions"]) == 0
    exact, observation, _ = SeededEpisodes(Owner(lengths=(9, 2000))).restore(record)
    assert exact and observation.tolist() == [1, steps]


@pytest.mark.parametrize(
    ("options", "uses_state"),
    [
        ({"max_episode_steps": 9, "frame_stack": 2, "previous_action": True, "reward_scale": 0.5}, True),
        ({"wrappers": [{"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": 5}}]}, True),
        ({"wrappers": ["gymnasium.wrappers.TimeAwareObservation"], "max_episode_steps": 9}, False),
        ({"training_wrappers": ["lightning_rl.environments.TerminationAsTruncation"]}, False),
        ({"action_repeat": 2}, False),
        ({"learned_action_repeat": 2}, False),
    ],
)
def test_own_state_is_stored_unless_actions_are_repeated_or_wrapped(options, uses_state, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Owner-v0", EnvSpec("Owner-v0", Owner))
    environments = make_batch("Owner-v0", env=options)
    environments.reset()
    (record,) = environments.state_dict()["environments"]
    environments.close()
    assert (record["own"] is not None) == uses_state


def test_time_limit_of_an_environment_with_own_state_is_restored():
    def limited():
        return TimeLimit(OrderEnforcing(Owner(lengths=(100,))), 5)

    record = played(limited(), 3).recorded()
    assert record["own"] is not None
    env = SeededEpisodes(limited())
    assert env.restore(record)[0]
    assert [env.step(0)[3] for _ in range(2)] == [False, True]


def test_time_limit_of_a_replaced_environment_is_restored():
    class Fragile(Owner):
        def step(self, action):
            if action == 2:
                raise RuntimeError("broken")
            return super().step(action)

    def limited():
        return TimeLimit(OrderEnforcing(Fragile(lengths=(100,))), 5)

    env = RestartingEpisodes(limited)
    env.reset(seed=7)
    for action in (1, 1, 2, 1):  # the third step fails, and the environment is replaced
        env.step(action)
    again = RestartingEpisodes(limited)
    assert again.restore(env.recorded())[0]
    assert [again.step(0)[3] for _ in range(4)] == [env.step(0)[3] for _ in range(4)] == [False, False, False, True]


def test_environment_with_own_state_in_a_stateful_wrapper_is_replayed():
    def stacked():
        return FrameStackObservation(Owner(lengths=(100,)), 3)

    played_on = played(stacked(), 3)
    record = played_on.recorded()
    assert record["own"] is None
    env = SeededEpisodes(stacked())
    env.unwrapped.episode = 0  # the observation contains the number of episodes
    exact, observation, _ = env.restore(record)
    assert exact
    np.testing.assert_array_equal(observation, record["observation"])
    np.testing.assert_array_equal(env.step(0)[0], played_on.step(0)[0])


STATE = {
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1],
    "numbers": [np.float64(0.1), np.int8(-3), np.bool_(True), 2, None, "text"],
    "pair": (np.zeros(0, np.float32), torch.arange(3)),
    (np.int64(1), ("place", np.int8(2))): 3,
    np.int64(5): {"set": {1, 2}, "random": np.random.Generator(np.random.MT19937(3)).bit_generator.state},
}
"""The state of an environment, of every type that a checkpoint can hold."""


class Holder(Counter):
    """Returns a given state, and keeps the state that it gets."""

    given = STATE
    loaded = None

    def state_dict(self):
        return self.given

    def load_state_dict(self, state):
        type(self).loaded = state


def test_numpy_values_in_the_state_of_an_environment_are_restored_with_their_types(tmp_path):
    spec = EnvSpec("Holder-v0", Holder, kwargs={"lengths": (9,)})
    with mock.patch.dict(gymnasium.registry, {"Holder-v0": spec}):
        environments, again = make_batch("Holder-v0"), make_batch("Holder-v0")
    environments.reset()
    torch.save(environments.state_dict(), tmp_path / "state")
    exact, _ = again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert exact.all()
    assert_same(Holder.loaded, STATE)


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        np.testing.assert_array_equal(found, expected)
        assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


class Mode(enum.IntEnum):
    FAST = 1


@pytest.mark.parametrize(
    "value",
    [
        Mode.FAST,
        {Mode.FAST: 1},
        {(1, Mode.FAST): 1},
        slice(2),
        np.array(["text"]),
        np.arange(3, dtype=np.dtype(int).newbyteorder()),
        np.datetime64("2020-01-01"),
        object(),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_state_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step(value, backend, monkeypatch):
    monkeypatch.setattr(Holder, "given", {"level": {"mode": [value]}})
    spec = EnvSpec("Holder-v0", Holder, kwargs={"lengths": (9,)})
    with mock.patch.dict(gymnasium.registry, {"Holder-v0": spec}):
        environments = make_batch("Holder-v0", backend=backend)
    steps = mock.patch.object(environments, "step", side_effect=AssertionError)
    message = r"environment\.own\.level\.mode=.* is not valid: expected numbers, strings, arrays, tensors, or lists"
    with steps, pytest.raises(ConfigurationError, match=message):
        make_collector(environments, 4).collect(Told())
    environments.close()


def test_log_has_copies_of_actions_that_the_environment_overwrites():
    class Halves(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 9, (2,)), spaces.Box(-1, 1, (2,))

        def reset(self, *, seed=None, options=None):
            self.position = np.zeros(2, np.float32)
            return self.position.copy(), {}

        def step(self, action):
            action *= 0.5
            self.position += action
            return self.position.copy(), 0.0, False, False, {}

    env = SeededEpisodes(Halves())
    env.reset(seed=7)
    for _ in range(3):
        env.step(np.ones(2, np.float32))
    exact, observation, _ = SeededEpisodes(Halves()).restore(env.recorded())
    assert exact and observation.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(("backend", "env_id"), [("sync", "Probe/Counter-v0"), ("native", "CartPole-v1")])
def test_environments_with_other_options_of_observations_are_not_restored(backend, env_id):
    plain, flat = (
        make_batch(env_id, backend=backend, env={"flatten_observations": flatten}) for flatten in (False, True)
    )
    for one, other in ((plain, flat), (flat, plain)):
        one.reset()
        one.step(np.zeros(1, np.int64))
        assert other.load_state_dict(one.state_dict()) is None


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_each_environment_receives_only_its_own_record(backend, monkeypatch):
    environments, again = (make_batch("Probe/Random-v0", 3, backend=backend) for _ in range(2))
    environments.reset()
    for _ in range(4):
        observations = environments.step(np.zeros(3, np.int64)).observations.copy()
    if backend == "async":
        sent = []
        send = workers.send
        monkeypatch.setattr(workers, "send", lambda pipe, message: (sent.append(message), send(pipe, message)))
    exact, rows = again.load_state_dict(environments.state_dict())
    assert exact.all()
    np.testing.assert_array_equal(rows, observations)
    if backend == "async":
        records = [args for _, name, args, _ in sent if name == "restore"]
        assert [len(args) for args in records] == [1, 1, 1]
        seeds = [args[0]["stream_seed"] for args in records]
        assert seeds == [record["stream_seed"] for record in environments.state_dict()["environments"]]
        monkeypatch.undo()
    assert [again.label(index) for index in range(3)] == [environments.label(index) for index in range(3)]
    for batch in (environments, again):
        batch.close()


def test_label_has_the_restored_seed():
    """The restored seed differs from the seed of the new batch."""
    environments, again = make_batch("Probe/Counter-v0"), make_batch("Probe/Counter-v0", seed=1)
    environments.reset()
    environments.step(np.zeros(1, np.int64))
    expected = environments.label(0)
    assert again.label(0) != expected
    again.load_state_dict(environments.state_dict())
    assert again.label(0) == expected
    assert torch.tensor(again.step(np.zeros(1, np.int64)).rewards).tolist() == [2.0]


class Lives(gymnasium.Env):
    """Games of three lives of three steps; each step draws a number."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float64), spaces.Discrete(2)

    def __init__(self):
        self.ale = SimpleNamespace(lives=lambda: 3 - self.count // 3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(1), {}

    def step(self, action):
        self.count += 1
        return self.np_random.random(1), float(action), self.count == 9, False, {}


def after_lives(lost, seed=7):
    """Return an environment one step after it lost some lives of its second game."""
    env = SeededEpisodes(EpisodicLife(Lives()))
    env.reset(seed=seed)
    for ended in range(3 + lost):  # a reset within a game takes a step too
        while not env.step(1)[2]:
            continue
        env.reset()
        assert env.get_wrapper_attr("continued_game") == (ended != 2)
    env.step(0)
    return env


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_games_are_restored_in_each_life(lost, used):
    env = after_lives(lost)
    again = after_lives(1, seed=8) if used else SeededEpisodes(EpisodicLife(Lives()))
    record = env.recorded()
    assert again.restore(record)[0]
    assert again.recorded().keys() == record.keys() and again.recorded()["resets"] == record["resets"]
    for _ in range(2):
        while not (found := env.step(1))[2]:
            assert again.step(1) == found
        assert again.step(1) == found
        assert again.reset() == env.reset()


def test_a_life_that_cannot_be_restored_is_followed_by_a_new_game():
    again = after_lives(1)
    assert not again.restore(again.recorded() | {"reward_sum": -1.0})[0]
    assert again.env.env.count == 0 and not again.get_wrapper_attr("continued_game")


@pytest.mark.parametrize("episode", [0, 1])
def test_a_walker_is_restored_in_its_first_episode_alone(episode):
    """Contacts of Box2D's solver outlast a reset."""
    walker = type("BipedalWalker", (Random,), {})
    env = SeededEpisodes(walker())
    env.reset(seed=7)
    for _ in range(episode):
        env.reset()
    env.step(0)
    assert SeededEpisodes(walker()).restore(env.recorded())[0] == (episode == 0)
