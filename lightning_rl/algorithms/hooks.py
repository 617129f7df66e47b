"""What Lightning asks of every algorithm: optimisers, checks before a run, its state in checkpoints."""

from __future__ import annotations

from typing import Any, cast

import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl import fast
from lightning_rl.algorithms.histograms import that_show_histograms
from lightning_rl.algorithms.optimizers import adam
from lightning_rl.algorithms.parameter_groups import make_optimizers
from lightning_rl.algorithms.reports import Reports
from lightning_rl.algorithms.resuming import adopt_settings, changes, check_fits, check_resumable
from lightning_rl.algorithms.run_state import restore_own_replays, restore_rank, run_state
from lightning_rl.algorithms.scheduling import RATES, ScheduledOptions
from lightning_rl.algorithms.tuners import refuse_automatic_optimization, refuse_tuners
from lightning_rl.checkpoint_format import CHECKPOINT_KEY, check_format
from lightning_rl.clock import is_bounded, planned_env_steps
from lightning_rl.environments.seeding import MINIBATCHES, derive_seed
from lightning_rl.interruption import InterruptionGuard
from lightning_rl.policy import check_modes_agree
from lightning_rl.rollout import Rollout
from lightning_rl.spaces import differing, space_to_dict
from lightning_rl.strategies import check_strategy
from lightning_rl.validation import ClassSpec, ConfigurationError, check, instantiate


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
        optimizers = make_optimizers(
            self.policy, self._optimizer_specs(), self.hparams["parameter_groups"] or {}, rates
        )
        if (scheduler := self.hparams["lr_scheduler"]) is None:
            return optimizers if len(optimizers) > 1 else optimizers[0]
        return optimizers, [instantiate("lr_scheduler", scheduler, optimizer) for optimizer in optimizers]

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
        """Guard every Trainer against interruptions; what overrides it adds to what it returns.

        Raises:
            ConfigurationError: Lightning's Tuner, or a callback of it, was to choose learning rate or batch size, or a
                Trainer that trains was to clip or add up gradients.
        """
        # Before anything else: Lightning's own checks say something else.
        refuse_tuners(self.trainer)
        if self.trainer.state.fn == "fit":
            refuse_automatic_optimization(self.trainer)
        present = any(isinstance(callback, InterruptionGuard) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if present else [InterruptionGuard()]

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the clock and what each rank has of its own."""
        state = checkpoint[CHECKPOINT_KEY] = run_state(self)
        if self._restored_ranks:  # training has not begun, nor taken them over
            state |= {"ranks": self._restored_ranks, "planned_env_steps": self._restored_plan}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them back.

        Raises:
            ConfigurationError: The checkpoint was made for other spaces or another network, or in another format; or
            training cannot go on from it: see `check_resumable`.
        """
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
