"""torchbeast's IMPALA on a workload, by `train` of its Python implementation, monobeast.

It has no release: `$TORCHBEAST`, or else the folder `src` of the virtual environment, must be a checkout of
github.com/facebookresearch/torchbeast. Each actor has one environment; a batch consists of the first unrolls that are
ready, of any actor. The learner has two threads that alternate, its default; `$TORCHBEAST_LEARNER_THREADS` sets another
number.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin()
CHECKOUT = Path(os.environ.get("TORCHBEAST", Path(sys.prefix) / "src"))
MONOBEAST = CHECKOUT / "torchbeast" / "monobeast.py"
if not MONOBEAST.is_file():
    sys.exit(f"{MONOBEAST} is not there: expected a checkout of github.com/facebookresearch/torchbeast in {CHECKOUT}")
sys.path.append(str(CHECKOUT))
# The only part of it that needs the old gym; its environments are not those of the workload.
sys.modules["torchbeast.atari_wrappers"] = ModuleType("torchbeast.atari_wrappers")

import torch  # noqa: E402
from environments import factories  # noqa: E402
from torchbeast import monobeast  # noqa: E402

run.imported()
workload = run.workload
episode_returns: list[float] = []


class OldEnvironment:
    """One environment of the workload with the interface of old gym: four values from a step, and `seed`."""

    def __init__(self) -> None:
        self._env = factories(workload, own_normalization=False)[0]()
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> Any:
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return observation

    def step(self, action: int) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), terminated or truncated, info


learn, lock = monobeast.learn, threading.Lock()


def learn_and_tick(*args: Any) -> dict[str, Any]:
    found: dict[str, Any] = learn(*args)
    with lock:
        episode_returns.extend(map(float, found["episode_returns"]))
        run.tick()
    return found


def version() -> str:
    """Return the commit of the checkout, or a digest of its monobeast without a repository."""
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short=8", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or f"sha256:{hashlib.sha256(MONOBEAST.read_bytes()).hexdigest()[:8]}"


monobeast.create_env = lambda flags: OldEnvironment()
monobeast.learn = learn_and_tick
logging.disable(logging.CRITICAL)
torch.manual_seed(run.args.seed)
with tempfile.TemporaryDirectory() as scratch:
    settings = {
        "xpid": "benchmark",
        "savedir": scratch,
        "disable_checkpoint": True,
        "disable_cuda": True,
        "num_actors": workload["actors"],
        "total_steps": workload["rollouts"] * workload["rows"],
        "batch_size": workload["num_envs"],
        "unroll_length": workload["num_steps"],
        "entropy_cost": workload["ent_coef"],
        # Its value loss has the factor ½ already, as ours.
        "baseline_cost": workload["vf_coef"],
        "discounting": workload["gamma"],
        "reward_clipping": workload["reward_clip"],
        "learning_rate": workload["lr"],
        "alpha": workload["rms_alpha"],
        "epsilon": workload["rms_eps"],
        "grad_norm_clipping": workload["max_grad_norm"],
    }
    flags = monobeast.parser.parse_args([])
    vars(flags).update(settings)
    flags.num_learner_threads = int(os.environ.get("TORCHBEAST_LEARNER_THREADS", flags.num_learner_threads))
    monobeast.train(flags)
run.report("torchbeast", version(), episode_returns, note=f"{flags.num_learner_threads} learner threads")
