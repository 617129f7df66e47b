"""Atari games: seeding episode by episode without loading them again, and pictures only for those who look."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding


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
