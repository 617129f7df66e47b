"""Measure PPO with environments, acting and learning on one device: `python benchmarks/gpu.py --save`.

Three measurements in the same sizes: training on CartPole in torch under the Trainer, with and without compiled losses;
acting and stepping alone; and one gradient step on a minibatch alone (forward, loss, backward, clipping, Adam). The
last two are timed uncompiled, with a loss compiled by `torch.compile`, and replayed as one CUDA graph. Without a GPU
the script runs on the CPU, without graphs; use small sizes there, to check that it works.

    python benchmarks/gpu.py --num_envs 16 --rollout_length 8 --rollouts 1 --repeats 2
    python benchmarks/gpu.py --images           the gradient step of a Nature CNN on frames instead
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_cartpole
from gymnasium import spaces
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from record import add_saving, save
from torch import Tensor

from lightning_rl import PPO, ActorCritic, RolloutDataModule
from lightning_rl import functional as rl

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


def graphed(work: Callable[[], object], *generators: torch.Generator) -> Callable[[], None]:
    """Return a function that replays `work` as one CUDA graph, which reads and writes the same tensors each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
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
        self.state, self.steps = self.env.state.clone(), self.env.steps.clone()

    @torch.no_grad()
    def __call__(self) -> None:
        self.env.state, self.env.steps = self.state, self.steps
        self.env.step(self.policy.act(self.state).environment_action)
        self.state.copy_(self.env.state)
        self.steps.copy_(self.env.steps)


def training(args: argparse.Namespace, device: torch.device, compiled: bool) -> float:
    """Return environment steps per wall second of whole rollouts under the Trainer."""
    data = RolloutDataModule(
        torch_cartpole.ID,
        args.num_envs,
        args.rollout_length,
        args.rollouts + _WARM_UP,
        backend="torch",
        env={"kwargs": {"device": str(device)}},
        seed=0,
    )
    torch.manual_seed(0)
    model = PPO(data.observation_space, data.action_space, debug={"fast_paths": "compiled" if compiled else "auto"})
    done: list[float] = []

    def note(*_: object) -> None:
        _wait(device)
        done.append(time.perf_counter())

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
    steps = args.num_envs * args.rollout_length * args.rollouts
    return steps / (done[-1] - done[_WARM_UP - 1])


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
            replay = graphed(collect, collect.env.generator)
            found["act_and_step_graphed"] = 1e6 * seconds_of(replay, args.repeats, device)
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
    parser.add_argument("--images", action="store_true", help="measure a gradient step on frames, without training")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_saving(parser)
    return parser.parse_args(args)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return all requested measurements."""
    device = torch.device(args.device)
    sizes = {name: getattr(args, name) for name in ("num_envs", "rollout_length")}
    found: dict[str, Any] = {"device": device.type, **sizes, "microseconds": parts(args, device)}
    if not args.images:
        rates = {name: training(args, device, name == "compiled") for name in ways(args)}
        found["training_steps_per_second"] = {name: round(rate) for name, rate in rates.items()}
    return found


if __name__ == "__main__":
    arguments = parse()
    torch.set_float32_matmul_precision("high")
    result = measure_all(arguments)
    save(result, arguments.save, f"gpu/{'images' if arguments.images else 'cartpole'}.json")
    print(json.dumps(result), flush=True)
