"""Train PPO through Lightning's `XLAStrategy` on two XLA devices, resume the run, and count what XLA compiles.

Opt-in, like `train_ppo.py`:

    pip install -r tests/xla/requirements.txt -e .
    python tests/xla/train_ppo_two_devices.py

XLA computes on the CPU here: Lightning is told that there are two TPUs. The two ranks are threads of one process.
Fails unless CartPole is solved, weights and gradient norms are equal on both ranks, a resumed run ends with the weights
of an uninterrupted one, and no update compiles a graph after the second rollout.
"""

import os

# Eight threads: collectives wait in the threads of XLA. Launches are not asynchronous: freeing a tensor would block the
# thread that the launch of the other device needs.
os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "NPROC": "8", "PJRT_CPU_ASYNC_CLIENT": "0"}

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla._internal.tpu
import torch_xla.core.xla_model as xm
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies.xla import XLAStrategy
from torch_xla.debug import metrics

from lightning_rl import PPO, EnvStepLimit, LastCheckpoint, RolloutDataModule
from lightning_rl.distributed import gather_ranks, world_size

RANKS, ROLLOUTS_PER_EPOCH = 2, 5


class Rendezvous:
    """Exchanges bytes among threads, instead of `xm.rendezvous`, whose graphs differ between ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=120)
        self.payloads = [b""] * RANKS

    def __call__(self, tag: str, payload: bytes = b"", replicas: object = None) -> list[bytes]:
        torch_xla.sync()
        self.barrier.wait()
        self.payloads[torch_xla.runtime.global_ordinal()] = payload
        self.barrier.wait()
        return [*self.payloads]


def found_graphs() -> int:
    """Return how often a graph was compiled or found among the compiled ones."""
    return torch_xla.runtime.get_num_cached_compilation_graph() + (metrics.counter_value("CachedCompile") or 0)


class Turns:
    """Lets one thread compile at a time, so that the other one finds the compiled graph.

    XLA's CPU client numbers compiled graphs, and collectives of graphs with different numbers wait forever. Real
    devices do not need this.
    """

    def __init__(self) -> None:
        self.launch = torch_xla._XLAC._xla_step_marker
        self.entry = threading.Lock()
        self.owner: object = None
        self.found = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch the pending graph of this thread's device."""
        self.wait()
        with self.entry:
            # The launch of the other thread returns after it was executed, which takes both.
            while self.owner is not None and found_graphs() == self.found:
                time.sleep(1e-4)
            self.owner, self.found = own, _ = object(), found_graphs()
        self.launch(*args, **kwargs)
        if self.owner is own:
            self.owner = None
        self.wait()  # or Python frees tensors in use, and keeps its lock until the other thread has launched

    def wait(self) -> None:
        xm.wait_device_ops(xm.xla_real_devices([torch_xla.device()]))


def share_graphs() -> None:
    """Make collectives of two threads work on XLA's CPU client."""

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        def synced(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == "xla":
                torch_xla.sync()
            return read(self, *args, **kwargs)

        return synced

    torch_xla._XLAC._xla_step_marker = Turns()
    for name in ("cpu", "to", "item", "tolist", "__bool__", "__int__", "__float__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    xm.rendezvous = Rendezvous()


def compilations() -> int:
    """Return the number of graphs compiled so far."""
    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


class Watch(Callback):
    """Compares the ranks after each rollout, and counts compiled graphs: of the updates, and of everything."""

    def __init__(self) -> None:
        self.graphs: list[int] = []
        self.of_updates: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.of_updates.append(-compilations())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.of_updates[-1] += compilations()
        means = pl_module.steps.record.means()
        weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()]).cpu()
        ranks = gather_ranks((means["grad_norm"], weights, pl_module.env_steps))
        assert len(ranks) == trainer.world_size == world_size() == RANKS
        assert ranks[0][0] == ranks[1][0], "gradient norms differ between ranks"
        assert torch.equal(ranks[0][1], ranks[1][1]), "weights differ between ranks"
        assert ranks[0][2] == ranks[1][2], "environment steps differ between ranks"
        # Acting on the CPU rounds differently.
        assert means["first_ratio_error"] <= 1e-5, "the rollouts were not on-policy"
        self.graphs.append(compilations())
        if trainer.is_global_zero:
            score = trainer.callback_metrics.get("rollout/episode_return", float("nan"))
            row = f"{pl_module.env_steps} steps, {self.graphs[-1]} graphs, gradient norm {means['grad_norm']:.6g}"
            print(f"rollout {len(self.graphs)}: {row}, return {score:.1f}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert not any(self.of_updates[2:]), f"graphs were compiled after the second rollout: {self.of_updates}"
        late = {*self.graphs[2 * ROLLOUTS_PER_EPOCH :]}
        assert len(late) <= 1, f"graphs were compiled after the second epoch: {sorted(late)}"


def train(folder: Path, max_env_steps: int, ckpt_path: Path | None = None) -> tuple[dict[str, Any], float]:
    """Train on two devices; return the checkpoint and the return in validation."""
    seed_everything(0, verbose=False)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=64, rollouts_per_epoch=ROLLOUTS_PER_EPOCH)
    model = PPO(
        data.observation_space,
        data.action_space,
        learning_rate=1e-3,
        normalization={"observations": True, "rewards": True},
        num_epochs=10,
        num_minibatches=4,
        target_kl=0.02,
    )
    trainer = Trainer(
        accelerator="tpu",
        devices=RANKS,
        max_epochs=-1,
        callbacks=[Watch(), EnvStepLimit(max_env_steps), LastCheckpoint(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    assert isinstance(trainer.strategy, XLAStrategy)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    score = trainer.callback_metrics["val/episode_return"].item()
    return torch.load(folder / "last.ckpt", weights_only=True), score


def main() -> None:
    """Train, resume, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max_env_steps", type=int, default=20_480)
    options = parser.parse_args()
    torch_xla._internal.tpu.num_available_devices = lambda: RANKS
    share_graphs()
    print(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        whole, score = train(Path(folder) / "whole", options.max_env_steps)
        print(f"validation return {score:g}")
        train(Path(folder) / "part", options.max_env_steps // 2)
        resumed, _ = train(Path(folder) / "resumed", options.max_env_steps, Path(folder) / "part" / "last.ckpt")
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), f"{name} differs after resuming"
    assert score >= 475, f"CartPole is solved with 475, this policy gets {score:g}"
    print("passed")


if __name__ == "__main__":
    main()
