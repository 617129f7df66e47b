"""PPO's updates, option by option, against the slow implementation of `slow_ppo`."""

import functools
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rl import PPO, EnvStepLimit
from lightning_rl.functional import normalize_rows
from tests.algorithms.slow_ppo import DEFAULTS, SlowPPO
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    Recorder,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SPACES = {"discrete": DISCRETE, "continuous": CONTINUOUS}
PRECISIONS = {"32-true": (torch.float32, 1e-6), "64-true": (torch.float64, 1e-12)}
ROWS = 48  # of each of the two rollouts

# Options of PPO, and the corresponding options of the slow implementation where they differ.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "clip_range": ({"clip_range": 0.1}, {}),
    "value_clipping": ({"clipping": {"value": 0.1}}, {}),
    "value_coef": ({"value_coef": 2.0}, {}),
    "entropy_coef": ({"entropy_coef": 0.1}, {}),
    "advantages_of_rollout": ({"advantages": {"normalize": "rollout"}}, {}),
    "advantages_as_they_are": ({"advantages": {"normalize": "none"}}, {}),
    "no_gradient_clipping": ({"optimizer": {"max_grad_norm": None}}, {}),
    "target_kl": ({"target_kl": 0.04}, {}),
    "on_truncation": ({"advantages": {"on_truncation": "terminal"}}, {}),
    "gae_lambda": ({"gae_lambda": 0.0}, {}),
    "gamma": ({"gamma": 0.5}, {}),
    "num_epochs": ({"num_epochs": 1}, {}),
    "num_minibatches": ({"num_minibatches": 1}, {}),
    "normalized_observations": ({"normalization": {"observations": True}}, {}),
    "normalized_rewards": ({"normalization": {"rewards": True}}, {}),
    "anneal": ({"optimizer": {"anneal": True}}, {"learning_rates": [1e-3, 1e-3 * 2 / 3]}),
    "scheduler": (
        {"optimizer": {"scheduler": {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1}}}},
        {"learning_rates": [1e-3, 1e-4]},
    ),
    "optimizer": (
        {"optimizer": {"name": "torch.optim.SGD", "options": {"momentum": 0.5}}},
        {"make_optimizer": functools.partial(torch.optim.SGD, momentum=0.5)},
    ),
}


