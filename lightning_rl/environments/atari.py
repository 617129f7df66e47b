"""The usual preprocessing of Atari games, for every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from lightning_rl.environments.ale import SeededGame
from lightning_rl.environments.lives import EpisodicLife, FireOnReset, GameScore, StackChannels, WholeGame
from lightning_rl.validation import check, check_number, check_positive_int, is_int


@dataclass(frozen=True)
class AtariPreprocessing:
    """Options of the usual 84×84×4 preprocessing (Mnih et al. 2015, Machado et al. 2018).

    Every backend gets the same options, but three programs implement them, each with details of its own: `native` and
    EnvPool hold FIRE for one frame instead of one step, and draw one no-op less. `native` does not press FIRE after a
    lost life. An option that a backend lacks is refused.

    Args:
        frame_skip: Frames per step; the action is repeated, the last two frames are max-pooled.
        noop_max: A game begins with 1 to this many random no-op frames; 0 for none (EnvPool always has some).
        episodic_life: A lost life ends the learning episode; the game goes on with the next one. Evaluation counts
            whole games.
        clip_rewards: Learn from the sign of the reward. Evaluation has the game's own.
        fire_on_reset: Press FIRE when an episode begins, in games that wait for it. In evaluation `sync` and `async`
            press it after each lost life if training does; the other backends when a game begins.
        repeat_action_probability: Probability of repeating the previous action ("sticky actions"); None keeps what the
            environment id says (0.25 for `ALE/…-v5`, 0 for `…NoFrameskip-v4`).
        frame_stack: Number of last frames in an observation.
        screen_size: Height and width of a frame in pixels.
        grayscale: One channel a frame instead of three (which `native` does not support).
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
        check(is_int(self.noop_max) and self.noop_max >= 0, "atari.noop_max", self.noop_max, "an integer of at least 0")
        if self.repeat_action_probability is not None:
            check_number("atari.repeat_action_probability", self.repeat_action_probability, at_least=0, at_most=1)

    def for_evaluation(self) -> AtariPreprocessing:
        """Return the options that leave the game's own score and length alone."""
        return replace(self, episodic_life=False, clip_rewards=False)

    def make_kwargs(self, max_episode_steps: int | None = None) -> dict[str, Any]:
        """Return what `gymnasium.make` needs: wrappers skip frames, repeat actions and take pictures, not the game."""
        made = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "ram"}
        return made | self._limited(max_episode_steps)

    def wrap(
        self, env: gymnasium.Env[Any, Any], default_stickiness: float, evaluation: bool = False
    ) -> gymnasium.Env[Any, Any]:
        """Apply the preprocessing to one game.

        For evaluation the lives of a game are joined and rewards are the score; all else is as in training, so that an
        agent for whom FIRE was pressed after each lost life need not have learned to do it.

        Args:
            env: The game, made with `make_kwargs`.
            default_stickiness: Probability of repeating an action where the options do not give one.
            evaluation: Play for the score.
        """
        stickiness = self.repeat_action_probability
        env = wrappers.AtariPreprocessing(
            SeededGame(env, default_stickiness if stickiness is None else stickiness),
            noop_max=self.noop_max,
            frame_skip=self.frame_skip,
            screen_size=self.screen_size,
            grayscale_obs=self.grayscale,
        )
        env = game = GameScore(env)
        if self.episodic_life:
            env = EpisodicLife(env)
        if self.fire_on_reset and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
            env = FireOnReset(env)
        if self.clip_rewards and not evaluation:
            env = wrappers.TransformReward(env, sign)
        if self.frame_stack > 1 or self.grayscale:
            env = wrappers.FrameStackObservation(env, self.frame_stack)
        if not self.grayscale and self.frame_stack > 1:
            env = StackChannels(env)
        return WholeGame(env, game) if evaluation and self.episodic_life else env

    def native_kwargs(self, max_episode_steps: int | None = None) -> dict[str, Any]:
        """Return the same options as ale-py's own vector environment names them.

        Its `episodic_life` begins a new game after each life; `life_loss_info` goes on with the same one.

        Raises:
            ConfigurationError: It does not support an option.
        """
        check(self.grayscale, "atari.grayscale", self.grayscale, "True with backend='native'")
        return {
            "frameskip": self.frame_skip,
            "noop_max": self.noop_max,
            "life_loss_info": self.episodic_life,
            "episodic_life": False,
            "reward_clipping": self.clip_rewards,
            "use_fire_reset": self.fire_on_reset,
            "stack_num": self.frame_stack,
            "img_height": self.screen_size,
            "img_width": self.screen_size,
            "grayscale": True,
        } | (self._sticky() | self._limited(max_episode_steps))

    def envpool_kwargs(self) -> dict[str, Any]:
        """Return the same options as EnvPool names them.

        Raises:
            ConfigurationError: It does not support an option.
        """
        # It draws from 1 to this number, and a process that asks for 0 is killed by a division by zero.
        check(self.noop_max > 0, "atari.noop_max", self.noop_max, "at least 1 with backend='envpool'")
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
        } | self._sticky()

    def _limited(self, max_episode_steps: int | None) -> dict[str, Any]:
        """Return a limit as the emulator counts it: in frames, the no-ops at the start included."""
        frames = {"max_num_frames_per_episode": self.frame_skip * (max_episode_steps or 0)}
        return {} if max_episode_steps is None else frames

    def _sticky(self) -> dict[str, Any]:
        probability = self.repeat_action_probability
        return {} if probability is None else {"repeat_action_probability": probability}


def sign(rewards: Any) -> Any:  # noqa: ANN401 - one number, or an array
    """Return the signs of rewards."""
    signs = np.sign(np.asarray(rewards, np.float64))
    return signs if signs.ndim else float(signs)
