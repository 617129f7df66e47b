"""Optimizers and gradient steps: clipping, finite checks and rollback."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl import fast
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.replay import Replay
from lightning_rl.training.loss import Diagnostics
from lightning_rl.training.over_ranks import OverRanks
from lightning_rl.training.parameter_groups import (
    SCALE,
    ActorOrCritic,
    ParameterGroups,
    WeightPenalty,
    parameters_of_other_half,
    split_parameters,
)
from lightning_rl.training.reward_normalization import RewardNormalizer
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_arguments,
    check_number,
    import_class,
    instantiate,
    to_class_spec,
)


def adam(device: torch.device) -> ClassSpec:
    """Return Adam with the epsilon that is usual here, in one kernel where the device has such."""
    if device.type in ("cpu", "cuda", "mps", "xpu"):
        return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "fused": True}}
    # Elsewhere its counter of steps lies on the device too, so that the host need not decide about a step.
    return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "capturable": True}}


def optimizer_spec(field: str, optimizer: ClassSpec | type[Optimizer]) -> ClassSpec:
    """Return an optimiser's class and arguments as plain data.

    Raises:
        ConfigurationError: It is none, or does not take its arguments; the learning rate is not one of them.
    """
    spec = to_class_spec(field, optimizer)
    given = spec["init_args"]
    rate = field.replace("optimizer", "learning_rate")
    check("lr" not in given, f"{field}: init_args", given, f"no 'lr'; set {rate} instead")
    check_arguments(field, spec, Optimizer, "params", "lr")
    return spec


def scheduler_spec(lr_scheduler: ClassSpec | type[LRScheduler]) -> ClassSpec:
    """Return a scheduler's class and arguments as plain data.

    Raises:
        ConfigurationError: It is none, does not take its arguments, or needs a metric.
    """
    spec = to_class_spec("lr_scheduler", lr_scheduler)
    plateau = issubclass(import_class("lr_scheduler", spec["class_path"], LRScheduler), ReduceLROnPlateau)
    check(not plateau, "lr_scheduler", spec, "a scheduler that needs no metric")
    check_arguments("lr_scheduler", spec, LRScheduler, "optimizer")
    return spec


def check_step(given: str, optimizer: Optimizer) -> None:
    """Take steps with an optimizer whose parameters nobody needs, with gradients of 1.

    Args:
        given: The options that it was made of, as an error names them.
        optimizer: Of parameters that may be changed.

    Raises:
        ConfigurationError: A step fails, as it does without a closure or with gradients that are not sparse, or leaves
            parameters that are not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        with torch.random.fork_rng(devices=[]):
            for _ in range(3):
                optimizer.step()
        problem = "" if all(x.isfinite().all() for x in parameters) else "parameters are not finite after three steps"
    except Exception as error:
        problem = f"a step fails, {type(error).__name__}: {error}"
    expected = "an optimizer and arguments that can take steps without a closure, on dense gradients"
    if problem:
        raise ConfigurationError(f"{given} is not valid ({problem}): expected {expected}")


def step_scheduler(scheduler: LRScheduler, spec: ClassSpec | None) -> None:
    """Step a scheduler after a rollout.

    Args:
        scheduler: Of the learning rate.
        spec: Its class and arguments, as `lr_scheduler` has them.

    Raises:
        ConfigurationError: The step fails, or gives a learning rate that is no number of at least 0.
    """
    field, step = f"lr_scheduler={spec!r}", scheduler.last_epoch + 1
    try:
        scheduler.step()
    except Exception as error:
        raise ConfigurationError(
            f"{field} is not valid (step {step} fails, {type(error).__name__}: {error}): expected a scheduler that can "
            "take a step after each rollout of the run"
        ) from error
    for rate in scheduler.get_last_lr():
        if isinstance(rate, int | float):
            check_number(f"{field}: learning rate after step {step}", rate, at_least=0)


def optimizers_and_schedulers(made: Any) -> tuple[Sequence[Optimizer], Sequence[LRScheduler]]:  # noqa: ANN401
    """Return what `configure_optimizers` gave as two lists."""
    if isinstance(made, tuple):
        return made[0], made[1]
    return (made if isinstance(made, list) else [made]), []


