"""What Lightning's Trainer offers works: loops, limits, callbacks, loggers, checkpoints."""

import contextlib
import csv
import itertools
import pickle
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_rl import (
    A2C,
    PPO,
    BehaviourCloning,
    EnvStepCheckpoint,
    EnvStepLimit,
    LastCheckpoint,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    RecordedEpisodes,
    Rollout,
    RolloutDataModule,
)
from lightning_rl.data.evaluation import EvaluationConfig
from lightning_rl.training.config import OptimizerConfig
from lightning_rl.validation import ConfigurationError
from tests.combination_probes import Combination, data_options
from tests.helpers import (
    MemoryLogger,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    merged,
    needs_weight_averaging,
    parameters_of,
)

NORMALIZED = {"normalization": {"observations": True, "rewards": True}}


def fit(**options: Any) -> tuple[Trainer, PPO, RolloutDataModule]:
    """Train for an epoch of two rollouts of 32 steps and validate after it."""
    data = make_data()
    model = make_model(data)
    trainer = make_trainer(**merged({"limit_val_batches": 1, "log_every_n_steps": 1}, options))
    trainer.fit(model, data)
    return trainer, model, data


# ---------------------------------------------------------------------- loops and limits


def test_a_loader_of_anything_but_rollouts_is_refused():
    data = make_data()
    with pytest.raises(ConfigurationError, match="the train loader yields Tensor: expected rollouts"):
        make_trainer(limit_val_batches=0).fit(make_model(data), torch.utils.data.DataLoader(torch.zeros(4, 2)))


@pytest.mark.parametrize("used_before", [False, True])
def test_loaders_without_their_data_module_are_refused_with_what_to_pass(used_before):
    data = make_data()
    model = make_model(data)
    if used_before:  # the data module then has a Trainer, which is not the one that runs
        make_trainer().fit(model, data)
    message = (
        "the Trainer got a loader of RolloutDataModule without the data module.*"
        r"pass the data module, as in trainer.fit\(model, datamodule=data\)"
    )
    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(model, train_dataloaders=data.train_dataloader())
    assert model.policy_version == 2 * used_before
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(limit_val_batches=1).validate(model, data.val_dataloader(), verbose=False)


def test_test_and_predict_play_the_same_episodes_and_validation_others():
    trainer, model, data = fit()
    (validated,) = trainer.validate(model, data, verbose=False)
    assert trainer.validate(model, data, verbose=False) == [validated]
    (tested,) = trainer.test(model, data, verbose=False)
    (episodes,) = trainer.predict(model, data)
    returns = [episode.episode_return for episode in episodes]
    assert tested["test/episode_return"] == pytest.approx(np.mean(returns))
    assert tested["test/episode_return"] != validated["val/episode_return"]
    assert tested["test/episode_return_min"] == min(returns)
    assert tested["test/episode_length"] == pytest.approx(np.mean([episode.length for episode in episodes]))
    assert validated["val/episodes"] == tested["test/episodes"] == len(episodes) == 2


def test_evaluation_that_an_exception_ended_is_not_part_of_the_next_one():
    class Interrupt(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise ArithmeticError

    data = make_data()
    model = make_model(data)
    with pytest.raises(ArithmeticError):
        make_trainer(callbacks=[Interrupt()], limit_val_batches=1).validate(model, data)
    (values,) = make_trainer(limit_val_batches=1).validate(model, data, verbose=False)
    assert values["val/episodes"] == 2


def test_another_model_of_a_used_data_module_can_be_saved_after_a_validation(tmp_path):
    data = make_data()
    make_trainer(limit_train_batches=1).fit(make_model(data), data)
    trainer = make_trainer(limit_val_batches=1)
    trainer.validate(make_model(data), data, verbose=False)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    assert PPO.load_from_checkpoint(tmp_path / "new.ckpt").policy_version == 0


def test_prediction_returns_whole_episodes():
    trainer, model, data = fit()
    for episode in trainer.predict(model, data)[0]:
        assert episode.observations.shape == (episode.length + 1, 4)
        assert episode.actions.shape == episode.rewards.shape == (episode.length,)
        assert episode.rewards.sum() == episode.episode_return
        actions = model(torch.from_numpy(episode.observations[:-1]))
        assert actions.tolist() == episode.actions.tolist()


def test_fast_dev_run_takes_one_rollout_and_one_set_of_episodes():
    trainer, model, _ = fit(fast_dev_run=True)
    assert model.policy_version == 1
    assert "val/episode_return" in trainer.callback_metrics


def test_fast_dev_run_counts_rollouts_not_gradient_steps():
    trainer, model, _ = fit(fast_dev_run=2)
    assert model.policy_version == 2
    assert "val/episode_return" in trainer.callback_metrics


@pytest.mark.parametrize(
    ("options", "rollouts", "validations"),
    [
        ({}, 4, 2),
        ({"limit_train_batches": 1}, 2, 2),
        ({"limit_train_batches": 0.5}, 2, 2),
        ({"limit_val_batches": 0}, 4, 0),
        ({"val_check_interval": 1}, 4, 4),
        ({"val_check_interval": 0.5}, 4, 4),
        ({"check_val_every_n_epoch": 2}, 4, 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 3}, 4, 1),
        ({"num_sanity_val_steps": 2}, 4, 2),
    ],
    ids=str,
)
def test_limits_and_intervals_count_rollouts_and_sets_of_episodes(options, rollouts, validations):
    logger = MemoryLogger()
    _, model, _ = fit(max_epochs=2, logger=logger, **options)
    assert model.policy_version == rollouts
    assert model.env_steps == 32 * rollouts
    assert len(logger.rows("val/episode_return")) == validations
    assert len(logger.rows("train/policy_loss")) == rollouts


def test_an_algorithm_can_end_an_epoch_before_a_rollout_as_in_lightning():
    """Also for type checkers: a hook that overrides one of this package returns what Lightning allows."""

    class Own(PPO):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            super().on_train_batch_start(batch, batch_idx)
            return -1 if batch_idx == 1 else None

    data = make_data()
    model = Own(data.observation_space, data.action_space)
    make_trainer(max_epochs=2).fit(model, data)
    assert model.policy_version == 2
    assert get_type_hints(PPO.on_train_batch_start)["return"] == int | None


