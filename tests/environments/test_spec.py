"""Options that wrap environments: their effect in training, in evaluation, and in every autoreset mode."""

import importlib
import math
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.environments import AtariPreprocessing, EnvConfig, EnvironmentBatch, EnvironmentSpec
from lightning_rl.environments.make import make_single
from lightning_rl.environments.registry import find_spec
from lightning_rl.environments.wrappers.transforms import make_reward_transform
from lightning_rl.masks import ActionMask
from lightning_rl.nested import first_leaf, leaves, map_leaves
from lightning_rl.policies.actor_critic import PolicyOutput
from lightning_rl.spaces import is_image
from lightning_rl.validation import ConfigurationError
from tests.environments.test_atari_lives import whole_game
from tests.helpers import MemoryLogger, make_data, make_model, make_trainer
from tests.probes import Counter, Space, Told, collect, make_batch, make_collector

COUNTER = "Probe/Counter-v0"
SCRIPT = {"lengths": (3, 2), "ends": ("truncated", "terminated")}
ONE = {"lengths": (4,), "reward": 1.0}


class Still:
    """A policy for any observations, with value 0.

    Args:
        action: Function of the observations; None: always 0.
        event_dims: Dimensions of the first leaf of one observation.
    """

    def __init__(self, action=None, event_dims=1):
        self.action, self.event_dims = action, event_dims

    def act(self, observations, generator=None, deterministic=False):
        return PolicyOutput(self.value(observations).long() if self.action is None else self.action(observations))

    def log_prob(self, observations, actions):
        return self.value(observations)

    def value(self, observations):
        first = first_leaf(observations)
        return torch.zeros(first.shape[: first.dim() - self.event_dims])


# ------------------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("scale", "clip", "expected"),
    [
        (0.5, None, [-50.0, -0.25, 0.0, 1.0, 10.0]),
        (1.0, "abs_one", [-1.0, -0.5, 0.0, 1.0, 1.0]),
        (0.5, "abs_one", [-1.0, -0.25, 0.0, 1.0, 1.0]),  # scaled first
        (1.0, 3.0, [-3.0, -0.5, 0.0, 2.0, 3.0]),
        (
            1.0,
            "soft_asymmetric",
            [-1.5 * math.tanh(20), -1.5 * math.tanh(0.1), 0.0, 5 * math.tanh(0.4), 5 * math.tanh(4)],
        ),
        (
            0.5,
            "soft_asymmetric",
            [-1.5 * math.tanh(10), -1.5 * math.tanh(0.05), 0.0, 5 * math.tanh(0.2), 5 * math.tanh(2)],
        ),
    ],
)
def test_rewards_are_scaled_and_then_bounded(scale, clip, expected):
    transform = make_reward_transform(scale, clip)
    raw = np.array([-100.0, -0.5, 0.0, 2.0, 20.0])
    np.testing.assert_allclose(transform(raw), expected, rtol=1e-15)
    assert transform(torch.from_numpy(raw)).tolist() == pytest.approx(expected, rel=1e-15)
    assert np.isnan(transform(np.array([math.nan]))).all(), "to be found later"


def test_default_reward_options_have_no_transform():
    assert make_reward_transform() is None


@pytest.mark.parametrize("backend", ["sync", "async", "native", "envpool"])
def test_reward_options_apply_to_training_only(backend):
    options = {"env": {"reward_scale": 3.0, "reward_clip": 2.5}, "backend": backend}
    for evaluation, reward in ((False, 2.5), (True, 1.0)):
        rollout = collect("CartPole-v1", 4, Told(), 2, evaluation=evaluation, **options)
        assert rollout.rewards.unique().tolist() == [reward]


# ------------------------------------------------------------------------------------------------------- stacked frames


def test_stacked_frames_are_of_one_episode_and_include_the_final_one():
    rollout = collect(COUNTER, 6, Still(event_dims=2), env={"frame_stack": 2}, **SCRIPT)
    seen = rollout.observations[:, 0].tolist()
    assert seen[:4] == [[[0, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 1], [0, 2]], [[1, 0], [1, 0]]]
    assert seen[4:] == [[[1, 0], [1, 1]], [[2, 0], [2, 0]], [[2, 0], [2, 1]]]
    assert rollout.final_observations.tolist() == [[[0, 2], [0, 3]]]


