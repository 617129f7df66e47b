"""Non-finite losses and gradients never change the weights, and the error names the term."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl import PPO, Batch
from lightning_rl.training.loss import Loss
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    Recorder,
    assert_equal_parameters,
    make_trainer,
    merged,
    parameters_of,
    precision_options,
    random_rollout,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.usefixtures("in_tmp_path"),  # where a failed update is saved
]
NAN, INF = float("nan"), float("inf")


class Sabotaged(PPO):
    """Makes a term of the third minibatch non-finite, and keeps the parameters before it."""

    def __init__(self, *args: Any, spoil: str = "nothing", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spoil = spoil
        self.minibatch = 0
        self.snapshot: dict[str, Tensor] = {}
        self.optimizer_steps: list[float] = []

    def loss(self, batch: Batch) -> Loss:
        self.minibatch += 1
        if self.minibatch != 3:
            return super().loss(batch)
        self.snapshot = parameters_of(self)
        self.optimizer_steps = [float(state["step"]) for state in self.optimizers().state.values()]
        match self.spoil:
            case "advantage":
                batch.advantages[0] = NAN
            case "return":
                batch.returns[0] = INF
            case "entropy":  # of weight 0 in the loss
                batch.observations[0] = NAN
        loss = super().loss(batch)
        match self.spoil:
            case "loss":  # infinite, with a gradient that is finite
                loss.add_scalar(None, torch.tensor(INF))
            case "gradient":  # infinite, with a loss that is finite
                loss.add_scalar(None, (0 * self.policy.value_head.bias).sum().abs().sqrt())
        return loss


def make(spoil: str, **options: Any) -> Sabotaged:
    torch.manual_seed(0)
    return Sabotaged(VECTOR, DISCRETE, spoil=spoil, num_epochs=3, **merged({"policy": {"hidden_sizes": (8,)}}, options))


def rollouts(model: PPO) -> FixedRollouts:
    return FixedRollouts([random_rollout(model.policy)], model)


@pytest.mark.parametrize("check_numerics", [False, True])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("advantage", "policy_loss is nan"),
        ("return", "value_loss is inf"),
        ("entropy", "policy_loss is nan"),
        ("loss", "loss is inf"),
        ("gradient", "grad_norm is (nan|inf)"),
    ],
)
def test_non_finite_minibatch_does_not_change_weights(spoil, named, check_numerics):
    model = make(spoil, debug={"check_numerics": check_numerics}, normalization={"observations": True, "rewards": True})
    with pytest.raises(
        FloatingPointError, match=f"^{named} in the update from rollout 0 .environment step 0.; the para"
    ):
        make_trainer().fit(model, rollouts(model))
    assert model.snapshot, "the third minibatch was reached"
    assert_equal_parameters(model, model.snapshot)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [float(state["step"]) for state in model.optimizers().state.values()] == model.optimizer_steps == [2.0] * 8
    assert model.policy.observation_normalizer.moments.count == model.reward_normalizer.moments.count == 0
    assert (model.env_steps, model.policy_version) == (0, 0)


@pytest.mark.parametrize(
    ("spoil", "named", "init_scale"),
    [("return", "value_loss is inf", 2**10), ("loss", "loss is inf", 2**10), ("gradient", "grad_norm is (nan|inf)", 1)],
)
def test_a_loss_or_an_unscaled_gradient_that_is_not_finite_is_an_error_in_16_mixed(spoil, named, init_scale):
    """Only an overflow of a scaled gradient is none; see tests/test_precision.py."""
    model = make(spoil)
    with pytest.raises(FloatingPointError, match=f"^{named} in the update from rollout 0"):
        make_trainer(**precision_options("16-mixed", init_scale=init_scale)).fit(model, rollouts(model))
    assert_equal_parameters(model, model.snapshot)


@pytest.mark.parametrize("check_numerics", [False, True])
def test_check_numerics_stops_at_the_minibatch(check_numerics):
    model = make("return", debug={"check_numerics": check_numerics})
    steps = []
    descend = model.descend
    model.descend = lambda *a, **k: (steps.append("begun"), descend(*a, **k), steps.append("done"))  # type: ignore[method-assign, return-value]
    with pytest.raises(FloatingPointError):
        make_trainer().fit(model, rollouts(model))
    assert steps == ["begun", "done"] * 2 + (["begun"] if check_numerics else ["begun", "done"])


@pytest.mark.parametrize("field", ["rewards", "values", "log_probs"])
def test_non_finite_rollout_changes_nothing(field):
    model = make("nothing", num_minibatches=1)
    loader = rollouts(model)
    getattr(loader.rollouts[0], field)[2, 1] = NAN
    before = parameters_of(model)
    with pytest.raises(FloatingPointError, match=r"(policy|value)_loss is nan"):
        make_trainer().fit(model, loader)
    assert_equal_parameters(model, before)


def test_undefined_explained_variance_is_no_error():
    model, recorder = make("nothing", advantages={"normalize": "none"}), Recorder()
    loader = rollouts(model)
    loader.rollouts[0].values.fill_(0)
    loader.rollouts[0].next_values.fill_(0)
    loader.rollouts[0].rewards.fill_(0)
    trainer = make_trainer(callbacks=[recorder], log_every_n_steps=1)
    trainer.fit(model, loader)
    assert recorder.column("explained_variance")[0] != recorder.column("explained_variance")[0]
    assert "train/explained_variance" not in trainer.callback_metrics
    assert "train/policy_loss" in trainer.callback_metrics


@pytest.mark.parametrize(("target_kl", "updates"), [(1e-9, 1), (1e9, 12)])
def test_target_kl_stops_the_updates(target_kl, updates):
    """The ratios of the first minibatch are 1, so its update is always made."""
    torch.manual_seed(0)
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, num_epochs=3, target_kl=target_kl, learning_rate=1e-2)
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder])
    trainer.fit(model, FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model))
    assert trainer.global_step == updates
    assert model.policy_version == 1
    assert (recorder.column("approx_kl")[0] > 1.5 * target_kl) == (updates == 1)
