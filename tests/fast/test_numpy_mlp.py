"""Forward and backward passes by NumPy, and acting, compared with PyTorch's."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl import PPO, RolloutDataModule, fast
from lightning_rl.algorithms.ppg import AuxiliaryActorCritic
from lightning_rl.fast.numpy_mlp import (
    Actor,
    NumpyMLP,
    actor,
    tanh_parameters,
)
from lightning_rl.masks import ActionMask
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Categorical
from lightning_rl.policies.networks.mlp import MLPEncoder
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, make_trainer


def make_layers(dtype: torch.dtype = torch.float64, *sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = sizes or (3, 4, 5)
    layers = nn.Sequential()
    for width, next_width in itertools.pairwise(sizes):
        layers.extend([nn.Linear(width, next_width), nn.Tanh()])
    return layers[:-1].to(dtype)


@pytest.mark.parametrize("sizes", [(3, 4), (3, 4, 5), (3, 4, 5, 2), (3, 1, 1)])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_outputs_and_gradients_equal_autograd(sizes, rows):
    layers, x = make_layers(torch.float64, *sizes), torch.randn(rows, 3, dtype=torch.float64)
    weights = torch.randn(rows, sizes[-1], dtype=torch.float64)
    network = NumpyMLP(list(layers.parameters()))
    with torch.no_grad():
        outputs = network.forward(x)
        found = network.backward(weights)
    torch.testing.assert_close(outputs, layers(x).detach(), rtol=0, atol=1e-14)
    expected = torch.autograd.grad((layers(x) * weights).sum(), list(layers.parameters()))
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-13)
    assert all(gradient.is_contiguous() for gradient in found)


def test_numpy_tanh_equals_pytorch_tanh():
    x = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([0.0, 1e-30, torch.inf, -torch.inf])])
    for dtype, digits in ((torch.float32, 3e-7), (torch.float64, 5e-16)):
        exact = torch.from_numpy(np.tanh(x.to(dtype).numpy()))
        torch.testing.assert_close(exact, x.to(dtype).tanh(), rtol=digits, atol=0)


def double(*arguments: Any) -> Any:
    return 2 * arguments[-1]


def of_two(module: nn.Module, inputs: Any, output: Categorical) -> Categorical:
    return Categorical(output.logits - 1e9 * torch.tensor([0.0, 0.0, 1.0]))


class OwnFeatures(ActorCritic):
    def _encode(self, encoder: nn.Module, observations: Any) -> torch.Tensor:
        return super()._encode(encoder, 2 * observations)


class NoisyActor(ActorCritic):
    """Explores by other weights in each step."""

    def act(self, observations, generator=None, deterministic=False, memory=None):
        self.action_head.logits.weight.data.neg_()
        return super().act(observations, generator, deterministic, memory)


class NoisyEncoder(MLPEncoder):
    """Explores by other weights in each step."""

    def forward(self, observations):
        self.layers[0].weight.data.neg_()
        return super().forward(observations)


ACTING: dict[str, tuple[type[ActorCritic], dict[str, Any], bool]] = {
    "plain": (ActorCritic, {}, True),
    "normalized": (ActorCritic, {"normalize_observations": True}, True),
    "PPG": (AuxiliaryActorCritic, {}, True),
    "own features": (OwnFeatures, {}, False),
    "noisy": (NoisyActor, {}, False),
    "memory": (ActorCritic, {"memory": "lstm"}, False),
    "one encoder for both": (ActorCritic, {"shared_encoder": True}, False),
    "another activation": (ActorCritic, {"activation": "relu"}, False),
    "no layers": (ActorCritic, {"hidden_sizes": ()}, False),
}


@pytest.mark.parametrize("case", ACTING)
@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_actor_chooses_the_actions_of_its_policy(case, action_space, dtype):
    cls, options, has_actor = ACTING[case]
    torch.manual_seed(0)
    policy = cls(VECTOR, action_space, **options).to(dtype)
    if policy.observation_normalizer is not None:
        policy.observation_normalizer.update(3 * torch.randn(50, 3) + 1)
    with torch.no_grad():
        for parameter in policy.parameters():  # also the biases, which are 0 at first
            parameter += 0.3 * torch.randn_like(parameter)
    act = actor(policy)
    assert (act is not None) == has_actor
    if act is None:
        return
    for rows in (4, 4, 1, Actor.max_rows, Actor.max_rows + 1):
        x = torch.randn(rows, 3, dtype=dtype)
        with torch.inference_mode():
            for deterministic in (False, True):
                expected, found = (
                    choose(x, torch.Generator().manual_seed(1), deterministic) for choose in (policy.act, act)
                )
                torch.testing.assert_close(found.action, expected.action)
                torch.testing.assert_close(found.environment_action, expected.environment_action)
                assert found.value is None and found.log_prob is None


UNSUITED: dict[str, Callable[[ActorCritic], Any]] = {
    "hook of a layer": lambda policy: policy.actor_encoder.layers[0].register_forward_hook(double),
    "hook before a layer": lambda policy: policy.actor_encoder.layers[0].register_forward_pre_hook(double),
    "hook of the head": lambda policy: policy.action_head.register_forward_hook(of_two),
    "hook of all modules": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "own forward": lambda policy: setattr(policy.actor_encoder.layers[1], "forward", double),
    "own act": lambda policy: setattr(policy, "act", double),
    "compiled": lambda policy: policy.actor_encoder.compile(),
    "parametrization": lambda policy: nn.utils.parametrize.register_parametrization(
        policy.actor_encoder.layers[0], "weight", nn.Softplus()
    ),
    "no bias": lambda policy: policy.actor_encoder.layers[0].register_parameter("bias", None),
    "layers of another class": lambda policy: setattr(policy, "actor_encoder", NoisyEncoder(VECTOR)),
    "half precision": lambda policy: policy.bfloat16(),
    "dtypes of layers differ": lambda policy: policy.action_head.double(),
    "another device": lambda policy: policy.to("meta"),
    "switched off": lambda policy: setattr(policy, "fast_paths", "none"),
}


@pytest.mark.parametrize("change", UNSUITED)
def test_other_policies_and_policies_with_hooks_have_no_actor(change):
    policy = ActorCritic(VECTOR, DISCRETE)
    assert actor(policy) is not None
    handle = UNSUITED[change](policy)
    try:
        assert actor(policy) is None
    finally:
        if handle is not None and change.startswith("hook"):
            handle.remove()


def test_policies_with_masks_have_no_actor():
    space = spaces.Dict({"x": VECTOR, "mask": ActionMask((3,))})
    assert actor(ActorCritic(space, DISCRETE)) is None
    assert actor(object()) is None
    assert tanh_parameters(None) is None


def test_actor_calls_the_policy_under_autocast():
    policy = ActorCritic(VECTOR, CONTINUOUS)
    act, x = actor(policy), torch.randn(4, 3)
    assert act is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = policy.act(x, deterministic=True), act(x, deterministic=True)
    assert torch.equal(found.action, expected.action)


@pytest.mark.parametrize("fast_paths", ["auto", "none"])
def test_rollouts_use_the_actor_unless_disabled(fast_paths, monkeypatch):
    calls = []
    outputs = Actor.outputs

    def counted(self: Actor, x: Any) -> Any:
        calls.append(len(x))
        return outputs(self, x)

    monkeypatch.setattr(Actor, "outputs", counted)
    data = RolloutDataModule("CartPole-v1", 2, 16, rollouts_per_epoch=2)
    model = PPO(data.observation_space, data.action_space, debug={"fast_paths": fast_paths})
    make_trainer().fit(model, data)
    assert calls == [2] * 32 * (fast_paths == "auto")
    assert fast.actor(model.policy) is None or fast_paths == "auto"
