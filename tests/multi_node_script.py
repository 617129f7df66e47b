"""Run by `test_multi_node` as one process of each of two nodes; each leaves in a folder what it ended with."""

import os
import sys
from pathlib import Path

import torch

from examples.multi_node.train import main as train
from lightning_rl.cli.main import main as command_line
from tests.helpers import parameters_of

SETTINGS = [
    *("--model=PPO", "--data.env_id=CartPole-v1", "--data.num_envs=2", "--data.rollout_length=16"),
    *("--data.rollouts_per_epoch=2", "--data.evaluation.episodes=3"),
    *("--trainer.accelerator=cpu", "--trainer.num_nodes=2", "--trainer.devices=1", "--trainer.strategy=ddp"),
]


def run(folder: Path) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    os.chdir(folder)
    model = train(max_env_steps=2048, root="example")
    fitted = command_line(["fit", *SETTINGS, "--max_env_steps=256"])
    assert fitted.trainer.log_dir is not None
    command_line(["predict", *SETTINGS, "--ckpt_path=last"])
    seen = {"parameters": parameters_of(model), "env_steps": model.env_steps, "log_dir": fitted.trainer.log_dir}
    seen["command_line"] = parameters_of(fitted.model)
    torch.save(seen, f"rank_{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv.pop()))
