"""A table of the parts of the model that have parameters."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import nn

Row = tuple[str, str, int]
"""Name, kind and number of parameters."""


class PolicySummary(ModelSummary):
    """Log the parts of the policy and their numbers of parameters, instead of Lightning's model summary.

    Lightning's summary lists modules without parameters, and FLOPs of a forward pass that it does not run.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = list(parts(pl_module))
        first, second = (max(map(len, names), default=0) for names in ([x[0] for x in rows], [x[1] for x in rows]))
        lines = [f"  {name:<{first}}  {kind:<{second}}  {count:>11,}" for name, kind, count in rows]
        total = sum(x.numel() for x in pl_module.parameters())
        trainable = sum(x.numel() for x in pl_module.parameters() if x.requires_grad)
        frozen = "" if trainable == total else f", {total - trainable:,} of them frozen"
        rank_zero_info("\n".join([f"{type(pl_module).__name__} has {total:,} parameters{frozen}:", *lines]))


def parts(module: nn.Module) -> Iterator[Row]:
    """Yield the grandchildren of a module that have parameters, and parameters outside of them."""
    for name, child in module.named_children():
        for part, inner in child.named_children():
            if count := sum(x.numel() for x in inner.parameters()):
                yield f"{name}.{part}", type(inner).__name__, count
        for part, x in child.named_parameters(recurse=False):
            yield f"{name}.{part}", "Parameter", x.numel()
    for name, x in module.named_parameters(recurse=False):
        yield name, "Parameter", x.numel()
