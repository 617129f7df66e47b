"""Distributions of continuous actions, and the heads that make them."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from lightning_rl.distributed import exact_dtype
from lightning_rl.policies.distributions.base import Distribution, Initialization, projection
from lightning_rl.policies.networks.mlp import at_least_float32
from lightning_rl.validation import PositiveFloat, check

LOG_2PI = math.log(2 * math.pi)
Std = Literal["state_independent", "state_dependent"]
StdTransform = Literal["exp", "softplus"]
MeanTransform = Literal["none", "tanh"]


class _Constants:
    """Numbers as tensors of any dtype on any device; not buffers, because a bfloat16 module would round them."""

    def __init__(self, *arrays: np.ndarray[Any, Any]) -> None:
        # Lists, because the compiler, which refuses NumPy, may be the first to ask for the tensors.
        self._lists = [array.tolist() for array in arrays]
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def like(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors with dtype and device of x."""
        key = (x.device, x.dtype)
        if key not in self._tensors:
            with torch.inference_mode(False):  # tensors made while acting are used in updates too
                self._tensors[key] = tuple(torch.tensor(a, dtype=x.dtype, device=x.device) for a in self._lists)
        return self._tensors[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}  # a copy may be on another device


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_QUADRATURE = _Constants(_NODES, _WEIGHTS / _WEIGHTS.sum())


class Bounds:
    """Bounds of the components of a `Box`, flattened to `[a]`; `low` and `high` are arrays of float64."""

    def __init__(self, space: spaces.Box) -> None:
        self.low = space.low.astype(np.float64).ravel()
        self.high = space.high.astype(np.float64).ravel()
        # The bounds are halved first, because their sum or difference may overflow or be inf - inf.
        with np.errstate(invalid="ignore"):
            center, half_width = self.high / 2 + self.low / 2, self.high / 2 - self.low / 2
        self._constants = _Constants(self.low, self.high, center, half_width)

    @property
    def any_finite(self) -> bool:
        return bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())

    def from_unit(self, x: Tensor) -> Tensor:
        _, _, center, half_width = self._constants.like(x)
        return center + half_width * x

    def log_half_width(self, x: Tensor) -> Tensor:
        return self._constants.like(x)[3].log()

    def outside(self, x: Tensor) -> Tensor:
        low, high, _, _ = self._constants.like(x)
        return (x < low) | (x > high)


