"""Atari preprocessing: every option in every backend."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from lightning_rl.environments import (
    AtariPreprocessing,
    EnvConfig,
    EnvironmentBatch,
    EnvironmentSpec,
    Step,
    make_environments,
)
from lightning_rl.environments.atari import SeededGame
from lightning_rl.environments.make import make_single
from lightning_rl.environments.registry import find_spec
from lightning_rl.options import changed
from lightning_rl.validation import ConfigurationError

BREAKOUT = "ALE/Breakout-v5"
NOOP, FIRE, RIGHT, LEFT = range(4)
# No chance, so that what an option changes can be told from what chance does.
CALM = {"noop_max": 0, "repeat_action_probability": 0.0}


def game(env_id=BREAKOUT, *, evaluation=False, **options):
    """Make one game like the backends `sync` and `async`."""
    env = EnvConfig(atari=AtariPreprocessing(**CALM | options))
    spec = EnvironmentSpec(env_id, env, evaluation=evaluation)
    return make_single(spec, find_spec(env_id))


def batch(backend, env_id=BREAKOUT, *, evaluation=False, num_envs=1, **options):
    spec = EnvironmentSpec(env_id, EnvConfig(atari=AtariPreprocessing(**options)), backend, evaluation)
    return make_environments(spec, num_envs, list(range(num_envs)))


def lives(env):
    return env.unwrapped.ale.lives()


def play_to_end(env, action=NOOP, limit=300):
    """Play until the episode ends; return the number of steps, the return, and the last observation and info."""
    total = 0.0
    for step in range(1, limit + 1):
        observation, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return step, total, observation, info
    raise AssertionError(f"no end after {limit} steps")


def test_usual_preprocessing_gives_four_84_by_84_frames():
    env = game()
    observation, _ = env.reset(seed=0)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert env.observation_space.contains(observation)
    assert env.action_space == gymnasium.spaces.Discrete(4)


@pytest.mark.parametrize("grayscale", [True, False])
def test_observations_equal_a_game_that_renders_every_frame(grayscale):
    wrapped = {"noop_max": 0, "frame_skip": 4, "grayscale_obs": grayscale}
    kwargs = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "rgb"}
    ours = game(frame_stack=1, grayscale=grayscale, fire_on_reset=False, clip_rewards=False, episodic_life=False)
    pictures = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(BREAKOUT, **kwargs), **wrapped)
    assert ours.unwrapped._obs_type == "ram", "none is taken in vain"
    assert ours.observation_space.shape[-2:] == pictures.observation_space.shape[-2:]
    for env in (ours, pictures):
        env.reset(seed=0)
    for action in [FIRE, *[RIGHT, LEFT, LEFT] * 10]:
        (seen, *rest), (expected, *of_pictures) = ours.step(action), pictures.step(action)
        np.testing.assert_array_equal(seen[0] if grayscale else seen, expected)
        assert rest[:3] == of_pictures[:3]


def test_lost_life_ends_the_episode_but_not_the_game():
    env = game()
    new_game, _ = env.reset(seed=0)
    seen, frames, starts = [lives(env)], [env.unwrapped.ale.getEpisodeFrameNumber()], [new_game]
    for _ in range(5):
        *_, info = play_to_end(env)
        starts.append(env.reset()[0])
        seen.append(lives(env))
        frames.append(env.unwrapped.ale.getEpisodeFrameNumber())
    assert seen == [5, 4, 3, 2, 1, 5]
    assert frames[:5] == sorted(frames[:5]) and frames[5] < frames[1]  # one game, then a new one
    assert "game_return" in info
    # The screen shows the lost life, so the frame differs from the first frame of a new game.
    assert all((start != new_game).any() for start in starts[1:5])
    np.testing.assert_array_equal(starts[5], new_game)


def test_without_episodic_life_an_episode_is_a_game():
    env = game(episodic_life=False)
    env.reset(seed=0)
    for count in range(5, 0, -1):
        assert lives(env) == count
        while lives(env) == count:
            *_, terminated, truncated, _ = env.step(FIRE)
            assert terminated == (lives(env) == 0) and not truncated


def test_game_score_is_reported_with_episodic_life_and_clipped_rewards():
    for episodic_life, clip_rewards in ((True, True), (False, False)):
        env = game("ALE/Asterix-v5", episodic_life=episodic_life, clip_rewards=clip_rewards)
        env.reset(seed=0)
        rewards, steps = 0.0, 0
        for _ in range(3):
            step, reward, _, info = play_to_end(env, action=2, limit=2000)
            rewards, steps = rewards + reward, steps + step
            if "game_return" in info:
                break
            env.reset()
            steps += 1  # the no-op
        assert "game_return" in info and info["game_length"] == steps
        assert info["game_return"] == (rewards if not clip_rewards else 50 * rewards)


def test_rewards_are_clipped_in_training_only():
    seen = {}
    for name, options in {
        "clipped": {},
        "raw": {"clip_rewards": False},
        "evaluation": {"evaluation": True},
    }.items():
        env = game("ALE/Asterix-v5", **options)
        env.reset(seed=0)
        seen[name] = {float(env.step(2)[1]) for _ in range(100)}
    assert seen == {"clipped": {0.0, 1.0}, "raw": {0.0, 50.0}, "evaluation": {0.0, 50.0}}


def test_fire_is_pressed_after_each_reset_in_games_that_wait_for_it():
    with_fire, without = game(), game(fire_on_reset=False)
    with_fire.reset(seed=0)
    without.reset(seed=0)
    assert play_to_end(with_fire)[0] < 40
    with_fire.reset()
    assert play_to_end(with_fire)[0] < 40  # after a lost life too
    with pytest.raises(AssertionError, match="no end"):
        play_to_end(without)
    no_fire_button = game("ALE/Freeway-v5")
    no_fire_button.reset(seed=0)
    assert "FIRE" not in no_fire_button.unwrapped.get_action_meanings()


def test_evaluation_presses_fire_after_each_lost_life_of_a_whole_game():
    env = game(evaluation=True)
    first, _ = env.reset(seed=0)
    steps, total, _, info = play_to_end(env, limit=1000)
    assert lives(env) == 0 and 100 < steps < 300
    assert total == info["game_return"]
    # A reset in the middle of a game begins a new game too.
    env.reset()
    for _ in range(40):
        env.step(NOOP)
    assert lives(env) == 4
    np.testing.assert_array_equal(env.reset(seed=0)[0], first)
    assert lives(env) == 5


def test_evaluation_counts_points_scored_by_pressing_fire():
    env = game(evaluation=True)
    env.reset(seed=0)
    inner = env.env._game
    inner.score += 7.0  # as if the reset had scored
    total = play_to_end(env, limit=1000)[1]
    assert total == inner.score >= 7.0


def test_seeded_reset_begins_a_new_game_even_between_two_lives():
    env = game()
    first, _ = env.reset(seed=3)
    play_to_end(env)
    assert lives(env) == 4
    np.testing.assert_array_equal(env.reset(seed=3)[0], first)
    assert lives(env) == 5


@pytest.mark.parametrize("frame_skip", [1, 2, 4])
def test_a_step_plays_frame_skip_frames(frame_skip):
    env = game("ALE/Pong-v5", frame_skip=frame_skip, fire_on_reset=False)
    env.reset(seed=0)
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    for _ in range(5):
        env.step(NOOP)
    assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 5 * frame_skip


@pytest.mark.parametrize(("noop_max", "least", "most"), [(0, 0, 0), (1, 1, 1), (6, 1, 6)])
def test_game_begins_with_one_to_noop_max_no_ops(noop_max, least, most):
    env = game("ALE/Pong-v5", noop_max=noop_max, fire_on_reset=False)
    frames = []
    for seed in range(25):
        env.reset(seed=seed)
        frames.append(env.unwrapped.ale.getEpisodeFrameNumber())
    assert (min(frames), max(frames)) == (least, most)


def test_sticky_actions_repeat_the_previous_action():
    """With probability 1 no chosen action is ever taken; with 0 the same seed and actions give the same game."""

    def final_frame(probability, actions):
        env = game(repeat_action_probability=probability, fire_on_reset=False)
        env.reset(seed=0)
        for action in actions:
            observation, *_ = env.step(action)
        return observation

    moving, resting = [RIGHT] * 8, [NOOP] * 8
    assert (final_frame(0.0, moving) != final_frame(0.0, resting)).any()
    np.testing.assert_array_equal(final_frame(1.0, moving), final_frame(1.0, resting))


class Emulator(gymnasium.Env):
    """A fake game that records the action of each frame."""

    observation_space, action_space = gymnasium.spaces.Discrete(1), gymnasium.spaces.Discrete(9)

    def __init__(self):
        self.ale, self.done = self, []

    def cloneState(self):
        return len(self.done)

    def restoreState(self, state):
        del self.done[state:]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        self.done.append(action)
        return 0, 0.0, False, False, {}


def test_sticky_actions_are_drawn_for_each_frame():
    emulator = Emulator()
    env = SeededGame(emulator, 0.25)
    env.reset(seed=0)
    asked = [1 + frame % 8 for frame in range(8000)]
    for action in asked:
        env.step(action)
    done = emulator.done.copy()
    assert all(now in (want, before) for now, want, before in zip(done, asked, [0, *done], strict=False))
    assert np.mean(np.array(done) != np.array(asked)) == pytest.approx(0.25, abs=0.02)
    # The action before a new episode is no-op; the same seed gives the same repeats.
    for seed, same in ((0, True), (1, False)):
        env.reset(seed=seed)
        for action in asked:
            env.step(action)
        assert (emulator.done == done) is same
    never = SeededGame(Emulator(), 0.0)
    never.reset(seed=0)
    for action in asked:
        never.step(action)
    assert never.unwrapped.done == asked


def test_game_depends_only_on_its_own_seed():
    """The emulator's own reset does not clear the whole memory of Seaquest."""
    runs = []
    for games_before in (0, 2):
        env = game("ALE/Seaquest-v5", noop_max=30, repeat_action_probability=0.25)
        for number in range(games_before):
            env.reset(seed=10 + number)
            for _ in range(300):
                env.step(number + 1)
        frames = [env.reset(seed=5)[0]]
        frames += [env.step(action % 18)[0] for action in range(100)]
        runs.append(np.stack(frames))
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize(("env_id", "probability"), [("ALE/Pong-v5", 0.25), ("PongNoFrameskip-v4", 0.0)])
def test_default_stickiness_comes_from_the_id(env_id, probability):
    def of(**options):
        spec = EnvironmentSpec(env_id, EnvConfig(atari=AtariPreprocessing(**options)))
        env = make_single(spec, find_spec(env_id))
        assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0  # not twice
        return env.get_wrapper_attr("repeat_action_probability")

    assert of() == probability
    assert of(repeat_action_probability=0.5) == 0.5


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"frame_stack": 1}, (1, 84, 84)),
        ({"frame_stack": 2, "screen_size": 64}, (2, 64, 64)),
        ({"grayscale": False, "frame_stack": 1}, (84, 84, 3)),
        ({"grayscale": False, "frame_stack": 2}, (6, 84, 84)),
    ],
)
def test_shape_of_observations(options, shape):
    env = game(**options)
    assert env.observation_space.shape == env.reset(seed=0)[0].shape == shape


