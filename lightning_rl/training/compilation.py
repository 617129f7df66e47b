"""Support for `torch.compile(model)`: only the policy and the loss are compiled."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def compile_policy_and_loss(model: LightningModule, policy: nn.Module) -> None:
    """Compile only policy and loss of a model that `torch.compile` was called with; leave other models unchanged.

    Lightning compiles whole steps. A training step of this package contains optimizers, loggers and NumPy, which the
    compiler cannot trace. A policy with memory is not compiled: its shapes change with every rollout.
    """
    context = model._compiler_ctx  # private in Lightning 2.6; no public attribute has these options
    if context is None:
        return
    for name in _STEPS:
        setattr(model, name, torch.compiler.disable(getattr(model, name)))  # type: ignore[no-untyped-call]
    if getattr(policy, "memory", None) is not None:
        rank_zero_warn(
            "torch.compile(model): the policy has memory and is not compiled, because the compiler would recompile "
            "for the episode lengths of each rollout; drop torch.compile"
        )
        return
    # `nn.Module.compile` of PyTorch 2.13 assigns the same attribute, which copies and pickles leave out; but it cannot
    # be called with the options of an earlier torch.compile.
    policy._compiled_call_impl = context["dynamo_ctx"](policy._call_impl)
    if "loss" not in vars(model):
        model.loss = context["dynamo_ctx"](model.loss)
