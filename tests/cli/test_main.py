"""The command line, as it is typed: help, configurations, what a run says, and errors."""

import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from gymnasium import spaces
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl import (
    PPO,
    AtariPreprocessing,
    EnvStepCheckpoint,
    EnvStepLimit,
    EnvStepProgressBar,
    EnvStepRichProgressBar,
    EnvStepValidation,
    LastCheckpoint,
    RolloutDataModule,
)
from lightning_rl.__main__ import run
from lightning_rl.cli.main import OnPolicyCLI, link_spaces, main
from lightning_rl.cli.parser import chooses_data_class
from lightning_rl.policies.distributions import SquashedGaussian
from lightning_rl.spaces import space_to_dict
from lightning_rl.tools.trained import shipped_configs
from tests import programs
from tests.helpers import needs_box2d

ROOT = Path(__file__).parents[2]
CARTPOLE = str(ROOT / "configs/ppo/cartpole.yaml")
SMALL = ["--data.env_id=CartPole-v1", "--data.num_envs=2", "--data.rollout_length=16", "--data.rollouts_per_epoch=2"]
SMALL += ["--data.evaluation.episodes=1", "--model=PPO", "--model.num_minibatches=2", "--trainer.accelerator=cpu"]
SMALL += ["--model.policy.hidden_sizes=[8]", "--trainer.enable_model_summary=false"]


class WithoutClipping(PPO):
    """Sets an option of its base class itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, clip_range=None, **kwargs)


class Own(PPO):
    """An algorithm outside of the package."""


class Unavailable(CSVLogger):
    """A logger whose package is not installed, as Lightning's loggers report it."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("Requirement 'unavailable>=1' not met")


@pytest.fixture(autouse=True)
def as_typed(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    return in_tmp_path


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run("-m", "lightning_rl", *arguments)


def printed(capsys, *arguments: str) -> str:
    """What is printed by arguments that train nothing."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 0
    return capsys.readouterr().out


def configuration(capsys, *arguments: str) -> dict:
    return yaml.load(printed(capsys, *arguments, "--print_config"), yaml.CSafeLoader)


def refused(capsys, *arguments: str, status: int = 1) -> str:
    """The one message of a command that fails, with its suggestions."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == status
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("lightning-rl: error: ")]
    assert len(errors) == 1
    assert not [line for line in lines if "Traceback" in line or line.startswith("usage:")]
    *_, text = "\n".join(lines).partition("lightning-rl: error: ")
    return text.partition("\nAll options: ")[0]


# What Lightning says about any run. Warnings look no different: a line that is not one of these is too much.
EXPECTED = (
    r"Seed set to \d+|[GTH]PU available: |Restor(ing|ed) |Loaded model weights |`Trainer.fit` stopped: |Resuming with "
    r"|\w+ updates by "
    r"|\w+ has [\d,]+ parameters:$|  [\w.]+ +\w+ +[\d,]+$"
)


def unexpected(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.strip() and not re.match(EXPECTED, line)]


# ---------------------------------------------------------------------- help


@pytest.mark.parametrize(
    "cls",
    [
        PPO,
        RolloutDataModule,
        AtariPreprocessing,
        EnvStepLimit,
        EnvStepValidation,
        EnvStepCheckpoint,
        LastCheckpoint,
        EnvStepProgressBar,
        EnvStepRichProgressBar,
    ],
)
def test_every_option_of_a_class_is_documented(cls):
    parser = LightningArgumentParser()
    parser.add_class_arguments(cls, "it", fail_untyped=False)
    options = {action.dest: action.help for action in parser._actions if action.dest.startswith("it.")}
    # Neither the options that ask for help, nor those of Lightning's theme of colours.
    options = {name: text for name, text in options.items() if not re.search(r"\.help$|\.theme\.", name)}
    assert len(options) >= 1
    assert [name for name, text in options.items() if not text or len(str(text)) < 10] == []


def test_help_names_the_program_and_its_commands(capsys):
    text = printed(capsys, "--help")
    assert text.startswith("usage: lightning-rl ")
    assert all(command in text for command in ("fit", "validate", "test", "predict"))


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_fits_on_three_screens_and_says_where_the_other_options_are(command):
    # A process of its own: algorithms of other tests would be listed here.
    done = programs.run("-m", "lightning_rl", command, "--help", env=os.environ | {"COLUMNS": "80"})
    text = done.stdout
    assert len(text.splitlines()) <= 3 * 40
    for option in ("--data.env_id", "--max_env_steps", "--ckpt_path", "lightning_rl.PPO", "--model.help PPO"):
        assert option in text
    assert f"lightning-rl {command} --help_all" in text.replace("\n", " ")


def test_help_does_not_hide_options_from_configurations(capsys):
    printed(capsys, "fit", "--help")
    assert "gamma" in configuration(capsys, "fit", *SMALL)["model"]["init_args"]
    assert "devices" in configuration(capsys, "fit", *SMALL)["trainer"]


def test_help_of_an_algorithm_leaves_out_the_spaces_that_the_data_give(capsys):
    text = printed(capsys, "fit", "--model.help", "PPO")
    assert "--model.observation_space" not in text and "--model.action_space" not in text
    assert "required" not in text


def test_all_options_of_data_and_run_are_listed_with_their_texts(capsys):
    text = " ".join(printed(capsys, "fit", "--help_all").split())
    assert "--data.num_envs NUM_ENVS Number of training environments on each rank. (type: int, default: 8)" in text
    assert "--max_env_steps MAX_ENV_STEPS Stop with the first rollout that reaches this number" in text
    assert "and PyTorch's default for others. (type: int | null, default: null)" in text
    assert "'last' for the newest one of this algorithm and environment" in text
    assert "--optimizer" not in text  # Lightning's own, which would replace that of the algorithm


def test_help_of_an_algorithm_is_asked_for_by_its_short_name(capsys):
    text = " ".join(printed(capsys, "fit", "--model.help", "PPO").split())
    assert "--model.clip_range CLIP_RANGE ε: the importance ratio is clipped to [1 - ε, 1 + ε]. None disables" in text
    assert "--model.optimizer.max_grad_norm MAX_GRAD_NORM Maximum global gradient norm, per optimizer." in text
    assert "--model.gamma GAMMA Discount factor. (type: float, default: 0.99)" in text


def test_help_of_a_data_class_is_asked_for_by_its_short_name(capsys):
    text = " ".join(printed(capsys, "fit", "--data.help", "RecordedEpisodes").split())
    # Python 3.13 writes the name of the value once, after both forms of the option.
    assert re.search(r"--data\.episodes(, --data\.episodes\+)? EPISODES", text) and "--data.num_envs NUM_ENVS" in text


def test_help_of_atari_preprocessing(capsys):
    text = " ".join(printed(capsys, "fit", "--help_all").split())
    assert "End the learning episode when a life is lost; the next episode continues the game." in text


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize("given", ["1e5", "100000.0", "100000"])
def test_a_number_of_environment_steps_may_be_written_as_a_float(capsys, given):
    Path("b.yaml").write_text(f"max_env_steps: {given}\n")
    for arguments in ([f"--max_env_steps={given}"], ["--config=b.yaml"]):
        steps = configuration(capsys, "fit", *SMALL, *arguments)["max_env_steps"]
        assert steps == 100_000
    assert configuration(capsys, "fit", *SMALL, "--config=b.yaml", "--max_env_steps=null")["max_env_steps"] is None


