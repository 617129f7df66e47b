"""Tune hyper-parameters with Optuna, several seeds per trial, and write the best as a configuration.

    python examples/tune.py

A trial reports its validation returns against environment steps, and is pruned if other trials were better there.
Trials are stored in `tune.db`: a second process, or a second start, continues the same study. Train with the result by
`lightning-rl fit --config best.yaml`.
"""

import logging
from pathlib import Path
from typing import Any

import optuna
import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepValidation, RolloutDataModule

DATA: dict[str, Any] = {"env_id": "CartPole-v1", "num_envs": 8, "rollout_length": 32, "evaluation": {"episodes": 20}}
RETURN = "val/episode_return"


class ReportReturn(Callback):
    """Report the return of each validation to a trial, and prune it; counts the steps of earlier seeds too."""

    def __init__(self, trial: optuna.Trial, earlier_steps: int) -> None:
        self.trial, self.earlier_steps = trial, earlier_steps

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.trial.report(float(trainer.callback_metrics[RETURN]), self.earlier_steps + pl_module.env_steps)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def suggest(trial: optuna.trial.BaseTrial) -> dict[str, Any]:
    """Return the options of PPO for a trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
        "num_epochs": trial.suggest_categorical("num_epochs", [4, 10, 20]),
        "gamma": 1 - trial.suggest_float("1 - gamma", 0.005, 0.05, log=True),
        "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 0.98),
    }


def run(trial: optuna.Trial, seed: int, earlier_steps: int, max_env_steps: int) -> float:
    """Train with one seed, and return the mean return of the last validation."""
    seed_everything(seed, verbose=False)
    data = RolloutDataModule(**DATA)
    model = PPO(data.observation_space, data.action_space, **suggest(trial))
    every = EnvStepValidation(max(1, max_env_steps // 4))
    callbacks = [EnvStepLimit(max_env_steps), every, ReportReturn(trial, earlier_steps)]
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=-1, accelerator="cpu", num_sanity_val_steps=0, callbacks=callbacks, **quiet).fit(model, data)
    return float(model.trainer.callback_metrics[RETURN])


def main(num_trials: int = 30, seeds: tuple[int, ...] = (0, 1, 2), max_env_steps: int = 30_000) -> optuna.Study:
    """Maximize the mean return over seeds, and write `best.yaml`."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the devices of every run

    def objective(trial: optuna.Trial) -> float:
        runs = [run(trial, seed, n * 2 * max_env_steps, max_env_steps) for n, seed in enumerate(seeds)]
        return sum(runs) / len(runs)

    pruner = optuna.pruners.MedianPruner(n_startup_trials=5)
    sampler = optuna.samplers.TPESampler()  # without a seed: a continued study would repeat its trials
    names: Any = {"storage": "sqlite:///tune.db", "study_name": "ppo-cartpole", "load_if_exists": True}
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner, **names)
    study.optimize(objective, n_trials=num_trials)
    model = {"class_path": "PPO", "init_args": suggest(optuna.trial.FixedTrial(study.best_params))}
    best = {"seed_everything": 0, "max_env_steps": max_env_steps, "data": DATA, "model": model}
    Path("best.yaml").write_text(f"# Mean return {study.best_value:.1f}\n" + yaml.safe_dump(best, sort_keys=False))
    return study


if __name__ == "__main__":
    main()
