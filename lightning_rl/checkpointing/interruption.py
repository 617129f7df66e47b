"""Signals and preemption stop a run between two rollouts, after saving it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, LastCheckpoint, report_log_failures
from lightning_rl.distributed import all_reduce
from lightning_rl.training.clock import ends_epoch, validates_now
from lightning_rl.validation import make_folder

# Seconds within which a repeated signal counts as one: `timeout`, for example, signals a process and its group.
_SAME_SIGNAL = 0.2
Handler = Callable[[int, FrameType | None], Any]


class InterruptionGuard(Callback):
    """Stops interrupted runs between two rollouts; `OnPolicyAlgorithm` adds it to every Trainer.

    * A Trainer without any checkpoint callback warns once per run.
    * After the first SIGINT (Ctrl-C) or SIGTERM, the update from the current rollout finishes, `LastCheckpoint` saves,
      and `Trainer.fit` raises `SystemExit` with status 130 or 143. A single learner that waits for asynchronous actors
      stops at once. A second signal kills the process; a second SIGINT in a notebook or IPython ends only `fit`.
    * SLURM's signal for requeueing the job (SIGUSR1) also waits for the end of the update.
    * `Trainer.save_checkpoint` raises during a rollout or its update; `ModelCheckpoint(save_on_exception=True)` and
      `OnExceptionCheckpoint` then save nothing, and with several ranks save after signals only.
    * Checkpoints are written and read by `AtomicCheckpointIO`, unless the Trainer has another checkpoint plugin.
    * A TensorBoard log that cannot be written ends the run with one `LogFailure`.

    Signals for which the program has its own handler are left to that handler, and so are all signals if `Trainer.fit`
    does not run in the main thread.
    """

    def __init__(self) -> None:
        self._free: set[int] = set()  # signals without a handler of the program
        self._handled: list[int] = []
        self._received: dict[int, float] = {}  # signal: time
        self._stopping: list[int] = []
        self._requeue: dict[int, Handler] = {}  # Lightning's handler by signal

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the signals without a handler, before Lightning handles them."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        report_log_failures(trainer)
        if stage != "fit":
            return
        # Lightning keeps the counters of an epoch that an earlier fit left. The next checkpoint would be resumed at the
        # wrong place in its epoch, or train nothing forever. `ckpt_path` restores its own counters later.
        loop: Any = trainer.fit_loop
        loop.epoch_loop.restarting = False
        for progress in (loop.epoch_progress, loop.epoch_loop.batch_progress):
            for count in (progress.total, progress.current):
                count.ready = count.started = count.completed = count.processed
        # Callbacks that `configure_callbacks` of a subclass adds come after this one, but their hooks must run first.
        # `last.ckpt` has the states of all other callbacks, so it is saved after other checkpoints.
        found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        found = sorted(found, key=lambda x: (isinstance(x, Checkpoint), isinstance(x, LastCheckpoint), x is self))
        trainer.callbacks = found  # type: ignore[attr-defined]
        saves_nothing = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]
        if not (trainer.checkpoint_callbacks or saves_nothing):
            rank_zero_warn(
                "The Trainer has no checkpoint callback: a run that is interrupted cannot be resumed. Add "
                "LastCheckpoint('folder') to its callbacks, and continue with ckpt_path='folder/last.ckpt'"
            )
        is_main = threading.current_thread() is threading.main_thread()
        self._free = {s for s in signal.valid_signals() if _is_free(signal.getsignal(s))} if is_main else set()
        self._handled, self._received, self._stopping, self._requeue = [], {}, [], {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the folders of checkpoints, and replace Lightning's signal handlers until the end of the fit."""
        saves = trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        for callback in trainer.checkpoint_callbacks if saves else ():
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath):
                make_folder(f"trainer.callbacks: {type(callback).__name__}.dirpath", callback.dirpath)
        if trainer.received_sigterm:  # since `setup`
            # Private to Lightning. Otherwise the run would end after this rollout, unsaved and with status 0.
            trainer._signal_connector.received_sigterm = False
            self._receive(trainer, signal.SIGTERM, None)
        # Besides SIGTERM, Lightning only handles the signal that requeues a SLURM job.
        kind = type(signal.getsignal(signal.SIGTERM))
        for signum in self._free - {signal.SIGTERM}:
            handler = signal.getsignal(signum)
            if callable(handler) and type(handler) is kind:
                self._requeue[signum] = handler
        self._handled = [*self._requeue, signal.SIGTERM, signal.SIGINT]
        for signum in self._free.intersection(self._handled):
            signal.signal(signum, partial(self._receive, trainer))
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if (call_while_waiting := getattr(datamodule, "call_while_waiting", None)) is not None:
            call_while_waiting(partial(self._stop_waiting, trainer))

    def _receive(self, trainer: Trainer, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        earlier = [at for other, at in self._received.items() if other not in self._requeue]
        if signum in self._requeue or not earlier:
            self._received.setdefault(signum, now)
            if trainer.is_global_zero:
                name = signal.Signals(signum).name
                _print(f"{name}: stopping after the update from this rollout; a second signal stops at once")
        elif now - earlier[0] > _SAME_SIGNAL:
            if signum == signal.SIGINT and hasattr(sys, "ps1"):  # an interactive session, with variables to keep
                if trainer.state.status == TrainerStatus.RUNNING:
                    raise KeyboardInterrupt
                return  # the run closes its environments already
            if (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows SIGTERM kills
            os._exit(128 + signum)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # A resumed run would skip a due validation, or the end of the epoch: stop after these.
        if not (validates_now(trainer) or ends_epoch(trainer) or _is_over(trainer)):
            self._stop_if_asked(trainer, pl_module, "on_train_batch_end", *args)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_fitting and not (ends_epoch(trainer) or _is_over(trainer)):
            self._stop_if_asked(trainer, pl_module, "on_validation_end")

    def _stop_if_asked(self, trainer: Trainer, pl_module: LightningModule, hook: str, *args: object) -> None:
        if received := self._received_by_any(trainer, pl_module):
            # Lightning calls these after this callback: one may have to save, and the model may change its state.
            for callback in trainer.checkpoint_callbacks:
                getattr(callback, hook)(trainer, pl_module, *args)
            getattr(pl_module, hook)(*args)
            self._save(trainer, received)
            self._stopping = received
            _exit(received[0], trainer.is_global_zero)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save; the run stops when the next epoch starts, after later callbacks have saved or stopped training."""
        if not _is_over(trainer) and (received := self._received_by_any(trainer, pl_module)):
            self._save(trainer, received)
            self._stopping = received

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stopping:
            _exit(self._stopping[0], trainer.is_global_zero)

    def _stop_waiting(self, trainer: Trainer) -> None:
        """Save and stop if a signal arrived during the wait for an actor; several ranks save after the rollout."""
        if trainer.world_size == 1 and (received := self._received_by_any(trainer, trainer.lightning_module)):
            self._save(trainer, received)
            _exit(received[0], trainer.is_global_zero)

    def _save(self, trainer: Trainer, received: list[int]) -> None:
        last = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoint)]
        for callback in last:
            callback.save(trainer)
            if callback.best_model_path:
                rank_zero_info(f"Stopped by a signal; the run is saved in {callback.best_model_path}")
        requeueing = [signum for signum in received if signum in self._requeue]
        for signum in requeueing:
            self._requeue[signum](signum, None)
        if not (last or requeueing):
            _save_beside_others(trainer)

    def _received_by_any(self, trainer: Trainer, pl_module: Any) -> list[int]:
        if trainer.world_size == 1:  # without a tensor, which a device would have to send back
            return [signum for signum in self._handled if signum in self._received]
        flags = torch.tensor([float(signum in self._received) for signum in self._handled], device=pl_module.device)
        return [signum for signum, flag in zip(self._handled, all_reduce(flags).tolist(), strict=True) if flag]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `RuntimeError` while a rollout is being collected or learned from."""
        if not _is_between_rollouts(trainer):
            raise RuntimeError(
                "a checkpoint in the middle of a rollout or its update cannot be resumed from: save in "
                "on_train_batch_end or later"
            )
        # From a checkpoint of on_train_epoch_start, Lightning would resume without the epoch that starts.
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for count in (progress["total"], progress["current"]):
            count["ready"] = count["started"]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the checkpoint callbacks, which Lightning calls after this callback, from saving half an update.

        If only this rank ends, they would wait forever for the other ranks.
        """
        reason = "was raised in the middle of a rollout or its update"
        if _is_between_rollouts(trainer):
            if trainer.world_size == 1 or self._stopping:
                return
            reason = "ended this rank, and a checkpoint has the state of all ranks"
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
                callback.on_exception = partial(_save_nothing, callback)  # type: ignore[method-assign]
                rank_zero_warn(
                    f"{type(callback).__name__}: nothing was saved, because {type(exception).__name__} {reason}; "
                    "resume from the last checkpoint"
                )


class EarlyTermination:
    """Handler of SIGTERM before training starts: the program cleans up and exits with status 143.

    A second signal kills the process. `InterruptionGuard` replaces this handler when training starts.
    """

    def __init__(self) -> None:
        self._process, self._received = os.getpid(), 0.0
        self.trainer: Trainer | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process or (self._received and now - self._received > _SAME_SIGNAL):
            os._exit(128 + signum)  # a forked process has nothing to clean up
        if self._received:
            return
        self._received = now
        if self.trainer is not None and self.trainer.strategy.launcher is not None:
            self.trainer.strategy.launcher.kill(signum)
        is_first = getattr(rank_zero_only, "rank", 0) == 0
        if is_first:
            _print(f"{signal.Signals(signum).name}: stopping; a second signal stops at once")
        _exit(signum, is_first)


@contextlib.contextmanager
def early_termination() -> Iterator[EarlyTermination | None]:
    """Handle SIGTERM with `EarlyTermination` inside the block, unless the program has its own handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield None
        return
    handler = EarlyTermination()
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_free(handler: object) -> bool:
    """Whether this is a default handler, not one of the program."""
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, EarlyTermination)


def _is_over(trainer: Trainer) -> bool:
    # Whether the run ends with this rollout anyway: a resumed run would not know that, and train longer.
    progress: Any = trainer.fit_loop.epoch_progress.current
    epochs, steps = progress.processed, trainer.global_step
    # Until `min_epochs`, the Trainer ignores `should_stop`.
    has_minimum = epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
    is_at_limit = epochs == trainer.max_epochs or 0 <= trainer.max_steps <= steps
    return is_at_limit or (trainer.should_stop and has_minimum)


def _save_beside_others(trainer: Trainer) -> None:
    folders = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
    if not folders:
        if any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.checkpoint_callbacks):
            return  # it saves after this
        rank_zero_warn("Stopped by a signal, and nothing was saved: the Trainer saves no checkpoints")
        return
    path = os.path.join(folders[0], "interrupted.ckpt")
    trainer.save_checkpoint(path, weights_only=False)
    rank_zero_info(f"Stopped by a signal; the run is saved in {path}. Continue with ckpt_path={path!r}")


def _exit(signum: int, is_first_rank: bool) -> NoReturn:
    # Lightning kills the first rank if a rank that it started exits with another status than 0.
    # W&B learns the status from `sys.exit`; after another `SystemExit` the run would be finished.
    sys.exit(128 + signum if is_first_rank else 0)


def _is_between_rollouts(trainer: Trainer) -> bool:
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return not (getattr(trainer.lightning_module, "updating", False) or getattr(datamodule, "rollout_pending", False))


def _save_nothing(callback: Checkpoint, *_: object) -> None:
    """Replace `on_exception` of a checkpoint callback for one call."""
    del callback.on_exception


def _print(message: str) -> None:
    # Not with `print`, which the signal may have interrupted. Ctrl-C also ends the reader of a pipe, such as `tee`.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{message}\n".encode())
