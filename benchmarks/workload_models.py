"""The workloads as objects of this package, with or without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import measure
import torch
import torch_cartpole
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

from lightning_rl import IMPALA, PPG, PPO, VMPO, AtariPreprocessing, PPOKLPenalty, RolloutDataModule
from lightning_rl.algorithms import OnPolicyAlgorithm
from lightning_rl.environments import Backend
from lightning_rl.fast import FastEngine, FlatAdam
from lightning_rl.fast.engine import closed_form_of
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.gradient_steps import GradientSteps
from lightning_rl.training.metrics import RolloutMetrics
from lightning_rl.validation import ClassSpec

# The other backends need the newer id; without sticky actions it is the same game.
_ATARI_ID = "ALE/Pong-v5"
_IN_TORCH = {"CartPole-v1": torch_cartpole.ID}


def make_data(workload: dict[str, Any], backend: Backend, seed: int, device: str = "cpu") -> RolloutDataModule:
    """Return the environments of a workload; those of the backend "torch" run on `device`."""
    env_id: str = workload["env_id"]
    env: dict[str, Any] = {
        "wrappers": _wrappers(workload),
        "reward_clip": workload.get("reward_clip"),
        "previous_action": workload.get("previous", False),
        "previous_reward": workload.get("previous", False),
    }
    if backend == "torch":
        env_id, env["kwargs"] = _IN_TORCH[env_id], {"device": device}
    if "NoFrameskip" in env_id:
        env_id = env_id if backend == "sync" else _ATARI_ID
        env["atari"] = AtariPreprocessing(
            episodic_life=False, clip_rewards=False, fire_on_reset=False, repeat_action_probability=0.0
        )
    if backend == "envpool":
        env["kwargs"] = {"num_threads": measure.THREADS}
    return RolloutDataModule(
        env_id,
        workload["num_envs"],
        workload["num_steps"],
        workload["rollouts"],
        backend=backend,
        env=env,
        actors={"count": workload["actors"], "prefetch": 2} if "actors" in workload else {},
        seed=seed,
    )


def _wrappers(workload: dict[str, Any]) -> list[str | ClassSpec] | None:
    if "shown" not in workload:
        return None
    return [{"class_path": "lightning_rl.environments.PartialObservation", "init_args": {"indices": workload["shown"]}}]


def make_model(workload: dict[str, Any], data: RolloutDataModule, kind: type[PPO] | None = None) -> OnPolicyAlgorithm:
    """Return the algorithm of a workload; its parameters come from torch's global generator.

    Args:
        workload: Entry of `workloads.json`.
        data: Its environments.
        kind: A subclass of PPO; None: the algorithm itself.
    """
    algorithm = workload.get("algorithm", "ppo")
    cls, options = _ALGORITHMS[algorithm]
    return (kind or cls)(
        data.observation_space,
        data.action_space,
        **options(workload),
        learning_rate=workload["lr"],
        gamma=workload["gamma"],
        value_coef=workload["vf_coef"],
        policy=_policy(workload),
        normalization={"observations": workload["normalize"], "rewards": workload["normalize"]},
        debug={"fast_paths": workload.get("fast_paths", "auto")},
    )


def _policy(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the policy. Without hidden layers, the heads of IMPALA follow the encoder directly."""
    hidden = workload["hidden"] or (() if workload.get("algorithm") == "impala" else (64, 64))
    memory = {"kind": "lstm", "hidden_size": workload["lstm"]} if "lstm" in workload else None
    return {"activation": workload["activation"], "hidden_sizes": hidden, "memory": memory}


