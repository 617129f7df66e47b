"""Saves and replays updates whose loss or gradient was NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_rl.checkpointing.run_folders import saved_at
from lightning_rl.distributed import gather_ranks
from lightning_rl.files import WriteFailure, load_plain, save_file
from lightning_rl.policies.sharding import whole
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.gradient_steps import WHAT_TO_TRY, EagerEngine, not_finite_throughout, total_norm
from lightning_rl.training.minibatches import Minibatch, minibatch_from_state, minibatch_state
from lightning_rl.training.optimizers import optimizers_and_schedulers
from lightning_rl.validation import ConfigurationError, constructor_options, import_class, loading


class FailedUpdate:
    """A saved update whose loss or gradient was not finite, with everything that `replay` needs to compute it again.

    With several ranks, the rank where the failure began saves its own rows, and a replay uses only these.

    Attributes:
        module: The algorithm with the parameters from before the update, on the CPU.
        optimizer_states: States of the optimizers before the update.
        minibatch: A `Batch`, or another argument of the loss.
        loss: Name of the method that computes the loss.
        terms: Logged values that were not finite, by name: means over all updates from the rollout.
        env_steps: Environment steps of the run.
        checkpoint_path: The newest checkpoint of the run, or None.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        algorithm = import_class("algorithm", content["algorithm"], LightningModule)
        self.module: Any = algorithm(**constructor_options(algorithm, content["hyper_parameters"]))
        # The Trainer only provides the precision, without `fit`. On a CPU it would replace 16-mixed by bf16-mixed.
        half = content["precision"] == "16-mixed"
        chosen = {"plugins": MixedPrecision("16-mixed", "cpu")} if half else {"precision": content["precision"]}
        chosen |= {"enable_progress_bar": False, "enable_model_summary": False}
        self._trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **chosen)
        self._trainer.precision_plugin.convert_module(self.module)
        self.module.load_state_dict(content["state_dict"])
        self.module.trainer = self._trainer
        optimizers, _ = optimizers_and_schedulers(self.module.configure_optimizers())
        self._trainer.strategy.optimizers = list(optimizers)
        self.optimizer_states: list[dict[str, Any]] = content["optimizer_states"]
        for optimizer, state in zip(optimizers, self.optimizer_states, strict=True):
            optimizer.load_state_dict(state)
        self.minibatch = minibatch_from_state(content["minibatch"])
        self.loss: str = content["loss"]
        self.terms: dict[str, float] = content["terms"]
        self.env_steps: int = content["env_steps"]
        self.checkpoint_path: str | None = content["checkpoint_path"]
        clock = self.module.clock
        clock.env_steps, clock.policy_version = self.env_steps, content["policy_version"]
        clock.planned_env_steps = content["planned_env_steps"]  # for schedules over the whole run
        self.module.schedules.apply(clock, optimizers)
        self.module.steps.part = content["part"]

    @classmethod
    def load(cls, path: str | Path, trust: Sequence[str] = ()) -> FailedUpdate:
        """Load a `failed-update-*.pt` file; its classes are trusted as in `OnPolicyAlgorithm.load_from_checkpoint`.

        A missing or other file, or a class that is not trusted or not found, raises a `ConfigurationError`.
        """
        expected = "a file that a failed update has left"
        content = load_plain(path, "path", expected)
        if not isinstance(content, dict) or "minibatch" not in content:
            raise ConfigurationError(f"path={str(path)!r} is another kind of file: expected {expected}")
        with loading(trust):
            return cls(content)

    def replay(self) -> dict[str, float]:
        """Compute the minibatch again; return the loss terms and `grad_norm`, and leave the gradients in `module`."""
        module = self.module
        module.zero_grad()
        with module.steps.isolated(part=module.steps.part), self._trainer.precision_plugin.train_step_context():
            total = module.steps.record_loss(getattr(module, self.loss)(self.minibatch))
            not_finite_throughout(total).backward()  # type: ignore[no-untyped-call]
            found = [EagerEngine().gradients(optimizer) for optimizer in self._trainer.optimizers]
            norms = (total_norm(gradients) for gradients in found if gradients)
            module.steps.record.add(**dict(zip(module.steps.norm_names, norms, strict=False)))
            means: dict[str, float] = module.steps.record.means()
        return means


