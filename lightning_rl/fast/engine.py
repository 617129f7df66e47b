"""The fast engines: gradients in closed form or compiled, and steps without Lightning's empty hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.distributed import average, world_size
from lightning_rl.fast.compiled import CompiledLoss, CompiledLosses, compiler_problem
from lightning_rl.fast.flat_adam import FlatAdam
from lightning_rl.fast.numpy_mlp import is_observed, overridden
from lightning_rl.fast.ppo import KnownLoss, PPOLoss
from lightning_rl.fast.programs import StepResult

_Loss = TypeVar("_Loss", bound=Callable[..., Any])
_MARK = "closed_form"
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_STRATEGY = ("pre_backward", "backward", "post_backward", "optimizer_step")
# What was logged last about each algorithm.
_logged: WeakKeyDictionary[LightningModule, str] = WeakKeyDictionary()
_compiled: WeakKeyDictionary[LightningModule, CompiledLosses] = WeakKeyDictionary()


def closed_form(form: type[PPOLoss], reads: Sequence[str]) -> Callable[[_Loss], _Loss]:
    """Mark a `loss(batch)` that also exists in closed form: whoever edits one of them edits both.

    Args:
        form: Computes the same loss, and its gradient.
        reads: Members of the class that `loss` uses and `form` has its own formulas for, and those that take its
            result. A subclass or an instance that overrides one of them learns by autograd.
    """

    def mark(loss: _Loss) -> _Loss:
        setattr(loss, _MARK, (form, tuple(reads)))
        return loss

    return mark


def step_progress(model: LightningModule) -> Any:  # noqa: ANN401
    """Return the counter of Lightning's global steps in manual optimization."""
    return model.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


