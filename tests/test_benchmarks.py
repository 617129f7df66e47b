"""The scripts under benchmarks/: they run, and what they wrote is what the README says."""

import copy
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import lightning_rl
from lightning_rl import IMPALA, ActorCritic
from lightning_rl.options import default_groups, defaults_of, flat
from lightning_rl.tools.trained import shipped_configs
from tests import programs

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import compare  # noqa: E402
import compare_all  # noqa: E402
import curves  # noqa: E402
import equal_settings  # noqa: E402
import fast_paths  # noqa: E402
import gpu  # noqa: E402
import measure  # noqa: E402
import pages  # noqa: E402
import recipes  # noqa: E402
import record  # noqa: E402
import repeats  # noqa: E402
import reproduce  # noqa: E402
import reproduce_all  # noqa: E402
import results_page  # noqa: E402
import retention  # noqa: E402
import scaling  # noqa: E402
import short_runs  # noqa: E402
import start_up  # noqa: E402
import table  # noqa: E402
import third_party  # noqa: E402
import throughput  # noqa: E402
import time_to_return  # noqa: E402
import torch_cartpole  # noqa: E402
import workers  # noqa: E402
import workload_models  # noqa: E402
import zoo  # noqa: E402


def run(script, *args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return programs.run(str(BENCHMARKS / script), *map(str, args), env=environment, cwd=ROOT)


def last_line(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    shortened = ("--max_env_steps=1024", "--data.rollouts_per_epoch=2", "--trainer.log_every_n_steps=1")
    done = run(
        "reproduce.py", ROOT / "configs/ppo/cartpole.yaml", "--seed", 3, "--out", out, "--episodes", 7, *shortened
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "ppo" / "cartpole" / "seed3.json").read_text())


def test_reproduce_plays_the_asked_number_of_episodes_and_keeps_every_return(reproduced):
    evaluation = reproduced[1]["evaluation"]
    assert len(evaluation["returns"]) == len(evaluation["lengths"]) == evaluation["episodes"] == 7
    assert evaluation["returns"] == evaluation["lengths"]  # CartPole pays 1 for every step
    assert evaluation["mean"] == pytest.approx(sum(evaluation["returns"]) / 7)
    variance = sum((value - evaluation["mean"]) ** 2 for value in evaluation["returns"]) / 7
    assert evaluation["standard_deviation"] == pytest.approx(variance**0.5)


def test_reproduce_keeps_the_whole_curve_against_environment_steps(reproduced):
    result = reproduced[1]
    assert result["env_steps"] == 1024
    assert [step for step, _ in result["curve"]["val/episode_return"]] == [512, 1024]
    assert result["curve"]["rollout/episode_return"][-1][0] == 1024
    steps = [step for step, _ in result["curve"]["rollout/episode_return"]]
    assert steps == sorted(set(steps))


def test_reproduce_records_seed_settings_source_and_versions(reproduced):
    result = reproduced[1]
    assert result["seed"] == result["settings"]["seed_everything"] == 3
    assert result["settings"]["max_env_steps"] == 1024
    assert result["settings"]["model"]["init_args"]["gamma"] == 0.98
    assert {"python", "torch", "lightning", "gymnasium", "numpy", "lightning_rl"} <= set(result["versions"])
    assert set(result["source"]) == {"commit", "dirty", "package_sha256"}
    assert result["training_seconds"]["cpu"] > 0


def test_reproduced_results_name_no_folder_user_or_host(reproduced):
    text = json.dumps(reproduced[1])
    for private in (str(Path.home()), str(ROOT), os.uname().nodename, "/tmp", "default_root_dir"):
        assert private not in text.replace(json.dumps(reproduced[1]["overrides"]), "")


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_reproduce_gives_the_same_curve_and_episodes_again(reproduced, tmp_path):
    first = reproduced[1]
    path = reproduce.reproduce(ROOT / "configs/ppo/cartpole.yaml", 3, tmp_path, first["overrides"], episodes=7)
    second = json.loads(path.read_text())
    assert second["evaluation"] == first["evaluation"]
    assert second["curve"] == first["curve"]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_reproduce_ends_after_the_minutes_that_it_is_given_and_says_so(tmp_path, monkeypatch):
    seconds = itertools.count(step=10.0)  # one reading of the clock for each rollout
    monkeypatch.setattr(Timer, "time_elapsed", lambda timer, stage="train": next(seconds))
    config = ROOT / "configs/ppo/cartpole.yaml"
    path = reproduce.reproduce(config, 3, tmp_path, ["--data.evaluation.episodes=1"], episodes=2, minutes=1)
    result = json.loads(path.read_text())
    assert path.name == "stopped_seed3.json"
    assert 0 < result["env_steps"] < result["settings"]["max_env_steps"]
    assert table.load_scores(tmp_path) == {}
    assert table.load_scores(tmp_path, stopped=True) == {"ppo/cartpole": [result]}


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_reproduce_keeps_the_result_of_a_run_that_epochs_limit(tmp_path):
    short = ["--max_env_steps=null", "--trainer.max_epochs=1", "--data.rollouts_per_epoch=1"]
    config = ROOT / "configs/ppo/cartpole.yaml"
    path = reproduce.reproduce(config, 3, tmp_path, [*short, "--data.evaluation.episodes=1"], episodes=2)
    assert path == tmp_path / "ppo/cartpole/seed3.json"
    assert json.loads(path.read_text())["env_steps"] == 256


def test_reproduce_makes_first_what_a_configuration_begins_with(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    cloning, pretraining = "behaviour_cloning/cartpole", "critic_pretraining/cartpole"
    short = " --max_env_steps=256 --data.rollouts_per_epoch=1 --data.num_envs=4 --data.rollout_length=32"
    for name, recipe in recipes.RECIPES.items():
        before = tuple(command + short if " fit " in command else command for command in recipe.before)
        monkeypatch.setitem(recipes.RECIPES, name, dataclasses.replace(recipe, before=before))
    results = []
    for name in (cloning, pretraining):
        path = reproduce.reproduce(ROOT / f"configs/{name}.yaml", 2, tmp_path, short.split(), episodes=3)
        results.append(json.loads(path.read_text()))
    cloned, pretrained = results
    assert pretrained["before"] == list(recipes.RECIPES[pretraining].before)
    assert pretrained["before_seconds"]["cpu"] > 0
    assert pretrained["evaluation"]["returns"] == cloned["evaluation"]["returns"], "the policy stays as it is"
    assert len(set(cloned["evaluation"]["lengths"])) > 1, "by which two policies are told apart"
    assert [step for step, _ in pretrained["curve"]["critic_pretraining/value_loss"]] == [256]
    assert "critic_pretraining/value_loss" not in cloned["curve"]
    assert "/tmp" not in json.dumps(results)


def test_what_runs_first_is_what_the_guide_says():
    pages_with_recipes = ("behaviourcloning", "distillation")
    guide = "".join((ROOT / f"docs/algorithms/{page}.md").read_text() for page in pages_with_recipes)
    guide = " ".join(guide.replace("\\\n", " ").split())
    assert set(recipes.RECIPES) <= shipped_configs().keys()
    for name, recipe in recipes.RECIPES.items():
        own = " ".join(("lightning-rl fit --config", name, *recipe.arguments))
        assert all(command in guide for command in (*recipe.before, own))


def test_reproduce_refuses_to_put_a_changed_configuration_among_the_results():
    done = run("reproduce.py", ROOT / "configs/ppo/cartpole.yaml", "--seed", 0, "--max_env_steps=512")
    assert done.returncode == 2
    assert "--out" in done.stderr and "max_env_steps" in done.stderr


def test_reproduce_refuses_to_put_another_configuration_among_the_results(tmp_path, monkeypatch, capsys):
    shipped, own = ROOT / "configs/ppo/cartpole.yaml", tmp_path / "ppo" / "cartpole.yaml"
    own.parent.mkdir()
    own.write_text(shipped.read_text().replace("100_000", "1_000"))
    with pytest.raises(SystemExit):
        reproduce.parse([str(own), "--seed", "0"])
    assert "is not a shipped one: expected --out with another folder" in capsys.readouterr().err
    assert reproduce.parse([str(own), "--seed", "0", "--out", str(tmp_path)])[0].out == tmp_path
    monkeypatch.chdir(shipped.parent)
    assert reproduce.parse(["cartpole.yaml", "--seed", "0"])[0].out is None


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_throughput_prints_one_line_of_json_with_the_keys_of_every_driver(backend):
    result = last_line(run("throughput.py", "W1", "--steps", 4096, "--backend", backend))
    keys = "peer version workload env_steps seconds sps final_return cpu_seconds sps_cpu sps_cpu_quiet variant seed"
    keys += " total_steps episodes import_s startup_s peak_rss_mb peak_child_rss_mb threads note last_100 reached"
    assert list(result) == keys.split()
    assert result["threads"] == 1
    # Two of the four rollouts are not timed; the native backend loses a row with every episode.
    assert result["env_steps"] == 2048 if backend == "sync" else 1900 < result["env_steps"] < 2048
    assert result["sps"] == pytest.approx(result["env_steps"] / result["seconds"], rel=0.01)
    assert result["sps_cpu"] == pytest.approx(result["env_steps"] / result["cpu_seconds"], rel=0.01)


def test_throughput_runs_with_logger_checkpoints_and_progress_bar():
    assert last_line(run("throughput.py", "W1", "--steps", 4096, "--full"))["variant"] == "sync, full"


def test_bare_loop_ends_with_the_parameters_of_the_trainer_and_gives_a_share():
    # The script itself refuses to give a share where they differ.
    result = last_line(run("throughput.py", "W1", "--steps", 9216, "--share"))
    assert result["env_steps"] == 7 * 1024  # two of the nine rollouts are not timed
    share = 1 - result["cpu_seconds_bare"] / result["cpu_seconds_trainer"]
    assert result["lightning_share"] == pytest.approx(share, abs=0.01)
    assert len(result["lightning_share_by_fifths"]) == 7


@pytest.mark.parametrize(
    "parse, arguments, error",
    [
        (throughput.parse, ["W1", "--share", "--compiled"], "one of --compiled, --plain and --share"),
        (throughput.parse, ["W1", "--save"], "--save: expected --share"),
        (fast_paths.parse, ["W1", "--variants", "without FlatAdam"], "expected 'all' among them"),
        (equal_settings.main, ["E1"], "expected a virtual environment of Stable-Baselines3"),
        (equal_settings.main, ["E1", "--steps", "2000"], "expected --out with another folder"),
        (third_party.main, ["chess"], "chess: expected packages of third_party.json"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_run(monkeypatch, capsys, parse, arguments, error):
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    monkeypatch.setenv("PEERS_VENVS", "/nowhere")
    with pytest.raises(SystemExit):
        parse()
    assert error in capsys.readouterr().err


def test_breakdown_accounts_for_the_whole_time():
    result = last_line(run("breakdown.py", "W1", "--steps", 4096))
    parts = result["parts"].values()
    assert sum(part["microseconds_per_step"] for part in parts) == pytest.approx(
        result["microseconds_per_step"], abs=0.01 * len(result["parts"])
    )
    assert all(part["microseconds_per_step"] >= 0 for part in parts)
    # Of the closed form, which is what runs: actor and critic of each minibatch.
    assert result["parts"]["update: loss"]["calls"] == 2 * 16
    assert result["parts"]["update: backward pass"]["calls"] == 2 * 2 * 16


def test_readme_tables_are_those_of_the_results():
    text = (BENCHMARKS / "README.md").read_text()
    assert table.filled(text) == text, "run python benchmarks/table.py"


def test_pages_of_algorithms_have_the_scores_of_the_results():
    found = pages.with_scores()
    measured = {name.partition("/")[0] for name in table.load_scores()}
    expected = "a section <!-- scores --> in the page of each algorithm that has results, in docs/algorithms/"
    assert measured == {pages.algorithm_of(page) for page in found}, expected
    for page in found:
        algorithm = pages.algorithm_of(page)
        assert pages.filled(page.read_text(), algorithm) == page.read_text(), "run python benchmarks/pages.py"
        for name in table.load_scores(algorithm=algorithm):
            drawn = pages.figure(algorithm).read_text()
            assert f"[`{name}`]" in page.read_text() and f">{name}<" in drawn, "run python benchmarks/pages.py"


def test_section_of_scores_says_how_far_seeds_are_apart(tmp_path):
    for seed, mean in enumerate((450.0, 500.0, 400.0)):
        run = {"seed": seed, "evaluation": {"mean": mean}, "env_steps": 1000 + seed}
        run["settings"] = {"data": {"class_path": "RecordedEpisodes", "init_args": {"env_id": "CartPole-v1"}}}
        run["curve"] = {"val/episode_return": [[10, mean]], "train/value_loss": [[10, 512.34], [20, 0.5 + seed]]}
        file = tmp_path / f"ppo/cartpole/seed{seed}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run))
    text = pages.section("ppo", tmp_path)
    assert text.splitlines()[2].endswith("| CartPole-v1 | 1,002 | 475 | 450.0 | 3 | 400.0 to 500.0 |")
    ends = "512 to 0.5, 512 to 1.5, 512 to 2.5"
    assert f"\n`train/value_loss` of `ppo/cartpole`, at the first and the last log of each seed: {ends}.\n" in text
    assert "episode_return" not in text
    assert pages.section("a2c", tmp_path) == "Not run to a score: [`a2c/cartpole`](../../configs/a2c/cartpole.yaml).\n"


def test_the_zoo_is_that_of_the_results_and_has_every_shipped_configuration():
    page = zoo.PAGE.read_text()
    runs = {**table.load_scores(stopped=True), **table.load_scores()}
    assert zoo.page(runs) == page, "run python benchmarks/table.py"
    assert re.findall(r"^\| `lightning-rl fit --config (\S+)`", page, re.MULTILINE) == list(shipped_configs())
    published = json.loads(zoo.PUBLISHED.read_text())
    assert set(published["scores"]) <= shipped_configs().keys()
    assert {score["source"] for score in published["scores"].values()} == set(published["sources"])


def test_the_page_of_results_is_that_of_the_results():
    runs = table.load_scores()
    assert results_page.page(runs) == results_page.PAGE.read_text(), "run python benchmarks/table.py"
    drawn = results_page.FIGURE.read_text()
    shown = results_page.normalized(results_page.rows(runs))
    assert len(shown) >= 15
    assert all(f">{name}<" in drawn for name in shown), "run python benchmarks/reproduce_all.py --pages"


def test_a_score_beats_a_published_mean_only_with_its_whole_interval():
    seeds = [90.0, 100.0, 110.0, 120.0]  # the interval of their mean is about 95 to 115
    assert results_page.verdict(seeds, 90) == "beats"
    assert results_page.verdict(seeds, 110) == "matches"
    assert results_page.verdict(seeds, 130) == "below"
    assert results_page.verdict([0.0, 100.0, 200.0, 20.0], 140) == "below"  # in the interval, but far from the mean
    assert results_page.verdict([-4.0, -4.2, -4.4], -4.1) == "matches"
    assert results_page.verdict([1000.0] * 2, 1) == "fewer than three seeds"
    assert zoo.interval([3.0, 1.0, 2.0]) == (1, 3)  # the page says that it is the range of three seeds
    assert results_page.verdict([0.9996, 0.9997, 0.9998], 1.0, decimals=3) == "beats"
    assert results_page.verdict([0.9996, 0.9997, 0.9998], 1.0) == "below"


def test_results_are_compared_by_the_metric_of_the_source():
    curve = {"val/episode_return": [[1, 5.0], [2, 9.0], [3, 7.0]]}
    curve["rollout/episode_return"] = [[step, float(step)] for step in range(10)]
    run = {"evaluation": {"mean": 6.0}, "curve": curve}
    curve["rollout/episode_return"][2] = [2, 20.0]
    assert [results_page.scores([run], metric)[0] for metric in results_page.METRICS] == [6, 9, 7, 20]
    curve["rollout/game_return"] = [[step, 100.0] for step in range(10)]  # Atari: an episode is a life, a game has five
    assert [results_page.scores([run], metric)[0] for metric in results_page.METRICS] == [6, 9, 100, 100]


def test_a_maximum_over_training_is_the_one_of_the_mean_over_seeds():
    curves = [[1, 5.0], [2, 9.0], [3, 8.0]], [[1, 9.0], [2, 1.0], [3, 7.0], [4, 20.0]]
    runs = [{"curve": {"val/episode_return": rows}} for rows in curves]
    assert results_page.scores(runs, "maximum") == [8, 7]


def test_the_zoo_says_what_was_not_run_and_what_falls_short_of_its_goal():
    runs = [run for found in table.load_scores().values() for run in found if run["evaluation"]["mean"] == 500][:2]
    config = {"data": {"env_id": "CartPole-v1"}, "max_env_steps": 1_000}
    score, source = {"score": "7", "steps": "10", "source": "x"}, {"title": "X", "url": "u"}
    published = {"scores": {"a/b": score}, "sources": {"x": source}}
    nothing = zoo.row("a/b", config, [], 475, published)
    assert nothing[1:] == ["CartPole-v1", "1,000", "", "", "", "475", "not run", "7 after 10, [X](u)"]
    alone = zoo.row("ppo/c", config, runs[:1], None, published)
    assert [alone[4], alone[7]] == ["500.0 [500.0, 500.0], episodes", "no goal"]
    runs = [runs[0], copy.deepcopy(runs[1])]
    runs[1]["evaluation"]["mean"] = 400.0
    short = zoo.row("ppo/c", config, runs, 475, published)
    assert [short[3], short[4], short[7]] == ["2", "450.0 [400.0, 500.0], seeds", "**not reached**"]
    ended = zoo.row("ppo/d", {**config, "max_env_steps": 10_000_000}, runs[:1], 475, published)
    assert [ended[2], ended[7]] == [f"{runs[0]['env_steps']:,} of 10,000,000", "stopped"]
    assert zoo.outcome([500, 475], 475) == "reached"
    summary = zoo.by_outcome([nothing, alone, short, ended])
    lines = ["* reached: 0 of 4", "* **not reached**: `ppo/c`", "* no goal: `ppo/c`", "* stopped: `ppo/d`"]
    assert summary == "\n".join([*lines, "* not run: `a/b`\n\n"])
    low, high = zoo.interval([0.0, 1.0] * 50)  # the normal approximation: ± 1.96 · 0.05
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.015)


def test_one_command_makes_what_is_missing_of_the_zoo_and_then_its_pages(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command):
        commands.append([Path(command[1]).name, *command[2:]])
        return SimpleNamespace(returncode=int("a2c" in str(command)))

    monkeypatch.setattr(reproduce_all.subprocess, "run", run)
    monkeypatch.setattr(reproduce_all, "RESULTS", tmp_path)
    for seed in range(2):
        record.write_json(tmp_path / "ppo" / "taxi" / f"seed{seed}.json", {})
    taxi, a2c = (str(ROOT / "configs" / f"{name}.yaml") for name in ("ppo/taxi", "a2c/cartpole"))
    of = {"taxi": ["reproduce.py", taxi, "--seed"], "a2c": ["reproduce.py", a2c, "--seed"]}
    out, scripts = ["--out", str(tmp_path)], [["table.py"], ["curves.py"], ["pages.py"]]

    assert reproduce_all.main(["ppo/taxi", "a2c/cartpole"]) == 1
    assert commands == [[*of["a2c"], "0", *out], *scripts], (
        "the two of taxi are there; the pages are written all the same"
    )
    assert capsys.readouterr().err == "could not be run: a2c/cartpole, seed 0\n"
    commands.clear()
    assert reproduce_all.main(["ppo/taxi", "--again"]) == 0
    assert commands == [[*of["taxi"], "0", *out], [*of["taxi"], "1", *out], *scripts]
    commands.clear()
    assert reproduce_all.main(["ppo/taxi", "--seeds", "3", *out]) == 0
    assert commands == [[*of["taxi"], "2", *out]], "of another folder no pages are written"
    commands.clear()
    assert reproduce_all.main(["--pages"]) == 0 and commands == scripts, "nothing is run"
    commands.clear()
    assert reproduce_all.main(["--list"]) == 0 and commands == []
    listed = capsys.readouterr().out.splitlines()[-len(shipped_configs()) - 1 :]
    assert listed[0] == "a2c/cartpole, seed 0: to be run" and "ppo/taxi, seed 1: there" in listed
    for wrong in (["ppo/chess"], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            reproduce_all.main(wrong)


def test_curves_have_a_panel_for_each_configuration(tmp_path):
    pytest.importorskip("matplotlib")
    curves.draw(tmp_path / "curves.svg", algorithm="vmpo")
    drawn, committed = (tmp_path / "curves.svg").read_text(), curves.FIGURE.read_text()
    few, everything = table.load_scores(algorithm="vmpo"), table.load_scores()
    assert few.keys() < everything.keys()
    for text, shown in ((drawn, few), (committed, everything)):
        for name, runs in shown.items():
            assert f">{name}<" in text, "run python benchmarks/curves.py"
            assert f"{len(runs)} seed" in text
            title = curves.panel(name, runs, None).title
            assert all(f">{line}<" in text for line in title.splitlines()), "run python benchmarks/curves.py"
        assert all(f">{label}<" in text for label in ("environment steps", "episode return", "goal"))


def test_table_shows_a_new_result(reproduced):
    rows = table.scores(reproduced[0]).splitlines()
    assert len(rows) == 3
    cells = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert cells[1:5] == ["CartPole-v1", "1,024", "475", f"{reproduced[1]['evaluation']['mean']:.1f}"]


def test_table_tells_small_scores_apart():
    assert [table._score(*pair) for pair in ((463.94,), (0.9656,), (36.0, 463.9), (0.0123, 0.9656))] == [
        *("463.9", "0.966", "36.0", "0.012")
    ]


def test_shipped_results_reach_their_goals_except_for_the_stated_seeds():
    goals = json.loads((BENCHMARKS / "goals.json").read_text())
    runs = table.load_scores()
    assert set(goals) <= set(runs)
    missed = set()
    for name, goal in goals.items():
        assert [run["seed"] for run in runs[name]] == list(range(len(runs[name]))), "no seed is left out"
        for result in runs[name]:
            assert result["evaluation"]["episodes"] == len(result["evaluation"]["returns"]) == 100
            assert result["overrides"] == []
            if result["evaluation"]["mean"] < goal:
                missed.add((name, result["seed"]))
    assert missed == {("ppo/taxi", 2), ("ppo/taxi", 5)}  # docs/zoo.md lists the configuration


def test_readme_counts_the_outcomes_of_the_results_page():
    summary = (ROOT / "docs/results.md").read_text()
    compared = [x for x in summary.splitlines() if x.startswith("| [`") and "**fewer than three seeds**" not in x]
    counts = dict(re.findall(r"^\* (beats|matches|below), (\d+)", summary, re.MULTILINE))
    below = counts.get("below", "none")
    verb = "is" if below in ("none", "1") else "are"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{len(compared)} configurations with three or more seeds are compared with published scores" in readme
    counted = f"{counts['beats']} equal or beat the published score, {counts['matches']} match it"
    counted += f" (the interval contains it) and {below} {verb} below"
    assert counted in readme
    assert f"{sum(' 1 run, ' in row for row in compared)} of the published scores come from a single run" in readme
    equal, longer = (sum("**beats**" in row and word in row for row in compared) for word in (", equal", "more steps"))
    assert f"{equal} of the {counts['beats']} only equal it, because it is the highest possible return" in readme
    assert f"and {longer} trained for more steps" in readme


def test_cartpole_results_are_of_ten_seeds():
    assert len(table.load_scores()["ppo/cartpole"]) == 10


def all_options(part):
    """Every option of the algorithm or the data of a configuration by its full name, with the defaults of the others.

    Without the rollouts that actors collect ahead, whose default was another one.
    """
    cls = getattr(lightning_rl, part.get("class_path", "RolloutDataModule").rpartition(".")[2])
    given = part.get("init_args", {}) if "class_path" in part else part
    options = flat(defaults_of(cls) | given, default_groups(cls))
    options.pop("actors.prefetch", None)
    return json.loads(json.dumps(options))  # lists for tuples


def has(whole, part):
    """Whether nested settings have all settings of a part; classes may have short names there."""
    if isinstance(part, dict):
        return all(key in whole and has(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(has, whole, part))
    return whole == part or str(whole).endswith(f".{part}")


def test_shipped_results_were_made_with_the_shipped_configurations():
    yaml = pytest.importorskip("yaml")
    for name, runs in table.load_scores().items():
        shipped = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        expected = {part: all_options(shipped[part]) for part in ("data", "model")}
        for result in runs:
            settings = result["settings"]
            assert result["env_steps"] >= shipped["max_env_steps"]
            assert has(settings["trainer"], shipped["trainer"]), (name, result["seed"])
            for part, options in expected.items():
                assert all_options(settings[part]) == options, (name, result["seed"])
            recipe = recipes.RECIPES.get(name, recipes.Recipe())
            assert tuple(result.get("before", ())) == recipe.before


def test_cartpole_in_torch_is_gymnasiums():
    env = gymnasium.make("CartPole-v1").unwrapped
    random = np.random.default_rng(0)
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        ours = torch_cartpole.TorchCartPole(2)
        ours.reset(seed=0)
        ours.state = torch.from_numpy(observation).repeat(2, 1)
        terminated = False
        while not terminated:
            action = int(random.integers(2))
            observation, reward, terminated, _, _ = env.step(action)
            _, rewards, ends, limits, infos = ours.step(torch.tensor([action, action]))
            np.testing.assert_allclose(infos["final_obs"], np.tile(observation, (2, 1)), atol=1e-5)
            assert rewards.tolist() == [reward] * 2 and ends.tolist() == [terminated] * 2 and not limits.any()
        assert (ours.state.abs() <= 0.05).all() and ours.steps.tolist() == [0, 0]
    ours.state, ours.steps = torch.zeros(2, 4), torch.tensor([498, 499])
    assert ours.step(torch.tensor([0, 1]))[3].tolist() == [False, True]


def test_the_rate_between_disturbances_is_that_of_the_quicker_quarter_of_rollouts():
    clock = measure.Clock()
    cpu = 0.0
    for index, seconds in enumerate([9.0, 9.0, 1.0, 4.0, 2.0, 5.0, 3.0, 8.0, 7.0, 6.0]):
        cpu += seconds
        clock.marks.append((100 * (index + 1), 0.0, cpu))
    assert clock.quiet_rate() == pytest.approx(100 / 3)  # of 1, 2, 3, …, 8 seconds
    assert clock.quiet_rate(4) == pytest.approx(400 / 12)  # of 12 and 24 seconds


def test_cpu_time_of_a_workload_with_actors_is_that_of_all_processes():
    def work(seconds, done):
        while time.process_time() < seconds:
            pass
        done.wait()

    alone, together, done = measure.Clock(), measure.Clock(with_children=True), multiprocessing.Event()
    process = multiprocessing.get_context("fork").Process(target=work, args=(0.3, done))
    alone.tick(0), together.tick(0)
    process.start()
    deadline = time.monotonic() + 30
    while measure.cpu_time_with_children() - together.marks[0][2] < 0.25 and time.monotonic() < deadline:
        time.sleep(0.01)
    alone.tick(1), together.tick(1)
    done.set()
    process.join()
    together.tick(2)
    assert together.marks[1][2] - together.marks[0][2] >= 0.25 > alone.marks[1][2] - alone.marks[0][2]
    assert together.marks[2][2] - together.marks[0][2] >= 0.29, "one that has ended still counts"
    assert [measure.Run(SimpleNamespace(workload=name, steps=None)).clock.with_children for name in ("W3", "W6")] == [
        *(False, True)
    ]


def test_impala_of_the_workload_is_as_large_as_the_one_it_is_compared_with():
    pytest.importorskip("ale_py")
    workload = measure.WORKLOADS["W6"] | {"rollouts": 3}
    data = workload_models.make_data(workload, "sync", seed=0)
    model = workload_models.make_model(workload, data)
    assert type(model) is IMPALA and (data.actors.count, data.actors.prefetch) == (2, 2)
    # Convolutions of 32, 64 and 64 channels, 512 units; heads upon them, the last action and the last reward.
    sizes = [(4 * 64 + 1) * 32, (32 * 16 + 1) * 64, (64 * 9 + 1) * 64, (3136 + 1) * 512, (512 + 6 + 1 + 1) * (6 + 1)]
    assert sum(x.numel() for x in model.parameters()) == sum(sizes)
    assert data.rollout_shape == (80, 8) and model.reduction == "sum" and data.spec.env.reward_clip == "abs_one"
    with pytest.raises(SystemExit):
        throughput.parse(["W6", "--share"])


def test_the_driver_of_torchbeast_says_what_is_missing(tmp_path):
    driver = BENCHMARKS / "peers" / "torchbeast_impala.py"
    found = programs.run(str(driver), "W6", env=os.environ | {"TORCHBEAST": str(tmp_path)}, cwd=ROOT)
    assert found.returncode == 1
    assert str(tmp_path) in found.stderr and "checkout of github.com/facebookresearch/torchbeast" in found.stderr


RUN = {"version": "1", "sps_cpu": 30.0, "sps_cpu_quiet": 40.0, "sps": 20.0, "startup_s": 5.0, "peak_rss_mb": 300}


def test_comparisons_go_on_where_they_were_interrupted(tmp_path, monkeypatch):
    asked = compare.Comparison("W1", "sb3", pairs=3, folder=tmp_path)
    digest, done = ["a"], []

    def run(command):
        done.append(command)
        if len(done) == 4:
            raise RuntimeError("the second pair fails")
        return RUN | {"sps_cpu": 30.0 if "throughput.py" in command[1] else 20.0}

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "source", lambda: {"package_sha256": digest[0], "commit": None, "dirty": None})
    with pytest.raises(RuntimeError, match="second pair"):
        compare.compare(asked)
    assert len(json.loads(asked.path.read_text())["runs"]) == 2
    found = compare.compare(asked)
    assert found["sps_cpu"] == {"ours": 30.0, "theirs": 20.0, "ratio": 1.5, "ratios": [1.5] * 3}
    assert [command[-1 if "--backend" not in command else -3] for command in done] == list("11222233"), done
    compare.compare(asked)
    assert len(done) == 8, "nothing was missing"
    digest[0] = "b"
    compare.compare(asked)
    assert len(done) == 14, "the package has changed since"
    assert compare.seconds_of_pair(asked) == 2 * (5 + compare.STEPS["W1"] / 20)
    assert compare.seconds_of_pair(compare.Comparison("W1", "sb3", "native", folder=tmp_path)) is None


def test_times_to_a_return_keep_each_seed_once_when_a_run_fails(tmp_path, monkeypatch, capsys):
    def run(seed):
        if seed in failing:
            raise RuntimeError("no network")
        return {"seed": seed, "version": "1", "sps_cpu": 9.0, "reached": None}

    def start(*more):
        monkeypatch.setattr(sys, "argv", ["time_to_return.py", "--out", str(tmp_path / "kept.json"), *more])
        time_to_return.main()
        return [one["seed"] for one in json.loads((tmp_path / "kept.json").read_text())["runs"]["a peer"]]

    monkeypatch.setattr(time_to_return, "run", run)
    monkeypatch.setattr(time_to_return, "commands", lambda seed, steps: {"a peer": seed})
    failing = {2}
    assert start() == [1, 3]
    failing = set()
    assert start() == [1, 2, 3]
    with pytest.raises(SystemExit):
        start("--steps", "4000")
    assert "runs of 300000 steps" in capsys.readouterr().err


def test_a_driver_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(compare, "TIMEOUT", 0.2)
    with pytest.raises(RuntimeError, match=r"not done after 0\.2 s"):
        compare.run([sys.executable, "-c", "import time; time.sleep(60)"])


def test_drivers_of_peers_begin_with_the_command_line_and_count_whole_rollouts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["driver.py", "W3", "--steps", "5000", "--seed", "7"])
    begun = measure.begin()
    assert (begun.args.seed, begun.workload["rollouts"], begun.workload["minibatch"]) == (7, 4, 256)
    for _ in range(begun.workload["rollouts"]):
        begun.tick()
    begun.report("a peer", "1.0", [3.0, 4.0], note="why")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["env_steps"], found["total_steps"], found["final_return"]) == (2048, 4096, 3.5)
    assert (found["peer"], found["workload"], found["seed"], found["note"]) == ("a peer", "W3", 7, "why")
    with pytest.raises(SystemExit):
        measure.begin(images=False)
    assert "vectors" in capsys.readouterr().err


def test_the_cost_of_a_return_is_that_of_the_first_rollout_whose_last_episodes_have_it(monkeypatch):
    monkeypatch.setattr(measure, "EPISODE_RETURNS", [0.0] * 15)
    clock = measure.Clock()
    clock.imported()
    for step, further in enumerate(([475.0] * 15, [475.0] * 5, [0.0] * 20), start=1):
        measure.EPISODE_RETURNS.extend(further)
        clock.tick(100 * step)
    assert clock.reached(475)["env_steps"] == 200
    assert clock.reached(475)["cpu_seconds"] >= 0
    assert clock.reached(476) is None


def test_every_peer_of_the_plan_has_a_driver_and_pinned_requirements():
    planned = compare_all.plan(sorted(compare.STEPS), pairs=5)
    assert {comparison.peer for comparison in planned} == set(compare.PEERS)
    assert len({comparison.path for comparison in planned}) == len(planned)
    for comparison in planned:
        workloads, script = compare.PEERS[comparison.peer]
        assert comparison.workload in workloads
        assert (BENCHMARKS / "peers" / script).is_file()
        lines = (BENCHMARKS / "peers" / f"requirements-{comparison.peer}.txt").read_text().splitlines()
        assert {"torch==2.13.0", "torch==2.9.0", "jax==0.10.2"} & {*lines} and all("==" in line for line in lines)
        in_pairs = compare_all.IN_PAIRS[comparison.workload]
        again = {"peer": comparison.peer, "backend": comparison.backend, "compiled": comparison.compiled}
        assert comparison.pairs == (
            5 if again in [{"backend": "sync", "compiled": False} | how for how in in_pairs] else 1
        )


def test_start_up_compares_whole_processes(monkeypatch):
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    monkeypatch.setattr(start_up, "SCRIPTS", {"idle": "", "busy": busy})
    monkeypatch.setattr(start_up, "RATIOS", {"both": ("busy", "idle")})
    found = start_up.measure_all(1)
    assert found["median_cpu_seconds"]["busy"] >= 0.3
    assert found["ratios"]["both"] > 1


def test_scaling_times_as_many_steps_whatever_the_number_of_environments(monkeypatch):
    monkeypatch.setattr(scaling, "ROWS", 64)
    assert scaling.train_cartpole(8, "torch", 2)[0] == scaling.train_cartpole(16, "torch", 2)[0] == 2 * 64
    assert set(scaling.environments("torch", 1, (8,))["cpu_microseconds_per_step"]) == {"8"}


def test_scaling_divides_the_environments_of_a_workload_among_processes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "one", "--rollouts", "1", "--num_envs", "4"])
    found = scaling.one(scaling.parse())
    assert found is not None
    assert 0.9 < found["env_steps"] / (4 * measure.WORKLOADS["W1"]["num_steps"]) <= 1  # but for steps that reset


def test_workers_are_compared_with_environments_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "LENGTH", 3)
    found = workers.measure_workload(workers.WORKLOADS["busy"] | {"num_envs": 2, "milliseconds": 0.1}, 2)
    assert set(found["speed_up"]) == set(workers.VARIANTS) and found["speed_up"]["sync"] == 1.0
    assert [len(ratios) for ratios in found["speed_ups_of_pairs"].values()] == [2, 2, 2]
    about = {"source": {"commit": "0123456789", "dirty": False}}
    record.write_json(tmp_path / "throughput/workers.json", {"busy": found} | about)
    assert "| time per vector step | 2 × busy |" in table.workers(tmp_path)


