"""Measure PPO with environments, acting and learning on one device: `python benchmarks/gpu.py --save`.

Three measurements in the same sizes: training on CartPole in torch under the Trainer, by the default engine and by the
compiled one; acting and stepping alone; and one gradient step on a minibatch alone (forward, loss, backward, clipping,
Adam). The last two are timed uncompiled, with a loss compiled by `torch.compile`, and replayed as one CUDA graph.
Without a GPU the script runs on the CPU, without graphs; use small sizes there, to check that it works.

    python benchmarks/gpu.py --num_envs 16 --rollout_length 8 --rollouts 1 --repeats 2
    python benchmarks/gpu.py --num_envs 8 --rollout_length 128              the sizes of W1
    python benchmarks/gpu.py --num_envs 8 --rollout_length 128 --images     W3: a Nature CNN, and Pong on the CPU
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import measure
import torch
import torch_cartpole
from gymnasium import spaces
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from record import add_saving, save
from torch import Tensor
from workload_models import make_data, make_model

from lightning_rl import ActorCritic, Rollout
from lightning_rl import functional as rl
from lightning_rl.algorithms import OnPolicyAlgorithm

_FRAMES, _GAME = spaces.Box(0, 255, (4, 84, 84), "uint8"), spaces.Discrete(6)
_WARM_UP = 3


def seconds_of(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the mean wall seconds of a call, after some untimed calls."""
    for _ in range(_WARM_UP):
        work()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays `work` as one CUDA graph, which reads and writes the same tensors each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GradientStep:
    """One gradient step of PPO on a minibatch of random rows in fixed tensors."""

    def __init__(self, policy: ActorCritic, observations: Tensor, num_actions: int, compiled: bool) -> None:
        rows, device = len(observations), observations.device
        self.policy, self.observations = policy, observations
        self.actions = torch.randint(num_actions, (rows,), device=device)
        self.old_log_probs = torch.full((rows,), -1.0, device=device)
        self.advantages, self.returns = torch.randn(2, rows, device=device)
        on_card = device.type == "cuda"
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=2.5e-4, eps=1e-5, fused=True, capturable=on_card)
        self.loss = torch.compile(self._loss) if compiled else self._loss

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()

    def _loss(self) -> Tensor:
        distribution, values = self.policy(self.observations)
        log_ratios = distribution.log_prob(self.actions) - self.old_log_probs
        surrogate = rl.clipped_surrogate_loss(log_ratios, rl.normalize_rows(self.advantages), 0.2).mean()
        return surrogate + 0.5 * rl.value_loss(values, self.returns).mean() - 0.01 * distribution.entropy().mean()


class ActAndStep:
    """Choose actions and step CartPole, in fixed tensors."""

    def __init__(self, policy: ActorCritic, num_envs: int, device: torch.device) -> None:
        self.policy = policy
        self.env = torch_cartpole.TorchCartPole(num_envs, str(device))
        self.env.reset(seed=0)
        self.kept = {name: getattr(self.env, name).clone() for name in ("state", "steps", "random")}

    @torch.no_grad()
    def __call__(self) -> None:
        vars(self.env).update(self.kept)
        self.env.step(self.policy.act(self.kept["state"]).environment_action)
        for name, kept in self.kept.items():
            kept.copy_(getattr(self.env, name))


def training(args: argparse.Namespace, device: torch.device, compiled: bool) -> dict[str, float]:
    """Return environment steps per wall second under the Trainer, and milliseconds per rollout and per update."""
    sizes = {"num_envs": args.num_envs, "num_steps": args.rollout_length, "rollouts": args.rollouts + _WARM_UP}
    workload = measure.WORKLOADS["W3" if args.images else "W1"] | sizes
    data = make_data(workload, "native", 0) if args.images else make_data(workload, "torch", 0, str(device))
    torch.manual_seed(0)
    model = make_model(workload | {"fast_paths": "compiled" if compiled else "auto"}, data)
    done: list[float] = []
    rollout_seconds: list[float] = []

    def note(_trainer: Trainer, _model: OnPolicyAlgorithm, _outputs: object, rollout: Rollout, _index: int) -> None:
        _wait(device)
        done.append(time.perf_counter())
        rollout_seconds.append(rollout.seconds)

    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[LambdaCallback(on_train_batch_end=note)],
    )
    trainer.fit(model, data)
    seconds, collecting = (done[-1] - done[_WARM_UP - 1]) / args.rollouts, mean(rollout_seconds[_WARM_UP:])
    return {
        "steps_per_second": round(args.num_envs * args.rollout_length / seconds),
        "rollout_milliseconds": round(1e3 * collecting, 2),
        "update_milliseconds": round(1e3 * (seconds - collecting), 2),
    }


def ways(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the ways in which losses are computed."""
    return ("eager",) if args.eager else ("eager", "compiled")


def parts(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return microseconds of a gradient step, and of acting and stepping, in every way that the device supports."""
    torch.manual_seed(0)
    env = torch_cartpole.TorchCartPole()
    space, actions = env.single_observation_space, env.single_action_space
    rows = args.num_envs * args.rollout_length // 4
    observations = torch.randn(rows, 4, device=device)
    if args.images:
        space, actions = _FRAMES, _GAME
        observations = torch.randint(256, (rows, *_FRAMES.shape), dtype=torch.uint8, device=device)
    found: dict[str, Any] = {"minibatch_rows": rows}
    for name in ways(args):
        policy = ActorCritic(space, actions).to(device)
        step = GradientStep(policy, observations, int(actions.n), name == "compiled")
        found[f"gradient_step_{name}"] = 1e6 * seconds_of(step, args.repeats, device)
        if device.type == "cuda":
            found[f"gradient_step_{name}_graphed"] = 1e6 * seconds_of(graphed(step), args.repeats, device)
    if not args.images:
        collect = ActAndStep(ActorCritic(space, actions).to(device), args.num_envs, device)
        found["act_and_step_eager"] = 1e6 * seconds_of(collect, args.repeats, device)
        if device.type == "cuda":
            found["act_and_step_graphed"] = 1e6 * seconds_of(graphed(collect), args.repeats, device)
    return {name: round(value, 2) for name, value in found.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", type=int, default=4096)
    parser.add_argument("--rollout_length", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=20, help="timed rollouts under the Trainer")
    parser.add_argument("--repeats", type=int, default=200, help="timed calls of single parts")
    parser.add_argument("--images", action="store_true", help="learn Pong from frames, with environments on the CPU")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_saving(parser)
    return parser.parse_args(args)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return all requested measurements."""
    device = torch.device(args.device)
    sizes = {name: getattr(args, name) for name in ("num_envs", "rollout_length")}
    found = {"task": "Pong" if args.images else "CartPole", "device": device.type, **sizes}
    found["microseconds"] = parts(args, device)
    found["training"] = {name: training(args, device, name == "compiled") for name in ways(args)}
    return found


if __name__ == "__main__":
    arguments = parse()
    torch.set_float32_matmul_precision("high")
    result = measure_all(arguments)
    save(result, arguments.save, f"gpu/{result['task'].lower()}-{arguments.num_envs}.json")
    print(json.dumps(result), flush=True)
