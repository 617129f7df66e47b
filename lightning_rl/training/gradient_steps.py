"""Gradient steps on minibatches: clipping, non-finite checks, early stops, and the record of one rollout's updates."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl import fast
from lightning_rl.distributed import all_reduce, average, exact_dtype, world_size
from lightning_rl.policies.networks.mlp import at_least_float32
from lightning_rl.policies.sharding import is_sharded, reshard, whole
from lightning_rl.training.loss import Loss
from lightning_rl.training.optimizers import AdaptiveLearningRate
from lightning_rl.training.parameter_groups import ActorOrCritic

WHAT_TO_TRY = (
    "Check the rewards and observations (normalization.rewards and normalization.observations bound them), or lower "
    "learning_rate or optimizer.max_grad_norm"
)
_ANOMALY = re.compile(r"Function '(\w+)' returned nan values")
# Minibatches that the host has not checked yet may take this many bytes.
_MAX_UNCHECKED = 2**28


class NotFiniteError(Exception):
    """Ends the updates at a minibatch with a non-finite loss or gradient, if `check_numerics` is set."""


class FailedMinibatch(NamedTuple):
    """A minibatch with a non-finite loss or gradient, its loss, and the trained part."""

    minibatch: Any
    loss: Callable[[Any], Loss]
    part: ActorOrCritic | None


class GradientSteps:
    """Takes and records the gradient steps of one rollout's updates.

    No step is taken after a non-finite loss or gradient, or after an early stop. A separate critic optimizer uses the
    same backward pass, and its gradient is clipped separately.

    Attributes:
        record: Recorded scalars and flags of the updates from the current rollout.
        part: Half of the network that the current pass trains. None: both.
        rollback: Whether to undo a step after which the minibatch exceeds a limit of its loss.
        active_set: Index of the set of optimizers that the current phase uses.
        num_sets: Number of sets of optimizers: 2 if the auxiliary phase of PPG has its own, else 1. Each set has one
            optimizer, or one for the actor and one for the critic.
        failed_minibatch: First minibatch with a non-finite loss or gradient.
        norm_names: Names of the logged gradient norms before clipping, one per optimizer.
    """

    norm_names = ("grad_norm", "critic_grad_norm")

    def __init__(
        self,
        model: Any,  # an algorithm, whose module imports this one
        options: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.max_grad_norm: float | None = options["optimizer.max_grad_norm"]
        self.max_grad_value: float | None = options["optimizer.max_grad_value"]
        self.check_numerics: bool = options["debug.check_numerics"]
        self.gradient_norms: bool = options["debug.gradient_norms"]
        self.num_value_epochs: int | None = options["optimizer.num_value_epochs"]
        self.critic_warmup_steps: int = options["optimizer.critic_warmup_steps"]
        adaptive = options["optimizer.adaptive_learning_rate"]
        self.adaptive_learning_rate = None if adaptive is None else AdaptiveLearningRate(**adaptive)
        self.engine: EagerEngine | fast.FastEngine = EagerEngine()
        self.rollback = False
        self.num_sets = 1
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled programs refer to the tensors of this model, and cannot be sent to another process.
        return vars(self) | {"engine": EagerEngine()}

    def reset(self) -> None:
        """Drop the state of updates that may have failed."""
        self.record = UpdateRecord(self.model.device)
        self.part: ActorOrCritic | None = None
        self.failed_minibatch: FailedMinibatch | None = None
        self.active_set = 0
        self._has_ratios = self._has_value = False
        self._scales_up = False
        # Minibatches with the device's flags "all finite so far", which the host has not read yet.
        self._unchecked: list[tuple[FailedMinibatch, Tensor]] = []
        self._unchecked_bytes = 0

    def begin(self) -> None:
        self.reset()
        # Chosen for each rollout: callbacks and hooks may be added or removed between rollouts.
        self.engine = fast.engine_for(self.model) or EagerEngine()
        scaler = _scaler(self.model.trainer)
        self._scales_up = scaler is not None and scaler.get_scale() > 1

    def observe(self, **terms: Tensor | float) -> None:
        """Record scalars that may be NaN or infinite."""
        self.record.observe(**terms)

    def observe_first_ratios(self, log_ratios: Tensor) -> None:
        """Record the largest |ratio - 1| over all ranks, from the first log-ratios `[N]` of each rollout only."""
        if not self._has_ratios:
            self._has_ratios = True
            errors = log_ratios.detach().expm1().abs()
            # A rank may have no row in a minibatch.
            largest = all_reduce(errors.max() if len(errors) else errors.sum(), "max")
            self.record.observe(first_ratio_error=largest)

    # ------------------------------------------------------------------ optimizers

    @property
    def all_optimizers(self) -> list[LightningOptimizer]:
        """All optimizers: in each set first the optimizer of the actor or of both halves, then the critic's."""
        made = self.model.optimizers()
        return cast(list[LightningOptimizer], made if isinstance(made, list) else [made])

    @property
    def optimizers(self) -> list[LightningOptimizer]:
        """The optimizers that the current phase of updates uses."""
        made = self.all_optimizers
        count = len(made) // self.num_sets
        return made[self.active_set * count : (self.active_set + 1) * count]

    @contextmanager
    def phase(self, prefix: str, rate_scale: float) -> Iterator[None]:
        """Take further steps from the same rollout with the last set of optimizers.

        Recorded names get `prefix`, and the first set's learning rates are multiplied by `rate_scale`. The phase
        starts even after an early stop, but not after a non-finite loss or gradient.
        """
        first, before = self.optimizers, self.active_set
        self.active_set = self.num_sets - 1
        pairs = zip(first, self.optimizers, strict=True)
        groups = [pair for one, other in pairs for pair in zip(one.param_groups, other.param_groups, strict=True)]
        rates = [(group, of_first["lr"]) for of_first, group in groups]
        for group, rate in rates:
            group["lr"] = rate * rate_scale
        try:
            with self.record.phase(prefix):
                self.observe(learning_rate=rates[0][1] * rate_scale)
                yield
        finally:
            for group, rate in rates:
                group["lr"] = rate
            self.active_set = before

    # ------------------------------------------------------------------ passes

    @property
    def stopped(self) -> bool:
        """Whether the host already knows that no further step will be taken."""
        return self.record.stopped

    @property
    def is_warming_up(self) -> bool:
        return bool(self.model.env_steps < self.critic_warmup_steps)

    def epochs(self, num_epochs: int) -> Iterator[tuple[int, bool]]:
        """Set `part` for each pass, and yield the number of the pass and whether it is the last."""
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
            self.record.end_minibatches()

    def take(self, loss_of: Callable[[Any], Loss], batch: Any) -> None:  # what the loss takes
        """Take one gradient step on the loss of a method, unless it is not finite or the updates were stopped."""
        record = self.record
        record.next_minibatch()
        name = getattr(loss_of, "__name__", "loss")
        if not callable(loss_of):
            raise TypeError(f"descend got a {type(loss_of).__name__}: expected a method: descend(self.loss, batch)")
        if not self.gradient_norms and (whole := self.engine.whole_step(self, loss_of, batch)) is not None:
            loss, (record.is_open, record.finite, record.num_updates) = whole
            self.record_loss(loss)
            self._check_finite(batch, loss_of)
            return
        optimizers = self.optimizers
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.engine.loss(self.model, loss_of, batch, self.part)
        if not hasattr(loss, "terms"):
            raise TypeError(f"{name} returned {type(loss).__name__}: expected the Loss that self.new_loss returns")
        total = self.record_loss(loss)
        if isinstance(loss, Loss) and not (total.requires_grad or self.model.frozen_parameters(self.part)):
            raise ValueError(f"{name} does not depend on the policy: expected terms of self.actor_critic(batch)")
        before = snapshot([x.optimizer for x in optimizers]) if self.rollback and loss.limits else None
        self._backward(total)
        self._apply_gradients(total.detach(), batch, loss_of)
        if before is not None:
            self._restore_unless_close(loss_of, batch, before)

    @contextmanager
    def isolated(self, part: ActorOrCritic | None = None) -> Iterator[None]:
        """Use an empty record inside the context, and restore everything after it."""
        kept = {**vars(self)}
        self.reset()
        self.part = part
        try:
            yield
        finally:
            vars(self).update(kept)

    def not_finite(self, means: dict[str, float]) -> dict[str, float]:
        """Return the means that are not finite and make the update fail."""
        failed = self.record.not_finite(means)
        if failed and self.failed_minibatch is None:
            self._find_failed_minibatch()
        return failed

    def adapt_learning_rate(self, means: dict[str, float]) -> None:
        """Apply `adaptive_learning_rate` to the actor's optimizer, equally on all ranks."""
        if self.adaptive_learning_rate is None:
            return
        if "approx_kl" in means:
            mean_kl = average(_exact(means["approx_kl"], self.model.device))
            self.adaptive_learning_rate.adapt(self.optimizers[0].optimizer, float(mean_kl))
        elif "loss" in means and not self.is_warming_up:
            raise RuntimeError("optimizer.adaptive_learning_rate needs approx_kl: call loss.observe(approx_kl=rows)")

    @property
    def has_value(self) -> bool:
        """Whether a loss had a value term, or no step was taken."""
        return self._has_value or not bool(self.record.num_updates)

    # ------------------------------------------------------------------ one step

    def record_loss(self, loss: Any) -> Tensor:  # a `Loss` or a `ComputedLoss`
        """Record the terms of a loss, stop the updates if a limit is exceeded, and return the total."""
        self._has_value |= loss.has_value
        self.record.add_together(*loss.recorded)
        if len(loss.terms):
            self.record.add_absolute("total_abs_loss", torch.stack([term.detach() for term in loss.terms]))
        if loss.first_log_ratios is not None:
            self.observe_first_ratios(loss.first_log_ratios)
        if loss.limits:
            self.record.stop_unless(_is_within_limits(loss))
        return loss.total  # type: ignore[no-any-return]

    def _backward(self, total: Tensor) -> None:
        if world_size() > 1:
            total = not_finite_throughout(total)
        frozen: list[nn.Parameter] = self.model.frozen_parameters(self.part)
        if frozen:  # DDP waits for a gradient of every parameter
            total = total + sum(0 * parameter.sum() for parameter in frozen)
        self.engine.backward(self.model, total)
        for parameter in self.model.frozen_parameters(self.part) if frozen else ():  # sharded again
            parameter.grad = None

    def _apply_gradients(self, total: Tensor, batch: Any, loss_of: Callable[[Any], Loss]) -> None:
        """Average, unscale, norm, clip, finite check, step: the order for every strategy and precision."""
        record, trainer = self.record, self.model.trainer
        # Other engines and strategies leave different gradients on each rank. `XLAStrategy` is a DDPStrategy, but
        # averages gradients within the step, after they are clipped.
        averaged = isinstance(self.engine, EagerEngine) and isinstance(trainer.strategy, DDPStrategy)
        averaged = averaged and not isinstance(trainer.strategy, XLAStrategy)
        if world_size() > 1 and not averaged:
            average_gradients(self.model.parameters())
        named = zip(self.norm_names, self.optimizers, strict=False)
        stepping = [(n, x, found) for n, x in named if (found := self.engine.gradients(x.optimizer))]
        scaler = _scaler(trainer)
        if scaler is not None and stepping:
            for _, optimizer, _ in stepping:
                scaler.unscale_(optimizer.optimizer)
            scaler.update()
            total = average(total)  # all ranks must agree whether the loss or only its scaled gradient is not finite
        norms = {of_norm: total_norm(gradients) for of_norm, _, gradients in stepping}
        if not _is_known_finite(total):
            # A non-finite loss invalidates the gradient even if its entries look finite.
            norms = {of_norm: norm + 0 * total for of_norm, norm in norms.items()}
        if scaler is not None and stepping:
            norms = self._without_overflow(norms, total)
        record.add(**norms)
        if self.gradient_norms:
            self._record_gradient_norms()
        for of_norm, _, gradients in stepping:
            self._clip(gradients, norms[of_norm])
        for norm in norms.values():
            if not _is_known_finite(norm):
                record.stop_all_phases_unless(norm - norm == 0)  # fewer kernels than isfinite
        self._check_finite(batch, loss_of)
        record.num_updates = record.num_updates + record.takes_step
        for index, (_, optimizer, _) in enumerate(stepping):
            self._step(optimizer, counts=index == 0)

    def _record_gradient_norms(self) -> None:
        given = {n.removeprefix("policy."): x.grad for n, x in self.model.named_parameters() if x.grad is not None}
        if given:
            names = [f"grad_norm/{name}" for name in given]
            self.record.add_together(names, torch.stack([total_norm([x]) for x in given.values()]), names)

    def _without_overflow(self, norms: dict[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        """Skip the step if the scaled gradient of a finite loss overflowed float16; return norms of 0 then."""
        # A scale of at most 1 causes no overflow: a non-finite gradient is an error then, as in other precisions.
        finite = functools.reduce(operator.and_, (norm.isfinite() for norm in norms.values()))
        overflow = total.isfinite() & ~finite & self._scales_up
        self.record.observe(skipped_steps=overflow.float())
        self.record.skip_step_if(overflow)
        return {name: norm.masked_fill(overflow, 0.0) for name, norm in norms.items()}

    def _check_finite(self, batch: Any, loss_of: Callable[[Any], Loss]) -> None:
        """Keep the first minibatch with a non-finite loss or gradient. On a GPU the host checks later."""
        if self.failed_minibatch is None:
            one, finite = FailedMinibatch(batch, loss_of, self.part), self.record.finite
            if not finite.is_cpu:
                self._unchecked.append((one, finite))
                self._unchecked_bytes += getattr(batch, "num_bytes", 0)
                if self._unchecked_bytes > _MAX_UNCHECKED:
                    self._find_failed_minibatch()
            elif not finite:
                self.failed_minibatch = one
        if self.check_numerics and self.record.not_finite(self.record.means()):
            raise NotFiniteError

    def _find_failed_minibatch(self) -> None:
        """Keep the first non-finite minibatch of the unchecked ones, and release the others; the host waits."""
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
        """Step if the record allows it. Fused and capturable optimizers decide on the device, others on the host."""
        # Only the first optimizer of an update `counts`: an update is one global step of Lightning.
        takes_step, raw = self.record.takes_step, optimizer.optimizer
        step: Callable[[], Any] = functools.partial(self.engine.step, self.model, optimizer, counts)
        fused, capturable = (not takes_step.is_cpu and raw.defaults.get(name) for name in ("fused", "capturable"))
        if fused and takes_step.device.type != "mps":  # where `found_inf` was ignored until pytorch#186360
            raw.found_inf, raw.grad_scale = (~takes_step).float(), None  # type: ignore[attr-defined]
            step()
        elif (fused or capturable) and raw.state:
            step_where(takes_step, raw, step)
        elif takes_step:
            step()

    @torch.no_grad()
    def _restore_unless_close(self, loss_of: Callable[[Any], Loss], batch: Any, restore: Callable[[], None]) -> None:
        """Undo a step after which the minibatch exceeds a limit of its loss; the host waits for the device."""
        keep = _is_within_limits(loss_of(batch))
        taken_back = self.record.is_open & ~keep
        if taken_back:
            restore()
        reshard(self.model.policy)
        self.record.num_updates = self.record.num_updates - taken_back.long()
        self.record.observe(updates_taken_back=taken_back.float())
        self.record.stop_unless(keep)


class EagerEngine:
    """Computes gradients with autograd and steps optimizers through Lightning, with all of its hooks.

    All engines give the same results up to rounding. `normalizes_in_loss` is whether the loss is compiled and
    normalizes the advantages of a minibatch itself.
    """

    normalizes_in_loss = False

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> None:
        """Return None: this engine has no program for a whole step."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: ActorOrCritic | None) -> Any:
        """Return the loss of a minibatch: a `Loss`, or a `ComputedLoss`."""
        return loss_of(batch)

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of the last loss, whose `total` may have further summands by now."""
        try:
            model.manual_backward(total)
        except RuntimeError as error:
            if (found := _ANOMALY.search(str(error))) is None:
                raise
            raise FloatingPointError(
                f"the gradient of {found[1]} is NaN: detect_anomaly printed above where it was computed. "
                f"{WHAT_TO_TRY}; run without detect_anomaly to save the update and repeat it (FailedUpdate)"
            ) from error

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients that `step` applies. One tensor may hold the gradients of several parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Step an optimizer; `counts` increments Lightning's global step."""
        # Without the scaler of `16-mixed`: the gradient is unscaled already, which Lightning does not expect.
        precision: Any = model.trainer.precision_plugin
        scaler, precision.scaler = getattr(precision, "scaler", None), None
        try:
            if counts:
                optimizer.step()
            else:
                model.trainer.strategy.optimizer_step(optimizer.optimizer, lambda: None)
        finally:
            precision.scaler = scaler


class UpdateRecord:
    """Scalars recorded during one rollout's updates, and the flags that stop further updates.

    All tensors stay on the device. The host reads the scalars once per rollout, in `means`.

    Attributes:
        is_open: Whether further steps are taken. An early stop or a non-finite loss or gradient clears this flag.
        finite: Whether all losses and gradients were finite. An early stop does not clear this flag.
        num_updates: Number of steps taken.
        observed: Names of scalars that may be NaN or infinite.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_open = self.finite = self._counts = self._always = torch.ones((), dtype=torch.bool, device=device)
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.observed: set[str] = set()
        self._skips: Tensor | None = None
        # Names, their values, and the `is_open` flag at the start of the minibatch.
        self._recorded: list[tuple[Sequence[str], Tensor, Tensor]] = []
        self._absolute: list[tuple[str, Tensor, Tensor]] = []  # of `add_absolute`
        self.prefix = ""

    def next_minibatch(self) -> None:
        """Start a minibatch; its values are dropped if the updates were stopped before."""
        self._counts, self._skips = self.is_open, None

    def end_minibatches(self) -> None:
        self._counts = self._always  # what is recorded from now on counts, even if the updates were stopped

    def skip_step_if(self, condition: Tensor) -> None:
        """Take no step on this minibatch if `condition` is true, and drop what is recorded for it from now on."""
        self._counts, self._skips = self._counts & ~condition, condition

    @property
    def takes_step(self) -> Tensor:
        return self.is_open if self._skips is None else self.is_open & ~self._skips

    def add(self, **terms: Tensor | float) -> None:
        """Record scalars of a minibatch that must be finite; `means` returns their mean over minibatches."""
        for name, term in terms.items():
            value = term.detach() if isinstance(term, Tensor) else _exact(term, self.is_open.device)
            if value.numel() != 1:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}: expected a scalar to record")
            self.add_together((name,), value.reshape(1))

    def observe(self, **terms: Tensor | float) -> None:
        self.observed.update(self.prefix + name for name in terms)
        self.add(**terms)

    def add_together(self, names: Sequence[str], values: Tensor, observed: Collection[str] = ()) -> None:
        """Record scalars of a minibatch as one vector `[len(names)]`; names in `observed` may be NaN or infinite."""
        self.observed.update(self.prefix + name for name in observed)
        names = [self.prefix + name for name in names] if self.prefix else names
        self._recorded.append((names, values, self._counts))

    def add_absolute(self, name: str, terms: Tensor) -> None:
        """Record terms `[M]` of a minibatch; `means` returns the sum of |mean over ranks| of the terms."""
        self._absolute.append((self.prefix + name, terms.detach(), self._counts))

    def stop_unless(self, condition: Tensor) -> None:
        """Take no further step in this phase if `condition` is false."""
        self.is_open = self.is_open & condition

    def stop_all_phases_unless(self, finite: Tensor) -> None:
        """Take no further step in any phase of this rollout if `finite` is false."""
        self.finite, self.is_open = self.finite & finite, self.is_open & finite

    def start_phase(self, prefix: str) -> None:
        """Start another phase of updates, whose recorded names get a prefix. It ignores earlier early stops."""
        self.is_open = self._counts = self.finite
        self.prefix = prefix

    @contextmanager
    def phase(self, prefix: str) -> Iterator[None]:
        """Start another phase inside the context; after it, continue the phase from before with its early stop."""
        is_open, before = self.is_open, (self.prefix, self._counts)
        self.start_phase(prefix)
        try:
            yield
        finally:
            self.is_open = is_open & self.finite
            self.prefix, self._counts = before

    @property
    def stopped(self) -> bool:
        """Whether the host knows, without waiting for the device, that no further step will be taken."""
        return self.is_open.device.type == "cpu" and not self.is_open

    def means(self) -> dict[str, float]:
        """Return the mean of every scalar over the minibatches; a collective call, and the host waits only here."""
        if not self._recorded:
            return {}
        terms = [average(at_least_float32(torch.cat([x for _, x, _ in self._absolute])))] if self._absolute else []
        # Minibatches without a stop between them share one flag.
        flags = {id(flag): flag for *_, flag in (*self._recorded, *self._absolute)}
        numbers = iter(torch.cat([torch.stack([*flags.values()]), *(x for _, x, _ in self._recorded), *terms]).tolist())
        is_open = dict(zip(flags, numbers, strict=False))
        values: dict[str, list[float]] = defaultdict(list)
        for names, _, flag in self._recorded:
            for name, value in zip(names, numbers, strict=False):
                if is_open[id(flag)]:
                    values[name].append(value)
        for name, x, flag in self._absolute:
            total = sum(map(abs, itertools.islice(numbers, len(x))))
            if is_open[id(flag)]:
                values[name].append(total)
        return {name: sum(some) / len(some) for name, some in values.items()}

    def not_finite(self, means: dict[str, float]) -> dict[str, float]:
        return {n: x for n, x in means.items() if not math.isfinite(x) and n not in self.observed}


def _exact(number: float, device: torch.device) -> Tensor:
    # The default dtype is bfloat16 in the updates of `bf16-true`.
    return torch.tensor(float(number), dtype=exact_dtype(device), device=device)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over ranks; a parameter without a gradient on this rank counts as 0 for the other ranks."""
    trained = [x for x in parameters if x.requires_grad and not is_sharded(x)]  # shards have averages already
    if not trained:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
    means = torch.split(average(flat), [p.numel() for p in trained])
    for parameter, mean in zip(trained, means, strict=True):
        if parameter.grad is not None:
            parameter.grad = mean.view_as(parameter)


def _scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the global norm of one or more gradients, some of which may be sharded over ranks."""
    if world_size() > 1 and any(map(is_sharded, gradients)):
        sharded = whole(nn.utils.get_total_norm([x for x in gradients if is_sharded(x)]))
        gradients = [sharded, *(x for x in gradients if not is_sharded(x))]
    one = len(gradients) == 1
    norm: Tensor = torch.linalg.vector_norm(gradients[0]) if one else nn.utils.get_total_norm(gradients)
    return norm


def scale_to_norm(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients with the global norm `norm` to a global norm of at most `max_norm`, in place."""
    if norm.is_cpu and 1.01 * float(norm) + 2e-6 < max_norm:
        return  # the factor is certainly 1
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


@torch.no_grad()
def step_where(condition: Tensor, optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Step, then undo the step if `condition` is false; the device decides.

    For optimizers that cannot skip a step; the state must exist already. Zeroing the gradient would not help: Adam also
    moves along its moments.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(condition, tensor, old))


def snapshot(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Copy the parameters and states of optimizers, and return a function that restores them once."""
    parameters = [x for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]]
    copies = [parameter.detach().clone() for parameter in parameters]
    states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])

    @torch.no_grad()
    def restore() -> None:
        for parameter, old in zip(parameters, copies, strict=True):
            parameter.copy_(old)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    return restore


def _is_within_limits(loss: Loss) -> Tensor:
    names, values, _ = loss.recorded
    within = (average(values[names.index(name)]) <= limit for name, limit in loss.limits.items())
    return functools.reduce(operator.and_, within)


def _is_known_finite(x: Tensor) -> bool:
    """Whether the host knows, without waiting for the device, that a scalar is finite."""
    return x.is_cpu and math.isfinite(x)


def not_finite_throughout(loss: Tensor) -> Tensor:
    """Return `loss` with a NaN gradient if the loss is not finite, so that all ranks notice."""
    # With `detect_anomaly` the loss is unchanged, or this function would be reported as the origin of the NaN.
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return loss
    return loss * (1 + 0 * loss.detach())
