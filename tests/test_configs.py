"""Every shipped configuration parses, is consistent as it stands, and runs."""

import contextlib
import io
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer

import lightning_rl
from lightning_rl import PPO, RolloutDataModule, save_episodes
from lightning_rl.cli.main import main
from lightning_rl.options import defaults_of
from lightning_rl.policies.recurrent import MemoryOptions
from lightning_rl.rollouts.batch import check_minibatches
from lightning_rl.rollouts.rollout import Episode
from tests.procgen import has_procgen

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
NAMES = [str(path.relative_to(CONFIGS)) for path in FILES]
# What an environment needs beyond the package itself.
MODULES = {
    "ALE/": "ale_py",
    "MiniGrid": "minigrid",
    "MinAtar": "minatar",
    **dict.fromkeys(("LunarLander", "BipedalWalker"), "Box2D"),
    **dict.fromkeys(("HalfCheetah", "Hopper", "Walker2d", "Ant", "Swimmer", "Inverted", "Reacher"), "mujoco"),
    "popgym": "popgym",
    "PettingZoo/mpe2": "mpe2",
}
FOLDERS = {
    "PPOKLPenalty": "ppo_kl",
    "BehaviourCloning": "behaviour_cloning",
    "CriticPretraining": "critic_pretraining",
}


