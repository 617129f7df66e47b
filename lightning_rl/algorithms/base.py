"""The base class of the algorithms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl import fast
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO
from lightning_rl.checkpointing.failed_update import explained_anomaly, skip_or_raise
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format, read_checkpoint
from lightning_rl.checkpointing.interruption import InterruptionGuard
from lightning_rl.checkpointing.resuming import adopt_settings, changes, check_fits, check_resumable
from lightning_rl.checkpointing.run_state import restore_own_replays, restore_rank, run_state
from lightning_rl.checkpointing.warm_start import WarmStart, warm_start
from lightning_rl.environments.seeding import MINIBATCHES, derive_seed
from lightning_rl.files import check_intact, read_data
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.acting import act
from lightning_rl.policies.actor_critic import ActorCritic, check_modes_agree
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks import DiscreteEncoding, Network
from lightning_rl.policies.normalization import RewardScale, ValueNormalization
from lightning_rl.policies.recurrent import Memory
from lightning_rl.policies.values import in_chunks
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import OnTruncation, Rollout
from lightning_rl.spaces import SpaceDict, differing, space_from_dict, space_to_dict
from lightning_rl.training.advantages import Targets
from lightning_rl.training.checks import check_strategy, plain_settings, refuse_automatic_optimization, refuse_tuners
from lightning_rl.training.clock import RATES, ScheduledOptions, is_bounded, planned_env_steps
from lightning_rl.training.metrics import Reports, StepMetric, histogram_loggers
from lightning_rl.training.optimization import (
    NotFiniteError,
    adam,
    check_optimizers,
    make_optimizers,
    set_learning_rate,
    step_scheduler,
    try_optimizers,
)
from lightning_rl.training.parameter_groups import ParameterGroups, Part, WeightPenalty
from lightning_rl.training.reward_normalization import make_reward_normalizer
from lightning_rl.training.saturation import SaturationWatch
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
    refuse_unknown_options,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def compile_policy_alone(model: LightningModule, policy: nn.Module) -> None:
    """Restrict the compilation of a model to its policy; a model that is not compiled stays as it is.

    Lightning compiles each step of a compiled model as a whole. A training step of this package contains optimizers,
    loggers and NumPy, which PyTorch's compiler cannot trace.

    A policy with memory is not compiled, with a warning: its shapes change with the episodes of each rollout.

    Args:
        model: What `torch.compile` may have been called with.
        policy: Its forward pass is compiled with the options of that call.
    """
    context = model._compiler_ctx  # private to Lightning 2.6, and the only record of these options
    if context is None:
        return
    for name in _STEPS:
        setattr(model, name, torch.compiler.disable(getattr(model, name)))  # type: ignore[no-untyped-call]
    if getattr(policy, "memory", None) is not None:
        rank_zero_warn(
            "torch.compile(model): the policy has memory and is not compiled, because the compiler would start again "
            "for the episode lengths of each rollout; drop torch.compile"
        )
        return
    # What `nn.Module.compile` of PyTorch 2.13 does with options of its own; copies and pickles leave it out.
    policy._compiled_call_impl = context["dynamo_ctx"](policy._call_impl)


def _nearest_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Leave a tensor where it was (None), or put it on the CPU where there is no such device."""
    found, kind = torch.accelerator.current_accelerator(check_available=True), location.partition(":")[0]
    return None if kind == "cpu" or (found is not None and found.type == kind) else storage.cpu()  # type: ignore[no-untyped-call]


