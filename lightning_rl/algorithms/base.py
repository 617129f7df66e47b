"""The base class of the algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, ClassVar, Never, Self, get_args

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_rl import fast
from lightning_rl.checkpointing.failed_update import skip_or_raise
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint, restore_this_rank, run_state
from lightning_rl.checkpointing.interruption import InterruptionGuard
from lightning_rl.checkpointing.loading import WarmStart, from_checkpoint, warm_start
from lightning_rl.checkpointing.resuming import take_over
from lightning_rl.distributed import all_reduce, average, exact_dtype, world_size
from lightning_rl.nested import Nested, leaves
from lightning_rl.options import (
    OrDict,
    constructor_arguments,
    default_groups,
    defaults_of,
    flat,
    nested,
    refuse_unknown_options,
    types_of,
)
from lightning_rl.policies.actor_critic import POLICY_OPTIONS, ActorCritic, PolicyConfig, copy_to_cpu
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.interface import act
from lightning_rl.policies.sharding import copy_whole, leave_optimizers_to_module, shard
from lightning_rl.policies.values import on_rows
from lightning_rl.rollouts.batch import Batch, set_global_weights
from lightning_rl.rollouts.replay import Replay
from lightning_rl.rollouts.rollout import Episode, Rollout
from lightning_rl.spaces import SpaceOrDict, space_from_dict
from lightning_rl.training import checks
from lightning_rl.training.advantages import AdvantageEstimator, explained_variance
from lightning_rl.training.clock import RATES, RunClock, ScheduledOptions, is_bounded
from lightning_rl.training.config import AdvantageConfig, DebugConfig, NormalizationConfig, OptimizerConfig
from lightning_rl.training.gradient_steps import GradientSteps, NotFiniteError
from lightning_rl.training.loss import Loss
from lightning_rl.training.metrics import RolloutMetrics, StepMetric, action_saturation, log_histograms
from lightning_rl.training.minibatches import Reduction
from lightning_rl.training.normalizers import Normalizers, make_reward_normalizer, reward_normalizers
from lightning_rl.training.optimizers import adam, has_own_critic_optimizer, make_optimizers, optimizer_parts
from lightning_rl.training.parameter_groups import (
    ActorOrCritic,
    Part,
    check_critic,
    check_penalized,
    parameters_of_other_half,
    parameters_of_policy,
    weight_penalty,
)
from lightning_rl.training.schedules import Scheduled
from lightning_rl.training.warning_filters import filter_misleading_warnings
from lightning_rl.validation import ClassSpec, ConfigurationError, check, class_only, is_one_of


def _update_acting_policy(model: Any) -> None:
    """Copy the sharded parameters of an algorithm's policy to the whole policy that acts."""
    for policy in model.acting_copies:
        copy_whole(model.policy, policy)


