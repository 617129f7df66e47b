"""Atari: preprocessing, lives, scores, and games that can be seeded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorWrapper

from lightning_rl.environments.contract import LIFE_LOST, autoreset_mode
from lightning_rl.validation import NonNegativeInt, PositiveInt, UnitFloat, check


class SeededGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes a game depend only on the seed of its own episode, and repeats actions ("sticky actions").

    The emulator seeds its own random repeats only when it loads the ROM, which takes a quarter of a second, and some
    games keep memory over a reset. Therefore each game starts from the same emulator state, and the repeats are drawn
    here for each frame (Machado et al. 2018, section 5.1).

    The game has `frameskip` 1 and `repeat_action_probability` 0, and returns its RAM, because color frames at every
    step would take a fifth of the time of a game. The preprocessing reads frames from the emulator.
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

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        probability = self.repeat_action_probability
        if not probability or self.unwrapped.np_random.random() >= probability:
            self._action = action
        return self.env.step(self._action)


class GameScore(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts score and length of a finished game into `info`; with episodic life the return is not the score."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.score, self._length = 0.0, 0
        self.finished_game: dict[str, Any] = {}  # score and length of the last one

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.score, self._length = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.score += float(reward)
        self._length += 1
        if terminated or truncated:
            self.finished_game = {"game_return": self.score, "game_length": self._length}
            info |= self.finished_game
        return observation, reward, terminated, truncated, info


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends the learning episode when a life is lost; the next episode continues the same game.

    Gymnasium's own `terminal_on_life_loss` starts a new game after each life, so that an agent never plays later lives.
    `reset` after a lost life takes one no-op step instead, whatever the seed, unless it gets `first_options`;
    `continued_game` is True then.
    """

    first_options: ClassVar = {"new_game": True}

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.continued_game = False
        self._lives = 0
        self._game_over = True

    def _current_lives(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        new_game = bool((options or {}).get("new_game"))
        self.continued_game = not (self._game_over or new_game)
        if self.continued_game:
            observation, _, terminated, truncated, info = self.env.step(0)
            self._game_over = terminated or truncated
        if self._game_over or new_game:
            observation, info = self.env.reset(seed=seed, options=options)
            self._game_over = self.continued_game = False
        self._lives = self._current_lives()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        lives = self._current_lives()
        life_lost = 0 < lives < self._lives
        self._lives = lives
        return observation, reward, terminated or life_lost, truncated, info


class FireOnReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE after each reset, also after lost lives: some games wait for it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._fire = env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        observation, _, terminated, truncated, info = self.env.step(self._fire)
        if terminated or truncated:  # rare
            observation, info = self.env.reset(options=options)
        return observation, info


class WholeGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Joins the lives that `EpisodicLife` in `env` separates into one episode, for evaluation; `game` keeps the score.

    The resets between lives (no-op, FIRE, new frame stack) are the same as in training. Rewards are the increments of
    the score, including points of these resets.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], game: GameScore) -> None:
        super().__init__(env)
        self._game = game
        self._score = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._score = 0.0
        return self.env.reset(seed=seed, options={**(options or {}), "new_game": True})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = self.env.step(action)
        if terminated and "game_return" not in info:
            before = self._game.finished_game
            observation, info = self.env.reset()
            if (over := self._game.finished_game) is not before:  # the reset lost the last life, and began a new game
                return observation, over["game_return"] - self._score, True, truncated, info | over
            terminated, info = False, info | {LIFE_LOST: True}
        reward = self._game.score - self._score
        self._score = self._game.score
        return observation, reward, terminated, truncated, info


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorGameScore(VectorWrapper):
    """Puts scores and lengths of finished games into `info` like `GameScore`, for vectorized games.

    ale-py's vector environment must return raw rewards, which `clips_rewards` replaces by their signs; EnvPool's `info`
    has the raw rewards.
    """

    def __init__(self, env: Any, clips_rewards: bool) -> None:
        super().__init__(env)
        self._clips_rewards = clips_rewards
        self._mode = autoreset_mode(env)
        self._scores, self._lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
        self._lives = np.zeros(env.num_envs, np.int64)
        self._resets_next = np.zeros(env.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        which = (options or {}).get("reset_mask", slice(None))
        self._scores[which], self._lengths[which], self._resets_next[which] = 0.0, 0, False
        self._lives = infos["lives"].copy()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        plays = ~self._resets_next
        self._scores += np.where(plays, infos.get("reward", rewards), 0)
        self._lengths += plays
        # In a new game ale-py has restored all lives; EnvPool has not yet.
        life_lost = infos["lives"] < self._lives
        if "final_obs" in infos:  # of ale-py, which (0.12) does not write it where the game continues
            infos["final_obs"][life_lost] = observations[life_lost]
        ended = terminated | truncated
        if ended.any():
            continues = infos["terminated"] == 0 if "terminated" in infos else life_lost
            over = ended & (truncated | ~continues)
            if over.any():
                final = infos
                if self._mode is AutoresetMode.SAME_STEP:  # games that continue after a lost life have the same `info`
                    final = infos["final_info"] = infos | {f"_{key}": ~over for key in infos}
                final |= {"game_return": self._scores.copy(), "_game_return": over}
                final |= {"game_length": self._lengths.copy(), "_game_length": over}
                self._scores[over], self._lengths[over] = 0.0, 0
        self._lives = infos["lives"].copy()
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        return observations, np.sign(rewards) if self._clips_rewards else rewards, terminated, truncated, infos


@dataclass(frozen=True)
class AtariPreprocessing:
    """Options of the usual 84×84×4 preprocessing (Mnih et al. 2015, Machado et al. 2018).

    The implementations differ slightly: `native` and EnvPool press FIRE for one frame instead of one step and draw one
    no-op less, and `native` does not press FIRE after a lost life. An option that a backend lacks is an error.

    Args:
        frame_skip: Frames per step; the action is repeated, the last two frames are max-pooled.
        noop_max: A game begins with 1 to this many random no-op frames; 0 for none (not with EnvPool).
        episodic_life: End the learning episode when a life is lost; the next episode continues the game. Evaluation
            plays whole games.
        clip_rewards: Learn from the sign of the reward. Evaluation uses raw rewards.
        fire_on_reset: Press FIRE at the start of an episode, in games that wait for it. Evaluation presses FIRE after
            each lost life with `sync` and `async`, and at the start of a game with the other backends.
        repeat_action_probability: Probability of repeating the previous action ("sticky actions"); None uses the
            default of the environment id (0.25 for `ALE/…-v5`, 0 for `…NoFrameskip-v4`).
        frame_stack: Number of frames in an observation.
        screen_size: Height and width of a frame in pixels.
        grayscale: One channel per frame instead of three (`native` supports only grayscale).
    """

    frame_skip: PositiveInt = 4
    noop_max: NonNegativeInt = 30
    episodic_life: bool = True
    clip_rewards: bool = True
    fire_on_reset: bool = True
    repeat_action_probability: UnitFloat | None = None
    frame_stack: PositiveInt = 4
    screen_size: PositiveInt = 84
    grayscale: bool = True

    def for_evaluation(self) -> AtariPreprocessing:
        return replace(self, episodic_life=False, clip_rewards=False)

    def make_kwargs(self, max_episode_steps: int | None = None) -> dict[str, Any]:
        """Return the arguments of `gymnasium.make` for a game that `wrap` preprocesses."""
        made = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "ram"}
        return made | self._limited(max_episode_steps)

    def wrap(
        self, env: gymnasium.Env[Any, Any], default_stickiness: float, evaluation: bool = False
    ) -> gymnasium.Env[Any, Any]:
        """Apply the preprocessing to one game that was made with `make_kwargs`.

        Evaluation joins the lives of a game and returns raw rewards. Everything else is as in training, since an agent
        that never had to press FIRE after a lost life may not have learned it. `default_stickiness` replaces a
        `repeat_action_probability` of None.
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
            env = wrappers.TransformReward(env, lambda reward: float(np.sign(float(reward))))
        if self.frame_stack > 1 or self.grayscale:
            env = wrappers.FrameStackObservation(env, self.frame_stack)
        if not self.grayscale and self.frame_stack > 1:
            env = _stack_channels(env)
        return WholeGame(env, game) if evaluation and self.episodic_life else env

    def native_kwargs(self, max_episode_steps: int | None = None) -> dict[str, Any]:
        """Return the arguments of ale-py's vector environment, whose `life_loss_info` continues the same game."""
        check(self.grayscale, "env.atari.grayscale", self.grayscale, "True with backend='native'")
        return {
            "frameskip": self.frame_skip,
            "life_loss_info": self.episodic_life,
            "episodic_life": False,
            "reward_clipping": self.clip_rewards,
            "grayscale": True,
            "autoreset_mode": AutoresetMode.SAME_STEP,  # wastes no step on resets
            **self._vector_kwargs(),
            **self._limited(max_episode_steps),
        }

    def envpool_kwargs(self) -> dict[str, Any]:
        # EnvPool draws from 1 to `noop_max`; 0 kills its process by a division by zero.
        check(self.noop_max > 0, "env.atari.noop_max", self.noop_max, "at least 1 with backend='envpool'")
        return {
            "frame_skip": self.frame_skip,
            "episodic_life": self.episodic_life,
            "reward_clip": self.clip_rewards,
            "gray_scale": self.grayscale,
            **self._vector_kwargs(),
        }

    def _vector_kwargs(self) -> dict[str, Any]:
        probability = self.repeat_action_probability
        return {
            "noop_max": self.noop_max,
            "use_fire_reset": self.fire_on_reset,
            "stack_num": self.frame_stack,
            "img_height": self.screen_size,
            "img_width": self.screen_size,
        } | ({} if probability is None else {"repeat_action_probability": probability})

    def _limited(self, max_episode_steps: int | None) -> dict[str, Any]:
        """Return a time limit in the frames of the emulator, which include the no-ops at the start."""
        if max_episode_steps is None:
            return {}
        return {"max_num_frames_per_episode": self.frame_skip * max_episode_steps}


def _stack_channels(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Turn stacked color frames `[frames, height, width, 3]` into an image `[3 · frames, height, width]`."""
    assert env.observation_space.shape is not None
    frames, height, width, channels = env.observation_space.shape
    space = spaces.Box(0, 255, (frames * channels, height, width), np.uint8)
    return wrappers.TransformObservation(env, lambda x: x.transpose(0, 3, 1, 2).reshape(space.shape), space)