def test_stacked_frames_are_copies():
    rollout = collect(COUNTER, 2, Still(event_dims=2), env={"frame_stack": 3}, lengths=(9,), reuse_buffer=True)
    assert rollout.observations[-1, 0].tolist() == [[0, 0], [0, 1], [0, 2]]


class Previous(gymnasium.Wrapper):
    """Adds the previous one of three actions, and half of the previous reward."""

    def __init__(self, env):
        super().__init__(env)
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        parts = {"observation": env.observation_space, "previous_action": spaces.MultiBinary(3), "previous_reward": box}
        self.observation_space = spaces.Dict(parts)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return self.show(observation, np.zeros(3, np.int8), 0), info

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return self.show(observation, np.eye(3, dtype=np.int8)[action], 0.5 * reward), reward, *rest

    def show(self, observation, action, reward):
        shown = np.array([reward], np.float32)
        return {"observation": observation, "previous_action": action, "previous_reward": shown}


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_options_equal_wrappers_of_single_environments(mode, flatten):
    def act(observations):
        return observations["observation"].reshape(len(observations["observation"]), -1)[:, -1].long() % 3

    options = {"frame_stack": 3, "flatten_observations": flatten, "previous_action": True, "previous_reward": True}
    single = [
        {"class_path": "gymnasium.wrappers.FrameStackObservation", "init_args": {"stack_size": 3}},
        *[{"class_path": "gymnasium.wrappers.FlattenObservation", "init_args": {}}] * flatten,
        {"class_path": "tests.environments.test_spec.Previous", "init_args": {}},
    ]
    batches = [
        make_batch(COUNTER, 2, mode=mode, env={"reward_scale": 0.5} | more, **SCRIPT)
        for more in (options, {"wrappers": single})
    ]
    one, other = (make_collector(batch, 11).collect(Still(act, 2 - flatten)) for batch in batches)
    assert batches[0].single_observation_space == batches[1].single_observation_space
    for name in ("observations", "final_observations"):
        pairs = zip(leaves(getattr(one, name)), leaves(getattr(other, name)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
    for name in ("rewards", "terminated", "truncated", "final_indices", "actions"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.actions.unique().tolist() == [0, 1, 2]
    assert len(one.final_indices) and one.terminated.any()


def observed(options, env, *actions, evaluation=False, clips=None):
    """Return the space, and the observations of a reset and steps, of one environment with options."""
    spec = EnvironmentSpec("Probe/Space-v0", options, evaluation=evaluation)
    vector = SyncVectorEnv([lambda: env])
    batch = EnvironmentBatch(vector, [1], [1], spec.histories(vector, clips))
    seen = [map_leaves(lambda x: np.copy(x[0]), batch.reset())]
    for action in actions:
        observations = batch.step(map_leaves(lambda x: np.asarray(x)[None], action)).observations
        seen.append(map_leaves(lambda x: np.copy(x[0]), observations))
    return batch.single_observation_space, seen


@pytest.mark.parametrize(("shape", "folded"), [((7, 7, 3), (7, 7, 12)), ((3, 9, 9), (12, 9, 9)), ((8, 8), (4, 8, 8))])
def test_stacked_images_are_images_with_the_newest_channels_last(shape, folded):
    box = spaces.Box(0, 255, shape, np.uint8)
    space, seen = observed(EnvConfig(frame_stack=4), Space(box), *[0] * 5)
    inner = Space(box)
    frames = [inner.reset(seed=1)[0], *(inner.step(0)[0] for _ in range(5))]
    assert space == spaces.Box(0, 255, folded, np.uint8) and is_image(space)
    assert all(space.contains(x) for x in seen)
    if len(shape) == 2:
        expected = np.stack(frames[-4:])
    else:
        expected = np.concatenate(frames[-4:], axis=-1 if shape[-1] == 3 else 0)
    np.testing.assert_array_equal(seen[-1], expected)


def test_stacked_observations_of_every_kind_are_in_their_space():
    parts = [spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 4]), spaces.MultiBinary(3), spaces.Box(-1, 1, (2,))]
    inner = Space(spaces.Dict({"all": spaces.Tuple(parts)}))
    space, seen = observed(EnvConfig(frame_stack=2), inner, *[0] * 5)
    assert all(space.contains(x) for x in seen)
    kinds = [type(leaf) for leaf in space["all"]]
    assert kinds == [spaces.MultiDiscrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box]


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_vectorized_backends_stack_frames(backend):
    rollout = collect("CartPole-v1", 30, Still(event_dims=2), 2, backend=backend, env={"frame_stack": 3})
    assert rollout.valid is not None  # an episode ended, and the next step was a reset
    frames, steps = rollout.observations, rollout.observations[:, :, -1]
    began = torch.cat([torch.ones(1, 2, dtype=torch.bool), ~rollout.valid])
    for t in range(31):
        for b in range(2):
            first = max(s for s in range(t + 1) if began[s, b])
            expected = torch.stack([steps[max(first, s), b] for s in (t - 2, t - 1, t)])
            assert torch.equal(frames[t, b], expected)


# -------------------------------------------------------------------------------- limits, repetition, flat observations


@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_time_limit_truncates_in_training_and_evaluation(backend):
    data = make_data(backend=backend, env={"max_episode_steps": 5}, evaluation={"episodes": 2}, rollout_length=6)
    model = make_model(data)
    make_trainer(limit_val_batches=1.0).fit(model, data)
    episodes = make_trainer().predict(model, data)[0]
    assert [(e.length, e.terminated) for e in episodes] == [(5, False)] * 2
    rollout = collect("CartPole-v1", 5, Told(), 2, backend=backend, env={"max_episode_steps": 5})
    assert rollout.truncated.nonzero().tolist() == [[4, 0], [4, 1]]
    assert not rollout.terminated.any()


def test_action_repeat_sums_rewards_and_stops_at_the_end():
    rollout = collect(COUNTER, 4, Told(), lengths=(5,), env={"action_repeat": 3})
    # Steps 1, 2, 3 and 4, 5 of the first episode, whose rewards are their numbers; 100 more in the second.
    assert rollout.rewards[:, 0].tolist() == [6, 9, 306, 209]
    assert rollout.truncated[:, 0].tolist() == [False, True, False, True]
    assert rollout.observations[:, 0].tolist() == [[0, 0], [0, 3], [1, 0], [1, 3], [2, 0]]
    assert rollout.final_observations.tolist() == [[0, 5], [1, 5]]
    assert rollout.frames == 10 and rollout.num_steps == 4


@pytest.mark.parametrize("mode", AutoresetMode)
def test_frames_count_simulation_steps_in_every_mode(mode):
    rollout = collect(COUNTER, 9, Told(), 2, lengths=(5,), env={"action_repeat": 3}, mode=mode)
    episodes = len(rollout.episodes.lengths)
    assert rollout.episodes.lengths == [2] * episodes
    unfinished = rollout.num_steps - 2 * episodes
    assert rollout.frames == 5 * episodes + 3 * unfinished


def test_time_limit_counts_environment_steps_with_action_repeat():
    rollout = collect(COUNTER, 3, Told(), lengths=(99,), env={"action_repeat": 2, "max_episode_steps": 5})
    assert rollout.truncated[:, 0].tolist() == [False, False, True] and rollout.frames == 5


def test_frames_are_logged_and_resumed_beside_environment_steps(tmp_path):
    logger = MemoryLogger()
    data = make_data(COUNTER, env={"kwargs": ONE | {"start": 0}, "action_repeat": 3}, rollout_length=4)
    model = make_model(data)
    trainer = make_trainer(logger=logger, log_every_n_steps=2)
    trainer.fit(model, data)
    # Two rollouts of eight steps, in turns of 3 frames and of the fourth frame of an episode.
    assert model.env_steps == 16 and model.clock.frames == 8 * 3 + 8 * 1
    assert logger.rows("time/frames") == [(16, 32.0)]
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = make_model(make_data(COUNTER, env={"kwargs": ONE, "action_repeat": 3}))
    again.on_load_checkpoint(torch.load(tmp_path / "end.ckpt", weights_only=True))
    assert (again.env_steps, again.clock.frames) == (16, 32)


def test_frames_without_repeats_equal_environment_steps_and_are_not_logged():
    logger = MemoryLogger()
    data = make_data()
    model = make_model(data)
    make_trainer(logger=logger, log_every_n_steps=2).fit(model, data)
    assert model.clock.frames == model.env_steps == 64 and logger.rows("time/frames") == []


@pytest.mark.parametrize("backend", ["sync", "envpool"])
def test_flat_observations_are_one_vector(backend):
    nested = spaces.Dict(
        {"a": spaces.Discrete(3), "b": spaces.Tuple([spaces.Box(-1, 1, (2, 2)), spaces.MultiBinary(2)])}
    )
    if backend == "sync":
        batch = make_batch("Probe/Space-v0", 2, observation_space=nested, env={"flatten_observations": True})
        assert batch.single_observation_space.shape == (3 + 4 + 2,)
        assert batch.reset()[:, :3].sum(1).tolist() == [1, 1]
    else:
        batch = make_batch("FrozenLake-v1", 2, backend=backend, env={"flatten_observations": True})
        assert batch.single_observation_space.shape == (16,)
        assert batch.reset().tolist() == [[1] + [0] * 15] * 2
    batch.close()


@pytest.mark.parametrize(
    ("space", "what"),
    [
        (spaces.Dict(word=spaces.Text(5)), "observation_space.word: Text is not supported"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "observation_space: OneOf is not supported"),
        (spaces.Dict(part=spaces.Dict()), r"observation_space.part: Dict\(\) is empty"),
    ],
)
def test_space_that_cannot_be_flattened_is_named(space, what):
    with pytest.raises(ConfigurationError, match=f"^{what}"):
        make_batch("Probe/Space-v0", env={"flatten_observations": True}, observation_space=space)


def test_frames_are_stacked_before_they_are_flattened():
    batch = make_batch("CartPole-v1", env={"frame_stack": 3, "flatten_observations": True})
    assert batch.single_observation_space.shape == (12,)


# ------------------------------------------------------------------------------------------------------ previous steps


def test_previous_action_and_reward_are_zero_at_the_start_of_an_episode():
    def act(observations):
        return (observations["observation"][:, 1] % 3).long()

    options = {"previous_action": True, "previous_reward": True, "reward_scale": 0.5}
    rollout = collect(COUNTER, 5, Still(act), env=options, start=4, **SCRIPT)
    seen = rollout.observations
    assert seen["observation"][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]]
    one, two, three, nothing = [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]
    assert seen["previous_action"][:, 0].tolist() == [nothing, one, two, nothing, one, nothing]
    # Half of the raw reward, as in training.
    assert seen["previous_reward"][:, 0, 0].tolist() == [0, 0.5, 1, 0, 50.5, 0]
    assert rollout.rewards[:, 0].tolist() == [0.5, 1, 1.5, 50.5, 51]
    final = rollout.final_observations
    assert final["observation"].tolist() == [[0, 3]]
    assert final["previous_action"].tolist() == [three] and final["previous_reward"].tolist() == [[1.5]]


