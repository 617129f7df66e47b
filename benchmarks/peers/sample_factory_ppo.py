"""Sample-Factory's APPO on CartPole in its serial mode: one process, which alternates sampling and learning.

It clips the ratio to [1 / (1 + c), 1 + c], and treats a time limit as a terminal state. Other workloads are not
supported: a minibatch must be at least as large as the rollout of one environment, and it needs Gymnasium 0.29 or
older.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin(images=False)

from environments import EPISODE_RETURNS, factories  # noqa: E402
from sample_factory.algo.runners.runner import AlgoObserver  # noqa: E402
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # noqa: E402
from sample_factory.envs.env_utils import register_env  # noqa: E402
from sample_factory.train import make_runner  # noqa: E402

run.imported()
workload = run.workload


def make_environment(name: str, *_: Any, **options: Any) -> Any:
    return factories(workload, own_normalization=True)[0]()


class Ticks(AlgoObserver):  # type: ignore[misc]
    """A training step is all epochs over one rollout."""

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        run.tick()


never = 10**9
settings = {
    "algo": "APPO",
    "env": "workload",
    "experiment": "benchmark",
    "train_dir": tempfile.mkdtemp(),
    "device": "cpu",
    "seed": run.args.seed,
    "serial_mode": True,
    "async_rl": False,
    "num_workers": 1,
    "num_envs_per_worker": workload["num_envs"],
    "worker_num_splits": 1,
    "batched_sampling": False,
    "train_for_env_steps": workload["rollouts"] * workload["rows"],
    "rollout": workload["num_steps"],
    "recurrence": 1,
    "use_rnn": False,
    "batch_size": workload["minibatch"],
    "num_batches_per_epoch": workload["minibatches"],
    "num_epochs": workload["epochs"],
    "shuffle_minibatches": True,
    "learning_rate": workload["lr"],
    "lr_schedule": "constant",
    "adam_eps": workload["adam_eps"],
    "gamma": workload["gamma"],
    "gae_lambda": workload["gae_lambda"],
    "ppo_clip_ratio": workload["clip"],
    "ppo_clip_value": never,
    # Its value loss lacks the factor ½ that the workloads mean.
    "value_loss_coeff": workload["vf_coef"] / 2,
    "exploration_loss_coeff": workload["ent_coef"],
    "max_grad_norm": workload["max_grad_norm"],
    "with_vtrace": False,
    "normalize_input": False,
    "normalize_returns": False,
    "reward_scale": 1.0,
    "actor_critic_share_weights": False,
    "nonlinearity": workload["activation"],
    "policy_initialization": "orthogonal",
    "decorrelate_envs_on_one_worker": False,
    "set_workers_cpu_affinity": False,
    "save_every_sec": never,
    "save_best_every_sec": never,
    "experiment_summaries_interval": never,
    "heartbeat_interval": never,
    "heartbeat_reporting_interval": never,
}
register_env("workload", make_environment)


def main() -> None:
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    arguments += ["--encoder_mlp_layers", *map(str, workload["hidden"])]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        parser, _ = parse_sf_args(arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        runner.register_observer(Ticks())
        runner.init()
        runner.run()
    run.report("sample_factory", version("sample-factory"), EPISODE_RETURNS)


# What the spaces are it finds out in a process of its own, which imports this file.
if __name__ == "__main__":
    main()
