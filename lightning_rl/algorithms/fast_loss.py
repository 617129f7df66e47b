"""PPO's loss and its gradient in closed form, for networks so small that autograd takes longer than its operations."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.known_gradients import KnownGradients
from lightning_rl.algorithms.ppo_rows import policy_rows, value_rows
from lightning_rl.distributions.closed_form import Array
from lightning_rl.fast_layers import suits_numpy
from lightning_rl.fast_networks import FastNetworks
from lightning_rl.rollout import Batch

# What `FastLoss` computes in place of, and what takes its result: methods of `PPO`, and functions that they call.
_METHODS = (
    *("loss", "actor_terms", "value_loss", "penalties", "clip_fraction"),
    *("evaluate", "entropy", "total", "normalize_values", "normalizes_minibatches", "optimize"),
)
_FUNCTIONS = (
    *(policy_rows, value_rows, rl.dual_clipped_surrogate_loss, rl.value_loss),
    *(rl.approx_kl_k1, rl.approx_kl_k3),
)
FINGERPRINT = "e99c8f7b88b2b121"
"""Of the source of all of them. Whoever edits one, or a copy of it, learns by what they wrote, through autograd."""

_OBSERVED = ("approx_kl", "approx_kl_k1", "clip_fraction")
# The sum after its parts: of what is not finite the first is told of.
_TERMS = ("policy_loss", "entropy", "value_loss", "loss", *_OBSERVED)
_ABSOLUTE = "total_abs_loss"
_OPTIONS = ("log_prob_clip", "dual_clip", "value_huber_delta", "compile_loss", "overlapped")


def fingerprint(model_class: type) -> str | None:
    """Return a digest of the source that computes the loss of a class; None if there is none to be read."""
    found = [getattr(model_class, name) for name in _METHODS]
    return _digest(*(method.fget if isinstance(method, property) else method for method in found), *_FUNCTIONS)


@functools.cache
def _digest(*functions: Callable[..., Any]) -> str | None:
    try:
        source = "".join(map(inspect.getsource, functions))
    except (OSError, TypeError):  # without files, or something else that can be called
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _is_stepped_through() -> bool:
    """Return whether a debugger waits for lines to be reached."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return sys.gettrace() is not None or bool(monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID))