def test_worker_processes_reach_their_goal_on_two_cores():
    found = json.loads((BENCHMARKS / "results/throughput/workers.json").read_text())
    assert found["hardware"]["logical_cpus"] == 2
    assert found["busy"]["speed_up"]["async"] >= 1.7
    assert found["busy"]["speed_up"]["async"] > found["busy"]["speed_up"]["async, ahead: false"]


_TINY = ["--num_envs", "8", "--rollout_length", "4", "--rollouts", "1", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def measured_on_the_cpu():
    return gpu.measure_all(gpu.parse([*_TINY, "--eager"]))


def test_measurements_for_the_gpu_run_on_the_cpu(measured_on_the_cpu):
    found = measured_on_the_cpu
    assert found["microseconds"]["minibatch_rows"] == 8
    assert min(found["microseconds"].values()) > 0
    assert set(found["microseconds"]) == {"minibatch_rows", "gradient_step_eager", "act_and_step_eager"}
    assert min(found["training"]["eager"].values()) > 0


def test_only_drivers_of_peers_hide_the_gpu(monkeypatch):
    show = "import os, gpu; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": f"{BENCHMARKS}:{ROOT}"}
    assert programs.run("-c", show, env=environment).stdout == "0\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["driver.py", "W1"])
    measure.begin()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_what_is_replayed_as_a_graph_asks_nothing_of_the_host():
    with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without data, which refuse to tell any
        env = torch_cartpole.TorchCartPole()
        policy = ActorCritic(env.single_observation_space, env.single_action_space)
        gpu.GradientStep(policy, torch.randn(8, 4), 2, compiled=False)()
        gpu.ActAndStep(policy, 8, torch.device("cpu"))()
        with pytest.raises(DataDependentOutputException):
            torch.ones(3).sum().item()


