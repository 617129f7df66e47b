"""A run that is stopped by a signal, wherever that comes, ends between two rollouts and goes on bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_rl import PPO, EnvStepCheckpoint, EnvStepValidation, LastCheckpoint, RolloutDataModule
from lightning_rl.checkpointing.interruption import InterruptionGuard, early_termination
from tests.checkpointing.test_resume import differences, run_state
from tests.helpers import make_data, make_model, make_trainer

ROLLOUTS = 6
INTERRUPTED_IN = 4  # counted from 0; the second of the second epoch


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a program that was started in a terminal, whatever the tests were started from."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Interrupts(gymnasium.Wrapper):
    """Does something at one step, counted over all of them."""

    at: int | None = None
    what: Any = None
    steps = 0

    def step(self, action: Any):
        Interrupts.steps += 1
        if Interrupts.steps == self.at:
            Interrupts.what()
        return super().step(action)


class PPOInterrupted(PPO):
    """Does something in the middle of the update from one rollout."""

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
    """Does something while the policy is validated after one rollout."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what = at, what

    def on_validation_batch_start(self, trainer: Trainer, pl_module: PPO, *_: Any) -> None:
        if pl_module.policy_version == self.at:
            self.what()


def run(folder: Path, *callbacks: Callback, ckpt_path: str | None = None, last: bool = True) -> PPOInterrupted:
    """Three rollouts to an epoch, two epochs."""
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
        enable_checkpointing=last or any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    ).fit(model, data, ckpt_path=ckpt_path)
    return model


def send(*signums: int) -> Any:
    def what() -> None:
        for signum in signums:
            os.kill(os.getpid(), signum)

    return what


@pytest.fixture
def interrupt(monkeypatch):
    """Set what happens at one place, and return the callbacks that a run needs for it."""

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
def test_the_first_signal_stops_after_the_update_and_the_resumed_run_is_exact(
    place, done, signum, interrupt, whole, tmp_path, capfd, caplog
):
    with pytest.raises(SystemExit) as exit_, caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run(tmp_path, *interrupt(place, send(signum)))
    assert f"Stopped by a signal. Resume from {tmp_path}/last.ckpt" in caplog.messages
    assert exit_.value.code == 128 + signum
    assert f"{signal.Signals(signum).name}: stopping after the update from this rollout" in capfd.readouterr().err
    assert stored(tmp_path / "last.ckpt") == done
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    interrupt.over()
    assert run(tmp_path, ckpt_path=str(tmp_path / "last.ckpt")).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_a_stop_in_an_epochs_last_rollout_neither_adds_nor_drops_an_epoch(interrupt, whole, tmp_path):
    best = ModelCheckpoint(tmp_path, "best", monitor="val/episode_return", mode="max")
    with pytest.raises(SystemExit):
        run(tmp_path, best, *interrupt("update", send(signal.SIGTERM), 2))
    assert stored(tmp_path / "last.ckpt") == stored(tmp_path / "best.ckpt") == 3
    interrupt.over()
    resumed = run(tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.policy_version == ROLLOUTS
    assert differences(resumed.state_dict(), whole["state_dict"]) == []


def test_a_signal_in_the_last_rollout_of_all_lets_the_run_end(interrupt, whole, tmp_path):
    assert run(tmp_path, *interrupt("update", send(signal.SIGTERM), ROLLOUTS - 1)).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_a_signal_in_the_moment_before_training_stops_after_the_first_rollout(tmp_path, capfd):
    """When Lightning has noted it: where an epoch has one rollout, that ended the run unsaved and with status 0."""

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


def test_early_termination_leaves_handlers_of_the_program_alone_and_gives_the_signal_back():
    with early_termination() as handler:
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(SystemExit) as exit_:
            send(signal.SIGTERM)()
        assert exit_.value.code == 143
        send(signal.SIGTERM)()  # `timeout` sends it twice at once, which is one
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with early_termination() as handler:
        assert handler is None and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_signal_that_comes_twice_at_once_is_one(interrupt, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGTERM, signal.SIGTERM)))
    assert exit_.value.code == 143
    assert stored(tmp_path / "last.ckpt") == INTERRUPTED_IN + 1


def test_checkpoints_that_are_due_with_the_last_rollout_are_saved(interrupt, tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, EnvStepCheckpoint(5 * 32, tmp_path), *interrupt("update", send(signal.SIGTERM)))
    assert stored(tmp_path / "step=160.ckpt") == 5


