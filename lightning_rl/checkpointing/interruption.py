"""Runs end, and are saved, between two rollouts only: signals, preemption and exceptions cannot make it otherwise."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

from lightning_rl.checkpointing.atomic import LastCheckpoint, name_event_files, write_atomically
from lightning_rl.distributed import all_reduce
from lightning_rl.training.clock import ends_epoch, validates_now

# Seconds within which a signal that comes twice is one: `timeout`, for one, sends it to a process and to its group.
_SAME = 0.2
Handler = Callable[[int, FrameType | None], Any]


class InterruptionGuard(Callback):
    """Lets a run be interrupted at any moment; `OnPolicyAlgorithm` adds it to every Trainer by itself.

    * The first SIGINT (Ctrl-C) or SIGTERM lets the update from the current rollout finish; a learner that waits for
      asynchronous actors stops waiting. The Trainer's
      `LastCheckpoint` then saves, and `SystemExit` with status 130 or 143 leaves `Trainer.fit`. A second signal ends
      the process at once. With several ranks all stop after the same rollout, whichever got the signal.
    * On SLURM the signal that asks Lightning to requeue the job (SIGUSR1) waits for the end of the update too.
    * An exception in the middle of a rollout or its update is not saved by `ModelCheckpoint(save_on_exception=True)`,
      and `Trainer.save_checkpoint` raises there.
    * Checkpoints are written and read by `AtomicCheckpointIO`; a TensorBoard log on a full disk ends the run with one
      error.

    A signal that the program has a handler of its own for before `Trainer.fit` is left to that handler, and all of them
    where `Trainer.fit` does not run in the main thread.
    """

    def __init__(self) -> None:
        self._received: dict[int, float] = {}
        self._leaving: list[int] = []
        self._free: set[int] = set()
        self._requeue_signal: int | None = None
        self._requeue: Handler | None = None
        self._silenced: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out which signals nobody handles, before Lightning does."""
        write_atomically(trainer)
        name_event_files(trainer)
        if stage != "fit":
            return
        is_main = threading.current_thread() is threading.main_thread()
        self._free = {s for s in signal.valid_signals() if _is_free(signal.getsignal(s))} if is_main else set()
        self._received, self._leaving, self._requeue_signal = {}, [], None
        for callback in self._silenced:
            callback.save_on_exception = True
        self._silenced = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals over from Lightning, which gives them back when the fit is over."""
        if trainer.received_sigterm:  # since the Trainer was set up
            # Private to Lightning, or the run would end after this rollout: unsaved, and with status 0.
            trainer._signal_connector.received_sigterm = False
            self._receive(trainer, signal.SIGTERM, None)
        # Besides SIGTERM, Lightning handles only the signal that requeues a job of SLURM.
        of_lightning = type(signal.getsignal(signal.SIGTERM))
        for signum in self._free:
            handler = signal.getsignal(signum)
            if signum != signal.SIGTERM and callable(handler) and type(handler) is of_lightning:
                self._requeue_signal, self._requeue = signum, handler
        for signum in self._free & {signal.SIGINT, signal.SIGTERM, self._requeue_signal}:
            signal.signal(signum, partial(self._receive, trainer))
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if (call_while_waiting := getattr(datamodule, "call_while_waiting", None)) is not None:
            call_while_waiting(partial(self._stop_waiting, trainer))

    def _receive(self, trainer: Trainer, signum: int, frame: FrameType | None) -> None:
        """Take note of a signal; end the process if it is the second."""
        now = time.monotonic()
        earlier = [at for other, at in self._received.items() if other != self._requeue_signal]
        if signum == self._requeue_signal or not earlier:
            self._received.setdefault(signum, now)
            if trainer.is_global_zero:
                name = signal.Signals(signum).name
                _write(f"\n{name}: stopping after the update from this rollout; a second signal stops at once\n")
        elif now - earlier[0] > _SAME:
            if (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(signal.SIGKILL)
            os._exit(128 + signum)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Save and leave if any rank was asked to."""
        # A resumed run would not make up for what comes with a validation or an epoch's end: leave after that.
        if validates_now(trainer) or ends_epoch(trainer) or _ends_now(trainer):
            return
        if received := self._received_by_any(trainer, pl_module):
            # They come after this callback, and one may be due.
            for callback in trainer.checkpoint_callbacks:
                callback.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._save(trainer, received)
            self._leave(trainer, received)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and leave, likewise, after a validation within an epoch."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or ends_epoch(trainer) or _ends_now(trainer):
            return
        if received := self._received_by_any(trainer, pl_module):
            for callback in trainer.checkpoint_callbacks:
                callback.on_validation_end(trainer, pl_module)
            self._save(trainer, received)
            self._leave(trainer, received)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and leave when the callbacks that save or stop, which come after this one, are done with the epoch."""
        if not _ends_now(trainer):
            self._leaving = self._received_by_any(trainer, pl_module)
            if self._leaving:
                self._save(trainer, self._leaving)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave, if that was put off until the epoch before was over."""
        if self._leaving:
            self._leave(trainer, self._leaving)

    def _stop_waiting(self, trainer: Trainer) -> None:
        """Save and leave if this rank got a signal while no actor delivers a rollout.

        With several ranks nothing is saved: the others may be anywhere, and a checkpoint needs all of them.
        """
        alone = trainer.world_size == 1
        known = (self._requeue_signal, signal.SIGTERM, signal.SIGINT)
        if not (received := [s for s in known if s in self._received and (alone or s != self._requeue_signal)]):
            return
        if alone:
            self._save(trainer, received)
        else:
            rank_zero_warn("stopped by a signal while no actor delivered a rollout: go on from the last checkpoint")
        self._leave(trainer, received)

    def _save(self, trainer: Trainer, received: list[int]) -> None:
        keepers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoint)]
        for keeper in keepers:
            keeper.save(trainer)
            if keeper.best_model_path:
                rank_zero_info(f"Stopped by a signal. Resume from {keeper.best_model_path}")
        if self._requeue_signal in received and self._requeue is not None:
            self._requeue(self._requeue_signal, None)
        elif not keepers:
            _save_beside_others(trainer)

    def _leave(self, trainer: Trainer, received: list[int]) -> NoReturn:
        # A rank that Lightning started and that ends with another status would have the first one killed.
        raise SystemExit(128 + received[0] if trainer.is_global_zero else 0)

    def _received_by_any(self, trainer: Trainer, pl_module: Any) -> list[int]:  # noqa: ANN401
        """Return the signals that any rank has received; a collective call."""
        known = [signum for signum in (self._requeue_signal, signal.SIGTERM, signal.SIGINT) if signum is not None]
        if trainer.world_size == 1:
            return [signum for signum in known if signum in self._received]
        flags = torch.tensor([float(signum in self._received) for signum in known], device=pl_module.device)
        return [signum for signum, flag in zip(known, all_reduce(flags).tolist(), strict=True) if flag]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse what nothing can go on from.

        Raises:
            RuntimeError: A rollout is being collected or learned from.
        """
        if _is_between(trainer):
            return
        raise RuntimeError(
            "a checkpoint was asked for in the middle of a rollout or its update, which no run can go on from: save in "
            "on_train_batch_end or later"
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the `ModelCheckpoint`s, which come after this callback, from saving half an update."""
        if _is_between(trainer):
            return
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", False):
                callback.save_on_exception = False  # type: ignore[attr-defined]
                self._silenced.append(callback)
                rank_zero_warn(
                    f"save_on_exception: {type(exception).__name__} came in the middle of a rollout or its update, so "
                    "nothing was saved; go on from the last checkpoint"
                )


