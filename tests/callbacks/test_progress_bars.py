"""The progress bars: what they say, how often, and where they start."""

import errno
import io
import logging
import os
import re
import subprocess
import sys
import time

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl import PPO, EnvStepCheckpoint, EnvStepLimit, RolloutDataModule
from lightning_rl.callbacks import progress_bars
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, EnvStepRichProgressBar
from lightning_rl.cli.main import main

STEPS = 2 * 32  # of one rollout
EPOCH = 4 * STEPS


class Terminal:
    """What has been written to standard output, which says that it is a terminal while `live`."""

    def __init__(self, capsys, monkeypatch):
        self.live = True
        self._capsys, self._text = capsys, ""
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: self.live, raising=False)

    @property
    def text(self):
        """All of it but for colours."""
        self._text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._capsys.readouterr().out)
        return self._text

    @property
    def frames(self):
        """What the lines showed, one time after another."""
        return [frame.rstrip() for frame in re.split(r"[\r\n]+", self.text) if frame.strip()]

    def clear(self):
        self._capsys.readouterr()
        self._text = ""


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A terminal of 120 columns whose bars are drawn after every rollout."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bars, "DRAW_SECONDS", 0.0)
    return Terminal(capsys, monkeypatch)


def rich_bar(live=True, **kwargs):
    console = {"force_terminal": live, "force_interactive": live, "width": 120}
    return EnvStepRichProgressBar(console_kwargs=console | kwargs)


def data():
    return RolloutDataModule("CartPole-v1", 2, 32, 4, evaluation={"episodes": 3}, seed=0)


def model(kind=PPO):
    return kind(
        data().observation_space, data().action_space, num_epochs=1, num_minibatches=1, policy={"hidden_sizes": [8]}
    )


def trainer(*callbacks, **kwargs):
    kwargs = {"max_epochs": 2, "log_every_n_steps": 1} | kwargs
    quiet = {"enable_model_summary": False, "enable_checkpointing": False, "logger": False, "accelerator": "cpu"}
    return Trainer(callbacks=list(callbacks), **(quiet | kwargs))


# ---------------------------------------------------------------------- in a terminal or a file


def test_output_to_a_file_is_one_line_for_a_short_run_with_its_last_returns(capsys):
    run, module = trainer(EnvStepProgressBar(), num_sanity_val_steps=2), model()
    run.fit(module, data())
    shown = [f"{float(run.callback_metrics[f'{stage}/episode_return']):.3g}" for stage in ("rollout", "val")]
    output = capsys.readouterr().out
    assert "\r" not in output
    (only,) = output.splitlines()
    assert re.match(r"Training: 100% 512/512 \[00:\d\d<00:00, +[\d.]+k? env steps/s, ", only)
    assert f"return={shown[0]}" in only and f"val={shown[1]}" in only


class Full(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("output", [None, Full()], ids=["no console", "full disk"])
def test_run_needs_no_output(monkeypatch, output):
    monkeypatch.setattr(sys, "stdout", output)
    trainer(EnvStepProgressBar()).fit(algorithm := model(), data())
    assert algorithm.env_steps == 2 * EPOCH


def test_output_to_a_file_is_bounded_by_percents_however_long_rollouts_take(capsys, monkeypatch):
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bars, "LINE_FRACTION", 0.25)
    trainer(EnvStepProgressBar(), max_epochs=3).fit(model(), data())  # 12 rollouts of 8 % each
    done = [int(text) for text in re.findall(r"^Training: +\d+% (\d+)\.?/768", capsys.readouterr().out, re.M)]
    assert done == [192, 384, 576, 768, 768]  # the last for the end of the run