class FastLoss:
    """What `PPO.loss` computes of minibatches, and its gradient: few operations of NumPy in place of a graph.

    Starting the operations of a loss and of its backward pass takes several times as long as they do where networks are
    small. It is for the most frequent options; see `of`.

    Args:
        model: A `PPO`, whose loss it is.
        networks: Of its policy.
    """

    def __init__(self, model: Any, networks: FastNetworks) -> None:  # noqa: ANN401 - the module that imports this one
        self.model, self.networks = model, networks

    most_rows = 8192
    """Of more of them what operations do takes longer than starting them, and PyTorch may share it among threads."""

    @classmethod
    def of(cls, model: Any) -> FastLoss | None:  # noqa: ANN401
        """Return that of a model as it is now, until its updates from a rollout end.

        None for networks that `FastNetworks` has not, for options and penalties beyond clipping, entropy bonus and
        squared error, where a subclass or an edited method computes something of it in its own way, and while anomalies
        are looked for or a debugger looks on.

        Args:
            model: A `PPO`.
        """
        own_way = fingerprint(type(model)) != FINGERPRINT or any(name in vars(model) for name in _METHODS)
        options = any(getattr(model, name) not in (None, False) for name in _OPTIONS)
        others = any(model.weight_penalty.coefficients.values()) or model.idle_parameters(None)
        if own_way or options or others or torch.is_anomaly_enabled() or _is_stepped_through():
            return None
        networks = FastNetworks.of(model.policy)
        return None if networks is None else cls(model, networks)

    def __call__(self, batch: Batch) -> KnownGradients | None:
        """Return the loss over a minibatch with its gradients, and record its terms; None if it is no plain one."""
        model, networks = self.model, self.networks
        if not batch.is_plain or not 0 < len(batch) <= self.most_rows:
            return None
        x, actions = model.policy.prepare_observations(batch.observations), batch.actions
        numbers = [batch.log_probs, batch.advantages, batch.returns, batch.values]
        numbers += [actions] if actions.is_floating_point() else []
        if not suits_numpy(x) or any(tensor.dtype is not x.dtype for tensor in numbers):
            return None
        advantages = model.normalized_advantages(batch) if model.normalizes_minibatches else batch.advantages
        with torch.no_grad(), np.errstate(all="ignore"):  # what is not finite, the updates see
            outputs, values = networks.actor.forward(x), networks.critic.forward(x)
            shared = (parameter.detach().numpy() for parameter in networks.shared)
            rows = networks.make_rows(actions.numpy(), outputs.numpy(), *shared)
            log_ratios = rows.log_prob - batch.log_probs.numpy()
            policy_loss, of_log_probs, observed = self._policy_part(log_ratios, advantages.numpy(), batch.weight)
            of_outputs, *of_shared = rows.gradients(of_log_probs, -float(model.entropy_coef) * batch.weight)
            value_loss, of_values = self._value_part(batch, values.numpy()[:, 0])
            gradients = (
                *networks.actor.backward(torch.from_numpy(of_outputs)),
                *networks.critic.backward(torch.from_numpy(of_values[:, None])),
                *map(torch.from_numpy, of_shared),
            )
            entropy = batch.weight * rows.entropies
            bonus = [-model.entropy_coef * entropy] if model.entropy_coef else []
            summands = [policy_loss, *bonus, model.value_coef * value_loss]
            terms = [policy_loss, entropy, value_loss, sum(summands), *observed, sum(map(abs, summands))]
            told = np.array(terms, of_values.dtype)
        loss = self._record(torch.from_numpy(log_ratios), torch.from_numpy(told), summands)
        return KnownGradients(loss, networks.parameters, gradients)

    def _policy_part(self, log_ratios: Array, advantages: Array, weight: float) -> tuple[Any, Array, tuple[Any, ...]]:
        """Return the surrogate loss (equation 7), the gradient of each log-probability, and measures of the change.

        These are the estimates k3 and k1 of the divergence, and the share of clipped ratios.
        """
        low, high = map(float, self.model.clip_ranges)
        changes = np.expm1(log_ratios)
        losses = -advantages
        bound = np.minimum(losses * (1 - low), losses * (1 + high))
        if math.inf in (low, high):
            # 0 · inf, where nothing is clipped and the advantage is 0: so is the loss then.
            np.nan_to_num(bound, copy=False, nan=0.0, posinf=math.inf, neginf=-math.inf)
        # PyTorch's exponential, whose last bit decides at the very edge of the range: NumPy's differs in float32.
        losses *= torch.from_numpy(log_ratios).exp().numpy()
        gradient = losses * (losses >= bound)  # of an infinite ratio NaN, clipped or not, as by autograd
        gradient *= weight
        policy_loss = weight * np.maximum(losses, bound, out=losses).sum()
        k3, k1 = weight * (changes - log_ratios).sum(), -weight * log_ratios.sum()
        clipped = weight * np.count_nonzero((changes < -low) | (changes > high))
        return policy_loss, gradient, (k3, k1, clipped)

    def _value_part(self, batch: Batch, values: Array) -> tuple[Any, Array]:
        """Return the value loss and the gradient of each value, times its coefficient."""
        returns, weight = batch.returns.numpy(), batch.weight
        errors = values - returns
        losses, gradient = errors * errors, errors
        if self.model.clip_range_value is not None:
            limit, changes = float(self.model.clip_range_value), values - batch.values.numpy()
            bounded = batch.values.numpy() + np.clip(changes, -limit, limit) - returns
            bounded *= bounded
            # Beyond the range the bounded error is constant. Of two equal errors each gets half of the gradient, as in
            # `torch.maximum`.
            share = np.heaviside(losses - bounded, 0.5)
            gradient = errors * np.where(np.abs(changes) > limit, share, 1)
            losses = np.maximum(losses, bounded)
        return 0.5 * weight * losses.sum(), gradient * (float(self.model.value_coef) * weight)

    def _record(self, log_ratios: Tensor, terms: Tensor, summands: Sequence[Any]) -> Tensor:
        """Record what `PPO.loss` does, and return the loss.

        Args:
            log_ratios: Of the rows.
            terms: What is named in `_TERMS`, and the sum of the absolute values of the summands.
            summands: Of the loss.
        """
        model, alone = self.model, self.model.world_size == 1
        model.observe_first_ratios(log_ratios)
        # One after the other they take longer to record than to compute.
        names = (*_TERMS, _ABSOLUTE) if alone else _TERMS
        model.diagnostics.add_together(names, terms[: len(names)], _OBSERVED)
        if not alone:  # the mean over ranks, of which absolute values are taken, is not known here
            model.diagnostics.add_absolute(_ABSOLUTE, terms.new_tensor(np.array(summands)))
        model.stop_unless_close(terms[_TERMS.index("approx_kl")])
        return terms[_TERMS.index("loss")]
