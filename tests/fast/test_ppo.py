"""The loss in closed form: what autograd makes of `PPO.loss`, wherever nobody wants anything else of it."""

import copy
import inspect
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_rl import PPO
from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import READ_BY_LOSS
from lightning_rl.fast import ppo as fast_ppo
from lightning_rl.fast.engine import closed_form_of
from lightning_rl.fast.ppo import PPOLoss
from lightning_rl.fast.programs import KnownLoss
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions.discrete import CategoricalHead
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.loss import Loss
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, make_data, make_model, make_trainer, merged

ROWS = 48


def make(action_space: spaces.Space[Any] = DISCRETE, dtype: torch.dtype = torch.float64, **options: Any) -> PPO:
    torch.manual_seed(3)
    model = PPO(VECTOR, action_space, **merged({"policy": {"hidden_sizes": (6, 5)}, "entropy_coef": 0.02}, options))
    return model.to(dtype)


def make_batch(model: PPO, **fields: Tensor) -> Batch:
    """Rows of a policy that has moved since: ratios on either side of their range, with advantages of either sign."""
    generator = torch.Generator().manual_seed(5)
    dtype = next(model.parameters()).dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    observations = normal(ROWS, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * normal(*parameter.shape)
        distribution, values = model.policy(observations)
        actions = distribution.sample(generator)
        log_probs = distribution.log_prob(actions)
        log_probs[2:] += 0.3 * normal(ROWS - 2)  # after two at a ratio of 1
    advantages = normal(ROWS)
    advantages[2] = 0.0
    plain = {"observations": observations, "actions": actions, "log_probs": log_probs, "advantages": advantages}
    return Batch({**plain, "values": values + normal(ROWS), "returns": values + normal(ROWS), **fields})


def closed_form(model: PPO) -> PPOLoss:
    form = closed_form_of(model)
    assert isinstance(form, PPOLoss), form
    return form


def fast_loss(model: PPO, batch: Batch) -> Any:
    """The parts of the loss as attributes, with `parameters` and `gradients`; None if autograd computes it."""
    form = closed_form_of(model)
    if isinstance(form, str) or (known := form(batch)) is None:
        return None
    parameters, gradients = zip(*known[1], strict=True)
    return SimpleNamespace(**known[0]._asdict(), parameters=parameters, gradients=gradients)


def in_order(known: Any, model: PPO) -> list[Tensor]:
    """The gradients in the order of the model's parameters."""
    by_parameter = {id(p): gradient for p, gradient in zip(known.parameters, known.gradients, strict=True)}
    return [by_parameter[id(parameter)] for parameter in model.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no bonus": {"entropy_coef": 0.0},
    "ranges": {"clipping": {"low": 0.1, "high": 0.3}, "value_coef": 0.7},
    "not clipped": {"clip_range": None},
    "clipped below": {"clip_range": None, "clipping": {"low": 0.1}},
    "advantages as they are": {"advantages": {"normalize": "none"}},
    "normalised observations": {"normalization": {"observations": True}},
    "values clipped": {"clipping": {"value": 0.5}},
    "one layer": {"policy": {"hidden_sizes": (4,)}},
}


@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS], ids=["categorical", "gaussian"])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_gradient_and_diagnostics_equal_autograd(options, action_space):
    model = make(action_space, **OPTIONS[options])
    batch = make_batch(model)
    expected = model.compute_loss(batch)
    gradients = torch.autograd.grad(model.loss(batch).total, list(model.parameters()))
    known = fast_loss(model, batch)
    assert known is not None
    with model.steps.isolated():
        model.steps.record_loss(known)
        found = model.steps.record.means()
    assert not known.total.requires_grad
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert 0 < found["clip_fraction"] < 1 or options == "not clipped"
    for found_gradient, gradient in zip(in_order(known, model), gradients, strict=True):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-14)


def test_closed_form_knows_everything_that_the_loss_reads():
    """By default, an option that only `PPO.loss` reads would have no effect, as the closed form runs in its place."""
    members = (PPO.loss, PPO.add_policy_terms, PPO.surrogate_loss, PPO.clip_fraction)
    read = {name for member in members for name in re.findall(r"\bself\.(\w+)", inspect.getsource(member))}
    assert {"value_coef", "dual_clip", "target_kl"} <= read
    known = {*READ_BY_LOSS, *re.findall(r"\w+", inspect.getsource(fast_ppo))}
    assert read <= known, f"{read - known}: compute it in lightning_rl/fast/ppo.py too, or add it to _OPTIONS there"


