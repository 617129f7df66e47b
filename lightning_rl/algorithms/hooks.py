"""What Lightning asks of every algorithm: optimisers, checks before a run, its state in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl import fast
from lightning_rl.algorithms.compilation import compile_policy_alone
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format
from lightning_rl.checkpointing.interruption import InterruptionGuard
from lightning_rl.checkpointing.resuming import adopt_settings, changes, check_fits, check_resumable
from lightning_rl.checkpointing.run_state import restore_own_replays, restore_rank, run_state
from lightning_rl.environments.seeding import MINIBATCHES, derive_seed
from lightning_rl.files import check_intact, read_data
from lightning_rl.policies.actor_critic import check_modes_agree
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import differing, space_to_dict
from lightning_rl.training.checks import check_strategy, refuse_automatic_optimization, refuse_tuners
from lightning_rl.training.clock import RATES, ScheduledOptions, is_bounded, planned_env_steps
from lightning_rl.training.metrics import Reports, StepMetric, that_show_histograms
from lightning_rl.training.optimization import adam, make_optimizers, try_optimizers
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
        shown = not self.histograms or bool(that_show_histograms(trainer.loggers))
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
        self._scheduled.tell_new_end(self.env_steps, self._planned_env_steps, self._restored_plan)
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