class Hooks(Reports):
    """The hooks of Lightning that are the same for every algorithm.

    Attributes:
        observation_space: Of one environment.
        action_space: Of one environment.
        corrects_for_lag: Whether rollouts of an earlier version of the policy are learned from as well; the lag is then
            logged.
    """

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    corrects_for_lag = False

    def __init__(self) -> None:
        super().__init__()
        self._scheduled = ScheduledOptions()
        self._restored_ranks: list[dict[str, Any]] = []
        self._restored_plan: int | None = None
        self._version_before = -1

    def default_optimizer(self) -> ClassSpec:
        """Return what `optimizer=None` stands for; override it where an algorithm is used with another."""
        optimizer = adam(self.device)
        optimizer = fast.default_optimizer(self) or optimizer
        return optimizer

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Make the optimiser, that of the critic if it has its own, and, if there are, their schedulers."""
        rates = [self._scheduled.first(name, getattr(self, name)) for name in RATES]
        self.try_optimizers(on_any_device=False)
        optimizers = make_optimizers(
            self.policy, self._optimizer_specs(), self.hparams["parameter_groups"] or {}, rates
        )
        if (scheduler := self.hparams["lr_scheduler"]) is None:
            return optimizers if len(optimizers) > 1 else optimizers[0]
        return optimizers, [instantiate("lr_scheduler", scheduler, LRScheduler, optimizer) for optimizer in optimizers]

    def try_optimizers(self, on_any_device: bool) -> None:
        """Take steps with optimizers and schedulers of the kinds that the options ask for, if any.

        Args:
            on_any_device: Try the optimizers that are known to run on every device, or the others.

        Raises:
            ConfigurationError: One refuses an argument or cannot take a step.
        """
        groups, scheduler = self.hparams["parameter_groups"], self.hparams["lr_scheduler"]
        given = (groups, scheduler, self.hparams["optimizer"], self.hparams["critic_optimizer"])
        if any(option is not None for option in given):
            try_optimizers(self.policy, self._optimizer_specs(), groups or {}, scheduler, on_any_device)

    def _optimizer_specs(self) -> dict[str, ClassSpec]:
        """Return class and arguments of each optimiser, by the option that they come from."""
        options = self.hparams
        specs: dict[str, ClassSpec] = {"optimizer": options["optimizer"] or self.default_optimizer()}
        if options["critic_optimizer"] is not None or options["critic_learning_rate"] is not None:
            specs["critic_optimizer"] = options["critic_optimizer"] or specs["optimizer"]
        return specs

    def _schedulers(self) -> list[LRScheduler]:
        made = self.lr_schedulers()
        return cast(list[LRScheduler], made if isinstance(made, list) else [made] if made else [])

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
        # The guard may save in its hook, with `step` in the name.
        return [kind() for kind in (StepMetric, InterruptionGuard) if not any(isinstance(c, kind) for c in present)]

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Refuse what cannot work before anything is collected; the command line asks before anything is written.

        Args:
            trainer: Will run it.
            rollout_shape: `(T, B)` of the rollouts of one rank, None where that is not known.

        Raises:
            ConfigurationError: A setting does not go with that.
        """
        has_step = type(self).training_step is not LightningModule.training_step
        check(has_step, "model", type(self).__name__, "an algorithm, a class that has a training_step")
        refuse_tuners(trainer)
        # float16 needs loss scaling, which hides gradient norms. XLA would cast what learns, not the copy that acts.
        on_xla = "xla" in (self.device.type, trainer.strategy.root_device.type)
        precisions = ("32-true",) if on_xla else ("32-true", "bf16-mixed", "bf16-true", "64-true")
        check(trainer.precision in precisions, "precision", trainer.precision, "one of " + ", ".join(precisions))
        check_modes_agree(self.policy)
        if (memory := getattr(self.policy, "memory", None)) is not None:
            expected = "None on XLA, which would compile for every way in which episodes can end in a rollout"
            check(not on_xla, "memory", self.hparams["memory"], expected)
            if rollout_shape is not None:
                memory.num_sequences(rollout_shape)
        self._scheduled.check_end(self, is_bounded(trainer), "a run with an end: set max_env_steps or max_epochs")
        shown = not self.histograms or bool(histogram_loggers(trainer.loggers))
        check(shown, "histograms", True, "false, or a TensorBoardLogger to show them")

    def setup(self, stage: str) -> None:
        """Refuse a strategy that cannot work before it wraps the module, and environments of other spaces."""
        check_strategy(self.trainer.strategy)
        compile_policy_alone(self, self.policy)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        for name in ("observation_space", "action_space"):
            if (space := getattr(data, name, None)) is not None and space_to_dict(space) != self.hparams[name]:
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
            self.env_steps_before_epochs = self.env_steps
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
        if getattr(self, "can_overlap", False):
            expected += ", unless overlapped is true"
        check(not num_actors or self.corrects_for_lag, "num_actors", num_actors, expected)

    def publish_policy(self) -> None:
        """Tell the data, where they collect asynchronously, that there is a new version of the policy."""
        if (publish := getattr(self.trainer.datamodule, "publish_policy", None)) is not None:  # type: ignore[attr-defined]
            publish()

    def on_train_start(self) -> None:
        """Go on from where this rank was, if it was; find out how long the run is."""
        self._restore_this_rank()
        for optimizer in self.all_optimizers:
            for group in optimizer.param_groups:  # a checkpoint brings those of the device that it was made on
                group |= {name: optimizer.defaults[name] for name in ("fused", "capturable") if name in group}
        self._planned_env_steps = planned_env_steps(self.trainer)
        self._scheduled.report_new_end(self.env_steps, self._planned_env_steps, self._restored_plan)
        self._restored_plan = None
        is_known = self._planned_env_steps is not None
        self._scheduled.check_end(self, is_known, "a run whose length is known: set max_env_steps")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401 - whatever a loader yields
        """Refuse a batch that is no rollout.

        Raises:
            ConfigurationError: It is something else.
        """
        if not isinstance(batch, Rollout):
            raise ConfigurationError(
                f"the train loader yields {type(batch).__name__}: expected rollouts, as RolloutDataModule makes them"
            )
        self._version_before = self.policy_version

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Refuse to go on where the clock stands still: nothing would ever end the run.

        Raises:
            RuntimeError: `training_step` has learned from the rollout outside of `learning`, or not at all.
        """
        if self.policy_version == self._version_before:
            raise RuntimeError(
                f"{type(self).__name__}.training_step has not counted the rollout, so that the clock stands still: "
                "expected its updates within `with self.learning(rollout):`"
            )

    def _restore_this_rank(self) -> None:
        """Seed or restore the random generators; take over what the rank kept and has not logged."""
        if self.global_rank < len(self._restored_ranks):
            restore_rank(self, self._restored_ranks[self.global_rank])
        else:
            path = (MINIBATCHES, self.global_rank, self.policy_version)
            self.generator.manual_seed(derive_seed(torch.initial_seed(), *path))
        restore_own_replays(self, self._restored_ranks)
        if len(self._restored_ranks) == self.trainer.world_size:
            self.log_window.restore(self._restored_ranks[self.global_rank]["window"])
        else:  # ranks that were not there could not add up what they have not seen
            self.log_window.begin(self.env_steps)
        self._restored_ranks = []

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
            **kwargs: Options to change.

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
            module = algorithm(**constructor_options(algorithm, stored) | kwargs)
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
        self.env_steps, self.policy_version = state["env_steps"], state["policy_version"]
        self.frames = state["frames"]
        if resumes:
            for sentence in changes(checkpoint, self):
                rank_zero_info(sentence)
            adopt_settings(checkpoint, self)
            self.skipped_updates = state["skipped_updates"]
            self.env_steps_before_epochs = state["env_steps_before_epochs"]
            self._restored_ranks, self._restored_plan = state["ranks"], state["planned_env_steps"]


class OnPolicyAlgorithm(Targets, Hooks):
    """Base of the algorithms: policy, optimiser, normalisers, the clock, evaluation and logging.

    An algorithm is a subclass whose `training_step(rollout, batch_idx)` does its updates inside
    `with self.learning(rollout):` and calls `self.optimize(loss)` for each.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimizer: a number or a schedule; see
            `lightning_rl.training.schedules.parse_schedule`.
        anneal_learning_rate: Lower it linearly to 0 over the planned environment steps of the run. Where an environment
            spends steps on resets and `max_epochs` alone bounds the run, these count as planned, and it ends as much
            above 0 as they took.
        optimizer: Optimiser class, as `{"class_path": ..., "init_args": ...}`, a class, or a `functools.partial` of
            one; None is Adam with epsilon 1e-5, fused where that exists.
        lr_scheduler: Scheduler class likewise, stepped once per rollout, in place of `anneal_learning_rate`.
        critic_optimizer: Optimiser class likewise for the critic's own encoder and head, which then has an optimiser of
            its own; None with a `critic_learning_rate` is another one of the class of `optimizer`.
        critic_learning_rate: Its step size, a number or a schedule; None with a `critic_optimizer` is `learning_rate`.
        parameter_groups: Options of some parameters, by the beginning of their names in the policy or a pattern like
            `*.bias`: `learning_rate_scale`, which the learning rate is multiplied by, and any that the optimiser knows
            for a group, such as `weight_decay`. A parameter takes those of the first pattern that fits.
        max_grad_norm: Clip the global norm of the gradient, with two optimisers that of each; None does not.
        max_grad_value: Clip every entry of the gradient to ± this, before its norm; None does not.
        gamma: Discount factor.
        on_truncation: `bootstrap` goes on from the value of the observation at which a time limit cut the episode
            off, `terminal` treats the limit as a terminal state.
        network: `auto`, `mlp`, `nature`, `impala`, the class of an encoder, or one of these for some leaves of a nested
            observation, by path; see `lightning_rl.policies.networks.make_encoder`.
        hidden_sizes: Layers of the MLP.
        activation: Activation of the MLP: `tanh`, `relu`, `elu`, `gelu` or `silu`.
        discrete_encoding: What the MLP makes of `Discrete` and `MultiDiscrete` observations: `one_hot` vectors, or an
            `embedding`, which is learned.
        shared_encoder: One encoder for actor and critic instead of two; None shares it where there is an image and
            nothing is for the critic only.
        critic_only: Paths of parts of a `Dict` that the critic sees and the actor does not: `goal`, `robot.mass`.
        memory: A recurrent core between encoder and heads: `lstm`, `gru`, or `{"kind": "lstm", option: value}` with
            `hidden_size`, `num_layers`, `separate`, `sequence_length` and `burn_in`; None: none. See docs/policies.md.
        initial_log_std: Logarithm of the initial standard deviation of continuous actions.
        action_distribution: `gaussian`, `squashed_gaussian`, `beta` and others, by name, or as
            `{"kind": name, option: value}`, or for a `Dict` or `Tuple` space one for each part by its path
            (`{"arm.0": "beta"}`); None takes the default of each space. See docs/policies.md.
        normalize_observations: Standardise every `Box` of the observation that is no image by its running moments. A
            dict changes how: `clip` bounds the result (10), `epsilon` is added to the variance (1e-8),
            `initial_variance` is the variance before any data (1).
        normalize_rewards: Divide rewards by the running deviation of the discounted return (true or `return_std`), or
            by that of the rewards themselves (`reward_std`).
        normalized_reward_clip: Bound on the absolute normalised reward; None does not clip.
        value_normalization: `running_std`: the value head predicts returns over their running deviation, and the value
            loss is in these units; `popart`: less their running mean besides, with a head that is rescaled whenever
            these change (van Hasselt et al. 2016). None does neither. See `lightning_rl.policies.normalization`.
        update_normalizers: `after` the updates from a rollout the normalisers take it in, so that they are the same in
            acting and learning, or `before`, so that the rollout is seen through them: importance ratios then do not
            begin at 1.
        recompute_values: Compute the values that targets are made of anew at the beginning of the updates from a
            rollout, rather than take those of its collection. They only differ with `update_normalizers: before`, or
            by rounding.
        advantage_estimator: `gae`, or `monte_carlo`: the sum of rewards up to the end of the episode or rollout, less
            the value; the same as λ = 1.
        value_target: `td_lambda`: advantage plus value, or `empirical`: the sum of rewards, whatever λ is.
        policy_l2: Coefficient of the squares of the weights that only the actor has; no biases, no ½.
        value_l2: Of those that only the critic has.
        shared_l2: Of those that both have.
        histograms: Log histograms of each part of the actions, normalised advantages, parameters and gradients, at the
            end of the first and the last epoch of a rollout that is logged; needs a logger like TensorBoard's.
        check_numerics: Look for NaN and infinity after every minibatch rather than after every rollout; slower, for
            debugging.
        max_skipped_updates: How many rollouts in a row may give a loss or gradient that is not finite: the updates from
            there on are left out, and the rollout from the normalisers. One more ends the run with an error, which
            names a file that `FailedUpdate.load` reads.
        fast_paths: Act and learn by faster code where it gives the same numbers up to rounding; see
            docs/algorithms/ppo.md.
        **unknown: Refused: options that neither this class nor the algorithm has.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected. Or there is no such
            option; names those that are called nearly so.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        learning_rate: Scheduled = 3e-4,
        anneal_learning_rate: bool = False,
        optimizer: ClassSpec | type[Optimizer] | None = None,
        lr_scheduler: ClassSpec | type[LRScheduler] | None = None,
        critic_optimizer: ClassSpec | type[Optimizer] | None = None,
        critic_learning_rate: Scheduled | None = None,
        parameter_groups: ParameterGroups | None = None,
        max_grad_norm: float | None = 0.5,
        max_grad_value: float | None = None,
        gamma: float = 0.99,
        on_truncation: OnTruncation = "bootstrap",
        network: Network = "auto",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
        shared_encoder: bool | None = None,
        critic_only: Sequence[str] | None = None,
        memory: Memory = None,
        initial_log_std: float = 0.0,
        action_distribution: str | ClassSpec | None = None,
        normalize_observations: bool | dict[str, float] = False,
        normalize_rewards: bool | RewardScale = False,
        normalized_reward_clip: float | None = 10.0,
        value_normalization: ValueNormalization | None = None,
        update_normalizers: Literal["after", "before"] = "after",
        recompute_values: bool = False,
        advantage_estimator: Literal["gae", "monte_carlo"] = "gae",
        value_target: Literal["td_lambda", "empirical"] = "td_lambda",
        policy_l2: float = 0.0,
        value_l2: float = 0.0,
        shared_l2: float = 0.0,
        histograms: bool = False,
        check_numerics: bool = False,
        max_skipped_updates: int = 0,
        fast_paths: bool = True,
        **unknown: Any,  # noqa: ANN401 - what no class between this one and that of the algorithm has taken
    ) -> None:
        super().__init__()
        refuse_unknown_options(self, unknown)
        self.save_hyperparameters()
        plain = plain_settings(self.hparams)
        self.save_hyperparameters(plain)
        self.observation_space = space_from_dict(plain["observation_space"])
        self.action_space = space_from_dict(plain["action_space"])
        self.gamma = gamma
        self.on_truncation = on_truncation
        self.learning_rate = self.critic_learning_rate = self.scheduled("learning_rate", learning_rate, above=0)
        rates = RATES[: len(self._optimizer_specs())]
        if len(rates) > 1:
            critics_rate = learning_rate if critic_learning_rate is None else critic_learning_rate
            self.critic_learning_rate = self.scheduled("critic_learning_rate", critics_rate, above=0)
        if anneal_learning_rate:
            for name in rates:
                self._scheduled.anneal(name, getattr(self, name))
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.check_numerics = check_numerics
        self.max_skipped_updates = max_skipped_updates
        self.update_normalizers = update_normalizers
        self.recompute_values = recompute_values
        self.advantage_estimator = advantage_estimator
        self.value_target = value_target
        self.histograms = histograms
        self.fast_paths = fast_paths
        self.policy = self.make_policy()
        # Acting may happen in another process, which has the policy alone.
        self.policy.fast_paths = fast_paths  # type: ignore[assignment]
        check_optimizers(self.policy, self._optimizer_specs(), plain["parameter_groups"] or {})
        self.try_optimizers(on_any_device=True)
        self.weight_penalty = WeightPenalty(policy_l2, value_l2, shared_l2)
        self.weight_penalty.check_policy(self.policy)
        self.reward_normalizer = make_reward_normalizer(normalize_rewards, gamma, normalized_reward_clip)
        self._saturation = SaturationWatch()

    def make_policy(self) -> ActorCritic:
        """Return the policy; override it to bring your own network."""
        return ActorCritic(self.observation_space, self.action_space, **self.policy_options())

    def policy_options(self) -> dict[str, Any]:
        """Return the options that are those of `ActorCritic`."""
        names = (
            "network",
            "hidden_sizes",
            "activation",
            "discrete_encoding",
            "shared_encoder",
            "critic_only",
            "memory",
            "initial_log_std",
            "action_distribution",
            "normalize_observations",
            "value_normalization",
        )
        return {name: self.hparams[name] for name in names}

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

    @contextmanager
    def learning(self, rollout: Rollout) -> Iterator[None]:
        """Frame the updates from one rollout: check it before, then feed normalisers, clock and log.

        Raises:
            RuntimeError: The rollout was not collected with the current parameters, and older ones are not corrected
                for.
            FloatingPointError: A loss term or gradient was not finite; no parameter was touched by it.
        """
        lag = self.policy_version - rollout.policy_version
        if lag < 0 or (lag and not self.corrects_for_lag):
            raise RuntimeError(
                f"the rollout was collected with version {rollout.policy_version} of the policy, not with version "
                f"{self.policy_version}: the train loader must have a length, or Lightning fetches one batch ahead"
            )
        start = time.perf_counter()
        self.updating = True
        self._forget_normalizers()
        self.diagnostics = self.new_diagnostics()
        if self.corrects_for_lag:
            self.diagnostics.observe(policy_lag=torch.tensor(float(lag), device=self.device))
        self._follow_schedules()
        rates = {name: x.param_groups[0]["lr"] for name, x in zip(RATES, self.optimizers_in_use, strict=False)}
        self.find_engine()
        generator_state = self.generator.get_state()
        if (share := self._saturation.share(self.policy, rollout)) is not None:
            self.diagnostics.observe(action_saturation=share)
        for replay in self.replays.values():
            replay.begin()
        profiled = self.trainer.profiler.profile("update")  # type: ignore[attr-defined]
        with suppress(NotFiniteError), profiled, explained_anomaly(), self.engine.updates(self):
            yield
        means = self.losses = self.diagnostics.means()
        if not_finite := self.diagnostics.not_finite(means):
            self.roll_back_normalizers()
            skip_or_raise(self, rollout, not_finite, generator_state)
            if self.reward_normalizer is not None:
                self.reward_normalizer.forget()
        else:
            self.skipped_updates = 0
            self.after_updates(means)
            if not self._kept_normalizers:  # unless they took it in before
                self.update_running_statistics(rollout)
            self._take_into_value_normalizer()
            for replay in self.replays.values():
                replay.commit()
            self._forget_normalizers()
        self._saturation.report(means.get("action_saturation"), self.policy_version, self.action_space)
        if self.max_skipped_updates:
            means = means | {"skipped_updates": float(bool(not_finite))}
        means = means | rates | {name: getattr(self, name) for name in self._scheduled if name not in RATES}
        for scheduler in self._schedulers():
            step_scheduler(scheduler, self.hparams["lr_scheduler"])
        self.policy_version += 1
        self.publish_policy()
        frames = rollout.num_steps if rollout.frames is None else rollout.frames
        counts = self.all_reduce(torch.tensor([rollout.num_steps, frames], device=self.device)).tolist()
        self.env_steps, self.frames = self.env_steps + counts[0], self.frames + counts[1]
        self._log_rollout(rollout, means, time.perf_counter() - start)
        self.updating = False

    def evaluate(self, batch: Batch) -> tuple[Distribution, Tensor]:
        """Return action distribution and value of every row of a batch, with what the policy remembers there."""
        if batch.sequences is None:
            return self.policy(batch.observations)  # type: ignore[no-any-return]
        return self.policy(batch.observations, batch.sequences)  # type: ignore[no-any-return]

    @torch.no_grad()
    def compute_loss(self, rollout: Rollout | Batch) -> dict[str, float]:
        """Return the loss over a rollout or batch, and what it is made of, without learning from it.

        Nothing changes: neither parameters nor their gradients, normalisers, clock, generators or what is logged. It
        needs no Trainer; with several ranks it is a collective call about the rows of all of them. With
        `update_normalizers: before` a rollout is seen through normalisers that know it, as it would be in learning.

        Args:
            rollout: A rollout, or what `targets` made of one, all of it or a part.

        Returns:
            By the name that each is logged by (`train/<name>`): `loss`, `policy_loss`, `value_loss`, `entropy`, ….

        Raises:
            NotImplementedError: The algorithm has no `loss(batch)`.
        """
        with self.isolated_state():
            self.observe_loss(rollout)
            return self.diagnostics.means()

    def observe_loss(self, rollout: Rollout | Batch) -> None:
        """Compute the loss that `compute_loss` returns; override it where that is not `loss(batch)` of `targets`."""
        loss = getattr(self, "loss", None)
        if loss is None:
            raise NotImplementedError(f"{type(self).__name__} has no loss(batch), which compute_loss calls")
        batch = self.prepare_batch(self.targets(rollout) if isinstance(rollout, Rollout) else rollout.replace())
        self.set_global_weights([batch])
        loss(batch)

    def scheduled(
        self,
        name: str,
        value: Scheduled,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> float:
        """Return what an option begins with, for `__init__` to keep as the attribute `name`: a number from then on.

        Where `value` is a schedule, `learning` sets that attribute before each update, and it is logged.

        Raises:
            ConfigurationError: It is neither a number within the bounds nor a schedule.
        """
        return self._scheduled.add(name, value, above, at_least, at_most)

    def scheduled_or_none(self, name: str, value: Scheduled | None, *, above: float | None = None) -> float | None:
        """Return the same as `scheduled` of an option that may also be left out."""
        return None if value is None else self.scheduled(name, value, above=above)

    def after_updates(self, means: dict[str, float]) -> None:
        """React to how the updates from a rollout went; called once after all of them, if none was left out.

        Args:
            means: Mean of every term over this rank's minibatches, by name.
        """

    def _follow_schedules(self) -> None:
        values = self._scheduled.values(self.env_steps, self._planned_env_steps)
        for name, value in values.items():
            setattr(self, name, value)
        for name, optimizer in zip(RATES, self.all_optimizers, strict=False):
            if name in values:
                set_learning_rate(optimizer.optimizer, values[name])


class ActingDistribution(OnPolicyAlgorithm):
    """Learns with the divergence from the policy that acted, exact for every action distribution."""

    @torch.no_grad()
    def acting_distribution(self, rollout: Rollout) -> Nested:
        """Return the parameters of the distributions that a rollout's actions were drawn from, `[T, B, ...]`.

        Called before anything is updated: the current policy is the one that acted.
        """
        observations = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        return in_chunks(lambda x: self.policy(x)[0].parameters(), observations, lead=2)

    def targets(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps with what to learn, the distributions of its actions among it."""
        if rollout.memory is None:
            return super().targets(rollout, acting_distribution=self.acting_distribution(rollout), **per_step)
        with torch.no_grad():  # before the normalisers may take the rollout in
            # Copies: what is the same for all observations is a view of a parameter, which the updates change.
            acting = map_leaves(torch.clone, self.evaluate(rollout.flatten())[0].parameters())
        return super().targets(rollout, **per_step).replace(acting_distribution=acting)

    def divergence(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return KL(old ‖ new) of each row, `[N]`, in nats.

        Args:
            batch: That `targets` made, all of it or a part.
            distribution: Of its actions, by the current parameters.
        """
        return distribution.with_parameters(batch.acting_distribution).kl(distribution)