def test_options_may_be_numpy_numbers():
    model, plain = make(dtype=torch.float32), make(dtype=torch.float32)
    batch = make_batch(model)
    make_batch(plain)
    model.value_coef = np.float64(0.5)
    found, expected = fast_loss(model, batch), fast_loss(plain, batch)
    assert found is not None and expected is not None
    assert all(map(torch.equal, found.gradients, expected.gradients))


def test_clip_range_may_be_scheduled_to_zero():
    model = make(clipping={"value": 0.5}, clip_range=0.2)
    batch = make_batch(model)
    model.clip_range_value = 0.0
    expected = torch.autograd.grad(model.loss(batch).total, list(model.parameters()))
    known = fast_loss(model, batch)
    assert known is not None
    for found_gradient, gradient in zip(in_order(known, model), expected, strict=True):
        torch.testing.assert_close(found_gradient, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_clipped_and_unclipped_value_losses_share_the_gradient_as_in_autograd(dtype):
    """All numbers are multiples of 1/4, so that ties are exact: beyond the range, at its edge and within it."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        quarters = torch.randint(-8, 9, (3, 200), generator=generator) / 4
        values, returns, old_values = (x.to(dtype) for x in quarters)
        limit = float(torch.randint(0, 5, (), generator=generator)) / 4
        model = make(dtype=dtype)
        model.clip_range_value = limit
        fast = closed_form(model)
        changes = values - old_values
        clipped = old_values + changes.clamp(-limit, limit)
        is_tie = (values - returns).square() == (clipped - returns).square()
        assert (is_tie & (changes.abs() > limit) & (values != returns)).any()
        assert (is_tie & (changes.abs() == limit)).any()
        x = values.clone().requires_grad_()
        by_autograd = Loss(Batch({"returns": returns, "values": old_values}))
        by_autograd.add_value(x, model.value_coef, clip_range=limit)
        expected = torch.autograd.grad(by_autograd.total, x)[0]
        loss, gradient = fast._value_part(Batch({"returns": returns, "values": old_values}), values.numpy())
        assert loss == pytest.approx(by_autograd.metrics["value_loss"].item(), rel=1e-6)
        torch.testing.assert_close(torch.from_numpy(gradient), expected)


def test_value_as_far_from_the_return_as_the_clipped_value_gets_half_of_the_gradient():
    """A value of 3 with a return of 2, an old value of 0 and a range of 1: the clipped value is 1."""
    model = make(clipping={"value": 1.0}, value_coef=0.5, entropy_coef=0.0)
    batch = make_batch(model)
    with torch.no_grad():
        model.policy.value_head.weight.zero_()
        model.policy.value_head.bias.fill_(3.0)
    batch = batch.replace(returns=torch.full((ROWS,), 2.0).double(), values=torch.zeros(ROWS).double())
    known = fast_loss(model, batch)
    assert known is not None
    of_bias = {id(p): gradient for p, gradient in zip(known.parameters, known.gradients, strict=True)}
    assert of_bias[id(model.policy.value_head.bias)].item() == pytest.approx(0.25)
    expected = torch.autograd.grad(model.loss(batch).total, list(model.parameters()))
    for found_gradient, gradient in zip(in_order(known, model), expected, strict=True):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sides", ["both", "low", "high", "closed"])
def test_ratio_at_the_edge_of_the_clip_range_has_the_gradient_of_autograd(sides, dtype):
    """The range ends at ratios that some rows have to the last bit, with advantages of either sign and of 0."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        log_ratios = (0.2 * torch.randn(200, generator=generator, dtype=torch.float64)).clamp(-0.6, 0.6).to(dtype)
        log_ratios[::4] = 0.0
        above, below = log_ratios.max(), log_ratios.min()
        log_ratios[1::4], log_ratios[2::4] = above, below
        low, high = (1 - below.exp()).item(), (above.exp() - 1).item()
        low = {"both": low, "low": low, "high": math.inf, "closed": 0.0}[sides]
        high = {"both": high, "low": math.inf, "high": high, "closed": 0.0}[sides]
        advantages = torch.randn(200, generator=generator, dtype=torch.float64).to(dtype)
        advantages[::5] = 0.0
        model = make(dtype=dtype)
        model.clip_range_low, model.clip_range_high = low, high
        fast = closed_form(model)
        x = log_ratios.clone().requires_grad_()
        losses = rl.dual_clipped_surrogate_loss(x, advantages, low, high)
        expected = torch.autograd.grad(losses.mean(), x)[0]
        ends = {"low": [1 - low], "high": [1 + high]}.get(sides, [1 - low, 1 + high])
        for end in ends:
            assert (expected[(log_ratios.exp() * advantages == end * advantages) & (advantages != 0)] != 0).any()
        with np.errstate(invalid="ignore"):  # an advantage of 0 times a range without end
            loss, gradient, _ = fast._policy_part(log_ratios.numpy(), advantages.numpy(), 1 / 200)
        assert loss == pytest.approx(losses.mean().item(), rel=1e-4, abs=1e-7)
        torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-6, atol=1e-9)