def test_null_takes_back_a_nested_option_of_a_configuration(capsys):
    content = {"policy": {"memory": "lstm"}, "optimizer": {"max_grad_norm": 0.3, "options": {"fused": True}}}
    Path("a.yaml").write_text(yaml.safe_dump({"model": {"class_path": "PPO", "init_args": content}}))
    names = ("policy.memory", "optimizer.max_grad_norm", "optimizer.options.fused")
    changes = [f"--model.{name}=null" for name in names]
    model = configuration(capsys, "fit", *SMALL, "--config=a.yaml", *changes)["model"]["init_args"]
    assert (model["policy"]["memory"], model["optimizer"]["max_grad_norm"]) == (None, None)
    assert model["optimizer"]["options"] == {"fused": None}
    memory = "--model.policy.memory={kind: gru, separate: null}"
    model = configuration(capsys, "fit", *SMALL, "--model=PPO", memory)["model"]["init_args"]
    assert model["policy"]["memory"] == {"kind": "gru", "separate": None}


def test_none_means_null(capsys):
    Path("a.yaml").write_text("data: {env: {frame_stack: 4, max_episode_steps: None}}\n")
    arguments = ["--config=a.yaml", "--data.env.frame_stack=None", "--data.env.kwargs={mode: None}"]
    env = configuration(capsys, "fit", *SMALL, "--model=PPO", *arguments)["data"]["env"]
    assert (env["frame_stack"], env["max_episode_steps"], env["kwargs"]) == (None, None, {"mode": None})


@pytest.mark.parametrize("value", ["{mode", "'None", "[a"])
def test_broken_yaml_is_one_message(capsys, value):
    assert "data.env.kwargs" in refused(capsys, "fit", *SMALL, "--model=PPO", f"--data.env.kwargs={value}", status=2)


@pytest.mark.parametrize("group", ["policy", "optimizer"])
def test_null_for_a_group_of_options_is_one_message(capsys, group):
    message = refused(capsys, "fit", *SMALL, "--model=PPO", f"--model.{group}=null")
    assert message == f"model.{group}=None is not valid: expected a dict of its options"


@pytest.mark.parametrize(
    ("content", "group"),
    [
        ("data:\n  evaluation:\n", "data.evaluation"),
        ("data:\n  actors:\n", "data.actors"),
        ("model:\n  init_args:\n    policy:\n", "model.policy"),
    ],
    ids=lambda value: value.strip(),
)
def test_an_empty_group_in_a_configuration_is_one_message(capsys, content, group):
    Path("bad.yaml").write_text(content)
    message = refused(capsys, "fit", "--config", CARTPOLE, "--config", "bad.yaml")
    assert message == f"{group}=None is not valid: expected a dict of its options"


def test_an_empty_trainer_in_a_configuration_is_one_message(capsys):
    Path("bad.yaml").write_text("data: {env_id: CartPole-v1}\nmodel: PPO\ntrainer:\n")
    message = refused(capsys, "fit", "--config", "bad.yaml")
    assert message == "trainer=None is not valid: expected a dict of its options"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--seed_everything=-1", r"seed_everything=-1 is not valid: expected an integer from 0 to 2\^32 - 1$"),
        ("--seed_everything=4294967296", "seed_everything=4294967296 is not valid"),
        ("--trainer.devices=foo", "trainer: `devices` selected with `CPUAccelerator`"),
        ("--trainer.check_val_every_n_epoch=0", "check_val_every_n_epoch=0 is not valid: expected an integer of at"),
        ("--trainer.val_check_interval=0", "val_check_interval=0 is not valid: expected an integer of at least 1, or"),
    ],
)
def test_values_that_the_trainer_cannot_use_are_one_message(capsys, argument, message):
    assert re.match(message, refused(capsys, "fit", *SMALL, argument))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model.optimizer.anneal=null", "model.optimizer.anneal=None is not valid: expected true or false"),
        ("--data.num_envs=null", "data.num_envs=None is not valid: expected an integer"),
    ],
)
def test_null_for_an_option_that_needs_a_value_is_one_message(capsys, argument, message):
    arguments = ("fit", "--config", CARTPOLE, argument)
    assert refused(capsys, *arguments, status=2).startswith(message)


@pytest.mark.parametrize("argument", ["--model=mine/ppo.yaml", "--trainer.callbacks+=mine.yml", "--data=mine.yaml"])
def test_a_missing_file_in_place_of_a_class_is_one_message(capsys, argument):
    option, value = argument.removeprefix("--").replace("+", "").split("=")
    message = refused(capsys, "fit", "--config", CARTPOLE, argument, status=2)
    assert message.startswith(f"{option}='{value}' does not exist: expected the name of a class")


def test_configurations_compose_and_the_command_line_wins(capsys, as_typed):
    Path("b.yaml").write_text("data:\n  num_envs: 3\nmodel:\n  init_args:\n    gamma: 0.5\n    clip_range: 0.3\n")
    config = configuration(
        capsys, "fit", "--config", CARTPOLE, "--config", "b.yaml", "--model.init_args.gamma", "0.9", "--data.seed=4"
    )
    assert config["data"]["env_id"] == "CartPole-v1"  # a
    assert (config["data"]["num_envs"], config["model"]["init_args"]["clip_range"]) == (3, 0.3)  # b
    assert (config["model"]["init_args"]["gamma"], config["data"]["seed"]) == (0.9, 4)  # command line
    assert config["model"]["class_path"] == "lightning_rl.PPO"


def test_mistakes_are_found_beside_and_in_files_that_a_configuration_names(capsys):
    folder = Path("mine")
    folder.mkdir()
    (folder / "model.yaml").write_text("class_path: PPO\ninit_args:\n  gamma: 0.5\n")
    (folder / "data.yaml").write_text("env_id: CartPole-v1\nnum_envs: 3\n")
    (folder / "all.yaml").write_text("model: model.yaml\ndata: data.yaml\n")
    arguments = ["fit", "--config", "mine/all.yaml"]
    assert not chooses_data_class(arguments)
    config = configuration(capsys, *arguments)
    assert (config["model"]["init_args"]["gamma"], config["data"]["num_envs"]) == (0.5, 3)
    for option, near in (("trainer.max_epoch", "trainer.max_epochs"), ("data.num_env", "data.num_envs")):
        assert f"{option}=3 is no option; did you mean {near}" in refused(capsys, *arguments, f"--{option}=3", status=2)
    (folder / "model.yaml").write_text("class_path: PPO\ninit_args:\n  gama: 0.5\n")
    assert "model.gama=0.5 is no option; did you mean model.gamma" in refused(capsys, *arguments, status=2)


def test_a_shipped_configuration_is_given_by_its_name(capsys):
    assert configuration(capsys, "fit", "--config", "ppo/cartpole") == configuration(
        capsys, "fit", "--config", CARTPOLE
    )
    assert list(shipped_configs()) == sorted(
        f"{path.parent.name}/{path.stem}" for path in (ROOT / "configs").rglob("*.yaml")
    )


def test_a_file_goes_before_a_shipped_configuration_of_its_name(tmp_path, capsys):
    Path("ppo").mkdir()
    Path("ppo/cartpole").write_text("max_env_steps: 7")
    assert configuration(capsys, "fit", "--model=PPO", "--data.env_id=x", "--config=ppo/cartpole")["max_env_steps"] == 7


def test_a_wheel_brings_the_configurations_inside_the_package():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built["force-include"] == {"configs": "lightning_rl/configs"}


def test_model_options_have_a_short_form(capsys):
    config = configuration(capsys, "fit", "--config", CARTPOLE, "--model.gamma", "0.9")
    assert config["model"]["init_args"]["gamma"] == 0.9