def test_tables_have_what_the_scripts_save(measured_on_the_cpu, tmp_path):
    about = {"source": {"commit": "0123456789", "dirty": False}, "hardware": {"accelerator": None}}
    found = {
        "gpu/cartpole.json": measured_on_the_cpu,
        "memory/growth.json": {"rollouts": 2000, "bytes_per_rollout": 36.4},
        "memory/images.json": {"num_envs": 64, "rollout_length": 128, "data_mib": 220.7, "rollout_mib": 222.4}
        | {"peak_mib": 1000.4},
        "scaling/processes-W1-64-native.json": {"workload": "W1", "num_envs": 64, "backend": "native", "speed_up": 1.8},
        "scaling/environments-torch.json": {"backend": "torch", "cpu_microseconds_per_step": {"8": 9.04, "1024": 3.0}},
        "start_up.json": {"median_cpu_seconds": {"both": 2.0}, "ratios": {"help": 1.1}},
    }
    for name, result in found.items():
        record.write_json(tmp_path / name, result | about)
    text = table.start_up(tmp_path) + table.memory(tmp_path) + table.scaling(tmp_path) + table.gpu(tmp_path)
    rate, rollout, update = found["gpu/cartpole.json"]["training"]["eager"].values()
    for cells in (
        ["both", "2.00"],
        ["ratio: help", "**1.10**"],
        ["growth for each of 2,000 rollouts", "36 B"],
        ["64 Pong environments × 128 steps: process at its peak", "1,000 MiB"],
        ["two processes over one, W1 with 64 environments (native)", "**1.80**"],
        ["torch: µs of CPU a step, by environments", "8: 9.0, 1024: 3.0"],
        [
            "CartPole, 8 × 4: training, eager",
            f"**{rate:,}** steps a second; rollout {rollout} ms, update {update} ms",
            "cpu",
        ],
    ):
        assert f"| {' | '.join(cells)} | 01234567 |" in text, cells


