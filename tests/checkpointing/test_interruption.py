"""A signal at any moment stops a run between two rollouts, and the resumed run is bit-exact."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint

from lightning_rl import PPO, EnvStepCheckpoint, EnvStepLimit, EnvStepValidation, LastCheckpoint, RolloutDataModule
from lightning_rl.checkpointing.interruption import InterruptionGuard, early_termination
from tests.checkpointing.test_resume import differences, run_state
from tests.helpers import make_data, make_model, make_trainer

ROLLOUTS = 6
INTERRUPTED_IN = 4  # counted from 0; the second of the second epoch


@pytest.fixture(autouse=True)
def usual_handlers():
    """Set the signal handlers of a program in a terminal."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Interrupts(gymnasium.Wrapper):
    """Calls a function at one step, counted over all environments."""

    at: int | None = None
    what: Any = None
    steps = 0

    def step(self, action: Any):
        Interrupts.steps += 1
        if Interrupts.steps == self.at:
            Interrupts.what()
        return super().step(action)


class PPOInterrupted(PPO):
    """Calls a function in the middle of the update from one rollout."""

    at: int | None = None
    what: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.losses = 0

    def loss(self, batch: Any):
        self.losses += 1
        if self.policy_version == self.at and self.losses == 3:  # parameters have changed twice since the rollout
            type(self).what()
        return super().loss(batch)