def test_rollouts_that_a_callback_keeps_as_clones_are_not_overwritten():
    class Keep(Callback):
        def __init__(self):
            self.clones, self.at_the_time = [], []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.clones.append(batch.clone())
            self.at_the_time.append(batch.observations.tolist())

    keep = Keep()
    fit(callbacks=[keep], max_epochs=2)
    assert [clone.observations.tolist() for clone in keep.clones] == keep.at_the_time
    assert [clone.policy_version for clone in keep.clones] == [0, 1, 2, 3]


def test_early_stopping_follows_the_validation_return():
    stop = EarlyStopping("val/episode_return", mode="max", stopping_threshold=1.0)
    _, model, _ = fit(max_epochs=5, callbacks=[stop])
    assert stop.stopped_epoch == 0
    assert model.policy_version == 2


def test_profiler_sees_each_rollout_and_update():
    trainer, *_ = fit(profiler="simple")
    durations = trainer.profiler.recorded_durations
    assert len(durations["run_training_batch"]) == 2
    assert len(durations["[_TrainingEpochLoop].train_dataloader_next"]) >= 2


def test_accelerator_auto_finds_a_device():
    _, model, _ = fit(accelerator="auto")
    assert model.policy_version == 2


def test_ordinary_use_gives_no_warning(tmp_path):
    checkpoints = {"enable_checkpointing": True, "callbacks": [LastCheckpoint(tmp_path)]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # Lightning's own
        trainer, model, data = fit(max_epochs=2, num_sanity_val_steps=2, logger=MemoryLogger(), **checkpoints)
        for evaluate in (trainer.validate, trainer.test, trainer.predict):
            evaluate(model, data)


def test_barebones_gives_no_warning():
    data = make_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # Lightning's own
        model, trainer = make_model(data), Trainer(accelerator="cpu", barebones=True, max_epochs=1)
        trainer.fit(model, data)
        trainer.validate(model, data)
    assert model.policy_version == 2


# ---------------------------------------------------------------------- loggers


def test_every_logger_gets_environment_steps_as_its_x_axis(tmp_path):
    memory = MemoryLogger()
    csv_logger, tensorboard = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tensorboard")
    fit(max_epochs=2, logger=[memory, csv_logger, tensorboard])
    expected = {"train/policy_loss": [32, 64, 96, 128], "val/episode_return": [64, 128]}

    events = EventAccumulator(tensorboard.log_dir)
    events.Reload()
    rows = list(csv.DictReader((Path(csv_logger.log_dir) / "metrics.csv").open()))
    for name, steps in expected.items():
        assert [step for step, _ in memory.rows(name)] == steps
        assert [event.step for event in events.Scalars(name)] == steps
        assert [int(row["step"]) for row in rows if row[name]] == steps
    assert all("step" not in metrics and type(step) is int for metrics, step in memory.calls)


def test_what_a_subclass_or_a_callback_logs_is_logged_against_environment_steps(tmp_path):
    class Logging(PPO):
        def training_step(self, rollout, batch_idx):
            self.log("mine/before", 1.0)
            super().training_step(rollout, batch_idx)
            self.log("mine/after", 2.0, prog_bar=True)

    class Callbacks(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.log("mine/callback", 3.0)

        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("mine/epoch", 4.0)

    logger = MemoryLogger()
    data = make_data()
    model = Logging(data.observation_space, data.action_space)
    model.clock.env_steps = 2**24 + 1
    make_trainer(logger=logger, log_every_n_steps=1, callbacks=[Callbacks()]).fit(model, data)
    steps = [2**24 + 33, 2**24 + 65]
    for name, value in (("before", 1.0), ("after", 2.0), ("callback", 3.0)):
        assert logger.rows(f"mine/{name}") == [(step, value) for step in steps]
    assert logger.rows("mine/epoch") == [(steps[-1], 4.0)]
    assert [step for step, _ in logger.rows("train/policy_loss")] == steps


def test_values_logged_in_some_rollouts_or_once_per_epoch_are_logged_against_environment_steps():
    class Logging(PPO):
        def training_step(self, rollout, batch_idx):
            super().training_step(rollout, batch_idx)
            self.log("mine/mean", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)
            if batch_idx == 2:
                self.log("mine/some", 1.0)

    class Callbacks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                pl_module.log("mine/callback", 2.0)

    logger = MemoryLogger()
    data = make_data(rollouts_per_epoch=3)
    model = Logging(data.observation_space, data.action_space)
    make_trainer(logger=logger, log_every_n_steps=1, max_epochs=2, callbacks=[Callbacks()]).fit(model, data)
    # Lightning logs a value again with every later rollout of the epoch.
    assert logger.rows("mine/callback") == [(step, 2.0) for step in (64, 96, 160, 192)]
    assert logger.rows("mine/some") == [(96, 1.0), (192, 1.0)]
    assert logger.rows("mine/mean") == [(96, 1.0), (192, 1.0)]


def test_hooks_around_the_backward_pass_are_called_where_somebody_has_any():
    class Watch(Callback):
        def __init__(self):
            self.losses, self.norms = [], []

        def on_before_backward(self, trainer, pl_module, loss):
            self.losses.append(loss.item())

        def on_after_backward(self, trainer, pl_module):
            self.norms.append(max(p.grad.abs().max().item() for p in pl_module.policy.parameters()))

    class Own(PPO):
        calls = 0

        def on_after_backward(self):
            self.calls += 1

    watch = Watch()
    _, watched, _ = fit(callbacks=[watch])
    _, unwatched, _ = fit()
    assert len(watch.losses) == len(watch.norms) == 2 * watched.num_epochs * watched.num_minibatches
    assert all(np.isfinite(watch.losses)) and min(watch.norms) > 0
    torch.testing.assert_close(parameters_of(unwatched), parameters_of(watched), rtol=1e-4, atol=1e-6)
    data = make_data()
    own = Own(data.observation_space, data.action_space)
    make_trainer().fit(own, data)
    assert own.calls == 2 * own.num_epochs * own.num_minibatches


def test_hooks_before_a_step_are_called_where_somebody_has_any_and_steps_are_counted_in_any_case():
    class Watch(Callback):
        steps = 0

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.steps += 1
            assert all(p.grad is not None for p in pl_module.policy.parameters())

    class Own(PPO):
        stepped = 0

        def on_before_optimizer_step(self, optimizer):
            self.stepped += 1

    watch = Watch()
    watching, watched, _ = fit(callbacks=[watch])
    trainer, unwatched, _ = fit()
    expected = 2 * watched.num_epochs * watched.num_minibatches
    assert watch.steps == watching.global_step == trainer.global_step == expected
    torch.testing.assert_close(parameters_of(unwatched), parameters_of(watched), rtol=1e-4, atol=1e-6)
    data = make_data()
    own, trainer = Own(data.observation_space, data.action_space), make_trainer()
    trainer.fit(own, data)
    assert own.stepped == trainer.global_step == 2 * own.num_epochs * own.num_minibatches


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_clock_is_exact_beyond_what_float32_can_count(precision):
    logger = MemoryLogger()
    data = make_data()
    model = make_model(data)
    model.clock.env_steps = 2**24 + 1
    trainer = make_trainer(logger=logger, log_every_n_steps=1, limit_val_batches=1, precision=precision)
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    begin = 2**24 + 1
    assert [step for step, _ in logger.rows("train/policy_loss")] == [begin + 32, begin + 64]
    assert [step for step, _ in logger.rows("val/episode_return")] == [begin + 64] * 2
    assert trainer.callback_metrics["step"].item() == begin + 64


def test_everything_that_users_expect_is_logged():
    logger = MemoryLogger()
    data = make_data(num_envs=8)
    make_trainer(logger=logger, log_every_n_steps=2).fit(make_model(data), data)
    (metrics, _), *_ = logger.calls
    train = "policy_loss value_loss entropy approx_kl approx_kl_k1 clip_fraction explained_variance grad_norm"
    train += " learning_rate first_ratio_error"
    episode = [f"episode_{what}{which}" for what in ("return", "length") for which in ("", "_min", "_max")]
    assert set(metrics) >= (
        {f"train/{name}" for name in train.split()}
        | {f"rollout/{name}" for name in [*episode, "episodes"]}
        | {"time/rollout_seconds", "time/update_seconds", "time/steps_per_second"}
    )


def test_logged_values_cover_everything_since_the_last_log():
    logger, recorder = MemoryLogger(), Recorder()
    data = make_data(num_envs=4, rollout_length=32, rollouts_per_epoch=4)
    model = make_model(data, learning_rate=3e-3)
    episodes: list[list[float]] = []
    collect = data.collect

    def spy():
        rollout = collect()
        episodes.append(list(rollout.episodes.returns))
        return rollout

    data.collect = spy
    make_trainer(max_epochs=2, callbacks=[recorder], logger=logger, log_every_n_steps=3).fit(model, data)
    windows = [slice(0, 3), slice(3, 6), slice(6, 8)]  # the second one crosses an epoch, the third one ends the run
    for name in ("policy_loss", "grad_norm", "approx_kl", "first_ratio_error"):
        means = [np.mean(recorder.column(name)[window]) for window in windows]
        assert [value for _, value in logger.rows(f"train/{name}")] == pytest.approx(means, rel=1e-5)
    seconds = zip(logger.rows("time/rollout_seconds"), logger.rows("time/update_seconds"), strict=True)
    speeds = [4 * 32 / (rollout + update) for (_, rollout), (_, update) in seconds]
    assert [value for _, value in logger.rows("time/steps_per_second")] == pytest.approx(speeds, rel=1e-5)
    finished = [list(itertools.chain(*episodes[window])) for window in windows]
    for suffix, function in (("", np.mean), ("_min", min), ("_max", max)):
        logged = [value for _, value in logger.rows(f"rollout/episode_return{suffix}")]
        assert logged == pytest.approx([function(returns) for returns in finished], rel=1e-6)
    assert logger.rows("rollout/episodes") == list(zip((384, 768, 1024), map(len, finished), strict=True))


def test_run_that_a_limit_stops_logs_what_happened_since_the_last_log():
    logger = MemoryLogger()
    data = make_data(rollouts_per_epoch=8)
    make_trainer(callbacks=[EnvStepLimit(5 * 32)], logger=logger, log_every_n_steps=3).fit(make_model(data), data)
    assert [step for step, _ in logger.rows("train/policy_loss")] == [3 * 32, 5 * 32]


def test_logging_can_be_switched_off():
    logger = MemoryLogger()
    fit(logger=logger, log_every_n_steps=0, limit_val_batches=0)
    assert logger.calls == []


def test_without_logging_monitored_returns_are_the_ones_of_the_last_epoch():
    returns = []
    for interval in (4, 0):
        data = make_data(rollouts_per_epoch=4, rollout_length=32)
        trainer = make_trainer(max_epochs=3, log_every_n_steps=interval)
        trainer.fit(make_model(data), data)
        returns.append(float(trainer.callback_metrics["rollout/episode_return"]))
    assert returns[0] == returns[1]


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize(
    ("env_id", "data_of_model", "expected"),
    [
        (
            "Acrobot-v1",
            "CartPole-v1",
            r"observation_space=Box\(.*, \(6,\), float32\) of Acrobot-v1 does not fit: expected Box\(.*, \(4,\), "
            r"float32\), the space that PPO was made for",
        ),
        (
            "MountainCarContinuous-v0",
            "MountainCar-v0",
            r"action_space=Box\(-1.0, 1.0, \(1,\), float32\) of MountainCarContinuous-v0 does not fit: expected "
            r"Discrete\(3\), the space that PPO was made for",
        ),
    ],
)
def test_environments_with_other_spaces_than_the_model_are_refused(env_id, data_of_model, expected, stage):
    model = make_model(make_data(data_of_model))
    with pytest.raises(ConfigurationError, match=f"^{expected}$"):
        getattr(make_trainer(), stage)(model, make_data(env_id))


def test_the_base_of_the_algorithms_is_none():
    data = make_data()
    base = OnPolicyAlgorithm(data.observation_space, data.action_space)
    with pytest.raises(ConfigurationError, match="model='OnPolicyAlgorithm' is not valid: expected a subclass that"):
        base.check_run(make_trainer(), None)


def test_lightnings_tuner_is_refused_with_what_to_do_instead():
    data = make_data()
    model = make_model(data)
    before = [x.clone() for x in model.parameters()]
    rate = "LearningRateFinder cannot be used: .*tune.py.*; after a Tuner, .* make a new Trainer"
    size = "BatchSizeFinder cannot be used: .*num_envs.*; after a Tuner, .* make a new Trainer"
    for callback, message in ((LearningRateFinder(), rate), (BatchSizeFinder(), size)):
        with pytest.raises(ConfigurationError, match=message):
            make_trainer(callbacks=[callback]).fit(model, data)
    with pytest.raises(ConfigurationError, match=size):
        make_trainer(callbacks=[BatchSizeFinder()]).validate(model, data)
    with pytest.raises(ConfigurationError, match=rate):
        Tuner(make_trainer()).lr_find(model, datamodule=data)
    with pytest.raises(ConfigurationError, match=size):
        Tuner(make_trainer()).scale_batch_size(model, datamodule=data)
    assert model.env_steps == 0
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (BackboneFinetuning, "BaseFinetuning cannot be used: .*requires_grad_"),
        (lambda: StochasticWeightAveraging(1e-2), "StochasticWeightAveraging cannot be used: .*EMAWeightAveraging"),
        (lambda: GradientAccumulationScheduler({0: 2}), "GradientAccumulationScheduler cannot be used: .*minibatches"),
    ],
    ids=["finetuning", "swa", "accumulation"],
)
def test_callbacks_that_need_automatic_optimization_are_refused(callback, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(callbacks=[callback()])


@needs_weight_averaging
def test_averaged_weights_are_used_or_refused_if_they_would_not_be_updated():
    average = lightning_callbacks.EMAWeightAveraging
    with pytest.raises(ConfigurationError, match=r"EMAWeightAveraging.update_every_n_steps=10 is .*expected 1: "):
        fit(callbacks=[average(update_every_n_steps=10)])
    plain, averaged = fit()[1], fit(callbacks=[average(decay=0.0)])[1]
    assert_equal_parameters(averaged, parameters_of(plain))  # the last rollout has all the weight
    slow = fit(callbacks=[average(decay=0.9)])[1]
    assert any(not torch.equal(x, y) for x, y in zip(slow.parameters(), plain.parameters(), strict=True))


@needs_weight_averaging
@pytest.mark.parametrize("evaluate", ["validate", "test"])
def test_the_trainer_of_a_run_evaluates_the_averaged_weights_of_a_checkpoint(tmp_path, evaluate):
    callbacks = [lightning_callbacks.EMAWeightAveraging(decay=0.9), LastCheckpoint(tmp_path)]
    trainer, model, data = fit(callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    average = parameters_of(model)
    getattr(trainer, evaluate)(model, data, ckpt_path=tmp_path / "last.ckpt")
    assert_equal_parameters(model, average)


@needs_weight_averaging
def test_the_average_of_a_64_bit_run_has_64_bits():
    _, model, _ = fit(callbacks=[lightning_callbacks.EMAWeightAveraging(decay=0.9)], precision="64-true")
    assert any(not torch.equal(x, x.float().double()) for x in model.policy.parameters())


@needs_weight_averaging
def test_averaging_does_not_round_the_integers_by_which_discrete_actions_are_found():
    data = make_data(**data_options(Combination("multi_discrete", "ragged", memory=False, masked=False)))
    model = make_model(data)
    constants = {name: x.clone() for name, x in model.named_buffers()}
    assert "policy.action_head.places" in constants
    average = lightning_callbacks.EMAWeightAveraging(decay=0.9)  # 0.9 · 7 + 0.1 · 7 is below 7 in float32
    make_trainer(callbacks=[average], limit_val_batches=1).fit(model, data)
    assert {name: x.tolist() for name, x in model.named_buffers()} == {n: x.tolist() for n, x in constants.items()}


def test_checkpoints_by_time_are_refused_since_lightning_would_save_none():
    data = make_data()
    timed = ModelCheckpoint(train_time_interval=timedelta(hours=1))
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint.train_time_interval: .*; expected LastCheckpoint"):
        make_trainer(callbacks=[timed], enable_checkpointing=True).fit(make_model(data), data)


@pytest.mark.parametrize("interval", [5, 30])
def test_checkpoints_by_gradient_steps_give_a_warning(interval, tmp_path):
    data = make_data()
    every = ModelCheckpoint(tmp_path, every_n_train_steps=interval)
    with pytest.warns(UserWarning, match=rf"ModelCheckpoint\(every_n_train_steps={interval}\) counts gradient steps"):
        make_trainer(callbacks=[every], enable_checkpointing=True).fit(make_model(data), data)


def test_validation_by_time():
    data = make_data()
    trainer = make_trainer(val_check_interval=timedelta(microseconds=1), limit_val_batches=1.0)
    trainer.fit(make_model(data), data)
    assert "val/episode_return" in trainer.callback_metrics


def test_logging_without_a_trainer_only_warns():
    model = make_model(make_data())
    with pytest.warns(UserWarning, match="not registered"):
        model.log("x", 1.0)


@pytest.mark.parametrize("callback", [EarlyStopping, lambda monitor: ModelCheckpoint(monitor=monitor)])
def test_callbacks_that_look_for_the_smallest_return_are_refused(callback):
    data = make_data()
    trainer = make_trainer(callbacks=[callback("val/episode_return")], enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match="expected 'max', since larger values of val"):
        trainer.fit(make_model(data), data)


@pytest.mark.parametrize(
    "callback", [EarlyStopping, lambda *given, **more: EnvStepCheckpoint(64, None, "best", *given, **more)]
)
def test_callbacks_that_wait_for_a_validation_that_never_comes_are_refused(callback):
    data = make_data()
    best = callback("val/episode_return", mode="max")
    trainer = make_trainer(callbacks=[best], enable_checkpointing=True, limit_val_batches=0)
    with pytest.raises(ConfigurationError, match=r"monitor=.val/episode_return. is .*logged in training"):
        trainer.fit(make_model(data), data)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_clip_val": 0.5}, "trainer.gradient_clip_val=0.5 is .*max_grad_norm"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2 is .* num_minibatches"),
        ({"overfit_batches": 1}, "trainer.overfit_batches=1 is .* every rollout is a new one"),
    ],
    ids=["clip", "accumulate", "overfit"],
)
def test_what_automatic_optimisation_would_do_is_refused_with_the_option_of_the_model(option, message):
    """Lightning says to switch to automatic optimisation, which nobody can here."""
    with pytest.raises(ConfigurationError, match=message):
        fit(**option)


