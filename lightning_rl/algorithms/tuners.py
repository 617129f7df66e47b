"""What Lightning's Tuner and Trainer do that an on-policy algorithm has no use for."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_rl.validation import ConfigurationError, check

_REASONS = {
    LearningRateFinder: (
        "it picks a rate by how fast a loss falls, and the loss of a policy gradient does not measure the policy; it "
        "would also train on while the rate grows: expected runs compared by their return, as in examples/tune.py, or "
        "adaptive_learning_rate"
    ),
    BatchSizeFinder: (
        "a batch is a rollout, whose size is part of the algorithm, not whatever fits into memory: expected num_envs "
        "and rollout_length as the task needs them, and more minibatches where memory is short"
    ),
}


def refuse_tuners(trainer: Trainer) -> None:
    """Raise if a Trainer has a callback that looks for a learning rate or a batch size; the Tuner adds them.

    Raises:
        ConfigurationError: It has; says why that cannot work, and what does.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REASONS.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"trainer.callbacks: {kind.__name__} cannot be used: {reason}")


def refuse_automatic_optimization(trainer: Trainer) -> None:
    """Raise if a Trainer is to clip or add up gradients, which it does in automatic optimisation alone.

    Lightning's own error tells to switch to that.

    Raises:
        ConfigurationError: It is; says which option of the model does so.
    """
    clip, added_up = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    check(not clip, "trainer.gradient_clip_val", clip, "None; set max_grad_norm or max_grad_value of the model instead")
    expected = "1, since a batch is a rollout; lower num_minibatches of the model for gradients of more steps"
    check(added_up == 1, "trainer.accumulate_grad_batches", added_up, expected)