class InValidation(Callback):
    """Calls a function during the validation after one rollout."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what = at, what

    def on_validation_batch_start(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
        if pl_module.policy_version == self.at:
            self.what()


def run(
    folder: Path, *callbacks: Callback, ckpt_path: str | None = None, last: bool = True, **trainer: Any
) -> PPOInterrupted:
    """Train for two epochs of three rollouts each."""
    seed_everything(3, verbose=False)
    data = RolloutDataModule(
        "CartPole-v1",
        num_envs=2,
        rollout_length=16,
        rollouts_per_epoch=3,
        evaluation={"episodes": 1},
        env={"training_wrappers": ["tests.checkpointing.test_interruption.Interrupts"]},
    )
    options: dict[str, Any] = {"num_minibatches": 2, "num_epochs": 3, "policy": {"hidden_sizes": (8,)}}
    model = PPOInterrupted(data.observation_space, data.action_space, optimizer={"anneal": True}, **options)
    Trainer(
        max_epochs=ROLLOUTS // 3,
        callbacks=[*callbacks, *([LastCheckpoint(folder)] if last else [])],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing=last or any(isinstance(callback, Checkpoint) for callback in callbacks),
        **trainer,
    ).fit(model, data, ckpt_path=ckpt_path)
    return model


def send(*signums: int) -> Any:
    def what() -> None:
        for signum in signums:
            os.kill(os.getpid(), signum)

    return what


@pytest.fixture
def interrupt(monkeypatch):
    """Set the function to call at one place; return the callbacks that the run needs."""

    def set_(place: str, what: Any, rollout: int = INTERRUPTED_IN) -> list[Callback]:
        monkeypatch.setattr(Interrupts, "steps", 0)
        if place == "collection":
            monkeypatch.setattr(Interrupts, "at", rollout * 32 + 7)
            monkeypatch.setattr(Interrupts, "what", what)
        if place == "update":
            monkeypatch.setattr(PPOInterrupted, "at", rollout)
            monkeypatch.setattr(PPOInterrupted, "what", what)
        return [InValidation(3, what)] if place == "validation" else []

    def unset() -> None:
        monkeypatch.setattr(PPOInterrupted, "at", None)
        monkeypatch.setattr(Interrupts, "at", None)

    set_.over = unset
    return set_


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return run_state(folder / "last.ckpt")


def stored(path: Path) -> int:
    return torch.load(path, weights_only=True)["lightning_rl"]["policy_version"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("place", "done"), [("collection", 5), ("update", 5), ("validation", 3)])
def test_first_signal_stops_after_update_and_resumed_run_is_bit_exact(
    place, done, signum, interrupt, whole, tmp_path, capfd, caplog
):
    with pytest.raises(SystemExit) as exit_, caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run(tmp_path, *interrupt(place, send(signum)))
    assert f"Stopped by a signal; the run is saved in {tmp_path}/last.ckpt" in caplog.messages
    assert exit_.value.code == 128 + signum
    assert f"{signal.Signals(signum).name}: stopping after the update from this rollout" in capfd.readouterr().err
    assert stored(tmp_path / "last.ckpt") == done
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    interrupt.over()
    assert run(tmp_path, ckpt_path=str(tmp_path / "last.ckpt")).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


class Counts(Callback):
    """Counts rollouts; a checkpoint has the number."""

    num_rollouts = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_rollouts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_rollouts": self.num_rollouts}


def test_callbacks_of_the_model_run_before_an_interrupted_run_is_saved(interrupt, tmp_path, monkeypatch):
    own = PPO.configure_callbacks
    monkeypatch.setattr(PPOInterrupted, "configure_callbacks", lambda self: [*own(self), Counts()])
    with pytest.raises(SystemExit):
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)))
    callbacks = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert callbacks["Counts"] == {"num_rollouts": stored(tmp_path / "last.ckpt")}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_hooks_of_the_model_run_before_an_interrupted_run_is_saved(hook, interrupt, tmp_path, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(PPOInterrupted, hook, lambda self, *_: seen.append(self.policy_version))
    validations = [EnvStepValidation(32)] if hook == "on_validation_end" else []
    with pytest.raises(SystemExit):
        run(tmp_path, *validations, *interrupt("update", send(signal.SIGTERM)))
    assert seen[-1] == stored(tmp_path / "last.ckpt") == 5


def test_stop_in_last_rollout_of_an_epoch_keeps_number_of_epochs(interrupt, whole, tmp_path):
    best = ModelCheckpoint(tmp_path, "best", monitor="val/episode_return", mode="max")
    with pytest.raises(SystemExit):
        run(tmp_path, best, *interrupt("update", send(signal.SIGTERM), 2))
    assert stored(tmp_path / "last.ckpt") == stored(tmp_path / "best.ckpt") == 3
    interrupt.over()
    resumed = run(tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.policy_version == ROLLOUTS
    assert differences(resumed.state_dict(), whole["state_dict"]) == []


def test_a_checkpoint_of_a_stop_between_epochs_resumes_with_the_next_epoch(interrupt, whole, tmp_path):
    """The signal ends the run in `on_train_epoch_start`, where Lightning calls `on_exception`."""
    with pytest.raises(SystemExit):
        run(tmp_path, OnExceptionCheckpoint(tmp_path), *interrupt("update", send(signal.SIGTERM), 2), last=False)
    assert stored(tmp_path / "on_exception.ckpt") == 3
    interrupt.over()
    resumed = run(tmp_path, ckpt_path=str(tmp_path / "on_exception.ckpt"))
    assert resumed.policy_version == ROLLOUTS
    assert differences(resumed.state_dict(), whole["state_dict"]) == []


class SignalsIn(Callback):
    """Sends SIGINT in some rollouts, and keeps the place of each rollout in its epoch."""

    def __init__(self, *rollouts: int) -> None:
        self.rollouts, self.places = list(rollouts), list[int]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: PPO, batch: Any, batch_idx: int) -> None:
        self.places.append(batch_idx)
        if pl_module.policy_version in self.rollouts:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 5), (3, 4)])
def test_fit_after_a_stop_saves_checkpoints_that_continue_in_the_middle_of_an_epoch(first, second, tmp_path):
    stops = SignalsIn(first, second)
    options = {"enable_checkpointing": True, "max_epochs": 4}
    data = make_data(rollouts_per_epoch=3)
    model = make_model(data)
    trainer = make_trainer(callbacks=[stops, LastCheckpoint(tmp_path)], **options)
    for _ in range(2):
        with pytest.raises(SystemExit):
            trainer.fit(model, data)
    resumed = SignalsIn()
    trainer = make_trainer(callbacks=[resumed, LastCheckpoint(tmp_path)], **options)
    trainer.fit(make_model(data), make_data(rollouts_per_epoch=3), ckpt_path=tmp_path / "last.ckpt")
    assert (stops.places[first + 1 :] + resumed.places)[:6] == [0, 1, 2, 0, 1, 2]


def test_signal_in_last_rollout_lets_run_finish(interrupt, whole, tmp_path):
    assert run(tmp_path, *interrupt("update", send(signal.SIGTERM), ROLLOUTS - 1)).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


@pytest.mark.parametrize("limit", [{}, {"max_steps": (INTERRUPTED_IN + 1) * 6}])
def test_signal_in_last_rollout_neither_requeues_a_run_nor_saves_it_as_interrupted(limit, slurm, interrupt, tmp_path):
    last = INTERRUPTED_IN if limit else ROLLOUTS - 1
    callbacks = [ModelCheckpoint(tmp_path), *interrupt("update", send(signal.SIGUSR1), last)]
    assert run(tmp_path, *callbacks, last=False, **limit).policy_version == last + 1
    assert not slurm.exists()
    assert not [*tmp_path.glob("hpc_ckpt*"), *tmp_path.glob("interrupted*")]


@pytest.mark.parametrize("minimum", [{"min_epochs": 2}, {"min_steps": ROLLOUTS * 6}])
def test_signal_stops_a_run_that_continues_to_its_minimum_after_its_limit(minimum, interrupt, tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, EnvStepLimit(64), *interrupt("update", send(signal.SIGTERM)), **minimum)
    assert stored(tmp_path / "last.ckpt") == INTERRUPTED_IN + 1


def test_signal_before_training_stops_after_first_rollout(tmp_path, capfd):
    """Regression: with one rollout per epoch, Lightning ended the run unsaved and with status 0."""

    class Sends(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: PPO) -> None:
            send(signal.SIGTERM)()

    data = make_data(rollouts_per_epoch=1)
    trainer = make_trainer(max_epochs=5, callbacks=[Sends(), LastCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(SystemExit) as exit_:
        trainer.fit(make_model(data), data)
    assert exit_.value.code == 143
    assert "SIGTERM: stopping after the update" in capfd.readouterr().err
    assert stored(tmp_path / "last.ckpt") == 1


def test_early_termination_keeps_program_handlers_and_restores_default():
    with early_termination() as handler:
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(SystemExit) as exit_:
            send(signal.SIGTERM)()
        assert exit_.value.code == 143
        send(signal.SIGTERM)()  # `timeout` sends it twice at once
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with early_termination() as handler:
        assert handler is None and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_signal_repeated_at_once_counts_as_one(interrupt, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGTERM, signal.SIGTERM)))
    assert exit_.value.code == 143
    assert stored(tmp_path / "last.ckpt") == INTERRUPTED_IN + 1


def test_trackers_that_replace_sys_exit_get_the_status_of_a_signal(interrupt, tmp_path, monkeypatch):
    statuses, leave = [], sys.exit
    monkeypatch.setattr(sys, "exit", lambda status: statuses.append(status) or leave(status))  # as W&B does
    with pytest.raises(SystemExit):
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)))
    assert statuses == [143]


def test_second_ctrl_c_in_an_interactive_session_ends_fit_and_keeps_the_process(interrupt, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning_rl.checkpointing.interruption._SAME_SIGNAL", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the process ended"))
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGINT, signal.SIGINT)))
    assert exit_.value.code == 1  # as Lightning ends a run after KeyboardInterrupt
    assert stored(tmp_path / "last.ckpt") == 3
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_second_ctrl_c_while_an_interactive_run_closes_changes_nothing(interrupt, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning_rl.checkpointing.interruption._SAME_SIGNAL", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the process ended"))
    monkeypatch.setattr(RolloutDataModule, "on_exception", lambda self, error: send(signal.SIGINT)())
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGINT)))
    assert exit_.value.code == 130
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_second_signal_kills_the_other_ranks_where_there_is_no_sigkill(tmp_path, monkeypatch):
    class OnWindows(Callback):
        killed: tuple[int, ...] = ()

        def kill(self, signum: int) -> None:
            self.killed += (signum,)

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            with monkeypatch.context() as patch:
                patch.delattr(signal, "SIGKILL")
                patch.setattr(os, "_exit", sys.exit)
                patch.setattr(type(trainer.strategy), "launcher", self)
                patch.setattr("lightning_rl.checkpointing.interruption._SAME_SIGNAL", -1.0)
                send(signal.SIGTERM, signal.SIGTERM)()

    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, windows := OnWindows())
    assert (exit_.value.code, windows.killed) == (143, (signal.SIGTERM,))


def test_checkpoints_due_in_last_rollout_are_saved(interrupt, tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, EnvStepCheckpoint(5 * 32, tmp_path), *interrupt("update", send(signal.SIGTERM)))
    assert stored(tmp_path / "step=160.ckpt") == 5


def test_interrupted_run_without_last_checkpoint_saves_beside_model_checkpoint(interrupt, whole, tmp_path):
    own = ModelCheckpoint(tmp_path / "own", monitor="val/episode_return", mode="max")
    with pytest.raises(SystemExit):
        run(tmp_path, own, *interrupt("update", send(signal.SIGTERM)), last=False)
    interrupt.over()
    assert stored(tmp_path / "own/interrupted.ckpt") == INTERRUPTED_IN + 1
    assert run(tmp_path, ckpt_path=str(tmp_path / "own/interrupted.ckpt")).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_stop_waits_for_due_validation_and_early_stopping(interrupt, tmp_path):
    """Early stopping counts validations; a skipped one would move the end of the run."""

    def stopping() -> list[Callback]:
        # No return improves by this much, so the second validation stops the run.
        stop = EarlyStopping("val/episode_return", min_delta=1000, mode="max", patience=1)
        return [EnvStepValidation(2 * 32), stop]

    whole = run(tmp_path / "whole", *stopping())
    assert whole.policy_version == 4 < ROLLOUTS
    for rollout in range(whole.policy_version):
        folder = tmp_path / str(rollout)
        interruption = interrupt("update", send(signal.SIGTERM), rollout)
        with contextlib.suppress(SystemExit):
            run(folder, *stopping(), *interruption)
        interrupt.over()
        if stored(folder / "last.ckpt") < whole.policy_version:
            resumed = run(folder, *stopping(), ckpt_path=str(folder / "last.ckpt"))
            assert resumed.policy_version == whole.policy_version
        assert differences(*(run_state(path / "last.ckpt") for path in (tmp_path / "whole", folder))) == []


def test_interrupted_run_without_checkpoints_warns_that_nothing_was_saved(interrupt, tmp_path):
    with (
        pytest.warns(UserWarning, match="nothing was saved: the Trainer saves no checkpoints"),
        pytest.raises(SystemExit),
    ):
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)), last=False)


def test_checkpoint_on_exception_counts_as_saved(interrupt, tmp_path, recwarn):
    with pytest.raises(SystemExit):
        run(tmp_path, OnExceptionCheckpoint(tmp_path), *interrupt("update", send(signal.SIGTERM)), last=False)
    assert (tmp_path / "on_exception.ckpt").exists()
    assert not [warning for warning in recwarn if "nothing was saved" in str(warning.message)]


def test_program_signal_handler_is_kept(interrupt, tmp_path):
    received = []
    signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    assert run(tmp_path, *interrupt("update", send(signal.SIGINT))).policy_version == ROLLOUTS
    assert received == [signal.SIGINT]


def test_fit_outside_main_thread_handles_no_signals(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(run(tmp_path).policy_version))
    thread.start()
    thread.join()
    assert done == [ROLLOUTS]


# ---------------------------------------------------------------------- exceptions


def fail() -> None:
    raise ArithmeticError("in the middle")


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("place", ["collection", "update"])
def test_exception_during_rollout_or_update_is_not_saved(place, save_last, interrupt, tmp_path):
    asked = ModelCheckpoint(tmp_path / "asked", save_last=save_last, save_on_exception=True, monitor=None)
    with (
        pytest.warns(UserWarning, match="ModelCheckpoint: nothing .* in the middle of a rollout or its update"),
        pytest.raises(Exception, match="in the middle"),
    ):
        run(tmp_path, asked, *interrupt(place, fail))
    assert stored(tmp_path / "last.ckpt") == stored(tmp_path / "asked/last.ckpt") == 3
    assert sorted(path.name for path in (tmp_path / "asked").iterdir()) == ["epoch=0-step=96.ckpt", "last.ckpt"]


def test_exception_between_rollouts_is_saved(interrupt, whole, tmp_path):
    asked = ModelCheckpoint(tmp_path / "asked", filename="asked", save_on_exception=True, every_n_epochs=100)

    class After(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
            if pl_module.policy_version == 4:
                fail()

    with pytest.raises(ArithmeticError):
        run(tmp_path, asked, After())
    (saved,) = (tmp_path / "asked").iterdir()
    assert stored(saved) == 4
    run(tmp_path, ckpt_path=str(saved))
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


class FailAt(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise ArithmeticError


@pytest.mark.parametrize("same_trainer", [True, False])
def test_save_on_exception_works_again_in_the_next_fit(same_trainer, tmp_path):
    savers = [OnExceptionCheckpoint(tmp_path), ModelCheckpoint(tmp_path, "model", save_on_exception=True)]
    data = make_data()
    model = make_model(data)
    trainer = make_trainer(callbacks=[*savers, FailAt("on_train_batch_start")], enable_checkpointing=True)
    with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="nothing was saved"):
        trainer.fit(model, data)
    assert list(tmp_path.iterdir()) == []
    between = FailAt("on_train_batch_end")
    if same_trainer:
        trainer.callbacks = [between, *(x for x in trainer.callbacks if not isinstance(x, FailAt))]
    else:
        trainer = make_trainer(callbacks=[between, *savers], enable_checkpointing=True)
    with pytest.raises(ArithmeticError):
        trainer.fit(model, data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.ckpt", "on_exception.ckpt"]


@pytest.mark.parametrize("kind", ["exception", "signal"])
def test_checkpoint_on_exception_needs_all_ranks(kind, tmp_path):
    """One of two ranks that saved alone would wait for the other one forever."""
    guard, asked = InterruptionGuard(), OnExceptionCheckpoint(tmp_path)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, callbacks=[asked, guard])
    data = RolloutDataModule("CartPole-v1", num_envs=1, rollout_length=8)
    trainer.strategy.connect(PPO(data.observation_space, data.action_space))
    if kind == "signal":  # of which all ranks know
        guard._stopping = [signal.SIGTERM]
        with pytest.raises(SystemExit):
            guard.on_train_epoch_start(trainer, trainer.lightning_module)
        guard.on_exception(trainer, trainer.lightning_module, SystemExit())
        assert asked.on_exception.__func__ is OnExceptionCheckpoint.on_exception
        return
    with pytest.warns(UserWarning, match="nothing was saved, because ArithmeticError ended this rank"):
        guard.on_exception(trainer, trainer.lightning_module, ArithmeticError())
    asked.on_exception(trainer, trainer.lightning_module, ArithmeticError())
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_on_exception_leaves_the_error_and_the_signals_alone(interrupt, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with (
        pytest.warns(UserWarning, match="OnExceptionCheckpoint: nothing was saved, because ArithmeticError"),
        pytest.raises(ArithmeticError, match="in the middle"),
    ):
        run(tmp_path, OnExceptionCheckpoint(tmp_path / "failed"), *interrupt("update", fail))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "failed").exists()


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_saving_during_rollout_or_update_raises(hook, tmp_path):
    class Saves(Callback):
        pass

    def save(self: Callback, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "half.ckpt")

    setattr(Saves, hook, save)
    with pytest.raises(RuntimeError, match="in the middle of a rollout or its update"):
        run(tmp_path, Saves())
    assert not (tmp_path / "half.ckpt").exists()


# ---------------------------------------------------------------------- SLURM


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Set the variables of a job with one task, and an `scontrol` that records its arguments."""
    values = {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "17", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    calls = tmp_path / "scontrol.calls"
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize("place", ["collection", "update"])
def test_slurm_requeues_after_update_and_job_resumes(place, slurm, interrupt, whole, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt(place, send(signal.SIGUSR1)))
    assert exit_.value.code == 128 + signal.SIGUSR1
    assert slurm.read_text() == "requeue 17\n"
    assert stored(tmp_path / "hpc_ckpt_1.ckpt") == stored(tmp_path / "last.ckpt") == 5
    interrupt.over()
    assert run(tmp_path).policy_version == ROLLOUTS  # no ckpt_path: Lightning finds the checkpoint of the job
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_slurm_requeues_if_sigterm_arrives_before_end_of_update(slurm, interrupt, tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, *interrupt("update", send(signal.SIGUSR1, signal.SIGTERM)))
    assert slurm.read_text() == "requeue 17\n"
    assert stored(tmp_path / "hpc_ckpt_1.ckpt") == 5


def test_sigterm_alone_does_not_requeue(slurm, interrupt, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)))
    assert exit_.value.code == 143
    assert not slurm.exists()
    assert stored(tmp_path / "last.ckpt") == 5


@pytest.mark.filterwarnings("default:The Trainer has no checkpoint callback")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"fast_dev_run": True}, 0),
        ({"callbacks": [ModelCheckpoint()], "enable_checkpointing": True}, 0),
        ({"callbacks": [EnvStepCheckpoint(64)], "enable_checkpointing": True}, 0),
        ({"callbacks": [LastCheckpoint()], "enable_checkpointing": True}, 0),
    ],
)
def test_a_run_without_checkpoints_warns_once(options: dict[str, Any], expected: int, in_tmp_path: Path) -> None:
    data = make_data(rollout_length=8, rollouts_per_epoch=2)
    trainer = make_trainer(max_epochs=2, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(make_model(data), data)
        trainer.validate(make_model(data), data, verbose=False)
    messages = [str(warning.message) for warning in found]
    assert sum("no checkpoint callback: a run that is interrupted cannot be resumed" in x for x in messages) == expected