def skip_or_raise(module: Any, rollout: Rollout, terms: Mapping[str, float]) -> None:  # an algorithm
    """Count a skipped update and warn; save it and raise if `debug.max_skipped_updates` does not allow another one.

    `module` has the parameters from before the failing update, and `terms` are the values that were not finite.
    """
    name, value = next(iter(terms.items()))
    what = f"{name} is {value} in the update from rollout {module.policy_version} (environment step {module.env_steps})"
    if module.skipped_updates < module.max_skipped_updates:
        module.skipped_updates += 1
        rank_zero_warn(
            f"{what}: this and the later updates from the rollout were skipped, {module.skipped_updates} of at most "
            f"debug.max_skipped_updates={module.max_skipped_updates} times in a row"
        )
        return
    # Ranks share gradients and normalized advantages. So the failure began on a rank whose rollout is not finite, or
    # else on a rank with another term than the gradient.
    numbers = (rollout.rewards, rollout.log_probs, rollout.values, rollout.next_values)
    is_finite = all(bool(x.isfinite().all()) for x in numbers)
    evidence = gather_ranks((not is_finite, set(terms) != {"grad_norm"}))
    culprit = evidence.index(max(evidence))
    message = None
    states = (module.state_dict(), [optimizer.state_dict() for optimizer in module.trainer.optimizers])
    states = apply_to_collection(states, Tensor, lambda x: whole(x).cpu())  # a collective call
    if module.global_rank == culprit:
        path = save_failed_update(module, terms, *states)
        saved = "it could not be saved" if path is None else f"FailedUpdate.load({str(path)!r}).replay() repeats it"
        message = (
            f"{what}; the parameters are those from before this minibatch. {WHAT_TO_TRY}; debug.check_numerics=true "
            f"stops at the failing minibatch, the Trainer's detect_anomaly=True names the operation; {saved}"
        )
    raise FloatingPointError(gather_ranks(message)[culprit])


def save_failed_update(
    module: Any,  # an algorithm
    terms: Mapping[str, float],
    state_dict: Mapping[str, Tensor],
    optimizer_states: Sequence[Mapping[str, Any]],
) -> Path | None:
    """Save the failed update in the Trainer's folder; return the path, or None if that is not possible."""
    trainer, failed = module.trainer, module.steps.failed_minibatch
    if failed is None:
        return None
    name = getattr(failed.loss, "__name__", "")
    # A function of the user, or another kind of minibatch, cannot be stored as plain data.
    if getattr(module, name, None) != failed.loss or not isinstance(failed.minibatch, Minibatch):
        return None
    names = ("last_model_path", "best_model_path")
    checkpoints = [str(getattr(callback, x, "")) for callback in trainer.checkpoint_callbacks for x in names]
    content = {
        "algorithm": f"{type(module).__module__}.{type(module).__qualname__}",
        "hyper_parameters": dict(module.hparams),
        "precision": trainer.precision,
        "state_dict": state_dict,
        "optimizer_states": optimizer_states,
        "minibatch": minibatch_state(failed.minibatch),
        "loss": name,
        "part": failed.part,
        "terms": dict(terms),
        "env_steps": module.env_steps,
        "planned_env_steps": module.clock.planned_env_steps,
        "policy_version": module.policy_version,
        "checkpoint_path": max(filter(None, checkpoints), key=saved_at, default=None),
    }
    rank = f"-rank{module.global_rank}" if trainer.world_size > 1 else ""
    path = Path(trainer.default_root_dir) / f"failed-update-{module.env_steps}{rank}.pt"
    try:
        save_file(content, path)
    except WriteFailure:  # the failed update itself is the error to report
        return None
    return path
