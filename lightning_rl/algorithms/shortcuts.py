"""Backward passes and steps without Lightning's way around them, where nobody stands on that way."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.algorithms.flat_adam import FlatAdam


class Shortcuts(LightningModule):
    """A module that finds out who takes part in its backward passes and steps, and asks nobody else.

    Lightning's way through the hooks of every callback, which are empty mostly, is long for a small network.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks_around_backward = self._hooks_around_step = True
        self.goes_past_backward = False
        """Whether a gradient that is known may be given to parameters as it is."""

    def find_shortcuts(self) -> None:
        """Look who there is: callbacks may come and go between rollouts."""
        self._hooks_around_backward = self._find_hooks_around_backward()
        self._hooks_around_step = self._find_hooks_around_step()
        self.goes_past_backward = not self._hooks_around_backward and self._backward_is_pytorchs()

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Lightning's
        """Compute the gradient as `LightningModule.manual_backward` does.

        Where neither a callback nor the module has anything to do around a backward pass, nobody is asked: with small
        networks Lightning's way through the empty hooks of every callback takes a tenth of the time of the pass.
        """
        if self._hooks_around_backward:
            super().manual_backward(loss, *args, **kwargs)
            return
        strategy = self.trainer.strategy
        strategy.pre_backward(loss)
        strategy.precision_plugin.backward(loss, self, None, *args, **kwargs)
        strategy.post_backward(loss)

    def _find_hooks_around_backward(self) -> bool:
        """Return whether anybody overrides the hooks around a backward pass, or the precision scales the loss there."""
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        return scaled or any(map(self._has_hook, ("on_before_backward", "on_after_backward")))

    def _has_hook(self, hook: str) -> bool:
        """Return whether the module or a callback has something to do there."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        others = (_is_lightnings(hook, callback, Callback) for callback in callbacks)
        return not (_is_lightnings(hook, self, LightningModule) and all(others))

    def _backward_is_pytorchs(self) -> bool:
        """Return whether neither module, strategy nor precision do more in a backward pass than call PyTorch's."""
        strategy = self.trainer.strategy
        return (
            _is_lightnings("backward", self, LightningModule)
            and _is_lightnings("manual_backward", self, Shortcuts)
            and all(_is_lightnings(name, strategy, Strategy) for name in ("pre_backward", "post_backward"))
            and _is_lightnings("backward", strategy.precision_plugin, Precision)
        )

    def step_optimizer(self, optimizer: LightningOptimizer, counts: bool) -> None:
        """Step, in a way that Lightning counts it if it `counts`, and that all who take part in steps are asked.

        Where these are none, Lightning's way to the step takes as long as the step of a small network.
        """
        raw: Optimizer = optimizer.optimizer
        if self._hooks_around_step:
            step = optimizer.step if counts else functools.partial(self.trainer.strategy.optimizer_step, raw)
            step(do_nothing_closure)
            return
        if counts:
            optimizer._on_before_step()
        if isinstance(raw, FlatAdam):
            raw.step_alone()
        else:
            raw.step()
        if counts:
            optimizer._on_after_step()

    def _find_hooks_around_step(self) -> bool:
        """Return whether callbacks, module, strategy or precision have something to do around a step."""
        strategy = self.trainer.strategy
        return (
            self._has_hook("on_before_optimizer_step")
            or not _is_lightnings("optimizer_step", strategy, Strategy)
            or not _is_lightnings("optimizer_step", strategy.precision_plugin, Precision)
        )


def _is_lightnings(method: str, owner: object, base: type[Any]) -> bool:
    """Return whether an object has a method from `base`, overridden neither in its class nor in itself."""
    return method not in vars(owner) and getattr(type(owner), method, None) is getattr(base, method)
