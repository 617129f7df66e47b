"""Updates that are not finite are saved and can be replayed, or are skipped if that is allowed."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import (
    CLEAR,
    PPG,
    PPO,
    EnvStepCheckpoint,
    EnvStepLimit,
    FailedUpdate,
    LastCheckpoint,
    OffPolicyPPG,
    PPOKLPenalty,
)
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.advantages import divergence
from lightning_rl.training.loss import Loss
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    assert_equal_parameters,
    make_data,
    make_trainer,
    parameters_of,
    random_rollout,
)
from tests.training.test_numerics import NAN, Sabotaged, make

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
OPTIONS: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "num_epochs": 3}


class BrokenRollouts(PPO):
    """Puts a NaN reward into the rollouts in `broken`."""

    def __init__(self, *args: Any, broken: list[int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broken = broken

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        if self.policy_version in self.broken:
            rollout.rewards[2, 1] = NAN
        super().training_step(rollout, batch_idx)


class BrokenPenalty(PPOKLPenalty):
    """The loss of the third minibatch is infinite; KL divergences are recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divergences: list[float] = []

    def loss(self, batch: Batch) -> Loss:
        loss = super().loss(batch)
        self.divergences.append(batch.mean(divergence(batch, self.actor_critic(batch)[0])).item())
        if len(self.divergences) == 3:
            loss.add_scalar(None, torch.tensor(torch.inf))
        return loss


def fail(model: PPO, folder: Path, num_rollouts: int = 1, **trainer: Any) -> Path:
    """Fit until it fails, and return the file that the error names."""
    if trainer.get("precision") == "64-true":
        model.double()  # as the Trainer does before rollouts are collected
    rollouts = [random_rollout(model.policy) for _ in range(num_rollouts)]
    with pytest.raises(FloatingPointError) as caught:
        make_trainer(default_root_dir=folder, **trainer).fit(model, FixedRollouts(rollouts, model))
    found = re.search(r"FailedUpdate\.load\('(.*)'\)\.replay\(\) repeats it$", str(caught.value))
    assert found is not None, caught.value
    return Path(found[1])


@pytest.mark.parametrize("check_numerics", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("spoil", ["advantage", "return", "loss", "gradient"])
def test_replay_repeats_the_failed_update(spoil, precision, check_numerics, tmp_path):
    model = make(spoil, debug={"check_numerics": check_numerics}, normalization={"rewards": True}, target_kl=1e9)
    path = fail(model, tmp_path, precision=precision)
    assert path == tmp_path / "failed-update-0.pt"
    failed = FailedUpdate.load(path)
    assert type(failed.module) is Sabotaged
    assert (failed.loss, failed.env_steps, failed.checkpoint_path) == ("loss", 0, None)
    assert_equal_parameters(failed.module, model.snapshot)
    failed.module.minibatch = 2
    again = failed.replay()
    not_finite = {name for name, value in again.items() if value != value or abs(value) == float("inf")}
    assert set(failed.terms) & not_finite
    assert any(not parameter.grad.isfinite().all() for parameter in failed.module.parameters())
    assert_equal_parameters(failed.module, model.snapshot)
    failed.module.minibatch = 2
    assert failed.replay() == pytest.approx(again, rel=0, abs=0, nan_ok=True)
    if spoil == "advantage":
        assert failed.minibatch.advantages.isnan().nonzero().tolist() == [[0]]


def test_replay_computes_kl_divergence_from_the_acting_policy(tmp_path):
    torch.manual_seed(0)
    model = BrokenPenalty(VECTOR, DISCRETE, learning_rate=0.1, **OPTIONS)
    failed = FailedUpdate.load(fail(model, tmp_path))
    assert model.divergences[0] < 1e-6 < 1e-3 < model.divergences[2]
    assert math.isfinite(failed.replay()["grad_norm"])  # only the penalty of the third minibatch is broken
    assert failed.module.divergences == pytest.approx(model.divergences[2:], rel=1e-6)


def test_replay_uses_scheduled_values_of_the_failed_update(tmp_path):
    line = {"kind": "linear", "start": 0.4, "end": 0.0}
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[1], clip_range=line, entropy_coef=line, **OPTIONS)
    failed = FailedUpdate.load(fail(model, tmp_path, 2, callbacks=[EnvStepLimit(192)]))
    failed.replay()
    for name in ("clip_range", "entropy_coef"):
        assert getattr(failed.module, name) == getattr(model, name) == pytest.approx(0.3)