def check_optimizers(policy: nn.Module, specs: Mapping[str, ClassSpec], groups: ParameterGroups) -> None:
    """Raise unless optimisers can be made; for the arguments see `make_optimizers`.

    Raises:
        ConfigurationError: No parameter belongs to a pattern, a class does not know an option of its groups, or the
            critic shares parameters; names it.
    """
    for (field, spec), part in zip(specs.items(), split_parameters(policy, groups, len(specs) > 1), strict=True):
        known = set(inspect.signature(import_class(field, spec["class_path"], Optimizer)).parameters) - {"params", "lr"}
        for pattern in filter(None, part):
            unknown = sorted({*groups[pattern]} - known - {SCALE})
            expected = f"{SCALE} and options of {spec['class_path']}, not {', '.join(unknown)}"
            check(not unknown, f"parameter_groups: {pattern}", groups[pattern], expected)


def try_optimizers(
    policy: nn.Module,
    specs: Mapping[str, ClassSpec],
    groups: ParameterGroups,
    scheduler: ClassSpec | None,
    on_any_device: bool,
) -> None:
    """Make optimizers and schedulers for a few numbers in place of the parameters, and take some steps with them.

    Args:
        policy: Whose parameters they will have.
        specs: As in `make_optimizers`.
        groups: As in `make_optimizers`.
        scheduler: Class and arguments of the scheduler of each.
        on_any_device: Try the optimizers that are known to run on every device. Others are for when the policy is on
            its device.

    Raises:
        ConfigurationError: One refuses an argument or cannot take a step.
    """
    parts = split_parameters(policy, groups, separate=len(specs) > 1)
    for (field, spec), part in zip(specs.items(), parts, strict=False):
        if _runs_on_any_device(spec, groups) == on_any_device:
            _try_optimizer(field, spec, part, groups, scheduler)


def _runs_on_any_device(spec: ClassSpec, groups: ParameterGroups) -> bool:
    capturable = any(options.get("capturable") for options in (spec["init_args"], *groups.values()))
    return spec["class_path"].startswith(("torch.", "lightning_rl.")) and not capturable


def _try_optimizer(
    field: str,
    spec: ClassSpec,
    part: Mapping[str | None, list[nn.Parameter]],
    groups: ParameterGroups,
    scheduler: ClassSpec | None,
) -> None:
    devices = {parameter.device.type for members in part.values() for parameter in members}
    if devices & {"meta", "xla"}:  # no numbers there, or a graph to compile for each step
        return
    few = {
        pattern: [nn.Parameter(x.new_ones([min(size, 2) for size in x.shape])) for x in members]
        for pattern, members in part.items()
    }
    optimizer = _make(field, spec, few, groups, 1e-3)
    made = None if scheduler is None else instantiate("lr_scheduler", scheduler, LRScheduler, optimizer)
    check_step(f"{field}={spec!r}" + (f" with parameter_groups={groups!r}" if groups else ""), optimizer)
    if made is not None:
        step_scheduler(made, scheduler)


def make_optimizers(
    policy: nn.Module, specs: Mapping[str, ClassSpec], groups: ParameterGroups, rates: Sequence[float]
) -> list[Optimizer]:
    """Make the optimiser of a policy, or that of its actor and that of its critic.

    Args:
        policy: Whose parameters they have.
        specs: Class and arguments of one or two, by the setting that they come from.
        groups: Options of some parameters, by pattern.
        rates: Learning rate of each for a group whose scale is 1.

    Raises:
        ConfigurationError: A class refuses an argument.
    """
    parts = split_parameters(policy, groups, separate=len(specs) > 1)
    return [
        _make(field, spec, part, groups, rate)
        for (field, spec), part, rate in zip(specs.items(), parts, rates, strict=False)
    ]


def _make(
    field: str,
    spec: ClassSpec,
    parameters: Mapping[str | None, list[nn.Parameter]],
    groups: ParameterGroups,
    rate: float,
) -> Optimizer:
    given: list[dict[str, Any]] = []
    for pattern, members in parameters.items():
        options = {} if pattern is None else groups[pattern]
        # Betas and the like: plain data has lists where optimisers have tuples.
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
        given.append({"params": members, **options, **({"lr": rate * options[SCALE]} if SCALE in options else {})})
    # One group without options is given as everybody gives it, to optimisers too that take nothing else.
    single = [*parameters] == [None]
    optimizer: Optimizer = instantiate(field, spec, Optimizer, given[0]["params"] if single else given, lr=rate)
    return optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group: `rate` times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SCALE, 1.0)


