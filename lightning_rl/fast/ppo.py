"""PPO's loss and its gradient in closed form, for small networks where autograd takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_rl.fast.numpy_mlp import (
    Array,
    NumpyMLP,
    Preparation,
    actor_parameters,
    have_one_dtype,
    linear_parameters,
    log_std,
    needs_autograd,
    overridden,
    tanh_parameters,
)
from lightning_rl.fast.programs import ComputedLoss, KnownLoss
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions.continuous import LOG_2PI
from lightning_rl.policies.networks.mlp import MLPEncoder
from lightning_rl.rollouts.batch import Batch

_OBSERVED = ("approx_kl", "approx_kl_k1", "clip_fraction")
# Errors name the first non-finite term, so the sum comes after its parts.
_NAMES = ("policy_loss", "entropy", "value_loss", "loss", *_OBSERVED)
# Options of PPO that the closed form does not support, by attribute.
_OPTIONS = {
    "log_prob_clip": "clipping.log_prob",
    "dual_clip": "clipping.dual",
    "value_huber_delta": "clipping.value_huber_delta",
}
_POLICY = [name for name, member in vars(ActorCritic).items() if callable(member)]


class PPOLoss:
    """`PPO.loss` and its gradient, computed with NumPy.

    Supports the default options, and policies of two tanh MLPs with a categorical or Gaussian action; see `of`. `actor`
    and `critic` are weight and bias of each layer, `shared` the log standard deviation of a Gaussian policy.
    """

    max_rows = 8192
    """Autograd is as fast for more rows, and PyTorch may use several threads."""

    def __init__(
        self,
        model: Any,  # PPO's module imports this one
        actor: Sequence[nn.Parameter],
        critic: Sequence[nn.Parameter],
        shared: Sequence[nn.Parameter],
    ) -> None:
        self.model, self.shared = model, shared
        self.actor, self.critic = NumpyMLP(actor), NumpyMLP(critic)
        self.parameters = [*actor, *critic, *shared]
        self.dtype = model.policy.dtype
        self._prepare = Preparation(model.policy)

    @classmethod
    def of(cls, model: Any) -> PPOLoss | str:
        """Return the closed form for the updates from one rollout, or the reason why there is none."""
        policy = model.policy
        for name, option in _OPTIONS.items():
            if getattr(model, name):
                return f"{option} is set"
        if model.penalties:
            return "optimizer.l2 is set"
        if model.frozen_parameters(None):
            return "a part of the policy is frozen"
        if type(policy) is not ActorCritic:
            return f"the policy is a {type(policy).__name__}"
        if (own := overridden(policy, ActorCritic, _POLICY)) is not None:
            return f"the policy has its own {own}"
        if needs_autograd(policy):
            return "the policy has hooks or is compiled"
        if isinstance(policy.actor_encoder, MLPEncoder) and not policy.actor_encoder.is_vector:
            return "the observations are not vectors in a Box space"
        actor, critic = actor_parameters(policy), tanh_parameters(policy.critic_encoder)
        last = linear_parameters([policy.value_head])
        if actor is None or critic is None or last is None or policy.value_normalizer is not None:
            return "the policy is not two tanh MLPs with a categorical or Gaussian action"
        made = cls(model, actor, [*critic, *last], log_std(policy))
        if not have_one_dtype(made.parameters):
            return "the parameters are not all on the CPU in float32 or all in float64"
        if len(set(made.parameters)) < len(made.parameters):
            return "two layers share a parameter"
        if not all(parameter.requires_grad for parameter in made.parameters):
            return "a parameter is frozen"
        return made

    def __call__(self, batch: Batch) -> KnownLoss | None:
        """Return the loss over a minibatch with its gradients; None for masks, sequences or other dtypes."""
        model = self.model
        x, actions = self._prepare(batch.observations) if batch.is_plain else None, batch.actions
        if x is None or not 0 < len(x) <= self.max_rows:
            return None
        numbers = [batch.log_probs, batch.advantages, batch.returns, batch.values]
        numbers += [actions] if actions.is_floating_point() else []
        if any(x.dtype is not self.dtype for x in numbers) or not all(x.requires_grad for x in self.parameters):
            return None
        advantages = model.estimator.normalized(batch)
        with torch.no_grad(), np.errstate(all="ignore"):  # the update checks for non-finite values
            outputs, values = (network.forward(torch.from_numpy(x)).numpy() for network in (self.actor, self.critic))
            shared = [parameter.detach().numpy() for parameter in self.shared]
            rows = (GaussianRows if shared else CategoricalRows)(actions.numpy(), outputs, *shared)
            log_ratios = rows.log_prob - batch.log_probs.numpy()
            policy_loss, of_log_probs, observed = self._policy_part(log_ratios, advantages.numpy(), batch.weight)
            of_outputs, *of_shared = rows.gradients(of_log_probs, -float(model.entropy_coef) * batch.weight)
            value_loss, of_values = self._value_part(batch, values[:, 0])
            gradients = (
                *self.actor.backward(torch.from_numpy(of_outputs)),
                *self.critic.backward(torch.from_numpy(of_values[:, None])),
                *map(torch.from_numpy, of_shared),
            )
            entropy = batch.weight * rows.entropies
            bonus = [-model.entropy_coef * entropy] if model.entropy_coef else []
            summands = [policy_loss, *bonus, model.value_coef * value_loss]
            named = [policy_loss, entropy, value_loss, sum(summands), *observed]
            recorded, terms = (torch.from_numpy(np.array(numbers, of_values.dtype)) for numbers in (named, summands))
        limits = {} if model.target_kl is None else {"approx_kl": 1.5 * model.target_kl}
        loss = ComputedLoss(
            recorded=(_NAMES, recorded, _OBSERVED),
            total=recorded[_NAMES.index("loss")],
            terms=terms,
            first_log_ratios=torch.from_numpy(log_ratios),
            limits=limits,
            has_value=True,
        )
        return loss, [*zip(self.parameters, gradients, strict=True)]

    def _policy_part(self, log_ratios: Array, advantages: Array, weight: float) -> tuple[Any, Array, tuple[Any, ...]]:
        """Return the clipped surrogate loss (Schulman et al. 2017, equation 7) and its gradient, `[N]`.

        The third result has the estimates k3 and k1 of the KL divergence and the fraction of clipped ratios.
        """
        low, high = map(float, self.model.clip_ranges)
        changes = np.expm1(log_ratios)
        losses = -advantages
        bound = np.minimum(losses * (1 - low), losses * (1 + high))
        if math.inf in (low, high):
            # 0 · inf is NaN: with no clipping and advantage 0, the bound is 0.
            np.nan_to_num(bound, copy=False, nan=0.0, posinf=math.inf, neginf=-math.inf)
        # NumPy's exponential differs in the last bit of float32, which matters at the edge of the clip range.
        losses *= torch.from_numpy(log_ratios).exp().numpy()
        gradient = losses * (losses >= bound)  # NaN for an infinite ratio, as in autograd
        gradient *= weight
        policy_loss = weight * np.maximum(losses, bound, out=losses).sum()
        k3, k1 = weight * (changes - log_ratios).sum(), -weight * log_ratios.sum()
        clipped = weight * np.count_nonzero((changes < -low) | (changes > high))
        return policy_loss, gradient, (k3, k1, clipped)

    def _value_part(self, batch: Batch, values: Array) -> tuple[Any, Array]:
        returns, weight = batch.returns.numpy(), batch.weight
        errors = values - returns
        losses, gradient = errors * errors, errors
        if self.model.clip_range_value is not None:
            limit, changes = float(self.model.clip_range_value), values - batch.values.numpy()
            bounded = batch.values.numpy() + np.clip(changes, -limit, limit) - returns
            bounded *= bounded
            # The clipped error is constant beyond the range. Equal errors share the gradient, as in `torch.maximum`.
            share = np.heaviside(losses - bounded, 0.5)
            gradient = errors * np.where(np.abs(changes) > limit, share, 1)
            losses = np.maximum(losses, bounded)
        return 0.5 * weight * losses.sum(), gradient * (float(self.model.value_coef) * weight)


class CategoricalRows:
    """Log-probabilities `[N]` and the sum of entropies of categorical distributions, from logits `[N, n]`."""

    def __init__(self, actions: NDArray[np.integer[Any]], logits: Array) -> None:
        # Transposed, because a sum over the few actions then adds a few long vectors.
        log_probs = np.ascontiguousarray(logits.T)
        log_probs = log_probs - np.maximum.reduce(log_probs)
        probs = np.exp(log_probs)
        totals = np.add.reduce(probs)
        log_probs -= np.log(totals)
        probs /= totals
        self._log_probs, self._probs = log_probs, probs
        self._taken = actions, np.arange(len(actions))
        self.log_prob = log_probs[self._taken]
        self._entropies = -np.add.reduce(probs * log_probs)
        self.entropies = np.add.reduce(self._entropies)

    def gradients(self, log_prob: Array, entropy: float) -> tuple[Array, ...]:
        """Return the gradient of the logits, `[N, n]`: p (-g - e (log p + H)), plus g for the action taken.

        g is the gradient of each log-probability, `[N]`, and e the gradient of the entropy of each row.
        """
        if entropy:
            gradient = self._log_probs + self._entropies
            gradient *= -entropy
            gradient -= log_prob
            gradient *= self._probs
        else:  # the entropy term is NaN for a logit of -inf
            gradient = self._probs * -log_prob
        gradient[self._taken] += log_prob
        return (gradient.T,)


class GaussianRows:
    """Log-densities `[N]` and the sum of entropies of diagonal Gaussian distributions, with gradients.

    Actions and means are `[N, a]`; one `log_std` `[a]` holds for all rows.
    """

    def __init__(self, actions: Array, mean: Array, log_std: Array) -> None:
        rows, size = mean.shape
        self._inverse_std = np.exp(-log_std)
        self._z = (actions - mean) * self._inverse_std
        log_volume = np.add.reduce(log_std)
        self.log_prob = np.add.reduce(self._z * self._z, 1)
        self.log_prob *= -0.5
        self.log_prob -= log_volume + 0.5 * LOG_2PI * size
        self.entropies = rows * (log_volume + 0.5 * (1 + LOG_2PI) * size)

    def gradients(self, log_prob: Array, entropy: float) -> tuple[Array, ...]:
        """Return the gradients of `mean`, `[N, a]`, and `log_std`, `[a]`; arguments as in `CategoricalRows`."""
        of_z = self._z * log_prob[:, None]
        of_mean = of_z * self._inverse_std
        # Not a matrix product: NumPy's BLAS may run it on several threads.
        of_log_std = np.add.reduce(of_z * self._z)
        return of_mean, of_log_std + (entropy * len(log_prob) - np.add.reduce(log_prob))