ACTIONS = [
    (spaces.Discrete(3, start=-1), 1, [0, 0, 1]),
    (spaces.MultiDiscrete([2, 3], start=[1, 5]), np.array([2, 5]), [0, 1, 1, 0, 0]),
    (spaces.MultiBinary([2, 2]), np.array([[1, 0], [1, 1]], np.int8), [1, 0, 1, 1]),
    (spaces.Box(-2, 2, (2, 1), np.float64), np.array([[0.5], [-2.0]]), [0.5, -2.0]),
    (spaces.Box(-1, 1, (2,), np.int8), np.array([-1, 1], np.int8), [1, 0, 0, 0, 0, 1]),
    (spaces.Box(0, 1000, (2,), np.int32), np.array([3, 1000], np.int32), [3.0, 1000.0]),
]


@pytest.mark.parametrize(("space", "action", "shown"), ACTIONS, ids=[str(space) for space, _, _ in ACTIONS])
def test_previous_actions_of_every_space_are_encoded(space, action, shown):
    options = EnvConfig(previous_action=True)
    nested = spaces.Dict({"part": spaces.Tuple([space])})
    for whole, taken, part in ((space, action, lambda x: x), (nested, {"part": (action,)}, lambda x: x["part"][0])):
        found, (first, last) = observed(options, Space(spaces.Discrete(2), whole), taken)
        assert found.contains(first) and found.contains(last)
        assert set(found.keys()) == {"observation", "previous_action"}
        assert part(first["previous_action"]).tolist() == [0] * len(shown)
        assert part(last["previous_action"]).tolist() == shown