@pytest.mark.parametrize(
    "hook",
    [
        *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
        *("lr_scheduler_step", "on_before_zero_grad"),
    ],
)
def test_hooks_that_would_never_be_called_are_refused(hook):
    data = make_data()
    kind = type("Mine", (PPO,), {hook: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigurationError, match=f"model='Mine' is not valid: expected no {hook}, "):
        make_trainer().fit(kind(data.observation_space, data.action_space), data)


def test_a_callback_whose_hook_would_never_be_called_is_refused():
    callback = lightning_callbacks.LambdaCallback(on_before_zero_grad=print)
    with pytest.raises(ConfigurationError, match=r"LambdaCallback.*expected no on_before_zero_grad"):
        fit(callbacks=[callback])


def test_a_callback_that_overrides_every_hook_is_accepted():
    hooks = {name: lambda *_, **__: None for name in vars(Callback) if name.startswith("on_")}
    fit(callbacks=[type("AsOfRayTune", (Callback,), hooks)()])


def test_parameters_in_float16_are_refused():
    data = make_data()
    with pytest.raises(ConfigurationError, match=r"model=torch.float16 is .* precision is an option of the Trainer"):
        make_trainer().fit(make_model(data).half(), data)


def of_scheduler(made: Any) -> Any:
    class Own(PPO):
        def configure_optimizers(self):
            return made(torch.optim.Adam(self.policy.parameters()))

    return Own


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x: None, "configure_optimizers='0 optimizers' is .*expected one, or one for the actor"),
        (
            lambda x: {"optimizer": x, "lr_scheduler": {"scheduler": StepLR(x, 1), "frequency": 2}},
            "'StepLR, frequency 2' is .*expected a scheduler with frequency 1",
        ),
        (
            lambda x: {"optimizer": x, "lr_scheduler": {"scheduler": ReduceLROnPlateau(x), "monitor": "train/loss"}},
            "'ReduceLROnPlateau, frequency 1' is .*expected a scheduler with frequency 1 that needs no metric",
        ),
    ],
    ids=["no optimizer", "frequency", "plateau"],
)
def test_own_optimizers_and_schedulers_that_cannot_be_stepped_are_refused(made, message):
    data = make_data()
    model = of_scheduler(made)(data.observation_space, data.action_space)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(model, data)
    assert model.env_steps == 0


