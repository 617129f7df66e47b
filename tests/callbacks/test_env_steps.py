"""Limits, validation and checkpoints count environment steps: exactly, over epochs, and after a restart."""

import inspect
import json
import re
import shutil
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rl import (
    EnvStepCheckpoint,
    EnvStepInterval,
    EnvStepLimit,
    EnvStepValidation,
    LastCheckpoint,
    PolicyExport,
    cli,
)
from lightning_rl.checkpointing import atomic
from lightning_rl.training.clock import planned_env_steps
from lightning_rl.validation import ConfigurationError
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, parameters_of

ROLLOUT = 2 * 16  # environment steps of a rollout from `make_data`, of which an epoch has two
GREEDY = ["greedy"]  # where it does not matter what is exported: two programs take twice as long


class Clock(Callback):
    """Notes the environment steps after each rollout and at each validation."""

    def __init__(self) -> None:
        self.rollouts: list[int] = []
        self.validations: list[int] = []

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.rollouts.append(module.env_steps)

    def on_validation_end(self, trainer, module) -> None:
        self.validations.append(module.env_steps)


def fit(*callbacks, ckpt_path=None, rollouts_per_epoch=2, **options):
    clock = Clock()
    data = make_data(rollouts_per_epoch=rollouts_per_epoch)
    model = make_model(data)
    trainer = make_trainer(callbacks=[clock, *callbacks], **{"max_epochs": -1, "limit_val_batches": 1} | options)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer, model, clock


def steps_of(folder: Path) -> list[int]:
    """Environment steps in the checkpoints of a folder, by their names' number."""
    found = {}
    for path in folder.glob("*.ckpt"):
        named = re.fullmatch(r"step=(\d+)", path.stem)
        stored = torch.load(path, weights_only=True)["lightning_rl"]["env_steps"]
        assert named is None or int(named[1]) == stored, path
        found[path] = stored
    return sorted(found.values())


# ---------------------------------------------------------------------- limit


def test_a_limit_may_be_a_whole_float():
    assert EnvStepLimit(1e5).max_env_steps == 100_000
    with pytest.raises(ConfigurationError, match=r"max_env_steps=1\.5 is not valid: expected an integer of at least 1"):
        EnvStepLimit(1.5)


@pytest.mark.parametrize(
    ("limit", "stop"),
    [(1, 32), (32, 32), (33, 64), (64, 64), (65, 96), (160, 160), (161, 192)],
    ids=lambda n: str(n),
)
def test_training_stops_with_the_first_rollout_that_reaches_the_limit(limit, stop):
    _, model, clock = fit(EnvStepLimit(limit))
    assert clock.rollouts == list(range(ROLLOUT, stop + 1, ROLLOUT))
    assert model.env_steps == stop


def test_the_limit_counts_on_where_a_resumed_run_was(tmp_path):
    fit(EnvStepLimit(90), LastCheckpoint(tmp_path), enable_checkpointing=True)
    assert steps_of(tmp_path) == [96]
    _, model, clock = fit(EnvStepLimit(170), ckpt_path=tmp_path / "last.ckpt")
    assert clock.rollouts == [128, 160, 192]
    assert model.policy_version == 6


def test_second_fit_at_the_limit_warns_without_naming_a_checkpoint():
    trainer, model, _ = fit(EnvStepLimit(64))
    with pytest.warns(UserWarning, match="max_env_steps=64 was reached before: the run is at 64 environment steps"):
        trainer.fit(model, make_data())


def test_a_limit_reached_before_resuming_is_said_and_nothing_is_trained(tmp_path):
    _, before, _ = fit(EnvStepLimit(64), LastCheckpoint(tmp_path), enable_checkpointing=True)
    with pytest.warns(UserWarning, match="max_env_steps=64 was reached before.* 64 environment steps"):
        _, model, clock = fit(EnvStepLimit(64), ckpt_path=tmp_path / "last.ckpt")
    assert clock.rollouts == []
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_the_smallest_limit_and_the_epochs_plan_the_run():
    def planned(*limits, max_epochs=-1, **options):
        trainer, _, _ = fit(*map(EnvStepLimit, limits), max_epochs=max_epochs, **options)
        return planned_env_steps(trainer)

    assert planned(90) == 90
    assert planned(90, 40) == 40
    assert planned(90, max_epochs=1) == 64
    assert planned(40, max_epochs=1) == 40
    assert planned(max_epochs=2, limit_train_batches=1) == 64
    assert planned(max_epochs=3) == 192


