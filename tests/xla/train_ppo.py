"""Train PPO through Lightning's XLA strategy, and count what XLA compiles.

Opt-in, since torch_xla needs an older torch than the other tests; in an environment of its own:

    pip install -r tests/xla/requirements.txt -e .
    python tests/xla/train_ppo.py

XLA computes on the CPU here: Lightning is told that there is one TPU. Fails unless the number of compiled graphs stays
what it was after the second rollout, nothing in an update makes the host wait, and the policy learns.
"""

import os

os.environ["PJRT_DEVICE"] = "CPU"

import argparse

import torch
import torch_xla
import torch_xla._internal.tpu
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from torch_xla.debug import metrics

from lightning_rl import PPO, EnvStepLimit, RolloutDataModule


def compilations() -> int:
    """Return the number of graphs compiled so far."""
    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


def host_reads() -> int:
    """Return the number of transfers from the device to the host so far."""
    found = metrics.metric_data("TransferFromDeviceTime")
    return 0 if found is None else int(found[0])


class Counts(Callback):
    """What each rollout's update compiled and read, and how far acting was from learning."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.reads = host_reads()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        row = {"compilations": compilations(), "reads_in_update": host_reads() - self.reads}
        self.rows.append(row | {"first_ratio_error": pl_module.steps.record.means()["first_ratio_error"]})
        print(f"rollout {len(self.rows)}: " + ", ".join(f"{name} {value:.6g}" for name, value in self.rows[-1].items()))


def check(rows: list[dict[str, float]], score: float) -> None:
    """Fail unless the update is one that XLA is good at, and right."""
    after_second = {row["compilations"] for row in rows[1:]}
    assert len(after_second) == 1, f"graphs were compiled after the second rollout: {sorted(after_second)}"
    # In 40 gradient steps: what the rollout is reported by, and how many steps it had.
    assert max(row["reads_in_update"] for row in rows[1:]) <= 2, "the host waited for the device within an update"
    # Actions are taken on the CPU: the two round differently.
    assert max(row["first_ratio_error"] for row in rows) <= 1e-5, "the rollouts were not on-policy"
    assert score > 200, f"an untrained policy gets about 20, this one {score:g}"


def main() -> None:
    """Train, print, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max_env_steps", type=int, default=20_480)
    options = parser.parse_args()
    torch_xla._internal.tpu.num_available_devices = lambda: 1
    print(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}")
    seed_everything(0)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128, rollouts_per_epoch=5)
    model = PPO(
        data.observation_space,
        data.action_space,
        learning_rate=1e-3,
        optimizer={"anneal": True},
        normalization={"observations": True, "rewards": True},
        num_epochs=10,
        num_minibatches=4,
        target_kl=0.02,
    )
    counts = Counts()
    trainer = Trainer(
        accelerator="tpu",
        devices=1,
        max_epochs=-1,
        callbacks=[counts, EnvStepLimit(options.max_env_steps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, data)
    assert isinstance(trainer.strategy, SingleDeviceXLAStrategy)
    score = trainer.callback_metrics["val/episode_return"].item()
    print(f"validation return {score:g}")
    check(counts.rows, score)
    print("passed")


if __name__ == "__main__":
    main()
