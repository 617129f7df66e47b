"""Something of one's own every so many environment steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.validation import check, is_int


class EnvStepInterval(Callback):
    """Base of callbacks that act once at least so many environment steps have passed since they last did.

    A rollout brings many steps at once, so that few of them end at a multiple of anything. This counts on from where it
    last acted: with an interval of 10, asked at 3, 9, 10, 14, 25, 29, 34 and 35, it acts at 10, 25 and 35.
    (`EnvStepValidation` and `EnvStepCheckpoint` count multiples, 10, 20, 30 and so on, so that runs with rollouts of
    different lengths are looked at near the same steps.)

    A subclass says what is to be done in `on_interval`. A resumed run counts on from where the callback last acted, or
    where its checkpoint does not say so, from the step that it is resumed at.

    Args:
        every_n_env_steps: Environment steps of all ranks; 0 or less: never.
    """

    def __init__(self, every_n_env_steps: int) -> None:
        check(is_int(every_n_env_steps), "every_n_env_steps", every_n_env_steps, "an integer")
        self.every_n_env_steps = every_n_env_steps
        self._last: int | None = None

    def on_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do what is to be done, on every rank; `pl_module.env_steps` says when this is.

        Args:
            trainer: Runs the training.
            pl_module: The algorithm, after the updates from a rollout.
        """
        raise NotImplementedError(f"{type(self).__name__} has no on_interval")

    def fire(self, trainer: Trainer, pl_module: LightningModule, force: bool = False) -> bool:
        """Act if it is time to, and return whether it was.

        Args:
            trainer: Runs the training.
            pl_module: Its clock is asked.
            force: Act in any case, unless it was done at this very step already, or never is.
        """
        now, last = int(pl_module.env_steps), self._last or 0  # type: ignore[arg-type]
        due = now >= last + self.every_n_env_steps or (force and now != last)
        if self.every_n_env_steps <= 0 or not due:
            return False
        self._last = now
        self.on_interval(trainer, pl_module)
        return True

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints, different for each interval."""
        return self._generate_state_key(every_n_env_steps=self.every_n_env_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return at which step it last acted."""
        return {"last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        self._last = state_dict["last"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin counting, anew where another module is trained, or one that goes on from an earlier step."""
        now = int(pl_module.env_steps)  # type: ignore[arg-type]
        if self._last is None or self._last > now:
            self._last = now

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:  # noqa: ANN401
        """Look at the clock after each rollout."""
        self.fire(trainer, pl_module)
