"""Learning curves: reading logs, grouping runs, statistics over seeds, and figures."""

import importlib
import json
import re
import sys
import time
from pathlib import Path

import imageio.v3
import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_rl import __main__ as program
from lightning_rl.cli.main import main
from lightning_rl.tools import plots
from lightning_rl.tools.curves import RUN_FOLDER, Series, by_experiment, find_logs, joined, summarize
from lightning_rl.validation import ConfigurationError

RETURN = "rollout/episode_return"


def series(values, steps=None):
    steps = range(10, 10 * len(values) + 1, 10) if steps is None else steps
    return Series(np.array(list(steps), float), np.array(values, float))


def write_run(folder, values, seed=0, env_id="CartPole-v1", first=10, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"seed_everything": seed, "model": {"class_path": "lightning_rl.PPO", "init_args": settings}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"data": {"env_id": env_id, "seed": seed}}))
    writer = SummaryWriter(folder)
    for number, value in enumerate(values):
        writer.add_scalar(RETURN, value, first + 10 * number)
    writer.close()


def test_interquartile_mean_drops_highest_and_lowest_quarter():
    runs = [series([value, 1.0]) for value in (100, 1, 2, -50, 3, 4, 5, 1000)]
    found = summarize(runs, "iqm")
    assert found.steps.tolist() == [10, 20]
    assert found.center.tolist() == [(2 + 3 + 4 + 5) / 4, 1]
    assert summarize(runs, "mean").center[0] == (100 + 1 + 2 - 50 + 3 + 4 + 5 + 1000) / 8
    assert summarize(runs[:3], "iqm").center[0] == (100 + 1 + 2) / 3  # the mean of fewer than four


def test_interval_is_bootstrap_over_runs():
    one = summarize([series([1, 2])])
    assert one.low is None and one.high is None
    same = summarize([series([1, 2])] * 3)
    assert same.low.tolist() == same.high.tolist() == [1, 2]
    # Resamples of two runs have means 0, 0.5 and 1 with probabilities 1/4, 1/2 and 1/4.
    two = summarize([series([0.0]), series([1.0])], confidence=0.95)
    assert (two.low[0], two.center[0], two.high[0]) == (0, 0.5, 1)
    assert summarize([series([0.0]), series([1.0])], confidence=0.4).low[0] == 0.5
    many = summarize([series([value]) for value in np.random.default_rng(1).normal(size=400)], "mean")
    # 1.96 standard errors of a mean of 400.
    assert (many.high[0] - many.low[0]) / 2 == pytest.approx(1.96 / 20, rel=0.1)


def test_runs_with_different_steps_are_interpolated_on_common_range():
    found = summarize([series([0, 10], [0, 10]), series([2, 6, 8], [5, 7, 20])], "mean")
    assert found.steps.tolist() == [5, 7, 10]
    assert found.center.tolist() == [(5 + 2) / 2, (7 + 6) / 2, (10 + 6 + 2 * 3 / 13) / 2]
    assert len(summarize([series(range(3000)), series(range(2999))]).steps) == 400
    with pytest.raises(ConfigurationError, match="environment steps in common"):
        summarize([series([1], [5]), series([1], [6])])
    with pytest.raises(ConfigurationError, match="confidence="):
        summarize([series([1])], confidence=1.5)


def test_runs_that_differ_only_by_seed_are_one_curve(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"a/version_{seed}", [seed, seed], seed)
    write_run(tmp_path / "a/version_3", [7], gamma=0.9, hidden={"sizes": [3]})
    write_run(tmp_path / "b", [8], env_id="Acrobot-v1")
    groups = by_experiment(find_logs(tmp_path))
    assert {name: len(logs) for name, logs in groups.items()} == {
        "PPO, gamma=None, sizes=None (CartPole-v1)": 3,
        "PPO, gamma=0.9, sizes=[3] (CartPole-v1)": 1,
        "PPO (Acrobot-v1)": 1,
    }
    with pytest.raises(ConfigurationError, match="has no log: expected a folder with events"):
        find_logs(tmp_path / "c")


