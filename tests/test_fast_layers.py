"""Layers that are called past their hooks, and those that are one operation of autograd or computed by NumPy."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.distributions import Categorical
from lightning_rl.fast_layers import ActingLayers, TanhLayers, acting_tanh_layers, apply_layers, frozen_layers, product
from lightning_rl.layers import HeadLinear
from lightning_rl.masks import ActionMask
from lightning_rl.networks import MLPEncoder
from lightning_rl.normalization import frozen_moments
from lightning_rl.policy import ActorCritic
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, make_trainer


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ELU())


def test_layers_give_what_they_give_when_they_are_called():
    layers, x = make_layers(), torch.randn(7, 3)
    assert torch.equal(apply_layers(layers, x), layers(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(apply_layers(layers, x), layers(x))
        assert apply_layers(layers, x).dtype == torch.bfloat16


def double(*arguments: torch.Tensor) -> torch.Tensor:
    return 2 * arguments[-1]


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "hook": lambda layers: layers[0].register_forward_hook(double),
    "hook of all layers": lambda layers: layers.register_forward_hook(double),
    "hook of all modules": lambda _: nn.modules.module.register_module_forward_hook(double),
    "forward": lambda layers: setattr(layers[1], "forward", double),
    "parametrization": lambda layers: nn.utils.parametrize.register_parametrization(layers[2], "weight", nn.Softplus()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_takes_the_place_of_a_layer_takes_part(change):
    layers, x = make_layers(), torch.randn(7, 3)
    plain = layers(x)
    handle = CHANGES[change](layers)
    try:
        assert torch.equal(apply_layers(layers, x), layers(x))
        assert not torch.allclose(apply_layers(layers, x), plain)
    finally:
        if handle is not None and change.startswith("hook"):
            handle.remove()


def make_tanh_layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh()).to(dtype)


def is_one_operation(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == "TanhLayersBackward"


@pytest.mark.parametrize("shape", [(7, 3), (2, 7, 3), (0, 3)])
@pytest.mark.parametrize("needs_x", [True, False])
def test_tanh_layers_are_one_operation_with_the_gradients_of_the_layers(shape, needs_x):
    layers, x = make_tanh_layers(), torch.randn(shape, dtype=torch.float64, requires_grad=needs_x)
    weights = torch.randn(*shape[:-1], 5, dtype=torch.float64)
    inputs = [*layers.parameters(), *([x] if needs_x else [])]
    expected, found = layers(x), apply_layers(layers, x)
    assert is_one_operation(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_tanh_layers_have_second_derivatives():
    layers = make_tanh_layers()
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(TanhLayers.apply, (x, *layers.parameters()))
    # As a penalty on the gradient with respect to observations has them, with frozen layers in between.
    layers[0].requires_grad_(False)

    def penalty(y: torch.Tensor) -> Any:
        (of_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(of_x.square().sum(), list(layers[2].parameters()))

    torch.testing.assert_close(penalty(apply_layers(layers, x)), penalty(layers(x)))


def test_only_what_is_to_be_learned_has_a_gradient():
    layers, x = make_tanh_layers(), torch.randn(7, 3, dtype=torch.float64)
    layers[0].requires_grad_(False)
    apply_layers(layers, x).sum().backward()
    assert [p.grad is None for p in layers.parameters()] == [True, True, False, False]


UNSUITED: dict[str, Callable[[nn.Sequential, torch.Tensor], Any]] = {
    "bfloat16": lambda layers, x: (layers.bfloat16(), x.bfloat16()),
    "no bias": lambda layers, x: (nn.Sequential(nn.Linear(3, 5, bias=False).double(), nn.Tanh()), x),
    "another activation": lambda layers, x: (nn.Sequential(layers[0], nn.ELU()), x),
    "no last activation": lambda layers, x: (layers[:3], x),
    "a single row": lambda layers, x: (layers, x[0]),
}


@pytest.mark.parametrize("case", UNSUITED)
def test_other_layers_are_applied_one_by_one(case):
    layers, x = UNSUITED[case](make_tanh_layers(), torch.randn(7, 3, dtype=torch.float64))
    found = apply_layers(layers, x)
    assert not is_one_operation(found)
    assert torch.equal(found, layers(x))


def test_whoever_must_see_every_operation_does():
    layers, x = make_tanh_layers(torch.float32), torch.randn(7, 3)
    layers.requires_grad_(False)
    traced = torch.jit.trace(lambda rows: apply_layers(layers, rows), x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), layers(2 * x))
    torch.testing.assert_close(torch.vmap(lambda row: apply_layers(layers, row[None])[0])(x), layers(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [
            torch.autograd.forward_ad.unpack_dual(f).tangent for f in (apply_layers(layers, dual), layers(dual))
        ]
    torch.testing.assert_close(*tangents)
    program = torch.export.export(MLPEncoder(spaces.Box(-1, 1, (3,))), (x,))
    assert "tanh" in str(program.graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_acting_layers_take_a_few_rows_of_their_dtype_as_many_as_there_are(dtype):
    layers = make_tanh_layers(dtype)
    acting = acting_tanh_layers(layers)
    assert acting is not None
    with torch.no_grad():
        x = torch.randn(ActingLayers.most_rows, 3, dtype=dtype)
        for rows in (8, 8, 1, ActingLayers.most_rows):
            torch.testing.assert_close(acting(x[:rows]), layers(x[:rows]))
        assert acting(torch.cat([x, x])) is None
        assert acting(x[None]) is None
        assert acting(x.bfloat16()) is None


SHAPES = [(4, 5, 6), (64, 4, 256), (4, 256, 64), (64, 256, 1), (1, 256, 64), (64, 1, 3), (64, 64, 65), (300, 64, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_matrices_wherever_they_lie_in_memory(shape):
    rows, inner, columns = shape
    a, b = (torch.randn(size, dtype=torch.float64) for size in ((rows, inner), (inner, columns)))
    expected = torch.einsum("nk,km->nm", a, b)
    for left in (a, a.t().contiguous().t()):
        result = product(left, b)
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()  # as gradients are


@pytest.mark.parametrize("change", CHANGES)
def test_watched_layers_do_not_act_by_numpy(change):
    layers = make_tanh_layers()
    handle = CHANGES[change](layers)
    try:
        assert acting_tanh_layers(layers) is None
    finally:
        if handle is not None and change.startswith("hook"):
            handle.remove()


def test_encoders_act_by_numpy_as_long_as_they_are_frozen():
    encoder, x = MLPEncoder(spaces.Box(-1, 1, (3,))), torch.randn(4, 3)
    with torch.no_grad():
        before = encoder(x)
        with pytest.raises(KeyError), frozen_layers(encoder):
            assert encoder._acting is not None
            torch.testing.assert_close(encoder(x), before)
            raise KeyError
        assert encoder._acting is None
        encoder.layers[0].weight.add_(1.0)
        torch.testing.assert_close(encoder(x), encoder.layers(x))


class Noisy(ActorCritic):
    """Explores by other weights in each step."""

    def act(self, observations, generator=None, deterministic=False, memory=None):
        self.action_head.logits.weight.data.neg_()
        return super().act(observations, generator, deterministic, memory)


class NoisyEncoder(MLPEncoder):
    """Does so too."""

    def forward(self, observations):
        self.layers[0].weight.data.neg_()
        return super().forward(observations)


def test_policies_that_change_their_weights_in_acting_act_with_those_that_they_have():
    torch.manual_seed(0)
    policy, x = Noisy(VECTOR, DISCRETE), torch.randn(5, 3)
    with torch.no_grad(), frozen_layers(policy):
        first, second = (policy.act(x, deterministic=True).action for _ in range(2))
    assert (first != second).all()  # of logits times -1
    encoder = NoisyEncoder(VECTOR)
    with torch.no_grad(), frozen_layers(encoder):
        first, second = encoder(x), encoder(x)
        assert not first.allclose(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_heads_act_by_numpy_where_that_knows_their_dtype(dtype):
    head, features = HeadLinear(6, 3, 1.0).to(dtype), torch.randn(4, 6).to(dtype)
    with torch.no_grad():
        before = head(features)
        with frozen_layers(head):
            assert (head._acting is None) == (dtype == torch.bfloat16)
            torch.testing.assert_close(head(features), before)
            torch.testing.assert_close(head(features.bfloat16()), head.to(dtype)(features.bfloat16()))
        with frozen_layers(head), torch.autocast("cpu", torch.bfloat16):
            assert head(features).dtype == torch.promote_types(dtype, torch.float32)


def test_training_takes_the_short_ways(monkeypatch):
    taken = {"learning": 0, "acting": 0}
    backward, act = TanhLayers.backward, ActingLayers.__call__

    def counted_backward(ctx: Any, gradient: torch.Tensor) -> Any:
        taken["learning"] += 1
        return backward(ctx, gradient)

    def counted_act(self: ActingLayers, x: torch.Tensor) -> Any:
        taken["acting"] += 1
        return act(self, x)

    monkeypatch.setattr(TanhLayers, "backward", staticmethod(counted_backward))
    monkeypatch.setattr(ActingLayers, "__call__", counted_act)
    data = RolloutDataModule("CartPole-v1", 2, 16, rollouts_per_epoch=2)
    # With an option that its closed form has not, so that the loss has a graph.
    model = PPO(data.observation_space, data.action_space, num_epochs=3, num_minibatches=2, dual_clip=5.0)
    make_trainer().fit(model, data)
    assert taken == {
        "learning": 2 * 3 * 2 * 2,
        "acting": 2 * 16,
    }  # two networks learn; one acts, from observations to logits


def test_tanh_of_numpy_is_that_of_pytorch_to_the_last_digits():
    x = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([0.0, 1e-30, torch.inf, -torch.inf])])
    for dtype, digits in ((torch.float32, 3e-7), (torch.float64, 5e-16)):
        exact = torch.from_numpy(np.tanh(x.to(dtype).numpy()))
        torch.testing.assert_close(exact, x.to(dtype).tanh(), rtol=digits, atol=0)


class OwnFeatures(ActorCritic):
    def _encode(self, encoder: nn.Module, observations: Any) -> torch.Tensor:
        return super()._encode(encoder, 2 * observations)


ACTING: dict[str, tuple[type[ActorCritic], dict[str, Any], bool]] = {
    "plain": (ActorCritic, {}, True),
    "normalised": (ActorCritic, {"normalize_observations": True}, True),
    "own features": (OwnFeatures, {}, False),
    "memory": (ActorCritic, {"memory": "lstm"}, False),
    "one encoder for both": (ActorCritic, {"shared_encoder": True}, False),
    "another activation": (ActorCritic, {"activation": "relu"}, False),
}


@pytest.mark.parametrize("case", ACTING)
@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_actors_of_linear_layers_act_as_one_and_as_they_would(case, action_space):
    cls, options, fast = ACTING[case]
    torch.manual_seed(0)
    policy, x = cls(VECTOR, action_space, **options), torch.randn(4, 3)
    memory = policy.initial_memory(4)
    with torch.no_grad(), frozen_moments(policy):
        for deterministic in (False, True):
            expected, found = (
                act(policy, x, frozen, deterministic=deterministic, memory=memory) for frozen in (False, True)
            )
            torch.testing.assert_close(found.action, expected.action)
            assert (found.value is None) == (expected.value is None)
    with frozen_layers(policy):
        assert (policy._acting is not None) == fast
    assert policy._acting is None


def act(policy: ActorCritic, x: torch.Tensor, frozen: bool, **options: Any) -> Any:
    with frozen_layers(policy) if frozen else contextlib.nullcontext():
        return policy.act(x, torch.Generator().manual_seed(1), **options)


OF_2 = torch.tensor([0.0, 0.0, 1.0])


def test_an_actor_with_a_hook_or_masks_acts_through_its_modules():
    space = spaces.Dict({"x": VECTOR, "mask": ActionMask((3,))})
    masked, hooked = ActorCritic(space, DISCRETE), ActorCritic(VECTOR, DISCRETE)
    hooked.action_head.register_forward_hook(lambda module, inputs, output: Categorical(output.logits - 1e9 * OF_2))
    with frozen_layers(masked), frozen_layers(hooked):
        assert masked._acting is None and hooked._acting is None
        assert not (hooked.act(torch.randn(64, 3)).action == 2).any()
