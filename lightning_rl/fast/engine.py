"""Engines for faster updates: closed-form or compiled gradients, and optimizer steps without Lightning's hooks."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.fast.flat_adam import FlatAdam
from lightning_rl.fast.numpy_mlp import needs_autograd, overridden

if TYPE_CHECKING:
    from lightning_rl.fast.ppo import PPOLoss

_Loss = TypeVar("_Loss", bound=Callable[..., Any])
_MARK = "closed_form"
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_STRATEGY = ("pre_backward", "backward", "post_backward", "optimizer_step")
# The last log line about the engine of each algorithm.
_logged: WeakKeyDictionary[LightningModule, str] = WeakKeyDictionary()

Recorded = tuple[tuple[str, ...], Tensor, Collection[str]]
"""Names and values of recorded numbers, `[len(names)]`, and the names of those that may be NaN or infinite."""


class ComputedLoss(NamedTuple):
    """The attributes of a `Loss` that a gradient step reads, without an autograd graph.

    Attributes:
        recorded: Recorded numbers.
        total: The loss, a scalar.
        terms: The weighted terms of the loss, a list or `[M]`.
        first_log_ratios: Logarithms of the importance ratios, `[N]`.
        limits: Maximum of recorded values, by name.
        has_value: Whether the loss contains a value loss.
    """

    recorded: Recorded
    total: Tensor
    terms: Any
    first_log_ratios: Tensor | None
    limits: dict[str, Any]
    has_value: bool


KnownLoss = tuple[ComputedLoss, list[tuple[nn.Parameter, Tensor]]]
"""A loss, and its gradient for each parameter that it depends on."""


def closed_form(form: type[PPOLoss], reads: Sequence[str]) -> Callable[[_Loss], _Loss]:
    """Mark a `loss(batch)` whose loss and gradient `form` computes too; edit both together.

    `reads` are the members that `loss` calls and `form` reimplements, and members that process the result. If a
    subclass or instance overrides one of them, autograd computes the gradient.
    """

    def mark(loss: _Loss) -> _Loss:
        setattr(loss, _MARK, (form, tuple(reads)))
        return loss

    return mark


def step_progress(model: LightningModule) -> Any:  # noqa: ANN401
    """Return the counter of Lightning's global steps in manual optimization."""
    return model.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


class FastEngine:
    """Computes gradients in closed form if there is one, and skips Lightning's hooks in backward passes and steps."""

    compiles_loss = False

    def __init__(self, closed_form: PPOLoss | None = None) -> None:
        self.closed_form = closed_form
        self._gradients: list[tuple[nn.Parameter, Tensor]] | None = None

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> Any:  # noqa: ANN401
        """Return None: this engine has no program for a whole step."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> Any:  # noqa: ANN401
        """Return the loss over a minibatch, whose `total` is for `backward`."""
        known = self.known_loss(model, loss_of, batch, part)
        loss, self._gradients = (loss_of(batch), None) if known is None else known
        return loss

    def known_loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> KnownLoss | None:  # noqa: ANN401
        """Return the loss with its gradients; None if autograd has to compute them."""
        has_form = self.closed_form is not None and part is None and loss_of == model.loss
        return self.closed_form(batch) if has_form else None  # type: ignore[misc]

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of the last loss."""
        if self._gradients is None:
            self.use_autograd(model, total)
        for parameter, gradient in self._gradients or ():
            parameter.grad = gradient

    def use_autograd(self, model: Any, total: Tensor) -> None:  # noqa: ANN401
        total.backward()  # type: ignore[no-untyped-call]

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return all gradients of an optimizer; `FlatAdam` has one tensor per parameter group."""
        tensors = [vectors.values for vectors in optimizer.vectors()] if isinstance(optimizer, FlatAdam) else []
        tensors = tensors or [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take an optimizer step; `counts` increments Lightning's global step."""
        raw = optimizer.optimizer
        step = raw.step_alone if isinstance(raw, FlatAdam) else raw.step
        if not counts:
            step()
            return
        trainer, progress = model.trainer, step_progress(model)
        progress.increment_ready()
        trainer.profiler.start("optimizer_step")  # type: ignore[attr-defined]
        step()
        trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]
        progress.increment_completed()