INFINITE: dict[str, dict[str, float]] = {
    "ratio, clipped": {"log_probs": -1e5, "advantages": 1.0},
    "ratio, not clipped": {"log_probs": -1e5, "advantages": -1.0},
    "advantage": {"advantages": math.inf},
    "action": {"actions": 1e25},
    "return": {"returns": math.nan},
}


@pytest.mark.parametrize("case", INFINITE)
def test_non_finite_gradients_are_the_same_as_in_autograd(case):
    model = make(CONTINUOUS, torch.float32, advantages={"normalize": "none"})
    batch = make_batch(model)
    for name, value in INFINITE[case].items():
        batch.fields[name][3] = value
    loss = model.loss(batch).total
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with np.errstate(all="raise"):
        known = fast_loss(model, batch)
    assert known is not None
    assert known.total.isfinite() == loss.isfinite()
    for found_gradient, gradient in zip(in_order(known, model), gradients, strict=True):
        assert found_gradient.isfinite().all() == gradient.isfinite().all()


def test_logit_of_minus_infinity_is_supported_without_entropy_bonus():
    model = make(entropy_coef=0.0)
    batch = make_batch(model)
    with torch.no_grad():
        model.policy.action_head.logits.bias[1] = -torch.inf
    batch.actions[batch.actions == 1] = 0
    known = fast_loss(model, batch)
    assert known is not None
    assert known.total.isfinite()
    assert all(gradient.isfinite().all() for gradient in known.gradients)


def test_float32_gradient_is_close_to_float64():
    model = make(dtype=torch.float32)
    batch = make_batch(model)
    known = fast_loss(model, batch)
    assert known is not None
    exact = copy.deepcopy(model).double()
    wide = Batch({name: x.double() if x.is_floating_point() else x for name, x in batch.fields.items()})
    gradients = torch.autograd.grad(exact.loss(wide).total, list(exact.parameters()))
    for found_gradient, gradient in zip(in_order(known, model), gradients, strict=True):
        assert found_gradient.dtype == torch.float32
        torch.testing.assert_close(found_gradient.double(), gradient, rtol=1e-4, atol=1e-7)


def test_minibatches_are_weighted_over_ranks():
    model = make()
    batch = make_batch(model)
    batch.weight = 2 / 70
    expected = torch.autograd.grad(model.loss(batch).total, list(model.parameters()))
    known = fast_loss(model, batch)
    assert known is not None
    for found_gradient, gradient in zip(in_order(known, model), expected, strict=True):
        torch.testing.assert_close(found_gradient, gradient)


class OwnPenalty(PPO):
    def add_policy_terms(self, loss: Any, distribution: Any) -> None:
        super().add_policy_terms(loss, distribution)
        loss.add("own", distribution.entropy())


def own_penalty(model: PPO) -> None:
    model.__class__ = OwnPenalty


class OwnRange(PPO):
    @property
    def clip_ranges(self) -> tuple[float, float]:
        return 0.1, 0.3


def own_range(model: PPO) -> None:
    model.__class__ = OwnRange


def own_loss(model: PPO) -> None:
    model.loss = lambda batch: Loss(batch)  # type: ignore[method-assign]


class OwnPolicy(ActorCritic):
    """Has a name of its own."""


class OwnHead(CategoricalHead):
    """Has a name of its own."""


def hook(_: nn.Module, inputs: Any, output: Any) -> None:
    """Look on."""


