"""What is done differently for XLA, as far as it shows on a machine without it; `tests/xla/` has the rest."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_rl import EnvStepLimit, LastCheckpoint
from lightning_rl.policies.actor_critic import ActorCritic, copy_to_cpu
from lightning_rl.training.gradient_steps import step_where
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    parameters_of,
)

XLA = torch.device("xla")


def on_xla(**trainer_options):
    """A model that believes to be on XLA, attached to a Trainer."""
    data = make_data()
    model = make_model(data)
    model.trainer = make_trainer(**trainer_options)
    model._device = XLA
    return model, data


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_a_step_is_taken_back_whole_or_not_at_all(optimizer_class):
    torch.manual_seed(0)
    gradients = torch.randn(4, 3)
    results = []
    for steps in ([0, 1, 3], [0, 1, 2, 3]):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = optimizer_class([parameter], lr=0.1)
        for index in steps:
            parameter.grad = gradients[index]
            if index == 0:
                optimizer.step()
            else:
                step_where(torch.tensor(index != 2), optimizer, optimizer.step)
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    without, taken_back = results
    assert len(without) > 1
    assert all(torch.equal(one, other) for one, other in zip(without, taken_back, strict=True))


def test_a_copy_of_a_policy_is_its_own_and_acts_the_same():
    torch.manual_seed(0)
    policy = ActorCritic(VECTOR, DISCRETE, hidden_sizes=(8,), normalize_observations=True)
    policy.observation_normalizer.update(torch.randn(50, 3))
    before = parameters_of(policy)
    copied = copy_to_cpu(policy)
    assert {name for name, _ in copied.named_parameters()} == set(before)
    observations = torch.randn(5, 3)
    assert torch.equal(copied.value(observations), policy.value(observations))
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            tensor += 1
    assert_equal_parameters(policy, before)
    assert policy.observation_normalizer.moments.count == 50


def test_environments_see_a_copy_of_the_policy_on_the_cpu():
    model, data = on_xla()
    data.trainer = model.trainer
    model.trainer.strategy.connect(model)
    policy, _, _, device = data._policy()
    assert device == torch.device("cpu")
    assert policy is not model.policy
    assert_equal_parameters(policy, parameters_of(model.policy))
    model._device = torch.device("cpu")
    assert data._policy()[0] is model.policy


def test_the_default_optimizer_counts_its_steps_on_the_device():
    model, _ = on_xla()
    assert model.configure_optimizers().defaults["capturable"] is True
    assert not model.configure_optimizers().defaults["fused"]


def test_only_full_precision_is_accepted():
    model, _ = on_xla(precision="bf16-mixed")
    with pytest.raises(ConfigurationError, match="precision='bf16-mixed' is not valid: expected one of 32-true"):
        model.on_fit_start()


def test_what_is_logged_does_not_go_to_the_device(monkeypatch):
    model, _ = on_xla()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(LightningModule, "log", lambda self, name, value, **_: seen.append(value))
    model.metrics.logged(model, on_epoch=False)
    model.metrics.eval_episodes.update([1.5], [3])
    monkeypatch.setattr(LightningModule, "log_dict", lambda self, values, **_: seen.extend(values.values()))
    model.metrics.log_evaluation(model, "val")
    assert len(seen) > 3
    assert {value.device for value in seen} == {torch.device("cpu")}


def test_a_run_goes_on_from_a_checkpoint_of_another_kind_of_device(tmp_path):
    """Whose Adam was capturable rather than fused."""

    def train(max_env_steps, ckpt_path=None):
        data = make_data(rollouts_per_epoch=1)
        model = make_model(data)
        callbacks = [EnvStepLimit(max_env_steps), LastCheckpoint(tmp_path)]
        trainer = make_trainer(max_epochs=-1, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        return model

    train(32)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group |= {"fused": None, "capturable": True}
    torch.save(checkpoint, tmp_path / "xla.ckpt")
    resumed = train(64, tmp_path / "xla.ckpt")
    (group,) = resumed.optimizers().param_groups
    assert (group["fused"], group["capturable"]) == (True, False)
    assert_equal_parameters(resumed, parameters_of(train(64, None)))
