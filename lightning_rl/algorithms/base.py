"""The base class of the algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, ClassVar, Self, cast

import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl import fast
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO
from lightning_rl.checkpointing.failed_update import skip_or_raise
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format, read_checkpoint
from lightning_rl.checkpointing.interruption import InterruptionGuard
from lightning_rl.checkpointing.resuming import adopt_settings, changes, check_fits, check_resumable
from lightning_rl.checkpointing.run_state import restore_own_replays, restore_rank, run_state
from lightning_rl.checkpointing.warm_start import WarmStart, warm_start
from lightning_rl.data.bottleneck import BottleneckHint
from lightning_rl.distributed import world_size
from lightning_rl.environments.seeding import MINIBATCHES, derive_seed
from lightning_rl.files import check_intact, read_data
from lightning_rl.nested import Nested, space_leaves
from lightning_rl.options import (
    changed,
    default_groups,
    defaults_of,
    flat,
    nested,
    options_named,
    refuse_unknown_options,
)
from lightning_rl.policies.acting import act
from lightning_rl.policies.actor_critic import ActorCritic, check_modes_agree
from lightning_rl.policies.config import POLICY_OPTIONS, PolicyConfig, PolicyOptions
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import on_rows
from lightning_rl.rollouts.batch import Batch, set_global_weights
from lightning_rl.rollouts.episode import Episode
from lightning_rl.rollouts.replay import Replay
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict, differing, space_from_dict, space_to_dict
from lightning_rl.training.advantages import AdvantageEstimator, explained_variance
from lightning_rl.training.checks import (
    check_options,
    check_strategy,
    plain_options,
    refuse_automatic_optimization,
    refuse_tuners,
)
from lightning_rl.training.clock import RATES, RunClock, ScheduledOptions, is_bounded, planned_env_steps
from lightning_rl.training.compilation import compile_policy_alone
from lightning_rl.training.config import (
    AdvantageConfig,
    AdvantageOptions,
    DebugConfig,
    DebugOptions,
    NormalizationConfig,
    NormalizationOptions,
    OptimizerConfig,
    OptimizerOptions,
)
from lightning_rl.training.gradient_steps import GradientSteps, NotFiniteError
from lightning_rl.training.loss import Loss
from lightning_rl.training.metrics import RolloutMetrics, StepMetric
from lightning_rl.training.normalizers import Normalizers
from lightning_rl.training.observing import HistogramLogger, SaturationCheck, histogram_loggers
from lightning_rl.training.optimizers import (
    SCHEDULER,
    adam,
    check_optimizers,
    make_optimizers,
    optimizer_specs,
    scheduler_spec,
    step_scheduler,
    try_optimizers,
)
from lightning_rl.training.parameter_groups import (
    ActorOrCritic,
    Part,
    WeightPenalty,
    check_critic,
    parameters_of_other_half,
    parameters_of_policy,
)
from lightning_rl.training.reward_normalization import make_reward_normalizer
from lightning_rl.training.schedules import Scheduled
from lightning_rl.training.warning_filters import filter_misleading_warnings
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    constructor_options,
    import_class,
    instantiate,
    loading,
)


def _nearest_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Leave a tensor where it was (None), or put it on the CPU where there is no such device."""
    found, kind = torch.accelerator.current_accelerator(check_available=True), location.partition(":")[0]
    return None if kind == "cpu" or (found is not None and found.type == kind) else storage.cpu()  # type: ignore[no-untyped-call]