def test_stacked_frames_are_in_order_with_the_latest_last():
    gray, colour = game(frame_stack=3), game(frame_stack=3, grayscale=False)
    for env in (gray, colour):
        env.reset(seed=0)
    before = [gray.step(RIGHT)[0], gray.step(LEFT)[0]]
    np.testing.assert_array_equal(before[0][1:], before[1][:2])
    assert (before[1][1] != before[1][2]).any()
    one, two = colour.step(RIGHT)[0], colour.step(LEFT)[0]
    np.testing.assert_array_equal(one[3:], two[:6])


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_other_backends_have_the_same_spaces(backend):
    options = {"frame_stack": 2, "screen_size": 64}
    environments = batch(backend, **options)
    env = game(**options)
    assert environments.single_observation_space == env.observation_space
    assert environments.single_action_space.n == env.action_space.n == 4
    observations = environments.reset()
    assert observations.shape == (1, 2, 64, 64) and observations.dtype == np.uint8


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_episodic_life_continues_the_game_on_vectorized_backends(backend):
    environments = batch(backend, noop_max=1, repeat_action_probability=0.0)
    environments.reset()
    counts = []
    while len(counts) < 6:
        step = environments.step(np.array([FIRE]))
        if step.terminated[0]:
            counts.append(int(step.infos["lives"][0]))
    # The fifth lost life ends the game; in SAME_STEP mode the native backend then returns the lives of the next game.
    assert counts == [4, 3, 2, 1, 5 if backend == "native" else 0, 4]


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_evaluation_plays_whole_games_with_raw_rewards_on_vectorized_backends(backend):
    environments = batch(backend, noop_max=1, repeat_action_probability=0.0, evaluation=True)
    environments.reset()
    fewest = 5
    for _ in range(2000):
        step = environments.step(np.array([FIRE]))
        if step.terminated[0]:
            break
        fewest = min(fewest, int(step.infos["lives"][0]))
    assert step.terminated[0] and fewest == 1
    environments = batch(backend, "ALE/Asterix-v5", noop_max=1, repeat_action_probability=0.0, evaluation=True)
    environments.reset()
    assert {float(environments.step(np.array([2])).rewards[0]) for _ in range(100)} == {0.0, 50.0}


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_rewards_are_clipped_on_vectorized_backends(backend):
    environments = batch(backend, "ALE/Asterix-v5", noop_max=1, repeat_action_probability=0.0)
    environments.reset()
    assert {float(environments.step(np.array([2])).rewards[0]) for _ in range(100)} == {0.0, 1.0}