def test_space_of_previous_actions_contains_zeros():
    space, _ = observed(EnvConfig(previous_action=True), Space(spaces.Discrete(2), spaces.Box(1, 2, (1,))))
    assert space["previous_action"] == spaces.Box(0, 2, (1,))


def test_previous_step_is_added_to_dicts_unless_its_names_are_taken():
    space = spaces.Dict({"camera": spaces.Box(0, 1, (2,)), "previous_reward": spaces.Discrete(2)})
    found, _ = observed(EnvConfig(previous_action=True), Space(space))
    assert set(found.keys()) == {"camera", "previous_reward", "previous_action"}
    with pytest.raises(ConfigurationError, match=r"^env.previous_reward=True .* have a part 'previous_reward'"):
        observed(EnvConfig(previous_reward=True), Space(space))


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_previous_reward_in_evaluation_is_scaled_as_in_training(backend):
    options = {"previous_reward": True, "reward_scale": 0.25, "max_episode_steps": 3}
    data = make_data(backend=backend, env=options, evaluation={"episodes": 1})
    episode = make_trainer().predict(make_model(data), data)[0][0]
    assert episode.episode_return == 3 and episode.rewards.tolist() == [1, 1, 1]
    assert episode.observations["previous_reward"].tolist() == [[0], [0.25], [0.25], [0.25]]