def test_runs_of_scripts_with_other_options_are_other_curves(tmp_path):
    for version, length in enumerate((8, 8, 8, 16)):
        folder = tmp_path / f"logs/version_{version}"
        write_run(folder, [version, version])
        (folder / "config.yaml").unlink()
        options = {"gamma": 0.9, "data": {"env_id": "CartPole-v1", "rollout_length": length, "seed": version}}
        options |= {"algorithm": "A2C"} if version else {}
        (folder / "hparams.yaml").write_text(yaml.safe_dump(options))
    write_run(tmp_path / "logs/version_4", [3])
    (tmp_path / "logs/version_4/config.yaml").unlink()
    (tmp_path / "logs/version_4/hparams.yaml").write_text("x: !!python/object:os.system {}\n")
    logs = tmp_path / "logs"
    assert {name: len(found) for name, found in by_experiment(find_logs(tmp_path)).items()} == {
        f"{logs} (CartPole-v1)": 1,
        "A2C, rollout_length=8 (CartPole-v1)": 2,
        "A2C, rollout_length=16 (CartPole-v1)": 1,
        str(logs): 1,
    }


@pytest.mark.parametrize("is_list", [True, False])
def test_runs_with_and_without_curriculum_are_two_curves(is_list, tmp_path):
    for seed, name in enumerate(("Curriculum", "EnvStepLimit")):
        write_run(tmp_path / f"version_{seed}", [seed], seed)
        callback = {"class_path": f"lightning_rl.{name}", "init_args": {"stages": [{"attributes": {"length": 0.1}}]}}
        callbacks = [callback] if is_list else callback
        path = tmp_path / f"version_{seed}" / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"trainer": {"callbacks": callbacks}}))
    with_it, without = by_experiment(find_logs(tmp_path))
    assert with_it == "PPO, curriculum={'stages': [{'attributes': {'length': 0.1}}]} (CartPole-v1)"
    assert without == "PPO, curriculum=None (CartPole-v1)"


def test_null_options_equal_missing_ones(tmp_path):
    for seed in range(4):
        write_run(tmp_path / f"version_{seed}", [seed], seed, **({"target_kl": None} if seed % 2 else {}))
    assert {name: len(logs) for name, logs in by_experiment(find_logs(tmp_path)).items()} == {"PPO (CartPole-v1)": 4}


def test_environment_of_run_with_data_class(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"version_{seed}", [seed])
        data = {"class_path": "lightning_rl.RecordedEpisodes", "init_args": {"env_id": "CartPole-v1", "seed": seed}}
        config = {"data": data, "model": {"class_path": "lightning_rl.BehaviourCloning"}}
        (tmp_path / f"version_{seed}/config.yaml").write_text(yaml.safe_dump(config))
    ((name, logs),) = by_experiment(find_logs(tmp_path)).items()
    assert name == "BehaviourCloning (CartPole-v1)"
    assert [log.environment for log in logs] == ["CartPole-v1"] * 2


def test_last_value_of_repeated_steps_counts(tmp_path):
    write_run(tmp_path, [1, 2, 3])
    write_run(tmp_path, [30, 40], first=30)
    (log,) = find_logs(tmp_path)
    assert log.scalars[RETURN].steps.tolist() == [10, 20, 30, 40]
    assert log.scalars[RETURN].values.tolist()[-1] == 40


def test_repeated_steps_of_resumed_run_are_read_without_warning(tmp_path, caplog):
    write_run(tmp_path, [1, 2, 3, 4])
    next(tmp_path.glob("events*")).rename(tmp_path / "events.out.tfevents.0")  # sorts before the second file
    writer = SummaryWriter(tmp_path, purge_step=30)
    writer.add_scalar(RETURN, 7, 30)
    writer.close()
    (log,) = find_logs(tmp_path)
    assert log.scalars[RETURN].values.tolist() == [1, 2, 7]
    assert caplog.messages == []
    EventAccumulator(str(tmp_path)).Reload()  # the message is dropped only while this package reads
    (purged,) = caplog.messages
    assert purged.startswith("Detected out of order event.step")