def reported_values(environments: EnvironmentBatch, step: Step, key: str) -> list[float]:
    values = environments.info_values(step, key)
    return values[~values.isnan()].tolist()


@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_every_backend_reports_scores_and_lengths_of_whole_games(backend):
    """Episodes are lives and rewards are signs; in Asterix rewards are multiples of 50, and a game has three lives."""
    environments = batch(backend, "ALE/Asterix-v5", noop_max=1, repeat_action_probability=0.0, num_envs=2)
    environments.reset()
    rewards, lengths, lives = np.zeros(2), np.zeros(2, int), np.zeros(2, int)
    games = 0
    while games < 3:
        step = environments.step(np.array([2, 5]))
        valid = np.ones(2, bool) if step.valid is None else step.valid
        rewards, lengths = rewards + valid * step.rewards, lengths + valid
        lives += step.terminated
        found = [reported_values(environments, step, key) for key in ("game_return", "game_length")]
        over = lives == 3
        # In Gymnasium's preprocessing the no-ops after lost lives are steps.
        between = 2 if backend == "sync" else 0
        assert found == [list(50 * rewards[over]), list(lengths[over] + between)]
        games += int(over.sum())
        rewards[over] = lengths[over] = lives[over] = 0


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_game_score_is_reported_at_a_time_limit(backend):
    atari = AtariPreprocessing(noop_max=1, repeat_action_probability=0.0)
    env = EnvConfig(atari=atari, max_episode_steps=40)
    environments = make_environments(EnvironmentSpec("ALE/Asterix-v5", env, backend), 1, [0])
    environments.reset()
    scores, lengths = [], []
    for _ in range(85):
        step = environments.step(np.array([2]))
        scores += reported_values(environments, step, "game_return")
        lengths += reported_values(environments, step, "game_length")
    assert len(lengths) == 2 and lengths[0] == lengths[1] <= 40
    assert all(score % 50 == 0 for score in scores)


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_default_stickiness_comes_from_the_id_on_vectorized_backends(backend):
    def configured(**options):
        env = batch(backend, "ALE/Pong-v5", **options).env
        config = env.spec.kwargs if backend == "native" else env.unwrapped.config
        return config["repeat_action_probability"]

    assert configured() == 0.25
    assert configured(repeat_action_probability=0.5) == 0.5