def scale_learning_rate(optimizer: Optimizer, factor: float, lowest: float, highest: float) -> None:
    """Multiply the learning rate of every group, within bounds that are scaled as the group is."""
    for group in optimizer.param_groups:
        scale = group.get(SCALE, 1.0)
        group["lr"] = min(max(group["lr"] * factor, lowest * scale), highest * scale)


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


@dataclass(frozen=True)
class AdaptiveLearningRate:
    """Lower the learning rate where the policy moves too far, raise it where it hardly moves.

    The rule of rl_games and rsl_rl, once per rollout. The rate itself is in the optimiser, and so in its checkpoints.

    Attributes:
        target_kl: The divergence aimed at, in nats: no change between half and twice of it.
        factor: What the rate is divided or multiplied by.
        minimum: The rate never falls below.
        maximum: Nor rises above.
    """

    target_kl: float
    factor: float = 1.5
    minimum: float = 1e-6
    maximum: float = 1e-2

    def adapt(self, optimizer: Optimizer, kl: float) -> None:
        """Set the rate of every group for the next rollout, after a mean divergence of `kl` in this one."""
        if kl > 2 * self.target_kl:
            scale_learning_rate(optimizer, 1 / self.factor, self.minimum, self.maximum)
        elif kl < self.target_kl / 2:
            scale_learning_rate(optimizer, self.factor, self.minimum, self.maximum)


GRADIENT_NORMS = ("grad_norm", "critic_grad_norm")
"""What the norms of the gradients of the optimisers are logged by, before they are clipped."""
StepOutput: TypeAlias = "dict[str, dict[str, float]] | None"
"""What `training_step` may return: `{"losses": self.losses}`, for `on_train_batch_end` of callbacks."""


class NotFiniteError(Exception):
    """Ends the updates from a rollout at the very minibatch; `learning` says which term it was."""


class Engine(Protocol):
    """Computes gradients and steps optimizers: `EagerEngine`, or one with the same results up to rounding."""

    def updates(self, model: Any) -> AbstractContextManager[None]:  # noqa: ANN401
        """Return the context of all updates from a rollout."""
        ...

    def loss(self, model: Any, batch: Batch, only: ActorOrCritic | None = None) -> Tensor:  # noqa: ANN401
        """Return the loss over a minibatch, for `backward`."""
        ...

    def backward(self, model: LightningModule, loss: Tensor) -> None:
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

    def updates(self, model: Any) -> AbstractContextManager[None]:  # noqa: ANN401
        """Return the context of all updates from a rollout: none is needed."""
        return nullcontext()

    def loss(self, model: Any, batch: Batch, only: ActorOrCritic | None = None) -> Tensor:  # noqa: ANN401
        """Return the loss over a minibatch."""
        # A subclass may have a `loss` without halves.
        return model.loss(batch) if only is None else model.loss(batch, only)  # type: ignore[no-any-return]

    def backward(self, model: LightningModule, loss: Tensor) -> None:
        """Compute the gradient of a loss."""
        model.manual_backward(loss)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of all parameters that have one."""
        return gradients_of(optimizer)

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take a step; one that does not count is taken past `LightningOptimizer`, which counts."""
        if counts:
            optimizer.step()
        else:
            model.trainer.strategy.optimizer_step(optimizer.optimizer, lambda: None)