CHANGES: dict[str, Callable[[PPO], Any]] = {
    "subclass": own_penalty,
    "property of a subclass": own_range,
    "attribute": own_loss,
    "another policy": lambda model: setattr(model.policy, "__class__", OwnPolicy),
    "another head": lambda model: setattr(model.policy.action_head, "__class__", OwnHead),
    "hook of a tensor after accumulation": lambda model: (
        model.policy.value_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    ),
    "compiled module": lambda model: model.policy.critic_encoder.compile(),
    "own forward": lambda model: setattr(model.policy.value_head, "forward", model.policy.value_head.forward),
    "another device": lambda model: model.to("meta"),
    "hook of a module": lambda model: model.policy.value_head.register_forward_hook(hook),
    "hook of a parameter": lambda model: model.policy.value_head.weight.register_hook(lambda gradient: 2 * gradient),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(
        model.policy.value_head, "weight", nn.Softplus()
    ),
    "parametrization of the actor": lambda model: nn.utils.parametrize.register_parametrization(
        model.policy.action_head.logits, "bias", nn.Softplus()
    ),
    "frozen parameter": lambda model: model.policy.value_head.weight.requires_grad_(False),
    "removed pruning": lambda model: [
        nn.utils.prune.identity(model.policy.action_head.logits, "weight"),
        nn.utils.prune.remove(model.policy.action_head.logits, "weight"),
    ],
    "shared layer": lambda model: setattr(model.policy.critic_encoder, "layers", model.policy.actor_encoder.layers),
    "method of the policy": lambda model: setattr(model.policy, "value_of", lambda features: features.sum(-1)),
    "passes of the critic": lambda model: setattr(
        model, "frozen_parameters", lambda part: [model.policy.value_head.bias]
    ),
    "other dtypes": lambda model: model.policy.value_head.float(),
    "half precision": lambda model: model.bfloat16(),
}
UNSUITED_OPTIONS: list[dict[str, Any]] = [
    {"clipping": {"log_prob": 5.0}},
    {"clipping": {"dual": 3.0}},
    {"clipping": {"value_huber_delta": 1.0}},
    {"optimizer": {"l2": {"policy": 0.1}}},
    {"normalization": {"values": "running_std"}},
    {"policy": {"shared_encoder": True}},
    {"policy": {"activation": "relu"}},
    {"policy": {"hidden_sizes": ()}},
]
UNSUITED_DISTRIBUTIONS: list[Any] = ["beta", "squashed_gaussian", {"kind": "gaussian", "max_std": 2.0}]


STAYS = ("removed pruning",)


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_overridden_members_disable_the_closed_form(change):
    model = make()
    batch = make_batch(model)
    assert fast_loss(model, batch) is not None
    CHANGES[change](model)
    assert (fast_loss(model, batch) is not None) == (change in STAYS)


@pytest.mark.parametrize("name", ["loss", *READ_BY_LOSS])
@pytest.mark.parametrize("of", ["class", "instance"])
def test_overriding_a_member_that_the_loss_reads_disables_the_closed_form(name, of):
    model = make()
    assert isinstance(closed_form_of(model), PPOLoss)
    if of == "class":
        model.__class__ = type("Own", (PPO,), {name: getattr(PPO, name)})
        assert isinstance(closed_form_of(model), PPOLoss)  # the very same function
        model.__class__ = type("Own", (PPO,), {name: lambda self, *args: None})
    else:
        vars(model)[name] = lambda *args: None
    reasons = (f"{name} is overridden", "only the loss of PPO has a closed form")
    assert closed_form_of(model) == reasons[name == "loss" and of == "class"]


def test_global_module_hooks_disable_the_closed_form():
    model, handle = make(), nn.modules.module.register_module_forward_hook(hook)
    try:
        assert closed_form_of(model) == "the policy has hooks or is compiled"
    finally:
        handle.remove()
    assert isinstance(closed_form_of(model), PPOLoss)


def draw(generator: np.random.Generator) -> dict[str, Any]:
    """Options of PPO that the closed form has, at random."""
    ranges = [None, 0.1, 0.2, 0.5]
    return {
        "clip_range": generator.choice(ranges),
        "clipping": {
            "low": generator.choice(ranges),
            "high": generator.choice(ranges),
            "value": generator.choice([None, 0.25, 0.5]),
        },
        "advantages": {"normalize": str(generator.choice(["minibatch", "rollout", "none"]))},
        "normalization": {"observations": bool(generator.integers(2))},
        "policy": {"hidden_sizes": tuple(generator.integers(1, 9, generator.integers(1, 4)).tolist())},
        "entropy_coef": float(generator.choice([0.0, 0.01, 0.1])),
        "value_coef": float(generator.choice([0.5, 1.0])),
    }