# ---------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (32, [32, 64, 96, 128, 160, 192]),
        (64, [64, 128, 192]),  # at the end of each epoch
        (96, [96, 192]),  # within the second, at the end of the third
        (50, [64, 128, 160, 192]),  # the first rollouts that reach 50, 100, 150; 192 since training stops
        (10, [32, 64, 96, 128, 160, 192]),  # several multiples in one rollout are one validation
        (1000, [192]),
    ],
)
def test_validation_comes_with_the_first_rollout_that_reaches_a_multiple(every, expected):
    _, _, clock = fit(EnvStepValidation(every), EnvStepLimit(192))
    assert clock.validations == expected


def test_validation_by_steps_does_not_depend_on_epochs():
    for rollouts_per_epoch in (1, 4, 100):
        _, _, clock = fit(EnvStepValidation(96), EnvStepLimit(192), rollouts_per_epoch=rollouts_per_epoch)
        assert clock.validations == [96, 192]


def test_validation_by_steps_without_epochs():
    options = {"check_val_every_n_epoch": None, "val_check_interval": 1}
    _, _, clock = fit(EnvStepValidation(96), EnvStepLimit(230), **options)
    assert clock.validations == [96, 192, 256]


def test_no_validation_where_training_ends_by_epochs_between_multiples():
    _, _, clock = fit(EnvStepValidation(96), max_epochs=2)
    assert clock.rollouts[-1] == 128
    assert clock.validations == [96]


def test_validation_by_steps_counts_on_after_a_restart_within_an_epoch(tmp_path):
    checkpoints = EnvStepCheckpoint(96, tmp_path)
    fit(checkpoints, EnvStepLimit(96), EnvStepValidation(64), enable_checkpointing=True)
    _, _, clock = fit(EnvStepValidation(64), EnvStepLimit(220), ckpt_path=tmp_path / "step=96.ckpt")
    assert clock.rollouts == [128, 160, 192, 224]
    assert clock.validations == [128, 192, 224]


def test_validation_by_steps_leaves_the_trainer_as_it_was():
    trainer, _, _ = fit(EnvStepValidation(32), EnvStepLimit(64))
    assert trainer.val_check_interval == 1.0


def test_validation_by_steps_leaves_the_trainer_as_it_was_after_an_exception():
    class Interrupt(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError

    data = make_data()
    trainer = make_trainer(callbacks=[EnvStepValidation(32), Interrupt()], limit_val_batches=1)
    with pytest.raises(ArithmeticError):
        trainer.fit(make_model(data), data)
    assert trainer.val_check_interval == 1.0


def test_validation_by_steps_refuses_a_second_interval():
    with pytest.raises(ConfigurationError, match=r"check_val_every_n_epoch=3 is not valid: expected 1 or None"):
        fit(EnvStepValidation(32), max_epochs=1, check_val_every_n_epoch=3)


def test_model_checkpoint_saves_after_each_validation_by_steps(tmp_path):
    best = ModelCheckpoint(tmp_path, "{step}", monitor="val/episode_return", mode="max", save_top_k=-1)
    fit(best, EnvStepValidation(96), EnvStepLimit(192), enable_checkpointing=True)
    assert steps_of(tmp_path) == [96, 192]


@pytest.mark.parametrize("early_stopping_first", [True, False])
def test_early_stopping_looks_at_each_validation_by_steps(early_stopping_first):
    # Nothing is better than infinity: the second look without improvement stops.
    stopping = EarlyStopping("val/episode_return", mode="max", patience=2, min_delta=1e9)
    pair = [stopping, EnvStepValidation(96)]
    _, model, clock = fit(*(pair if early_stopping_first else pair[::-1]), max_epochs=50)
    assert clock.validations == [96, 192, 288]
    assert model.env_steps == 288


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("every", "expected"), [(32, [32, 64, 96, 128]), (96, [96]), (50, [64, 128]), (500, [])])
def test_checkpoints_are_saved_and_named_by_environment_steps(tmp_path, every, expected):
    fit(EnvStepCheckpoint(every, tmp_path), max_epochs=2, enable_checkpointing=True)
    assert steps_of(tmp_path) == expected


def test_checkpoints_by_steps_count_on_after_a_restart(tmp_path):
    fit(EnvStepCheckpoint(50, tmp_path), EnvStepLimit(64), enable_checkpointing=True)
    assert steps_of(tmp_path) == [64]
    fit(
        EnvStepCheckpoint(50, tmp_path),
        EnvStepLimit(192),
        enable_checkpointing=True,
        ckpt_path=tmp_path / "step=64.ckpt",
    )
    assert steps_of(tmp_path) == [64, 128, 160]