def test_native_wastes_no_step_on_resets():
    environments = batch("native", noop_max=1, num_envs=3)
    environments.reset()
    assert all(environments.step(np.full(3, FIRE)).valid is None for _ in range(100))


def test_native_final_observation_after_a_lost_life_is_correct():
    """After a lost life the final observation is the next one of the same game; after a game it is not."""
    environments = batch("native", noop_max=1, repeat_action_probability=0.0)
    previous = environments.reset().copy()
    lost = 0
    while lost < 5:
        step = environments.step(np.array([FIRE]))
        for _, final in step.final_observations:
            lost += 1
            np.testing.assert_array_equal(final[:3], previous[0, 1:])
            assert (final == step.observations[0]).all() == (lost < 5)
        previous = step.observations.copy()


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("native", {"grayscale": False}, "grayscale=False is not valid: expected True with backend='native'"),
        ("envpool", {"noop_max": 0}, "noop_max=0 is not valid: expected at least 1 with backend='envpool'"),
    ],
)
def test_option_that_a_backend_lacks_is_an_error(backend, options, message):
    with pytest.raises(ConfigurationError, match=rf"^env\.atari\.{message}$"):
        batch(backend, **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"frame_skip": 0}, "frame_skip=0"),
        ({"frame_stack": 1.5}, "frame_stack=1.5"),
        ({"screen_size": -1}, "screen_size=-1"),
        ({"noop_max": -1}, "noop_max=-1"),
        ({"noop_max": 2.5}, "noop_max=2.5"),
        ({"repeat_action_probability": 1.5}, "repeat_action_probability=1.5"),
    ],
)
def test_options_out_of_range_are_errors(options, field):
    with pytest.raises(ConfigurationError, match=rf"^env\.atari\.{field} is not valid: expected "):
        changed("env", EnvConfig(), {"atari": options})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("frameskip", "frame_skip"),
        ("frame_skip", "frame_skip"),
        ("repeat_action_probability", "repeat_action_probability"),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "native", "envpool"])
