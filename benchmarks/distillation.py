"""A teacher that sees the velocities of CartPole teaches a recurrent policy that does not.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py [--seeds 3] [--save]

The teacher is trained with `configs/ppo/cartpole.yaml`, the student with `configs/distillation/cartpole.yaml`, and both
are evaluated every 3,072 environment steps. Recurrent PPO is `configs/ppo/cartpole_memory.yaml`, whose results are in
`benchmarks/results/ppo/cartpole_memory`. The result goes to `benchmarks/results/distillation_steps/cartpole.json`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import seed_everything
from record import RESULTS, ROOT
from short_runs import Scores, main, quiet_trainer

from lightning_rl import PPO, Distillation, EnvStepLimit, EnvStepValidation, RolloutDataModule

GOAL, EVERY = 475, 3_072


def fit(config: str, seed: int, scores: Scores, path: Path, env: Any, **options: Any) -> None:
    """Train with a shipped configuration and other options, and save a checkpoint."""
    seed_everything(seed)
    settings = yaml.safe_load((ROOT / "configs" / config).read_text())
    data = RolloutDataModule(**settings["data"] | {"env": env}, seed=seed)
    kind = {"PPO": PPO, "Distillation": Distillation}[settings["model"]["class_path"]]
    model = kind(data.observation_space, data.action_space, **settings["model"]["init_args"] | options)
    limit = EnvStepLimit(settings["max_env_steps"])
    trainer = quiet_trainer(limit, EnvStepValidation(EVERY), scores, max_epochs=-1)
    trainer.fit(model, data)
    trainer.save_checkpoint(path)


def reached(env_steps: list[int], returns: list[float]) -> int | None:
    """Return the environment step of the first evaluation that reaches the goal."""
    return next((step for step, score in zip(env_steps, returns, strict=True) if score >= GOAL), None)


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Return the evaluations of one student."""
    student = yaml.safe_load((ROOT / "configs" / "distillation" / "cartpole.yaml").read_text())
    env, teacher = student["data"]["env"], folder / "teacher.ckpt"
    teaching, learning = Scores(), Scores()
    fit("ppo/cartpole.yaml", seed, teaching, teacher, env)
    fit("distillation/cartpole.yaml", seed, learning, folder / "student.ckpt", env, teacher=str(teacher))
    begin = student["model"]["init_args"]["rl_coef"]["points"][-1][0]  # of PPO with its full weight
    with_full_ppo = [score for step, score in zip(learning.env_steps, learning.returns, strict=True) if step > begin]
    return {
        "seed": seed,
        "teacher": teaching.returns[-1],
        "steps_to_goal": reached(learning.env_steps, learning.returns),
        "lowest_return_with_full_ppo": min(with_full_ppo),
        "env_steps": learning.env_steps,
        "returns": learning.returns,
    }


def recurrent_ppo() -> list[int | None]:
    """Return the steps to the goal of each seed of recurrent PPO, evaluated every 15,360 steps."""
    files = sorted((RESULTS / "ppo" / "cartpole_memory").glob("seed*.json"))
    curves = [json.loads(file.read_text())["curve"]["val/episode_return"] for file in files]
    return [reached(*map(list, zip(*curve, strict=True))) for curve in curves]


def compare(seeds: int) -> dict[str, Any]:
    """Return the runs of every seed beside recurrent PPO."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in range(seeds)]
    return {
        "configuration": "configs/distillation/cartpole.yaml",
        "goal": GOAL,
        "steps_to_goal": [one["steps_to_goal"] for one in runs],
        "steps_to_goal_of_recurrent_ppo": recurrent_ppo(),
        "lowest_return_with_full_ppo": [one["lowest_return_with_full_ppo"] for one in runs],
        "runs": runs,
    }


if __name__ == "__main__":
    main(__doc__, "distillation_steps/cartpole", compare)
