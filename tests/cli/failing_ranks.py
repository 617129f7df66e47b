"""Two ranks of which one fails, as `FAIL="<how> <rank>"` says: the command line, or with `script` a Trainer.

Run by `test_rank_errors`.
"""

import os
import signal
import sys
from typing import Any

import gymnasium
import numpy as np

from lightning_rl import PPO, Rollout
from lightning_rl.cli.main import main
from tests.helpers import make_data, make_trainer
from tests.probes import Counter

HOW, RANK = os.environ["FAIL"].split()
HERE = os.environ.get("LOCAL_RANK", "0") == RANK


class Exploding(Counter):
    """A counter that fails on one rank in the third rollout."""

    total = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.total += 1
        if HOW == "environment" and HERE and self.total == 40:
            raise ArithmeticError("the physics exploded")
        return super().step(action)


class FailingPPO(PPO):
    """PPO that fails on one rank in the third rollout."""

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        if HERE and self.policy_version == 2:
            if HOW == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "exit":
                os._exit(3)
            if HOW == "raise":
                raise RuntimeError("boom")
            if HOW == "nan":
                rollout.rewards[0, 0] = float("nan")
        super().training_step(rollout, batch_idx)


gymnasium.register("Probe/Exploding-v0", Exploding)


def command_line() -> None:
    arguments = ["--data.env_id=Probe/Exploding-v0", "--data.num_envs=2", "--data.rollout_length=16"]
    arguments += ["--model=__main__.FailingPPO", "--model.num_minibatches=2", "--model.policy.hidden_sizes=[8]"]
    arguments += [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        "--trainer.logger=false",
    ]
    arguments += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    arguments += ["--trainer.enable_model_summary=false", "--trainer.limit_val_batches=0", "--trainer.max_epochs=1"]
    main(["fit", *arguments])


def script() -> None:
    data = make_data("Probe/Exploding-v0", rollouts_per_epoch=10)
    model = FailingPPO(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)}, num_minibatches=2)
    make_trainer(devices=2, strategy="ddp").fit(model, data)


if __name__ == "__main__":
    script() if "script" in sys.argv else command_line()
