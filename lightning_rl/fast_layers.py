"""Layers past what PyTorch does around them, where nobody looks at it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.watching import anybody_watches, is_watched

_OF_NUMPY = (torch.float32, torch.float64)
_TANH_BACKWARD = torch.ops.aten.tanh_backward.default


def apply_layers(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Return `layers(x)`, past PyTorch's way into a layer where nobody has put a hook there.

    For the observations of a few environments that way takes half as long as the layer itself. Linear layers with tanh
    on the CPU are one operation of autograd, `TanhLayers`.

    Args:
        layers: Any.
        x: `[..., features]`.
    """
    if type(layers) is not nn.Sequential or is_watched(layers) or anybody_watches():
        return layers(x)  # type: ignore[no-any-return]
    parameters = tanh_parameters(layers) if suits_numpy(x) else None
    if parameters is not None and parameters[0].dtype is x.dtype:
        return TanhLayers.apply(x, *parameters)  # type: ignore[no-any-return, no-untyped-call]
    for layer in layers._modules.values():
        compute = _LAYERS.get(type(layer))
        x = layer(x) if compute is None or is_watched(layer) else compute(layer._parameters, x)
    return x


class TanhLayers(torch.autograd.Function):
    """Linear layers with tanh after each, forward and backward, as one node of autograd's graph.

    With small networks starting autograd's operations takes longer than what they compute, and PyTorch's tanh on a CPU
    takes longer than the product of matrices before it (here 12 times as long as NumPy's).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:  # noqa: ANN401 - PyTorch's context
        """Return the features `[..., width]` of `x`, `[..., features]`, by weight and bias of each layer."""
        features = tanh_features(x, parameters)
        ctx.save_for_backward(*features, *parameters)
        return features[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of `x` and of the parameters."""
        saved = ctx.saved_tensors
        num_layers = len(saved) // 3
        features, parameters = saved[: num_layers + 1], saved[num_layers + 1 :]
        if torch.is_grad_enabled():  # somebody wants the gradient of the gradient
            return _differentiable_gradients(features[0], parameters, gradient)
        needs_x = ctx.needs_input_grad[0]
        shape = features[0].shape
        if len(shape) > 2:
            gradient, *features = (part.flatten(0, -2) for part in (gradient, *features))
        gradients = tanh_gradients(features, parameters, gradient)
        of_x = gradients[0].mm(parameters[0]).reshape(shape) if needs_x else None
        return (of_x, *gradients[1:])