def test_output_to_a_file_is_bounded_by_percents_though_hours_pass_between_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bars, "LINE_FRACTION", 0.25)
    monkeypatch.setattr(progress_bars.Tqdm, "monitor", None)  # the next bar starts a new thread
    monkeypatch.setattr(progress_bars.Tqdm, "monitor_interval", 0.001)
    monkeypatch.setattr("tqdm._monitor.time", lambda: time.time() + 3600)
    trainer(EnvStepProgressBar(), max_epochs=3).fit(model(), data())
    progress_bars.Tqdm.monitor.exit()
    done = [int(text) for text in re.findall(r"^Training: +\d+% (\d+)\.?/768", capsys.readouterr().out, re.M)]
    assert done == [192, 384, 576, 768, 768]


def test_values_logged_before_the_end_of_an_epoch_are_still_shown_at_the_end_of_the_run(capsys):
    # One epoch of four rollouts, logged at the third; nothing is drawn in between.
    run = trainer(EnvStepProgressBar(), max_epochs=1, log_every_n_steps=3, limit_val_batches=0)
    run.fit(model(), data())
    assert re.search(r", return=[\d.]+\]", capsys.readouterr().out)


def test_bar_counts_environment_steps_of_the_whole_run_and_not_of_an_epoch(terminal):
    bar = EnvStepProgressBar()
    trainer(bar).fit(model(), data())
    shown = [float(n) for n in re.findall(r"([\d.]+)/512", terminal.text)]
    assert shown == sorted(shown)
    assert sorted(set(shown)) == list(range(0, 2 * EPOCH + 1, STEPS))
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (2 * EPOCH, 2 * EPOCH)
    assert terminal.text.count("\n") == 1  # one line, left there at the end
    assert "Epoch" not in terminal.text and "it/s" not in terminal.text


def test_lines_of_the_log_are_below_each_other_and_not_behind_the_bar(terminal):
    handler = logging.StreamHandler(sys.stdout)
    (log := logging.getLogger("lightning.pytorch")).addHandler(handler)
    trainer(EnvStepProgressBar(), Announces()).fit(model(), data())
    log.removeHandler(handler)
    lines = [re.split(r"\r", line)[-1] for line in terminal.text.split("\n")]
    assert [line for line in lines if "updates by" in line] == [
        "PPO updates by the fast engine, with the closed form of its loss"
    ]
    assert lines.count("a rollout has ended") == 8
    assert handler.filters == []


class Announces(Callback):
    def on_train_batch_end(self, *args):
        rank_zero_info("a rollout has ended")


def test_bar_names_validation_and_then_shows_its_return(terminal):
    trainer(EnvStepProgressBar(), max_epochs=1, num_sanity_val_steps=0).fit(model(), data())
    validating = next(i for i, frame in enumerate(terminal.frames) if frame.startswith("Validating: 100%"))
    assert "val=" not in terminal.frames[validating]
    assert re.match(r"Training: 100%\|.*val=[\d.]+", terminal.frames[validating + 1])


def test_bar_of_a_new_run_shows_no_values_of_an_earlier_run(terminal):
    bar = EnvStepProgressBar()
    for _ in range(2):
        terminal.clear()
        trainer(bar, max_epochs=1, num_sanity_val_steps=0).fit(model(), data())
    validating = next(frame for frame in terminal.frames if frame.startswith("Validating: 100%"))
    assert "val=" not in validating


