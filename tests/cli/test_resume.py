"""`--ckpt_path last`, typed in a new process, goes on with the run: clock, schedule, optimiser, folder, log."""

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rl import validation
from lightning_rl.checkpointing.run_folders import configurations
from lightning_rl.cli.main import main
from lightning_rl.tools.trained import config_of
from tests import programs
from tests.cli.test_main import CARTPOLE, SMALL, unexpected
from tests.helpers import flip_a_bit

RUN = Path("runs/ppo/CartPole-v1/version_0")


@pytest.fixture(autouse=True)
def as_typed(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    return in_tmp_path


def logged(key: str, folder: Path = RUN) -> list[tuple[int, float]]:
    """Environment step and value of every event, over all files of a folder, as TensorBoard shows them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def stored(name: str = "last", folder: Path = RUN) -> dict:
    return torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_shipped_configuration_goes_on_in_a_new_process():
    def fit(*arguments: str) -> str:
        small = ["--data.num_envs=8", "--data.rollout_length=32", "--data.rollouts_per_epoch=5"]
        small += [
            "--data.evaluation.episodes=2",
            "--model.num_minibatches=1",
            "--model.num_epochs=20",
            "--num_threads=1",
        ]
        small += ["--model.learning_rate=1e-3", "--model.optimizer.anneal=true", "--trainer.log_every_n_steps=1"]
        done = programs.run("-m", "lightning_rl", "fit", "--config", CARTPOLE, *small, *arguments)
        assert done.returncode == 0, done.stderr
        assert unexpected(done.stderr) == []
        return done.stdout

    # A job script starts and restarts a run by the same line. A rollout is 256 steps: the first part is 12 of them.
    first = fit("--max_env_steps=3000", "--ckpt_path=last")
    missing = "ckpt_path='last': there is no last checkpoint under runs/ppo/CartPole-v1"
    assert f"WARNING: {missing}: starting a NEW run." in first
    assert "Done: 3072 environment steps" in first
    assert stored()["lightning_rl"]["env_steps"] == 3072

    second = fit("--max_env_steps=6000", "--ckpt_path=last")
    assert f"Resuming from {RUN}/checkpoints/last.ckpt, at 3072 environment steps\n" in second
    assert "Done: 6144 environment steps" in second
    assert [path.name for path in RUN.parent.iterdir()] == ["version_0"]

    last = stored()
    assert (last["lightning_rl"]["env_steps"], last["lightning_rl"]["policy_version"]) == (6144, 24)
    assert {int(state["step"]) for state in last["optimizer_states"][0]["state"].values()} == {24 * 20}

    assert len(list(RUN.glob("events.out.tfevents.*"))) == 2
    steps, rates = zip(*logged("train/learning_rate"), strict=True)
    assert list(steps) == [256 * n for n in range(1, 25)]
    planned = [3000] * 12 + [6000] * 12
    assert rates == pytest.approx([1e-3 * (1 - 256 * n / planned[n]) for n in range(24)], rel=1e-6)
    # Validated after each epoch, and when training stops: an epoch that the limit cuts short is done with.
    expected = [1280, 2560, 3072, 3072 + 1280, 3072 + 2560, 6144]
    assert [step for step, _ in logged("val/episode_return")] == expected


def test_a_log_that_went_on_after_the_last_checkpoint_is_not_kept_twice():
    main(["fit", *SMALL, "--trainer.log_every_n_steps=1", "--max_env_steps=160"])
    main(["fit", *SMALL, "--trainer.log_every_n_steps=1", "--max_env_steps=224", "--ckpt_path=last"])
    before = logged("train/entropy")
    assert [step for step, _ in before] == list(range(32, 225, 32))
    # As if the machine had failed after a checkpoint at 160: the run goes on from there once more.
    checkpoint = stored()
    for path in (RUN / "checkpoints").iterdir():
        path.unlink()
    checkpoint["lightning_rl"]["env_steps"] = 160
    torch.save(checkpoint, RUN / "checkpoints/last.ckpt")
    main(["fit", *SMALL, "--trainer.log_every_n_steps=1", "--max_env_steps=224", "--ckpt_path=last"])
    after = logged("train/entropy")
    assert [step for step, _ in after] == list(range(32, 225, 32))
    assert after[:5] == before[:5]
    assert after[5:] != before[5:]


def test_a_run_that_has_not_ended_is_not_taken_over(capsys, monkeypatch):
    cli = main(["fit", *SMALL, "--max_env_steps=64"])
    before = files(RUN)
    code = (
        "import sys, time; from pathlib import Path; from lightning_rl.checkpointing.run_folders import RunLock\n"
        f"RunLock().acquire(Path({str(cli.run_dir)!r})); print('taken', flush=True); time.sleep(60)"
    )
    other = programs.Program("-c", code)
    try:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *SMALL, "--max_env_steps=128", "--ckpt_path=last"])
    finally:
        other.kill()
        other.wait()
    assert exit_.value.code == 1
    assert f"another process is still training the run in {RUN}" in capsys.readouterr().err
    assert files(RUN) == before
    assert main(["fit", *SMALL, "--max_env_steps=128", "--ckpt_path=last"]).model.env_steps == 128


def test_a_run_folder_that_can_no_longer_be_written_is_named(capsys, monkeypatch):
    main(["fit", *SMALL, "--max_env_steps=64"])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(validation.tempfile, "TemporaryFile", refuse)  # root may write into any folder
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *SMALL, "--max_env_steps=128", "--ckpt_path=last"])
    assert exit_.value.code == 1
    expected = "is not valid: expected a folder that can be written: Read-only file system"
    assert f"run folder='{RUN}' {expected}" in capsys.readouterr().err


def test_going_on_from_an_older_checkpoint_begins_a_new_folder(capsys, recwarn):
    every = ["--trainer.callbacks+=EnvStepCheckpoint", "--trainer.callbacks.every_n_env_steps=32"]
    main(["fit", *SMALL, *every, "--max_env_steps=128"])
    recwarn.clear()
    before = files(RUN)
    cli = main(["fit", *SMALL, *every, "--max_env_steps=160", f"--ckpt_path={RUN}/checkpoints/step=64.ckpt"])
    assert "at 64 environment steps in a NEW run folder" in capsys.readouterr().out
    assert cli.run_dir == RUN.parent / "version_1"
    assert cli.model.env_steps == 160
    assert files(RUN) == before
    names = sorted(path.name for path in (cli.run_dir / "checkpoints").iterdir())
    assert names == ["best-step=128.ckpt", "last.ckpt", "step=128.ckpt", "step=160.ckpt", "step=96.ckpt"]
    assert [str(warning.message) for warning in recwarn] == []


def test_a_run_of_another_algorithm_or_environment_is_not_gone_on_with(capsys):
    """Though networks and spaces are the same; what may begin with its parameters is a new run."""
    other = [argument for argument in SMALL if not argument.startswith(("--model", "--data.env_id"))]
    network = ["--model.policy.hidden_sizes=[8]"]
    main(["fit", *SMALL, "--max_env_steps=64"])
    before = files(Path("runs"))
    for arguments, message in (
        (
            ["--data.env_id=CartPole-v1", "--model=A2C"],
            "ckpt_path names a checkpoint of PPO: expected one of A2C, to resume its optimizer and clock; init_from",
        ),
        (
            ["--data.env_id=CartPole-v0", "--model=PPO", "--model.num_minibatches=2"],
            "env_id='CartPole-v0' does not fit the checkpoint: expected 'CartPole-v1', which it was trained in",
        ),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *other, *arguments, *network, f"--ckpt_path={RUN}/checkpoints/last.ckpt"])
        assert exit_.value.code == 1
        assert f"lightning-rl: error: {message}" in capsys.readouterr().err
        assert files(Path("runs")) == before
    cli = main(
        [
            "test",
            *other,
            "--data.env_id=CartPole-v0",
            "--model=A2C",
            *network,
            f"--ckpt_path={RUN}/checkpoints/last.ckpt",
        ]
    )
    assert cli.model.env_steps == 64  # the policy can be looked at anywhere that it fits


def test_last_falls_back_to_the_newest_intact_checkpoint_and_leaves_the_damaged_one_alone(capfd):
    every = ["--trainer.callbacks+=EnvStepCheckpoint", "--trainer.callbacks.every_n_env_steps=32"]
    main(["fit", *SMALL, *every, "--trainer.limit_val_batches=0", "--max_env_steps=160"])
    for name in ("last", "step=160"):
        flip_a_bit(RUN / f"checkpoints/{name}.ckpt", "data/0")
    before, newest = files(RUN), f"{RUN}/checkpoints/step=128.ckpt"
    with pytest.warns(UserWarning, match=f"last.ckpt' is damaged .*; using '{newest}' instead, the last intact che"):
        cli = main(["fit", *SMALL, "--max_env_steps=192", "--ckpt_path=last"])
    assert f"Resuming from {newest}, at 128 environment steps in a NEW run folder\n" in capfd.readouterr().out
    assert (cli.run_dir, cli.model.env_steps) == (RUN.parent / "version_1", 192)
    assert files(RUN) == before


def test_a_damaged_checkpoint_is_one_error_that_names_the_file(capsys):
    main(["fit", *SMALL, "--max_env_steps=64"])
    best = RUN / "checkpoints/best-step=64.ckpt"
    for path in (best, RUN / "checkpoints/last.ckpt"):
        flip_a_bit(path, "data/0")
    before = files(Path("runs"))
    for command, option, path in (
        ("fit", f"ckpt_path={best}", best),
        ("test", "ckpt_path=best", RUN / "checkpoints/last.ckpt"),  # which says what is best
        ("predict", "ckpt_path=last", RUN / "checkpoints/last.ckpt"),
        ("fit", f"init_from={best}", best),
    ):
        with pytest.raises(SystemExit) as exit_:
            main([command, *SMALL, f"--{option}"])
        assert exit_.value.code == 1
        field = option.partition("=")[0]
        (message,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert message.startswith(f"lightning-rl: error: {field}='{path}' is damaged or another kind of file (Bad CRC")
        assert files(Path("runs")) == before
    with pytest.raises(SystemExit) as exit_:
        main(["export", f"--ckpt_path={best}"])
    assert exit_.value.code == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"lightning-rl: error: ckpt_path='{best}' is damaged or another kind of file (Bad CRC")


def test_what_a_checkpoint_holds_is_read_once(monkeypatch):
    main(["fit", *SMALL, "--max_env_steps=64"])
    whole = []
    load = torch.load

    def counted(*args, **kwargs):
        whole.append(not kwargs.get("mmap"))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", counted)
    main(["fit", *SMALL, "--max_env_steps=128", "--ckpt_path=last"])
    assert sum(whole) == 1  # other looks leave the tensors on the disk


def test_the_learning_rate_of_the_command_line_wins_over_that_of_the_checkpoint():
    main(["fit", *SMALL, "--model.learning_rate=1e-3", "--max_env_steps=64"])
    changed = ["--model.learning_rate=5e-4", "--resume_changes=allow"]
    cli = main(["fit", *SMALL, *changed, "--max_env_steps=128", "--ckpt_path=last"])
    assert cli.model.hparams["learning_rate"] == 5e-4
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 5e-4
    group = stored()["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], group["eps"]) == (5e-4, 1e-5)


def test_other_settings_of_a_resumed_run_need_to_be_confirmed(capsys):
    main(["fit", *SMALL, "--max_env_steps=64"])
    before = files(Path("runs"))
    changed = ["--model.gamma=0.9", "--data.num_envs=4", "--max_env_steps=128", "--ckpt_path=last"]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *SMALL, *changed])
    assert exit_.value.code == 1
    *_, message, first, second, without, allowed = capsys.readouterr().err.splitlines()
    assert message == "lightning-rl: error: ckpt_path: the settings differ from the last start of the run:"
    assert {first, second} == {"  model.init_args.gamma: 0.99 -> 0.9", "  data.num_envs: 2 -> 4"}
    command = f"lightning-rl fit --config {RUN}/config.yaml --ckpt_path {RUN}/checkpoints/last.ckpt --max_env_steps 128"
    assert without == f"  without the changes: {command}"
    given = shlex.join(["fit", *SMALL, *changed, "--resume_changes", "allow"])
    assert allowed == f"  with the changes: lightning-rl {given}"
    assert files(Path("runs")) == before
    main(["fit", *SMALL, *changed, "--resume_changes=allow"])
    assert stored()["lightning_rl"]["env_steps"] == 128


def test_a_resumed_run_says_that_another_seed_starts_no_other_run(capsys):
    for seed, said in ((3, False), (4, True), (3, False)):
        main(["fit", *SMALL, "--max_env_steps=64", f"--seed_everything={seed}", "--ckpt_path=last"])
        assert ("Resuming with seed_everything=3 of the run, not 4" in capsys.readouterr().out) is said
    main(["fit", *SMALL, "--max_env_steps=96", "--seed_everything=4", "--ckpt_path=last"])
    configurations = [yaml.safe_load(path.read_text()) for path in sorted(RUN.glob("config*.yaml"))]
    kept = [(one["max_env_steps"], one["seed_everything"]) for one in configurations]
    assert kept == [(96, 3), (64, 3)], "the newest configuration repeats the run too"


def test_each_start_keeps_its_configuration_and_plot_says_that_a_run_changed(capsys):
    first = ["fit", *SMALL, "--max_env_steps=64"]
    main(first)
    kept = (RUN / "config.yaml").read_bytes()
    main([*first, "--ckpt_path=last"])  # the same once more
    main([*first, "--max_env_steps=128", "--ckpt_path=last"])
    resumed = ["--max_env_steps=192", "--ckpt_path=last", "--resume_changes=allow"]
    main([*first, "--model.gamma=0.9", *resumed])
    assert "--config runs/ppo/CartPole-v1/version_0/config-3.yaml --ckpt_path" in capsys.readouterr().out
    assert sorted(path.name for path in RUN.glob("config*.yaml")) == ["config-2.yaml", "config-3.yaml", "config.yaml"]
    assert (RUN / "config.yaml").read_bytes() == kept
    settings = [yaml.safe_load(path.read_text()) for path in configurations(RUN)]
    assert [(x["max_env_steps"], x["model"]["init_args"]["gamma"]) for x in settings] == [
        (64, 0.99),
        (128, 0.99),
        (192, 0.9),
    ]
    assert {(x["ckpt_path"], x["resume_changes"]) for x in settings} == {(None, "refuse")}
    assert config_of(RUN / "checkpoints/last.ckpt") == (RUN / "config-3.yaml").absolute()
    pytest.importorskip("matplotlib")
    main(["plot", str(RUN), "--metric=train/entropy"])
    warning = f"WARNING: {RUN}: resumed with other settings: model.init_args.gamma: 0.99 -> 0.9"
    assert capsys.readouterr().err.splitlines() == [warning]


# The kernel fails writes beyond this size, as if the disk were full.
LIMITED = (
    "import resource\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    "from lightning_rl.__main__ import run\n"
    "run()\n"
)


def test_configuration_that_does_not_fit_on_the_disk_is_one_error_and_the_run_still_resumes():
    line = ["fit", *SMALL, "--trainer.logger=false"]
    main([*line, "--max_env_steps=64"])
    more = ["--max_env_steps=96", "--ckpt_path=last"]
    failed = programs.run("-c", LIMITED, *line, *more)
    assert failed.returncode == 1
    expected = f"lightning-rl: error: '{RUN}/config-2.yaml' could not be written: File too large"
    assert [text for text in failed.stderr.splitlines() if "error" in text.lower()] == [expected]
    assert main([*line, *more]).model.env_steps == 96


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_checkpoint_without_a_configuration_names_the_one_of_its_run(capsys, command):
    main(["fit", *SMALL, "--max_env_steps=32"])
    with pytest.raises(SystemExit):
        main([command, f"--ckpt_path={RUN}/checkpoints/last.ckpt"])
    assert (
        f"model and data.env_id required: expected for example --config {RUN}/config.yaml\n" in capsys.readouterr().err
    )


def test_a_run_goes_on_from_its_saved_configuration_alone():
    main(["fit", *SMALL, "--max_env_steps=64"])
    main(["fit", "--config", f"{RUN}/config.yaml", "--max_env_steps=128", "--ckpt_path=last"])
    assert stored()["lightning_rl"]["env_steps"] == 128
    # The saved configuration does not go on by itself: it begins a run of its own.
    cli = main(["fit", "--config", f"{RUN}/config-2.yaml"])
    assert cli.run_dir == RUN.parent / "version_1"
    assert cli.model.env_steps == 128


def test_saved_configurations_are_read_alike_in_every_encoding(capsys):
    main(["fit", *SMALL, "--max_env_steps=64", "--trainer.default_root_dir=Läufe"])
    config = Path("Läufe/version_0/config.yaml")
    assert config.read_bytes().isascii() and config.read_text().startswith("# lightning==")
    assert yaml.safe_load(config.read_text())["trainer"]["default_root_dir"] == "Läufe"
    cli = main(["fit", "--config", str(config), "--max_env_steps=128", "--ckpt_path=last"])
    assert (cli.run_dir, cli.model.env_steps) == (config.parent, 128)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["fit", *SMALL, "--trainer.default_root_dir=Läufe", "--print_config"])
    assert capsys.readouterr().out.isascii()


def test_a_comment_in_the_configuration_of_a_run_is_read_on_a_system_with_another_encoding(monkeypatch):
    main(["fit", *SMALL, "--max_env_steps=64"])
    config = RUN / "config.yaml"
    config.write_text(f"# “größer”\n{config.read_text()}", encoding="utf-8")
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "cp1252")  # as on Windows
    main(["fit", *SMALL, "--max_env_steps=96", "--ckpt_path=last"])
    assert stored()["lightning_rl"]["env_steps"] == 96


def test_an_interrupted_run_says_how_to_go_on():
    Path("interrupt.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Interrupt(Callback):\n"
        "    def on_train_batch_end(self, trainer, module, *_):\n"
        "        if module.env_steps == 96:\n"
        "            raise KeyboardInterrupt\n"
    )
    code = "import sys; from lightning_rl.cli.main import main; main(sys.argv[1:])"
    arguments = ["fit", *SMALL, "--max_env_steps=128", "--trainer.callbacks+=interrupt.Interrupt"]
    done = programs.run("-c", code, *arguments)
    assert done.returncode == 1
    how = f"Continue with: lightning-rl fit --config {RUN}/config.yaml --ckpt_path {RUN}/checkpoints/last.ckpt"
    assert done.stdout.splitlines()[-1] == how
    assert "Traceback" not in done.stderr
    assert stored()["lightning_rl"]["env_steps"] == 64


def test_a_copied_run_keeps_the_score_of_its_best_checkpoint():
    main(["fit", *SMALL, "--max_env_steps=64"])
    (best,) = RUN.glob("checkpoints/best*")
    score = torch.load(best, weights_only=True)["callbacks"]
    copy = Path("elsewhere")
    shutil.copytree(RUN, copy)
    cli = main(["fit", *SMALL, "--max_env_steps=65", f"--ckpt_path={copy}/checkpoints/last.ckpt"])
    saver = cli.trainer.checkpoint_callback
    (state,) = [x for x in score.values() if x.get("monitor") == "val/episode_return"]
    (kept,) = copy.glob("checkpoints/best*")
    assert max(saver.best_k_models.values()) >= state["best_model_score"]
    assert saver.best_model_path == str(kept.resolve())
    assert best.exists()


def test_a_resumed_run_keeps_the_score_of_its_best_checkpoint_with_every_logger():
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=rows", "--trainer.callbacks+=ModelCheckpoint"]
    own += ["--trainer.callbacks.monitor=val/episode_return", "--trainer.callbacks.mode=max"]
    first = main(["fit", *SMALL, *own, "--max_env_steps=64"]).trainer.checkpoint_callback
    shutil.copytree(RUN, "copy")
    saver = main(["fit", *SMALL, *own, "--max_env_steps=64", "--ckpt_path=last"]).trainer.checkpoint_callback
    assert (saver.best_model_score, saver.dirpath) == (first.best_model_score, first.dirpath)
    assert saver.best_model_score is not None
    copied = main(["fit", *SMALL, *own, "--max_env_steps=64", "--ckpt_path=copy/checkpoints/last.ckpt"])
    assert copied.trainer.checkpoint_callback.dirpath == str(Path("copy/checkpoints").resolve()) != first.dirpath


def test_a_run_that_resumes_without_the_dirpath_of_its_best_checkpoint_finds_the_next_best():
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/episode_return"]
    own += ["--trainer.callbacks.mode=max"]
    main(["fit", *SMALL, *own, "--trainer.callbacks.dirpath=elsewhere", "--max_env_steps=64"])
    saver = main(["fit", *SMALL, *own, "--max_env_steps=128", "--ckpt_path=last"]).trainer.checkpoint_callback
    assert Path(saver.dirpath) == (RUN / "checkpoints").resolve() and Path(saver.best_model_path).exists()


def test_resuming_from_a_checkpoint_beside_a_log_starts_a_new_run_folder():
    folder = "--trainer.callbacks.dirpath=rows/lightning_logs/version_0/checkpoints"
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=rows", "--trainer.callbacks+=ModelCheckpoint"]
    own += [folder]
    main(["fit", *SMALL, *own, "--max_env_steps=64"])
    (path,) = Path("rows").rglob("*.ckpt")
    before = files(Path("rows"))
    cli = main(["fit", *SMALL, *own, "--max_env_steps=128", f"--ckpt_path={path}"])
    assert cli.run_dir == RUN.with_name("version_1")
    assert {path: content for path, content in files(Path("rows")).items() if path in before} == before
    assert not (path.parent / "last.ckpt").exists() and (cli.run_dir / "checkpoints/last.ckpt").exists()


def test_a_run_of_windows_is_tested_and_resumed_on_other_systems():
    main(["fit", *SMALL, "--max_env_steps=64"])
    (best,) = RUN.glob("checkpoints/best*")

    def on_windows(x):
        if isinstance(x, dict):
            return {on_windows(key): on_windows(value) for key, value in x.items()}
        is_path = isinstance(x, str) and x.startswith(str(Path.cwd()))
        return x.replace(str(Path.cwd()), "C:").replace("/", "\\") if is_path else x

    for path in RUN.glob("checkpoints/*.ckpt"):
        content = torch.load(path, weights_only=True)
        torch.save(content | {"callbacks": on_windows(content["callbacks"])}, path)
    assert main(["test", *SMALL, "--ckpt_path=best"]).trainer.ckpt_path == str(best)
    saver = main(["fit", *SMALL, "--max_env_steps=65", "--ckpt_path=last"]).trainer.checkpoint_callback
    assert [*saver.best_k_models] == [saver.best_model_path]
    assert saver.best_model_path in [str(path.resolve()) for path in RUN.glob("checkpoints/best*")]
    assert len([*RUN.glob("checkpoints/best*")]) == 1  # a better one replaces it


def test_test_takes_the_best_checkpoint_of_the_newest_run():
    main(["fit", *SMALL, "--max_env_steps=64"])
    main(["fit", *SMALL, "--max_env_steps=96", "--seed_everything=1"])
    cli = main(["test", *SMALL, "--ckpt_path=best"])
    (best,) = Path("runs/ppo/CartPole-v1/version_1/checkpoints").glob("best*")
    assert cli.trainer.ckpt_path == str(best)