def test_the_class_of_the_data_can_be_chosen(capsys):
    """By a file or an argument; where nothing does, `data` has the options of the default itself."""
    named = "class_path: RecordedEpisodes\ninit_args:\n  env_id: CartPole-v1\n  episodes: some.pt\n"
    Path("piece.yaml").write_text(named)
    Path("data.yaml").write_text(yaml.safe_dump({"data": yaml.safe_load(named)}))
    Path("of_fit.yaml").write_text(yaml.safe_dump({"fit": {"data": yaml.safe_load(named)}}))
    for arguments in (
        ["fit", "--config", "data.yaml"],
        ["--config=of_fit.yaml", "fit"],
        ["fit", "-c", "data.yaml"],
        ["fit", "--data=piece.yaml"],
        ["fit", "--data", "RecordedEpisodes", "--data.env_id=CartPole-v1", "--data.episodes", "some.pt"],
        ["fit", "--data.class_path=RecordedEpisodes", "--data.env_id=CartPole-v1", "--data.episodes=some.pt"],
    ):
        data = configuration(capsys, *arguments, "--model=BehaviourCloning", "--data.num_envs=3")["data"]
        assert data["class_path"] == "lightning_rl.RecordedEpisodes", arguments
        chosen = {name: data["init_args"][name] for name in ("env_id", "episodes", "num_envs")}
        assert chosen == {"env_id": "CartPole-v1", "episodes": "some.pt", "num_envs": 3}
    cloning = ["fit", "--config", "behaviour_cloning/cartpole", "--data.episodes=some.pt"]
    assert configuration(capsys, *cloning)["data"]["init_args"]["episodes"] == "some.pt"
    Path("empty.yaml").write_text("")
    Path("broken.yaml").write_text("data: [")
    for file in (CARTPOLE, "ppo/cartpole", "ppo/none", "empty.yaml", "broken.yaml", "missing.yaml", "."):
        assert not chooses_data_class(["fit", "--config", file, "--data.num_envs=3"])
    assert not chooses_data_class(["fit", "--data={env_id: CartPole-v1}", "--model.class_path=PPO", "--config"])
    message = refused(capsys, "fit", "--config", "data.yaml", "--model=BehaviourCloning", "--data.episode=x", status=2)
    assert "did you mean data.episodes" in message


def test_evaluation_of_a_cloned_policy_needs_no_recorded_episodes(capsys):
    cloning = ["--config", "behaviour_cloning/cartpole", "--data.episodes=nowhere.pt", "--data.evaluation.episodes=1"]
    for command in ("validate", "test", "predict"):
        assert main([command, *cloning]).datamodule.evaluation.episodes == 1
    assert "nowhere.pt" in refused(capsys, "fit", *cloning)


def test_configurations_that_the_parser_would_read_in_another_encoding_are_refused(capsys, in_tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "cp1252")  # as on Windows
    for comment, folder, is_right in (("Größe", "runs", True), ("Größe", "Läufe", False), ("”", "runs", False)):
        text = f"# {comment}\ntrainer: {{default_root_dir: {folder}}}\n"
        Path("mine.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit):
            main(["fit", *SMALL, "--config", "mine.yaml", "--print_config"])
        printed = capsys.readouterr()
        expected = "config='mine.yaml' is not valid: expected UTF-8 as the encoding of this system: set the environment"
        assert ("default_root_dir: runs" in printed.out, expected in printed.err) == (is_right, not is_right)


def test_a_printed_configuration_is_a_configuration(capsys):
    text = printed(capsys, "fit", *SMALL, "--max_env_steps=64", "--print_config")
    Path("printed.yaml").write_text(text)
    assert configuration(capsys, "fit", "--config", "printed.yaml") == yaml.safe_load(text)


def test_spaces_of_the_environment_are_linked_into_the_model():
    cli = main(["fit", *SMALL, "--trainer.fast_dev_run=true"])
    assert cli.model.hparams["observation_space"] == space_to_dict(cli.datamodule.observation_space)
    assert cli.model.observation_space.shape == (4,)
    assert cli.model.action_space.n == 2


def test_atari_options_are_nested():
    pytest.importorskip("ale_py")
    atari = ["--data.env.atari.episodic_life=false", "--data.env.atari.frame_stack=3"]
    small = [
        "--data.num_envs=2",
        "--data.rollout_length=4",
        "--data.evaluation.episodes=1",
        "--trainer.limit_val_batches=0",
    ]
    cli = main(["fit", *SMALL, *small, "--data.env_id=ALE/Pong-v5", "--trainer.fast_dev_run=true", *atari])
    assert cli.datamodule.spec.env.atari == AtariPreprocessing(episodic_life=False, frame_stack=3)
    assert cli.model.observation_space.shape == (3, 84, 84)


def test_callbacks_are_given_by_their_short_names():
    callbacks = ["--trainer.callbacks+=EnvStepCheckpoint", "--trainer.callbacks.every_n_env_steps=32"]
    callbacks += ["--trainer.callbacks+=EnvStepValidation", "--trainer.callbacks.every_n_env_steps=64"]
    callbacks += ["--trainer.callbacks+=EnvStepRichProgressBar"]
    cli = main(["fit", *SMALL, "--max_env_steps=96", *callbacks])
    kinds = [type(callback) for callback in cli.trainer.callbacks]
    assert kinds.count(EnvStepRichProgressBar) == 1
    assert EnvStepProgressBar not in kinds
    names = sorted(path.name for path in cli.run_dir.glob("checkpoints/*"))
    assert names == ["best-step=64.ckpt", "last.ckpt", "step=32.ckpt", "step=64.ckpt", "step=96.ckpt"]


def test_number_of_threads_is_set_before_training():
    cli = main(["fit", *SMALL, "--trainer.fast_dev_run=true", "--num_threads=2"])
    assert torch.get_num_threads() == 2
    assert cli.config["fit"]["num_threads"] == 2


def test_small_policies_use_one_thread_by_default():
    torch.set_num_threads(2)
    main(["fit", *SMALL, "--trainer.fast_dev_run=true"])
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    main(["fit", *SMALL, "--trainer.fast_dev_run=true", "--model.policy.hidden_sizes=[600,600]"])
    assert torch.get_num_threads() == 2


def test_optimizer_and_scheduler_come_from_the_configuration_and_survive_loading():
    Path("optimizer.yaml").write_text(
        """
model:
  init_args:
    learning_rate: 0.01
    optimizer:
      name: torch.optim.SGD
      options: {momentum: 0.5}
      scheduler:
        name: torch.optim.lr_scheduler.StepLR
        options: {step_size: 1, gamma: 0.5}
"""
    )
    cli = main(["fit", *SMALL, "--config", "optimizer.yaml", "--max_env_steps=96"])
    assert isinstance(cli.trainer.optimizers[0], torch.optim.SGD)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**3
    loaded = PPO.load_from_checkpoint(cli.run_dir / "checkpoints/last.ckpt")
    (optimizer,), (scheduler,) = loaded.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.5)
    assert (scheduler.step_size, scheduler.gamma) == (1, 0.5)
    for name, parameter in cli.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


@needs_box2d
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("beta", "beta"),
        ("{kind: gaussian, std: state_dependent, min_std: 0.1}", None),
        ("{class_path: tests.policies.distributions.test_make.WideHead, init_args: {width: 2.0}}", None),
    ],
)
def test_distribution_of_the_action_comes_from_the_command_line_and_survives_loading(option, expected):
    data = "--data.env_id=LunarLanderContinuous-v3"
    cli = main(["fit", *SMALL, data, f"--model.policy.action_distribution={option}", "--max_env_steps=32"])
    stored = cli.model.hparams["policy"]["action_distribution"]
    assert stored == (expected or yaml.safe_load(option))
    loaded = PPO.load_from_checkpoint(cli.run_dir / "checkpoints/last.ckpt")
    observations = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(observations), cli.model(observations))


