"""Nested actions and observations: choose a golf club, and how hard to hit the ball.

    python examples/hybrid_actions.py

The club is a discrete action with a mask: in the sand only the wedge is allowed. The swing is a number between bounds,
with a beta distribution.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, RolloutDataModule

REACH = {"putter": 0.3, "wedge": 1.0, "driver": 3.0}


class Golf(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Get the ball into the hole, up to 3 away, with at most ten strokes. Each stroke gives the reward -1.

    The error of a stroke is 3 % of the club's reach. Within a distance of 0.1 the ball falls into the hole.
    """

    observation_space = spaces.Dict({"distance": spaces.Box(0, np.inf, (1,)), "in_sand": spaces.Discrete(2)})
    action_space = spaces.Dict({"club": spaces.Discrete(len(REACH)), "swing": spaces.Box(0, 1, (1,))})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Put the ball at a random distance."""
        super().reset(seed=seed)
        self.distance, self.strokes = self.np_random.uniform(0.2, 3), 0
        return self.observe(), {}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Hit the ball."""
        reach = list(REACH.values())[action["club"]]
        self.distance = abs(self.distance - reach * (action["swing"].item() + 0.03 * self.np_random.normal()))
        self.strokes += 1
        return self.observe(), -1.0, self.distance < 0.1, self.strokes == 10, {}

    def observe(self) -> dict[str, Any]:
        """Return the distance to the hole, and whether the ball lies in the sand."""
        self.in_sand = self.distance > 0.5 and self.np_random.random() < 0.2
        return {"distance": np.array([self.distance], np.float32), "in_sand": int(self.in_sand)}

    def action_masks(self) -> dict[str, np.ndarray]:
        """Return the allowed clubs; the swing needs no mask."""
        return {"club": np.array([not self.in_sand, True, not self.in_sand])}


gymnasium.register("Golf-v0", f"{__name__}:Golf")


def main(max_env_steps: int = 100_000) -> float:
    """Train, and return the mean number of strokes."""
    torch.set_num_threads(1)  # fastest for a small network
    seed_everything(0)
    masks = {"action_mask": "method.action_masks"}
    data = RolloutDataModule("Golf-v0", 16, 64, env=masks, evaluation={"episodes": 200})
    model = PPO(
        data.observation_space,
        data.action_space,
        policy={"action_distribution": {"swing": "beta"}},
        learning_rate=1e-3,
        entropy_coef=0.001,
    )
    callbacks = [EnvStepLimit(max_env_steps), EnvStepProgressBar()]
    trainer = Trainer(max_epochs=-1, accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False)
    trainer.fit(model, data)
    (metrics,) = trainer.validate(model, data)
    return -metrics["val/episode_return"]


if __name__ == "__main__":
    main()