@pytest.mark.parametrize("columns", [200, 60])
def test_frames_fit_into_the_terminal(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer(EnvStepProgressBar()).fit(model(), data())
    longest = max(len(frame) for frame in terminal.frames)
    assert longest < columns
    assert longest == 199 or columns < 200  # where there is room, the bar takes it
    assert "512/512" in terminal.frames[-1]


def test_limit_in_environment_steps_is_the_total_though_the_last_rollout_exceeds_it(terminal):
    trainer(EnvStepProgressBar(), EnvStepLimit(100), max_epochs=-1).fit(model(), data())
    assert re.match(r"Training: 100%\|█+\| 100\.?0?/100", terminal.frames[-1])


def test_resumed_run_starts_at_the_steps_done(terminal, tmp_path):
    first = trainer(max_epochs=1, enable_progress_bar=False)
    first.fit(model(), data())
    first.save_checkpoint(tmp_path / "half.ckpt")
    trainer(EnvStepProgressBar()).fit(model(), data(), ckpt_path=tmp_path / "half.ckpt")
    assert re.match(r"Training:  50%\|.* 256\.?/512", terminal.frames[0])
    done = [float(n) for n in re.findall(r"([\d.]+)/512", terminal.text)]
    assert min(done) == EPOCH and max(done) == 2 * EPOCH


def test_run_without_an_end_has_no_bar_but_counts(terminal):
    run = trainer(EnvStepProgressBar(), max_epochs=-1, max_steps=3, limit_val_batches=0)
    run.fit(model(), data())
    assert re.match(r"Training: 192\.? env steps \[00:\d\d, +[\d.]+k? env steps/s", terminal.frames[-1])
    assert "%" not in terminal.text and "█" not in terminal.text


def test_console_has_a_bar_though_it_is_no_terminal(terminal, monkeypatch):
    terminal.live = False
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    trainer(EnvStepProgressBar(), max_epochs=1).fit(model(), data())
    assert terminal.text.count("\r") > 4 and terminal.text.count("\n") == 1


def test_no_epochs_show_nothing(capsys):
    trainer(EnvStepProgressBar(), max_epochs=0).fit(model(), data())
    assert capsys.readouterr().out == ""


class PPOWithOwnMetric(PPO):
    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        self.log("own/{metric}", 0.5, prog_bar=True)


def test_metrics_that_an_algorithm_puts_on_the_bar_are_shown(terminal):
    trainer(EnvStepProgressBar(), max_epochs=1, limit_val_batches=0).fit(model(PPOWithOwnMetric), data())
    assert "own/{metric}=0.500" in terminal.frames[-1]


class FailingCallback(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("broken")


@pytest.mark.parametrize("live", [False, True])
def test_interrupted_run_shows_how_far_it_came_on_a_line_of_its_own(terminal, live):
    terminal.live = live
    with pytest.raises(RuntimeError, match="broken"):
        trainer(EnvStepProgressBar(), FailingCallback(), max_epochs=1).fit(model(), data())
    assert re.match(r"Training:  50%.* 128\.?/256", terminal.frames[-1])
    assert terminal.text.endswith("\n")


@pytest.mark.parametrize("make", [EnvStepProgressBar, EnvStepRichProgressBar])
@pytest.mark.parametrize("how", ["zero rate", "disabled as on other ranks"])
def test_bar_that_is_off_shows_nothing(capsys, make, how):
    bar = make(refresh_rate=0) if how == "zero rate" else make()
    if how != "zero rate":
        bar.disable()
    run = trainer(bar)
    run.fit(model(), data())
    run.predict(model(), data())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("live", [False, True])
def test_evaluation_says_one_line(terminal, live):
    terminal.live = live
    run = trainer(EnvStepProgressBar())
    for evaluate in (
        lambda: run.validate(model(), data(), verbose=False),
        lambda: run.test(model(), data(), verbose=False),
        lambda: run.predict(model(), data()),
    ):
        terminal.clear()
        evaluate()
        assert terminal.text == "Playing 3 episodes\n"


def test_print_goes_above_the_bar_or_to_the_file(terminal):
    class Printing(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.print("hello", batch_idx)

        def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.print("hello", 4)

    for live in (True, False):
        terminal.live = live
        trainer(EnvStepProgressBar(), Printing(), max_epochs=1).fit(model(), data())
        trainer(EnvStepProgressBar(), Printing()).test(model(), data(), verbose=False)
        assert [frame for frame in terminal.frames if "hello" in frame] == [f"hello {i}" for i in (0, 1, 2, 3, 4)]
        terminal.clear()


# ---------------------------------------------------------------------- Rich


def test_rich_bar_counts_environment_steps_of_the_whole_run_and_shows_returns(terminal):
    bar = rich_bar()
    trainer(bar, EnvStepLimit(500), max_epochs=-1).fit(model(), data())
    last = next(frame for frame in reversed(terminal.frames) if frame.startswith("Env steps"))
    assert re.match(r"Env steps ━+ 512/500 .*return: [\d.]+", last) and "val: " in last
    done = [int(n) for n in re.findall(r" (\d+)/500 ", terminal.text)]
    assert done == sorted(done) and done[-1] == 512


def test_rich_bar_starts_a_resumed_run_at_the_steps_done(terminal, tmp_path):
    first = trainer(max_epochs=1, enable_progress_bar=False)
    first.fit(model(), data())
    first.save_checkpoint(tmp_path / "half.ckpt")
    trainer(rich_bar()).fit(model(), data(), ckpt_path=tmp_path / "half.ckpt")
    done = [int(n) for n in re.findall(r" (\d+)/512 ", terminal.text)]
    assert min(done) == EPOCH and max(done) == 2 * EPOCH


def test_rich_bar_of_a_run_resumed_within_an_epoch_shows_the_whole_run(terminal, tmp_path):
    saver = EnvStepCheckpoint(3 * STEPS, tmp_path, "within")
    trainer(saver, max_epochs=1, enable_progress_bar=False, enable_checkpointing=True).fit(model(), data())
    trainer(rich_bar()).fit(model(), data(), ckpt_path=tmp_path / "within.ckpt")
    done = [int(n) for n in re.findall(r"Env steps ━+ (\d+)/512 ", terminal.text)]
    assert min(done) >= 3 * STEPS and max(done) == 2 * EPOCH and "Epoch" not in terminal.text


def test_rich_bar_of_a_run_without_an_end_only_counts(terminal):
    trainer(rich_bar(), max_epochs=-1, max_steps=3, limit_val_batches=0).fit(model(), data())
    assert re.search(r"Env steps ━+ 192/--", terminal.text)


WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
import lightning_utilities.core.imports as imports
found = imports.RequirementCache.__bool__
imports.RequirementCache.__bool__ = lambda self: "rich" not in str(self.requirement) and found(self)
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, EnvStepRichProgressBar
EnvStepProgressBar()
try:
    EnvStepRichProgressBar()
except ModuleNotFoundError as error:
    print(error)
"""


def test_package_works_without_rich_but_for_the_rich_bar():
    done = subprocess.run([sys.executable, "-c", WITHOUT_RICH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "requires `rich`" in done.stdout


# ---------------------------------------------------------------------- with Lightning's own


def test_trainer_takes_the_bar_in_place_of_its_own():
    for bar in (EnvStepProgressBar(), rich_bar(live=False)):
        assert [c for c in trainer(bar).callbacks if isinstance(c, ProgressBar)] == [bar]


def test_lightnings_own_bar_still_works(capsys):
    run = trainer(TQDMProgressBar(), max_epochs=1)
    run.fit(model(), data())
    assert "Epoch 0: 100%" in capsys.readouterr().out


def test_command_line_keeps_the_bar_of_the_configuration_and_has_the_env_step_bar_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    arguments = [
        "fit",
        "--seed_everything=0",
        "--data.env_id=CartPole-v1",
        "--data.num_envs=2",
        "--data.rollout_length=16",
        "--model=PPO",
        "--max_env_steps=32",
        "--trainer.accelerator=cpu",
    ]
    arguments += [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", "--data.evaluation.episodes=1"]
    for given, expected in (
        ([], EnvStepProgressBar),
        (["--trainer.callbacks=lightning.pytorch.callbacks.TQDMProgressBar"], TQDMProgressBar),
        (["--trainer.callbacks=lightning_rl.callbacks.progress_bars.EnvStepRichProgressBar"], EnvStepRichProgressBar),
    ):
        bars = [c for c in main(arguments + given).trainer.callbacks if isinstance(c, ProgressBar)]
        assert [type(bar) for bar in bars] == [expected]