def test_previous_step_in_evaluation_is_cleared_at_each_life():
    """In training lives are episodes and rewards are clipped."""
    game = whole_game((3, 3), (0, 2), (5, 2), (-2, 2), (7, 0))
    game.action_space, game.observation_space = spaces.Discrete(2), spaces.Box(0, 9, (1,))
    options = EnvConfig(previous_action=True, previous_reward=True)
    _, seen = observed(options, game, *[1] * 4, evaluation=True, clips=np.sign)
    # The second step loses a life, and the no-op after it scores 5 points.
    assert [x["previous_reward"].tolist() for x in seen] == [[0], [1], [0], [-1], [1]]
    assert [x["previous_action"].tolist() for x in seen] == [[0, 0], [0, 1], [0, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_previous_reward_of_atari_games_is_clipped_in_evaluation(backend):
    pytest.importorskip("ale_py")
    calm = AtariPreprocessing(noop_max=1, repeat_action_probability=0.0)
    batch = make_batch("ALE/Asterix-v5", backend=backend, env={"atari": calm, "previous_reward": True}, evaluation=True)
    batch.reset()
    raw, shown = set(), set()
    for _ in range(100):
        step = batch.step(np.array([2]))
        raw.add(float(step.rewards[0]))
        shown.add(float(step.observations["previous_reward"][0, 0]))
    assert max(raw) > 1 and shown == {0.0, 1.0}
    batch.close()


@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_a_policy_learns_from_and_is_exported_with_the_previous_step(backend):
    data = make_data(backend=backend, env={"previous_action": True, "previous_reward": True, "frame_stack": 2})
    model = make_model(data, normalization={"observations": True})
    make_trainer(limit_val_batches=1.0).fit(model, data)
    assert model.policy_version == 2
    moments = model.state_dict()
    assert any("previous_reward" in name for name in moments)
    observation = data.observation_space.sample()
    action = model({name: torch.as_tensor(x)[None] for name, x in observation.items()})
    assert action.shape == (1,)


def test_previous_action_solves_a_task_without_other_information():
    """An action is rewarded if it differs from the previous one; observations contain nothing else."""
    gymnasium.register("Probe/Alternate-v0", Alternate)
    try:
        returns = {}
        for previous in (False, True):
            data = make_data("Probe/Alternate-v0", num_envs=8, rollout_length=32, env={"previous_action": previous})
            model = make_model(data, learning_rate=0.03, num_epochs=4, gamma=0.5)
            make_trainer(max_epochs=10).fit(model, data)
            returns[previous] = make_trainer().predict(model, data)[0][0].episode_return
    finally:
        del gymnasium.registry["Probe/Alternate-v0"]
    assert returns[True] == 10 and returns[False] <= 1


class Alternate(Counter):
    """Ten steps, each with reward 1 if the action differs from the previous one; the first action should be 0."""

    def __init__(self):
        super().__init__((10,), blind=True)
        self.action_space = spaces.Discrete(2)

    def step(self, action):
        last, self.last = (self.last if self.count else 1), int(action)
        observation, _, *rest = super().step(action)
        return observation, float(last != action), *rest


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_stack": 0}, "frame_stack=0 is not valid"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 is not valid"),
        ({"max_episode_steps": 5, "kwargs": {"max_episode_steps": 6}}, "max_episode_steps=5 .* in env.kwargs"),
        ({"action_repeat": 0}, "action_repeat=0 is not valid"),
        ({"reward_scale": 0.0}, "reward_scale=0.0 is not valid: expected a number above 0"),
        ({"reward_clip": "hard"}, "reward_clip='hard' .* expected abs_one, soft_asymmetric, a positive number or None"),
        ({"reward_clip": -1}, "reward_clip=-1 is not valid"),
        ({"flatten_observations": "yes"}, "flatten_observations='yes' is not valid"),
        (
            {"frame_stack": 2, "action_mask": "observation.mask"},
            "frame_stack=2 is not valid: expected None with env.action_mask='observation.mask'",
        ),
        (
            {"flatten_observations": True, "action_mask": "observation.mask"},
            "flatten_observations=True is not valid: expected False with env.action_mask='observation.mask'",
        ),
        ({"previous_action": 1}, "previous_action=1 is not valid"),
        ({"imports": "my_package"}, "imports='my_package' is not valid: expected a list of names"),
        ({"imports": [3]}, r"imports=\[3\] is not valid: expected a list of names"),
        ({"wrappers": 1}, "wrappers=1 is not valid: expected a list of classes, or None"),
        ({"wrappers": [{"class_path": 5}]}, "wrappers: class_path=5 is not valid: expected the path of a class"),
        ({"training_wrappers": True}, "training_wrappers=True is not valid: expected a list of classes, or None"),
        ({"wrappers": ["no.such.Wrapper"]}, "wrappers='no.such.Wrapper' cannot be imported"),
        ({"training_wrappers": ["no.such.Wrapper"]}, "training_wrappers='no.such.Wrapper' cannot be imported"),
        ({"kwargs": "x"}, "kwargs='x' is not valid: expected a dict of arguments"),
        ({"kwargs": ""}, "kwargs='' is not valid: expected a dict of arguments"),
        ({"learned_action_repeat": 2**63}, "learned_action_repeat.max=9223372036854775808 .* an integer of 64 bits"),
    ],
)
def test_invalid_options_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=rf"^env\.{message}"):
        make_data(env=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "native", "env": {"action_repeat": 2}}, "env.action_repeat=2 .* expected 1 with backend='native'"),
        ({"info_keys": 1}, "info_keys=1 is not valid: expected a list of keys"),
        ({"info_keys": [1]}, r"info_keys=\[1\] is not valid: expected a list of keys"),
    ],
)
def test_invalid_options_of_the_data_module_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        make_data(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_stack": 2}, "frame_stack=2 .* which have env.atari.frame_stack"),
        ({"action_repeat": 2}, "action_repeat=2 .* which have env.atari.frame_skip"),
        ({"reward_clip": "abs_one"}, "reward_clip='abs_one' .* beside env.atari.clip_rewards=False"),
        ({"reward_scale": 2.0}, "reward_scale=2.0 .* beside env.atari.clip_rewards=False"),
    ],
)
def test_options_that_repeat_the_atari_preprocessing_are_errors(options, message):
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigurationError, match=rf"^env\.{message}"):
        make_data("ALE/Pong-v5", env=options).observation_space  # noqa: B018