def test_non_finite_values_are_skipped(tmp_path):
    for seed, values in enumerate(([0, float("nan"), 20], [0, 11, 20], [0, 12, 20], [0, 13, 20])):
        write_run(tmp_path / f"version_{seed}", values, seed)
    found = summarize([log.scalars[RETURN] for log in find_logs(tmp_path)])
    assert found.center.tolist() == [0, (11 + 12) / 2, 20]  # of 10 (interpolated between 0 and 20), 11, 12 and 13
    assert np.isfinite([found.low, found.high]).all()


def test_csv_without_step_column_is_rejected(tmp_path):
    (tmp_path / "metrics.csv").write_text("name,value\na,1\n")
    with pytest.raises(
        ConfigurationError, match=r"metrics\.csv', line 2: expected the rows of CSVLogger: KeyError: 'step'"
    ):
        find_logs(tmp_path)


def test_csv_logger_rows_are_read(tmp_path):
    logger = CSVLogger(tmp_path / "logs", name="mine")
    logger.log_metrics({RETURN: 1.5, "train/loss": 2.0}, step=10)
    logger.log_metrics({"val/episode_return": 3.0}, step=20)
    logger.save()
    (log,) = find_logs(tmp_path)
    assert {key: (found.steps.tolist(), found.values.tolist()) for key, found in log.scalars.items()} == {
        RETURN: ([10], [1.5]),
        "train/loss": ([10], [2]),
        "val/episode_return": ([20], [3]),
    }
    assert list(by_experiment([log])) == [str(tmp_path / "logs/mine")]


def test_logs_of_resumed_run_are_joined_and_last_values_count(tmp_path):
    write_run(tmp_path / "run", [0], gamma=0.9)
    for version, (first, values) in enumerate(((10, [1, 2, 3, 4]), (30, [30, 40, 50]), (10, [7]))):
        folder = tmp_path / f"logs/version_{version}"
        logger = CSVLogger(folder.parent, name="", version=version)
        for number, value in enumerate(values):
            logger.log_metrics({RETURN: value}, step=first + 10 * number)
        logger.log_metrics({f"only/{version}": version}, step=first)
        logger.save()
        if version < 2:  # the third log has no run folder
            (folder / RUN_FOLDER).write_text("../../run\n" if version else "..\\..\\run\n")  # the first from Windows
    one, other = sorted(joined(reversed(find_logs(tmp_path / "logs"))), key=lambda log: log.run is None)
    assert one.scalars[RETURN].steps.tolist() == [10, 20, 30, 40, 50]
    assert one.scalars[RETURN].values.tolist() == [1, 2, 30, 40, 50]
    assert [one.scalars[f"only/{version}"].values.tolist() for version in range(2)] == [[0], [1]]
    assert one.settings["model.init_args.gamma"] == 0.9
    assert json.loads(one.seed) == {"data.seed": 0, "seed_everything": 0}
    assert other.settings == {} and other.scalars[RETURN].values.tolist() == [7]


def test_of_starts_with_the_same_first_step_the_newest_counts(tmp_path):
    write_run(tmp_path / "run", [0])
    for version, last in ((8, 1), (9, 1), (10, 4)):
        logger = CSVLogger(tmp_path / "logs", name="", version=version)
        for number in range(last):
            logger.log_metrics({RETURN: version}, step=10 + 10 * number)
        logger.save()
        (tmp_path / f"logs/version_{version}" / RUN_FOLDER).write_text("../../run\n")
    (log,) = joined(find_logs(tmp_path / "logs"))
    assert log.scalars[RETURN].values.tolist() == [10, 10, 10, 10]


