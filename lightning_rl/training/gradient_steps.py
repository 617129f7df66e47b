"""The gradient steps of the updates from one rollout: clipping, checks of what is not finite, and taking steps back."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl import fast
from lightning_rl.distributed import all_reduce, average, world_size
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Minibatch
from lightning_rl.training.optimizers import AdaptiveLearningRate
from lightning_rl.training.parameter_groups import ActorOrCritic
from lightning_rl.training.records import UpdateRecord

GRADIENT_NORMS = ("grad_norm", "critic_grad_norm")
"""What the norms of the gradients of the optimizers are logged by, before they are clipped."""
WHAT_TO_TRY = (
    "Look at the rewards and observations (normalization.rewards and normalization.observations bound them), lower "
    "learning_rate, or optimizer.max_grad_norm"
)
_ANOMALY = re.compile(r"Function '(\w+)' returned nan values")
# Minibatches that have not been checked yet may take so many bytes.
_MAX_UNCHECKED = 2**28


class NotFiniteError(Exception):
    """Ends the updates from a rollout at the very minibatch; `training_step` says which term it was."""


class FailedMinibatch(NamedTuple):
    """What a loss or gradient that is not finite came from.

    Attributes:
        minibatch: The minibatch.
        loss: Name of the method that computed the loss.
        part: The half of the network that was learned; None: both.
    """

    minibatch: Minibatch
    loss: str
    part: ActorOrCritic | None


class Engine(Protocol):
    """Computes gradients and steps optimizers: `EagerEngine`, or one with the same results up to rounding.

    Attributes:
        compiles_loss: Whether the operations of a loss are one program.
    """

    compiles_loss: bool

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> Any:  # noqa: ANN401
        """Take and count a whole step on a minibatch if updates are open, and return what came of it: a `StepResult`.

        None if the engine computes loss, gradient and step one after the other; the minibatch is then still to be
        learned from.
        """
        ...

    def loss(self, model: Any, loss_of: Callable[[Any], Loss], batch: Any, part: ActorOrCritic | None) -> Loss:  # noqa: ANN401
        """Return the loss over a minibatch, whose `total` is for `backward`."""
        ...

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of a loss."""
        ...

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return all gradients of an optimizer's parameters, which `step` follows; several may be one tensor."""
        ...

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take a step, as one of Lightning's global steps if it `counts`."""
        ...


class EagerEngine:
    """Gradients by autograd, and steps by Lightning with all of its hooks."""

    compiles_loss = False

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> None:  # noqa: ANN401
        """Return None: loss, gradient and step follow one another."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Loss], batch: Any, part: ActorOrCritic | None) -> Loss:  # noqa: ANN401
        """Return the loss over a minibatch."""
        return loss_of(batch)

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of a loss."""
        with explained_anomaly():
            model.manual_backward(total)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of all parameters that have one."""
        return gradients_of(optimizer)

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take a step; one that does not count is taken past `LightningOptimizer`, which counts."""
        if counts:
            optimizer.step()
        else:
            model.trainer.strategy.optimizer_step(optimizer.optimizer, lambda: None)