def test_results_are_saved_where_it_is_asked_for(tmp_path):
    args = gpu.parse([*_TINY, "--save", str(tmp_path)])
    record.save({"found": 1}, args.save, "gpu/cartpole.json")
    assert {"found", "source", "versions", "hardware"} == set(json.loads((tmp_path / "gpu/cartpole.json").read_text()))
    assert gpu.parse(["--save"]).save == record.RESULTS
    assert gpu.parse([]).save is None


def test_clear_keeps_a_first_task_that_impala_forgets(monkeypatch):
    found = json.loads((BENCHMARKS / "results/retention/mappings.json").read_text())
    assert min(found["CLEAR"]["retention_of_each_seed"]) >= 0.8
    assert max(found["IMPALA"]["retention_of_each_seed"]) < 0.5
    assert min(found["CLEAR"]["learned"] + found["IMPALA"]["learned"]) > 0.9  # there was something to forget
    monkeypatch.setattr(retention, "STEPS", 128)
    monkeypatch.setitem(retention.DATA, "evaluation", {"episodes": 1})
    rows = retention.scores(retention.CLEAR, seed=0)
    assert len(rows) == 3 and all(len(row) == 3 and 0 <= min(row) <= max(row) <= 1 for row in rows)


def test_learned_repeats_take_fewer_decisions_to_the_goal():
    found = json.loads((BENCHMARKS / "results/repeats/mountain_car.json").read_text())
    each, held = found["each_step"]["runs"], found["up_to_16_steps"]["runs"]
    assert min(len(each), len(held)) >= 3 and min(run["score"] for run in each + held) >= found["goal"]
    for what, share in (("decisions", 0.5), ("decisions_of_an_episode", 0.2)):
        assert max(run[what] for run in held) < share * min(run[what] for run in each)


