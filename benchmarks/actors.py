"""Time IMPALA on CartPole with and without asynchronous actors, in alternation, and print one line of JSON.

    OMP_NUM_THREADS=1 python benchmarks/actors.py --actors 2 --pairs 3

By default a rollout is one batch of the paper: 32 unrolls of 20 steps. The result has environment steps per second of
wall time, without the first rollouts, and the CPU time per step of learner and actors, from which the speed on another
number of cores can be estimated. `--share` instead measures the share of an actor's time that the policy takes, for a
small network and for the network of Atari games. This share limits what a common inference process for several actors
could save. `--save` writes the result to `benchmarks/results/actors/`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from record import add_saving, save

from lightning_rl import IMPALA, RolloutDataModule
from lightning_rl.data.collector import Sampler
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.rollout import Rollout

WARM_UP = 30


class Timer(Callback):
    """Wall and CPU time of the learner since the untimed rollouts."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Rollout, batch_idx: int
    ) -> None:
        if batch_idx == WARM_UP:
            self.began = time.perf_counter(), time.process_time(), pl_module.env_steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wall, cpu, steps = self.began
        self.steps = int(pl_module.env_steps) - int(steps)  # type: ignore[arg-type]
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu


def run(num_actors: int, args: argparse.Namespace) -> dict[str, float]:
    """Train once, and return steps per second and CPU microseconds per step."""
    data = RolloutDataModule(
        "CartPole-v1",
        args.num_envs,
        args.rollout_length,
        args.rollouts,
        seed=0,
        actors={"count": num_actors, "prefetch": args.prefetch if num_actors else None},
    )
    torch.manual_seed(0)
    model, timer = IMPALA(data.observation_space, data.action_space), Timer()
    before = os.times()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, callbacks=[timer], **quiet).fit(model, data)
    after = os.times()
    in_actors = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "num_actors": num_actors,
        "steps_per_second": round(timer.steps / timer.wall),
        "learner_cpu_us_per_step": round(1e6 * timer.cpu / timer.steps, 1),
        "actors_cpu_us_per_step": round(1e6 * in_actors / model.env_steps, 1),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Train with and without actors, in alternation."""
    runs = [run(count, args) for _ in range(args.pairs) for count in (0, args.actors)]
    rates = [one["steps_per_second"] for one in runs]
    ratios = [round(b / a, 3) for a, b in zip(rates[::2], rates[1::2], strict=True)]
    size = {"prefetch": args.prefetch, "num_envs": args.num_envs, "rollout_length": args.rollout_length}
    return size | {"ratio": statistics.median(ratios), "ratios": ratios, "runs": runs, "cores": os.cpu_count()}


def acting(env_id: str, num_envs: int, length: int, rollouts: int) -> dict[str, Any]:
    """Return the share of an actor's CPU time that the policy takes, and how much of it larger batches save."""
    data = RolloutDataModule(env_id, num_envs=num_envs, rollout_length=length, seed=0)
    torch.manual_seed(0)
    policy = ActorCritic(data.observation_space, data.action_space)
    sampler, spent = Sampler(data.spec, num_envs, length, ()), {"policy": 0.0}
    sampler.start(0, 0, torch.device("cpu"), torch.float32)

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent["policy"] += time.process_time() - begin

        return call

    for name in ("act", "log_prob", "value"):
        vars(policy)[name] = timed(getattr(policy, name))
    sampler.collect(policy, 0)
    spent["policy"], begin = 0.0, time.process_time()
    for _ in range(rollouts):
        sampler.collect(policy, 0)
    total = time.process_time() - begin
    sampler.close()
    share = spent["policy"] / total
    alone, together = (_forward(policy, data, size) for size in (num_envs, 8 * num_envs))
    saved = 1 - together / (8 * alone)
    return {
        "env_id": env_id,
        "num_envs": num_envs,
        "policy_share": round(share, 3),
        "act_us_per_row": round(1e6 * alone / num_envs, 1),
        "act_us_per_row_8_actors": round(1e6 * together / (8 * num_envs), 1),
        "saved_of_acting_by_batching_8": round(saved, 3),
        "saved_of_an_actor_at_the_most": round(share * saved, 3),
    }


def _forward(policy: ActorCritic, data: RolloutDataModule, size: int, repeats: int = 60) -> float:
    """Return the median CPU seconds to choose actions for `size` observations."""
    space = data.observation_space
    rows = torch.stack([torch.from_numpy(space.sample()) for _ in range(size)])
    act, seconds = ActorCritic.act, []
    with torch.inference_mode():
        for _ in range(repeats):
            begin = time.process_time()
            act(policy, rows)
            seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def share() -> dict[str, Any]:
    """Measure the policy's share of an actor's time for a small network and for the network of Atari games."""
    cases = [("CartPole-v1", 8, 16, 100), ("ALE/Pong-v5", 8, 16, 4)]
    return {"actors": [acting(*case) for case in cases]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument(
        "--prefetch", type=int, help="rollouts per actor that are ready or in progress; default: as in the package"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--num_envs", type=int, default=32, help="environments of each actor")
    parser.add_argument("--rollout_length", type=int, default=20)
    parser.add_argument("--share", action="store_true", help="measure the policy's share of an actor's time")
    add_saving(parser)
    arguments = parser.parse_args()
    if arguments.rollouts < WARM_UP + 2:
        parser.error(f"--rollouts {arguments.rollouts}: expected more than {WARM_UP + 1}, which are not timed")
    torch.set_num_threads(1)
    result = share() if arguments.share else compare(arguments)
    name = "share" if arguments.share else f"cartpole-{arguments.actors}"
    save(result, arguments.save, f"actors/{name}.json")
    print("\n" + json.dumps(result), flush=True)
