"""Tanh MLPs in NumPy, for small networks, where the overhead of PyTorch's operations takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.nested import Nested
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions.continuous import GaussianHead
from lightning_rl.policies.distributions.discrete import CategoricalHead
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.policies.networks.mlp import HeadLinear, MLPEncoder
from lightning_rl.policies.normalization import ObservationNormalizer

Array = NDArray[np.floating[Any]]

_DTYPES = (torch.float32, torch.float64)
_TANH_BACKWARD = torch.ops.aten.tanh_backward.default
# Members of `ActorCritic` that `Actor` reimplements.
_ACTING = ("act", "prepare_observations", "_acting_features", "_encode_for_actor", "_encode", "_distribution")


class NumpyMLP:
    """Forward and backward pass, without autograd, of linear layers (weight and bias) with tanh between them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        self._features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[N, width]` for inputs `[N, features]`, and store activations for `backward`."""
        self._features = [x]
        for weight, bias in self.layers[:-1]:
            outputs = functional.linear(self._features[-1], weight, bias)
            array = outputs.numpy()
            np.tanh(array, out=array)
            self._features.append(outputs)
        return functional.linear(self._features[-1], *self.layers[-1])

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return the gradient of each parameter, given the gradient of the last outputs, `[N, width]`."""
        gradients: list[Tensor] = []
        for k in range(len(self.layers) - 1, -1, -1):
            features = self._features.pop()
            gradients += [gradient.sum(0), gradient.t().mm(features)]
            if k > 0:
                gradient = _TANH_BACKWARD(gradient.mm(self.layers[k][0]), features)
        return gradients[::-1]


class Actor:
    """`ActorCritic.act` in NumPy; valid until the parameters or running statistics of the policy change.

    `parameters` are weight and bias of each layer from observations to the outputs of the actor.
    """

    max_rows = 64
    """Matrix products dominate for more rows, and PyTorch may use several threads."""

    def __init__(self, policy: ActorCritic, parameters: Sequence[nn.Parameter]) -> None:
        self.policy = policy
        self._prepare = Preparation(policy)
        self._std = [parameter.detach().exp().numpy() for parameter in log_std(policy)]
        arrays = [parameter.detach().numpy() for parameter in parameters]
        self._parameters = list(zip(arrays[::2], arrays[1::2], strict=True))
        self._layers, self._rows = self._parameters, 0

    def __call__(
        self, observations: Nested, generator: torch.Generator | None = None, deterministic: bool = False
    ) -> PolicyOutput:
        x = self._prepare(observations)
        if x is None or len(x) > self.max_rows:
            return self.policy.act(observations, generator, deterministic)
        outputs = self.outputs(x)
        noise = np.zeros_like(outputs)
        if self._std:  # sample as `DiagonalGaussian` does
            if not deterministic:
                torch.from_numpy(noise).normal_(generator=generator)
            return PolicyOutput(torch.from_numpy(outputs + self._std[0] * noise))
        if not deterministic:  # sample as `Categorical` does
            torch.from_numpy(noise).exponential_(generator=generator).log_()
        return PolicyOutput(torch.from_numpy((outputs - noise).argmax(-1)))

    def outputs(self, x: Array) -> Array:
        """Return the logits or means for inputs `[N, features]`."""
        if len(x) != self._rows:  # contiguous weights and repeated biases halve the time
            self._rows = len(x)
            self._layers = [(np.ascontiguousarray(w.T), np.repeat(b[None], len(x), 0)) for w, b in self._parameters]
        for k, (weight, bias) in enumerate(self._layers):
            if k:
                np.tanh(x, out=x)
            x = x.dot(weight)
            x += bias
        return x


def actor(policy: object) -> Actor | None:
    """Return an actor for the next rollout; None unless the policy is a plain tanh MLP on the CPU.

    The attribute `fast_paths` of the policy disables it with "none".
    """
    if not isinstance(policy, ActorCritic) or getattr(policy, "fast_paths", None) == "none":
        return None
    parameters = actor_parameters(policy)
    # With a shared encoder, `act` also returns values.
    if parameters is None or policy.critic_encoder is None or not have_one_dtype(parameters):
        return None
    if overridden(policy, ActorCritic, _ACTING) or is_observed(policy) or torch.compiler.is_compiling():
        return None
    return Actor(policy, parameters)


class Preparation:
    """`ActorCritic.prepare_observations` in NumPy, with the running statistics of the first call."""

    def __init__(self, policy: ActorCritic) -> None:
        self._policy, self._dtype = policy, policy.dtype
        normalizer = policy.observation_normalizer
        self._normalizer = normalizer if type(normalizer) is ObservationNormalizer else None
        self._is_known = normalizer is self._normalizer
        self._moments: list[Array] = []

    def __call__(self, observations: Nested) -> Array | None:
        """Return the inputs of the encoders, `[N, features]`; None for observations of another kind."""
        normalizer = self._normalizer
        if not self._is_known or getattr(observations, "dtype", None) is not self._dtype:
            observations, normalizer = self._policy.prepare_observations(observations), None
        is_plain = type(observations) is Tensor and observations.is_cpu and observations.dim() == 2
        if not is_plain or observations.dtype is not self._dtype or torch.is_autocast_enabled("cpu"):
            return None
        x: Array = observations.numpy()
        if normalizer is None:
            return x
        if not self._moments:
            moments = normalizer.moments.mean, normalizer.moments.scale(normalizer.epsilon)
            self._moments = [moment.to(self._dtype).numpy() for moment in moments]
        x = x - self._moments[0]
        x *= self._moments[1]
        np.maximum(x, -normalizer.clip, out=x)
        return np.minimum(x, normalizer.clip, out=x)


def actor_parameters(policy: ActorCritic) -> list[nn.Parameter] | None:
    """Return weight and bias of each layer of the actor; None unless the actor is a plain tanh MLP."""
    head, layers = policy.action_head, tanh_parameters(policy.actor_encoder)
    last: nn.Module = nn.Identity()
    if type(head) is CategoricalHead:
        last = head.logits
    elif type(head) is GaussianHead and log_std(policy) and not head.squashes_mean:
        last = head.mean
    outputs = linear_parameters([last])
    return None if layers is None or outputs is None or policy.memory is not None else [*layers, *outputs]


def log_std(policy: ActorCritic) -> list[nn.Parameter]:
    """Return the state-independent `log_std` parameter in a list; an empty list if there is none."""
    head = policy.action_head
    parameter = getattr(head, "log_std", None)
    return [parameter] if isinstance(parameter, nn.Parameter) and head.log_limits == (-math.inf, math.inf) else []


def tanh_parameters(encoder: nn.Module | None) -> list[nn.Parameter] | None:
    """Return weight and bias of each layer; None unless the encoder is an MLP with tanh on vectors."""
    if type(encoder) is not MLPEncoder or not encoder.is_vector or type(encoder.layers) is not nn.Sequential:
        return None
    linear, tanh = list(encoder.layers)[::2], list(encoder.layers)[1::2]
    is_known = linear and [type(layer) for layer in tanh] == [nn.Tanh] * len(linear)
    return linear_parameters(linear, nn.Linear) if is_known else None


def linear_parameters(layers: Sequence[nn.Module], kind: type[nn.Linear] = HeadLinear) -> list[nn.Parameter] | None:
    """Return weight and bias of linear layers; None if a layer has another class or parametrized weights."""
    found = [x for layer in layers if type(layer) is kind for x in (layer.weight, layer.bias)]
    plain = len(found) == 2 * len(layers) and all(type(x) is nn.Parameter for x in found)
    return cast(list[nn.Parameter], found) if plain else None


def have_one_dtype(parameters: Sequence[Tensor]) -> bool:
    """Whether all parameters are on the CPU, in float32 or all in float64."""
    dtype = parameters[0].dtype
    return dtype in _DTYPES and all(x.is_cpu and x.dtype == dtype for x in parameters)


def overridden(owner: object, base: type[Any], members: Sequence[str]) -> str | None:
    """Return the first of `members` that an instance of `base`, or its class, overrides; None if there is none."""
    cls, own = type(owner), vars(owner)
    for name in members:
        if name in own or (cls is not base and getattr(cls, name, None) is not getattr(base, name)):
            return name
    return None


# PyTorch has no public API to find hooks (2.8 and 2.13 tested).
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
_GLOBAL_HOOKS = [f"_global{name}" for name in _HOOKS[:4]]
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_observed(root: nn.Module) -> bool:
    """Whether a module in `root` has hooks (global ones included), is compiled, or has an instance `forward`."""
    return any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS) or any(
        "forward" in vars(module) or any(getattr(module, name) for name in _HOOKS) for module in root.modules()
    )


def needs_autograd(root: nn.Module) -> bool:
    """Whether a module in `root` is observed, or a parameter has hooks, which only autograd calls."""
    has_hooks = (getattr(parameter, name) for parameter in root.parameters() for name in _PARAMETER_HOOKS)
    return is_observed(root) or any(has_hooks)