@pytest.fixture(autouse=True)
def as_typed(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")


def parsed(path: Path) -> dict:
    """The whole configuration, defaults included."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit_.value.code == 0
    return yaml.load(output.getvalue(), yaml.CSafeLoader)


def options_of_data(config: dict) -> dict:
    """The options of the data module, of whichever class."""
    return config["data"].get("init_args", config["data"])


def record_cartpole(path: Path) -> None:
    """Write an episode of three steps."""
    episode = Episode(episode_return=3.0, length=3, terminated=True)
    episode.observations, episode.actions, episode.rewards = np.zeros((4, 4), np.float32), np.arange(3) % 2, np.ones(3)
    save_episodes([episode], path)


def need_extra(data: dict) -> None:
    for prefix, module in MODULES.items():
        if data["env_id"].startswith(prefix):
            pytest.importorskip(module)
    if data.get("backend") == "envpool":
        pytest.importorskip("envpool")
    if data["env_id"] == "Taxi-v4" and "Taxi-v4" not in gymnasium.registry:
        pytest.skip("Taxi-v4 came with Gymnasium 1.3")
    if data["env_id"].startswith("MiniGrid") and tuple(map(int, gymnasium.__version__.split(".")[:2])) < (1, 4):
        pytest.skip("DtypeObservation takes the name of a dtype since Gymnasium 1.4")
    if data["env_id"].startswith("Starpilot") and not has_procgen():
        pytest.skip("Procgen needs Qt 5")


def test_there_is_a_configuration_for_each_kind_of_environment():
    given = [options_of_data(yaml.safe_load(path.read_text())) for path in FILES]
    ids = {data["env_id"] for data in given}
    for prefix in ("CartPole", "Acrobot", "Pendulum", "MountainCar", *MODULES):
        assert any(env_id.startswith(prefix) for env_id in ids), prefix
    assert {data.get("backend", "sync") for data in given} >= {"sync", "native", "envpool"}


def test_mujoco_tasks_but_swimmer_share_one_set_of_hyper_parameters():
    configs = [yaml.safe_load(path.read_text()) for path in CONFIGS.glob("ppo/mujoco_*.yaml")]
    ids = [config["data"].pop("env_id") for config in configs]
    others = {json.dumps(config) for env_id, config in zip(ids, configs, strict=True) if env_id != "Swimmer-v4"}
    assert len(others) == 1
    assert len(ids) == 8


def test_minatar_games_but_breakout_share_their_hyper_parameters():
    models = {path.stem: yaml.safe_load(path.read_text())["model"] for path in CONFIGS.glob("ppo/minatar_*.yaml")}
    assert len(models) == 4
    assert len({json.dumps(model) for name, model in models.items() if name != "minatar_breakout"}) == 1


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_configuration_is_consistent_as_it_stands(path):
    config = parsed(path)
    data, model = options_of_data(config), config["model"]
    name = model["class_path"].rpartition(".")[2]
    assert path.parent.name == FOLDERS.get(name, name.lower())  # configs/<algorithm>/<environment>.yaml
    assert path.read_text().startswith("# ")  # says what it is
    num_steps, options = data["num_envs"] * data["rollout_length"], model["init_args"]
    memory = MemoryOptions.parse(options["policy"]["memory"])
    num_sequences = None if memory is None else memory.num_sequences((data["rollout_length"], data["num_envs"]))
    check_minibatches(num_steps, options.get("num_minibatches", 1), num_sequences)
    # It ends, is validated more than once on the way, and begins the same each time.
    rollout = data["num_envs"] * data["rollout_length"]
    assert config["max_env_steps"] >= 2 * rollout * data["rollouts_per_epoch"]
    assert config["seed_everything"] == 0
    # Each epoch logs something.
    assert data["rollouts_per_epoch"] >= config["trainer"]["log_every_n_steps"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_configuration_runs_for_two_rollouts(path):
    given = yaml.safe_load(path.read_text())
    data = options_of_data(given)
    need_extra(data)
    if path.stem.endswith("_hard"):
        pytest.skip("that of the same game at its easy level runs")
    small = [
        "--data.num_envs=2",
        "--data.rollout_length=8",
        "--data.rollouts_per_epoch=2",
        "--data.evaluation.episodes=1",
    ]
    small += ["--max_env_steps=null", "--num_threads=1"]
    if "num_minibatches" in defaults_of(getattr(lightning_rl, given["model"]["class_path"])):
        small += ["--model.num_minibatches=2", "--model.num_epochs=1"]
    if given["model"]["class_path"] == "OffPolicyPPG":
        small += ["--model.batch_size=8"]
    if given["model"]["class_path"] == "Distillation":
        spaces = RolloutDataModule(**data)
        trainer = Trainer(accelerator="cpu", logger=False)
        trainer.strategy.connect(PPO(spaces.observation_space, spaces.action_space))
        trainer.save_checkpoint("teacher.ckpt")
        small += ["--model.teacher=teacher.ckpt"]
    if "episodes" in data:
        record_cartpole(Path("episodes.pt"))
        small += ["--data.episodes=episodes.pt"]
    if data["env_id"].startswith("PettingZoo/"):  # of three agents
        small += ["--data.num_envs=3", "--data.rollout_length=4", "--data.evaluation.episodes=3"]
    memory = given["model"].get("init_args", {}).get("policy", {}).get("memory")
    if isinstance(memory, dict) and "sequence_length" in memory:
        small += [f"--model.policy.memory={json.dumps(memory | {'sequence_length': 4})}"]
    small += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]
    if data["env_id"].startswith("ALE/"):
        small += ["--trainer.limit_val_batches=0"]  # a game is long
    elif not data["env_id"].startswith(("PettingZoo/", "Starpilot")):
        small += ["--data.env.max_episode_steps=20"]
    cli = main(["fit", "--config", str(path), *small])
    assert cli.model.policy_version == 2
    assert 24 <= cli.model.env_steps <= 32  # less where rows are lost to resets
    checkpoint = torch.load(cli.run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"]["env_steps"] == cli.model.env_steps
    if data["env_id"].startswith("ALE/"):
        size = data.get("env", {}).get("atari", {}).get("screen_size", 84)
        assert cli.model.observation_space == gymnasium.spaces.Box(0, 255, (4, size, size), "uint8")
        assert type(cli.model.policy.actor_encoder).__name__ == "NatureEncoder"
        assert cli.model.policy.critic_encoder is None  # shared with the actor
    else:
        assert cli.trainer.callback_metrics["val/episodes"] == cli.datamodule.evaluation.episodes <= 3