@pytest.mark.parametrize("seed", range(40))
def test_closed_form_equals_autograd(seed):
    """Random options, networks and rows: multiples of 1/4 make ties of values, ratios of 1 ties of the policy."""
    generator = np.random.default_rng(seed)
    spaces_of_actions = (DISCRETE, spaces.Discrete(2), CONTINUOUS, spaces.Box(-1, 1, (1,)))
    model = make(spaces_of_actions[generator.integers(4)], **draw(generator))
    batch = make_batch(model)
    batch.log_probs[::3] = model.policy.log_prob(batch.observations, batch.actions)[::3].detach()
    batch.advantages[::5] = 0.0
    for name in ("returns", "values"):
        batch.fields[name] = (4 * batch.fields[name]).round() / 4
    if seed % 2:  # values on the grid of returns
        with torch.no_grad():
            model.policy.value_head.weight.zero_()
            model.policy.value_head.bias.fill_(generator.integers(-4, 5) / 4)
    batch.weight *= float(generator.choice([1.0, 0.5]))
    expected = model.compute_loss(batch)
    gradients = torch.autograd.grad(model.loss(batch).total, list(model.parameters()))
    known = fast_loss(model, batch)
    assert known is not None
    with model.steps.isolated():
        model.steps.record_loss(known)
        found = model.steps.record.means()
    assert found.keys() == expected.keys()
    if model.estimator.normalize != "rollout":  # which compute_loss does itself, and the update before
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-13)
    for found_gradient, gradient in zip(in_order(known, model), gradients, strict=True):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("options", UNSUITED_OPTIONS, ids=str)
def test_unsupported_options_use_autograd(options):
    assert isinstance(closed_form_of(make(**options)), str)


@pytest.mark.parametrize("action_distribution", UNSUITED_DISTRIBUTIONS, ids=str)
def test_unsupported_distributions_use_autograd(action_distribution):
    assert isinstance(closed_form_of(make(CONTINUOUS, policy={"action_distribution": action_distribution})), str)


def test_unsupported_batches_use_autograd():
    model = make()
    fast = closed_form(model)
    batch = make_batch(model)
    assert fast(batch.replace(weights=torch.ones(ROWS))) is None
    assert fast(batch.replace(returns=batch.returns.float())) is None
    assert fast(batch.ordered(torch.arange(0))) is None
    assert fast(batch.ordered(torch.arange(PPOLoss.max_rows) % ROWS)) is not None
    assert fast(batch.ordered(torch.arange(PPOLoss.max_rows + 1) % ROWS)) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(batch) is None


class Counted:
    """Counts the minibatches whose loss was computed in closed form."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, works: bool = True) -> None:
        self.count = 0
        compute = PPOLoss.__call__

        def counted(fast: PPOLoss, batch: Batch) -> KnownLoss | None:
            known = compute(fast, batch) if works else None
            self.count += known is not None
            return known

        monkeypatch.setattr(PPOLoss, "__call__", counted)


class AfterBackward(Callback):
    """Somebody who waits for backward passes."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.norms.append(math.hypot(*(float(p.grad.norm()) for p in module.parameters())))


def fitted(monkeypatch: pytest.MonkeyPatch, works: bool, *callbacks: Callback, **options: Any) -> tuple[PPO, int]:
    with monkeypatch.context() as patch:
        counted = Counted(patch, works)
        data = make_data(options.pop("env_id", "CartPole-v1"))
        model = make_model(data, entropy_coef=0.01, **options)
        make_trainer(callbacks=list(callbacks), precision="64-true").fit(model, data)
    return model, counted.count


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_run_equals_a_run_with_autograd(monkeypatch, env_id):
    (fast, count), (slow, none) = (fitted(monkeypatch, works, env_id=env_id) for works in (True, False))
    assert (count, none) == (8, 0)  # two rollouts, two passes, two minibatches
    for found, expected in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert fast.losses == pytest.approx(slow.losses, rel=1e-7, abs=1e-9)


def test_backward_hooks_of_callbacks_see_the_gradient_of_autograd(monkeypatch):
    waiting = AfterBackward()
    (quick, _), (heard, count) = fitted(monkeypatch, True), fitted(monkeypatch, True, waiting)
    assert (count, len(waiting.norms)) == (0, 8)
    assert min(waiting.norms) > 0
    for found, expected in zip(quick.parameters(), heard.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_updates_stop_at_target_kl(monkeypatch):
    (fast, count), (slow, _) = (
        fitted(monkeypatch, works, target_kl=1e-7, learning_rate=0.01) for works in (True, False)
    )
    assert count < 8
    for found, expected in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


class OwnBackward(PPO):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        with torch.no_grad():
            self.policy.value_head.bias.grad.add_(100.0)


def test_overridden_backward_is_called():
    data = make_data()
    torch.manual_seed(0)
    model = OwnBackward(data.observation_space, data.action_space, policy={"hidden_sizes": (16,)}, learning_rate=1e-3)
    before = model.policy.value_head.bias.detach().clone()
    make_trainer().fit(model, data)
    assert model.policy.value_head.bias < before - 0.02  # 32 steps along a gradient that is positive, 1e-3 each
