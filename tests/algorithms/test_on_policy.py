"""On-policy means on-policy: version check, ratio check, frozen normalisers, and evaluation that leaves no trace."""

from typing import Any

import pytest
import torch

from lightning_rl import PPO, RolloutDataModule
from tests.helpers import Recorder, assert_equal_parameters, make_data, make_model, make_trainer, parameters_of

NORMALIZED = {"normalization": {"observations": True, "rewards": True}}
SMALL = {"num_envs": 4, "rollout_length": 32, "rollouts_per_epoch": 4, "seed": 1, "evaluation": {"episodes": 2}}


class UnsizedLoader:
    """Has no `__len__`, so that Lightning fetches one batch ahead."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __iter__(self):
        for _ in range(self.data.rollouts_per_epoch):
            yield self.data.collect()


class UnsizedData(RolloutDataModule):
    def train_dataloader(self) -> Any:
        return UnsizedLoader(self)


class Unsuspecting(PPO):
    """Believes that every rollout is its own."""

    def training_step(self, rollout, batch_idx):
        rollout.policy_version = self.policy_version
        super().training_step(rollout, batch_idx)


def test_rollouts_fetched_ahead_of_an_unsized_loader_are_refused():
    data = UnsizedData("CartPole-v1", **SMALL)
    model = make_model(data)
    with pytest.raises(RuntimeError, match=r"version 0 of the policy, not with version 1: .* must have a length"):
        make_trainer().fit(model, data)
    assert model.policy_version == 1


@pytest.mark.parametrize(("data_class", "is_on_policy"), [(UnsizedData, False), (RolloutDataModule, True)])
def test_first_ratio_error_detects_rollouts_of_old_parameters(data_class, is_on_policy):
    """Fetched ahead, a rollout also overwrites the storage of the one before it, so that even the first is wrong."""
    data = data_class("CartPole-v1", **SMALL)
    torch.manual_seed(0)
    model = Unsuspecting(data.observation_space, data.action_space, learning_rate=3e-3, policy={"hidden_sizes": (16,)})
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    errors = recorder.column("first_ratio_error")
    assert (max(errors) <= 1e-6) if is_on_policy else (min(errors) > 1e-3)


def test_each_epoch_uses_every_step_of_its_rollout_once():
    """Nothing is left over for a later one, whatever the numbers of environments, steps, minibatches and epochs are."""
    learned: list[torch.Tensor] = []

    class Watched(PPO):
        def loss(self, batch):
            learned.append(batch.observations.clone())
            return super().loss(batch)

    rollouts = 0

    class Compare(Recorder):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            nonlocal rollouts
            frames = batch.observations[:-1].flatten(0, 1)
            assert len(frames.unique(dim=0)) == len(frames) == 3 * 20
            for epoch in range(3):
                rows = torch.cat(learned[5 * epoch : 5 * epoch + 5])
                assert torch.equal(rows.sort(0)[0], frames.sort(0)[0])
                assert torch.equal(rows.unique(dim=0), frames.unique(dim=0))
            assert len(learned) == 15
            learned.clear()
            rollouts += 1

    data = make_data(num_envs=3, rollout_length=20, rollouts_per_epoch=4)
    model = Watched(
        data.observation_space, data.action_space, policy={"hidden_sizes": (8,)}, num_epochs=3, num_minibatches=5
    )
    make_trainer(callbacks=[Compare()]).fit(model, data)
    assert rollouts == 4


def test_normalizers_are_frozen_from_first_action_to_end_of_update():
    data = make_data(rollouts_per_epoch=3)
    model = make_model(data, **NORMALIZED)
    counts: list[tuple[float, float]] = []

    class Spy(Recorder):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            moments = (pl_module.policy.observation_normalizer.moments, pl_module.reward_normalizer.moments)
            counts.append((pl_module.env_steps, *(m.count.item() for m in moments)))

    make_trainer(callbacks=[Spy()]).fit(model, data)
    assert counts == [(0, 0, 0), (32, 32, 32), (64, 64, 64)]


def test_evaluation_does_not_update_normalizers():
    data = make_data()
    model = make_model(data, **NORMALIZED)
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(model, data)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(model, data)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {"limit_val_batches": 1, "val_check_interval": 1},
        {"limit_val_batches": 1, "num_sanity_val_steps": 2},
        {"profiler": "simple"},
        {"log_every_n_steps": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [True, False])
def test_validation_and_logging_do_not_change_the_trained_weights(options, sampling):
    def train(**options: Any) -> PPO:
        data = make_data(rollouts_per_epoch=3, evaluation={"deterministic": not sampling})
        model = make_model(data, **NORMALIZED)
        make_trainer(**options).fit(model, data)
        return model

    watched, alone = train(**options), train()
    assert_equal_parameters(watched, parameters_of(alone))
    assert watched.state_dict().keys() == alone.state_dict().keys()
    assert all(torch.equal(x, watched.state_dict()[name]) for name, x in alone.state_dict().items())
