"""Action masks: tic-tac-toe against a player who moves at random.

    python examples/action_masks.py

The method `action_masks()` of the environment returns the free fields. With
`env={"action_mask": "method.action_masks"}` the mask is part of the observation, and the policy only draws free fields.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, RolloutDataModule

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


class TicTacToe(gymnasium.Env[np.ndarray, np.int64]):
    """The board has 1 for own stones and -1 for the other player's. A win gives the reward 1, a loss -1."""

    observation_space = spaces.Box(-1, 1, (9,), np.float32)
    action_space = spaces.Discrete(9)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a game as the first or second player."""
        super().reset(seed=seed)
        self.board = np.zeros(9, np.float32)
        if self.np_random.integers(2):
            self.board[self.np_random.integers(9)] = -1
        return self.board.copy(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Put a stone on a field; the other player answers."""
        assert self.board[action] == 0, f"field {action} is taken"
        for stone, field in ((1, action), (-1, None)):
            self.board[self.np_random.choice(np.flatnonzero(self.board == 0)) if field is None else field] = stone
            won = (self.board[LINES].sum(1) == 3 * stone).any()
            if won or self.board.all():
                return self.board.copy(), float(stone * won), True, False, {}
        return self.board.copy(), 0.0, False, False, {}

    def action_masks(self) -> np.ndarray:
        """Return the free fields."""
        return np.equal(self.board, 0)


gymnasium.register("TicTacToe-v0", f"{__name__}:TicTacToe")


def main(max_env_steps: int = 100_000) -> float:
    """Train, and return the mean return of 200 games."""
    torch.set_num_threads(1)
    seed_everything(0)
    masks = {"action_mask": "method.action_masks"}
    data = RolloutDataModule("TicTacToe-v0", 16, 64, env=masks, evaluation={"episodes": 200})
    model = PPO(data.observation_space, data.action_space, learning_rate=3e-3)
    callbacks = [EnvStepLimit(max_env_steps), EnvStepProgressBar()]
    trainer = Trainer(max_epochs=-1, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(model, data)
    (metrics,) = trainer.validate(model, data)
    return metrics["val/episode_return"]


if __name__ == "__main__":
    main()