def test_preprocessing_options_in_env_kwargs_are_errors(name, instead, backend):
    spec = EnvironmentSpec("ALE/Breakout-v5", EnvConfig(kwargs={name: 1}), backend)
    message = rf"^env.kwargs.{name}=1 is not valid: expected env.atari.{instead} instead$"
    with pytest.raises(ConfigurationError, match=message):
        make_environments(spec, 1, [0])


def test_preprocessing_options_for_ram_observations_are_errors():
    ram = EnvConfig(kwargs={"obs_type": "ram"})
    env = make_single(EnvironmentSpec(BREAKOUT, ram), find_spec(BREAKOUT))
    assert env.observation_space.shape == (128,)
    spec = EnvironmentSpec(BREAKOUT, replace(ram, atari=AtariPreprocessing(frame_skip=2)))
    with pytest.raises(ConfigurationError, match="is no Atari game with frames"):
        make_single(spec, find_spec(BREAKOUT))


def test_atari_options_for_other_environments_are_errors():
    spec = EnvironmentSpec("CartPole-v1", EnvConfig(atari=AtariPreprocessing(frame_skip=2)))
    message = r"^env.atari=.*: expected its default, since CartPole-v1 is no Atari game"
    with pytest.raises(ConfigurationError, match=message):
        make_environments(spec, 1, [0])
