"""A callback that ticks the clock of Stable-Baselines3, or of a package based on it, after each update."""

from __future__ import annotations

from measure import Clock
from stable_baselines3.common.callbacks import BaseCallback


class Ticks(BaseCallback):
    """Ticks when the next rollout begins, or training ends: then the previous rollout and its update are complete."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self.clock.tick(self.num_timesteps)

    def _on_training_end(self) -> None:
        self.clock.tick(self.num_timesteps)
