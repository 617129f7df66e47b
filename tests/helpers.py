"""Tiny environments, rollouts made up of random numbers, and a Trainer that keeps quiet."""

import errno
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_rl import PPO, Rollout, RolloutDataModule
from lightning_rl.nested import map_leaves
from lightning_rl.policies.actor_critic import ActorCritic

needs_box2d = pytest.mark.skipif(find_spec("Box2D") is None, reason="Box2D has no release for Python 3.14")
needs_weight_averaging = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="Lightning 2.6 introduced it, with EMAWeightAveraging"
)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE, CONTINUOUS = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)


class Pixels(gymnasium.Env[np.ndarray, int]):
    """Noise images; the right action is told by one pixel. Every 20 steps an episode ends, in turns in either way."""

    observation_space = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    action_space = spaces.Discrete(4)
    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: int):
        reward = float(action == self.observation[0, 0, 0] % 4)
        self.steps += 1
        done = self.steps == 20
        self.episodes += done
        return self._observe(), reward, done and self.episodes % 2 == 0, done and self.episodes % 2 == 1, {}

    def _observe(self) -> np.ndarray:
        self.observation = self.np_random.integers(0, 256, (7, 7, 3), np.uint8)
        return self.observation


PIXELS = "lightning_rl_tests/Pixels-v0"
if PIXELS not in gymnasium.registry:
    gymnasium.register(PIXELS, Pixels)


def merged(*options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of several dicts; later ones change single fields of the groups of earlier ones."""
    result: dict[str, Any] = {}
    for one in options:
        for name, value in one.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def make_trainer(**options: Any) -> Trainer:
    """A CPU Trainer without files, bars, summaries and sanity checks, unless asked for."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "max_epochs": 1,
    }
    return Trainer(**quiet | options)


def precision_options(precision: str, **scaler: Any) -> dict[str, Any]:
    """Options of a CPU Trainer for a precision; Lightning replaces 16-mixed by bf16-mixed unless given as a plugin."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler))}


def make_data(env_id: str = "CartPole-v1", **options: Any) -> RolloutDataModule:
    """Two short rollouts of two environments an epoch, the same each time."""
    small = {"num_envs": 2, "rollout_length": 16, "rollouts_per_epoch": 2, "evaluation": {"episodes": 2}, "seed": 1}
    return RolloutDataModule(env_id, **merged(small, options))


def make_model(data: RolloutDataModule, **options: Any) -> PPO:
    """PPO on small networks, with the same initial weights each time."""
    torch.manual_seed(0)
    small = {"policy": {"hidden_sizes": (16,)}, "num_epochs": 2, "num_minibatches": 2}
    return PPO(data.observation_space, data.action_space, **merged(small, options))


def flip_a_bit(path: Path, entry: str) -> Path:
    """Damage a checkpoint: flip the lowest bit of the byte in the middle of an entry; leave its time as it was."""
    before = path.stat()
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(f"/{entry}"))
    content = bytearray(path.read_bytes())
    lengths = content[info.header_offset + 26 : info.header_offset + 30]  # of the name, and of the padding
    begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    content[begin + info.file_size // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


class FixedRollouts:
    """A train loader of given rollouts, each stamped as collected by the parameters of the moment."""

    def __init__(self, rollouts: Iterable[Rollout], model: PPO) -> None:
        self.rollouts = list(rollouts)
        self.model = model

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        for rollout in self.rollouts:
            rollout.policy_version = self.model.policy_version
            yield rollout


def random_rollout(
    policy: ActorCritic,
    *,
    length: int = 12,
    num_envs: int = 4,
    seed: int = 0,
    off_policy: float = 0.3,
    valid: bool = False,
) -> Rollout:
    """A rollout of random numbers in the policy's precision: vectors of 3, with episodes that end in either way.

    Args:
        policy: Gives actions, log-probabilities and values.
        length: Steps.
        num_envs: Environments.
        seed: Of all numbers.
        off_policy: Deviation of the noise on the log-probabilities, so that ratios are not 1.
        valid: Whether the step after the end of an episode only resets.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = next(policy.parameters()).dtype
    shape = (length, num_envs)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    observations, rewards, noise = randn(length + 1, num_envs, 3), randn(*shape), off_policy * randn(*shape)
    chance = torch.rand(shape, generator=generator)
    terminated, truncated = chance < 0.15, (chance >= 0.15) & (chance < 0.3)
    is_valid = torch.ones(shape, dtype=torch.bool)
    if valid:
        for t in range(1, length):
            is_valid[t] = ~(terminated[t - 1] | truncated[t - 1])
            terminated[t] &= is_valid[t]
            truncated[t] &= is_valid[t]
    indices = truncated.nonzero()
    finals = randn(len(indices), 3)
    with torch.no_grad():
        distribution, values = policy(observations)
        actions = map_leaves(lambda action: action[:-1], distribution.sample(generator))
        log_probs = policy.log_prob(observations[:-1], actions) + noise
        next_values = values[1:].clone()
        next_values[indices[:, 0], indices[:, 1]] = policy.value(finals)
    return Rollout(
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        valid=is_valid if valid else None,
        log_probs=log_probs,
        values=values[:-1],
        next_values=next_values,
        final_indices=indices,
        final_observations=finals,
    )


def parameters_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_equal_parameters(module: torch.nn.Module, expected: dict[str, Tensor]) -> None:
    """Bit by bit."""
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


class Recorder(Callback):
    """Keeps every update's diagnostics, and what `watch` names, after each rollout."""

    def __init__(self, *watch: str) -> None:
        self.watch = watch
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        row = {"learning_rate": pl_module.steps.optimizers[0].param_groups[0]["lr"], **pl_module.steps.record.means()}
        self.rows.append(row | {name: getattr(pl_module, name) for name in self.watch})

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


class MemoryLogger(Logger):
    """Calls of `log_metrics`, as a logger that is not a file gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, float], int | None]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((dict(metrics), step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparams = params

    def rows(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, metrics[name]) for metrics, step in self.calls if name in metrics]


def full_disk(*_: object) -> None:
    """Replace a function of `os`: fail as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