def test_distributions_of_parts_come_from_a_configuration():
    space = spaces.Dict(move=spaces.Discrete(3), arm=spaces.Tuple([spaces.Box(-1, 1, (2,))]))
    content = {
        "data": {"env_id": "tests.probes:Probe/Aim-v0", "env": {"kwargs": {"action_space": space_to_dict(space)}}},
        "model": {
            "init_args": {
                "policy": {"action_distribution": {"arm.0": {"kind": "squashed_gaussian", "initial_std": 0.5}}}
            }
        },
    }
    Path("parts.yaml").write_text(yaml.safe_dump(content))
    cli = main(["fit", *SMALL, "--config", "parts.yaml", "--max_env_steps=64"])
    distribution = cli.model.policy(torch.zeros(1, 1))[0]
    assert isinstance(distribution.parts["arm"][0], SquashedGaussian)
    again = main(["validate", "--config", str(cli.run_dir / "config.yaml"), "--ckpt_path", "last"])
    assert (
        again.model.hparams["policy"]["action_distribution"]
        == content["model"]["init_args"]["policy"]["action_distribution"]
    )


# ---------------------------------------------------------------------- what a run leaves and says


def test_a_run_says_where_it_is_and_the_next_command_works():
    done = run_process("fit", "--config", CARTPOLE, "--max_env_steps=4000", "--data.evaluation.episodes=2")
    assert done.returncode == 0, done.stderr
    assert unexpected(done.stderr) == []
    assert not re.search("warn|deprecat|tip:|litlogger|litmodels", done.stdout, re.IGNORECASE)
    run = "runs/ppo/CartPole-v1/version_0"
    lines = done.stdout.splitlines()[-5:]
    assert re.fullmatch(r"Done: 4096 environment steps, validation return at the end [\d.]+", lines[0])
    assert lines[1] == f"  log:         {run}"
    best = rf"  checkpoint:  ({run}/checkpoints/best-step=\d+\.ckpt) \(best validation return: [\d.]+\)"
    checkpoint = re.fullmatch(best, lines[2])[1]
    assert lines[3] == f"  next:        lightning-rl test --config {run}/config.yaml --ckpt_path {checkpoint}"
    assert lines[4] == f"  curves:      tensorboard --logdir {run}"
    assert Path(checkpoint).is_file()
    assert list(Path(run).glob("events.out.tfevents.*"))

    saved = Path(run, "config.yaml").read_bytes()
    tested = run_process(*shlex.split(lines[3].partition("lightning-rl ")[2]), "--data.evaluation.episodes=3")
    assert tested.returncode == 0, tested.stderr
    assert "test/episode_return" in tested.stdout
    assert re.search(r"test/episodes\W+3\.0", tested.stdout)
    assert unexpected(tested.stderr) == []
    # Nothing of the run was touched, and no other one begun.
    assert Path(run, "config.yaml").read_bytes() == saved
    assert [path.name for path in Path(run).parent.iterdir()] == ["version_0"]


def test_the_model_summary_lists_the_parts_of_the_policy(caplog):
    arguments = [argument for argument in SMALL if "model_summary" not in argument]
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        cli = main(["fit", *arguments, "--max_env_steps=32"])
    (summary,) = (message for message in caplog.messages if "parameters" in message)
    title, *rows = summary.splitlines()
    total = sum(x.numel() for x in cli.model.parameters())
    assert title == f"PPO has {total:,} parameters:"
    counts = {row.split()[0]: int(row.split()[-1].replace(",", "")) for row in rows}
    assert {"policy.actor_encoder", "policy.critic_encoder", "policy.action_head", "policy.value_head"} <= set(counts)
    assert sum(counts.values()) == total and 0 not in counts.values()


def test_the_return_at_the_end_and_that_of_the_checkpoint_are_told_apart(capsys, monkeypatch):
    scores = iter([7.0, 3.0])
    monkeypatch.setattr(PPO, "on_validation_epoch_end", lambda self: self.log("val/episode_return", next(scores)))
    main(["fit", *SMALL, "--max_env_steps=128"])
    done, _, checkpoint, *_ = capsys.readouterr().out.splitlines()[-5:]
    assert done == "Done: 128 environment steps, validation return at the end 3"
    assert checkpoint.endswith(".ckpt (best validation return: 7)")


def test_the_step_of_the_last_validation_is_named_unless_it_is_the_end(capsys):
    epochs = ["--trainer.max_epochs=4", "--data.rollouts_per_epoch=1", "--trainer.check_val_every_n_epoch=3"]
    cli = main(["fit", *SMALL, *epochs])
    done, *_ = capsys.readouterr().out.splitlines()[-5:]
    steps = cli.model.env_steps
    assert re.fullmatch(rf"Done: {steps} environment steps, validation return at step {3 * steps // 4}: [\d.]+", done)


def test_a_run_keeps_the_best_and_the_last_checkpoint():
    cli = main(["fit", *SMALL, "--max_env_steps=160"])
    names = [path.name for path in sorted(cli.run_dir.glob("checkpoints/*"))]
    assert len(names) == 2
    assert re.fullmatch(r"best-step=(64|128|160)\.ckpt", names[0])
    assert torch.load(cli.run_dir / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 160


def test_without_validation_there_is_still_a_checkpoint_to_name(capsys):
    main(["fit", *SMALL, "--max_env_steps=64", "--trainer.limit_val_batches=0"])
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0] == "Done: 64 environment steps"
    assert lines[2] == "  checkpoint:  runs/ppo/CartPole-v1/version_0/checkpoints/last.ckpt"


def test_own_checkpoints_and_loggers_take_the_place_of_the_default_ones():
    Path("own.yaml").write_text(
        """
trainer:
  logger: {class_path: CSVLogger, init_args: {save_dir: csv}}
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {monitor: val/episode_length, mode: min, filename: shortest}
"""
    )
    cli = main(["fit", *SMALL, "--config", "own.yaml", "--max_env_steps=64"])
    assert not any(isinstance(logger, TensorBoardLogger) for logger in cli.trainer.loggers)
    assert sum(type(callback) is ModelCheckpoint for callback in cli.trainer.callbacks) == 1
    assert (cli.run_dir / "checkpoints/shortest.ckpt").is_file()
    assert (cli.run_dir / "checkpoints/last.ckpt").is_file()  # what --ckpt_path last goes on from


def test_a_new_run_never_takes_the_folder_of_an_older_one():
    folders = [main(["fit", *SMALL, "--max_env_steps=32"]).run_dir for _ in range(2)]
    assert [str(folder) for folder in folders] == [f"runs/ppo/CartPole-v1/version_{n}" for n in range(2)]
    assert all((folder / "checkpoints/last.ckpt").is_file() for folder in folders)


def test_runs_go_under_the_root_that_is_given():
    cli = main(["fit", *SMALL, "--max_env_steps=32", "--trainer.default_root_dir=mine"])
    assert str(cli.run_dir) == "mine/version_0"
    assert not Path("runs").exists()


def test_fast_dev_run_writes_nothing(capsys):
    main(["fit", *SMALL, "--trainer.fast_dev_run=true"])
    assert not Path("runs").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Done: 32 environment steps")


