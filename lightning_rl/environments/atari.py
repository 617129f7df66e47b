"""The usual preprocessing of Atari games, for every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium import spaces, wrappers

from lightning_rl.validation import check_number, check_positive_int


@dataclass(frozen=True)
class AtariPreprocessing:
    """Options of the usual 84×84×4 preprocessing (Mnih et al. 2015, Machado et al. 2018).

    Args:
        frame_skip: Frames per step; the action is repeated, the last two frames are max-pooled.
        noop_max: A game begins with 0 to this many random no-ops.
        episodic_life: A lost life ends the learning episode; the game goes on with the next one. Off in evaluation.
        clip_rewards: Learn from the sign of the reward. Off in evaluation.
        fire_on_reset: Press FIRE after a reset, in games that wait for it.
        repeat_action_probability: Probability of repeating the previous action ("sticky actions"); None keeps what the
            environment id says (0.25 for `ALE/…-v5`, 0 for `…NoFrameskip-v4`).
        frame_stack: Number of last frames in an observation.
        screen_size: Height and width of a frame in pixels.
        grayscale: One channel a frame instead of three; the other backends support nothing else with frame stacking.
    """

    frame_skip: int = 4
    noop_max: int = 30
    episodic_life: bool = True
    clip_rewards: bool = True
    fire_on_reset: bool = True
    repeat_action_probability: float | None = None
    frame_stack: int = 4
    screen_size: int = 84
    grayscale: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("frame_skip", "frame_stack", "screen_size"):
            check_positive_int(f"atari.{name}", getattr(self, name))
        check_number("atari.noop_max", self.noop_max, at_least=0)
        if self.repeat_action_probability is not None:
            check_number("atari.repeat_action_probability", self.repeat_action_probability, at_least=0, at_most=1)

    def for_evaluation(self) -> AtariPreprocessing:
        """Return the options that leave the game's own score and length alone."""
        return replace(self, episodic_life=False, clip_rewards=False)

    def make_kwargs(self) -> dict[str, Any]:
        """Return what `gymnasium.make` needs: frames are skipped by the wrapper, not by the emulator."""
        sticky = self.repeat_action_probability
        return {"frameskip": 1} | ({} if sticky is None else {"repeat_action_probability": sticky})

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Apply the preprocessing to one game."""
        env = wrappers.AtariPreprocessing(
            env,
            noop_max=self.noop_max,
            frame_skip=self.frame_skip,
            screen_size=self.screen_size,
            grayscale_obs=self.grayscale,
        )
        env = GameScore(env)
        if self.episodic_life:
            env = EpisodicLife(env)
        if self.fire_on_reset and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
            env = FireOnReset(env)
        if self.clip_rewards:
            env = wrappers.TransformReward(env, _sign)
        if self.frame_stack > 1 or self.grayscale:
            env = wrappers.FrameStackObservation(env, self.frame_stack)
        if not self.grayscale and self.frame_stack > 1:
            env = _StackChannels(env)
        return env

    def native_kwargs(self) -> dict[str, Any]:
        """Return the same options as ale-py's own vector environment names them."""
        sticky = self.repeat_action_probability
        return {
            "frameskip": self.frame_skip,
            "noop_max": self.noop_max,
            "episodic_life": self.episodic_life,
            "reward_clipping": self.clip_rewards,
            "use_fire_reset": self.fire_on_reset,
            "stack_num": self.frame_stack,
            "img_height": self.screen_size,
            "img_width": self.screen_size,
            "grayscale": self.grayscale,
        } | ({} if sticky is None else {"repeat_action_probability": sticky})

    def envpool_kwargs(self) -> dict[str, Any]:
        """Return the same options as EnvPool names them."""
        sticky = self.repeat_action_probability
        return {
            "frame_skip": self.frame_skip,
            "noop_max": self.noop_max,
            "episodic_life": self.episodic_life,
            "reward_clip": self.clip_rewards,
            "use_fire_reset": self.fire_on_reset,
            "stack_num": self.frame_stack,
            "img_height": self.screen_size,
            "img_width": self.screen_size,
            "gray_scale": self.grayscale,
        } | ({} if sticky is None else {"repeat_action_probability": sticky})


def _sign(reward: float) -> float:
    return float((reward > 0) - (reward < 0))


class GameScore(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Put the score and length of a finished game into `info` as `game_return` and `game_length`.

    With episodic life and clipped rewards the learner's own episodes say little about the game.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._score, self._length = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        self._score, self._length = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step, and report the score when the game is over."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._score += float(reward)
        self._length += 1
        if terminated or truncated:
            info["game_return"], info["game_length"] = self._score, self._length
        return observation, reward, terminated, truncated, info


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """End the learning episode with each lost life, and go on with the same game.

    Gymnasium's own `terminal_on_life_loss` starts a new game after each life, so an agent never sees the later ones.
    `reset` after a lost life takes one no-op step instead, whatever the seed; `options={"new_game": True}` forces a new game.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._lives = 0
        self._game_over = True

    def _current_lives(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Go on after a lost life, begin a new game after the last one."""
        new_game = bool((options or {}).get("new_game"))
        if not (self._game_over or new_game):
            observation, _, terminated, truncated, info = self.env.step(0)
            self._game_over = terminated or truncated
        if self._game_over or new_game:
            observation, info = self.env.reset(seed=seed, options=options)
            self._game_over = False
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


class _StackChannels(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Turn stacked colour frames `[frames, height, width, 3]` into an image `[3 · frames, height, width]`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        frames, height, width, channels = env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, (frames * channels, height, width), "uint8")  # type: ignore[arg-type]

    def observation(self, observation: Any) -> Any:  # noqa: ANN401
        """Rearrange one observation."""
        return observation.transpose(0, 3, 1, 2).reshape(self.observation_space.shape)