class EarlyTermination:
    """Handler of SIGTERM in a program that is about to train: it cleans up and ends, with status 143.

    `InterruptionGuard` takes the signal over when training begins. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._process, self._received = os.getpid(), 0.0
        self._trainer: Trainer | None = None

    def watch(self, trainer: Trainer) -> None:
        """End the ranks that a Trainer has started, too."""
        self._trainer = trainer

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """End the program.

        Raises:
            SystemExit: The first time.
        """
        now = time.monotonic()
        if os.getpid() != self._process or (self._received and now - self._received > _SAME):
            os._exit(128 + signum)  # a process that was forked has nothing to clean up
        if self._received:
            return
        self._received = now
        if self._trainer is not None and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        is_first = getattr(rank_zero_only, "rank", 0) == 0
        if is_first:
            _write(f"\n{signal.Signals(signum).name}: stopping; a second signal stops at once\n")
        # A rank that Lightning started and that ends with another status would have the first one killed.
        raise SystemExit(128 + signum if is_first else 0)


@contextlib.contextmanager
def early_termination() -> Iterator[EarlyTermination | None]:
    """Have `EarlyTermination` handle SIGTERM within, unless the program has a handler of its own."""
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
    """Whether a signal has no handler of the program's own."""
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, EarlyTermination)


def _ends_now(trainer: Trainer) -> bool:
    """Whether the run is over with this rollout anyhow; a resumed one would not know, and go on."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    has_minimum = progress.processed >= (trainer.min_epochs or 0) and trainer.global_step >= (trainer.min_steps or 0)
    return trainer.should_stop and has_minimum


def _save_beside_others(trainer: Trainer) -> None:
    """Save where the Trainer saves its checkpoints."""
    folders = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
    if not folders:
        rank_zero_warn("stopped by a signal, and nothing was saved: the Trainer saves no checkpoints")
        return
    path = os.path.join(folders[0], "interrupted.ckpt")
    trainer.save_checkpoint(path)
    rank_zero_info(f"Stopped by a signal. Resume from {path}")


def _is_between(trainer: Trainer) -> bool:
    """Whether everything that was collected has been learned from, and no more."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return not (getattr(trainer.lightning_module, "updating", False) or getattr(datamodule, "rollout_pending", False))


def _write(message: str) -> None:
    # Not `print`: the handler may have interrupted one.
    os.write(2, message.encode())