class GradientSteps:
    """Takes the gradient steps of the updates from one rollout, and records them.

    A step is left out from the first loss or gradient on that is not finite, or after an early stop. Where the critic
    has an optimizer of its own, both step from the one gradient, each clipped by itself.

    Args:
        model: The algorithm, whose `frozen_parameters` a step leaves as they are.
        options: Options of the algorithm by full name; `optimizer` and `debug` are used.

    Attributes:
        record: What is recorded of the updates from the present rollout.
        engine: Computes gradients and takes steps.
        part: The half of the network that is learned in the present pass; None: both.
        takes_back: Whether a step is taken back after which the minibatch exceeds a limit that the loss has.
        active_set: Index of the set of optimizers that step in the present phase of updates.
        num_sets: How many sets of optimizers there are, each with that of the critic if it has its own.
        num_value_epochs: Passes of the value loss, if not as many as of the other terms.
        critic_warmup_steps: In rollouts that begin before this many environment steps the critic alone is learned.
        adaptive_learning_rate: Changes the learning rate after each rollout; None does not.
        failed_minibatch: What a loss or gradient that is not finite came from; None where there was none.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - an algorithm, whose module imports this one
        options: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.max_grad_norm: float | None = options["optimizer.max_grad_norm"]
        self.max_grad_value: float | None = options["optimizer.max_grad_value"]
        self.check_numerics: bool = options["debug.check_numerics"]
        self.num_value_epochs: int | None = options["optimizer.num_value_epochs"]
        self.critic_warmup_steps: int = options["optimizer.critic_warmup_steps"]
        adaptive = options["optimizer.adaptive_learning_rate"]
        self.adaptive_learning_rate = None if adaptive is None else AdaptiveLearningRate(**adaptive)
        self.engine: Engine = EagerEngine()
        self.part: ActorOrCritic | None = None
        self.takes_back = False
        self.num_sets = 1
        self.failed_minibatch: FailedMinibatch | None = None
        self._noted: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the updates from a rollout, which may not have come to their end."""
        self.record = UpdateRecord(self.model.device)
        self.part, self.failed_minibatch = None, None
        self.active_set = 0
        self._has_ratios = self._has_value = False
        # Minibatches of which the host does not know yet whether they were finite, with what the device knows.
        self._unchecked: list[tuple[FailedMinibatch, Tensor]] = []
        self._unchecked_bytes = 0

    def begin(self) -> None:
        """Begin the updates from a rollout."""
        self.reset()
        # Callbacks and hooks may come and go between rollouts.
        self.engine = EagerEngine()
        self.engine = fast.engine_for(self.model) or self.engine
        self.observe(**self._noted)
        self._noted = {}

    def note(self, **terms: Tensor) -> None:
        """Have scalars recorded with the updates that begin next."""
        self._noted |= terms

    def observe(self, **terms: Tensor | float) -> None:
        """Record scalars that may be NaN or infinite without harm to the parameters."""
        self.record.observe(**terms)

    def observe_first_ratios(self, log_ratios: Tensor) -> None:
        """Record, once for each rollout, how far importance ratios `[N]` are from 1 on any rank."""
        if not self._has_ratios:
            self._has_ratios = True
            errors = log_ratios.detach().expm1().abs()
            # One rank may have no row in a minibatch.
            largest = all_reduce(errors.max() if len(errors) else errors.sum(), "max")
            self.record.observe(first_ratio_error=largest)

    # ------------------------------------------------------------------ optimizers

    @property
    def all_optimizers(self) -> list[LightningOptimizer]:
        """Every optimizer, in use or not: first the one, and that of the critic if it has its own."""
        made = self.model.optimizers()
        return cast(list[LightningOptimizer], made if isinstance(made, list) else [made])

    def optimizers_of(self, index: int) -> list[LightningOptimizer]:
        """Return one set of optimizers: all of them, where there is one set."""
        made = self.all_optimizers
        count = len(made) // self.num_sets
        return made[index * count : (index + 1) * count]

    @property
    def optimizers(self) -> list[LightningOptimizer]:
        """Those that step in the present phase of updates."""
        return self.optimizers_of(self.active_set)

    @contextmanager
    def phase(self, prefix: str, rate_scale: float) -> Iterator[None]:
        """Make further updates from a rollout with the last set of optimizers; what is not finite ends all phases.

        Args:
            prefix: What names of recorded numbers begin with.
            rate_scale: What the learning rates of the first set are multiplied by.
        """
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.record.start_phase(prefix)
        before, self.active_set = self.active_set, self.num_sets - 1
        self._set_rates(rates, rate_scale)
        self.observe(learning_rate=torch.tensor(rates[0][0] * rate_scale, device=self.model.device))
        try:
            yield
        finally:
            self._set_rates(rates, 1.0)
            self.active_set = before

    def _set_rates(self, rates: Sequence[Sequence[float]], scale: float) -> None:
        for optimizer, some in zip(self.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, some, strict=True):
                group["lr"] = rate * scale

    # ------------------------------------------------------------------ passes

    @property
    def stopped(self) -> bool:
        """Whether it is certain, without waiting for the device, that no further update will be made."""
        return self.record.stopped

    @property
    def is_warming_up(self) -> bool:
        """Whether the critic alone is learned yet."""
        return bool(self.model.env_steps < self.critic_warmup_steps)

    def epochs(self, num_epochs: int) -> Iterator[tuple[int, bool]]:
        """Yield the number of each pass and whether it is the last, and have each learn the half that it is about."""
        of_value = num_epochs if self.num_value_epochs is None else self.num_value_epochs
        count = of_value if self.is_warming_up else max(num_epochs, of_value)
        try:
            for epoch in range(count):
                if self.is_warming_up or epoch >= num_epochs:
                    self.part = "critic"
                else:
                    self.part = "actor" if epoch >= of_value else None
                yield epoch, epoch == count - 1
        finally:
            self.part = None

    def take(self, loss_of: Callable[[Any], Loss], batch: Any) -> None:  # noqa: ANN401 - what the loss takes
        """Take one step down the gradient of a loss, unless it is not finite or updates were stopped.

        Args:
            loss_of: The loss of an algorithm, a method.
            batch: The minibatch.
        """
        record = self.record
        record.next_minibatch()
        name = getattr(loss_of, "__name__", "loss")
        if (whole := self.engine.whole_step(self, loss_of, batch)) is not None:
            self._record_step(whole, batch, name)
            return
        optimizers = self.optimizers
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.engine.loss(self.model, loss_of, batch, self.part)
        if not hasattr(loss, "recorded"):
            raise TypeError(f"{name} has returned {type(loss).__name__}: expected the Loss that self.new_loss gives")
        self._has_value |= loss.has_value
        total = self.record_loss(loss)
        self._backward(total)
        gradients = {n: self.engine.gradients(x.optimizer) for n, x in zip(GRADIENT_NORMS, optimizers, strict=False)}
        gradients = {name: found for name, found in gradients.items() if found}
        norms = {name: total_norm(found) for name, found in gradients.items()}
        if not _is_known_finite(total.detach()):
            # Of a loss that is not finite no gradient is, whatever came out.
            norms = {name: norm + 0 * total.detach() for name, norm in norms.items()}
        record.add(**norms)
        self._check(norms, batch, name)
        record.num_updates = record.num_updates + record.is_open
        before = OptimizerSnapshot(x.optimizer for x in optimizers) if self.takes_back and loss.limits else None
        stepping = [pair for pair in zip(GRADIENT_NORMS, optimizers, strict=False) if pair[0] in norms]
        for of_norm, optimizer in stepping:
            self._clip(gradients[of_norm], norms[of_norm])
            self._step(optimizer, counts=optimizer is stepping[0][1])
        if before is not None:
            self._take_back_unless_close(loss_of, batch, before)

    @contextmanager
    def isolated(self, part: ActorOrCritic | None = None) -> Iterator[None]:
        """Record into nothing that lasts, and be about a half of the network."""
        kept = {**vars(self)}
        self.reset()
        self.part = part
        try:
            yield
        finally:
            vars(self).update(kept)

    def means(self) -> dict[str, float]:
        """Return the mean of everything that was recorded: the one point at which the host waits for the device."""
        return self.record.means()

    def not_finite(self, means: dict[str, float]) -> dict[str, float]:
        """Return those of the means that no update may come from."""
        failed = self.record.not_finite(means)
        if failed and self.failed_minibatch is None:
            self._check_minibatches()
        return failed

    def adapt_learning_rate(self, means: dict[str, float]) -> None:
        """Change the learning rate of the actor as `adaptive_learning_rate` says, the same on every rank."""
        if self.adaptive_learning_rate is not None and "approx_kl" in means:
            mean_kl = average(torch.tensor(means["approx_kl"], device=self.model.device))
            self.adaptive_learning_rate.adapt(self.optimizers[0].optimizer, float(mean_kl))

    @property
    def has_value(self) -> bool:
        """Whether a loss of these updates was about values, or there was none."""
        return self._has_value or not bool(self.record.num_updates)

    # ------------------------------------------------------------------ one step

    def _record_step(self, step: Any, batch: Any, name: str) -> None:  # noqa: ANN401
        """Record what came of a whole step on a minibatch."""
        self.record.add_together(step.names, step.values, step.observed)
        self.record.set_state(*step.state)
        self._has_value |= step.has_value
        if step.log_ratios is not None and not self._has_ratios:
            self.observe_first_ratios(step.log_ratios)
        self._keep_failed(batch, name)

    def record_loss(self, loss: Loss) -> Tensor:
        """Record what a loss is made of, stop the updates where it says so, and return its total."""
        self.record.add_together(*loss.recorded())
        if loss.terms:
            self.record.add_absolute("total_abs_loss", torch.stack([term.detach() for term in loss.terms]))
        if loss.first_log_ratios is not None:
            self.observe_first_ratios(loss.first_log_ratios)
        if loss.limits:
            self.record.stop_unless(_is_within_limits(loss))
        return loss.total

    def _backward(self, total: Tensor) -> None:
        """Compute the gradient; it is None in frozen parameters."""
        if world_size() > 1:
            total = not_finite_throughout(total)
        frozen: list[nn.Parameter] = self.model.frozen_parameters(self.part)
        if frozen:  # DDP waits for the gradient of every parameter
            total = total + sum(0 * parameter.sum() for parameter in frozen)
        self.engine.backward(self.model, total)
        for parameter in frozen:
            parameter.grad = None

    def _check(self, norms: dict[str, Tensor], batch: Any, name: str) -> None:  # noqa: ANN401
        """Make no further update if a gradient is not finite, and keep what it came from."""
        for norm in norms.values():
            if not _is_known_finite(norm):
                # Whether it is finite, in fewer kernels than `isfinite`.
                self.record.stop_all_phases_unless(norm - norm == 0)
        self._keep_failed(batch, name)

    def _keep_failed(self, batch: Any, name: str) -> None:  # noqa: ANN401
        """Keep the first minibatch whose loss or gradient is not finite."""
        if self.failed_minibatch is None:
            one, finite = FailedMinibatch(batch, name, self.part), self.record.finite
            if not finite.is_cpu:
                self._unchecked.append((one, finite))
                self._unchecked_bytes += batch.num_bytes
                if self._unchecked_bytes > _MAX_UNCHECKED:
                    self._check_minibatches()
            elif not finite:
                self.failed_minibatch = one
        if self.check_numerics and self.record.not_finite(self.means()):
            raise NotFiniteError

    def _check_minibatches(self) -> None:
        """Keep the first unchecked minibatch that was not finite, and no other; the host waits for the device."""
        if not self.record.finite:
            self.failed_minibatch = next((one for one, finite in self._unchecked if not finite), None)
        self._unchecked, self._unchecked_bytes = [], 0

    def _clip(self, gradients: list[Tensor], grad_norm: Tensor) -> None:
        if self.max_grad_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.max_grad_value, self.max_grad_value)
            grad_norm = total_norm(gradients)
        if self.max_grad_norm is not None:
            scale_to_norm(gradients, self.max_grad_norm, grad_norm)

    def _step(self, optimizer: LightningOptimizer, counts: bool) -> None:
        """Step if updates are open: decided on the device by fused and capturable optimizers, elsewhere by the host.

        One update is one of Lightning's global steps, whatever the number of optimizers: only the first that steps
        `counts`.
        """
        is_open, raw = self.record.is_open, optimizer.optimizer
        on_host = is_open.is_cpu
        step: Callable[[], Any] = functools.partial(self.engine.step, self.model, optimizer, counts)
        if not on_host and raw.defaults.get("fused"):
            raw.found_inf, raw.grad_scale = (~is_open).float(), None  # type: ignore[attr-defined]
            step()
        elif not on_host and raw.defaults.get("capturable") and raw.state:
            step_where(is_open, raw, step)
        elif is_open:
            step()

    @torch.no_grad()
    def _take_back_unless_close(
        self,
        loss_of: Callable[[Any], Loss],
        batch: Any,  # noqa: ANN401
        before: OptimizerSnapshot,
    ) -> None:
        """Take a step back after which the minibatch exceeds a limit of its loss; the host waits for that."""
        keep = _is_within_limits(loss_of(batch))
        taken_back = self.record.is_open & ~keep
        if taken_back:
            before.restore()
        self.record.num_updates = self.record.num_updates - taken_back.long()
        self.record.observe(updates_taken_back=taken_back.float())
        self.record.stop_unless(keep)