def test_value_with_another_clock_in_the_log_of_a_resumed_run_hides_no_earlier_values(tmp_path):
    write_run(tmp_path / "run", [0])
    for version, first in enumerate((10, 30)):
        logger = CSVLogger(tmp_path / "logs", name="", version=version)
        logger.log_metrics({"hp_metric": -1}, step=0)  # as TensorBoardLogger does by default
        logger.log_metrics({"lr-Adam": 0.1}, step=1 + version)  # as LearningRateMonitor, which counts rollouts
        for step in range(first, first + 30, 10):
            logger.log_metrics({RETURN: version}, step=step)
        logger.save()
        (tmp_path / f"logs/version_{version}" / RUN_FOLDER).write_text("../../run\n")
    (log,) = joined(find_logs(tmp_path / "logs"))
    assert log.scalars[RETURN].steps.tolist() == [10, 20, 30, 40, 50]
    assert log.scalars[RETURN].values.tolist() == [0, 0, 1, 1, 1]
    assert log.scalars["hp_metric"].steps.tolist() == [0] and log.scalars["lr-Adam"].steps.tolist() == [1, 2]


def test_resumed_run_with_csv_logger_is_one_seed(in_tmp_path, monkeypatch, capsys):
    fit = ["fit", "--model=PPO", "--data.env_id=CartPole-v1", "--data.num_envs=2", "--data.rollout_length=16"]
    fit += ["--data.rollouts_per_epoch=2", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=0"]
    fit += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.log_every_n_steps=1"]
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    main([*fit, "--max_env_steps=128"])
    main([*fit, "--max_env_steps=256", "--ckpt_path=last"])
    main([*fit, "--max_env_steps=256", "--seed_everything=1"])
    logs = find_logs("logs")
    assert len(logs) == 3
    ((name, runs),) = by_experiment(joined(logs)).items()
    assert name == "PPO (CartPole-v1)" and len(runs) == 2
    for run in runs:
        assert run.scalars["train/loss"].steps.tolist() == [32, 64, 96, 128, 160, 192, 224, 256]
    capsys.readouterr()
    plot(monkeypatch, "logs", "--metric=train/loss")
    assert not capsys.readouterr().err


def test_log_on_another_drive_than_the_run_folder_belongs_to_its_run(in_tmp_path, monkeypatch):
    fit = ["fit", "--model=PPO", "--data.env_id=CartPole-v1", "--data.num_envs=2", "--data.rollout_length=16"]
    fit += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--max_env_steps=32"]

    def relpath(path, start=None):
        raise ValueError("path is on mount 'C:', start on mount 'D:'")  # as on Windows

    monkeypatch.setattr("os.path.relpath", relpath)
    run_dir = main([*fit, "--trainer.accelerator=cpu", "--trainer.limit_val_batches=0"]).run_dir
    (log,) = find_logs("logs")
    assert log.run == run_dir.resolve() and log.algorithm == "PPO"


def plot(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lightning-rl", "plot", *map(str, arguments)])
    program.run()


def test_plot_command_warns_of_repeated_seeds(in_tmp_path, monkeypatch, capsys):
    for version, seed in enumerate((0, 1, 0)):
        write_run(Path(f"runs/version_{version}"), [1, 2], seed)
    write_run(Path("other/version_0"), [1, 2], seed=0, gamma=0.5)
    plot(monkeypatch, "runs", "other")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: PPO, gamma=None (CartPole-v1): counted as further seeds, although another run")
    assert re.search(r": runs/version_2; name the folders", line)
    plot(monkeypatch, "runs/version_0", "runs/version_1", "other")
    plot(monkeypatch, "both=runs/version_1", "both=other")  # other settings make another run
    assert not capsys.readouterr().err


def test_resumed_runs_keep_the_seed_of_their_first_start(in_tmp_path, monkeypatch, capsys):
    for version, seed in enumerate((0, 1)):
        write_run(Path(f"runs/version_{version}"), [1, 2], seed)
    # Resumed without the option for the seed.
    Path("runs/version_1/config-2.yaml").write_text(Path("runs/version_0/config.yaml").read_text())
    plot(monkeypatch, "runs")
    assert "further seeds" not in capsys.readouterr().err


def test_plot_command_names_runs_without_the_metric(in_tmp_path, monkeypatch, capsys):
    write_run(Path("a/version_0"), [1, 2])
    write_run(Path("b/version_0"), [])  # ended before its first log
    plot(monkeypatch, "A=a", "B=b", "--kind=profiles")
    expected = "WARNING: rollout/episode_return is not in the logs of these runs, which are left out: b/version_0\n"
    assert capsys.readouterr().err == expected


def test_plot_command_does_not_count_runs_without_the_metric_as_seeds(in_tmp_path, monkeypatch, capsys):
    write_run(Path("a/version_0"), [1, 2])
    write_run(Path("a/version_1"), [])  # ended before its first log
    plot(monkeypatch, "a")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("which are left out: a/version_1")


def test_plot_command_draws_a_panel_per_environment(in_tmp_path, monkeypatch, capsys):
    for seed in range(4):
        write_run(Path(f"runs/ppo/version_{seed}"), [seed, seed + 1], seed)
        write_run(Path(f"other/version_{seed}"), [seed + 2], seed, gamma=0.5)
    write_run(Path("runs/acrobot"), [-500, -80], env_id="Acrobot-v1")
    plot(monkeypatch, "runs", "mine=other")
    assert capsys.readouterr().out == "Done: curves.png, curves.svg\n"
    height, width, _ = imageio.v3.imread("curves.png").shape
    assert width > height > 500
    text = re.findall(r">([^<>\n]+)</text>", Path("curves.svg").read_text())
    assert {"CartPole-v1", "Acrobot-v1", "environment steps", "episode return (training)"} <= set(text)
    assert {"PPO, 4 seeds", "mine, 4 seeds", "PPO, 1 seed"} <= set(text)
    assert any("interquartile mean over seeds; band: its 95% bootstrap interval" in line for line in text)
    plot(monkeypatch, "other", "--out=wide.svg", "--confidence=0.995")
    assert "its 99.5% bootstrap interval" in Path("wide.svg").read_text()
    before = Path("curves.svg").read_bytes()
    plot(monkeypatch, "runs", "mine=other", "--out=curves.svg")
    assert Path("curves.svg").read_bytes() == before  # the same runs, the same file
    plot(monkeypatch, "runs/acrobot", "--out=one.svg", "--statistic=mean", "--confidence=0.8")
    assert "one seed each: no interval" in Path("one.svg").read_text() and not Path("one.png").exists()
    plot(monkeypatch, "runs/acrobot", "--out=v1.5")
    plot(monkeypatch, "runs/acrobot", "--out=one.pdf")
    assert {path.name for path in Path().glob("v1*")} == {"v1.5.png", "v1.5.svg"}
    assert Path("one.pdf").read_bytes().startswith(b"%PDF")


def test_equal_runs_give_equal_files_at_any_time(tmp_path):
    pytest.importorskip("matplotlib")
    panel = plots.Panel("", [plots.Curve("a", [series([1, 2, 3])])])
    first, second = ([tmp_path / f"{name}{suffix}" for suffix in (".pdf", ".svg", ".png")] for name in ("a", "b"))
    plots.draw([panel], first)
    time.sleep(1.1)  # a date in a PDF has seconds
    plots.draw([panel], second)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_plot_command_draws_profiles_and_probabilities_of_improvement(in_tmp_path, monkeypatch, capsys):
    for seed in range(3):
        for env_id, size in (("CartPole-v1", 100), ("Acrobot-v1", -100)):
            write_run(Path(f"a/{env_id}{seed}"), [1, size + seed], seed, env_id)
            write_run(Path(f"b/{env_id}{seed}"), [1, size + seed + 2], seed, env_id, gamma=0.5)
    plot(monkeypatch, "A=a", "B=b", "--kind=profiles", "--out=profiles.svg")
    text = re.findall(r">([^<>\n]+)</text>", Path("profiles.svg").read_text())
    assert {"A, 3 seeds", "B, 3 seeds", "share of runs with a score above τ"} <= set(text)
    assert any("0 and 1 the extremes of each environment" in line for line in text)
    plot(monkeypatch, "A=a", "B=b", "--kind=improvement", "--out=improvement.svg")
    assert "A &gt; B" in Path("improvement.svg").read_text()
    scores, environments = plots._final_scores(plots._experiments(["A=a", "B=b"]), RETURN)
    assert environments == ["Acrobot-v1", "CartPole-v1"]
    assert sorted(scores["B"][:, 1]) == [102, 103, 104]
    write_run(Path("b/more"), [1, 2], 3, gamma=0.5)
    with pytest.raises(SystemExit):
        plot(monkeypatch, "A=a", "B=b", "--kind=improvement")
    expected = "B={'Acrobot-v1': 3, 'CartPole-v1': 4} is not valid: expected at least one run, and the same number"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' has no log"),
        (["run", "--kind=improvement"], "runs=['PPO'] is not valid: expected runs of at least two algorithms"),
        (["run", "--kind=profiles", "--metric=[a, b]"], "metric=['a', 'b'] is not valid: expected one metric"),
        (["run", "--metric=val/return"], "metric='val/return' is in no log: expected one of rollout/episode_return"),
        (["PPO=run", "run"], "runs='PPO=...' is not valid: expected another name, since other runs have this one"),
        (["run", "--confidence=2"], "confidence=2.0 is not valid"),
        (["run", "--columns=0"], "columns=0 is not valid"),
        (["run", "--out=x.gif"], "out='x.gif' is not valid: expected a file that ends in .png, .svg or .pdf, or none"),
    ],
)
def test_plot_command_reports_bad_input_in_one_line(in_tmp_path, monkeypatch, capsys, arguments, message):
    write_run(Path("run"), [1, 2])
    with pytest.raises(SystemExit) as exit_:
        plot(monkeypatch, *arguments)
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith(f"lightning-rl: error: {message}")