def test_replay_uses_rows_of_the_failing_minibatch(tmp_path):
    seen = []

    class Watched(Sabotaged):
        def loss(self, batch):
            seen.append(batch.observations.clone())
            return super().loss(batch)

    torch.manual_seed(0)
    model = Watched(VECTOR, DISCRETE, spoil="return", **OPTIONS)
    path = fail(model, tmp_path)
    content = torch.load(path, weights_only=True)
    content["algorithm"] = "tests.training.test_numerics.Sabotaged"  # which can be imported
    torch.save(content, path)
    failed = FailedUpdate.load(path)
    failed.replay()
    assert torch.equal(failed.minibatch.observations, seen[2])


def test_replay_of_an_update_from_the_command_line(tmp_path):
    """LightningCLI adds the class path and a constructor function to the hyperparameters."""
    path = fail(make("return"), tmp_path)
    content = torch.load(path, weights_only=True)
    names = {"_class_path": "lightning_rl.PPO", "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    torch.save(content | {"hyper_parameters": content["hyper_parameters"] | names}, path)
    assert not math.isfinite(FailedUpdate.load(path).replay()["grad_norm"])


def test_failed_update_names_newest_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[1], **OPTIONS)
    options = {"enable_checkpointing": True, "callbacks": [LastCheckpoint(tmp_path)], "max_epochs": 2}
    failed = FailedUpdate.load(fail(model, tmp_path, limit_train_batches=1, **options))
    assert failed.checkpoint_path == str(tmp_path / "last.ckpt")
    assert failed.env_steps == torch.load(failed.checkpoint_path, weights_only=True)["lightning_rl"]["env_steps"] > 0


@pytest.mark.parametrize("last_is_first", [True, False])
def test_failed_update_names_last_checkpoint_beside_an_older_best_one(last_is_first, tmp_path):
    best = ModelCheckpoint(tmp_path, "best", monitor="epoch", mode="min", save_on_train_epoch_end=True)
    callbacks = [LastCheckpoint(tmp_path), best] if last_is_first else [best, LastCheckpoint(tmp_path)]
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[2], **OPTIONS)
    options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": 3, "limit_train_batches": 1}
    assert FailedUpdate.load(fail(model, tmp_path, **options)).checkpoint_path == str(tmp_path / "last.ckpt")


def test_failed_update_names_a_checkpoint_within_an_epoch_that_is_newer_than_the_last_of_an_epoch(tmp_path):
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[3], **OPTIONS)
    options = {"callbacks": [EnvStepCheckpoint(1, tmp_path), LastCheckpoint(tmp_path)], "enable_checkpointing": True}
    failed = FailedUpdate.load(fail(model, tmp_path, max_epochs=2, limit_train_batches=2, num_rollouts=2, **options))
    assert failed.checkpoint_path == str(tmp_path / f"step={failed.env_steps}.ckpt")


def test_skipped_update_changes_no_parameters_or_statistics(tmp_path):
    logger = MemoryLogger()
    torch.manual_seed(0)
    options = {"normalization": {"observations": True, "rewards": True}, "debug": {"max_skipped_updates": 1}} | OPTIONS
    # Normalization over the rollout makes all minibatches of a broken one NaN.
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[0, 2], advantages={"normalize": "rollout"}, **options)
    before = parameters_of(model)
    rollouts = [random_rollout(model.policy) for _ in range(4)]
    trainer = make_trainer(logger=logger, log_every_n_steps=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="skipped, 1 of at most debug.max_skipped_updates=1 times in a row"):
        trainer.fit(model, FixedRollouts(rollouts, model))
    assert model.policy_version == 4
    assert [value for _, value in logger.rows("train/skipped_updates")] == [1, 0, 1, 0]
    assert trainer.global_step == 2 * 3 * model.num_minibatches
    rows = rollouts[0].num_steps
    assert model.policy.observation_normalizer.moments.count == model.reward_normalizer.moments.count == 2 * rows
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert list(tmp_path.glob("failed-update*")) == []


def test_too_many_skipped_updates_in_a_row_end_the_run(tmp_path):
    torch.manual_seed(0)
    model = BrokenRollouts(VECTOR, DISCRETE, broken=[0, 1, 3, 4, 5], debug={"max_skipped_updates": 2}, **OPTIONS)
    with pytest.warns(UserWarning, match="2 of at most debug.max_skipped_updates=2"):
        path = fail(model, tmp_path, num_rollouts=8)
    assert model.policy_version == 5
    assert path.name == f"failed-update-{model.env_steps}.pt"


