"""Wrappers of Atari games: lives and scores."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorWrapper

from lightning_rl.environments.autoreset import autoreset_mode

LIFE_LOST = "lightning_rl/life_lost"
"""Key of the `info` of a step in which a game that is played as one episode lost a life and went on."""


class GameScore(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Put the score and length of a finished game into `info` as `game_return` and `game_length`.

    With episodic life and clipped rewards the learner's own episodes say little about the game.

    Attributes:
        score: Of the game so far.
        last_score: Of the game before it.
        games: Number of games begun.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.score, self.last_score, self.games = 0.0, 0.0, 0
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        self.last_score, self.score, self._length = self.score, 0.0, 0
        self.games += 1
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step, and report the score when the game is over."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.score += float(reward)
        self._length += 1
        if terminated or truncated:
            info["game_return"], info["game_length"] = self.score, self._length
        return observation, reward, terminated, truncated, info


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """End the learning episode with each lost life, and go on with the same game.

    Gymnasium's own `terminal_on_life_loss` starts a new game after each life, so an agent never sees the later ones.
    `reset` after a lost life takes one no-op step instead, whatever the seed; `options={"new_game": True}` forces a new
    game.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.went_on = False
        """Whether the last reset went on with the game before it."""
        self._lives = 0
        self._game_over = True

    def _current_lives(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Go on after a lost life, begin a new game after the last one."""
        new_game = bool((options or {}).get("new_game"))
        self.went_on = not (self._game_over or new_game)
        if self.went_on:
            observation, _, terminated, truncated, info = self.env.step(0)
            self._game_over = terminated or truncated
        if self._game_over or new_game:
            observation, info = self.env.reset(seed=seed, options=options)
            self._game_over = self.went_on = False
        self._lives = self._current_lives()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step; a lost life terminates."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        lives = self._current_lives()
        life_lost = 0 < lives < self._lives
        self._lives = lives
        return observation, reward, terminated or life_lost, truncated, info


class FireOnReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Press FIRE after each reset: some games wait for it, and after each lost life again."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._fire = env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, then fire; in the rare case that this ends the episode, reset again."""
        self.env.reset(seed=seed, options=options)
        observation, _, terminated, truncated, info = self.env.step(self._fire)
        if terminated or truncated:
            observation, info = self.env.reset(options=options)
        return observation, info


class WholeGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Join the lives that `EpisodicLife` separates into one episode again, for evaluation.

    What the resets between lives do (no-op, FIRE, an empty stack of frames) is done as in training. Rewards are the
    increments of the score, so none is lost there.

    Args:
        env: A game with `EpisodicLife`.
        game: The wrapper that keeps its score.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], game: GameScore) -> None:
        super().__init__(env)
        self._game = game
        self._score = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        self._score = 0.0
        return self.env.reset(seed=seed, options={**(options or {}), "new_game": True})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step, and go on after a lost life."""
        observation, _, terminated, truncated, info = self.env.step(action)
        over = "game_return" in info
        if terminated and not over:
            games = self._game.games
            observation, info = self.env.reset()
            terminated = self._game.games > games  # lost in what the reset did
            if terminated:
                return observation, self._game.last_score - self._score, True, truncated, info
            info = info | {LIFE_LOST: True}
        reward = self._game.score - self._score
        self._score = self._game.score
        return observation, reward, terminated, truncated, info


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class NativeLives(VectorWrapper):
    """Give the observation that was reached where ale-py's own vector environment reports a lost life.

    Its `final_obs` is memory that nothing was written to (as of 0.12) unless a new game was begun; where the game goes
    on, the observation itself is the one reached.
    """

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401 - those of `VectorEnv.reset`
        """Begin games."""
        observations, infos = self.env.reset(**kwargs)
        self._lives = infos["lives"].copy()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step, and correct the final observations."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            goes_on = infos["lives"] < self._lives
            infos["final_obs"][goes_on] = observations[goes_on]
        self._lives = infos["lives"].copy()
        return observations, rewards, terminated, truncated, infos


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorGameScore(VectorWrapper):
    """Put scores and lengths of finished games into `info` as `GameScore` does, where games come vectorised.

    Args:
        env: ale-py's own vector environment, with raw rewards, or EnvPool's, which has these in `info`.
        clips_rewards: Return the sign of the rewards.
    """

    def __init__(self, env: Any, clips_rewards: bool) -> None:  # noqa: ANN401
        super().__init__(env)
        self._clips_rewards = clips_rewards
        self._mode = autoreset_mode(env)
        self._scores, self._lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
        self._lives = np.zeros(env.num_envs, np.int64)
        self._resets_next = np.zeros(env.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Begin games, everywhere or where `options["reset_mask"]` says."""
        observations, infos = self.env.reset(seed=seed, options=options)
        which = (options or {}).get("reset_mask", slice(None))
        self._scores[which], self._lengths[which], self._resets_next[which] = 0.0, 0, False
        self._lives = infos["lives"].copy()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step, and report the scores of the games that are over."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        plays = ~self._resets_next
        self._scores += np.where(plays, infos.get("reward", rewards), 0)
        self._lengths += plays
        ended = terminated | truncated
        if ended.any():
            # EnvPool says which games are over. ale-py has begun another one there, with all its lives.
            goes_on = infos["terminated"] == 0 if "terminated" in infos else infos["lives"] < self._lives
            over = ended & (truncated | ~goes_on)
            if over.any():
                told = infos.setdefault("final_info", {}) if self._mode is AutoresetMode.SAME_STEP else infos
                told |= {"game_return": self._scores.copy(), "_game_return": over}
                told |= {"game_length": self._lengths.copy(), "_game_length": over}
                self._scores[over], self._lengths[over] = 0.0, 0
        self._lives = infos["lives"].copy()
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        return observations, np.sign(rewards) if self._clips_rewards else rewards, terminated, truncated, infos


class StackChannels(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Turn stacked colour frames `[frames, height, width, 3]` into an image `[3 · frames, height, width]`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        frames, height, width, channels = env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, (frames * channels, height, width), np.uint8)

    def observation(self, observation: Any) -> Any:  # noqa: ANN401
        """Rearrange one observation."""
        return observation.transpose(0, 3, 1, 2).reshape(self.observation_space.shape)