@contextmanager
def explained_anomaly() -> Iterator[None]:
    """Say what to try where `detect_anomaly` has found the operation whose gradient is not a number.

    Raises:
        FloatingPointError: It has; names the operation.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := _ANOMALY.search(str(error))) is None:
            raise
        raise FloatingPointError(
            f"the gradient of {found[1]} is not a number: detect_anomaly printed above where it was computed. "
            f"{WHAT_TO_TRY}; run without detect_anomaly to save the update and make it again (FailedUpdate)"
        ) from error


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the global norm of gradients, at least one."""
    one = len(gradients) == 1
    norm: Tensor = torch.linalg.vector_norm(gradients[0]) if one else nn.utils.get_total_norm(gradients)
    return norm


def scale_to_norm(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their global norm, which is `norm`, is at most `max_norm`."""
    if norm.is_cpu and 1.01 * float(norm) + 2e-6 < max_norm:
        return  # the factor is certainly 1
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


@torch.no_grad()
def step_where(condition: Tensor, optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Call `step`, and take back what it did to parameters and state unless `condition` holds: the device decides.

    For optimisers that cannot be told to leave a step out. Zeroing gradients would not do: Adam goes on along its
    moments.

    Args:
        condition: A boolean scalar on the device of the parameters.
        optimizer: All of whose state is there too (`capturable=True`), and exists: it has stepped before.
        step: Steps it.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(condition, tensor, old))


class OptimizerSnapshot:
    """Parameters and states of optimisers as they were, to take a step back once the host knows that it must be."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = [parameter.detach().clone() for parameter in self._own_parameters()]
        self._states = [
            {parameter: {name: _copy(x) for name, x in entries.items()} for parameter, entries in o.state.items()}
            for o in self._optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: once, since optimisers go on with the very states that were kept."""
        for parameter, old in zip(self._own_parameters(), self._parameters, strict=True):
            parameter.copy_(old)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            # Cleared, since the first step makes states where there were none.
            optimizer.state.clear()
            optimizer.state.update(state)

    def _own_parameters(self) -> list[Tensor]:
        return [parameter for o in self._optimizers for group in o.param_groups for parameter in group["params"]]


def _copy(x: Any) -> Any:  # noqa: ANN401 - whatever an optimiser remembers
    return x.clone() if isinstance(x, Tensor) else x


def _is_within_limits(loss: Loss) -> Tensor:
    """Return whether the means over all ranks are within the limits of a loss, which has some."""
    within = (average(loss.observed[name]) <= limit for name, limit in loss.limits.items())
    return functools.reduce(operator.and_, within)


def _is_known_finite(x: Tensor) -> bool:
    """Whether a scalar is finite, as far as the host knows without waiting for the device."""
    return x.is_cpu and math.isfinite(x)


def not_finite_throughout(loss: Tensor) -> Tensor:
    """Return `loss`, with a gradient of NaN where it is not finite: so every rank gets to know.

    Not where `detect_anomaly` looks for the operation that NaN comes from, which would find this one.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return loss
    return loss * (1 + 0 * loss.detach())
