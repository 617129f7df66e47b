"""Class specs on the command line, in parts: `--model.policy.network.init_args.width 64`."""

import shlex
import sys

import pytest
import torch
import yaml
from torch import nn

from lightning_rl.cli.main import main

ENCODER = f"{__name__}.Encoder"
SGD = "torch.optim.SGD"


class Encoder(nn.Module):
    def __init__(self, space, width=256, bias=True):
        super().__init__()
        self.linear = nn.Linear(space.shape[0], width, bias)
        self.out_features = width

    def forward(self, observations):
        return torch.relu(self.linear(observations))


@pytest.fixture(autouse=True)
def as_typed(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    return in_tmp_path


def options(capsys, line: str) -> dict:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--model=PPO", "--data.env_id=CartPole-v1", *shlex.split(line), "--print_config"])
    assert exit_.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        (
            f"--model.policy.network {ENCODER} --model.policy.network.init_args.width 64",
            "network",
            (ENCODER, {"width": 64}),
        ),
        (
            f"--model.policy.network.init_args.width 64 --model.policy.network.class_path {ENCODER}",
            "network",
            (ENCODER, {"width": 64}),
        ),
        (
            f"--model.init_args.policy.network={ENCODER} --model.init_args.policy.network.init_args.width=64 "
            "--model.policy.network.init_args.bias false",
            "network",
            (ENCODER, {"width": 64, "bias": False}),
        ),
        (
            "--model.optimizer.name torch.optim.AdamW --model.optimizer.options.betas [0.8,0.9] "
            "--model.optimizer.options.eps 1e-3 --model.optimizer.options.fused null",
            "optimizer",
            ("torch.optim.AdamW", {"betas": [0.8, 0.9], "eps": 0.001, "fused": None}),
        ),
        # The class by another name is another class: what the first one was given goes.
        (
            "--model.optimizer.name=torch.optim.Adam --model.optimizer.options.eps=0.1 --model.optimizer.options.foo 1 "
            f"--model.optimizer.name {SGD} --model.optimizer.options.momentum 0.9",
            "optimizer",
            (SGD, {"momentum": 0.9}),
        ),
        # In one piece twice, which the parser cannot do by itself.
        (
            f"--model.optimizer.name '{{class_path: {SGD}, init_args: {{momentum: 0.9, dampening: 0.1}}}}' "
            f"--model.optimizer.name '{{class_path: {SGD}, init_args: {{momentum: 0.8}}}}'",
            "optimizer",
            (SGD, {"momentum": 0.8}),
        ),
    ],
)
def test_a_class_and_its_arguments_are_given_one_by_one(capsys, line, name, expected):
    made = options(capsys, line)
    assert made[name] == dict(zip(("class_path", "init_args"), expected, strict=True))


def test_one_argument_of_a_class_in_a_configuration_is_changed(capsys, in_tmp_path):
    spec = {"class_path": SGD, "init_args": {"momentum": 0.9, "nesterov": True}}
    (in_tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"optimizer": spec}}}))
    made = options(capsys, "--config mine.yaml --model.optimizer.options.momentum 0.5")
    assert made["optimizer"] == {"class_path": SGD, "init_args": {"momentum": 0.5, "nesterov": True}}
    made = options(capsys, "--config mine.yaml --model.optimizer.name torch.optim.Adam")
    assert made["optimizer"] == "torch.optim.Adam"


def test_leaves_of_an_observation_have_their_own(capsys):
    made = options(
        capsys,
        f"--model.policy.network.rest mlp --model.policy.network.camera {ENCODER} --model.policy.network.camera.init_args.width 64 "
        f"--model.policy.network.arm.0.class_path {ENCODER}",
    )
    assert made["network"] == {
        "rest": "mlp",
        "camera": {"class_path": ENCODER, "init_args": {"width": 64}},
        "arm.0": {"class_path": ENCODER},
    }


def test_other_dicts_are_given_as_before(capsys):
    made = options(
        capsys, "--model.policy.memory.kind lstm --model.policy.memory.hidden_size 8 --model.learning_rate.kind linear"
    )
    assert made["memory"] == {"kind": "lstm", "hidden_size": 8}
    assert made["learning_rate"] == {"kind": "linear"}


def test_the_model_is_made_of_them(in_tmp_path):
    line = (
        "fit --model PPO --data.env_id CartPole-v1 --data.num_envs 2 --data.rollout_length 16 --trainer.fast_dev_run 1 "
        f"--trainer.accelerator cpu --model.policy.network {ENCODER} --model.policy.network.init_args.width 24 "
        f"--model.optimizer.name {SGD} --model.optimizer.options.momentum 0.9"
    )
    cli = main(line.split())
    assert cli.model.policy.actor_encoder.out_features == 24
    assert cli.model.optimizers().param_groups[0]["momentum"] == 0.9


def test_arguments_of_no_class_are_refused(capsys):
    line = "fit --model PPO --data.env_id CartPole-v1 --model.optimizer.options.momentum 0.9"
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    assert exit_.value.code == 1
    assert "expected a dict with 'class_path'" in capsys.readouterr().err