class FastEngine:
    """Computes gradients, in closed form where there is one, and steps optimizers past Lightning's empty hooks.

    Args:
        closed_form: Of the loss of the model; None leaves it to autograd.
    """

    compiles_loss = False

    def __init__(self, closed_form: PPOLoss | None = None) -> None:
        self.closed_form = closed_form
        self._known: KnownLoss | CompiledLoss | None = None

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> StepResult | None:  # noqa: ANN401
        """Return None: loss, gradient and step follow one another."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> Any:  # noqa: ANN401
        """Return the loss over a minibatch, whose `total` is for `backward`."""
        self._known = None
        if self.closed_form is not None and part is None and loss_of == model.loss:
            self._known = self.closed_form(batch)
        return loss_of(batch) if self._known is None else self._known

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of a loss."""
        known, self._known = self._known, None
        if known is None or known.total is not total:
            total.backward()  # type: ignore[no-untyped-call]
            return
        for parameter, gradient in zip(known.parameters, known.gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of all parameters that have one; `FlatAdam` has many in one tensor."""
        if isinstance(optimizer, FlatAdam):
            tensors = optimizer.vectors()
        else:
            tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take a step, as one of Lightning's global steps if it `counts`."""
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


class CompiledEngine(FastEngine):
    """Compiles the loss with its gradient, and with the step where `FlatAdam` takes it.

    Args:
        losses: The compiled losses of the model.
    """

    compiles_loss = True

    def __init__(self, losses: CompiledLosses) -> None:
        super().__init__()
        self.losses = losses

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> StepResult | None:  # noqa: ANN401
        """Take a whole step by one program, and count it; None if loss and step are no single program."""
        result = self.losses.step(steps, loss_of, batch)
        is_open = None if result is None else result.state.is_open
        if is_open is not None and (not is_open.is_cpu or is_open):
            progress = step_progress(steps.model)
            progress.increment_ready()
            progress.increment_completed()
        return result

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> Any:  # noqa: ANN401
        """Return the loss over a minibatch, whose `total` is for `backward`."""
        self._known = self.losses.loss(loss_of, batch, part)
        return loss_of(batch) if self._known is None else self._known

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Give the parameters their gradients, averaged over ranks; of a loss that is not compiled by autograd."""
        known, self._known = self._known, None
        several = world_size() > 1
        if known is None and not several:
            model.manual_backward(total)
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if known is None:
            # Past the hooks of DDP: a loss may be compiled on one rank and not on another, which has too few rows.
            gradients = dict(zip(parameters, torch.autograd.grad(total, parameters, allow_unused=True), strict=True))
        else:
            gradients = dict(zip(known.parameters, known.gradients, strict=True))
        if several:
            flat = [x.flatten() if (x := gradients.get(p)) is not None else p.new_zeros(p.numel()) for p in parameters]
            mean = torch.split(average(torch.cat(flat)), [p.numel() for p in parameters])
            gradients |= {
                p: x.view_as(p) for p, x in zip(parameters, mean, strict=True) if gradients.get(p) is not None
            }
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def engine_for(model: LightningModule) -> FastEngine | None:
    """Return the engine for the updates from the next rollout, None for the plain one; log which, where it changes.

    Args:
        model: An algorithm that is attached to a Trainer.
    """
    name = type(model).__name__
    engine: FastEngine | None = None
    if (reason := why_not(model)) is not None:
        line = f"{name} updates by plain PyTorch and Lightning: {reason}"
    elif cast(Any, model).fast_paths == "compiled":
        if (reason := why_not_compiled(model)) is None:
            engine, line = CompiledEngine(_compiled_losses(model)), f"{name} updates by the compiled engine"
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


def _compiled_losses(model: LightningModule) -> CompiledLosses:
    """Return the compiled losses of a model, for updates from another rollout."""
    if model not in _compiled:
        _compiled[model] = CompiledLosses(model)
    _compiled[model].begin()
    return _compiled[model]


def why_not(model: Any) -> str | None:  # noqa: ANN401
    """Return why backward passes and steps of a model take Lightning's way, None if they need not."""
    if model.fast_paths == "none":
        return "debug.fast_paths is none"
    # Lightning puts a compiled training step into the instance.
    if torch.compiler.is_compiling() or "training_step" in vars(model):
        return "the training step is compiled or replaced"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    trainer, is_compiled = model.trainer, model.fast_paths == "compiled"
    if trainer.world_size > 1 and not is_compiled:
        return "several ranks exchange gradients in the backward pass"
    strategy = trainer.strategy
    members: list[tuple[object, type[Any], Sequence[str]]] = [
        (model, LightningModule, (*_HOOKS, "backward", "manual_backward")),
        *((callback, Callback, _HOOKS) for callback in trainer.callbacks),
    ]
    if not (is_compiled and isinstance(strategy, DDPStrategy)):
        members.append((strategy, Strategy, _STRATEGY))
    # Mixed precision with bfloat16 does nothing in these hooks: only float16 needs its gradients scaled.
    precision = strategy.precision_plugin
    if not (is_compiled and type(precision) is MixedPrecision and precision.scaler is None):
        members.append((precision, Precision, _STRATEGY))
    found = ((type(owner).__name__, overridden(owner, base, names)) for owner, base, names in members)
    return next((f"{owner} overrides {name}" for owner, name in found if name is not None), None)


def why_not_compiled(model: Any) -> str | None:  # noqa: ANN401
    """Return why the losses of a model are not compiled, None if they are."""
    if getattr(model.policy, "memory", None) is not None:
        return "the policy has memory, whose sequences have other lengths in each rollout"
    if is_observed(model.policy):
        return "a module of the policy has hooks or is compiled"
    return compiler_problem(model.device)


def closed_form_of(model: Any) -> PPOLoss | str:  # noqa: ANN401
    """Return the closed form of the loss of a model as it is now, or why there is none."""
    form, reads = getattr(getattr(type(model), "loss", None), _MARK, (None, ()))
    if form is None:
        return "no closed form of its loss is known"
    owner = next(cls for cls in type(model).__mro__ if "loss" in vars(cls))
    if (name := overridden(model, owner, ("loss", *reads))) is not None:
        return f"{name} is overridden"
    return form.of(model)  # type: ignore[no-any-return]
