"""PPO from rollouts of earlier policies: what is corrected, and that nothing is where nothing is to be."""

from typing import Any

import pytest
import torch

from lightning_rl import IMPALA, PPO, OverlappedPPO, PPOKLPenalty
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    assert_equal_parameters,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SGD = {"optimizer": {"name": "torch.optim.SGD", "max_grad_norm": None}, "learning_rate": 0.1}


def make(algorithm: Any = PPO, **options: Any) -> Any:
    torch.manual_seed(0)
    return algorithm(VECTOR, DISCRETE, **merged({"policy": {"hidden_sizes": (8,)}}, SGD, options)).double()


class OverlappedKLPenalty(OverlappedPPO, PPOKLPenalty):
    """With a penalty besides."""


class Lagging:
    def __init__(self, rollouts, model, lag):
        self.rollouts, self.model, self.lag = rollouts, model, lag

    def __len__(self):
        return len(self.rollouts)

    def __iter__(self):
        for rollout in self.rollouts:
            rollout.policy_version = self.model.policy_version - self.lag
            yield rollout


def learn(model, rollouts, lag=0):
    make_trainer(precision="64-true").fit(model, Lagging(rollouts, model, lag))
    return model.losses


def moved(model, by=0.3):
    """The same model after it has learned something else."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn_like(parameter)
    return model


def collected(memory=None):
    """Rollouts of the policy that `make` begins with."""
    data = make_data("CartPole-v1", rollout_length=24, num_envs=3, env={"max_episode_steps": 9}, rollouts_per_epoch=1)
    torch.manual_seed(0)
    policy = {"hidden_sizes": (8,), "memory": memory}
    model = OverlappedPPO(data.observation_space, data.action_space, policy=policy, **SGD)
    trainer = make_trainer(precision="64-true")
    trainer.strategy.connect(model.double())
    data.trainer = model.trainer = trainer
    try:
        return model, data.collect()
    finally:
        data.teardown("fit")


@pytest.mark.parametrize(("algorithm", "overlapping"), [(PPO, OverlappedPPO), (PPOKLPenalty, OverlappedKLPenalty)])
@pytest.mark.parametrize("valid", [False, True])
def test_on_policy_overlapped_ppo_equals_ppo(algorithm, overlapping, valid):
    options = {"num_epochs": 3, "num_minibatches": 4, "clipping": {"value": 0.2}}
    plain, overlapped = make(algorithm, **options), make(overlapping, **options)
    rollout = random_rollout(plain.policy, off_policy=0, valid=valid)
    learn(plain, [rollout])
    losses = learn(overlapped, [rollout])
    for name, parameter in overlapped.named_parameters():
        torch.testing.assert_close(parameter, dict(plain.named_parameters())[name], atol=1e-12, rtol=1e-12)
    assert losses["policy_lag"] == 0 and losses["importance_weight"] == pytest.approx(1)
    assert "first_ratio_error" not in losses


@pytest.mark.parametrize("valid", [False, True])
def test_first_step_of_overlapped_ppo_equals_impala(valid):
    """The ratio is 1, so that its gradient is the gradient of log π weighted by V-trace advantages."""
    options = {"entropy_coef": 0.01, "value_coef": 0.5, "gamma": 0.9}
    impala = make(IMPALA, vtrace_lambda=0.8, **options)
    rollout = random_rollout(impala.policy, valid=valid)
    whole = {"num_epochs": 1, "num_minibatches": 1, "advantages": {"normalize": "none"}}
    ppo = moved(make(OverlappedPPO, gae_lambda=0.8, **whole, **options))
    expected = learn(moved(impala), [rollout], lag=2)
    losses = learn(ppo, [rollout], lag=2)
    for name, parameter in ppo.named_parameters():
        torch.testing.assert_close(parameter, dict(impala.named_parameters())[name], atol=1e-12, rtol=1e-12)
    assert losses["policy_lag"] == 2
    assert losses["importance_weight"] == pytest.approx(expected["importance_weight"], rel=1e-12)
    assert abs(losses["importance_weight"] - 1) > 1e-3
    assert losses["clip_fraction"] == 0  # of the updates themselves, not of the lag


def test_the_rollout_keeps_the_log_probs_of_the_policy_that_acted():
    model = make(OverlappedPPO)
    rollout = random_rollout(model.policy)
    acted = rollout.log_probs.clone()
    now = moved(model).reevaluated(rollout)
    assert torch.equal(rollout.log_probs, acted) and rollout.log_rhos is None
    torch.testing.assert_close(now.log_rhos, now.log_probs - acted)
    torch.testing.assert_close(now.log_probs, model.policy.log_prob(rollout.observations[:-1], rollout.actions))
    torch.testing.assert_close(now.values, model.policy.value(rollout.observations[:-1]))


@pytest.mark.parametrize("algorithm", [OverlappedPPO, OverlappedKLPenalty])
def test_compute_loss_of_an_older_rollout_equals_the_first_loss_of_its_update(algorithm):
    model = make(algorithm, num_epochs=1, num_minibatches=1)
    rollout = random_rollout(model.policy)
    found = moved(model).compute_loss(rollout)
    logged = learn(model, [rollout], lag=1)
    assert found["policy_loss"] == pytest.approx(logged["policy_loss"], abs=1e-12)
    assert found["loss"] == pytest.approx(logged["loss"], abs=1e-12)
    assert found["approx_kl"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("memory", [None, {"kind": "lstm", "hidden_size": 5, "sequence_length": 8, "burn_in": 3}])
def test_recurrent_policies_reevaluate_their_own_rollout_exactly(memory):
    model, rollout = collected(memory)
    now = model.reevaluated(rollout)
    for name in ("log_probs", "values", "next_values"):
        torch.testing.assert_close(getattr(now, name), getattr(rollout, name), atol=1e-12, rtol=1e-12)
    assert now.log_rhos.abs().max() <= 1e-12
    before = parameters_of(moved(model))
    again = model.reevaluated(rollout)
    assert again.log_rhos.abs().max() > 0.01
    assert_equal_parameters(model, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"advantages": {"estimator": "monte_carlo"}},
            "advantages.estimator='monte_carlo'.*'gae': V-trace computes advantages",
        ),
        ({"advantages": {"value_target": "empirical"}}, "advantages.value_target='empirical'"),
        ({"advantages": {"recompute_values": True}}, "advantages.recompute_values=True"),
        ({"normalization": {"update": "before"}}, "normalization.update='before'.*'after': V-trace needs"),
    ],
)
def test_options_without_effect_in_overlapped_ppo_raise(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(OverlappedPPO, **options)


def test_ppo_rejects_older_rollouts():
    model = make()
    with pytest.raises(RuntimeError, match="version -1 of the policy, not with version 0"):
        learn(model, [random_rollout(model.policy)], lag=1)
