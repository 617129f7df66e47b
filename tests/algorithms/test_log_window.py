"""The rollouts that one log is about: none of another run, none twice, none left out."""

from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_rl import PPO
from tests.helpers import MemoryLogger, make_data, make_model, make_trainer


def fit(model: PPO, *callbacks: Callback, every: int = 4, ckpt_path: Path | None = None) -> MemoryLogger:
    """Learn from eight rollouts of 32 steps, a log for every few of them."""
    logger = MemoryLogger()
    trainer = make_trainer(callbacks=[*callbacks], logger=logger, log_every_n_steps=every)
    trainer.fit(model, make_data(rollouts_per_epoch=8), ckpt_path=ckpt_path)
    return logger


def values(logger: MemoryLogger) -> list[tuple[int | None, dict[str, float]]]:
    """What was logged, without seconds."""
    return [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for row, step in logger.calls]


def test_what_was_learned_after_the_checkpoint_is_not_logged_by_the_run_that_goes_on_from_it(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: object) -> None:
            if pl_module.policy_version == 5:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            if pl_module.policy_version == 7:
                raise RuntimeError("two rollouts are lost")

    whole = values(fit(make_model(make_data())))
    assert [step for step, _ in whole] == [128, 256]
    model = make_model(make_data())
    with pytest.raises(RuntimeError, match="two rollouts are lost"):
        fit(model, Fails())
    assert values(fit(model, ckpt_path=tmp_path / "x.ckpt")) == whole[1:]