def tanh_features(x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return `x`, `[..., features]`, and what each layer makes of it; without gradient.

    Args:
        x: As `suits_numpy` says.
        parameters: Weight and bias of each linear layer that has tanh after it.
    """
    features = [x]
    for k in range(0, len(parameters), 2):
        outputs = functional.linear(features[-1], parameters[k], parameters[k + 1])
        numbers = outputs.numpy()
        np.tanh(numbers, out=numbers)
        features.append(outputs)
    return features


def tanh_gradients(features: Sequence[Tensor], parameters: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return the gradients of what the first layer gives before its tanh, `[N, width]`, and of the parameters.

    Args:
        features: That `tanh_features` has made of rows.
        parameters: Likewise.
        gradient: Of the last features, `[N, width]`.
    """
    gradients: list[Tensor] = []
    for k in range(len(features) - 2, -1, -1):
        gradient = _TANH_BACKWARD(gradient, features[k + 1])
        gradients += [gradient.sum(0), product(gradient.t(), features[k])]
        if k > 0:
            gradient = gradient.mm(parameters[2 * k])
    return [gradient, *reversed(gradients)]


_MOST_OF_NUMPY = 2**18
"""Multiplications of a product beyond which NumPy's library may share it among threads that nobody has counted."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices on the CPU that need no gradient, `[N, K]` and `[K, M]`.

    NumPy's library takes a fraction of the time of PyTorch's where one side is narrow.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    if min(rows, inner, columns) > 1 and rows * inner * columns <= _MOST_OF_NUMPY:  # vectors have another limit
        return torch.from_numpy(a.numpy().dot(b.numpy()))
    # It takes several times as long where the narrow side is the second.
    return b.t().mm(a.t()).t().contiguous() if columns < rows else a.mm(b)


def _differentiable_gradients(x: Tensor, parameters: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return what `TanhLayers.backward` does, by operations that autograd knows."""
    features = x
    for k in range(0, len(parameters), 2):
        features = functional.linear(features, parameters[k], parameters[k + 1]).tanh()
    inputs = (x, *parameters)
    wanted = [part for part in inputs if part.requires_grad]
    found = iter(torch.autograd.grad(features, wanted, gradient, create_graph=True))
    return tuple(next(found) if part.requires_grad else None for part in inputs)


class ActingLayers:
    """Linear layers in NumPy, whose way to an operation is shorter: for a few rows at a time.

    Args:
        parameters: Weight and bias of each layer, on the CPU; not to be changed between calls.
        tanh_at_last: Whether there is a tanh after the last layer, too.
    """

    most_rows = 64
    """Of more of them the products take most of the time, which PyTorch may share among threads."""

    def __init__(self, parameters: Sequence[Tensor], *, tanh_at_last: bool) -> None:
        arrays = [parameter.detach().numpy() for parameter in parameters]
        last = len(arrays) - 2
        self._given = [(arrays[k], arrays[k + 1], k < last or tanh_at_last) for k in range(0, len(arrays), 2)]
        self._layers, self._rows = self._given, 0
        self.dtype = parameters[0].dtype

    @classmethod
    def of(cls, parameters: Sequence[Tensor] | None, *, tanh_at_last: bool) -> ActingLayers | None:
        """Return those of parameters, if there are any; None where NumPy has not all of them, or somebody looks on."""
        if parameters is None or anybody_watches() or not all(map(is_numpys, parameters)):
            return None
        return cls(parameters, tanh_at_last=tanh_at_last)

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the features `[N, width]` of rows `[N, features]`; None if these are too many or of another kind."""
        if x.dtype is not self.dtype or not suits_numpy(x):
            return None
        numbers = x.numpy()
        if numbers.ndim != 2 or len(numbers) > self.most_rows:
            return None
        if len(numbers) != self._rows:
            self._lay_out_for(len(numbers))
        for weight, biases, tanh in self._layers:
            numbers = numbers.dot(weight)
            numbers += biases
            if tanh:
                np.tanh(numbers, out=numbers)
        return torch.from_numpy(numbers)

    def _lay_out_for(self, rows: int) -> None:
        """Copy the parameters to where so few rows take half of the time: weights as they are read, biases repeated."""
        self._rows = rows
        self._layers = [
            (np.ascontiguousarray(weight.T), np.repeat(bias[None], rows, 0), tanh) for weight, bias, tanh in self._given
        ]


class ActsFast(nn.Module, ABC):
    """A module that computes with `_acting` where that is not None and takes its input: see `frozen_layers`."""

    _acting: ActingLayers | None = None

    @abstractmethod
    def acting_layers(self) -> ActingLayers | None:
        """Return layers for acting, as long as the parameters stay as they are; None where that will not do."""


@contextlib.contextmanager
def frozen_layers(policy: object) -> Iterator[None]:
    """Promise that nobody learns in here, nor looks into the layers of a policy: only acting goes on.

    A policy that has a way of its own to act may change weights as it does, by noise that it explores with: its layers
    are not taken for frozen.
    """
    acts = getattr(type(policy), "act", None)
    is_own = acts is not None and not acts.__module__.startswith("lightning_rl.")
    modules = policy.modules() if isinstance(policy, nn.Module) and not is_own else ()
    frozen = [module for module in modules if isinstance(module, ActsFast)]
    for module in frozen:
        module._acting = module.acting_layers()
    try:
        yield
    finally:
        for module in frozen:
            module._acting = None


def acting_tanh_layers(layers: nn.Sequential) -> ActingLayers | None:
    """Return those of linear layers with tanh after each; None where these are others, or somebody looks at them."""
    return ActingLayers.of(tanh_parameters(layers), tanh_at_last=True)


def tanh_parameters(layers: nn.Module) -> list[nn.Parameter] | None:
    """Return weight and bias of each layer; None if they are not linear ones with tanh after each, all of one dtype."""
    if type(layers) is not nn.Sequential or is_watched(layers):
        return None
    parameters: list[nn.Parameter] = []
    expected: type[nn.Module] = nn.Linear
    for layer in layers._modules.values():
        if type(layer) is not expected or is_watched(layer):
            return None
        if expected is nn.Linear:
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:
                return None
            parameters += [weight, bias]
        expected = nn.Tanh if expected is nn.Linear else nn.Linear
    dtypes = {parameter.dtype for parameter in parameters}
    return parameters if expected is nn.Linear and len(dtypes) == 1 else None


def suits_numpy(x: Tensor) -> bool:
    """Whether `x` is an ordinary tensor of rows that NumPy computes with as PyTorch would."""
    return type(x) is Tensor and is_numpys(x) and x.dim() > 1 and not torch.is_autocast_enabled("cpu")


def is_numpys(x: Tensor) -> bool:
    """Whether NumPy can see the numbers of `x` and computes with their dtype."""
    return x.is_cpu and x.dtype in _OF_NUMPY


def numpy_sees(x: Tensor) -> bool:
    """Whether NumPy can see the numbers of `x`, of whichever type."""
    return x.is_cpu and x.dtype is not torch.bfloat16


# What layers of exactly these classes compute with their parameters.
_LAYERS: dict[type[nn.Module], Callable[[dict[str, Any], Tensor], Tensor]] = {
    nn.Linear: lambda parameters, x: functional.linear(x, parameters["weight"], parameters["bias"]),
    nn.Tanh: lambda _, x: torch.tanh(x),
}
