"""Log windows: every rollout of a run is logged exactly once, also after resuming."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

from lightning_rl import PPO, EnvStepLimit, LastCheckpoint
from lightning_rl.rollouts.rollout import EpisodeSummary
from lightning_rl.training.metrics import LogWindow
from tests.helpers import MemoryLogger, make_data, make_model, make_trainer


def fit(
    model: PPO,
    *callbacks: Callback,
    every: int = 4,
    ckpt_path: Path | None = None,
    logger: MemoryLogger | None = None,
) -> MemoryLogger:
    """Train on eight rollouts of 32 steps, with a log after every few rollouts."""
    logger = logger or MemoryLogger()
    trainer = make_trainer(callbacks=[*callbacks], logger=logger, log_every_n_steps=every)
    trainer.fit(model, make_data(rollouts_per_epoch=8), ckpt_path=ckpt_path)
    return logger


def values(logger: MemoryLogger) -> list[tuple[int | None, dict[str, float]]]:
    """Logged values without durations."""
    return [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for row, step in logger.calls]


def test_resumed_run_does_not_log_rollouts_after_the_checkpoint(tmp_path):
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


class StopsAfter(Callback):
    """Stops like early stopping and `max_time`, or raises like a signal."""

    def __init__(self, rollouts: int, error: type[BaseException] | None = None) -> None:
        self.rollouts, self.error = rollouts, error

    def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: object) -> None:
        if pl_module.policy_version == self.rollouts:
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


@pytest.mark.parametrize(("every", "steps"), [(50, [192]), (4, [128, 192]), (3, [96, 192]), (0, [])])
def test_run_stopped_by_a_callback_logs_the_rest_once(every, steps):
    model = make_model(make_data())
    logger = fit(model, StopsAfter(6), every=every)
    assert [step for step, _ in logger.rows("train/policy_loss")] == steps
    assert (model.metrics.num_rollouts == 0) == bool(every)


def test_run_that_resumes_after_a_stop_logs_no_episode_twice(tmp_path):
    ended: list[float] = []
    count = LambdaCallback(on_train_batch_end=lambda t, m, o, rollout, i: ended.extend(rollout.episodes.returns))
    logger = MemoryLogger()
    for end, path in ((StopsAfter(6), None), (EnvStepLimit(384), tmp_path / "last.ckpt")):
        options = {"logger": logger, "log_every_n_steps": 4, "enable_checkpointing": True, "max_epochs": -1}
        trainer = make_trainer(callbacks=[end, count, LastCheckpoint(tmp_path)], **options)
        trainer.fit(make_model(make_data()), make_data(rollouts_per_epoch=8), ckpt_path=path)
    logged = logger.rows("rollout/episodes")
    assert [step for step, _ in logged] == [128, 192, 256, 384]
    assert sum(number for _, number in logged) == len(ended)


def test_run_ended_by_an_exception_does_not_log_the_rest():
    model, logger = make_model(make_data()), MemoryLogger()
    with pytest.raises(SystemExit):
        fit(model, StopsAfter(6, SystemExit), logger=logger)
    assert [step for step, _ in logger.rows("train/policy_loss")] == [128]
    assert model.metrics.num_rollouts > 0


def test_last_rollout_is_logged_although_resets_reduce_the_env_steps():
    """Resets are planned but not counted, so the clock ends below the planned steps."""
    logger = MemoryLogger()
    data = make_data(rollouts_per_epoch=3, backend="native")
    trainer = make_trainer(logger=logger)
    trainer.fit(make_model(data), data)
    assert 0 < trainer.lightning_module.env_steps < 96
    assert [step for step, _ in logger.rows("train/policy_loss")] == [trainer.lightning_module.env_steps]
    assert "rollout/episode_return" in trainer.logged_metrics


def learned(rollouts: range, window: LogWindow | None = None) -> LogWindow:
    """Return a window with some rollouts, each with other numbers."""
    window = LogWindow() if window is None else window
    for k in rollouts:
        episodes = EpisodeSummary([0.1 * k] * (k % 3), [k] * (k % 3))
        window.add(episodes, {"train/b": [0.1 * k], "train/a": [] if k % 2 else [k, 1 / 3]}, {"rollout/dropped": k}, {})
    return window


def test_restored_log_window_equals_an_uninterrupted_one():
    """Exactly, whatever the window contained before."""
    whole = learned(range(70))
    assert whole.num_rollouts > 0
    twin = learned(range(500, 540))
    twin.add(EpisodeSummary([], []), {"train/other": [1.0]}, {}, {"train/policy_lag_max": 9})
    twin.restore(learned(range(35)).snapshot())
    learned(range(35, 70), twin)
    assert str(twin.snapshot()) == str(whole.snapshot())
    expected = whole.compute()
    assert twin.compute() == expected
    assert expected["train/b"] == pytest.approx(0.1 * 69 / 2) and expected["rollout/dropped"] == 69 * 70 / 2
    assert expected["rollout/episodes"] == 69 and expected["rollout/episode_length_max"] == 68
    whole.begin(7)
    assert whole.num_rollouts == 0 and whole.snapshot()["since"] == 7
    assert learned(range(5, 6), whole).compute()["train/b"] == 0.5


def test_empty_log_window_can_be_restored():
    snapshot = LogWindow().snapshot()
    assert (snapshot["num_rollouts"], snapshot["means"], snapshot["counts"]) == (0, {}, {})
    window = learned(range(3))
    window.restore(snapshot)
    assert window.num_rollouts == 0 and str(window.snapshot()) == str(snapshot)


def test_monitored_values_are_current_at_every_epoch_end_without_a_log():
    """As in Lightning, monitored values do not depend on the logging interval."""
    data, seen = make_data(rollouts_per_epoch=2), []

    class Sees(EarlyStopping):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: PPO) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            seen.append(float(trainer.callback_metrics["train/loss"]))

    class Losses(Callback):
        def __init__(self) -> None:
            self.all: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: object) -> None:
            self.all.append(pl_module.losses["loss"])

    losses, logger = Losses(), MemoryLogger()
    stopping = Sees("train/loss", patience=100)
    make_trainer(max_epochs=3, callbacks=[losses, stopping], logger=logger, log_every_n_steps=5).fit(
        make_model(data), data
    )
    # Means of two rollouts, of four, and of the one after the log.
    assert seen == pytest.approx([sum(losses.all[:2]) / 2, sum(losses.all[:4]) / 4, losses.all[5]])
    assert logger.rows("train/loss") == [(5 * 32, pytest.approx(sum(losses.all[:5]) / 5)), (6 * 32, losses.all[5])]


def test_monitored_values_are_current_at_every_checkpoint_by_gradient_steps(tmp_path):
    losses: dict[int, float] = {}
    note = LambdaCallback(on_train_batch_end=lambda t, m, *_: losses.update({m.env_steps: m.losses["value_loss"]}))
    checkpoint = ModelCheckpoint(tmp_path, "{step}", "train/value_loss", every_n_train_steps=1, save_top_k=-1)
    data = make_data(rollouts_per_epoch=3)
    options = {"max_epochs": 2, "log_every_n_steps": 2, "enable_checkpointing": True}
    make_trainer(callbacks=[note, checkpoint], **options).fit(make_model(data), data)
    scores = {int(Path(x).stem.removeprefix("step=")): float(score) for x, score in checkpoint.best_k_models.items()}
    assert [*scores] == [*losses] == [32, 64, 96, 128, 160, 192]
    for step in (32, 96, 160):  # the first after each log
        assert scores[step] == pytest.approx(losses[step])


def test_monitored_values_are_current_at_every_validation():
    data = make_data(rollouts_per_epoch=4)
    stopping = EarlyStopping("train/loss", patience=100, check_on_train_epoch_end=False)
    seen: list[float] = []
    note = LambdaCallback(
        on_validation_end=lambda trainer, _: seen.append(float(trainer.callback_metrics["train/loss"]))
    )
    trainer = make_trainer(
        callbacks=[stopping, note], val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0
    )
    model = make_model(data)
    trainer.fit(model, data)
    assert len(set(seen)) == 2
    assert stopping.best_score == pytest.approx(min(seen))


class OwnHooks(PPO):
    """Overrides hooks without `super()`."""

    def on_train_epoch_start(self):
        pass

    def on_train_epoch_end(self):
        pass

    def on_train_end(self):
        pass

    def on_validation_start(self):
        pass


@pytest.mark.parametrize("every", [0, 5])
def test_hooks_that_a_subclass_overrides_without_super_change_no_value(every):
    class Sees(EarlyStopping):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: PPO) -> None:
            seen.append({n: float(x) for n, x in trainer.callback_metrics.items() if not n.startswith("time/")})

    def logged(algorithm: type[PPO]) -> list[tuple[int | None, dict[str, float]]]:
        torch.manual_seed(0)
        data, logger = make_data(rollouts_per_epoch=3), MemoryLogger()
        options = {"max_epochs": 3, "limit_val_batches": 1, "log_every_n_steps": every, "logger": logger}
        model = algorithm(data.observation_space, data.action_space)
        make_trainer(callbacks=[Sees("train/loss")], **options).fit(model, data)
        return values(logger)

    seen: list[dict[str, float]] = []
    expected = logged(PPO)
    assert logged(OwnHooks) == expected
    assert len(seen) == 6 and seen[3:] == seen[:3]