def engine_for(model: LightningModule) -> FastEngine | None:
    """Return the engine for the next rollout, or None for plain PyTorch and Lightning; log changes."""
    name = type(model).__name__
    engine: FastEngine | None = None
    if (reason := why_not(model)) is not None:
        line = f"{name} updates by plain PyTorch and Lightning: {reason}"
    elif cast(Any, model).options["debug.fast_paths"] == "compiled":
        if (reason := why_not_compiled(model)) is None:
            engine, line = _compiled_engine(model), f"{name} updates by the compiled engine"
        else:
            engine, line = FastEngine(), f"{name} updates by the fast engine, with autograd: {reason}"
    else:
        form = closed_form_of(model)
        engine = FastEngine(None if isinstance(form, str) else form)
        how = f"autograd: {form}" if isinstance(form, str) else "the closed form of its loss"
        line = f"{name} updates by the fast engine, with {how}"
    if _logged.get(model) != line:
        _logged[model] = line
        rank_zero_info(line)
    return engine


def _compiled_engine(model: Any) -> FastEngine:  # noqa: ANN401
    from lightning_rl.fast.compiled import CompiledEngine  # its module imports this one

    engine = model.steps.engine
    if not isinstance(engine, CompiledEngine):
        engine = CompiledEngine(model)
    engine.begin()
    return engine


def why_not(model: Any) -> str | None:  # noqa: ANN401
    """Return the reason why a model needs Lightning's own backward pass and step, or None."""
    fast_paths = model.options["debug.fast_paths"]
    if fast_paths == "none":
        return "debug.fast_paths is none"
    # Lightning stores a compiled training step in the instance.
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if model.device_mesh is not None:
        return "the parameters are sharded over ranks"
    trainer, is_compiled = model.trainer, fast_paths == "compiled"
    if trainer.world_size > 1 and not is_compiled:
        return "several ranks exchange gradients in the backward pass"
    strategy = trainer.strategy
    members: list[tuple[object, type[Any], Sequence[str]]] = [
        (model, LightningModule, (*_HOOKS, "backward", "manual_backward")),
        *((callback, Callback, _HOOKS) for callback in trainer.callbacks),
    ]
    if not (is_compiled and isinstance(strategy, DDPStrategy)):
        members.append((strategy, Strategy, _STRATEGY))
    # Mixed precision with bfloat16 does nothing in these hooks; float16 scales gradients.
    precision = strategy.precision_plugin
    if not (is_compiled and type(precision) is MixedPrecision and precision.scaler is None):
        members.append((precision, Precision, _STRATEGY))
    found = ((type(owner).__name__, overridden(owner, base, names)) for owner, base, names in members)
    return next((f"{owner} overrides {name}" for owner, name in found if name is not None), None)


def why_not_compiled(model: Any) -> str | None:  # noqa: ANN401
    """Return the reason why the losses of a model cannot be compiled, or None."""
    if getattr(model.policy, "memory", None) is not None:
        return "the policy has memory, and its sequences differ in length between rollouts"
    if needs_autograd(model.policy):
        return "the policy has hooks or is compiled"
    return compiler_problem(model.device)


@functools.cache
def compiler_problem(device: torch.device) -> str | None:
    """Return the reason why a device cannot run compiled programs, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}"
    named = os.environ.get("CXX")
    if not any(map(shutil.which, [named] if named else ["g++", "c++", "clang++"])):
        return f"there is no C++ compiler{f' {named}' if named else ''}: install g++ or clang++, or set CXX"
    return None


def closed_form_of(model: Any) -> PPOLoss | str:  # noqa: ANN401
    """Return the closed form of the loss of a model, or the reason why there is none."""
    form, reads = getattr(getattr(type(model), "loss", None), _MARK, (None, ()))
    if form is None:
        return "only the loss of PPO has a closed form"
    owner = next(cls for cls in type(model).__mro__ if "loss" in vars(cls))
    if (name := overridden(model, owner, ("loss", *reads))) is not None:
        return f"{name} is overridden"
    return form.of(model)  # type: ignore[no-any-return]