class OnPolicyAlgorithm(LightningModule):
    """Base of the algorithms. A subclass says in `update` what it learns from a rollout, and in `loss` by which loss.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimizer: a number or a schedule; see
            `lightning_rl.training.schedules.parse_schedule`.
        gamma: Discount factor.
        policy: Networks, memory and action distributions.
        optimizer: Optimizer, gradient clipping, and how the learning rate changes.
        advantages: How advantages and value targets are computed.
        normalization: Running normalization of observations, rewards and values.
        debug: Checks, histograms and the choice of code paths.
        **unknown: Refused: options that neither this class nor the algorithm has.

    Each group of options is a dataclass. A dict such as `{"max_grad_norm": 1.0}` changes single fields of the
    algorithm's default.

    Attributes:
        options: All options by their full names, such as `optimizer.max_grad_norm`, as plain data.
        policy: Actor and critic; what is the critic's alone is named `critic_…` or `value_…`.
        estimator: Makes advantages and returns.
        normalizers: Of observations, rewards and values.
        steps: Takes the gradient steps.
        clock: Where the run is.
        metrics: What is logged.
        losses: What came of the updates from the last rollout: the mean of every term over this rank's minibatches, by
            the name that it is logged by (`train/<name>`).
        generator: Orders the minibatches; its own, so that nothing else changes them.
        replays: What this rank keeps of earlier rollouts, by name; checkpoints have it.
        not_in_checkpoints: Names of those that they do not have.
        skipped_updates: How many of the last updates in a row were not finite.
        updating: Whether a rollout is being learned from, or an exception has left that undone.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected. Or there is no such
            option; names those that are called nearly so.
    """

    learns_off_policy = False
    """Whether rollouts of earlier versions of the policy are learned from too; their lag is then logged."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Options of the base class that the algorithm does not use, with the reason; setting one is an error."""
    policy: ActorCritic

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        learning_rate: Scheduled = 3e-4,
        gamma: float = 0.99,
        policy: PolicyOptions = PolicyConfig(),
        optimizer: OptimizerOptions = OptimizerConfig(),
        advantages: AdvantageOptions = AdvantageConfig(),
        normalization: NormalizationOptions = NormalizationConfig(),
        debug: DebugOptions = DebugConfig(),
        **unknown: Any,  # noqa: ANN401 - what no class between this one and that of the algorithm has taken
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        refuse_unknown_options(type(self), unknown)
        self.save_hyperparameters()
        groups = default_groups(type(self))
        options = self.options = plain_options(flat(self.hparams, groups))
        self.save_hyperparameters(nested(options))
        self.take_options(
            learning_rate=learning_rate,
            gamma=gamma,
            policy=policy,
            optimizer=optimizer,
            advantages=advantages,
            normalization=normalization,
            debug=debug,
        )
        check_options(options, self.without_effect, flat(defaults_of(type(self)), groups))
        self.observation_space = space_from_dict(options["observation_space"])
        self.action_space = space_from_dict(options["action_space"])
        self.gamma = gamma
        self.fast_paths = options["debug.fast_paths"]
        self.max_skipped_updates = options["debug.max_skipped_updates"]
        self.clock, self.metrics, self.schedules = RunClock(), RolloutMetrics(), ScheduledOptions()
        self.generator = torch.Generator()
        self.losses: dict[str, float] = {}
        self.replays: dict[str, Replay] = {}
        self.not_in_checkpoints: set[str] = set()
        self.skipped_updates, self.updating = 0, False
        self._restored_ranks: list[dict[str, Any]] = []
        self._restored_plan: int | None = None
        self.learning_rate = self.critic_learning_rate = self.scheduled("learning_rate", learning_rate, above=0)
        rates = RATES[: len(self._optimizer_specs())]
        if len(rates) > 1:
            option = "optimizer.critic.learning_rate"
            option = "learning_rate" if options[option] is None else option
            self.critic_learning_rate = self.scheduled("critic_learning_rate", options[option], above=0, option=option)
        if options["optimizer.anneal"]:
            for name in rates:
                self.schedules.anneal(name, getattr(self, name))
        with options_named(POLICY_OPTIONS):
            self.policy = self.make_policy()
        # Acting may happen in another process, which has the policy alone.
        self.policy.fast_paths = self.fast_paths != "none"
        check_optimizers(self.policy, self._optimizer_specs(), options["optimizer.groups"])
        self.try_optimizers(on_any_device=True)
        self.weight_penalty = WeightPenalty(
            *(options[f"optimizer.l2.{part}"] for part in ("policy", "value", "shared"))
        )
        self.weight_penalty.check_policy(self.policy)
        if options["optimizer.critic_warmup_steps"]:
            check_critic(self.policy, "optimizer.critic_warmup_steps", options["optimizer.critic_warmup_steps"])
        self.reward_normalizer = make_reward_normalizer(
            options["normalization.rewards"], gamma, options["normalization.reward_clip"]
        )
        self.normalizers = Normalizers(self.policy, self.reward_normalizer, options["normalization.update"])
        advantage_options = {x.name: options[f"advantages.{x.name}"] for x in fields(AdvantageConfig)}
        self.estimator = self.make_estimator(gamma=gamma, **advantage_options)
        self.steps = GradientSteps(self, options)

    # ------------------------------------------------------------------ what an algorithm defines

    def update(self, rollout: Rollout) -> None:
        """Learn from one rollout: the lines of the algorithm in its paper."""
        raise NotImplementedError(f"{type(self).__name__} has no update(rollout)")

    def loss(self, batch: Any) -> Loss:  # noqa: ANN401 - what the algorithm takes its steps from
        """Return the loss over a minibatch; it needs no Trainer."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch), which compute_loss calls")

    def after_update(self, means: dict[str, float]) -> None:
        """React to how the updates from a rollout went; called once after all of them, if none was left out.

        Args:
            means: Mean of every term over this rank's minibatches, by name.
        """

    def step_weights(self, rollout: Rollout) -> Tensor | None:
        """Return how much each step counts in the losses, `[T, B]`, not negative; None: all the same.

        Override it to weigh steps. Losses and means are then weighted means, in which steps of weight 0 have no part.
        Advantages and returns of the steps before them are made of their rewards and values all the same.
        """
        return None

    def minibatch_order(self, num_items: int) -> Tensor:
        """Return the indices of a batch's rows in the order in which one pass goes through them, shape `[M]`.

        Called once per pass. Override it to choose the order: minibatches are cut from it as it stands, so that it may
        leave rows out or repeat them.

        Args:
            num_items: Number of rows of this rank's batch; with memory, of sequences, which the order is of then.
        """
        return torch.randperm(num_items, generator=self.generator)

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return those that a step leaves as they are, moments of the optimizer included.

        Args:
            part: The half of the network that the step is about; None: both.
        """
        if self.steps.is_warming_up:  # all that actions depend on
            return parameters_of_policy(self.policy)
        return [] if part is None else parameters_of_other_half(self.policy, part)

    def make_policy(self) -> ActorCritic:
        """Return the policy; override it to bring your own network."""
        return ActorCritic(self.observation_space, self.action_space, **self.policy_options())

    def make_estimator(self, **options: Any) -> AdvantageEstimator:  # noqa: ANN401 - those of the estimator
        """Return what makes advantages and returns; override it to bring your own."""
        return AdvantageEstimator(self.policy, self.normalizers, **options)

    def default_optimizer(self) -> ClassSpec:
        """Return the optimizer that `optimizer.name: null` stands for; override it for another default."""
        optimizer = adam(self.device)
        optimizer = fast.default_optimizer(self) or optimizer
        return optimizer

    # ------------------------------------------------------------------ what it calls

    def batch(self, rollout: Rollout, **per_step: Nested) -> Any:  # noqa: ANN401 - what its loss takes
        """Return a rollout's steps with `advantages`, and `returns` for the values to learn, as one batch.

        With `normalization.update: before` the normalizers take the rollout in.

        Args:
            rollout: What to learn from.
            **per_step: More tensors `[T, B, ...]` that the batch is to have.
        """
        self.normalizers.begin(rollout)
        weights = self.checked_weights(rollout)
        batch = self.estimator.batch(rollout, weights, **per_step)
        values, returns = batch.counted(batch.values), batch.counted(batch.returns)
        self.normalizers.value_targets = returns
        self.steps.observe(explained_variance=explained_variance(values, returns))
        return batch

    def minibatches(self, batch: Batch, num_epochs: int | None = None, num_minibatches: int = 1) -> Iterator[Batch]:
        """Yield the minibatches of several passes over a batch, until no further step will be taken.

        Each pass goes through the rows in the order of `minibatch_order`.

        Args:
            batch: Rows of a rollout.
            num_epochs: Passes; None: one.
            num_minibatches: Parts of each pass.
        """
        for epoch, is_last in self.steps.epochs(num_epochs or 1):
            if epoch and self.estimator.recompute_advantages:
                batch = self.estimator.renewed(batch)
            batch = self.estimator.normalized_over_rollout(batch)
            for minibatch in self.one_pass(batch, num_minibatches):
                yield minibatch
                if self.steps.stopped:
                    return
            if epoch == 0 or is_last:
                name = "first_epoch" if epoch == 0 else "last_epoch"
                self.on_pass_end(batch, "update" if num_epochs is None else name)

    def one_pass(self, batch: Batch, num_minibatches: int) -> Iterator[Batch]:
        """Yield the minibatches of one pass over a batch.

        With several ranks, the k-th minibatches of all ranks are one: each rank's `weight` divides by the rows of all.
        One in which none has a row that counts, as there may be of few rows, is left out.
        """
        order = self.minibatch_order(batch.num_items)
        may_lack_rows = batch.sequences is not None or len(order) < num_minibatches
        cut = self.estimator.minibatches(batch, order, num_minibatches, self.steps.engine.compiles_loss)
        # Several ranks agree on the weights of all at once; one alone need not have them all in memory.
        for parts in [list(cut)] if world_size() > 1 else ([part] for part in cut):
            set_global_weights(parts)
            # Without any row a step of Adam would go on along the moments that earlier ones have left.
            yield from (part for part in parts if part.weight) if may_lack_rows else parts

    def descend(self, loss: Callable[[Any], Loss], batch: Any) -> None:  # noqa: ANN401 - what the loss takes
        """Take one gradient step on a loss over a minibatch, unless updates were stopped or it is not finite."""
        self.steps.take(loss, batch)

    def new_loss(self, batch: Batch) -> Loss:
        """Return a loss without terms but the penalties on weights that the options ask for."""
        loss = Loss(batch, self.normalizers.of_values, self.steps.part)
        if (penalty := self.weight_penalty(self.policy)) is not None:
            loss.add_penalty("l2_penalty", penalty)
        return loss

    def actor_critic(self, batch: Batch, policy: nn.Module | None = None) -> tuple[Distribution, Tensor]:
        """Return action distribution and value of every row of a batch, with what the policy remembers there.

        Args:
            batch: Rows of a rollout.
            policy: Another policy of the same kind, such as an earlier copy; None: `self.policy`.
        """
        return on_rows(self.policy if policy is None else policy, batch)

    def on_pass_end(self, batch: Batch, name: str) -> None:
        """Show a pass over a batch to those callbacks that log histograms.

        Args:
            batch: What was learned from.
            name: Of the pass.
        """
        if self.options["debug.histograms"]:
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            for callback in callbacks:
                if isinstance(callback, HistogramLogger):
                    callback.on_pass_end(self, batch, name)

    def scheduled(
        self,
        name: str,
        value: Scheduled,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        owner: object = None,
        option: str | None = None,
    ) -> float:
        """Return what an option begins with, for `__init__` to keep as the attribute `name`: a number from then on.

        Where `value` is a schedule, that attribute is set before each update, and it is logged.

        Args:
            name: Of the option.
            value: A number or a schedule.
            above: What it must be larger than.
            at_least: What it must not be smaller than.
            at_most: What it must not be larger than.
            owner: Object that has the attribute; None: the algorithm.
            option: Full name of the option, for errors; None: `name`.

        Raises:
            ConfigurationError: It is neither a number within the bounds nor a schedule.
        """
        return self.schedules.add(name, value, above, at_least, at_most, owner, option)

    def scheduled_or_none(
        self, name: str, value: Scheduled | None, *, above: float | None = None, option: str | None = None
    ) -> float | None:
        """Return the same as `scheduled` of an option that may also be None."""
        return None if value is None else self.scheduled(name, value, above=above, option=option)

    def take_options(self, **given: Any) -> None:  # noqa: ANN401 - parameters of a constructor
        """Put the values that arrived at a constructor into `options`.

        A subclass may hand on other values than it was given: the values that arrive have effect.

        Args:
            **given: By parameter of the constructor.
        """
        self.options |= plain_options(flat(given, default_groups(type(self))))

    def policy_options(self) -> dict[str, Any]:
        """Return the arguments of `ActorCritic` that the options give."""
        return {name: self.options[option] for name, option in POLICY_OPTIONS.items()}

    def init_from(self, path: str | Path, parts: Sequence[Part] | None = None) -> WarmStart:
        """Take over parameters from a checkpoint of any algorithm, to begin a new run with; say what fits and what not.

        Unlike `ckpt_path` this does not go on with optimiser and clock, and network and spaces may differ.

        Args:
            path: The checkpoint.
            parts: Some of `policy` (with an encoder that actor and critic share), `critic` and `normalizers`; None
                takes all of them, as far as they are there.

        Returns:
            What became of each tensor of these parts.

        Raises:
            ConfigurationError: It is no checkpoint of this package, or nothing of a part that was asked for fits.
        """
        checkpoint = read_checkpoint(path, "init_from")
        result = warm_start(self, checkpoint, parts, str(path))
        rank_zero_info(f"Beginning with parameters from {path}:\n  {result}")
        return result

    # ------------------------------------------------------------------ learning from a rollout

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks that were learned from: the clock of the run."""
        return self.clock.env_steps

    @env_steps.setter
    def env_steps(self, env_steps: int) -> None:
        self.clock.env_steps = env_steps

    @property
    def policy_version(self) -> int:
        """Number of rollouts that were learned from."""
        return self.clock.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self.clock.policy_version = policy_version

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, dict[str, float]]:
        """Learn from one rollout, and return `{"losses": …}`, for `on_train_batch_end` of callbacks.

        Raises:
            RuntimeError: The rollout was not collected with the current parameters, and older ones are not learned
                from; or values are normalized, and no loss is about values.
            FloatingPointError: A loss term or gradient was not finite; no parameter was touched by it.
        """
        lag, start = self.clock.lag(rollout, self.learns_off_policy), time.perf_counter()
        self.updating = True
        scheduled = self.schedules.apply(self, self.clock, [x.optimizer for x in self.steps.all_optimizers])
        rates = {name: x.param_groups[0]["lr"] for name, x in zip(RATES, self.steps.optimizers, strict=False)}
        self.steps.begin()
        if self.learns_off_policy:
            self.steps.observe(policy_lag=torch.tensor(float(lag), device=self.device))
        for replay in self.replays.values():
            replay.begin()
        profiled = self.trainer.profiler.profile("update")  # type: ignore[attr-defined]
        with suppress(NotFiniteError), profiled:
            self.update(rollout)
        means = self.losses = self.steps.means()
        if not_finite := self.steps.not_finite(means):
            try:
                skip_or_raise(self, rollout, not_finite)
            finally:
                self._undo()
            self.normalizers.forget_returns()
        else:
            self._commit(rollout, means)
        if self.max_skipped_updates:
            means = means | {"skipped_updates": float(bool(not_finite))}
        means = means | rates | {name: value for name, value in scheduled.items() if name not in RATES}
        made = self.lr_schedulers() or []
        for scheduler in made if isinstance(made, list) else [made]:
            step_scheduler(scheduler, scheduler_spec(self.options))
        self.clock.policy_version += 1
        if (publish := getattr(self.trainer.datamodule, "publish_policy", None)) is not None:  # type: ignore[attr-defined]
            publish()  # to asynchronous actors
        self.clock.advance(rollout, self.device)
        self.metrics.take_in(self, rollout, means, time.perf_counter() - start)
        self.updating = False
        return {"losses": self.losses}

    @torch.no_grad()
    def compute_loss(self, rollout: Rollout | Batch) -> dict[str, float]:
        """Return the loss over a rollout or batch, and what it is made of, without learning from it.

        Nothing changes: neither parameters nor their gradients, normalizers, clock, generators or what is logged. It
        needs no Trainer; with several ranks it is a collective call about the rows of all of them. With
        `normalization.update: before` a rollout is seen through normalizers that know it, as it would be in learning.

        Args:
            rollout: A rollout, or what `batch` made of one, all of it or a part.

        Returns:
            By the name that each is logged by (`train/<name>`): `loss`, `policy_loss`, `value_loss`, `entropy`, ….

        Raises:
            NotImplementedError: The algorithm has no `loss(batch)`.
        """
        with self.normalizers.isolated(), self.steps.isolated():
            self.record_loss(rollout)
            return self.steps.means()

    def record_loss(self, rollout: Rollout | Batch) -> None:
        """Record the loss that `compute_loss` returns; override it where that is not `loss` of `batch`."""
        batch = self.batch(rollout) if isinstance(rollout, Rollout) else rollout.replace()
        batch = self.estimator.normalized_over_rollout(batch)
        set_global_weights([batch])
        self.steps.record_loss(self.loss(batch))

    def _commit(self, rollout: Rollout, means: dict[str, float]) -> None:
        """Make what the updates from a rollout have left for good."""
        if self.normalizers.of_values is not None and not self.steps.has_value:
            raise RuntimeError("normalization.values needs a loss of values: call loss.add_value")
        self.skipped_updates = 0
        self.steps.adapt_learning_rate(means)
        self.after_update(means)
        self.normalizers.commit(rollout)
        for replay in self.replays.values():
            replay.commit()

    def _undo(self) -> None:
        """Make replays and normalizers what they were before updates that were not made to their end."""
        for replay in self.replays.values():
            replay.rollback()
        self.normalizers.rollback()

    def checked_weights(self, rollout: Rollout) -> Tensor | None:
        """Return what `step_weights` says.

        Raises:
            ConfigurationError: That has another shape than the rollout, so that it would weigh something else.
        """
        weights = self.step_weights(rollout)
        if weights is not None:
            found, expected = tuple(weights.shape), rollout.shape
            check(found == expected, "step_weights: shape", found, f"{expected}, steps and environments of the rollout")
        return weights

    # ------------------------------------------------------------------ acting

    def forward(self, observations: Nested, deterministic: bool = True, memory: Nested | None = None) -> Nested:
        """Return actions `[B, ...]` for observations `[B, ...]`: the mode of the policy, or a sample from it.

        In the units of the action space; `lightning_rl.policies.distributions.to_environment` clips, shifts and shapes
        them for an environment.

        Args:
            observations: `[B, *shape]`, nested as the space is.
            deterministic: Take the mode.
            memory: Of a policy that has one: `self.policy.initial_memory(B)` where episodes begin, then the one that
                came with the last actions. A pair is returned: actions, and the memory for the next step.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        if memory is None:
            return self.policy.act(observations, deterministic=deterministic).environment_action
        output = self.policy.act(observations, deterministic=deterministic, memory=memory)
        return output.environment_action, output.memory

    def act(
        self,
        observation: Nested,
        deterministic: bool = True,
        memory: Nested | None = None,
        episode_starts: Any = None,  # noqa: ANN401 - flags, of one environment or several
    ) -> Nested:
        """Return what an environment takes for what it gives, one or several at once: arrays or numbers, no tensors.

        Args:
            observation: `[*shape]` of one environment or `[B, *shape]` of several, nested as the space is, with masks
                where these are in it; what only the critic sees may be missing.
            deterministic: Take the mode of the policy rather than a sample from it.
            memory: Of a policy that has one: what came with the last action, None where episodes begin. A pair is
                returned: action, and the memory for the next step.
            episode_starts: Where an episode has started since the last call, `[B]`: `terminated | truncated` of a
                vectorized environment that resets by itself. The memory is forgotten there.

        Raises:
            ConfigurationError: A part of the observation is missing or of another shape, or there is a memory too many.
        """
        return act(
            self.policy,
            self.observation_space,
            self.action_space,
            observation,
            deterministic=deterministic,
            memory=memory,
            episode_starts=episode_starts,
        )

    # ------------------------------------------------------------------ what Lightning calls

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Make the optimizer, that of the critic if it has its own, and, if there are, their schedulers."""
        rates = [self.schedules.first(name, getattr(self, name)) for name in RATES]
        self.try_optimizers(on_any_device=False)
        optimizers = make_optimizers(self.policy, self._optimizer_specs(), self.options["optimizer.groups"], rates)
        if (scheduler := scheduler_spec(self.options)) is None:
            return optimizers if len(optimizers) > 1 else optimizers[0]
        return optimizers, [instantiate(SCHEDULER, scheduler, LRScheduler, optimizer) for optimizer in optimizers]

    def try_optimizers(self, on_any_device: bool) -> None:
        """Take steps with optimizers and schedulers of the kinds that the options ask for, if any.

        Args:
            on_any_device: Try the optimizers that are known to run on every device, or the others.

        Raises:
            ConfigurationError: One refuses an argument or cannot take a step.
        """
        names = ("name", "options", "critic.name", "critic.options", "groups", "scheduler.name")
        if any(self.options[f"optimizer.{name}"] for name in names):
            groups, scheduler = self.options["optimizer.groups"], scheduler_spec(self.options)
            try_optimizers(self.policy, self._optimizer_specs(), groups, scheduler, on_any_device)

    def _optimizer_specs(self) -> dict[str, ClassSpec]:
        """Return class and arguments of each optimizer, by the group of options that they come from."""
        return optimizer_specs(self.options, self.default_optimizer())

    def configure_callbacks(self) -> list[Callback]:
        """Guard every Trainer against interruptions, and keep `step` current; what overrides it adds to these.

        Raises:
            ConfigurationError: Lightning's Tuner, or a callback of it, was to choose learning rate or batch size, or a
                Trainer that trains was to clip or add up gradients.
        """
        filter_misleading_warnings()
        # Before anything else: Lightning's own checks say something else.
        refuse_tuners(self.trainer)
        if self.trainer.state.fn == "fit":
            refuse_automatic_optimization(self.trainer)
        present: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        clips_actions = any(isinstance(leaf, spaces.Box) for leaf in space_leaves(self.action_space).values())
        wanted: list[type[Callback]] = [BottleneckHint, *([SaturationCheck] if clips_actions else [])]
        # The guard may save in its hook, with `step` in the name.
        wanted += [StepMetric, InterruptionGuard]
        wanted += [HistogramLogger] if self.options["debug.histograms"] else []
        return [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in present)]

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Refuse what cannot work before anything is collected; the command line asks before anything is written.

        Args:
            trainer: Will run it.
            rollout_shape: `(T, B)` of the rollouts of one rank, None where that is not known.

        Raises:
            ConfigurationError: A setting does not go with that.
        """
        has_update = type(self).update is not OnPolicyAlgorithm.update
        check(has_update, "model", type(self).__name__, "an algorithm, a class that has an update")
        refuse_tuners(trainer)
        # float16 needs loss scaling, which hides gradient norms. XLA would cast what learns, not the copy that acts.
        on_xla = "xla" in (self.device.type, trainer.strategy.root_device.type)
        precisions = ("32-true",) if on_xla else ("32-true", "bf16-mixed", "bf16-true", "64-true")
        check(trainer.precision in precisions, "precision", trainer.precision, "one of " + ", ".join(precisions))
        problem = None
        problem = fast.compiler_problem(trainer.strategy.root_device)
        possible = self.fast_paths != "compiled" or problem is None
        check(possible, "debug.fast_paths", self.fast_paths, f"auto, since {problem}")
        check_modes_agree(self.policy)
        if (memory := getattr(self.policy, "memory", None)) is not None:
            expected = "None on XLA, which would compile for every way in which episodes can end in a rollout"
            check(not on_xla, "policy.memory", self.options["policy.memory"], expected)
            if rollout_shape is not None:
                memory.num_sequences(rollout_shape)
        self.schedules.check_end(self, is_bounded(trainer), "a run with an end: set max_env_steps or max_epochs")
        shown = not self.options["debug.histograms"] or bool(histogram_loggers(trainer.loggers))
        check(shown, "debug.histograms", True, "false, or a TensorBoardLogger to show them")

    def setup(self, stage: str) -> None:
        """Refuse a strategy that cannot work before it wraps the module, and environments of other spaces."""
        # What is left of updates that an exception has ended: nobody goes on with them.
        self._undo()
        self.updating = False
        check_strategy(self.trainer.strategy)
        compile_policy_alone(self, self.policy)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        for name in ("observation_space", "action_space"):
            if (space := getattr(data, name, None)) is not None and space_to_dict(space) != self.options[name]:
                found, expected = differing(space, getattr(self, name))
                env_id = getattr(getattr(data, "spec", None), "env_id", "the environments")
                raise ConfigurationError(
                    f"{name}={found} of {env_id} does not fit: expected {expected}, the space that "
                    f"{type(self).__name__} was made for"
                )

    def on_fit_start(self) -> None:
        """Refuse what cannot work; note where the clock of a new run begins."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not self._restored_ranks and self.trainer.fit_loop.total_batch_idx < 0:
            self.clock.env_steps_before_epochs = self.env_steps
        self.check_run(self.trainer, getattr(data, "rollout_shape", None))
        self.check_actors(getattr(data, "num_actors", 0))

    def check_actors(self, num_actors: int) -> None:
        """Refuse rollouts of earlier policies where they would be taken for rollouts of this one.

        Args:
            num_actors: Asynchronous actors on each rank.

        Raises:
            ConfigurationError: There are some, and the algorithm does not correct for their lag.
        """
        expected = f"0: {type(self).__name__} learns from rollouts of the current policy alone"
        check(not num_actors or self.learns_off_policy, "actors.count", num_actors, expected)

    def on_train_start(self) -> None:
        """Go on from where this rank was, if it was; find out how long the run is."""
        self._restore_this_rank()
        for optimizer in self.steps.all_optimizers:
            for group in optimizer.param_groups:  # a checkpoint brings those of the device that it was made on
                group |= {name: optimizer.defaults[name] for name in ("fused", "capturable") if name in group}
        self.clock.planned_env_steps = planned_env_steps(self.trainer)
        self.schedules.report_new_end(self.env_steps, self.clock.planned_env_steps, self._restored_plan)
        self._restored_plan = None
        is_known = self.clock.planned_env_steps is not None
        self.schedules.check_end(self, is_known, "a run whose length is known: set max_env_steps")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401 - whatever a loader yields
        """Refuse a batch that is no rollout.

        Raises:
            ConfigurationError: It is something else.
        """
        if not isinstance(batch, Rollout):
            raise ConfigurationError(
                f"the train loader yields {type(batch).__name__}: expected rollouts, as RolloutDataModule makes them"
            )

    def on_train_epoch_end(self) -> None:
        """Let callbacks see what has not been logged yet."""
        self.metrics.show_unlogged(self.trainer)

    def on_train_end(self) -> None:
        """Log what is left.

        What a signal or an exception ends does not come here: it has not ended for the run that goes on from it.
        """
        self.metrics.log_rest(self)

    def log(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of Lightning
        """Log a value as `LightningModule.log` does, against environment steps."""
        super().log(*args, **kwargs)
        if self.trainer.training:
            self.metrics.logged(self, bool(kwargs.get("on_epoch")))

    def validation_step(self, episodes: list[Episode], batch_idx: int) -> None:
        """Take in played episodes."""
        self.metrics.eval_episodes.update([e.episode_return for e in episodes], [e.length for e in episodes])

    def test_step(self, episodes: list[Episode], batch_idx: int) -> None:
        """Take in played episodes."""
        self.validation_step(episodes, batch_idx)

    def predict_step(self, episodes: list[Episode], batch_idx: int) -> list[Episode]:
        """Return the played episodes with observations, actions and rewards."""
        return episodes

    def on_validation_epoch_end(self) -> None:
        """Log returns and lengths."""
        self.metrics.log_evaluation(self, "val")
        if self.trainer.state.fn == "fit":
            self.metrics.show_unlogged(self.trainer)

    def on_test_epoch_end(self) -> None:
        """Log returns and lengths."""
        self.metrics.log_evaluation(self, "test")

    # ------------------------------------------------------------------ checkpoints

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,  # noqa: ANN401 - as torch.load has it
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **kwargs: Any,  # noqa: ANN401 - options of the algorithm
    ) -> Self:
        """Return the algorithm in a checkpoint, as Lightning does, but construct no class that is not trusted.

        A class that the checkpoint names is constructed only if it is a subclass of what its field expects, and no
        module but those of `lightning_rl`, `torch`, `gymnasium`, of packages in `trust` and already imported ones is
        imported.

        Args:
            checkpoint_path: A file, a URL or an open file.
            map_location: Where tensors are put; None: where they were, or the CPU if there is no such device.
            hparams_file: None, since the checkpoint has all options.
            strict: Whether names of parameters must match; None: as `strict_loading`.
            weights_only: False unpickles the checkpoint, which executes what it says.
            trust: Packages whose modules may be imported: `["my_package"]`.
            **kwargs: Options to change; a dict changes single fields of a stored group.

        Raises:
            ConfigurationError: The file is damaged; a class in the checkpoint is not trusted, cannot be imported or
                is another one than its field expects; or it is no checkpoint of this package in its format.
        """
        check_intact(checkpoint_path, "checkpoint_path", "an intact checkpoint")
        check(hparams_file is None, "hparams_file", hparams_file, "None; the checkpoint has all options")
        checkpoint = read_data(checkpoint_path, map_location or _nearest_device, weights_only)
        check_format(checkpoint)
        stored = checkpoint["hyper_parameters"]
        with loading(trust):
            algorithm = import_class("_class_path", stored["_class_path"], cls) if "_class_path" in stored else cls
            groups = default_groups(algorithm)
            changes = {
                name: changed(name, changed(name, groups[name], stored[name]), value) if name in groups else value
                for name, value in kwargs.items()
            }
            module = algorithm(**constructor_options(algorithm, stored) | changes)
            module.configure_model()
        module.on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        module.load_state_dict(state, strict=module.strict_loading if strict is None else strict)
        return cast(Self, module.to(next((x.device for x in state.values()), torch.device("cpu"))))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the clock and what each rank has of its own."""
        state = checkpoint[CHECKPOINT_KEY] = run_state(self)
        if self._restored_ranks:  # training has not begun, nor taken them over
            state |= {"ranks": self._restored_ranks, "planned_env_steps": self._restored_plan}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them back.

        Raises:
            ConfigurationError: The file is damaged; the checkpoint was made for other spaces or another network, or in
                another format; or training cannot go on from it: see `check_resumable`.
        """
        if self._trainer is not None and not isinstance(self._trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            check_intact(self._trainer.ckpt_path, "ckpt_path", "an intact checkpoint")
        check_format(checkpoint)
        resumes = self._trainer is not None and self._trainer.state.fn == "fit"
        if resumes:
            check_resumable(checkpoint, self)
        check_fits(checkpoint, self)
        if self._trainer is not None and self._trainer.precision == "64-true":
            # Lightning would do so after it has loaded the parameters, and so round them to float32.
            self.double()
        state = checkpoint[CHECKPOINT_KEY]
        clock = self.clock
        clock.env_steps, clock.policy_version = state["env_steps"], state["policy_version"]
        clock.frames = state["frames"]
        if resumes:
            for sentence in changes(checkpoint, self):
                rank_zero_info(sentence)
            adopt_settings(checkpoint, self)
            self.skipped_updates = state["skipped_updates"]
            clock.env_steps_before_epochs = state["env_steps_before_epochs"]
            self._restored_ranks, self._restored_plan = state["ranks"], state["planned_env_steps"]

    def _restore_this_rank(self) -> None:
        """Seed or restore the random generators; take over what the rank kept and has not logged."""
        if self.global_rank < len(self._restored_ranks):
            restore_rank(self, self._restored_ranks[self.global_rank])
        else:
            path = (MINIBATCHES, self.global_rank, self.policy_version)
            self.generator.manual_seed(derive_seed(torch.initial_seed(), *path))
        restore_own_replays(self, self._restored_ranks)
        if len(self._restored_ranks) == self.trainer.world_size:
            self.metrics.restore(self._restored_ranks[self.global_rank]["window"])
        else:  # ranks that were not there could not add up what they have not seen
            self.metrics.begin(self.env_steps)
        self._restored_ranks = []

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch cannot send a generator to a process that it spawns, nor a tensor that nothing else refers to.
        return super().__getstate__() | {"generator": self.generator.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))
        super().__setstate__(state | {"generator": generator})  # type: ignore[no-untyped-call]