def _ppo(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the options of PPO and PPG."""
    is_plain = workload.get("fast_paths", "auto") == "none"
    return {
        "num_epochs": workload["epochs"],
        "num_minibatches": workload["minibatches"],
        "optimizer": {
            "name": "torch.optim.Adam" if is_plain else "lightning_rl.fast.FlatAdam",
            "options": {"eps": workload["adam_eps"], "fused": True},
            "max_grad_norm": workload["max_grad_norm"],
        },
        "gae_lambda": workload["gae_lambda"],
        "clip_range": workload["clip"],
        "entropy_coef": workload["ent_coef"],
        "advantages": {"normalize": "minibatch" if workload["norm_adv"] else "none"},
    }


def _ppg(workload: dict[str, Any]) -> dict[str, Any]:
    phases = {"num_policy_iterations": workload["policy_iterations"], "num_aux_epochs": workload["aux_epochs"]}
    return _ppo(workload) | phases


def _impala(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the options of IMPALA; the data module clips its rewards."""
    return {
        "optimizer": {
            "name": "torch.optim.RMSprop",
            "options": {"alpha": workload["rms_alpha"], "eps": workload["rms_eps"]},
            "anneal": workload["anneal_lr"],
            "max_grad_norm": workload["max_grad_norm"],
        },
        "reduction": workload["reduction"],
        "entropy_coef": workload["ent_coef"],
    }


def _vmpo(workload: dict[str, Any]) -> dict[str, Any]:
    same = ("num_epochs", "num_minibatches", "optimizer", "gae_lambda")
    return {name: option for name, option in _ppo(workload).items() if name in same}


def _ppo_kl(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the options of PPO with a KL penalty instead of clipping."""
    return _ppo(workload) | {"clip_range": None}


_ALGORITHMS: dict[str, tuple[type[OnPolicyAlgorithm], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "ppo": (PPO, _ppo),
    "ppo_kl": (PPOKLPenalty, _ppo_kl),
    "ppg": (PPG, _ppg),
    "vmpo": (VMPO, _vmpo),
    "impala": (IMPALA, _impala),
}


class BareEngine(FastEngine):
    """Steps optimizers without Lightning."""

    def step(self, model: LightningModule, optimizer: Any, counts: bool) -> None:
        """Take a step."""
        (optimizer.step_alone if isinstance(optimizer, FlatAdam) else optimizer.step)()


class BareSteps(GradientSteps):
    """Gradient steps without Lightning."""

    def begin(self) -> None:
        """Begin the updates from a rollout."""
        self.reset()
        form = closed_form_of(self.model)
        self.engine = BareEngine(None if isinstance(form, str) else form)


class BareMetrics(RolloutMetrics):
    """Logs nothing."""

    def add_rollout(self, *args: Any) -> None:
        """Ignore a rollout."""


class BarePPO(PPO):
    """PPO without Lightning: the plain optimizer and `backward`, without logging."""

    plain_optimizer: Optimizer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps.__class__ = BareSteps
        self.metrics = BareMetrics()

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.plain_optimizer

    def lr_schedulers(self) -> None:
        return None


class BareLoop:
    """Collect and learn in a plain loop: the same collector and update as under the Trainer, without the Trainer.

    The final parameters are equal, bit for bit, so the difference in time is the cost of Lightning, hooks and logging.
    """

    def __init__(self, workload: dict[str, Any], backend: Backend, seed: int) -> None:
        self.data = make_data(workload, backend, seed)
        torch.manual_seed(seed)
        model = make_model(workload, self.data, BarePPO)
        assert isinstance(model, BarePPO)
        self.model = model
        self.rollouts: int = workload["rollouts"]
        # The members of a Trainer that collector and update use.
        self.trainer = SimpleNamespace(
            world_size=1,
            global_rank=0,
            lightning_module=model,
            datamodule=self.data,
            precision_plugin=Precision(),
            profiler=PassThroughProfiler(),
            callbacks=[],
            lr_scheduler_configs=[],
            max_epochs=1,
            num_training_batches=self.rollouts,
            fit_loop=SimpleNamespace(
                epoch_progress=SimpleNamespace(current=SimpleNamespace(completed=0)), restarting=False
            ),
        )
        model.trainer = self.data.trainer = self.trainer  # type: ignore[assignment]
        optimizer = model.configure_optimizers()
        optimizer.optimizer = optimizer  # Lightning's wrapper has the wrapped optimizer under this name
        model.plain_optimizer = optimizer
        self.data.setup("fit")
        model.on_train_start()

    def __iter__(self) -> Iterator[Rollout]:
        """Yield each rollout after its update."""
        for index in range(self.rollouts):
            rollout = self.data.collect()
            self.model.training_step(rollout, index)
            yield rollout
        self.data.teardown("fit")