def test_learned_repeats_count_the_steps_of_the_environment(monkeypatch):
    small = {"num_envs": 2, "rollout_length": 16, "rollouts_per_epoch": 1, "evaluation": {"episodes": 1}}
    monkeypatch.setattr(repeats, "DATA", small)
    monkeypatch.setattr(repeats, "EPOCHS", 1)
    found = repeats.run(0, 4)
    assert found["decisions"] == 32 < found["steps_of_the_environment"] <= 4 * 32


def test_short_comparisons_write_a_result_only_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    for saved, options in ((False, []), (True, ["--save", str(tmp_path)])):
        monkeypatch.setattr(sys, "argv", ["repeats.py", "--seeds", "1", *options])
        short_runs.main(None, "repeats/tiny", lambda seeds: {"seeds": seeds})
        assert json.loads(capsys.readouterr().out) == {"seeds": 1}
        assert (tmp_path / "repeats/tiny.json").exists() is saved
    torch.set_num_threads(threads)


def test_a_warm_critic_keeps_what_a_fresh_one_makes_ppo_forget():
    found = json.loads((BENCHMARKS / "results/warm_up/mountain_car.json").read_text())
    fresh, warm = (found[name]["lowest_share_of_the_cloned_score"] for name in ("ppo", "ppo_with_warm_up"))
    assert all(kept > lost for kept, lost in zip(warm, fresh, strict=True)) and min(fresh) < 0.65
    assert min(warm) >= 0.9
