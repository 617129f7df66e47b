"""Lives and scores of games with scripted points."""

from types import SimpleNamespace
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl.environments.atari import EpisodicLife, GameScore, VectorGameScore, WholeGame


class Script(gymnasium.Env):
    """Games with scripted steps: points, lives left."""

    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, *steps):
        self.steps = steps
        self.ale = SimpleNamespace(lives=lambda: self.left)

    def reset(self, *, seed=None, options=None):
        self.count, self.left = 0, 3
        return self.observe(), {}

    def step(self, action):
        points, self.left = self.steps[self.count]
        self.count += 1
        return self.observe(), points, self.left == 0, False, {}

    def observe(self):
        return np.array([self.count], np.float32)


def whole_game(*steps):
    game = GameScore(Script(*steps))
    return WholeGame(EpisodicLife(game), game)


def play(env):
    """Return the rewards of one game, and the `info` of its end."""
    env.reset(seed=0)
    rewards = []
    for _ in range(20):
        _, reward, terminated, truncated, info = env.step(0)
        rewards.append(reward)
        if terminated or truncated:
            return rewards, info
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("steps", "rewards"),
    [
        # A life is lost with 10 points; the no-op step after it, which the player does not see, scores 5.
        ([(1, 3), (10, 2), (5, 2), (3, 0)], [1, 10 + 5, 3]),
        # The last life is lost in this no-op step; the points of both steps count.
        ([(1, 3), (10, 2), (5, 0)], [1, 10 + 5]),
        ([(1, 3), (10, 1), (0, 0)], [1, 10]),
        ([(7, 0)], [7]),
    ],
)
def test_points_scored_between_two_lives_count(steps, rewards):
    env = whole_game(*steps)
    over = {"game_return": sum(rewards), "game_length": len(steps)}
    assert play(env) == (rewards, over)
    assert play(env) == (rewards, over)  # the next game starts at 0


class TwoGames(VectorEnv):
    """In the first step one game loses a life while the other ends and begins again, as in ale-py."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 1)), {"lives": np.array([3, 1])}

    def step(self, actions):
        infos = {"lives": np.array([2, 3]), "final_obs": np.zeros((2, 1)), "terminated": np.array([0, 1])}
        return np.ones((2, 1)), np.zeros(2), np.ones(2, bool), np.zeros(2, bool), infos


def test_lost_life_has_its_info_in_a_step_that_ends_another_game():
    env = VectorGameScore(TwoGames(), clips_rewards=False)
    env.reset()
    final = env.step(np.zeros(2))[-1]["final_info"]
    assert final["lives"][final["_lives"]].tolist() == [2]
    assert final["game_length"][final["_game_length"]].tolist() == [1]
    assert final["_lives"].tolist() == [True, False] and final["_game_length"].tolist() == [False, True]
