"""Atari: preprocessing, lives, and games that can be seeded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorWrapper

from lightning_rl.environments.contract import LIFE_LOST, autoreset_mode
from lightning_rl.validation import check, check_bool, check_number, check_positive_int, is_int


class SeededGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Make a game depend on the seed of its own episode alone, and repeat actions ("sticky actions").

    Its space is that of pictures whatever its observations are: the preprocessing takes those that it needs, of two
    frames in four, from the emulator. As observations, of every frame and in colour, they took a fifth of the time of a
    game.

    The emulator draws its repetitions from a generator that is seeded only where the ROM is loaded, which would take a
    quarter of a second for each episode; and some games keep memory over a reset. So the emulator is put back to the
    same first state, and the repetitions are drawn here, frame by frame as it does (Machado et al. 2018, section 5.1).

    Args:
        env: A game whose own `frameskip` is 1 and whose `repeat_action_probability` is 0.
        repeat_action_probability: Probability, in each frame, of repeating what was done in the frame before.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], repeat_action_probability: float) -> None:
        super().__init__(env)
        self.repeat_action_probability = repeat_action_probability
        if isinstance(env.observation_space, spaces.Box):
            game: Any = env.unwrapped
            self.observation_space = spaces.Box(0, 255, (*game.ale.getScreenDims(), 3), np.uint8)
        self._first_state: Any = None
        self._action: Any = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game: of the seed, or the next one of the same generator."""
        game: Any = self.unwrapped
        if self._first_state is None:
            self.env.reset(seed=0)
            self._first_state = game.ale.cloneState()
        random = game.np_random
        observation, info = self.env.reset(options=options)
        game.ale.restoreState(self._first_state)
        game.np_random = random if seed is None else seeding.np_random(seed)[0]
        self._action = 0
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Play one frame."""
        probability = self.repeat_action_probability
        if not probability or self.unwrapped.np_random.random() >= probability:
            self._action = action
        return self.env.step(self._action)


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

    first_options: ClassVar = {"new_game": True}
    """Options of a reset that does not go on with the game before it."""

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

    def check(self) -> None:
        """Raise where an option is out of range.

        Raises:
            ConfigurationError: Names the option as `env.atari.frame_skip`.
        """
        for name in ("frame_skip", "frame_stack", "screen_size"):
            check_positive_int(f"env.atari.{name}", getattr(self, name))
        for name in ("episodic_life", "clip_rewards", "fire_on_reset", "grayscale"):
            check_bool(f"env.atari.{name}", getattr(self, name))
        expected = "an integer of at least 0"
        check(is_int(self.noop_max) and self.noop_max >= 0, "env.atari.noop_max", self.noop_max, expected)
        if self.repeat_action_probability is not None:
            check_number("env.atari.repeat_action_probability", self.repeat_action_probability, at_least=0, at_most=1)

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
        check(self.grayscale, "env.atari.grayscale", self.grayscale, "True with backend='native'")
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
        check(self.noop_max > 0, "env.atari.noop_max", self.noop_max, "at least 1 with backend='envpool'")
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