def test_count_of_skipped_updates_is_resumed(tmp_path):
    from lightning_rl import LastCheckpoint

    def build() -> BrokenRollouts:
        torch.manual_seed(0)
        return BrokenRollouts(VECTOR, DISCRETE, broken=[0, 1], debug={"max_skipped_updates": 1}, **OPTIONS)

    model = build()
    trainer = make_trainer(callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True, limit_train_batches=1)
    with pytest.warns(UserWarning, match="1 of at most"):
        trainer.fit(model, FixedRollouts([random_rollout(model.policy)], model))
    resumed = build()
    rollout = random_rollout(resumed.policy)
    trainer = make_trainer(default_root_dir=tmp_path, max_epochs=2)
    with pytest.raises(FloatingPointError):
        trainer.fit(resumed, FixedRollouts([rollout], resumed), ckpt_path=str(tmp_path / "last.ckpt"))


def test_original_failure_is_raised_if_update_cannot_be_saved(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = make("return")
    with pytest.raises(FloatingPointError, match=r"value_loss is inf .*; it could not be saved$"):
        make_trainer(default_root_dir=tmp_path / "file").fit(
            model, FixedRollouts([random_rollout(model.policy)], model)
        )


class Unsaved(PPO):
    """Takes a step down a function that no method of the module is, or on rows that are no batch."""

    def __init__(self, *args: Any, how: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.how = how

    def update(self, rollout: Rollout) -> None:
        batch = self.batch(rollout)
        if self.how == "rows":
            self.descend(self.infinite, (batch, 1))
        else:
            losses = {"lambda": lambda rows: self.infinite((rows, 1)), "partial": partial(self.loss_of, math.inf)}
            self.descend(losses[self.how], batch)

    def infinite(self, rows: Any) -> Loss:
        return self.loss_of(math.inf, rows[0])

    def loss_of(self, factor: float, batch: Batch) -> Loss:
        loss = self.loss(batch)
        loss.add("extra", factor * batch.advantages)
        return loss


@pytest.mark.parametrize("how", ["rows", "lambda", "partial"])
def test_failure_of_a_loss_that_cannot_be_saved_is_raised(how, tmp_path):
    model = Unsaved(VECTOR, DISCRETE, how=how, **OPTIONS)
    with pytest.raises(FloatingPointError, match=r"extra is .*; it could not be saved$"):
        make_trainer(default_root_dir=tmp_path).fit(model, FixedRollouts([random_rollout(model.policy)], model))
    assert list(tmp_path.glob("*.pt")) == []


def test_other_files_are_rejected_as_failed_update(tmp_path):
    with pytest.raises(ConfigurationError, match=r"does not exist: expected a file that a failed update has left"):
        FailedUpdate.load(tmp_path / "nothing.pt")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(
        ConfigurationError, match=r"is another kind of file: expected a file that a failed update has left"
    ):
        FailedUpdate.load(tmp_path / "other.pt")


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_invalid_max_skipped_updates_is_rejected(value):
    with pytest.raises(
        ConfigurationError, match=r"debug.max_skipped_updates=.* is not valid: expected an integer of at least 0"
    ):
        PPO(VECTOR, DISCRETE, debug={"max_skipped_updates": value})


class Interrupts(Callback):
    """Raises during the third update, when replay and normalizers already have its rollout."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        kept = pl_module.replays.get("rollouts", ())
        if pl_module.policy_version == 2 and (not isinstance(pl_module, PPG) or len(kept) == 3):
            raise RuntimeError("boom")


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG, CLEAR])
def test_next_run_rolls_back_an_update_interrupted_by_an_exception(algorithm):
    """The replay is full with the rollout whose auxiliary phase failed."""
    of_phases = {"num_policy_iterations": 3, "num_minibatches": 1, "num_aux_epochs": 1}
    options = {PPG: of_phases, OffPolicyPPG: of_phases | {"updates_per_rollout": 1, "batch_size": 8}, CLEAR: {}}
    data = make_data()
    model = algorithm(
        data.observation_space,
        data.action_space,
        policy={"hidden_sizes": (8,)},
        normalization={"observations": True, "update": "before"},
        **options[algorithm],
    )
    with pytest.raises(RuntimeError, match="boom"):
        make_trainer(max_epochs=2, callbacks=[Interrupts()]).fit(model, data)
    assert model.policy.observation_normalizer.moments.count == 3 * 32
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())  # as moves between devices do
    make_trainer(max_epochs=0).fit(model, data)  # starts, but learns nothing
    assert model.policy.observation_normalizer.moments.count == 2 * 32
    sizes = {name: len(replay) for name, replay in model.replays.items()}
    assert sizes == {PPG: {"rollouts": 2}, OffPolicyPPG: {"rollouts": 2, "policy": 64, "value": 64}}.get(
        algorithm, {"unrolls": 4}
    )
    make_trainer(max_epochs=1).fit(model, data)
    assert model.policy_version == 4
    assert model.policy.observation_normalizer.moments.count == 4 * 32
