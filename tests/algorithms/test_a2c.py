"""A2C: its one step, and where it is the same as PPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_rl import A2C, PPO
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SMALL: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "optimizer": {"max_grad_norm": 0.5}, "learning_rate": 1e-2}


def learn(model: PPO | A2C, num_rollouts: int = 3, **trainer: Any) -> dict[str, torch.Tensor]:
    """Learn from the same rollouts, which the first parameters collected; return the parameters."""
    if trainer.get("precision") == "64-true":
        model.double()  # before it acts
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in range(num_rollouts)]
    make_trainer(**trainer).fit(model, FixedRollouts(rollouts, model))
    return parameters_of(model)


def test_one_step_by_hand():
    torch.manual_seed(0)
    options = merged(SMALL, {"optimizer": {"max_grad_norm": None}})
    model = A2C(VECTOR, DISCRETE, gae_lambda=0.9, value_coef=0.25, entropy_coef=0.1, **options)
    rollout = random_rollout(model.policy, off_policy=0.0)
    advantages = model.estimator.gae(rollout, 0.9)
    distribution, values = model.policy(rollout.observations[:-1])
    probabilities = distribution.logits.softmax(-1)
    log_probs = probabilities.log().gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    squares = 0.5 * (values - advantages - rollout.values) ** 2
    loss = (-log_probs * advantages + 0.25 * squares - 0.1 * entropy).mean()
    gradients = torch.autograd.grad(loss, list(model.policy.parameters()))
    expected = {}
    for (name, parameter), gradient in zip(model.policy.named_parameters(), gradients, strict=True):
        # RMSprop's first step from an average of zero.
        step = 1e-2 * gradient / ((0.01 * gradient**2).sqrt() + 1e-5)
        expected[f"policy.{name}"] = (parameter - step).detach()
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, FixedRollouts([rollout], model))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)
    assert recorder.column("entropy")[0] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert recorder.column("value_loss")[0] == pytest.approx(squares.mean().item(), rel=1e-5)
    assert recorder.column("first_ratio_error")[0] < 1e-6


@pytest.mark.parametrize("normalize", ["none", "minibatch", "rollout"])
@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS])
def test_a2c_equals_ppo_with_one_epoch_one_minibatch_and_no_clipping(action_space, normalize):
    """At a ratio of 1 the surrogate has the gradient of the log-probability: for the first step from each policy."""
    options = {"advantages": {"normalize": normalize}, "entropy_coef": 0.01, "gae_lambda": 0.95, **SMALL}
    rmsprop = {"optimizer": {"name": "torch.optim.RMSprop", "options": {"alpha": 0.99, "eps": 1e-5}}}
    whole = {"num_epochs": 1, "num_minibatches": 1, "clip_range": None}
    torch.manual_seed(0)
    a2c = A2C(VECTOR, action_space, **options)
    torch.manual_seed(0)
    ppo = PPO(VECTOR, action_space, **whole, **merged(options, rmsprop))
    one, other = learn(a2c, 1, precision="64-true"), learn(ppo, 1, precision="64-true")
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "shared",
    [
        {"normalization": {"observations": True, "rewards": True, "values": "popart"}},
        {
            "policy": {"memory": {"kind": "gru", "hidden_size": 4}},
            "advantages": {"value_target": "empirical"},
            "optimizer": {"l2": {"policy": 1e-3}},
        },
        {
            "optimizer": {"critic": {"learning_rate": 1e-3}},
            "learning_rate": {"kind": "linear", "start": 1e-2, "end": 0.0, "over": 99},
        },
    ],
)
def test_a_run_of_a2c_equals_a_run_of_ppo_with_shared_options(shared):
    """Every rollout is collected by the parameters that it changes, so that every ratio is 1."""
    common = {"optimizer": {"name": "torch.optim.SGD"}, "entropy_coef": 0.01, "gae_lambda": 0.9}
    options = merged(SMALL, common, shared)
    ends = []
    for cls, own in (
        (A2C, {}),
        (PPO, {"num_epochs": 1, "num_minibatches": 1, "clip_range": None, "advantages": {"normalize": "none"}}),
    ):
        data = make_data(rollout_length=8, rollouts_per_epoch=5)
        torch.manual_seed(0)
        model = cls(data.observation_space, data.action_space, **merged(options, own))
        before = parameters_of(model)
        make_trainer(precision="64-true").fit(model, data)
        ends.append(parameters_of(model))
    for name, parameter in ends[0].items():
        assert not torch.equal(parameter, before[name].to(parameter)), name
        torch.testing.assert_close(parameter, ends[1][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gae_lambda", 0.5),
        ("value_coef", 2.0),
        ("entropy_coef", 0.5),
        ("advantages", {"normalize": "rollout"}),
        ("learning_rate", 1e-3),
    ],
)
def test_every_option_changes_what_is_learned(option, value):
    def trained(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.cat([x.flatten() for x in learn(A2C(VECTOR, DISCRETE, **merged(SMALL, options))).values()])

    assert not torch.allclose(trained(), trained(**{option: value}), atol=1e-6)


def test_a2c_defaults_to_the_optimizer_of_the_paper():
    model = A2C(VECTOR, DISCRETE)
    made = model.configure_optimizers()
    assert isinstance(made, torch.optim.RMSprop)
    assert (made.defaults["lr"], made.defaults["alpha"], made.defaults["eps"]) == (7e-4, 0.99, 1e-5)
    model = A2C(VECTOR, DISCRETE, optimizer={"name": "torch.optim.Adam"})
    assert isinstance(model.configure_optimizers(), torch.optim.Adam)


def test_a2c_makes_one_on_policy_update_per_rollout():
    logger = MemoryLogger()
    data = make_data(rollout_length=5, rollouts_per_epoch=6)
    model = A2C(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)})
    trainer = make_trainer(logger=logger, log_every_n_steps=1, max_epochs=2)
    trainer.fit(model, data)
    assert trainer.global_step == model.policy_version == 12
    errors = [value for _, value in logger.rows("train/first_ratio_error")]
    assert len(errors) == 12 and max(errors) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gae_lambda": 1.5}, "gae_lambda=1.5"),
        ({"value_coef": -1}, "value_coef=-1"),
        ({"entropy_coef": "x"}, "entropy_coef='x'"),
        ({"advantages": {"normalize": True}}, "advantages.normalize=True"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ConfigurationError, match=f"{message} is not valid: expected"):
        A2C(VECTOR, DISCRETE, **options)