def test_rows_of_a_csv_log_are_written_with_each_log(tmp_path):
    class Reads(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rows.append(len((tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()) - 1)

    rows = []
    fit(logger=CSVLogger(tmp_path), callbacks=[Reads()], max_epochs=2)
    assert rows == [1, 2, 4, 5]  # with one of a validation


def test_values_logged_in_validation_need_no_batch_size():
    class Own(PPO):
        def validation_step(self, episodes, batch_idx):
            super().validation_step(episodes, batch_idx)
            self.log("my/constant", 2.0)

    data = make_data()
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(Own(data.observation_space, data.action_space), data)
    assert trainer.callback_metrics["my/constant"] == 2.0


def test_minibatches_of_one_step_whose_normalised_advantage_is_0_are_refused():
    data = make_data()
    with pytest.raises(ConfigurationError, match=r"num_minibatches=32 .* fewer, or advantages\.normalize"):
        make_trainer().fit(make_model(data, num_minibatches=32), data)
    model = make_model(data, num_minibatches=32, advantages={"normalize": "rollout"})
    make_trainer().fit(model, data)
    assert model.losses["policy_loss"] != 0
    off_policy = OffPolicyPPG(data.observation_space, data.action_space, batch_size=8, num_minibatches=8)
    with pytest.raises(ConfigurationError, match=r"num_minibatches=8 .* fewer, or advantages\.normalize"):
        make_trainer().fit(off_policy, data)


def test_hyper_parameters_are_logged_as_plain_data():
    logger = MemoryLogger()
    fit(logger=logger)
    assert logger.hyperparams["action_space"] == {"type": "Discrete", "n": 2, "start": 0}
    assert logger.hyperparams["policy"]["hidden_sizes"] == [16]


# ---------------------------------------------------------------------- checkpoints


def test_used_data_module_can_be_sent_to_another_process():
    _, _, data = fit()
    assert pickle.loads(pickle.dumps(data)).spec == data.spec


def test_subclass_that_saves_hyperparameters_itself_can_be_loaded(tmp_path):
    data = make_data()
    trainer = make_trainer()
    trainer.fit(SavesHyperparameters(data.observation_space, data.action_space, optimizer=OptimizerConfig()), data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = SavesHyperparameters.load_from_checkpoint(tmp_path / "model.ckpt")
    assert loaded.hparams["extra"] == 3
    assert loaded.observation_space == data.observation_space


class SavesHyperparameters(PPO):
    def __init__(self, observation_space, action_space, extra=3, **options):
        super().__init__(observation_space, action_space, **options)
        self.save_hyperparameters()


def test_checkpoint_without_the_state_of_the_run_is_not_written(tmp_path):
    class Own(PPO):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = 1

    data = make_data()
    trainer = make_trainer()
    trainer.fit(Own(data.observation_space, data.action_space), data)
    with pytest.raises(ConfigurationError, match=r"on_save_checkpoint of the model does not call super\(\)"):
        trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert not any(tmp_path.iterdir())


def test_resuming_with_a_data_module_of_another_class_warns_of_new_episodes(tmp_path):
    class Other(RolloutDataModule):
        pass

    trainer, _, data = fit()
    trainer.save_checkpoint(path := tmp_path / "model.ckpt")
    other = Other("CartPole-v1", num_envs=data.num_envs, rollout_length=data.rollout_length, rollouts_per_epoch=2)
    with pytest.warns(UserWarning, match=r"the checkpoint has no state of .*Other, since another class collected its"):
        make_trainer(max_epochs=2).fit(make_model(other), other, ckpt_path=path)


def test_best_checkpoint_is_that_of_the_best_validation(tmp_path):
    logger = MemoryLogger()
    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="val/episode_return", mode="max")
    options = {"enable_checkpointing": True, "callbacks": [checkpoint], "logger": logger, "max_epochs": 4}
    trainer, _, data = fit(**options)
    returns = logger.rows("val/episode_return")
    best_step, best = max(returns, key=lambda row: row[1])
    assert checkpoint.best_model_score == pytest.approx(best)
    assert Path(checkpoint.best_model_path).name == f"step={best_step}.ckpt"
    model = PPO.load_from_checkpoint(checkpoint.best_model_path)
    assert model.env_steps == best_step
    (again,) = trainer.validate(model, data, verbose=False)
    assert again["val/episode_return"] == pytest.approx(best)


class OnceLogged(Callback):
    """Logs by the module after the first rollout of an epoch alone."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            pl_module.log("mine", 1.0)


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("others", [[], [OnceLogged()]], ids=["alone", "beside a callback that logs"])
def test_model_checkpoint_keeps_every_file_and_names_it_by_environment_steps(others, validates, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint, *others], limit_val_batches=int(validates))
    names = [f"epoch={epoch}-step={32 * (2 * epoch + rollout)}.ckpt" for epoch in range(3) for rollout in (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        stored = torch.load(tmp_path / name, weights_only=True)
        assert f"step={stored['lightning_rl']['env_steps']}.ckpt" in name


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
def test_values_logged_at_the_start_of_an_epoch_do_not_change_the_names_of_checkpoints(hook, tmp_path):
    once = lightning_callbacks.LambdaCallback(**{hook: lambda _, pl_module: pl_module.log("mine", 1.0)})
    logger, checkpoint = MemoryLogger(), ModelCheckpoint(tmp_path, save_top_k=-1)
    fit(max_epochs=3, enable_checkpointing=True, callbacks=[once, checkpoint], logger=logger)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"epoch=0-step=64.ckpt", "epoch=1-step=128.ckpt", "epoch=2-step=192.ckpt"}
    assert [step for step, _ in logger.rows("mine")] == ([64] if hook == "on_train_start" else [64, 128, 192])


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": torch.optim.SGD},
        {"name": "torch.optim.SGD", "options": {"momentum": 0.5}},
    ],
    ids=["class", "path"],
)
def test_model_made_in_a_script_loads_with_its_optimiser_weights_and_statistics(optimizer, tmp_path):
    data = make_data()
    model = make_model(data, optimizer=optimizer, **NORMALIZED)
    trainer = make_trainer()
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "model.ckpt")
    assert_equal_parameters(loaded, parameters_of(model))
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    assert dict(loaded.hparams) == dict(model.hparams)
    assert (loaded.env_steps, loaded.policy_version) == (64, 2)
    assert type(loaded.configure_optimizers()) is torch.optim.SGD
    assert loaded.observation_space == data.observation_space


def test_checkpoints_load_where_the_package_cannot_be_imported(tmp_path):
    for algorithm in (PPO, A2C):
        data = make_data()
        optimizer = {"name": torch.optim.AdamW, "options": {"weight_decay": 0.1}, "anneal": True}
        options = {"policy": {"hidden_sizes": (16,)}, "optimizer": optimizer, "learning_rate": np.float64(1e-3)}
        model = algorithm(data.observation_space, data.action_space, **options, **NORMALIZED)
        folder = tmp_path / algorithm.__name__
        trainer = make_trainer(
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder, monitor="val/episode_return", mode="max", save_last=True)],
            limit_val_batches=1,
        )
        trainer.fit(model, data)
    script = """
import sys
for name in ("lightning_rl", "lightning", "gymnasium", "numpy"):
    sys.modules[name] = None  # cannot be imported
import torch
for folder in ("PPO", "A2C"):
    checkpoint = torch.load(f"{folder}/last.ckpt", weights_only=True)
    print(checkpoint["lightning_rl"]["env_steps"], checkpoint["hyper_parameters"]["optimizer"]["name"])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["64", "torch.optim.adamw.AdamW"] * 2, done.stderr


@pytest.mark.parametrize(
    "schedule",
    [
        {"optimizer": {"anneal": True}},
        {"optimizer": {"scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "options": {"gamma": 0.5}}}},
    ],
    ids=["anneal", "scheduler"],
)
def test_resumed_run_goes_on_where_it_stopped(schedule, tmp_path):
    class StopAfter(Callback):
        def __init__(self, rollouts: int) -> None:
            self.rollouts = rollouts

        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
            trainer.should_stop = pl_module.policy_version >= self.rollouts

    def train(rollouts: int, ckpt_path: Path | None = None) -> tuple[Trainer, PPO, list[dict[str, Any]]]:
        data, recorder = make_data(), Recorder("env_steps", "policy_version")
        model = make_model(data, **NORMALIZED, **schedule)
        trainer = make_trainer(max_epochs=2, callbacks=[recorder, StopAfter(rollouts)])
        trainer.fit(model, data, ckpt_path=ckpt_path)
        return trainer, model, recorder.rows

    first, _, first_rows = train(2)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, model, resumed_rows = train(4, tmp_path / "first.ckpt")
    straight, _, straight_rows = train(4)
    rows = first_rows + resumed_rows
    assert [row["env_steps"] for row in rows] == [32, 64, 96, 128]
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    rates = [row["learning_rate"] for row in straight_rows]
    assert rates[0] > rates[1] > rates[2] > rates[3]
    assert [row["learning_rate"] for row in rows] == rates
    assert (first.global_step, resumed.global_step, straight.global_step) == (8, 16, 16)
    assert {int(state["step"]) for state in model.optimizers().state.values()} == {16}
    assert model.policy.observation_normalizer.moments.count == model.reward_normalizer.moments.count == 128


def test_another_run_of_the_same_module_anneals_to_its_own_end_and_so_does_its_continuation(tmp_path):
    """The clock goes on, and epochs are counted anew, but not by a run that goes on from a checkpoint."""

    class SaveAt6(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
            if pl_module.policy_version == 6:
                trainer.save_checkpoint(tmp_path / "6.ckpt")

    def train(model: PPO, max_epochs: int = 2, ckpt_path: Path | None = None) -> list[float]:
        recorder = Recorder()
        trainer = make_trainer(max_epochs=max_epochs, callbacks=[recorder, SaveAt6()])
        trainer.fit(model, make_data(), ckpt_path=ckpt_path)
        return recorder.column("learning_rate")

    options = {"optimizer": {"anneal": True}, "learning_rate": 1e-3}
    model = make_model(make_data(), **options)
    assert train(model) == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    second = train(model)
    assert second == pytest.approx([5e-4, 3.75e-4, 2.5e-4, 1.25e-4])
    assert train(make_model(make_data(), **options), ckpt_path=tmp_path / "6.ckpt") == second[2:]
    loaded = PPO.load_from_checkpoint(tmp_path / "6.ckpt")
    assert train(loaded, max_epochs=1) == pytest.approx([2.5e-4, 1.25e-4])


def test_a_resumed_run_anneals_to_the_same_end_although_resets_reduce_the_env_steps(tmp_path):
    class SaveAt4(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
            if pl_module.policy_version == 4:
                trainer.save_checkpoint(tmp_path / "4.ckpt")

    def train(ckpt_path: Path | None = None) -> tuple[PPO, list[float]]:
        data, recorder = make_data(rollouts_per_epoch=3, backend="native"), Recorder()
        model = make_model(data, optimizer={"anneal": True})
        make_trainer(max_epochs=2, callbacks=[recorder, SaveAt4()]).fit(model, data, ckpt_path=ckpt_path)
        return model, recorder.column("learning_rate")

    model, rates = train()
    assert model.env_steps < model.clock.planned_env_steps == 6 * 32
    assert train(tmp_path / "4.ckpt")[1] == rates[4:]


@pytest.mark.parametrize("before", ["interrupted", "another model", "older checkpoint", "nothing trained"])
def test_schedules_end_with_a_run_whose_trainer_or_model_was_used_before(before, tmp_path):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{pl_module.policy_version}.ckpt")
            if before == "interrupted" and pl_module.policy_version == 3:
                raise ArithmeticError

    data = make_data(rollouts_per_epoch=4)
    options = {"optimizer": {"anneal": True}, "learning_rate": 1e-3}
    model, trainer = make_model(data, **options), make_trainer(callbacks=[Interrupt()], limit_val_batches=1)
    with pytest.raises(ArithmeticError) if before == "interrupted" else contextlib.nullcontext():
        trainer.fit(model, data)
    if before == "another model":
        model = make_model(data, **options)
    elif before == "older checkpoint":
        trainer.validate(model, data, tmp_path / "2.ckpt", verbose=False)
    elif before == "nothing trained":
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        model = make_model(data, **options)
        make_trainer().fit(model, data, ckpt_path=tmp_path / "end.ckpt")
        trainer = make_trainer()
    trainer.fit_loop.max_epochs += 2
    trainer.fit(model, data)
    assert model.clock.planned_env_steps == model.env_steps


def test_discounted_returns_of_another_run_begin_with_its_new_episodes():
    """Those of the run before have not ended, and never will."""
    data = make_data("Pendulum-v1")
    model = make_model(data, normalization={"rewards": True})
    returns: list[torch.Tensor] = []

    class Slow(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, outputs: Any, batch: Rollout, i: int) -> None:
            last = returns[-1] if i else torch.zeros(2)
            for rewards in batch.rewards.double():
                last = rewards + 0.99 * last
                returns.append(last)

    for _ in range(2):
        make_trainer(callbacks=[Slow()]).fit(model, data)
    seen = torch.stack(returns)
    torch.testing.assert_close(model.reward_normalizer.moments.mean, seen.mean())
    torch.testing.assert_close(model.reward_normalizer.moments.variance, seen.var(correction=0))


def test_parameters_that_no_optimizer_has_are_named_before_training():
    class WithHead(PPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.head = torch.nn.Linear(2, 1)
            self.anchor = torch.nn.Linear(2, 1).requires_grad_(False)

    data = make_data()
    message = (
        r"will not be trained: head.weight, head.bias\. Make these modules in make_policy, .* return their optimizer "
        r"from configure_optimizers \(another one is not in checkpoints\)"
    )
    with pytest.warns(UserWarning, match=message):
        make_trainer().fit(WithHead(data.observation_space, data.action_space), data)


class WithoutSteps(PPO):
    """Changes parameters without an optimizer, as a random search does."""

    def update(self, rollout):
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += 1e-3


def test_updates_without_an_optimizer_are_saved_too(tmp_path):
    data = make_data()
    model = WithoutSteps(data.observation_space, data.action_space)
    callbacks = [LastCheckpoint(tmp_path), EnvStepCheckpoint(32, tmp_path)]
    make_trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=2).fit(model, data)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("last.ckpt", "step=128.ckpt", "step=32.ckpt", "step=64.ckpt", "step=96.ckpt"),
    ]
    saved = WithoutSteps.load_from_checkpoint(tmp_path / "last.ckpt")
    assert saved.env_steps == 128
    assert_equal_parameters(saved, parameters_of(model))


class RecordsVectors(PPO):
    def update(self, rollout):
        self.steps.observe(vector=rollout.rewards)


class ThreeOptimizers(PPO):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.policy.parameters(), lr=0.1) for _ in range(3)]


class WithoutSuper(PPO):
    def training_step(self, rollout, batch_idx):
        return None


class StartsWithoutSuper(PPO):
    def on_train_start(self):
        self.seen = True


class SetsUpWithoutSuper(PPO):
    def setup(self, stage):
        self.seen = stage


class FitsWithoutSuper(PPO):
    def on_fit_start(self):
        self.seen = True


class WithoutCallbacks(PPO):
    def configure_callbacks(self):
        return []


class Frozen(PPO):
    def setup(self, stage):
        super().setup(stage)
        self.freeze()


@pytest.mark.parametrize(
    ("algorithm", "error", "message"),
    [
        (
            WithoutCallbacks,
            ConfigurationError,
            r"WithoutCallbacks.configure_callbacks does not return the callbacks",
        ),
        (Frozen, ConfigurationError, r"model='Frozen, frozen' is not valid: expected a parameter with requires_grad"),
        (RecordsVectors, ValueError, r"vector has the shape \(16, 2\): expected a scalar"),
        (ThreeOptimizers, ConfigurationError, r"configure_optimizers='3 optimizers' .* one for the critic"),
        (WithoutSuper, ConfigurationError, r"WithoutSuper.training_step does not call super"),
        (StartsWithoutSuper, ConfigurationError, r"StartsWithoutSuper.on_train_start does not call super"),
        (SetsUpWithoutSuper, ConfigurationError, r"SetsUpWithoutSuper.setup does not call super"),
        (FitsWithoutSuper, ConfigurationError, r"FitsWithoutSuper.on_fit_start does not call super"),
    ],
)
def test_what_an_algorithm_must_not_do_is_refused(algorithm, error, message):
    data = make_data()
    with pytest.raises(error, match=message):
        make_trainer().fit(algorithm(data.observation_space, data.action_space), data)


class ForgetsTheRun(PPO):
    def on_load_checkpoint(self, checkpoint):
        pass


def test_resuming_without_the_state_of_the_run_is_refused(tmp_path):
    data, trainer = make_data(), make_trainer(enable_checkpointing=True)
    trainer.fit(ForgetsTheRun(data.observation_space, data.action_space), data)
    trainer.save_checkpoint(path := tmp_path / "run.ckpt")
    again = ForgetsTheRun(data.observation_space, data.action_space)
    with pytest.raises(ConfigurationError, match=r"ForgetsTheRun.on_load_checkpoint to call super\(\)"):
        make_trainer(max_epochs=2).fit(again, make_data(), ckpt_path=path)


@pytest.mark.parametrize("kind", [ModelCheckpoint, EnvStepCheckpoint, EarlyStopping])
def test_misspelled_monitor_is_refused_before_training(tmp_path, kind):
    given = {ModelCheckpoint: (tmp_path,), EnvStepCheckpoint: (64, tmp_path), EarlyStopping: ()}[kind]
    for monitor, expected in [
        ("val/epsiode_length", "expected val/episode_length$"),
        ("val/score", "expected val.* or val/episodes or val/cost or val/cost_last$"),
        ("rollout/epsiode_return", "expected rollout/episode_return$"),
        ("rollout/safety", "expected rollout.* or rollout/cost or rollout/cost_last$"),
        ("val/cots", "expected val/cost$"),
    ]:
        data, best = make_data(info_keys=["cost"]), kind(*given, monitor=monitor, mode="max")
        model, trainer = make_model(data), make_trainer(callbacks=[best], enable_checkpointing=True)
        with pytest.raises(ConfigurationError, match=f"{kind.__name__}.monitor='{monitor}' is not valid: {expected}"):
            trainer.fit(model, data)
        assert model.env_steps == 0


@pytest.mark.parametrize("kind", [ModelCheckpoint, EnvStepCheckpoint, EarlyStopping])
def test_monitor_of_training_returns_is_refused_where_no_episode_ends_in_training(tmp_path, kind):
    given = {ModelCheckpoint: (tmp_path,), EnvStepCheckpoint: (64, tmp_path), EarlyStopping: ()}[kind]
    (episodes,) = make_trainer().predict(make_model(make_data()), make_data())
    data = RecordedEpisodes("CartPole-v1", episodes)
    model = BehaviourCloning(data.observation_space, data.action_space)
    best = kind(*given, monitor="rollout/episode_return", mode="max")
    with pytest.raises(ConfigurationError, match=r"monitor='rollout/episode_return' .*: expected val/episode_return$"):
        make_trainer(callbacks=[best], enable_checkpointing=True, limit_val_batches=1).fit(model, data)
    assert model.env_steps == 0


def test_monitor_of_a_value_that_a_callback_may_log_gives_a_warning(tmp_path):
    class LogsMore(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: PPO) -> None:
            trainer.callback_metrics["val/episode_lengths"] = torch.tensor(1.0)

    data = make_data()
    best = ModelCheckpoint(tmp_path, monitor="val/episode_lengths")
    trainer = make_trainer(callbacks=[LogsMore(), best], enable_checkpointing=True, limit_val_batches=1)
    with pytest.warns(UserWarning, match="did you mean 'val/episode_length'"):
        trainer.fit(make_model(data), data)
    assert best.best_model_score == 1


def test_checkpoint_of_the_best_return_waits_for_the_first_episode(tmp_path):
    data, best = make_data("Pendulum-v1"), ModelCheckpoint(tmp_path, monitor="rollout/episode_return", mode="max")
    model = make_model(data)
    make_trainer(callbacks=[best], max_epochs=20, enable_checkpointing=True).fit(model, data)
    assert torch.isfinite(best.best_model_score)
    assert int(re.search(r"step=(\d+)", best.best_model_path)[1]) >= 400  # two environments, episodes of 200 steps


@pytest.mark.parametrize("kind", [ModelCheckpoint, EarlyStopping])
def test_the_info_of_last_steps_is_waited_for_like_a_return(tmp_path, kind):
    data = make_data("tests.probes:Probe/Counter-v0", env={"kwargs": {"lengths": [40]}}, info_keys=["score"])
    waiting = kind(**{"dirpath": tmp_path} if kind is ModelCheckpoint else {}, monitor="rollout/score_last", mode="max")
    trainer = make_trainer(callbacks=[waiting], max_epochs=4, enable_checkpointing=True)  # of 16 steps
    trainer.fit(make_model(data), data)
    assert (waiting.best_model_score if kind is ModelCheckpoint else waiting.best_score) == 40


def test_info_is_logged_as_mean_over_steps_and_over_last_steps_of_episodes():
    env = {"kwargs": {"lengths": [2, 4]}}  # info["level"] of episode e is 10 e + 1, 10 e + 2, ...
    data = make_data("tests.probes:Probe/Counter-v0", num_envs=1, rollout_length=6, env=env, info_keys=["level"])
    data.evaluation = EvaluationConfig(episodes=2, num_envs=1)
    trainer = make_trainer(limit_train_batches=1, limit_val_batches=1, log_every_n_steps=1)
    trainer.fit(make_model(data), data)
    logged = trainer.callback_metrics
    assert logged["rollout/level"] == logged["val/level"] == pytest.approx((1 + 2 + 11 + 12 + 13 + 14) / 6)
    assert logged["rollout/level_last"] == logged["val/level_last"] == (2 + 14) / 2
    (episodes,) = trainer.predict(trainer.lightning_module, data)
    assert [episode.infos["level"].tolist() for episode in episodes] == [[1, 2], [11, 12, 13, 14]]


def test_folder_for_checkpoints_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    data, saving = make_data(), LastCheckpoint(tmp_path / "file" / "checkpoints")
    model, trainer = make_model(data), make_trainer(callbacks=[saving], enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match=r"LastCheckpoint.dirpath='.*' is not valid: expected a folder that"):
        trainer.fit(model, data)
    assert model.env_steps == 0


def test_early_stopping_on_a_return_waits_for_the_first_episode():
    data, stopping = make_data("Pendulum-v1"), EarlyStopping("rollout/episode_return", mode="max", patience=3)
    model = make_model(data)
    make_trainer(callbacks=[stopping], max_epochs=20).fit(model, data)  # episodes of 200 steps, epochs of 32
    assert model.env_steps > 400 and torch.isfinite(stopping.best_score)