def test_plot_command_says_that_logs_are_empty(in_tmp_path, monkeypatch, capsys):
    write_run(Path("run"), [])  # stopped before its first log
    with pytest.raises(SystemExit):
        plot(monkeypatch, "run")
    expected = "is in no log: expected runs that have logged values; all of these logs are empty"
    assert expected in capsys.readouterr().err


def test_long_labels_do_not_shrink_curves(in_tmp_path, monkeypatch, capsys, recwarn):
    for number in range(12):
        write_run(Path(f"runs/{number}"), [1, 2], init_from=f"runs/pretraining/CartPole-v1/{'x' * 150}_{number}.ckpt")
    plot(monkeypatch, "runs", "--out=curves.svg")
    assert not [warning for warning in recwarn if "constrained_layout" in str(warning.message)]
    labels = re.findall(r">([^<>\n]+)</text>", Path("curves.svg").read_text())
    assert max(map(len, labels)) <= 60
    assert sum("xxxx_7.ckpt" in label for label in labels) == 1


def test_missing_matplotlib_is_reported_when_drawing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    module = importlib.reload(plots)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-rl\[plot\]'"):
        module.draw([module.Panel("a", [module.Curve("b", [series([1])])])], [tmp_path / "a.svg"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,x\n1,2\n2,abc\n", r"^'.*metrics.csv', line 3: expected the rows of CSVLogger: .* float: 'abc'$"),
        ("step,x\nabc,2\n", "line 2: .* float: 'abc'"),
        ("x,step\n2\n", "line 2: .*'NoneType'"),
        ("step,x\n1,2,3,4\n", r"line 2: .*'list'"),
        (f"step,x\n1,{'y' * 10_000}\n", r"line 2: .*yyy$"),
        (f"step,x\n1,{'y' * 200_000}\n", "expected the rows of CSVLogger: Error: field larger than"),
        (b"step,x\n1,\xff\n", "expected the rows of CSVLogger: .* can't decode byte"),
        ("step,x\n1,__import__('os').system('touch pwned')\n", "could not convert string to float"),
    ],
)
def test_text_in_metrics_csv_is_one_short_error(content, message, in_tmp_path, capsys):
    (in_tmp_path / "metrics.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=message):
        find_logs(in_tmp_path)
    with pytest.raises(SystemExit):
        main(["plot", "."])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning-rl: error: ") and len(line) < 300
    assert not Path("pwned").exists()