def test_fast_dev_run_says_how_many_rollouts_it_takes(capsys):
    main(["fit", *SMALL, "--trainer.fast_dev_run=2"])
    assert "Training PPO on CartPole-v1 until 2 rollouts\n" in capsys.readouterr().out


def test_barebones_trains_without_log_checkpoints_and_folder():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The Trainer has no checkpoint callback")
        cli = main(["fit", *SMALL, "--trainer.barebones=true", "--max_env_steps=64"])
    assert cli.model.env_steps == 64
    assert [*Path().iterdir()] == []
    main(["fit", *SMALL, "--max_env_steps=64", "--trainer.default_root_dir=mine"])
    before = {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*")}
    resumed = ["--ckpt_path=last", "--trainer.default_root_dir=mine", "--trainer.barebones=true"]
    assert main(["fit", *SMALL, "--max_env_steps=128", *resumed]).model.env_steps == 128
    assert {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*")} == before


def test_fast_dev_run_makes_no_folder():
    before = {*Path().iterdir()}
    main(["fit", *SMALL, "--trainer.fast_dev_run=true"])
    assert {*Path().iterdir()} == before


def test_validate_test_and_predict_play_the_policy_of_a_checkpoint(capsys):
    cli = main(["fit", *SMALL, "--max_env_steps=64"])
    capsys.readouterr()
    small = [argument for argument in SMALL if "eval_episodes" not in argument]
    for command in ("validate", "test"):
        done = main([command, *small, "--ckpt_path=last", "--data.evaluation.episodes=3"])
        assert done.model.env_steps == 64
        for name, parameter in cli.model.named_parameters():
            assert torch.equal(parameter, done.model.get_parameter(name))
        assert "episodes" in capsys.readouterr().out
    main(["predict", *small, "--ckpt_path=last", "--data.evaluation.episodes=3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("episode ")]
    assert len(lines) == 3
    assert all(re.fullmatch(r"episode \d: return (\d+), \1 steps, (terminated|truncated)", line) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "end", "limit", "epochs"),
    [
        ([], "until 1000000 environment steps", [1_000_000], -1),
        (["--max_env_steps=32"], "until 32 environment steps", [32], -1),
        (["--trainer.max_epochs=2"], "until 2 epochs", [], 2),
        (["--trainer.max_time=00:00:01:00"], "until 00:00:01:00 of max_time", [], -1),
        (["--trainer.max_epochs=-1"], "without a limit; stop it with Ctrl-C, or set --max_env_steps", [], -1),
    ],
    ids=["default", "steps", "epochs", "time", "endless"],
)
def test_a_run_says_first_where_and_how_long_it_trains(capsys, monkeypatch, arguments, end, limit, epochs):
    monkeypatch.setattr(Trainer, "fit", functools.wraps(Trainer.fit)(lambda *_, **__: None))
    monkeypatch.setattr(OnPolicyCLI, "after_fit", lambda _: None)
    cli = main(["fit", *SMALL, *arguments])
    assert f"Training PPO on CartPole-v1 in runs/ppo/CartPole-v1/version_0 {end}\n" in capsys.readouterr().out
    assert [c.max_env_steps for c in cli.trainer.callbacks if isinstance(c, EnvStepLimit)] == limit
    assert cli.trainer.max_epochs == epochs


def test_the_algorithm_of_an_evaluated_checkpoint_is_named(capsys):
    cli = main(["fit", *SMALL, "--max_env_steps=32"])
    main(["validate", *SMALL, "--model=A2C", f"--ckpt_path={cli.run_dir}/checkpoints/last.ckpt"])
    assert f"Policy of PPO from {cli.run_dir}/checkpoints/last.ckpt, at 32 environment" in capsys.readouterr().out


def test_an_untrained_policy_is_evaluated_with_a_warning(capsys):
    main(["validate", *SMALL])
    assert "WARNING: no --ckpt_path was given: this plays with an UNTRAINED policy." in capsys.readouterr().out
    assert not Path("runs").exists()


def test_a_missing_info_key_is_one_warning():
    done = programs.run("-m", "lightning_rl", "fit", *SMALL, "--data.info_keys=[nothing]", "--max_env_steps=64")
    (line,) = unexpected(done.stderr)
    assert line.endswith(
        ": info_keys='nothing' did not appear in info before an episode or the first epoch ended (keys: none)"
    )


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.env_id=CartPol-v1"], "env_id='CartPol-v1' is unknown: .* did you mean CartPole-v1"),
        (["--data.num_envs=0"], "num_envs=0 is not valid: expected an integer of at least 1"),
        (["--data.rollout_length=-1"], "rollout_length=-1 is not valid"),
        (["--data.evaluation.episodes=0"], "evaluation.episodes=0 is not valid"),
        (["--model.gamma=1.5"], "gamma=1.5 is not valid: expected a number at least 0 and at most 1"),
        (["--model.clip_range=-1"], "clip_range=-1.0 is not valid: expected a number above 0"),
        (["--model.learning_rate=0"], "learning_rate=0.0 is not valid: expected a number above 0"),
        (["--model.num_minibatches=5"], "num_minibatches=5 does not divide the 32 steps of a rollout"),
        (["--model.policy.network=resnet"], "policy.network='resnet' is not valid: expected auto, mlp, nature, impala"),
        (["--model.optimizer.name=rmsprop"], r"optimizer.name='rmsprop' is not .* such as torch\.optim\.RMSprop"),
        (["--model.optimizer.name=torch.optim.Nope"], "optimizer.name='torch.optim.Nope' cannot be"),
        (["--data.env.wrappers=[no.such.Wrapper]"], "env.wrappers='no.such.Wrapper' cannot be imported"),
        (["--data.env.atari.frame_skip=0"], "env.atari.frame_skip=0 is not valid: expected an integer of at least 1"),
        (["--data.env.atari.frame_skip=2"], "env.atari=.* expected its default, since CartPole-v1 is no Atari game"),
        (["--max_env_steps=1.5"], "max_env_steps=1.5 is not valid: expected an integer of at least 1"),
        (["--max_env_steps=0"], "max_env_steps=0 is not valid: expected an integer of at least 1"),
        (["--init_parts=policy"], "init_parts='policy' is not valid: expected null, or init_from beside it"),
        (["--num_threads=0"], "num_threads=0 is not valid: expected an integer of at least 1"),
        (
            ["--ckpt_path=nowhere.ckpt"],
            "ckpt_path='nowhere.ckpt' does not exist: expected a checkpoint of lightning_rl",
        ),
        (
            ["--ckpt_path=."],
            "ckpt_path='.' is a folder: expected a checkpoint of lightning_rl",
        ),
        (["--trainer.gradient_clip_val=1"], "trainer.gradient_clip_val=1 is .* expected None; set .*max_grad_norm"),
        (["--trainer.accelerator=tpuu"], "trainer: You selected an invalid accelerator name: `accelerator='tpuu'`"),
        (
            ["--model.optimizer.anneal=true", "--trainer.max_epochs=-1"],
            "optimizer.anneal=True is not valid: .* with an end",
        ),
        (["--trainer.callbacks+=LearningRateFinder"], "trainer.callbacks: LearningRateFinder cannot be used"),
        (
            ["--trainer.callbacks+=EnvStepCheckpoint", "--trainer.callbacks.every_n_env_steps=100"] * 2,
            "trainer: Found more than one stateful callback of type `EnvStepCheckpoint`",
        ),
        (["--model=A2C", "--data.actors.count=2"], "actors.count=2 is not valid: expected 0: A2C learns from"),
        (["--trainer.precision=16-true"], "precision='16-true' is not valid: expected one of 32-true, 16-mixed, bf16"),
        (["--model.optimizer.name=torch.optim.LBFGS"], "optimizer.name='torch.optim.LBFGS' .* steps without a closure"),
        (
            ["--model.optimizer.options.momentum=0.9"],
            "optimizer.options={'momentum': 0.9} .* momentum needs another one: set optimizer.name",
        ),
        (
            ["--data.env.wrappers=[{class_path: 5}]"],
            "env.wrappers: class_path=5 is not valid: expected the path of a class",
        ),
        (["--model=BehaviourCloning"], "data='RolloutDataModule' is not valid: expected RecordedEpisodes"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bad_setting_is_one_message_and_status_1_and_leaves_no_run_folder(capsys, arguments, message):
    assert re.match(message, refused(capsys, "fit", *SMALL, *arguments))
    assert not Path("runs").exists()


def test_a_format_of_recordings_without_a_folder_is_refused(capsys):
    message = "record_as='video' is not valid: expected null, or record beside it"
    assert message in refused(capsys, "predict", *SMALL, "--record_as=video")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data:\n  num_envz: 3\n", "data.num_envz=3 is no option; did you mean data.num_envs or"),
        ("dota:\n  num_envs: 3\n", "dota.num_envs=3 is no option; did you mean data.num_envs or"),
        ("modl:\n  class_path: PPO\n", r"modl='PPO' is no option; did you mean model\?$"),
        ("data:\n  num_envs: many\n", "data.num_envs='many' is not valid: expected an integer$"),
        ("data:\n  backend: envpol\n", "data.backend='envpol' is not valid: expected sync, .*, torch or envpool$"),
        ("model:\n  class_path: PPO\n  init_args:\n    gama: 0.9\n", "model.gama=0.9 is no .* you mean model.gamma"),
        ("model:\n  class_path: PPPO\n", "model='PPPO' is no known class; did you mean PPO"),
        ("model: {class_path: PPO, gamma: 0.9}", "model.gamma=0.9 is beside class_path: expected it under init_args$"),
        (
            "data: {class_path: RolloutDataModule, num_envs: 3}",
            "data.num_envs=3 is beside class_path: expected",
        ),
        ("data: [1, 2\n", r"config='bad\.yaml' cannot be read: .*while parsing a flow sequence.*, line 1, column 7"),
        ("max_env_steps: ten\n", "max_env_steps='ten' is not valid: expected an integer, a number or null$"),
        ("max_env_steps: true\n", "max_env_steps=True is not valid: expected an integer"),
        ("model:\n  init_args:\n    clip_range: fast\n", "model.clip_range='fast' is not valid: expected a number"),
        ("# data:\n", "config='bad.yaml' is not valid: expected a file with options, such as model and data$"),
    ],
    ids=[
        "key",
        "section",
        "class of a section",
        "type",
        "choice",
        "argument",
        "class",
        "beside",
        "data",
        "syntax",
        "run",
        "truth",
        "schedule",
        "comments only",
    ],
)
def test_a_bad_configuration_is_one_message_and_status_2(capsys, content, message):
    Path("bad.yaml").write_text(content)
    assert re.match(message, refused(capsys, "fit", "--config", CARTPOLE, "--config", "bad.yaml", status=2), re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "ppo/cartpole", "exprt"], ".*invalid choice: 'exprt'"),
        (
            ["fit"],
            "model and data.env_id required: expected for example --config ppo/cartpole, or --model PPO --data.env_id",
        ),
        (["test", "--model=PPO"], "data.env_id required: expected for example"),
        (["fit", "--config", "nowhere.yaml"], "config='nowhere.yaml' does not exist: expected a file, or the name of"),
        (["fit", "--config=ppo/cartpol"], "config='ppo/cartpol' does not exist: .* configuration like ppo/cartpo"),
        (["fit", *SMALL, "--init_parts=[nonsense]"], r"init_parts=\['nonsense'\] .*: expected policy, critic or norm"),
        *((["fit", *SMALL, f"--max_env_steps={n}"], f"max_env_steps={n!r} is not valid") for n in ("ten", True)),
        *(
            (
                ["fit", *SMALL, f"--model={algorithm}", f"--model.{option}=linear(0.2)"],
                rf"model.{option}='linear\(0.2\)' is not valid: expected a number",
            )
            for algorithm, option in (("PPO", "clip_range"), ("PPO", "learning_rate"), ("IMPALA", "vtrace_lambda"))
        ),
        (
            ["fit", *SMALL, "--model.optimizer.max_grad_norm=abc"],
            "model.optimizer.max_grad_norm='abc' is not valid: expected a number or null$",
        ),
        (["fit", *SMALL, "--data.info_keys=1"], r"data.info_keys=1 is not valid: expected a list in brackets: \[text"),
        (["fit", *SMALL, "--data.env.wrappers=X"], "data.env.wrappers='X' .* expected a list in brackets: .* or null"),
        (["fit", *SMALL, "--data.env.kwargs=x"], "data.env.kwargs='x' is not valid: expected a dict$"),
        (
            ["fit", *SMALL, "--model.policy={hidden_sizes: [a]}"],
            r"model.policy.hidden_sizes=\['a'\] is not valid: ",
        ),
        (
            ["fit", *SMALL, "--model.policy={hidden: [3]}"],
            r"model.policy.hidden=\[3\] is no option; did you mean ",
        ),
        (["fit", *SMALL, "--model.optimizer=3"], "model.optimizer=3 is not valid: expected a dict of its options$"),
        (["fit", *SMALL, "--data.env=CartPole-v1"], r"data\.env=.* a dict .*; did you mean data\.env_id\?$"),
        (
            ["fit", *SMALL, "--seed_everything=x"],
            "seed_everything='x' is not valid: expected true or",
        ),
        (
            ["fit", *SMALL, "--model=tests.cli.test_main.WithoutClipping", "--model.clip_range=0.1"],
            "model.clip_range=0.1 is no option, since the class sets clip_range itself$",
        ),
        (["fit", "--model=Distillation", "--data.env_id=CartPole-v1"], "model.teacher required$"),
        (["fit", *SMALL, "--data=RecordedEpisodes"], "data.episodes required$"),
        (["fit", "--model.help", "PPOO"], "model='PPOO' is no known class; did you mean PPO"),
        (["fit", *SMALL, "--data.nonsense=3"], "data.nonsense=3 is no option$"),
        (
            ["fit", "--model.optimizer.anneal", *SMALL],
            "model.optimizer.anneal='--data.env_id=CartPole-v1' is not valid: expected true or false$",
        ),
        (["fit", "ppo/cartpole"], "'ppo/cartpole' is no option: expected --config ppo/cartpole$"),
        (["fit", "ppo/cartpol"], "unrecognized arguments: ppo/cartpol$"),
        (["--config=ppo/cartpole", "fit"], "expected a command first: lightning-rl fit --config NAME$"),
        (["fit", *SMALL, "--max_env=3"], "max_env=3 is no option; did you mean max_env_steps"),
        (["fit", *SMALL, "--data.num_env=3"], "data.num_env=3 is no option; did you mean data.num_envs or"),
        (["fit", *SMALL, "--model.num_envs=3"], r"model.num_envs=3 is no option; did you mean data.num_envs or"),
        (["fit", *SMALL, "--lr", "1e-3"], "lr='1e-3' is no option; did you mean model.learning_rate or"),
        (["fit", *SMALL, "--gamma=0.9"], r"gamma=0.9 is no option; did you mean model.gamma\?$"),
        (["fit", "--model", "ppo", "--data.env_id=CartPole-v1"], "model='ppo' is no known class; did you mean PPO"),
        (["fit", "--model=DQN", "--data.env_id=CartPole-v1"], "model='DQN' is no known class: expected the name of a"),
        (["fit", "--model=PPO", "--data", "CartPole-v1"], "data='CartPole-v1' is no known class: expected the name"),
        (["fit", *SMALL, "--trainer.callbacks+=EnvStepLimitt"], "trainer.callbacks='EnvStepLimitt' is .* EnvStepLimit"),
        (["fit", *SMALL, "--trainer.callbacks+=LRCallback"], "trainer.callbacks='LRCallback' is no .*class(?!.* _)"),
        (["export", "--episodes=ten"], "episodes='ten' is not valid: expected an integer$"),
        (["export", "--episods=10"], r"episods=10 is no option; did you mean episodes\?$"),
    ],
    ids=lambda value: " ".join(x for x in value if x not in SMALL) if isinstance(value, list) else "",
)
def test_arguments_that_make_no_sense_are_one_message_and_status_2(capsys, arguments, message):
    assert re.match(message, refused(capsys, *arguments, status=2), re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "which"),
    [
        (["--model.gama=0.9"], "lightning-rl fit --help_all, --model.help PPO"),
        (["--model=tests.cli.test_main.Own", "--model.gama=1"], "--help_all, --model.help tests.cli.test_main.Own"),
        (
            ["--trainer.callbacks+=EnvStepLimit", "--trainer.callbacks.steps=4"],
            "--trainer.callbacks.help EnvStepLimit",
        ),
    ],
    ids=["algorithm", "custom algorithm", "callback"],
)
def test_an_error_says_where_the_options_are_listed(capsys, arguments, which):
    with pytest.raises(SystemExit):
        main(["fit", *SMALL, *arguments])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("All options: ") and last.endswith(which)


