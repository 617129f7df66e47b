"""Pure functions of tensors: returns, advantages and losses.

The functions take and return tensors and depend on torch only. `returns` computes targets without gradient; `losses`
computes differentiable losses. Functions raise a `ValueError` if the shapes of their tensors do not match, or if a
bound or coefficient that is a Python number is negative. No function reads tensor values, so none waits for a GPU,
except `better_half` with weights.
"""

from lightning_rl.functional.losses import (
    adapted_kl_coef,
    approx_kl_k1,
    approx_kl_k2,
    approx_kl_k3,
    better_half,
    clip_indicator,
    clipped_surrogate_loss,
    clipped_value_loss,
    dual_clipped_surrogate_loss,
    explained_variance,
    huber_value_loss,
    kl_cutoff_penalty,
    lagrangian,
    normalize_rows,
    policy_gradient_loss,
    squared_norm,
    value_cloning_loss,
    value_loss,
    vmpo_policy_loss,
    vmpo_temperature_loss,
)
from lightning_rl.functional.returns import (
    VTraceReturns,
    discounted_returns,
    gae,
    reverse_scan,
    td_lambda_returns,
    vtrace,
)

__all__ = [
    "VTraceReturns",
    "adapted_kl_coef",
    "approx_kl_k1",
    "approx_kl_k2",
    "approx_kl_k3",
    "better_half",
    "clip_indicator",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "discounted_returns",
    "dual_clipped_surrogate_loss",
    "explained_variance",
    "gae",
    "huber_value_loss",
    "kl_cutoff_penalty",
    "lagrangian",
    "normalize_rows",
    "policy_gradient_loss",
    "reverse_scan",
    "squared_norm",
    "td_lambda_returns",
    "value_cloning_loss",
    "value_loss",
    "vmpo_policy_loss",
    "vmpo_temperature_loss",
    "vtrace",
]