class Updates(OverRanks):
    """What an algorithm calls between a rollout and new parameters: `minibatches`, `normalized_advantages`, `optimize`.

    Attributes:
        fast_paths: Whether engines other than `EagerEngine` may be used.
        engine: Computes gradients and takes steps.
        max_grad_norm: Clip the global norm of the gradient; None does not.
        max_grad_value: Clip every entry of the gradient, before its norm; None does not.
        check_numerics: Look for NaN and infinity after every minibatch rather than after every rollout.
        policy: Actor and critic; what is the critic's alone is named `critic_…` or `value_…`.
        diagnostics: Of the rollout that is being learned from.
        losses: What came of the updates from the last rollout: the mean of every term over this rank's minibatches, by
            the name that it is logged by (`train/<name>`).
        generator: Orders the minibatches; its own, so that nothing else changes them.
        env_steps: Environment steps of all ranks that were learned from: the clock of the run.
        env_steps_before_epochs: Where the clock was when the Trainer began to count epochs: above 0 where an earlier
            run has trained the module, and this one does not go on from it by `ckpt_path`.
        frames: Steps of the simulation in them: more where each action is repeated.
        policy_version: Number of rollouts that were learned from.
        max_skipped_updates: How many rollouts in a row may give an update that is not finite.
        skipped_updates: How many of the last ones in a row did.
        updating: Whether one is being learned from, or an exception has left that undone.
        replays: What this rank keeps of earlier rollouts, by name; checkpoints have it.
        not_in_checkpoints: Names of those that they do not have.
    """

    policy: ActorCritic

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fast_paths = True
        self.engine: Engine = EagerEngine()
        self.max_grad_norm: float | None = None
        self.max_grad_value: float | None = None
        self.check_numerics = False
        self.max_skipped_updates = 0
        self.diagnostics = Diagnostics(torch.device("cpu"))
        self.losses: dict[str, float] = {}
        self.generator = torch.Generator()
        self.env_steps = self.env_steps_before_epochs = 0
        self.frames = 0
        self.policy_version = 0
        self._planned_env_steps: int | None = None
        self.reward_normalizer: RewardNormalizer | None = None
        self.weight_penalty = WeightPenalty()
        self.skipped_updates = 0
        self.updating = False
        self.replays: dict[str, Replay] = {}
        self.not_in_checkpoints: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch cannot send a generator to a process that it spawns, nor a tensor that nothing else refers to.
        return super().__getstate__() | {"generator": self.generator.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))
        super().__setstate__(state | {"generator": generator})  # type: ignore[no-untyped-call]

    @property
    def all_optimizers(self) -> list[LightningOptimizer]:
        """Every optimiser, in use or not: first the one, and that of the critic if it has its own."""
        made = self.optimizers()
        return cast(list[LightningOptimizer], made if isinstance(made, list) else [made])

    @property
    def optimizer(self) -> LightningOptimizer:
        """The one that is in use; that of the actor, if the critic has its own."""
        return self.optimizers_in_use[0]

    @property
    def optimizers_in_use(self) -> list[LightningOptimizer]:
        """Those that step in the present phase of updates."""
        return self.all_optimizers

    def frozen_parameters(self, only: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return those that an update leaves as they are, moments of the optimiser included.

        Args:
            only: The half of the network that its loss is about; None: both.
        """
        return [] if only is None else parameters_of_other_half(self.policy, only)

    @property
    def normalizes_minibatches(self) -> bool:
        """Whether the advantages of each minibatch are normalised for themselves."""
        return False

    def new_diagnostics(self) -> Diagnostics:
        """Return what records the updates from one rollout."""
        return Diagnostics(self.device, self.average_over_ranks)

    def minibatches(self, batch: Batch, num_minibatches: int) -> Iterator[Batch]:
        """Yield the rows in the order of `minibatch_order`, cut into minibatches.

        With several ranks, the k-th minibatches of all ranks are one: each rank's `weight` divides by the rows of all.
        One in which none has a row that counts, as there may be of few rows, is left out.
        """
        order = self.minibatch_order(batch.num_items)
        may_lack_rows = batch.sequences is not None or len(order) < num_minibatches
        cut = self.with_normalized_advantages(batch, order, num_minibatches)
        # Several ranks agree on the weights of all at once; one alone need not have them all in memory.
        for parts in [list(cut)] if self.world_size > 1 else ([part] for part in cut):
            self.set_global_weights(parts)
            yield from map(self.start_minibatch, filter(self.has_rows, parts) if may_lack_rows else parts)

    def with_normalized_advantages(self, batch: Batch, order: Tensor, num_minibatches: int) -> Iterator[Batch]:
        """Yield the minibatches of a pass; if it normalises each, with what `normalized_advantages` of it will return.

        That of all of them at once takes little longer than of one, and ranks talk to each other once.
        """
        cut = batch.minibatches(order, num_minibatches)
        if not (self.normalizes_minibatches and batch.is_plain):
            yield from cut
            return
        advantages = batch.advantages.index_select(0, order.to(batch.advantages.device))
        each = self.normalize_each(advantages.tensor_split(num_minibatches))
        for part, normalized in zip(cut, each, strict=True):
            part.normalized_advantages = normalized
            yield part

    def passes(self, batch: Batch, num_passes: int, num_minibatches: int) -> Iterator[Batch]:
        """Yield the minibatches of several passes, until it is known that no further update will be made."""
        for _ in range(num_passes):
            for minibatch in self.minibatches(batch, num_minibatches):
                yield minibatch
                if self.diagnostics.stopped:
                    return

    def start_minibatch(self, batch: Batch) -> Batch:
        """Return a minibatch to be learned from next; what is recorded from now on is of it."""
        self.diagnostics.next_minibatch()
        return batch

    def minibatch_order(self, num_items: int) -> Tensor:
        """Return the indices of a batch's rows in the order in which one pass goes through them, shape `[M]`.

        Called once per pass. Override it to choose the order: minibatches are cut from it as it stands, so that it may
        leave rows out or repeat them.

        Args:
            num_items: Number of rows of this rank's batch; with memory, of sequences, which the order is of then.
        """
        return torch.randperm(num_items, generator=self.generator)

    def normalized_advantages(self, batch: Batch) -> Tensor:
        """Return a batch's advantages as `normalize_each` makes them of those that count; others are 0, with memory."""
        if (known := batch.normalized_advantages) is not None:
            return known
        if "weights" not in batch.fields:
            return self.normalize_each([batch.advantages])[0]
        counted = batch.weights != 0
        (normalized,) = self.normalize_each([batch.advantages[counted]])
        return torch.zeros_like(batch.advantages).masked_scatter(counted, normalized)

    @torch.no_grad()
    def observe_first_ratios(self, log_ratios: Tensor) -> None:
        """Observe, in the first minibatch of a rollout, how far importance ratios `[N]` are from 1 on any rank.

        There the policy that learns is the one that acted: `first_ratio_error` is 0 but for rounding.
        """

        def largest() -> Tensor:
            errors = log_ratios.expm1().abs()
            # One rank may have no row in a minibatch.
            return self.all_reduce(errors.max() if len(errors) else errors.sum(), "max")

        self.diagnostics.observe_first("first_ratio_error", largest)

    def entropy(self, distribution: Distribution, batch: Batch) -> Tensor:
        """Return the mean entropy over a minibatch, and record it; where actions have parts, that of each part too."""
        parts = {path: batch.mean(x) for path, x in distribution.entropies().items()}
        total = functools.reduce(operator.add, parts.values())
        self.diagnostics.add(entropy=total)
        self.diagnostics.observe(**{f"entropy.{path}": part for path, part in parts.items() if path})
        return total

    def total(self, *terms: Tensor) -> Tensor:
        """Return the sum of the terms of a loss, weight penalties added, and record it.

        `loss` is the sum, `total_abs_loss` that of the absolute values, in which nothing cancels.
        """
        if (penalty := self.weight_penalty(cast(nn.Module, self.policy))) is not None:
            self.diagnostics.add(l2_penalty=penalty)
            terms = (*terms, penalty)
        loss = functools.reduce(operator.add, terms)
        self.diagnostics.add(loss=loss)
        self.diagnostics.add_absolute("total_abs_loss", torch.stack(terms))
        return loss

    def optimize(
        self, loss: Tensor, only: ActorOrCritic | None = None, keep_if: Callable[[], Tensor] | None = None
    ) -> None:
        """Take one step down the gradient of `loss`, unless either is not finite or updates were stopped.

        Where the critic has an optimiser of its own, both step from the one gradient, each clipped by itself.

        Args:
            loss: A scalar with a graph, or from `engine.loss`.
            only: The half of the network that `loss` is about, so that the other stays as it is, moments of the
                optimiser included; None: both.
            keep_if: Called after the step, without gradient; if it returns false, on the device and on every rank, the
                step is taken back, and no further update is made from this rollout. The host waits for it.
        """
        optimizers = self.optimizers_in_use
        for optimizer in optimizers:
            optimizer.zero_grad()
        self._backward(loss, only)
        gradients = self._gradients(optimizers)
        norms = {name: total_norm(found) for name, found in gradients.items()}
        if not _is_known_finite(loss.detach()):
            # Of a loss that is not finite no gradient is, whatever came out.
            norms = {name: norm + 0 * loss.detach() for name, norm in norms.items()}
        self.diagnostics.add(**norms)
        for norm in norms.values():
            if not _is_known_finite(norm):
                # Whether it is finite, in fewer kernels than `isfinite`.
                self.diagnostics.stop_all_phases_unless(norm - norm == 0)
        if self.check_numerics and self.diagnostics.not_finite(self.diagnostics.means()):
            raise NotFiniteError
        self.diagnostics.num_updates = self.diagnostics.num_updates + self.diagnostics.open
        before = None if keep_if is None else OptimizerSnapshot(x.optimizer for x in optimizers)
        stepping = [pair for pair in zip(GRADIENT_NORMS, optimizers, strict=False) if pair[0] in norms]
        for name, optimizer in stepping:
            self._clip_gradients(gradients[name], norms[name])
            self._step(optimizer, counts=optimizer is stepping[0][1])
        if before is not None and keep_if is not None:
            self._take_back_unless(keep_if, before)

    def find_engine(self) -> None:
        """Choose the engine for the updates from a rollout: callbacks and hooks may come and go between rollouts."""
        self.engine = EagerEngine()
        self.engine = fast.engine_for(self) or self.engine

    def _backward(self, loss: Tensor, only: ActorOrCritic | None) -> None:
        """Compute the gradient; it is None in idle parameters."""
        if self.world_size > 1:
            loss = not_finite_throughout(loss)
        idle = self.frozen_parameters(only)
        if idle:  # DDP waits for the gradient of every parameter
            loss = loss + sum(0 * parameter.sum() for parameter in idle)
        self.engine.backward(self, loss)
        for parameter in idle:
            parameter.grad = None

    def _take_back_unless(self, keep_if: Callable[[], Tensor], before: OptimizerSnapshot) -> None:
        with torch.no_grad():
            keep = keep_if()
        taken_back = self.diagnostics.open & ~keep
        if taken_back:
            before.restore()
        self.diagnostics.num_updates = self.diagnostics.num_updates - taken_back.long()
        self.diagnostics.observe(updates_taken_back=taken_back.float())
        self.diagnostics.stop_unless(keep)

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the global norm of each optimiser's gradient, by the name it is logged by; of those that have one."""
        return {name: total_norm(found) for name, found in self._gradients(self.optimizers_in_use).items()}

    def _gradients(self, optimizers: Sequence[LightningOptimizer]) -> dict[str, list[Tensor]]:
        """Return the gradients of each optimiser that has some, by the name that their norm is logged by."""
        gradients = {n: self.engine.gradients(x.optimizer) for n, x in zip(GRADIENT_NORMS, optimizers, strict=False)}
        return {name: found for name, found in gradients.items() if found}

    def _clip_gradients(self, gradients: list[Tensor], grad_norm: Tensor) -> None:
        if self.max_grad_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.max_grad_value, self.max_grad_value)
            grad_norm = total_norm(gradients)
        if self.max_grad_norm is not None:
            scale_to_norm(gradients, self.max_grad_norm, grad_norm)

    def _step(self, optimizer: LightningOptimizer, counts: bool) -> None:
        """Step if updates are open: decided on the device by fused and capturable optimisers, elsewhere by the host.

        One update is one of Lightning's global steps, whatever the number of optimisers: only the first that steps
        `counts`.
        """
        is_open, raw = self.diagnostics.open, optimizer.optimizer
        on_host = is_open.device.type == "cpu"
        step: Callable[[], Any] = functools.partial(self.engine.step, self, optimizer, counts)
        if not on_host and raw.defaults.get("fused"):
            raw.found_inf, raw.grad_scale = (~is_open).float(), None  # type: ignore[attr-defined]
            step()
        elif not on_host and raw.defaults.get("capturable") and raw.state:
            step_where(is_open, raw, step)
        elif is_open:
            step()


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