class GeneratorStates(Callback):
    """The state of the module's generator before each rollout."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.states.append(pl_module.generator.get_state())


def make(space: str, dtype: torch.dtype, **options: Any) -> PPO:
    torch.manual_seed(0)
    model = PPO(VECTOR, SPACES[space], policy={"hidden_sizes": (8, 8)}, **merged(DEFAULTS, options)).to(dtype)
    with torch.no_grad():  # away from the uniform policy, where too much is symmetric
        for parameter in model.policy.action_head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@functools.cache
def learn(
    space: str, precision: str, option: str, valid: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """Parameters after two rollouts, of PPO and of the slow one, and the number of updates of both."""
    options, in_slow_terms = OPTIONS[option]
    dtype = PRECISIONS[precision][0]
    model = make(space, dtype, **options)
    rollouts = [random_rollout(make(space, dtype).policy, seed=seed, valid=valid) for seed in (1, 2)]
    slow_options = {k: v for k, v in options.items() if k in DEFAULTS}
    slow = SlowPPO(parameters_of(model.policy), slow_options, **in_slow_terms)
    states = GeneratorStates()
    trainer = make_trainer(precision=precision, callbacks=[states, EnvStepLimit(3 * ROWS)])
    trainer.fit(model, FixedRollouts(rollouts, model))
    for rollout, state in zip(rollouts, states.states, strict=True):
        generator = torch.Generator()
        generator.set_state(state)
        slow.learn(rollout, generator)
    fast = parameters_of(model.policy)
    return fast, {k: p.detach() for k, p in slow.parameters.items()}, trainer.global_step, slow.num_updates


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


# Every option in double precision with both kinds of actions, and in single precision with them in turns.
CASES = [(option, space, "64-true") for option in OPTIONS for space in SPACES]
CASES += [(option, space, "32-true") for option, space in zip(OPTIONS, cycle(SPACES), strict=False)]


@pytest.mark.parametrize(("option", "space", "precision"), CASES)
def test_parameters_after_two_rollouts_equal_the_slow_implementation(option, space, precision):
    fast, slow, updates, slow_updates = learn(space, precision, option)
    assert_close(fast, slow, PRECISIONS[precision][1])
    assert updates == slow_updates
    if option == "target_kl":
        assert 2 <= updates < 2 * 3 * 4  # it did stop, and not at once
    elif option not in ("num_epochs", "num_minibatches"):
        assert updates == 2 * 3 * 4


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "nothing"])
def test_every_option_changes_the_result(option, space):
    with_option, without = learn(space, "64-true", option)[0], learn(space, "64-true", "nothing")[0]
    assert max((p - without[name]).abs().max() for name, p in with_option.items()) > 1e-4


@pytest.mark.parametrize("space", SPACES)
def test_reset_steps_are_not_learned_from(space):
    fast, slow, *_ = learn(space, "64-true", "nothing", valid=True)
    assert_close(fast, slow, 1e-12)


@pytest.mark.parametrize("space", SPACES)
def test_logged_diagnostics_match_their_definitions(space):
    """One update from a rollout whose log-probabilities are off by known amounts."""
    recorder = Recorder()
    model = make(space, torch.float64, num_epochs=1, num_minibatches=1, advantages={"normalize": "none"})
    rollout = random_rollout(model.policy, seed=1)
    batch = rollout.flatten(
        advantages=(advantages := model.estimator.gae(rollout, 0.9)), returns=advantages + rollout.values
    )
    distribution, values = model.policy(batch.observations)
    log_ratios = distribution.log_prob(batch.actions) - batch.log_probs
    ratios = log_ratios.exp()
    surrogate = torch.min(ratios * batch.advantages, ratios.clip(0.8, 1.2) * batch.advantages)
    loss = (values - batch.returns).square().mean() / 4 - surrogate.mean()
    gradients = torch.autograd.grad(loss, list(model.policy.parameters()))
    expected = {
        "policy_loss": -surrogate.mean(),
        "value_loss": (values - batch.returns).square().mean() / 2,
        "entropy": distribution.entropy().mean(),
        "approx_kl": (ratios - 1 - log_ratios).mean(),
        "approx_kl_k1": -log_ratios.mean(),
        "clip_fraction": ((ratios - 1).abs() > 0.2).double().mean(),
        "first_ratio_error": (ratios - 1).abs().max(),
        "explained_variance": 1 - (batch.returns - batch.values).var() / batch.returns.var(),
        "loss": loss,
        "total_abs_loss": (values - batch.returns).square().mean() / 4 + surrogate.mean().abs(),
        "grad_norm": torch.cat([gradient.flatten() for gradient in gradients]).norm(),
    }
    if space == "continuous":
        expected["action_saturation"] = (rollout.actions.abs() > 1).double().mean()
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, FixedRollouts([rollout], model))
    assert recorder.rows[0].pop("learning_rate") == 1e-3
    assert recorder.rows[0] == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-9)
    assert 0 < recorder.rows[0]["clip_fraction"] < 1
    assert recorder.rows[0]["grad_norm"] > 0.5  # before it is clipped to that


@pytest.mark.parametrize(("how", "num_minibatches"), [("minibatch", 4), ("minibatch", 5), ("none", 4)])
def test_advantages_of_all_minibatches_are_normalized_at_once(how, num_minibatches):
    torch.manual_seed(0)
    model = PPO(VECTOR, DISCRETE, advantages={"normalize": how})
    batch = model.batch(random_rollout(model.policy))
    batch = batch.replace(given=batch.advantages)
    assert len(batch) == 48
    for counted in (None, torch.arange(48) % 5):
        whole = batch if counted is None else batch.replace(weights=counted.float())
        for part in model.one_pass(whole, num_minibatches):
            assert part.is_normalized == (how == "minibatch")
            assert part.is_normalized or torch.equal(part.advantages, part.given)
            counts = torch.ones(len(part), dtype=torch.bool) if counted is None else part.weights != 0
            expected = torch.zeros(len(part)).masked_scatter(counts, normalize_rows(part.given[counts]))
            torch.testing.assert_close(model.estimator.standardized(part), expected)
            assert not part.replace(advantages=2 * part.advantages).is_normalized