def _present(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return values of components `[..., a]`, with 0 for components that the action does not have."""
    return x if mask is None else torch.where(mask != 0, x, 0)


class DiagonalGaussian(Distribution):
    """Independent normal distributions, one per action dimension; mean `[..., a]`, `log_std` broadcastable to it.

    Where a `mask` `[..., a]` is 0, the action does not have the component: it is 0 and does not count.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, mask: Tensor | None = None) -> None:
        self.mean = at_least_float32(mean)
        self.log_std = at_least_float32(log_std)
        self.mask = mask
        self._sum_log_std: Tensor | None = None

    @property
    def sum_log_std(self) -> Tensor:
        """Sum of `log_std` over action dimensions, `[...]`; a scalar if all rows share it."""
        if self._sum_log_std is not None:
            return self._sum_log_std
        log_std = self.log_std.expand(*self.log_std.shape[:-1], self.mean.shape[-1])
        total = _present(log_std, self.mask).sum(-1)
        if total.requires_grad == self.log_std.requires_grad:  # not for later calls if computed in `no_grad`
            self._sum_log_std = total
        return total

    @property
    def num_components(self) -> int | Tensor:
        return self.mean.shape[-1] if self.mask is None else (self.mask != 0).to(self.mean.dtype).sum(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw mean + std · ε; the action is not clipped to any bounds."""
        with torch.no_grad():
            sample = self.mean + self.log_std.exp() * torch.empty_like(self.mean).normal_(generator=generator)
            return _present(sample, self.mask)

    def mode(self) -> Tensor:
        return _present(self.mean, self.mask)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of `action` (shape `[..., a]`), summed over action dimensions."""
        z = _present((action - self.mean) * (-self.log_std).exp(), self.mask)
        return -0.5 * z.square().sum(-1) - (self.sum_log_std + 0.5 * LOG_2PI * self.num_components)

    def entropy(self) -> Tensor:
        """Return Σ (log std + ½ log 2πe)."""
        entropy = self.sum_log_std + 0.5 * (1 + LOG_2PI) * self.num_components
        return entropy.expand(self.mean.shape[:-1])

    def kl(self, other: Self) -> Tensor:
        change = 2 * (self.log_std - other.log_std)  # near 0, the digits of exp(change) - 1 would cancel
        z = (self.mean - other.mean) * (-other.log_std).exp()
        per_dimension = 0.5 * (change.expm1() - change + z.square())
        return _present(per_dimension, self.mask).sum(-1)

    def parameters(self) -> dict[str, Tensor]:
        """Return `mean` and `log_std`, `[..., a]` each."""
        return {"mean": self.mean, "log_std": self.log_std.expand_as(self.mean)}

    def with_parameters(self, parameters: dict[str, Tensor]) -> DiagonalGaussian:
        return DiagonalGaussian(parameters["mean"], parameters["log_std"], self.mask)


class SquashedGaussian(DiagonalGaussian):
    """center + half width · tanh(u), with u from a diagonal Gaussian: actions never leave the bounds.

    The policy's form of an action is u, because u cannot be recovered from an action that was rounded to its bound. The
    mode is the mean of u, which maps to the median. The divergence is the divergence of u: the map is invertible.
    `mean` `[..., a]` and `log_std` belong to u.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, bounds: Bounds, mask: Tensor | None = None) -> None:
        super().__init__(mean, log_std, mask)
        self.bounds = bounds

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of the bounded action to which `action` (u, shape `[..., a]`) maps."""
        return super().log_prob(action) - self._log_slope(_log_tanh_slope(action))

    def entropy(self) -> Tensor:
        """Return the entropy of u plus the mean log-slope of the map, by Gauss-Hermite quadrature.

        With 32 nodes per dimension the error is below 1e-6 for standard deviations of u up to 1, below 1e-3 up to 2,
        and below 0.03 up to 5.
        """
        mean, std = self.mean.unsqueeze(-1), self.log_std.exp().unsqueeze(-1)
        nodes, weights = _QUADRATURE.like(mean)
        return super().entropy() + self._log_slope((_log_tanh_slope(mean + std * nodes) * weights).sum(-1))

    def with_parameters(self, parameters: dict[str, Tensor]) -> SquashedGaussian:
        return SquashedGaussian(parameters["mean"], parameters["log_std"], self.bounds, self.mask)

    def to_space(self, action: Tensor) -> Tensor:
        return self.bounds.from_unit(action.tanh())

    def _log_slope(self, of_tanh: Tensor) -> Tensor:
        """Return the logarithm of the volume's change, `[...]`, for the log-slopes of tanh, `[..., a]`."""
        return _present(of_tanh + self.bounds.log_half_width(of_tanh), self.mask).sum(-1)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh² u), without the cancellation near the bounds."""
    return 2 * (math.log(2) - u + logsigmoid(2 * u))


class Beta(Distribution):
    """low + width · x, with independent x from beta distributions (Chou et al. 2017): actions never leave the bounds.

    The policy's form of an action is z = log x - log(1 - x). From z the density is exact even where x rounds to 0 or 1.
    The concentrations at the upper bound, `alpha`, and at the lower, `beta`, are at least 1, `[..., a]`; for `mask` see
    `DiagonalGaussian`. Densities are computed in float64: their terms are as large as α + β, and cancel to about 1.
    """

    def __init__(self, alpha: Tensor, beta: Tensor, bounds: Bounds, mask: Tensor | None = None) -> None:
        self.alpha = at_least_float32(alpha)
        self.beta = at_least_float32(beta)
        self.bounds = bounds
        self.mask = mask

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw z, the difference of the logarithms of two gamma variables."""
        with torch.no_grad():
            # `torch.distributions.Gamma` takes no generator; the private function was checked with PyTorch 2.13.
            gammas = [torch._standard_gamma(x.contiguous(), generator=generator) for x in (self.alpha, self.beta)]
            return _present(gammas[0].log() - gammas[1].log(), self.mask)

    def mode(self) -> Tensor:
        """Return the logit of (α - 1) / (α + β - 2); 0 for the uniform distribution α = β = 1."""
        tiny = torch.finfo(self.alpha.dtype).tiny
        return _present((self.alpha - 1).clamp(min=tiny).log() - (self.beta - 1).clamp(min=tiny).log(), self.mask)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of the bounded action to which `action` (z, shape `[..., a]`) maps."""
        a, b, z = _exact(self.alpha, self.beta, action)
        return self._total((a - 1) * logsigmoid(z) + (b - 1) * logsigmoid(-z) - _log_beta(a, b) - self._log_width)

    def entropy(self) -> Tensor:
        a, b = _exact(self.alpha, self.beta)
        shape = _log_beta(a, b) - (a - 1) * a.digamma() - (b - 1) * b.digamma() + (a + b - 2) * (a + b).digamma()
        return self._total(shape + self._log_width)

    def kl(self, other: Self) -> Tensor:
        a, b, c, d = _exact(self.alpha, self.beta, other.alpha, other.beta)
        moments = (a - c) * a.digamma() + (b - d) * b.digamma() + (c + d - a - b) * (a + b).digamma()
        return self._total(_log_beta(c, d) - _log_beta(a, b) + moments)

    def parameters(self) -> dict[str, Tensor]:
        """Return both concentrations, `[..., a]` each."""
        return {"alpha": self.alpha, "beta": self.beta}

    def with_parameters(self, parameters: dict[str, Tensor]) -> Beta:
        return Beta(parameters["alpha"], parameters["beta"], self.bounds, self.mask)

    def to_space(self, action: Tensor) -> Tensor:
        return self.bounds.from_unit((action / 2).tanh())

    def _total(self, per_dimension: Tensor) -> Tensor:
        return _present(per_dimension, self.mask).sum(-1).to(self.alpha.dtype)

    @property
    def _log_width(self) -> Tensor:
        return self.bounds.log_half_width(*_exact(self.alpha)) + math.log(2)


def _exact(*tensors: Tensor) -> list[Tensor]:
    return [x.to(exact_dtype(x.device)) for x in tensors]


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return a.lgamma() + b.lgamma() - (a + b).lgamma()


class _Limit(torch.autograd.Function):
    """Clamp `x`, and stop only the gradients that lead further out.

    `Tensor.clamp` stops all gradients, so that a parameter outside the limits would stay there for the rest of the run.
    """

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.limits = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), gradient = ctx.saved_tensors, ctx.limits, gradients[0]
        # Gradient descent increases x where the gradient is negative.
        leads_out = ((x < low) & (gradient > 0)) | ((x > high) & (gradient < 0))
        return torch.where(leads_out, 0, gradient), None, None


def _limit(x: Tensor, low: float, high: float) -> Tensor:
    return _Limit.apply(x, low, high)  # type: ignore[no-any-return, no-untyped-call]


# Otherwise the compiled engine cannot trace the captured graph a second time.
torch.compiler.allow_in_graph(_limit)  # type: ignore[no-untyped-call]


class _GaussianHead(nn.Module):
    """Linear mean, and a standard deviation that is linear or independent of the features.

    Args:
        in_features: Number of features.
        space: A `Box`.
        initial_log_std: Logarithm of the initial standard deviation, unless `initial_std` is given.
        std: `state_independent`: one parameter per action dimension. `state_dependent`: a linear layer.
        std_transform: `exp` or `softplus`; makes the standard deviation positive.
        min_std: Lower limit of the standard deviation; None for no limit.
        max_std: Upper limit of the standard deviation; None for no limit.
        initial_std: Initial standard deviation; approximate if state-dependent.
        initialization: See `Initialization`.
    """

    def __init__(
        self,
        in_features: int,
        space: spaces.Box,
        *,
        initial_log_std: float = 0.0,
        std: Std = "state_independent",
        std_transform: StdTransform = "exp",
        min_std: PositiveFloat | None = None,
        max_std: PositiveFloat | None = None,
        initial_std: PositiveFloat | None = None,
        initialization: Initialization = "orthogonal",
    ) -> None:
        super().__init__()
        first_std = math.exp(initial_log_std) if initial_std is None else initial_std
        expected = f"a value between min_std={min_std} and max_std={max_std}; the default is exp(initial_log_std)"
        is_inside = (min_std is None or first_std >= min_std) and (max_std is None or first_std <= max_std)
        check(is_inside, "policy.action_distribution.initial_std", first_std, expected)
        self.bounds = Bounds(space)
        self.log_limits = math.log(min_std) if min_std else -math.inf, math.log(max_std) if max_std else math.inf
        self.softplus = std_transform == "softplus"
        num_dimensions = len(self.bounds.low)
        raw = float(initial_log_std) if initial_std is None else math.log(initial_std)
        if self.softplus:  # the inverse of softplus
            raw = first_std + math.log(-math.expm1(-first_std))
        self.mean = projection(in_features, num_dimensions, initialization)
        self.std_layer: nn.Linear | None = None
        if std == "state_dependent":
            self.std_layer = projection(in_features, num_dimensions, initialization)
            nn.init.constant_(self.std_layer.bias, raw)
        elif self.softplus:
            self.raw_std = nn.Parameter(torch.full((num_dimensions,), raw))
        else:
            self.log_std = nn.Parameter(torch.full((num_dimensions,), raw))

    def _log_std(self, features: Tensor) -> Tensor:
        if self.std_layer is not None:
            raw = self.std_layer(features)
        else:
            raw = self.raw_std if self.softplus else self.log_std
        if self.softplus:
            std = softplus(at_least_float32(raw))
            raw = std.clamp(min=torch.finfo(std.dtype).tiny).log()
        is_limited = any(map(math.isfinite, self.log_limits))
        return _limit(raw, *self.log_limits) if is_limited else raw


class GaussianHead(_GaussianHead):
    """A diagonal Gaussian for a `Box`. Only the environment clips its actions to the bounds.

    `mean_transform` is `none`, or `tanh` to squash the mean into the bounds, which must be finite.
    """

    def __init__(
        self, in_features: int, space: spaces.Box, *, mean_transform: MeanTransform = "none", **options: Any
    ) -> None:
        super().__init__(in_features, space, **options)
        bounded, expected = mean_transform == "none" or space.is_bounded(), f"none, since {space} has no bounds"
        check(bounded, "policy.action_distribution.mean_transform", mean_transform, expected)
        self.squashes_mean = mean_transform == "tanh"

    def forward(self, features: Tensor, mask: Tensor | None = None) -> DiagonalGaussian:
        mean = self.mean(features)
        if self.squashes_mean:
            mean = self.bounds.from_unit(mean.tanh())
        return DiagonalGaussian(mean, self._log_std(features), mask)

    def clipped(self, actions: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return which components of actions `[..., a]` the environment clips, `[n]`; None without finite bounds."""
        if not self.bounds.any_finite:
            return None
        outside = self.bounds.outside(actions)
        return outside.flatten() if mask is None else outside[mask != 0]


class SquashedGaussianHead(_GaussianHead):
    """A diagonal Gaussian squashed by tanh into a bounded `Box`; its options apply to the Gaussian before tanh."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> SquashedGaussian:
        return SquashedGaussian(self.mean(features), self._log_std(features), self.bounds, mask)


class BetaHead(nn.Module):
    """Linear layer to concentrations 1 + softplus of a bounded `Box`, so that the density has one peak."""

    def __init__(self, in_features: int, space: spaces.Box, *, initialization: Initialization = "orthogonal") -> None:
        super().__init__()
        self.bounds = Bounds(space)
        self.concentrations = projection(in_features, 2 * len(self.bounds.low), initialization)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Beta:
        alpha, beta = (1 + softplus(self.concentrations(features))).chunk(2, -1)
        return Beta(alpha, beta, self.bounds, mask)