# ------------------------------------------------------------------------------------------------------------- imports


PACKAGE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Imported/CartPole-v0", CartPoleEnv, max_episode_steps=7)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the name of a module that registers an environment."""
    (tmp_path / "registers_one.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "registers_one"
    forget_package()


def forget_package():
    sys.modules.pop("registers_one", None)
    gymnasium.registry.pop("Imported/CartPole-v0", None)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_modules_are_imported_before_the_id_is_looked_up(package, backend):
    with pytest.raises(ConfigurationError, match=r"^env_id='Imported/CartPole-v0' is unknown"):
        make_data("Imported/CartPole-v0").observation_space  # noqa: B018
    data = make_data("Imported/CartPole-v0", env={"imports": [package]}, backend=backend)
    model = make_model(data)
    make_trainer(limit_val_batches=1.0).fit(model, data)
    assert model.policy_version == 2 and data.spec.env.imports == [package]


def test_modules_are_imported_again_in_a_new_process(package):
    spec = EnvironmentSpec("CartPole-v1", EnvConfig(imports=(package,)))
    gym_spec = find_spec("CartPole-v1")
    assert "Imported/CartPole-v0" not in gymnasium.registry
    make_single(spec, gym_spec).close()  # called by a worker process
    assert "Imported/CartPole-v0" in gymnasium.registry


@pytest.mark.parametrize("content", ["import there_is_no_such_module", "1 / 0", None])
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, content):
    if content is not None:
        (tmp_path / "does_not_work.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match=r"^env.imports: module 'does_not_work' cannot be imported"):
        make_data(env={"imports": ["does_not_work"]}).observation_space  # noqa: B018


# --------------------------------------------------------------------------------------------------------- Atari games


@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_time_limit_of_an_atari_game_counts_steps_of_frame_skip_frames(backend):
    pytest.importorskip("ale_py")
    calm = AtariPreprocessing(noop_max=1, fire_on_reset=False, episodic_life=False, repeat_action_probability=0.0)
    options = {"atari": calm, "max_episode_steps": 10}
    rollout = collect("ALE/Breakout-v5", 14, Still(event_dims=3), backend=backend, env=options)
    (end,) = rollout.truncated[:, 0].nonzero().flatten().tolist()
    assert end in (8, 9) and not rollout.terminated.any()  # one of the 40 frames is a no-op
    assert rollout.frames == 4 * rollout.num_steps


class DeclaresMask(gymnasium.Env):
    observation_space = spaces.Dict({"own": spaces.Box(0, 1, (2,)), "mask": ActionMask(3)})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.see(), {}

    def step(self, action):
        assert self.see()["mask"][action] == 1
        self.count += 1
        return self.see(), 1.0, False, self.count == 7, {}

    def see(self):
        mask = np.arange(3) == self.count % 3
        return {"own": np.full(2, self.count / 7, np.float32), "mask": mask.astype(np.int8)}


gymnasium.register("Probe/DeclaresMask-v0", DeclaresMask)


def test_flattening_masks_in_observations_is_refused():
    with pytest.raises(ConfigurationError, match=r"^env.flatten_observations=True .* have action masks \(mask\)"):
        _ = make_data("Probe/DeclaresMask-v0", env={"flatten_observations": True}).observation_space


@pytest.mark.parametrize("options", [{}, {"previous_action": True}, {"frame_stack": 3}])
def test_masks_that_an_environment_declares_count_with_options_of_observations(options):
    data = make_data("Probe/DeclaresMask-v0", env=options)
    assert data.observation_space["mask"] == ActionMask(3)
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(make_model(data), data)  # the environment raises for other actions
    assert trainer.callback_metrics["train/entropy"] == pytest.approx(0, abs=1e-6)
