"""`torch.compile(model)`, restricted to the policy."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def compile_policy_alone(model: LightningModule, policy: nn.Module) -> None:
    """Restrict the compilation of a model to its policy; a model that is not compiled stays as it is.

    Lightning compiles each step of a compiled model as a whole. A training step of this package contains optimizers,
    loggers and NumPy, which PyTorch's compiler cannot trace.

    A policy with memory is not compiled, with a warning: its shapes change with the episodes of each rollout.

    Args:
        model: What `torch.compile` may have been called with.
        policy: Its forward pass is compiled with the options of that call.
    """
    context = model._compiler_ctx  # private to Lightning 2.6, and the only record of these options
    if context is None:
        return
    for name in _STEPS:
        setattr(model, name, torch.compiler.disable(getattr(model, name)))  # type: ignore[no-untyped-call]
    if getattr(policy, "memory", None) is not None:
        rank_zero_warn(
            "torch.compile(model): the policy has memory and is not compiled, because the compiler would start again "
            "for the episode lengths of each rollout; drop torch.compile"
        )
        return
    # What `nn.Module.compile` of PyTorch 2.13 does with options of its own; copies and pickles leave it out.
    policy._compiled_call_impl = context["dynamo_ctx"](policy._call_impl)