def test_the_newest_n_checkpoints_are_kept_without_a_monitor_and_over_restarts(tmp_path):
    fit(EnvStepCheckpoint(32, tmp_path, save_top_k=3), EnvStepLimit(160), enable_checkpointing=True)
    assert steps_of(tmp_path) == [96, 128, 160]
    newest = EnvStepCheckpoint(32, tmp_path, save_top_k=3)
    fit(newest, EnvStepLimit(224), enable_checkpointing=True, ckpt_path=tmp_path / "step=160.ckpt")
    assert steps_of(tmp_path) == [160, 192, 224]


def test_checkpoints_by_validation_scores_are_those_of_validated_policies(tmp_path):
    best = EnvStepCheckpoint(50, tmp_path, monitor="val/episode_length", save_top_k=-1)
    _, _, clock = fit(best, max_epochs=3, enable_checkpointing=True)
    assert clock.validations == [64, 128, 192]  # the checkpoints due at 64, 128 and 160
    assert steps_of(tmp_path) == [64, 128, 192]


def test_checkpoints_by_training_scores_are_those_of_their_own_rollouts(tmp_path):
    class Scores(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            scores.append(batch.episodes.returns)

    scores: list[list[float]] = []
    by_score = EnvStepCheckpoint(32, tmp_path, monitor="rollout/episode_return", save_top_k=-1)
    fit(Scores(), by_score, max_epochs=3, enable_checkpointing=True, log_every_n_steps=1)
    first = next(index for index, some in enumerate(scores) if some)
    assert steps_of(tmp_path) == [32 * (index + 1) for index in range(first, 6)]
    known = [(32 * (i + 1), sum(some) / len(some)) for i, some in enumerate(scores) if some]
    found = {int(Path(path).stem.removeprefix("step=")): float(score) for path, score in by_score.best_k_models.items()}
    assert {step: found[step] for step, _ in known} == pytest.approx(dict(known))


def test_checkpoints_by_losses_are_those_of_their_own_updates(tmp_path):
    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            losses[pl_module.env_steps] = pl_module.losses["value_loss"]

    losses: dict[int, float] = {}
    by_loss = EnvStepCheckpoint(32, tmp_path, monitor="train/value_loss", mode="min")
    logged = {"log_every_n_steps": 2}  # the values of the first rollout are not logged before the second one
    fit(Losses(), by_loss, max_epochs=2, enable_checkpointing=True, rollouts_per_epoch=3, **logged)
    found = {int(Path(path).stem.removeprefix("step=")): float(score) for path, score in by_loss.best_k_models.items()}
    assert [*found] == [32, 64, 96, 128, 160, 192]
    for step in (32, 96, 160):  # the first after each log
        assert found[step] == pytest.approx(losses[step])


def test_validation_by_steps_refuses_an_interval_of_time():
    with pytest.raises(ConfigurationError, match=r"val_check_interval='a time' .* a number with EnvStepValidation"):
        fit(EnvStepValidation(32), max_epochs=1, val_check_interval=timedelta(hours=1))


def test_checkpoint_that_waits_for_a_validation_is_saved_after_a_restart(tmp_path):
    def waiting():
        return EnvStepCheckpoint(50, tmp_path / "best", monitor="val/episode_length", save_top_k=-1)

    every = EnvStepCheckpoint(32, tmp_path / "every")
    fit(waiting(), every, max_epochs=1, enable_checkpointing=True, rollouts_per_epoch=3)
    assert steps_of(tmp_path / "best") == [96]
    (tmp_path / "best/step=96.ckpt").unlink()
    ckpt_path = tmp_path / "every/step=64.ckpt"
    fit(waiting(), max_epochs=1, enable_checkpointing=True, rollouts_per_epoch=3, ckpt_path=ckpt_path)
    assert steps_of(tmp_path / "best") == [96]


def test_checkpoint_that_an_aborted_run_left_due_is_not_saved_by_the_next_run(tmp_path):
    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if pl_module.env_steps == 64:
                raise RuntimeError("stop")

    best = EnvStepCheckpoint(50, tmp_path, monitor="val/episode_length", save_top_k=-1)
    with pytest.raises(RuntimeError, match="stop"):
        fit(best, Stop(), max_epochs=1, enable_checkpointing=True, rollouts_per_epoch=3)
    fit(best, max_epochs=2, enable_checkpointing=True, rollouts_per_epoch=1)
    assert steps_of(tmp_path) == [64]


def test_only_the_newest_checkpoints_are_kept_on_request(tmp_path):
    fit(EnvStepCheckpoint(32, tmp_path, save_top_k=1, save_last=True), max_epochs=2, enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=128.ckpt"]


def test_checkpoints_by_several_intervals_keep_apart(tmp_path):
    both = [EnvStepCheckpoint(32, tmp_path / "often"), EnvStepCheckpoint(96, tmp_path / "rarely")]
    fit(*both, max_epochs=2, enable_checkpointing=True)
    assert steps_of(tmp_path / "often") == [32, 64, 96, 128]
    assert steps_of(tmp_path / "rarely") == [96]


def test_two_callbacks_may_save_at_the_same_steps_under_different_names(tmp_path):
    weights = EnvStepCheckpoint(64, tmp_path, "weights-{step}", save_weights_only=True)
    fit(EnvStepCheckpoint(64, tmp_path), weights, max_epochs=2, enable_checkpointing=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step=128.ckpt", "step=64.ckpt", "weights-step=128.ckpt", "weights-step=64.ckpt"]


def test_the_last_checkpoint_is_the_last_even_if_it_is_not_the_best(tmp_path):
    # A metric that only falls: the best is the first.
    class Falling(Callback):
        def on_validation_epoch_end(self, trainer, module) -> None:
            module.log("falling", -float(module.env_steps))

    best = ModelCheckpoint(tmp_path, "best", monitor="falling", mode="max")
    fit(Falling(), best, LastCheckpoint(tmp_path), max_epochs=3, enable_checkpointing=True)
    stored = {
        path.stem: torch.load(path, weights_only=True)["lightning_rl"]["env_steps"] for path in tmp_path.iterdir()
    }
    assert stored == {"best": 64, "last": 192}


def test_last_checkpoint_knows_the_other_checkpoints_of_its_moment_in_any_order_of_callbacks(tmp_path):
    newest = EnvStepCheckpoint(ROLLOUT, tmp_path, save_top_k=1)
    trainer, _, _ = fit(LastCheckpoint(tmp_path), newest, max_epochs=1, enable_checkpointing=True)
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][newest.state_key]
    assert Path(stored["best_model_path"]).name == "step=64.ckpt"
    assert not stored["due"]
    assert isinstance(trainer.callbacks[-1], LastCheckpoint)


def test_a_run_stopped_within_an_epoch_has_a_last_checkpoint_of_that_moment(tmp_path):
    fit(EnvStepLimit(96), LastCheckpoint(tmp_path), enable_checkpointing=True, rollouts_per_epoch=100)
    assert steps_of(tmp_path) == [96]


@pytest.mark.parametrize(
    ("interval", "within_epochs"), [(timedelta(microseconds=1), [32, 64, 128, 160]), (timedelta(hours=1), [])]
)
def test_last_checkpoint_saves_within_an_epoch_when_its_interval_is_over(tmp_path, interval, within_epochs):
    saved = []

    class Listed(LastCheckpoint):
        def save(self, trainer) -> None:
            super().save(trainer)
            saved.extend(steps_of(tmp_path))

    fit(EnvStepLimit(192), Listed(tmp_path, interval), enable_checkpointing=True, rollouts_per_epoch=3)
    assert saved == within_epochs  # 96 and 192 are saved after the validation, at the end of the epoch
    assert steps_of(tmp_path) == [192]


def test_interval_of_last_checkpoint_begins_again_at_the_end_of_an_epoch(tmp_path, monkeypatch):
    rollouts, saved = [], []
    monkeypatch.setattr(atomic, "time", SimpleNamespace(monotonic=lambda: len(rollouts)))  # seconds

    class Counted(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            rollouts.append(1)

    class Listed(LastCheckpoint):
        def save(self, trainer) -> None:
            saved.append(len(rollouts))
            super().save(trainer)

    last = Listed(tmp_path, timedelta(seconds=2.5))
    fit(Counted(), last, max_epochs=2, enable_checkpointing=True, rollouts_per_epoch=3)
    assert saved == []


def test_last_checkpoint_is_written_once_after_each_rollout(tmp_path):
    last = LastCheckpoint(tmp_path)
    fitted, *_ = fit(last, max_epochs=1, enable_checkpointing=True)
    before = (tmp_path / "last.ckpt").stat()
    last.save(fitted)  # as after a signal at the end of an epoch
    after = (tmp_path / "last.ckpt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_last_checkpoint_refuses_an_interval_of_nothing():
    with pytest.raises(ConfigurationError, match=r"train_time_interval=.*0\).*a time above 0"):
        LastCheckpoint(train_time_interval=timedelta())


@pytest.mark.parametrize("stop", [96, 128], ids=["mid-epoch", "epoch-end"])
def test_a_resumed_run_goes_on_with_counters_optimiser_and_schedule(tmp_path, stop):
    schedule = {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1, "gamma": 0.5}}

    def train(limit, ckpt_path=None):
        data = make_data()
        model = make_model(data, learning_rate=1.0, optimizer={"scheduler": schedule})
        checkpoints = EnvStepCheckpoint(stop, tmp_path)
        trainer = make_trainer(callbacks=[EnvStepLimit(limit), checkpoints], max_epochs=-1, enable_checkpointing=True)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        return trainer, model

    train(stop)
    stored = torch.load(tmp_path / f"step={stop}.ckpt", weights_only=True)
    trainer, model = train(192, tmp_path / f"step={stop}.ckpt")
    assert stored["lightning_rl"]["env_steps"] == stop
    assert (model.env_steps, model.policy_version) == (192, 6)
    # Four gradient steps a rollout, halved after each rollout.
    assert next(int(state["step"]) for state in stored["optimizer_states"][0]["state"].values()) == stop // 32 * 4
    assert next(int(state["step"]) for state in model.optimizers().state.values()) == 6 * 4
    assert model.optimizers().param_groups[0]["lr"] == 0.5**6
    assert trainer.global_step == 6 * 4


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_learning_rate_asked_for_when_resuming_wins_and_keeps_its_schedule(tmp_path, scheduled):
    schedule = {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1, "gamma": 0.5}}
    rates = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer, module, *_) -> None:
            rates.append(module.optimizers().param_groups[0]["lr"])

    for limit, learning_rate, ckpt_path in ((64, 1e-3, None), (128, 4e-3, tmp_path / "last.ckpt")):
        data = make_data()
        optimizer = {"scheduler": schedule if scheduled else {}}
        model = make_model(data, learning_rate=learning_rate, optimizer=optimizer)
        callbacks = [EnvStepLimit(limit), LastCheckpoint(tmp_path), Rates()]
        trainer = make_trainer(callbacks=callbacks, max_epochs=-1, enable_checkpointing=True)
        trainer.fit(model, data, ckpt_path=ckpt_path)
    factors = [1, 0.5, 0.25, 0.125] if scheduled else [1, 1, 1, 1]
    assert rates == pytest.approx([1e-3 * factors[0], 1e-3 * factors[1], 4e-3 * factors[2], 4e-3 * factors[3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": {"hidden_sizes": (8,)}},
            r"policy.hidden_sizes=\[8\] does not fit the checkpoint: expected policy.hidden_sizes=\[16\]",
        ),
        (
            {"policy": {"activation": "relu"}},
            "policy.activation='relu' does not fit the checkpoint: expected policy.activation='tanh'",
        ),
        (
            {"policy": {"action_distribution": "tf_agents_categorical"}},
            "policy.action_distribution='tf.* expected policy.action_distribution=None",
        ),
        (
            {"normalization": {"observations": True}},
            "normalization.observations=True does not fit .* normalization.observations=False",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_network_is_refused(tmp_path, options, message):
    fit(LastCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    data = make_data()
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(max_epochs=2).fit(make_model(data, **options), data, ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("changed", [{"num_envs": 1}, {"rollouts_per_epoch": 2}, {"rollouts_per_epoch": 6}], ids=str)
@pytest.mark.parametrize("rollouts", [1, 2, 4, 6])
def test_schedules_end_with_the_epochs_of_a_resumed_run_with_other_rollouts(changed, rollouts, tmp_path):
    options = {"enable_checkpointing": True, "rollouts_per_epoch": 4}
    fit(EnvStepCheckpoint(ROLLOUT, tmp_path), max_epochs=2, **options)
    data = make_data(**{"rollouts_per_epoch": 4} | changed)
    model = make_model(data, optimizer={"anneal": True})
    ckpt_path = tmp_path / f"step={ROLLOUT * rollouts}.ckpt"
    make_trainer(max_epochs=3).fit(model, data, ckpt_path=ckpt_path)
    assert model.clock.planned_env_steps == model.env_steps
    resumed = model.env_steps
    make_trainer(max_epochs=4).fit(model, data)  # another run of the same model
    assert model.clock.planned_env_steps == model.env_steps > resumed


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_schedules_end_with_the_epochs_of_a_resumed_run_whose_limit_is_gone(limit, tmp_path):
    options = {"rollouts_per_epoch": 4, "max_epochs": 3}
    by_epoch = ModelCheckpoint(tmp_path, "epoch-end", save_on_train_epoch_end=True, save_top_k=-1)
    fit(EnvStepLimit(ROLLOUT * limit), by_epoch, LastCheckpoint(tmp_path), enable_checkpointing=True, **options)
    for path in sorted(tmp_path.iterdir()):
        _, model, _ = fit(ckpt_path=path, **options)
        assert model.clock.planned_env_steps == model.env_steps > ROLLOUT * limit, path


def test_a_checkpoint_with_another_number_of_environments_is_accepted(tmp_path):
    for epochs, num_envs, ckpt_path in ((1, 2, None), (2, 4, tmp_path / "last.ckpt")):
        data = make_data(num_envs=num_envs)
        model = make_model(data, normalization={"rewards": True})
        trainer = make_trainer(max_epochs=epochs, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True)
        trainer.fit(model, data, ckpt_path=ckpt_path)
    assert model.env_steps == 2 * 32 + 2 * 64


def test_training_goes_on_with_the_same_objects_after_each_kind_of_evaluation():
    data = make_data()
    model = make_model(data)
    limit = EnvStepLimit(32)
    trainer = make_trainer(callbacks=[limit], max_epochs=-1, limit_val_batches=1)
    for steps, evaluate in ((32, trainer.validate), (64, trainer.test), (96, trainer.predict), (128, trainer.validate)):
        limit.max_env_steps = steps
        trainer.fit(model, data)
        assert model.env_steps == steps
        assert trainer.callback_metrics["val/episodes"] == 2
        evaluate(model, data)


# ---------------------------------------------------------------------- intervals


class Counted(EnvStepInterval):
    """Notes when it acts."""

    def __init__(self, every_n_env_steps: int) -> None:
        super().__init__(every_n_env_steps)
        self.acted: list[int] = []

    def on_interval(self, trainer, pl_module) -> None:
        self.acted.append(pl_module.env_steps)


def ask(callback: Counted, steps: Iterable[int], start: int = 0, force: bool = False) -> list[int]:
    """The steps at which it acts, of those at which it is asked."""
    model: Any = SimpleNamespace(env_steps=start)
    trainer: Any = None
    callback.on_train_start(trainer, model)
    for model.env_steps in steps:
        before = len(callback.acted)
        assert callback.fire(trainer, model, force=force) == (len(callback.acted) > before)
    return callback.acted


def test_an_interval_counts_from_where_it_last_acted():
    assert ask(Counted(10), [3, 9, 10, 14, 25, 29, 34, 35]) == [10, 25, 35]
    assert ask(Counted(10), [23, 29, 30], start=20) == [30], "a restored step is where it begins"
    for never in (0, -1):
        assert ask(Counted(never), range(100)) == []
        assert ask(Counted(never), range(100), force=True) == []


def test_an_interval_can_be_forced_once_at_a_step():
    assert ask(Counted(10), [0, 3, 3, 4, 4], force=True) == [3, 4]
    forced = Counted(10)
    ask(forced, [3, 4], force=True)
    assert ask(forced, [10, 13, 14], start=4) == [3, 4, 14], "it counts from there"


def test_an_interval_counts_anew_where_another_module_is_trained():
    callback = Counted(10)
    assert ask(callback, [30, 40]) == [30, 40]
    assert ask(callback, [5, 10, 19, 20]) == [30, 40, 10, 20]


def test_an_interval_acts_after_rollouts_and_counts_on_after_a_restart(tmp_path):
    whole = Counted(50)
    fit(whole, EnvStepLimit(256))
    assert whole.acted == [64, 128, 192, 256]
    whole = Counted(70)
    fit(whole, EnvStepLimit(320))
    assert whole.acted == [96, 192, 288]
    fit(Counted(70), EnvStepLimit(160), LastCheckpoint(tmp_path), enable_checkpointing=True)
    resumed = Counted(70)
    fit(resumed, EnvStepLimit(320), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.acted == [192, 288]
    new = Counted(65)  # of which the checkpoint knows nothing
    fit(new, EnvStepLimit(320), ckpt_path=tmp_path / "last.ckpt")
    assert new.acted == [160 + 96]


def test_an_interval_without_anything_to_do_says_so():
    with pytest.raises(NotImplementedError, match="EnvStepInterval has no on_interval"):
        fit(EnvStepInterval(32))


# ---------------------------------------------------------------------- exports


def exports_of(folder: Path) -> list[int]:
    """Environment steps of the exports in a folder, by their names and by their descriptions."""
    found = {path.name: json.loads((path / "policy.json").read_text())["env_steps"] for path in folder.iterdir()}
    assert all(name == f"step={env_steps}" for name, env_steps in found.items())
    return sorted(found.values())


def test_policies_are_exported_at_intervals_and_at_the_end_the_newest_kept(tmp_path):
    _, model, _ = fit(PolicyExport(50, tmp_path / "some", keep=2), EnvStepLimit(160))
    assert exports_of(tmp_path / "some") == [128, 160]
    description = json.loads((tmp_path / "some" / "step=160" / "policy.json").read_text())
    assert (description["env_id"], description["algorithm"]) == ("CartPole-v1", "PPO")
    score = description["score"]
    assert (score["metric"], score["env_steps"], score["mean"] > 0) == ("val/episode_return", 160, True)
    program = torch.export.load(tmp_path / "some" / "step=160" / "greedy.pt2").module()
    observations = torch.randn(50, 4)
    assert torch.equal(program(observations), model(observations))


def test_exports_of_an_earlier_longer_run_make_room_for_those_of_a_new_one(tmp_path):
    fit(PolicyExport(50, tmp_path, keep=2, programs=GREEDY), EnvStepLimit(160))
    fit(PolicyExport(50, tmp_path, keep=2, programs=GREEDY), EnvStepLimit(64))
    assert exports_of(tmp_path) == [64, 160]
    fit(PolicyExport(50, tmp_path, keep=2, programs=GREEDY), EnvStepLimit(96))
    assert exports_of(tmp_path) == [64, 96]


def test_run_that_was_killed_while_it_removed_an_export_can_be_repeated(tmp_path, monkeypatch):
    remove = shutil.rmtree

    def killed(path: str, *args: Any, **kwargs: Any) -> None:
        for found in Path(path).rglob("policy.json"):
            found.unlink()
            raise SystemExit
        remove(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        fit(PolicyExport(32, tmp_path, keep=1, programs=GREEDY), EnvStepLimit(96))
    fit(PolicyExport(32, tmp_path, keep=1, programs=GREEDY), EnvStepLimit(96))
    assert [path.name for path in tmp_path.glob("step=*")] == ["step=96"]


def test_all_policies_are_kept_beside_the_log_unless_told_otherwise(tmp_path):
    logger = CSVLogger(tmp_path, name="run", version=0)
    fit(PolicyExport(64, programs=GREEDY), EnvStepLimit(128), logger=logger)
    assert exports_of(tmp_path / "run" / "version_0" / "policies") == [64, 128]
    fit(PolicyExport(64, programs=GREEDY), EnvStepLimit(32), default_root_dir=tmp_path / "root")
    assert exports_of(tmp_path / "root" / "policies") == [32]


def test_runs_that_share_the_folder_of_a_logger_keep_their_exports_apart(tmp_path):
    class Shared(DummyLogger):  # as `WandbLogger` and `MLFlowLogger`
        save_dir, name, version = str(tmp_path), "project", ""

    for version, steps in (("a", 64), ("b", 128)):
        (logger := Shared()).version = version
        fit(PolicyExport(64, keep=1, programs=GREEDY), EnvStepLimit(steps), logger=logger)
    assert exports_of(tmp_path / "project/a/policies") == [64]
    assert exports_of(tmp_path / "project/b/policies") == [128]


def test_exporting_does_not_change_a_run(tmp_path):
    _, watched, _ = fit(PolicyExport(32, tmp_path), max_epochs=1)
    _, alone, _ = fit(max_epochs=1)
    assert_equal_parameters(watched, parameters_of(alone))


def test_only_the_first_rank_writes_where_all_agree(tmp_path):
    asked = []

    class Rank:
        """As seen by a callback; the Trainer's `log_dir` waits for all ranks to ask for it."""

        fast_dev_run = False
        datamodule = logger = None

        def __init__(self, rank: int) -> None:
            self.rank, self.is_global_zero = rank, rank == 0

        @property
        def log_dir(self) -> str:
            asked.append(self.rank)
            return str(tmp_path / str(self.rank))

    for rank in (0, 1):
        trainer: Any = Rank(rank)
        PolicyExport(1).on_interval(trainer, make_model(make_data()))
    assert asked == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_nothing_is_exported_in_a_fast_dev_run(tmp_path):
    fit(PolicyExport(1, tmp_path), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_or_written_is_refused_before_anything_is_trained(tmp_path):
    data, clock = make_data("Pendulum-v1"), Clock()
    model = make_model(data, policy={"action_distribution": "beta"})  # which ONNX cannot draw samples of
    (tmp_path / "file").touch()

    def refused(match: str, *arguments: Any, **options: Any) -> None:
        trainer = make_trainer(callbacks=[PolicyExport(10**9, *arguments, **options), clock], max_epochs=1)
        with pytest.raises(ConfigurationError, match=match):
            trainer.fit(model, data)
        assert clock.rollouts == []

    # Before that, some releases of PyTorch cannot trace them.
    refused("cannot be exported.*(BetaHead|_standard_gamma)", tmp_path / "policies", format="onnx")
    unwritable = "dirpath='.*file/policies' is not valid: expected a folder that can be written"
    refused(unwritable, tmp_path / "file/policies", programs=["greedy"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("keep", [0, -2, 1.5])
def test_the_number_of_exports_to_keep_is_checked(keep):
    with pytest.raises(ConfigurationError, match=f"keep={keep} is not valid: expected an integer of at least 1, or -1"):
        PolicyExport(10, keep=keep)


def test_what_policies_are_exported_as_is_checked_when_the_callback_is_made():
    with pytest.raises(ConfigurationError, match="format='pb' is not valid: expected one of torch_export, onnx"):
        PolicyExport(10, format="pb")
    with pytest.raises(ConfigurationError, match=r"programs=.'best'. is not valid: expected a list of greedy, sampled"):
        PolicyExport(10, programs=["best"])


# ---------------------------------------------------------------------- bad input and warnings


@pytest.mark.parametrize("make", [EnvStepLimit, EnvStepValidation, EnvStepCheckpoint, PolicyExport])
@pytest.mark.parametrize("value", [0, -5, 1.5, True])
def test_intervals_must_be_positive_integers(make, value):
    with pytest.raises(ConfigurationError, match=f"env_steps={value} is not valid: expected an integer of at least 1"):
        make(value)


def test_nothing_is_saved_in_a_fast_dev_run(tmp_path):
    fit(EnvStepCheckpoint(32, tmp_path), LastCheckpoint(tmp_path), fast_dev_run=True, enable_checkpointing=True)
    assert not list(tmp_path.iterdir())


def test_a_script_prints_no_misleading_warnings(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(EnvStepCheckpoint(96, tmp_path), EnvStepLimit(96), enable_checkpointing=True, log_every_n_steps=50)
        fit(EnvStepLimit(128), ckpt_path=tmp_path / "step=96.ckpt", log_every_n_steps=50)
    heard = [str(warning.message) for warning in caught]
    assert not [message for message in heard if re.search("LeafSpec|dataloader|log_every_n_steps|pre-optim", message)]


def test_two_exports_have_separate_states_and_the_score_is_resumed(tmp_path):
    exports = [PolicyExport(64, tmp_path / name, programs=GREEDY) for name in "ab"]
    fit(*exports, EnvStepLimit(64))
    assert all((tmp_path / name / "step=64").exists() for name in "ab")
    exports[0]._score = {"mean": 1.5}
    again = PolicyExport(64, tmp_path / "a", programs=GREEDY)
    again.load_state_dict(exports[0].state_dict())
    assert again._score == {"mean": 1.5}


def test_two_exports_into_one_folder_are_refused(tmp_path):
    exports = [PolicyExport(32, tmp_path, programs=GREEDY), PolicyExport(64, str(tmp_path), keep=1, programs=GREEDY)]
    with pytest.raises(ConfigurationError, match="expected a folder of its own for each PolicyExport"):
        fit(*exports, EnvStepLimit(64))
    assert not [*tmp_path.iterdir()]


def test_an_export_of_a_new_run_has_no_score_of_an_earlier_run(tmp_path):
    export = PolicyExport(64, tmp_path, programs=GREEDY)
    fit(export, EnvStepLimit(64))
    fit(export, EnvStepLimit(64), limit_val_batches=0)
    assert json.loads((tmp_path / "step=64" / "policy.json").read_text())["score"] is None


def test_last_checkpoint_with_weights_alone_is_refused():
    with pytest.raises(ConfigurationError, match="save_last=True is not valid: expected False with save_weights_only"):
        EnvStepCheckpoint(10, save_last=True, save_weights_only=True)


def test_hooks_have_the_parameters_of_lightning_so_that_type_checkers_accept_an_override():
    public = [x for x in vars(cli.public).values() if isinstance(x, type) and issubclass(x, Callback)]
    for kind in {base for one in public for base in one.__mro__ if base.__module__.startswith("lightning_rl.")}:
        if "on_train_batch_end" in vars(kind):
            own, expected = (inspect.signature(x.on_train_batch_end).parameters for x in (kind, Callback))
            assert [*own] == [*expected], kind
            assert own["outputs"].annotation == "STEP_OUTPUT", kind
