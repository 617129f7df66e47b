"""The scripts under benchmarks/: they run, and what they wrote is what the README says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import curves  # noqa: E402
import pages  # noqa: E402
import reproduce  # noqa: E402
import table  # noqa: E402


def run(script, *args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)


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


def test_reproduce_refuses_to_put_a_changed_configuration_among_the_results():
    done = run("reproduce.py", ROOT / "configs/ppo/cartpole.yaml", "--seed", 0, "--max_env_steps=512")
    assert done.returncode == 2
    assert "--out" in done.stderr and "max_env_steps" in done.stderr


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_throughput_prints_one_line_of_json_with_the_keys_of_every_driver(backend):
    result = last_line(run("throughput.py", "W1", "--steps", 4096, "--backend", backend))
    keys = (
        "peer version workload env_steps seconds sps final_return cpu_seconds sps_cpu variant seed total_steps episodes"
    )
    keys += " import_s startup_s peak_rss_mb peak_child_rss_mb threads note"
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


def test_breakdown_accounts_for_the_whole_time():
    result = last_line(run("breakdown.py", "W1", "--steps", 4096))
    parts = result["parts"].values()
    assert sum(part["microseconds_per_step"] for part in parts) == pytest.approx(
        result["microseconds_per_step"], abs=0.01 * len(result["parts"])
    )
    assert all(part["microseconds_per_step"] >= 0 for part in parts)
    assert result["parts"]["update: backward pass"]["calls"] == 2 * 16


def test_readme_tables_are_those_of_the_results():
    text = (BENCHMARKS / "README.md").read_text()
    assert table.filled(text) == text, "run python benchmarks/table.py"


def test_pages_of_algorithms_have_the_scores_of_the_results():
    found = pages.with_scores()
    assert {name.partition("/")[0] for name in table.load_scores()} <= {page.stem for page in found}
    for page in found:
        assert pages.filled(page.read_text(), page.stem) == page.read_text(), "run python benchmarks/pages.py"
        for name in table.load_scores(algorithm=page.stem):
            drawn = pages.figure(page.stem).read_text()
            assert f"[`{name}`]" in page.read_text() and f">{name}<" in drawn, "run python benchmarks/pages.py"


def test_section_of_scores_says_how_far_seeds_are_apart(tmp_path):
    for seed, mean in enumerate((450.0, 500.0, 400.0)):
        run = {"seed": seed, "evaluation": {"mean": mean}, "env_steps": 1000 + seed}
        run["settings"] = {"data": {"env_id": "CartPole-v1"}}
        file = tmp_path / f"ppo/cartpole/seed{seed}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run))
    row = pages.section("ppo", tmp_path).splitlines()[2]
    assert row.endswith("| CartPole-v1 | 1,002 | 475 | 450.0 | 3 | 400.0 to 500.0 |")
    assert pages.section("a2c", tmp_path).startswith("No shipped configuration")


def test_curves_have_a_panel_for_each_configuration(tmp_path):
    pytest.importorskip("matplotlib")
    curves.draw(tmp_path / "curves.svg")
    drawn, committed = (tmp_path / "curves.svg").read_text(), curves.FIGURE.read_text()
    for name, runs in table.load_scores().items():
        assert f">{name}<" in drawn
        assert f">{name}<" in committed, "run python benchmarks/curves.py"
        assert f"{len(runs)} seed" in drawn
    assert all(f">{label}<" in drawn for label in ("environment steps", "episode return", "goal"))


def test_table_shows_a_new_result(reproduced):
    rows = table.scores(reproduced[0]).splitlines()
    assert len(rows) == 3
    cells = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert cells[1:5] == ["CartPole-v1", "1,024", "475", f"{reproduced[1]['evaluation']['mean']:.1f}"]


def test_table_tells_small_scores_apart():
    assert [table._score(*pair) for pair in ((463.94,), (0.9656,), (36.0, 463.9), (0.0123, 0.9656))] == [
        *("463.9", "0.966", "36.0", "0.012")
    ]


def test_shipped_results_reach_their_goals_with_every_seed():
    goals = json.loads((BENCHMARKS / "goals.json").read_text())
    runs = table.load_scores()
    assert set(goals) <= set(runs)
    for name, goal in goals.items():
        assert [run["seed"] for run in runs[name]] == list(range(len(runs[name]))), "no seed is left out"
        for result in runs[name]:
            assert result["evaluation"]["episodes"] == len(result["evaluation"]["returns"]) == 100
            assert result["evaluation"]["mean"] >= goal, (name, result["seed"])
            assert result["overrides"] == []


def test_cartpole_results_are_of_five_seeds():
    assert len(table.load_scores()["ppo/cartpole"]) == 5


def test_shipped_results_were_made_with_the_shipped_configurations():
    yaml = pytest.importorskip("yaml")
    for name, runs in table.load_scores().items():
        shipped = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        for result in runs:
            settings = result["settings"]
            assert result["env_steps"] >= shipped["max_env_steps"]
            for part, given in (("data", shipped["data"]), ("trainer", shipped["trainer"])):
                assert {key: settings[part][key] for key in given} == given
            given = shipped["model"]["init_args"]
            assert {key: settings["model"]["init_args"][key] for key in given} == given
