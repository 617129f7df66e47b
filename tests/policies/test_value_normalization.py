"""Value normalization: values stay in units of return while the moments of the head change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_rl import A2C, PPO
from lightning_rl.policies.actor_critic import ActorCritic, copy_to_cpu
from lightning_rl.policies.normalization import PopArt, ValueNormalizer, make_value_normalizer
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.loss import Loss
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_model,
    make_trainer,
    random_rollout,
)
from tests.vectors.load import load

DING = load("ppg_vtrace/ding_rl_utils")["running_mean_std"]["steps"]
OBSERVATIONS = torch.linspace(-2, 2, 60).view(20, 3)
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def make_policy(kind: Any) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(VECTOR, CONTINUOUS, hidden_sizes=(8,), value_normalization=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_popart_preserves_values_when_moments_change(dtype):
    policy = make_policy("popart").to(dtype)
    observations = OBSERVATIONS.to(dtype)
    before, weight = policy.value(observations), policy.value_head.weight.clone()
    for scale, shift in ((100.0, 50.0), (0.1, -3.0), (1.0, 1000.0)):
        returns = scale * torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=dtype) + shift
        policy.value_normalizer.update(returns, policy.value_heads)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(policy.value(observations), before, rtol=tolerance, atol=1e2 * tolerance)
    assert not torch.allclose(policy.value_head.weight, weight)


def test_running_std_rescales_values_when_it_changes():
    policy = make_policy("running_std")
    before, weight = policy.value(OBSERVATIONS), policy.value_head.weight.clone()
    policy.value_normalizer.update(torch.tensor([1.0, 9.0]), policy.value_heads)  # a standard deviation of 4
    torch.testing.assert_close(policy.value(OBSERVATIONS), 4 * before)
    assert torch.equal(policy.value_head.weight, weight)


def test_value_units_by_hand():
    head = torch.nn.Linear(1, 1)
    for normalizer, expected in ((ValueNormalizer(), [8.0, -4.0]), (PopArt(), [13.0, 1.0])):
        normalizer.update(torch.tensor([1.0, 9.0]), [head])  # mean 5, standard deviation 4
        assert normalizer.denormalize(torch.tensor([2.0, -1.0])).tolist() == pytest.approx(expected)
        assert normalizer(torch.tensor([8.0, -2.0])).tolist() == pytest.approx([2.0, -0.5])


def test_running_std_equals_ding():
    """DI-engine begins with a ten-thousandth of an observation."""
    normalizer = ValueNormalizer()
    assert float(normalizer.denormalize(torch.ones(()))) == pytest.approx(DING[0]["std"])
    for step in DING[1:]:
        normalizer.update(torch.tensor(step["batch"], dtype=torch.float64), [torch.nn.Linear(1, 1)])
        assert float(normalizer.denormalize(torch.ones((), dtype=torch.float64))) == pytest.approx(
            step["std"], rel=1e-4
        )


def learn(algorithm: Any, num_rollouts: int, **options: Any) -> tuple[Any, Recorder]:
    torch.manual_seed(0)
    model = algorithm(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, **options).double()
    rollouts = [random_rollout(make_policy(None).double(), seed=seed) for seed in range(num_rollouts)]
    for rollout in rollouts:
        rollout.actions = torch.zeros(rollout.shape, dtype=torch.long)
        rollout.rewards = 10 * rollout.rewards
    recorder = Recorder()
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, FixedRollouts(rollouts, model))
    return model, recorder


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("kind", ["running_std", "popart"])
def test_value_normalizer_is_updated_after_each_rollout(algorithm, kind):
    """The first update has mean 0 and standard deviation 1, as without normalization."""
    options: dict[str, Any] = {"gamma": 0.9}
    if algorithm is PPO:
        options |= {"num_epochs": 1, "num_minibatches": 1}
    plain, _ = learn(algorithm, 1, **options)
    normalized, _ = learn(algorithm, 1, normalization={"values": kind}, **options)
    observations = OBSERVATIONS.double()
    deviation = 1 / normalized.policy.value_normalizer.moments.scale(1e-8)
    assert deviation > 5
    factor = deviation if kind == "running_std" else 1.0
    torch.testing.assert_close(normalized.policy.value(observations), factor * plain.policy.value(observations))
    if kind == "popart":  # the same values: the loss is equal up to its units
        rows = [learn(algorithm, 2, **more, **options)[1].rows for more in ({}, {"normalization": {"values": kind}})]
        assert rows[1][0] == pytest.approx(rows[0][0])
        assert rows[1][1]["value_loss"] == pytest.approx(rows[0][1]["value_loss"] / float(deviation) ** 2)


def test_value_normalizer_is_updated_with_value_targets():
    model, _ = learn(PPO, 1, normalization={"values": "popart"}, num_epochs=1)
    rollout = random_rollout(make_policy(None).double(), seed=0)
    rollout.rewards = 10 * rollout.rewards
    returns = (model.estimator.gae(rollout, model.estimator.gae_lambda) + rollout.values).flatten()
    moments = model.policy.value_normalizer.moments
    assert float(moments.mean) == pytest.approx(float(returns.mean()))
    assert float(moments.variance) == pytest.approx(float(returns.var(correction=0)))


@pytest.mark.parametrize("kind", ["running_std", "popart"])
@pytest.mark.parametrize("shared", [False, True])
def test_value_normalization_keeps_rollouts_on_policy(kind, shared):
    data, logger = make_data(rollouts_per_epoch=6), MemoryLogger()
    model = make_model(data, normalization={"values": kind, "rewards": True}, policy={"shared_encoder": shared})
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    errors = [value for _, value in logger.rows("train/first_ratio_error")]
    assert len(errors) == 6 and max(errors) <= 1e-6
    observations = torch.randn(5, 4)
    assert torch.equal(copy_to_cpu(model.policy).value(observations), model.policy.value(observations))
    assert model.policy.value_normalizer.moments.count == 6 * 32
    assert "policy.value_normalizer.moments.mean" in model.state_dict()


def test_value_normalization_without_value_loss_raises():
    class Silent(PPO):
        def loss(self, batch: Batch) -> Loss:
            distribution, _ = self.actor_critic(batch)
            loss = self.new_loss(batch)
            self.add_policy_terms(loss, distribution)
            return loss

    torch.manual_seed(0)
    model = Silent(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, normalization={"values": "popart"})
    with pytest.raises(RuntimeError, match=r"normalization.values needs a value loss: call loss\.add_value"):
        make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))


def test_unknown_value_normalization_raises():
    with pytest.raises(ConfigurationError, match=r"normalization.values='std' .* null or one of running_std, popart"):
        PPO(VECTOR, DISCRETE, normalization={"values": "std"})
    assert make_value_normalizer(None) is None