def test_without_a_last_checkpoint_it_is_saved_beside_the_others(interrupt, whole, tmp_path):
    own = ModelCheckpoint(tmp_path / "own", monitor="val/episode_return", mode="max")
    with pytest.raises(SystemExit):
        run(tmp_path, own, *interrupt("update", send(signal.SIGTERM)), last=False)
    interrupt.over()
    assert stored(tmp_path / "own/interrupted.ckpt") == INTERRUPTED_IN + 1
    assert run(tmp_path, ckpt_path=str(tmp_path / "own/interrupted.ckpt")).policy_version == ROLLOUTS
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_a_stop_with_a_validation_that_is_due_comes_after_it_and_changes_no_decision(interrupt, tmp_path):
    """Early stopping counts validations: one that was left out would move the end of the run."""

    def stopping() -> list[Callback]:
        # No return is better by so much: the second validation ends the run.
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


def test_without_any_checkpoints_it_is_said_that_nothing_was_saved(interrupt, tmp_path):
    with (
        pytest.warns(UserWarning, match="nothing was saved: the Trainer saves no checkpoints"),
        pytest.raises(SystemExit),
    ):
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)), last=False)


def test_a_handler_of_the_program_itself_is_left_alone(interrupt, tmp_path):
    received = []
    signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    assert run(tmp_path, *interrupt("update", send(signal.SIGINT))).policy_version == ROLLOUTS
    assert received == [signal.SIGINT]


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
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
def test_an_exception_within_a_rollout_or_its_update_is_not_saved(place, save_last, interrupt, tmp_path):
    asked = ModelCheckpoint(tmp_path / "asked", save_last=save_last, save_on_exception=True, monitor=None)
    with (
        pytest.warns(UserWarning, match="save_on_exception: .* in the middle of a rollout or its update"),
        pytest.raises(Exception, match="in the middle"),
    ):
        run(tmp_path, asked, *interrupt(place, fail))
    assert stored(tmp_path / "last.ckpt") == stored(tmp_path / "asked/last.ckpt") == 3
    assert sorted(path.name for path in (tmp_path / "asked").iterdir()) == ["epoch=0-step=96.ckpt", "last.ckpt"]


def test_an_exception_between_two_rollouts_is_saved(interrupt, whole, tmp_path):
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


def test_save_on_exception_works_again_in_the_next_fit(tmp_path):
    guard, asked = InterruptionGuard(), ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[asked, guard], enable_progress_bar=False)
    data = RolloutDataModule("CartPole-v1", num_envs=1, rollout_length=8)
    model = PPO(data.observation_space, data.action_space)
    model.updating = True
    trainer.strategy.connect(model)
    with pytest.warns(UserWarning, match="nothing was saved"):
        guard.on_exception(trainer, model, ArithmeticError())
    assert not asked.save_on_exception
    guard.setup(trainer, model, "fit")
    assert asked.save_on_exception


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_saving_within_a_rollout_or_its_update_is_refused(hook, tmp_path):
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
    """The variables of a job of one task, and an `scontrol` that writes down what it is asked for."""
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
def test_slurm_requeues_after_the_update_and_the_job_goes_on_by_itself(place, slurm, interrupt, whole, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt(place, send(signal.SIGUSR1)))
    assert exit_.value.code == 128 + signal.SIGUSR1
    assert slurm.read_text() == "requeue 17\n"
    assert stored(tmp_path / "hpc_ckpt_1.ckpt") == stored(tmp_path / "last.ckpt") == 5
    interrupt.over()
    assert run(tmp_path).policy_version == ROLLOUTS  # no ckpt_path: Lightning finds the checkpoint of the job
    assert differences(run_state(tmp_path / "last.ckpt"), whole) == []


def test_slurm_may_send_sigterm_before_the_update_is_over(slurm, interrupt, tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, *interrupt("update", send(signal.SIGUSR1, signal.SIGTERM)))
    assert slurm.read_text() == "requeue 17\n"
    assert stored(tmp_path / "hpc_ckpt_1.ckpt") == 5


def test_sigterm_alone_requeues_nothing(slurm, interrupt, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *interrupt("update", send(signal.SIGTERM)))
    assert exit_.value.code == 143
    assert not slurm.exists()
    assert stored(tmp_path / "last.ckpt") == 5