def test_options_of_another_algorithm_that_are_dropped_are_named(capsys):
    more = ["--model.optimizer.options.eps=0.1", "--model.clipping.value=0.2"]
    main(["fit", *SMALL, *more, "--max_env_steps=32"])
    assert "WARNING" not in capsys.readouterr().out
    main(["fit", *SMALL, *more, "--model=A2C", "--max_env_steps=32"])
    dropped = "WARNING: dropped model.clipping.value, model.num_minibatches, which A2C does not have.\n"
    assert dropped in capsys.readouterr().out


def test_steps_between_checkpoints_leave_the_best_one_and_a_monitor_does_not(capsys):
    every = ["--trainer.callbacks+=EnvStepCheckpoint", "--trainer.callbacks.every_n_env_steps=32"]
    cli = main(["fit", *SMALL, *every, "--max_env_steps=64"])
    assert re.search(r"^  checkpoint:  .*/best-step=\d+\.ckpt \(best", capsys.readouterr().out, re.MULTILINE)
    names = {path.name.partition("=")[0] for path in (cli.run_dir / "checkpoints").iterdir()}
    assert names == {"best-step", "last.ckpt", "step"}
    cli = main(["fit", *SMALL, *every, "--trainer.callbacks.save_top_k=2", "--max_env_steps=96"])  # monitors the step
    names = sorted(path.name.partition("=")[0] for path in (cli.run_dir / "checkpoints").iterdir())
    assert names == ["best-step", "last.ckpt", "step", "step"]
    every += ["--trainer.callbacks.monitor=rollout/episode_return", "--trainer.callbacks.mode=max"]
    cli = main(["fit", *SMALL, *every, "--max_env_steps=64"])
    names = {path.name.partition("=")[0] for path in (cli.run_dir / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "step"}


def test_the_configuration_lies_in_the_folder_of_the_run_whatever_the_logger():
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=elsewhere"]
    cli = main(["fit", *SMALL, *logger, "--max_env_steps=32"])
    assert (cli.run_dir / "config.yaml").is_file()
    assert list(Path("elsewhere").rglob("metrics.csv")) and not list(Path("elsewhere").rglob("config.yaml"))


def test_the_log_of_each_logger_is_named_and_predict_makes_none(capsys):
    Path("two.yaml").write_text("""
trainer:
  logger:
  - {class_path: TensorBoardLogger, init_args: {save_dir: board}}
  - {class_path: CSVLogger, init_args: {save_dir: rows}}
""")
    main(["fit", "--config=two.yaml", *SMALL, "--max_env_steps=32"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  log: ")]
    assert [line.split()[1] for line in lines] == [f"{name}/lightning_logs/version_0" for name in ("board", "rows")]
    main(["predict", "--config=two.yaml", *SMALL, "--ckpt_path=last"])
    assert not list(Path().rglob("version_1"))


def test_missing_package_of_a_logger_is_named(capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["lightning-rl", "fit", *SMALL, "--trainer.logger=tests.cli.test_main.Unavailable"]
    )
    with pytest.raises(SystemExit):
        run()
    assert capsys.readouterr().err.splitlines()[-1] == "lightning-rl: error: Requirement 'unavailable>=1' not met"


def test_trackers_that_replace_sys_exit_get_the_status_of_an_error(monkeypatch):
    statuses, leave = [], sys.exit
    monkeypatch.setattr(sys, "exit", lambda status: statuses.append(status) or leave(status))  # as W&B does
    monkeypatch.setattr(sys, "argv", ["lightning-rl", "fit", *SMALL, "--trainer.default_root_dir=/dev/null/x"])
    with pytest.raises(SystemExit):
        run()
    assert statuses == [1]


def test_modules_in_the_current_folder_can_be_named(monkeypatch):
    Path("beside.py").write_text("from lightning_rl import PPO\nclass Mine(PPO):\n    pass\n")
    # As from the console script, which does not have the current folder on its path.
    code = "import sys; sys.path.remove(''); from lightning_rl.__main__ import run; run()"
    done = programs.run("-c", code, "fit", *SMALL, "--model=beside.Mine", "--max_env_steps=32")
    assert done.returncode == 0, done.stderr
    assert (Path("runs/mine/CartPole-v1/version_0/checkpoints/last.ckpt")).is_file()


@pytest.mark.parametrize(
    "arguments", [["--model=beside_it.Mine"], ["--config=my configs/model.yaml"]], ids=["argument", "configuration"]
)
def test_a_module_beside_a_configuration_is_found_from_another_folder(monkeypatch, arguments):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside_it", raising=False)
    Path("my configs").mkdir()
    Path("my configs/beside_it.py").write_text("from lightning_rl import PPO\nclass Mine(PPO):\n    pass\n")
    Path("my configs/mine.yaml").write_text("data:\n  env_id: CartPole-v1\n  env: {imports: [beside_it]}\n")
    Path("my configs/model.yaml").write_text("model: beside_it.Mine\n")
    cli = main(["fit", *SMALL, "--config", "my configs/mine.yaml", *arguments, "--trainer.fast_dev_run=true"])
    assert type(cli.model).__name__ == "Mine"
    assert sys.path.count(str(Path("my configs").absolute())) == 1  # also if several files are in the folder


def test_the_printed_next_command_finds_a_module_beside_the_configuration():
    Path("mine").mkdir()
    Path("mine/beside_it.py").write_text("from lightning_rl import PPO\nclass Mine(PPO):\n    pass\n")
    Path("mine/model.yaml").write_text("model: beside_it.Mine\n")
    done = run_process("fit", *SMALL, "--config", "mine/model.yaml", "--max_env_steps=32")
    (command,) = re.findall(r"next: +lightning-rl (.*)", done.stdout)
    assert command.startswith("test --config mine/model.yaml --config runs/mine/CartPole-v1/version_0/config.yaml ")
    tested = run_process(*shlex.split(command))
    assert tested.returncode == 0, tested.stderr
    assert "Policy of Mine from runs/" in tested.stdout


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "own_models.Mein",
            "module 'own_models' has no attribute 'Mein'",
        ),
        (
            "own_modls.Mine",
            "No module named 'own_modls'",
        ),
        ("own_models.Other", "expected a subclass of OnPolicyAlgorithm"),
    ],
)
def test_a_class_of_ones_own_that_is_not_there_is_said_with_what_was_meant(capsys, monkeypatch, model, message):
    Path("own_models.py").write_text("import lightning_rl\nclass Mine(lightning_rl.PPO):\n    pass\nclass Other: ...\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    arguments = [argument for argument in SMALL if not argument.startswith("--model")]
    text = refused(capsys, "fit", *arguments, f"--model={model}", "--model.temperature=1", status=2)
    assert len(text.splitlines()) == 1
    assert text.startswith(f"model={model!r} ") and message in text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("fit", "env_id='Acrobot-v1' does not fit the checkpoint: expected 'CartPole-v1'"),
        ("test", r"observation_space=Box\(.*, \(6,\), float32\) does not fit the checkpoint: expected Box\(.*, \(4,"),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused_and_nothing_is_written(capsys, command, expected):
    cli = main(["fit", *SMALL, "--max_env_steps=32"])
    before = {path: path.read_bytes() for path in cli.run_dir.rglob("*") if path.is_file()}
    arguments = [*SMALL, "--data.env_id=Acrobot-v1", f"--ckpt_path={cli.run_dir}/checkpoints/last.ckpt"]
    message = refused(capsys, command, *arguments)
    assert re.match(expected, message)
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluation_needs_the_checkpoint_that_it_asks_for(capsys, command, name):
    message = refused(capsys, command, *SMALL, f"--ckpt_path={name}")
    assert message == f"ckpt_path='{name}': there is no {name} checkpoint under runs/ppo/CartPole-v1"


BROKEN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Broken(CartPoleEnv):
    def step(self, action):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 5:
            raise RuntimeError("the rope has snapped")
        return super().step(action)

gymnasium.register("Broken-v0", Broken)
"""


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_that_raises_is_named_with_its_episode_seed_and_line(capsys, monkeypatch, as_typed, backend):
    monkeypatch.syspath_prepend(str(as_typed))
    Path("broken_package.py").write_text(BROKEN)
    message = refused(capsys, "fit", *SMALL, "--data.env_id=broken_package:Broken-v0", f"--data.backend={backend}")
    assert re.match(r"environment \d \(episode 0, seed \d+, step 5\) raised in step: RuntimeError: the rope", message)


@pytest.mark.parametrize("raised", ["SystemExit(0)", "KeyboardInterrupt"])
def test_an_environment_that_would_end_the_program_is_an_error_with_status_one(capsys, monkeypatch, as_typed, raised):
    monkeypatch.syspath_prepend(str(as_typed))
    module = f"broken_by_{raised[:4].lower()}"
    Path(f"{module}.py").write_text(re.sub(r"raise .*", f"raise {raised}", BROKEN))
    monkeypatch.setattr(sys, "argv", ["lightning-rl", "fit", *SMALL, f"--data.env_id={module}:Broken-v0"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "Stopped" not in out
    (message,) = (line for line in err.splitlines() if line.startswith("lightning-rl: error: "))
    assert re.search(rf"environment \d \(episode 0, seed \d+, step 5\) raised in step: {raised[:10]}", message)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_error_in_a_process_leaves_no_traceback_but_the_line_that_raised(monkeypatch, as_typed, backend):
    Path("broken_package.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{as_typed}:{ROOT}")
    done = run_process("fit", *SMALL, "--data.env_id=broken_package:Broken-v0", f"--data.backend={backend}")
    assert done.returncode == 1
    message, place = done.stderr.splitlines()[-2:]
    assert re.match(r"lightning-rl: error: environment \d \(episode 0, seed ", message)
    assert place == f'  File "{as_typed}/broken_package.py", line 9, in step'
    assert "Traceback" not in done.stderr


def test_an_environment_variable_shows_the_whole_traceback(monkeypatch, as_typed):
    Path("broken_package.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{as_typed}:{ROOT}")
    monkeypatch.setenv("LIGHTNING_RL_DEBUG", "1")
    done = run_process("fit", *SMALL, "--data.env_id=broken_package:Broken-v0")
    assert done.returncode == 1
    assert f'File "{as_typed}/broken_package.py", line 9, in step' in done.stderr
    assert done.stderr.count("Traceback") >= 2  # of the environment, and of what came of it


def test_a_logger_that_cannot_write_is_named_without_a_traceback(capsys, as_typed):
    Path("file").touch()
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=file/logs"]
    assert refused(capsys, "fit", *SMALL, *logger).strip() == f"Not a directory: '{as_typed}/file/logs'"


def test_the_installed_program_ends_with_status_zero(tmp_path, monkeypatch):
    """A console script hands what its function returns to `sys.exit`."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["lightning-rl"].partition(":")
    function = getattr(importlib.import_module(module), name)
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--model=PPO", "--data.env_id=CartPole-v1", "--data.rollout_length=8", "--max_env_steps=64"]
    monkeypatch.setattr(sys, "argv", ["lightning-rl", *arguments, "--trainer.accelerator=cpu"])
    with pytest.raises(SystemExit) as ended:
        sys.exit(function())
    assert ended.value.code is None


class OwnCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        link_spaces(parser)


@pytest.mark.parametrize("subclass_mode", [False, True])
def test_a_lightning_cli_of_ones_own_trains_evaluates_and_resumes_with_linked_spaces(subclass_mode):
    def run(command: str, *options: str) -> PPO:
        modes = {"subclass_mode_model": subclass_mode, "subclass_mode_data": subclass_mode}
        classes = ["--model=PPO", "--data=RolloutDataModule"] if subclass_mode else []
        given = [option for option in SMALL if option != "--model=PPO"]
        quiet = ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
        overwrite = {"overwrite": True}
        return OwnCLI(
            PPO,
            RolloutDataModule,
            args=[command, *classes, *given, *quiet, *options],
            save_config_kwargs=overwrite,
            **modes,
        ).model

    model = run("fit", "--trainer.max_epochs=1")
    assert model.env_steps == 64
    assert (model.observation_space.shape, model.action_space) == ((4,), spaces.Discrete(2))
    path = "checkpoints/epoch=0-step=64.ckpt"
    assert run("validate", f"--ckpt_path={path}").env_steps == 64
    assert run("fit", "--trainer.max_epochs=2", f"--ckpt_path={path}").env_steps == 128


def test_a_configured_last_checkpoint_is_where_a_restart_looks_for_it(capsys):
    line = ["fit", *SMALL, "--trainer.max_epochs=1", "--ckpt_path=last"]
    line += ["--trainer.callbacks+=lightning_rl.LastCheckpoint", "--trainer.callbacks.train_time_interval=0:01:00"]
    line += ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.init_args.save_dir=elsewhere"]
    cli = main(line)
    [kept] = [callback for callback in cli.trainer.callbacks if isinstance(callback, LastCheckpoint)]
    assert kept.train_time_interval == timedelta(minutes=1)
    assert (cli.run_dir / "checkpoints/last.ckpt").is_file()
    assert not list(Path("elsewhere").rglob("*.ckpt"))
    main(line)
    assert "Resuming from runs/ppo/CartPole-v1/version_0/checkpoints/last.ckpt, at 64" in capsys.readouterr().out