class OnPolicyAlgorithm(LightningModule):
    """An algorithm that learns from rollouts; its subclasses define `update(rollout)` and `loss(batch)`.

    Each group of options, such as `optimizer`, is a dataclass. A dict such as `{"max_grad_norm": 1.0}` changes single
    options of the algorithm's default. An unknown option or value out of range raises a `ConfigurationError`.

    Args:
        observation_space: Observation space of one environment, or its description by `space_to_dict`.
        action_space: Action space of one environment, or its description.
        learning_rate: Step size of the optimizer: a number, or a schedule as in
            `lightning_rl.training.schedules.parse_schedule`.
        gamma: Discount factor.
        policy: Networks, memory and action distributions.
        optimizer: Optimizer, gradient clipping, and how the learning rate changes.
        advantages: How advantages and value targets are computed.
        normalization: Running normalization of observations, rewards and values.
        debug: Checks, histograms and the choice of code paths.
        **unknown: Unknown options raise an error that suggests similar names.

    Attributes:
        options: All options as plain data, by full names such as `optimizer.max_grad_norm`.
        policy: Actor and critic. Names of the critic's own parameters begin with `critic_` or `value_`.
        estimator: Computes advantages and returns.
        normalizers: Running statistics of observations, rewards and values.
        steps: Takes and records gradient steps.
        clock: Environment steps, frames and policy version.
        metrics: Logged values.
        losses: Mean of every recorded term over this rank's minibatches of the last rollout; `train/<name>` in the log.
        generator: Random generator of the minibatch order and of draws from replays.
        replays: Earlier rollouts that this rank keeps, by name; part of checkpoints.
        not_in_checkpoints: Names of replays that checkpoints leave out.
        skipped_updates: Number of consecutive rollouts whose updates were skipped.
        updating: Whether a rollout is being learned from. Stays true after an exception.
        restored: States of all ranks and planned end of the run in a loaded checkpoint, until training starts.
    """

    learns_off_policy = False
    """Whether rollouts of earlier policy versions are accepted; their lag is then logged."""
    learns_from_recorded_steps = False
    """Whether the data are `RecordedEpisodes`, which have no log-probabilities and values."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Options of the base class that the algorithm does not use, with the reason; setting one is an error."""
    policy: ActorCritic

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        learning_rate: Scheduled = 3e-4,
        gamma: float = 0.99,
        policy: OrDict[PolicyConfig] = PolicyConfig(),
        optimizer: OrDict[OptimizerConfig] = OptimizerConfig(),
        advantages: OrDict[AdvantageConfig] = AdvantageConfig(),
        normalization: OrDict[NormalizationConfig] = NormalizationConfig(),
        debug: OrDict[DebugConfig] = DebugConfig(),
        **unknown: Never,  # options that no subclass takes
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        refuse_unknown_options(type(self), unknown)
        self.save_hyperparameters()
        groups = default_groups(type(self))
        given, options = (checks.plain_options(flat(x, groups)) for x in constructor_arguments(self))
        self.options = options
        self._given = nested(given)
        self.save_hyperparameters(self._given)
        shipped = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("lightning_rl."))
        types, defaults = types_of(shipped, include_extras=True), flat(defaults_of(type(self)), groups)
        checks.check_options(options, types, self.without_effect, defaults)
        self.observation_space = space_from_dict(options["observation_space"])
        self.action_space = space_from_dict(options["action_space"])
        self.max_skipped_updates = options["debug.max_skipped_updates"]
        self.clock, self.metrics, self.schedules = RunClock(), RolloutMetrics(), ScheduledOptions()
        self.generator = torch.Generator()
        self.losses: dict[str, float] = {}
        self.replays: dict[str, Replay] = {}
        self.not_in_checkpoints: set[str] = set()
        self.skipped_updates, self.updating = 0, False
        self.acting_copies: list[nn.Module] = []  # in a list, which hides it from checkpoints
        self.hooks_run: set[str] = set()  # a subclass may override them without super()
        self.restored: dict[str, Any] = {}
        self._set_learning_rates(learning_rate)
        self.policy = self.make_policy()
        # Acting may happen in another process, which has the policy alone.
        self.policy.fast_paths = options["debug.fast_paths"]
        self._check_policy()
        self.reward_normalizer = make_reward_normalizer(
            options["normalization.rewards"], gamma, options["normalization.reward_clip"]
        )
        self.normalizers = Normalizers(self.policy, self.reward_normalizer, options["normalization.update"])
        advantage_options = {x.name: options[f"advantages.{x.name}"] for x in fields(AdvantageConfig)}
        self.estimator = self.make_estimator(gamma=gamma, **advantage_options)
        self.steps = GradientSteps(self, options)

    # ------------------------------------------------------------------ a subclass defines

    def update(self, rollout: Rollout) -> None:
        """Update the parameters from one rollout, `[T, B, ...]`, as in the pseudocode of the algorithm's paper.

        Most algorithms take gradient steps on minibatches:

            for minibatch in self.minibatches(self.batch(rollout), num_epochs, num_minibatches):
                self.descend(self.loss, minibatch)

        `training_step` sets scheduled options before, and afterwards updates normalizers, clock and log. `descend`
        clips gradients and skips a step that is not finite.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update(rollout)")

    def loss(self, batch: Any) -> Loss:  # whatever `update` passes to `descend`
        """Return the loss over a minibatch, as a sum of named terms with one number per row.

            distribution, values = self.actor_critic(batch)
            loss = self.new_loss(batch)
            loss.add("policy_loss", -distribution.log_prob(batch.actions) * batch.advantages)
            loss.add_value(values, 0.5)
            return loss

        The rows `[N, ...]` have `observations`, `actions`, the acting policy's `log_probs` and `values`, `advantages`,
        `returns`, and the tensors that `update` added in `self.batch(rollout, name=tensor)`. `Loss` takes means over
        the rows of all ranks. The method must not change the model or need a Trainer: `compute_loss` calls it too.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch), which compute_loss calls")

    # ------------------------------------------------------------------ a subclass may override

    def after_update(self, means: dict[str, float]) -> None:
        """Run after the updates from a rollout, if all were finite; `means` has the mean of every recorded term."""

    def step_weights(self, rollout: Rollout) -> Tensor | None:
        """Return the weight of each step in losses and means, `[T, B]`, at least 0; by default `rollout.weights`.

        None weights all steps equally. A step of weight 0 still counts in the advantages and returns of earlier steps.
        """
        return rollout.weights

    def minibatch_order(self, num_items: int) -> Tensor:
        """Return the order of the rows in one pass, as indices `[M]`; with memory, the order of the sequences."""
        if self.device.type != "cuda":
            return torch.randperm(num_items, generator=self.generator)
        # A permutation of a large rollout takes as long on the host as all else that it does for a pass.
        seed = int(torch.randint(2**62, (), generator=self.generator))
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randperm(num_items, generator=generator, device=self.device)

    def make_policy(self) -> ActorCritic:
        """Return the policy; called by the constructor. An override with another class has the annotation `-> Any`."""
        return ActorCritic(self.observation_space, self.action_space, **self.policy_options())

    def make_estimator(self, **options: Any) -> AdvantageEstimator:  # keywords of AdvantageEstimator
        """Return the estimator of advantages and value targets; called by the constructor."""
        return AdvantageEstimator(self.policy, self.normalizers, **options)

    def default_optimizer(self) -> ClassSpec:
        """Return class path and arguments of the optimizer for `optimizer.name: null`."""
        return fast.default_optimizer(self) or adam(self.device)

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return the parameters that stay fixed in steps that train `part` of the policy, or both parts (None)."""
        if self.steps.is_warming_up:
            return parameters_of_policy(self.policy)
        return [] if part is None else parameters_of_other_half(self.policy, part)

    # ------------------------------------------------------------------ a subclass calls

    def batch(self, rollout: Rollout, **per_step: Nested) -> Any:  # an algorithm may return another type
        """Return the steps of a rollout as rows of one batch, with `advantages` and `returns`.

        Adds `per_step` tensors, `[T, B, ...]`, by name. With `normalization.update: before`, updates normalizers first.
        """
        self.normalizers.begin(rollout)
        batch = self.estimator.batch(rollout, self.checked_weights(rollout), **per_step)
        values, returns = batch.counted(batch.values), batch.counted(batch.returns)
        self.normalizers.value_targets = returns
        self.steps.observe(explained_variance=explained_variance(values, returns))
        return batch

    def minibatches(self, batch: Batch, num_epochs: int | None = None, num_minibatches: int = 1) -> Iterator[Batch]:
        """Yield the minibatches of `num_epochs` passes over a batch, by default one; end early once updates stop."""
        if isinstance(batch, Rollout):
            raise TypeError("minibatches got a Rollout: expected self.minibatches(self.batch(rollout), ...)")
        for name in vars(batch).keys() & batch.fields:  # assigned fields would not reach the minibatches
            raise TypeError(f"batch.{name} was assigned: expected batch = batch.replace({name}=...)")
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
        """Yield the minibatches of one pass; the `weight` of a minibatch is 1 / (number of its rows on all ranks)."""
        order = self.minibatch_order(batch.num_items)
        may_lack_rows = batch.sequences is not None or len(order) < num_minibatches
        minibatches = self.estimator.minibatches(batch, order, num_minibatches, self.steps.engine.normalizes_in_loss)
        # Several ranks agree on the weights of all minibatches at once; a single rank makes one minibatch at a time.
        for parts in [list(minibatches)] if world_size() > 1 else ([part] for part in minibatches):
            set_global_weights(parts)
            # Without a row, a step of Adam would still move parameters along its moments.
            yield from (part for part in parts if part.weight) if may_lack_rows else parts

    def descend(self, loss: Callable[[Any], Loss], batch: Any) -> None:  # what the loss takes
        """Take one gradient step on a loss, unless the updates are stopped or loss or gradient are not finite."""
        if isinstance(batch, Rollout):
            raise TypeError("descend got a Rollout: expected rows, self.descend(self.loss, self.batch(rollout))")
        self.steps.take(loss, batch)

    def new_loss(self, batch: Batch) -> Loss:
        """Return a loss over a minibatch to add terms to; it already has the weight penalties of `optimizer.l2`."""
        loss = Loss(batch, self.normalizers.of_values, self.steps.part)
        if self.penalties:
            loss.add_penalty("l2_penalty", weight_penalty(self.policy, self.penalties))
        return loss

    def actor_critic(self, batch: Batch, policy: nn.Module | None = None) -> tuple[Distribution, Tensor]:
        """Return the action distribution and the values `[N]` of a batch's rows, by `self.policy` or another policy."""
        if isinstance(batch, Tensor | dict | tuple):
            raise TypeError("actor_critic got observations: expected the batch, self.actor_critic(batch)")
        return on_rows(self.policy if policy is None else policy, batch)

    def on_pass_end(self, batch: Batch, name: str) -> None:
        """Log `debug.histograms` of a batch under `name`, after the first and the last pass over it."""
        log_histograms(self, batch, name)

    def scheduled(
        self, name: str, value: Scheduled, *, owner: object = None, option: str | None = None, **bounds: float | None
    ) -> float:
        """Return the initial value of an option that may be a schedule, to store it as the attribute `name`.

        A schedule sets this attribute of `owner`, by default the algorithm, before each update, and logs it. `option`
        is the full name of the option in errors, by default `name`. `bounds` are `above`, `at_least` and `at_most`; a
        value that is neither within the bounds nor a schedule raises a `ConfigurationError`.
        """
        if "schedules" not in vars(self):
            message = f"scheduled({name!r}, ...) needs the base class: call super().__init__(...) before it"
            raise ConfigurationError(message)
        return self.schedules.add(name, value, self if owner is None else owner, option, **bounds)

    def policy_options(self) -> dict[str, Any]:
        """Return the keywords of `ActorCritic` after its spaces: the options of the policy and of normalization."""
        return {name: self.options[option] for name, option in POLICY_OPTIONS.items()}

    @property
    def hparams_initial(self) -> AttributeDict:
        """Hyper-parameters for loggers: the options and the name of the algorithm."""
        return AttributeDict({"algorithm": type(self).__name__, **super().hparams_initial})

    # ------------------------------------------------------------------ learning from a rollout

    @property
    def env_steps(self) -> int:
        """Number of environment steps of all ranks that were learned from: the clock of the run."""
        return self.clock.env_steps

    @env_steps.setter
    def env_steps(self, env_steps: int) -> None:
        self.clock.env_steps = env_steps

    @property
    def policy_version(self) -> int:
        """Number of rollouts that were learned from."""
        return self.clock.policy_version

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, dict[str, float]]:
        """Learn from one rollout, and return `{"losses": …}` for the callbacks' `on_train_batch_end`.

        Raises:
            RuntimeError: An earlier policy collected the rollout, and `learns_off_policy` is false; or
                `normalization.values` is set, and no loss called `add_value`.
            FloatingPointError: A loss term or gradient was not finite; it has not changed the parameters.
        """
        lag, start = self.clock.lag(rollout, self.learns_off_policy), time.perf_counter()
        scheduled = self._begin_update(lag, rollout)
        profiled = self.trainer.profiler.profile("update")  # type: ignore[attr-defined]
        with suppress(NotFiniteError), profiled:
            self.update(rollout)
        self.losses = self.steps.record.means()
        not_finite = self.steps.not_finite(self.losses)
        if not_finite:
            self._skip_update(rollout, not_finite)
        else:
            self._commit_update(rollout)
        skipped = {"skipped_updates": float(bool(not_finite))} if self.max_skipped_updates else {}
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()  # type: ignore[call-arg]
        self.clock.policy_version += 1
        _update_acting_policy(self)
        self.clock.advance(rollout, self.device)
        self.metrics.add_rollout(self, rollout, self.losses | skipped | scheduled, time.perf_counter() - start)
        self.updating = False
        # Last: it raises if an actor was killed while it read the weights.
        if (publish := getattr(self.trainer.datamodule, "publish_policy", None)) is not None:  # type: ignore[attr-defined]
            publish()  # to asynchronous actors
        return {"losses": self.losses}

    def _begin_update(self, lag: int, rollout: Rollout) -> dict[str, float]:
        """Set scheduled options, and return the learning rates and scheduled options to log."""
        self.updating = True
        scheduled = self.schedules.apply(self.clock, [x.optimizer for x in self.steps.all_optimizers])
        rates = {name: x.param_groups[0]["lr"] for name, x in zip(RATES, self.steps.optimizers, strict=False)}
        self.steps.begin()
        self.steps.observe(**action_saturation(self.policy, rollout))
        if self.learns_off_policy:
            self.steps.observe(policy_lag=lag)
        for replay in self.replays.values():
            replay.begin()
        coef: Any = getattr(self, "entropy_coef", None)
        constant = {} if coef is None else {"entropy_coef": float(coef)}
        return rates | constant | {name: value for name, value in scheduled.items() if name not in RATES}

    def _commit_update(self, rollout: Rollout) -> None:
        if self.normalizers.of_values is not None and not self.steps.has_value:
            raise RuntimeError("normalization.values needs a value loss: call loss.add_value")
        self.skipped_updates = 0
        self.steps.adapt_learning_rate(self.losses)
        self.after_update(self.losses)
        self.normalizers.commit(rollout)
        for replay in self.replays.values():
            replay.commit()

    def _skip_update(self, rollout: Rollout, not_finite: dict[str, float]) -> None:
        """Skip the rest of the updates from a rollout if `debug.max_skipped_updates` allows it, else raise."""
        try:
            skip_or_raise(self, rollout, not_finite)
        finally:
            self._roll_back()
        for normalizer in reward_normalizers(self).values():
            normalizer.reset_returns()

    def _roll_back(self) -> None:
        for replay in self.replays.values():
            replay.rollback()
        self.normalizers.rollback()

    @torch.no_grad()
    def compute_loss(
        self, rollouts: Rollout | Batch | Sequence[Rollout | Batch], reduction: Reduction = "mean"
    ) -> dict[str, float]:
        """Return the terms of the loss over a rollout, or rows of its `batch`, without learning: `policy_loss`, ….

        Changes no parameter, gradient, normalizer, clock, generator or logged value. Needs no Trainer. A collective
        call over the rows of all ranks. Scheduled options have their value at `env_steps`. With `normalization.update:
        before` the normalizers include the rollout, or within an update the one that is learned from.

        Args:
            rollouts: One or several.
            reduction: Return the `mean` of each term over several rollouts, or the `sum`.
        """
        several = [rollouts] if isinstance(rollouts, Rollout | Batch) else rollouts
        check(len(several) > 0, "compute_loss: rollouts", rollouts, "at least one rollout")
        check(is_one_of(reduction, get_args(Reduction)), "compute_loss: reduction", reduction, "mean or sum")
        self.schedules.apply(self.clock, ())
        terms: dict[str, list[float]] = {}
        for rollout in several:
            with self.normalizers.isolated(), self.steps.isolated():
                self.record_loss(rollout)
                means = self.steps.record.means()
                dtype = exact_dtype(self.device)
                of_all_ranks = average(torch.tensor([*means.values()], dtype=dtype, device=self.device)).tolist()
                for name, value in zip(means, of_all_ranks, strict=True):
                    terms.setdefault(name, []).append(value)
        return {name: sum(x) / (len(x) if reduction == "mean" else 1) for name, x in terms.items()}

    def record_loss(self, rollout: Rollout | Batch) -> None:
        """Record the terms for `compute_loss`; override it if `loss(batch(rollout))` does not compute them."""
        batch = self.batch(rollout) if isinstance(rollout, Rollout) else rollout.replace()
        batch = self.estimator.normalized_over_rollout(batch, ("rollout", "minibatch"))
        set_global_weights([batch])
        self.steps.record_loss(self.loss(batch))

    def checked_weights(self, rollout: Rollout) -> Tensor | None:
        """Return `step_weights(rollout)`, or raise a `ConfigurationError` if its shape is not `[T, B]`; collective."""
        weights = self.step_weights(rollout)
        if world_size() > 1:  # weights on some ranks only: without ones on the others, ranks would wait for each other
            rewards = rollout.rewards
            if all_reduce(torch.tensor(float(weights is not None), device=rewards.device), "max"):
                weights = torch.ones_like(rewards) if weights is None else weights.to(rewards.dtype)
        if weights is not None:
            name, found, expected = "step_weights", tuple(weights.shape), rollout.shape
            name = "rollout.weights" if weights is rollout.weights else name
            check(found == expected, f"{name}: shape", found, f"{expected}, steps and environments of the rollout")
            counted = weights if rollout.valid is None else weights[rollout.valid]
            if not (counted >= 0).all():
                check(False, name, float(counted.min()), "numbers of at least 0")
        return weights

    # ------------------------------------------------------------------ acting

    def acting_policy(self) -> nn.Module:
        """Return the policy that acts: `policy`, or a copy if parameters are sharded over ranks or on an XLA device.

        With sharded parameters all ranks update the copy after each training step. With XLA the copy is on the CPU and
        new in each call: XLA runs whole graphs, and one graph per environment step would be slow.
        """
        if self.acting_copies:
            return self.acting_copies[0]
        return copy_to_cpu(self.policy) if self.device.type == "xla" else self.policy

    def on_validation_start(self) -> None:
        _update_acting_policy(self)  # a checkpoint was loaded

    on_test_start = on_predict_start = on_validation_start

    def forward(self, observations: Nested, deterministic: bool = True, memory: Nested | None = None) -> Nested:
        """Return actions `[B, ...]` for observations `[B, *shape]`: modes, or samples unless `deterministic`.

        A recurrent policy needs its state, `self.policy.initial_memory(B)` or the state returned last, and returns
        (actions, next state). `lightning_rl.policies.interface.to_environment` converts actions for an environment.
        """
        if not all(isinstance(x, Tensor) for x in leaves(observations)):
            raise TypeError("forward takes tensors [B, ...]: call model.act(observation) with arrays")
        if memory is None:
            return self.policy.act(observations, deterministic=deterministic).environment_action
        output = self.policy.act(observations, deterministic=deterministic, memory=memory)
        return output.environment_action, output.memory

    def act(
        self,
        observation: Nested,
        deterministic: bool = True,
        memory: Nested | None = None,
        episode_starts: Any = None,  # flags, of one environment or several
    ) -> Nested:
        """Return the action of one environment or several, as NumPy arrays or numbers to pass to `env.step`.

        Args:
            observation: `[*shape]` of one environment or `[B, *shape]` of several, nested as the space, with its action
                masks. Parts that only the critic sees may be missing.
            deterministic: Return the mode of the policy instead of a sample.
            memory: Recurrent state that was returned with the last action; None at the start of episodes. With a
                recurrent policy the action is returned with the next state, as a pair.
            episode_starts: Where the observation is the first of an episode, `[B]`; the recurrent state is reset there.
                `terminated | truncated` of the last step, or of the step before it in the autoreset mode `NEXT_STEP`.

        Raises:
            ConfigurationError: A part of the observation is missing, has another shape, or a number that is not finite
                or that the dtype of its space cannot hold; or `memory` is given to a policy without memory.
        """
        spaces = self.observation_space, self.action_space
        return act(self.policy, *spaces, observation, deterministic, memory, episode_starts)

    # ------------------------------------------------------------------ optimizers

    def configure_optimizers(self) -> Any:
        """Return the optimizer, or a list with the critic's too; with a scheduler, a list of each kind."""
        default, rates = self.default_optimizer(), [self.schedules.first(name, getattr(self, name)) for name in RATES]
        optimizers, schedulers = make_optimizers(self.policy, self.options, default, rates)
        if schedulers:
            return optimizers, schedulers
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def _set_learning_rates(self, learning_rate: Scheduled) -> None:
        self.learning_rate = self.critic_learning_rate = self.scheduled("learning_rate", learning_rate, above=0)
        if has_critic := has_own_critic_optimizer(self.options):
            option = "optimizer.critic.learning_rate"
            option = "learning_rate" if self.options[option] is None else option
            rate = self.options[option]
            self.critic_learning_rate = self.scheduled("critic_learning_rate", rate, above=0, option=option)
        if self.options["optimizer.anneal"]:
            for name in RATES[: 1 + has_critic]:
                line = {"kind": "linear", "start": getattr(self, name), "end": 0.0}
                self.scheduled(name, line, option="optimizer.anneal")

    def _check_policy(self) -> None:
        needed = {
            "normalization.observations": "observation_normalizer",
            "normalization.values": "value_normalizer",
            "policy.memory": "memory",
        }
        for option, part in needed.items():
            expected = f"false or null, since make_policy() returned {type(self.policy).__name__} without {part}"
            has_effect = not self.options[option] or getattr(self.policy, part, None) is not None
            check(has_effect, option, self.options[option], expected)
        optimizer_parts(self.policy, self.options, self.default_optimizer())
        coefficients = {part: self.options[f"optimizer.l2.{part}"] for part in ("policy", "value", "shared")}
        self.penalties = {part: coefficient for part, coefficient in coefficients.items() if coefficient}
        check_penalized(self.policy, self.penalties)
        if warmup_steps := self.options["optimizer.critic_warmup_steps"]:
            check_critic(self.policy, "optimizer.critic_warmup_steps", warmup_steps)

    # ------------------------------------------------------------------ hooks of Lightning

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        # Integers are constants: an average over weights and buffers, as in EMAWeightAveraging, would truncate them.
        return (x for x in super().buffers(recurse) if x.is_floating_point())

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that every run needs; call `super()` when you override it.

        Raises:
            ConfigurationError: The Trainer or its callbacks do what needs automatic optimization, such as searching a
                learning rate, or clipping or accumulating gradients.
        """
        filter_misleading_warnings()
        if self.trainer.precision == "64-true":
            # Lightning converts after it has loaded or copied the parameters, which would round them to float32.
            self.double()
        # First: Lightning's own errors would suggest something else.
        checks.refuse_callbacks(self.trainer)
        if self.trainer.state.fn == "fit":
            checks.refuse_automatic_optimization(self.trainer, self)
        return [kind() for kind in self._missing_callbacks()]

    def _missing_callbacks(self) -> list[type[Callback]]:
        present: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        needed: list[type[Callback]] = [StepMetric, InterruptionGuard]
        return [kind for kind in needed if not any(isinstance(callback, kind) for callback in present)]

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.acting_copies:
            self.acting_copies = [shard(self.policy, self.device_mesh["data_parallel"])]
            leave_optimizers_to_module(self.trainer.strategy)

    def setup(self, stage: str) -> None:
        self.hooks_run.add("setup")
        if stage == "fit":
            self.restored = {}  # of a checkpoint from which nothing was trained
        self._roll_back()  # an update that an exception interrupted
        self.updating = False
        checks.check_strategy(self.trainer.strategy)
        checks.check_mesh(self.device_mesh)
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.fit_loop.epoch_loop.max_steps = -1  # Lightning would end after as many gradient steps
        with suppress(ValueError):  # raised unless `torch.compile(model)` was called
            to_uncompiled(self)  # Lightning would compile loggers and NumPy too
            self.options["debug.fast_paths"] = "compiled"
            self.policy.fast_paths = "compiled"  # type: ignore[assignment]
            rank_zero_warn("torch.compile(model): its options have no effect; it selects debug.fast_paths: compiled")
        checks.check_spaces(self, self.trainer.datamodule)  # type: ignore[attr-defined]

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Raise a `ConfigurationError` if an option does not suit the Trainer or the shape `(T, B)` of rollouts."""
        has_update = type(self).update is not OnPolicyAlgorithm.update
        check(has_update, "model", type(self).__name__, "a subclass that defines update(rollout)")
        checks.check_trainer(self, trainer, rollout_shape)
        check_penalized(self.policy, self.penalties)  # they may be frozen by now
        device = checks.training_device(trainer)
        problem = fast.compiler_problem(device) or None
        fast_paths = self.options["debug.fast_paths"]
        check(fast_paths != "compiled" or problem is None, "debug.fast_paths", fast_paths, f"auto, since {problem}")
        expected = "a run with an end: EnvStepLimit (max_env_steps) or max_epochs"
        self.schedules.check_end(self, is_bounded(trainer), expected)

    def check_data(self, data: Any) -> None:  # data modules of users too
        """Raise a `ConfigurationError` for a data module whose batches the algorithm does not learn from."""
        name, num_actors = type(self).__name__, getattr(data, "num_actors", 0)
        expected = f"0: {name} learns from rollouts of the current policy alone"
        check(not num_actors or self.learns_off_policy, "actors.count", num_actors, expected)
        needed = self.learns_from_recorded_steps
        expected = f"{'RecordedEpisodes' if needed else 'RolloutDataModule'}, which {name} learns from"
        check(getattr(data, "has_recorded_steps", needed) == needed, "data", type(data).__name__, expected)

    def on_fit_start(self) -> None:
        self.hooks_run.add("on_fit_start")
        data, name = self.trainer.datamodule, type(self).__name__  # type: ignore[attr-defined]
        expected = "a parameter with requires_grad; model.unfreeze() sets it for all"
        check(any(x.requires_grad for x in self.parameters()), "model", f"{name}, frozen", expected)
        expected = f"{name}.on_load_checkpoint to call super(), which takes over the state of the run"
        check(bool(self.restored) or self.trainer.ckpt_path is None, "ckpt_path", str(self.trainer.ckpt_path), expected)
        if not self.restored:  # a new run, maybe by a Trainer that has counted epochs
            self.clock.epoch_size = None
        self.check_run(self.trainer, getattr(data, "rollout_shape", None))
        self.check_data(data)
        if self._missing_callbacks():
            raise ConfigurationError(f"{name}.configure_callbacks does not return the callbacks of super() as well")

    def on_train_start(self) -> None:
        self.hooks_run.add("on_train_start")
        _update_acting_policy(self)
        restore_this_rank(self, self.restored.get("ranks", []))
        made, sets = sum(bool(x.param_groups) for x in self.steps.all_optimizers), self.steps.num_sets
        expected = "one, or one for the actor and one for the critic"
        expected += "; as many again for auxiliary phases, unless separate_aux_optimizer is false" if sets > 1 else ""
        check(made in (sets, 2 * sets), "configure_optimizers", f"{made} optimizers", expected)
        checks.check_schedulers(self.trainer)
        checks.warn_of_untrained_parameters(self, self.steps.all_optimizers)
        for optimizer in self.steps.all_optimizers:
            for group in optimizer.param_groups:  # a checkpoint may come from another device
                group |= {name: optimizer.defaults[name] for name in ("fused", "capturable") if name in group}
        planned_before = self.restored.get("planned_env_steps")
        self.clock.start(self.trainer, planned_before)
        self.schedules.report_new_end(self.env_steps, self.clock.planned_env_steps, planned_before)
        self.restored = {}
        is_known = self.clock.planned_env_steps is not None
        self.schedules.check_end(self, is_known, "a run whose length is known: EnvStepLimit (max_env_steps)")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # whatever a loader yields
        if not isinstance(batch, Rollout):
            raise ConfigurationError(
                f"the train loader yields {type(batch).__name__}: expected rollouts, as RolloutDataModule makes them"
            )
        return None

    def log(self, *args: Any, **kwargs: Any) -> None:  # arguments of LightningModule.log
        """Log a value as `LightningModule.log` does, against environment steps; batches have equal weights."""
        super().log(*args, **kwargs | {"batch_size": kwargs.get("batch_size") or 1})
        if self._trainer is not None and self.trainer.training:
            self.metrics.logged(self, bool(kwargs.get("on_epoch")))

    def validation_step(self, episodes: list[Episode], batch_idx: int) -> None:
        if batch_idx == 0:
            self.metrics.evaluation.begin(self.env_steps)
        info_keys = getattr(self.trainer.datamodule, "info_keys", ())  # type: ignore[attr-defined]
        self.metrics.add_evaluation(episodes, info_keys)

    def test_step(self, episodes: list[Episode], batch_idx: int) -> None:
        self.validation_step(episodes, batch_idx)

    def predict_step(self, episodes: list[Episode], batch_idx: int) -> list[Episode]:
        """Return the episodes with observations, actions and rewards."""
        return episodes

    def on_validation_epoch_end(self) -> None:
        self.metrics.log_evaluation(self, "val")
        if self.trainer.state.fn == "fit":
            self.metrics.show_unlogged(self.trainer)

    def on_test_epoch_end(self) -> None:
        self.metrics.log_evaluation(self, "test")

    # ------------------------------------------------------------------ checkpoints

    def init_from(self, path: str | Path, parts: Sequence[Part] | None = None) -> WarmStart:
        """Copy the parameters that fit from a checkpoint of any algorithm, to start a new run with them.

        Optimizer and clock start from the beginning; network and spaces may differ. The result lists copied tensors.

        Args:
            path: Path of the checkpoint.
            parts: Some of `policy` (includes an encoder that actor and critic share), `critic` and `normalizers`. None
                copies all that the checkpoint has.

        Raises:
            ConfigurationError: The file is not a checkpoint of this package, or nothing of a requested part fits.
        """
        checkpoint = read_checkpoint(path, "init_from")
        result = warm_start(self, checkpoint, parts, str(path))
        rank_zero_info(f"Starting with parameters from {path}:\n  {result}")
        return result

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,  # as torch.load has it
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **kwargs: Any,  # options of the algorithm
    ) -> Self:
        """Load an algorithm from a checkpoint like Lightning, but construct only trusted classes.

        Modules that the checkpoint names must belong to `lightning_rl`, `torch`, `gymnasium` or a package in `trust`,
        such as `["my_package"]`, or be imported already. Tensors without `map_location` keep their device, or go to the
        CPU if there is no such device. `weights_only=False` unpickles the checkpoint, which can execute code in it.
        `kwargs` change options; a dict changes single options of a stored group.

        Raises:
            ConfigurationError: The file is damaged, or no checkpoint of this package in its format, or a class in
                it is not trusted, cannot be imported or is not what its field expects.
        """
        check(hparams_file is None, "hparams_file", hparams_file, "None; the checkpoint has all options")
        loaded: Self = from_checkpoint(cls, checkpoint_path, map_location, strict, weights_only, trust, kwargs)
        return loaded

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Restored state is kept until training starts.
        checkpoint[CHECKPOINT_KEY] = run_state(self) | self.restored
        # A subclass may have called `save_hyperparameters` again, which stores spaces that cannot be loaded.
        stored = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        stored |= {name: x for name, x in self._given.items() if type(stored.get(name)) is not type(x)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the clock; when resuming, also adapt the optimizer states to changed options.

        Raises:
            ConfigurationError: The file is damaged, the checkpoint is in another format or belongs to other spaces or
                another network, or training cannot be resumed from it (see `check_resumable`).
        """
        take_over(checkpoint, self)

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch cannot send a generator to a spawned process, nor a tensor without another reference.
        return super().__getstate__() | {"generator": self.generator.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))
        super().__setstate__(state | {"generator": generator})  # type: ignore[no-untyped-call]
