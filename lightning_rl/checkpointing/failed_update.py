"""Updates that met NaN or infinity: saved with all that it takes to make them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, CheckpointFailure
from lightning_rl.distributed import gather_ranks
from lightning_rl.files import load_plain
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.engine import WHAT_TO_TRY, EagerEngine
from lightning_rl.training.gradient_steps import GRADIENT_NORMS, not_finite_throughout, total_norm
from lightning_rl.training.minibatches import minibatch_from_state, minibatch_state
from lightning_rl.training.optimizers import optimizers_and_schedulers
from lightning_rl.validation import ConfigurationError, constructor_options, import_class, loading


class FailedUpdate:
    """An update that was stopped because a loss term or gradient was not finite.

    It has the parameters as they were before that update and the minibatch that it was from, so that `replay` computes
    the same loss and gradient. Of several ranks the one where it began saves it, and a replay takes that rank's rows
    for those of all.

    Attributes:
        module: The algorithm with the parameters that the update began with, on the CPU.
        optimizer_states: Those of the optimizers at that time.
        minibatch: What the update was from: a `Batch`, or what else the loss takes.
        loss: The name of the method that computes its loss.
        terms: What was not finite, by name, as it was reported: means over the updates from the rollout.
        env_steps: The clock.
        checkpoint_path: The newest checkpoint of the run at that time; None if there was none.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        algorithm = import_class("algorithm", content["algorithm"], LightningModule)
        self.module: Any = algorithm(**constructor_options(algorithm, content["hyper_parameters"]))
        # A real Trainer, for its precision: nothing is fitted.
        self._trainer = Trainer(
            accelerator="cpu", precision=content["precision"], logger=False, enable_checkpointing=False, barebones=True
        )
        self._trainer.precision_plugin.convert_module(self.module)
        self.module.load_state_dict(content["state_dict"])
        self.module.trainer = self._trainer
        optimizers, _ = optimizers_and_schedulers(self.module.configure_optimizers())
        self._trainer.strategy.optimizers = list(optimizers)
        self.optimizer_states: list[dict[str, Any]] = content["optimizer_states"]
        for optimizer, state in zip(self._trainer.optimizers, self.optimizer_states, strict=True):
            optimizer.load_state_dict(state)
        self.minibatch = minibatch_from_state(content["minibatch"])
        self.loss: str = content["loss"]
        self.terms: dict[str, float] = content["terms"]
        self.env_steps: int = content["env_steps"]
        self.checkpoint_path: str | None = content["checkpoint_path"]
        clock = self.module.clock
        clock.env_steps, clock.policy_version = self.env_steps, content["policy_version"]
        clock.planned_env_steps = content["planned_env_steps"]  # schedules may end with the run
        self.module.schedules.apply(self.module, clock, optimizers)
        self.module.steps.part = content["part"]

    @classmethod
    def load(cls, path: str | Path, trust: Sequence[str] = ()) -> FailedUpdate:
        """Load what a failed run has saved.

        A class that the file names is constructed only if it is a subclass of what its field expects, and no module but
        those of `lightning_rl`, `torch`, `gymnasium`, of packages in `trust` and already imported ones is imported.

        Args:
            path: The file that the error names.
            trust: Packages whose modules may be imported: `["my_package"]`.

        Raises:
            ConfigurationError: There is no such file, it is something else, or a class in it is not trusted or cannot
                be imported.
        """
        content = load_plain(path, "path", "a file that a failed update has left")
        if not isinstance(content, dict) or "minibatch" not in content:
            raise ConfigurationError(f"path={str(path)!r} was not left by a failed update: expected a file that was")
        with loading(trust):
            return cls(content)

    def replay(self) -> dict[str, float]:
        """Compute loss and gradient of the minibatch again, and return the terms of the loss, `grad_norm` included.

        Afterwards the gradient is in the parameters of `module`.
        """
        module = self.module
        module.zero_grad()
        with module.steps.isolated(part=module.steps.part), self._trainer.precision_plugin.train_step_context():
            total = module.steps.record_loss(getattr(module, self.loss)(self.minibatch))
            not_finite_throughout(total).backward()  # type: ignore[no-untyped-call]
            found = [EagerEngine().gradients(optimizer) for optimizer in self._trainer.optimizers]
            norms = (total_norm(gradients) for gradients in found if gradients)
            module.steps.record.add(**dict(zip(GRADIENT_NORMS, norms, strict=False)))
            means: dict[str, float] = module.steps.means()
        return means


def skip_or_raise(module: Any, rollout: Rollout, terms: Mapping[str, float]) -> None:  # noqa: ANN401 - an algorithm
    """Go on without the rest of the updates from a rollout, if that is allowed once more in a row.

    Args:
        module: The algorithm, with the parameters that the failing update began with.
        rollout: What it learned from.
        terms: What was not finite.

    Raises:
        FloatingPointError: It is not; names the term, and the file in which the update was saved.
    """
    name, value = next(iter(terms.items()))
    what = f"{name} is {value} in the update from rollout {module.policy_version} (environment step {module.env_steps})"
    if module.skipped_updates < module.max_skipped_updates:
        module.skipped_updates += 1
        rank_zero_warn(
            f"{what}: this and the later updates from it were left out, {module.skipped_updates} of at most "
            f"debug.max_skipped_updates={module.max_skipped_updates} times in a row"
        )
        return
    # Ranks have the gradient in common, and normalized advantages: it began where the rollout is not finite, or else
    # where a term of the rank's own is not.
    evidence = gather_ranks((not _is_finite(rollout), set(terms) != {"grad_norm"}))
    culprit = evidence.index(max(evidence))
    mine = None
    if module.global_rank == culprit:
        path = save_failed_update(module, terms)
        saved = "it could not be saved" if path is None else f"FailedUpdate.load({str(path)!r}).replay() makes it again"
        mine = (
            f"{what}; the parameters were left as they were before that minibatch. {WHAT_TO_TRY}; "
            "check_numerics=True stops at the very minibatch, the Trainer's detect_anomaly=True names the operation; "
            f"{saved}"
        )
    raise FloatingPointError(gather_ranks(mine)[culprit])


def _is_finite(rollout: Rollout) -> bool:
    numbers = (rollout.rewards, rollout.log_probs, rollout.values, rollout.next_values)
    return all(bool(x.isfinite().all()) for x in numbers)


def save_failed_update(module: Any, terms: Mapping[str, float]) -> Path | None:  # noqa: ANN401 - an algorithm
    """Save an update where the run keeps its files, and return the path; None if nothing can be written."""
    trainer, failed = module.trainer, module.steps.failed_minibatch
    if failed is None:
        return None
    saved = [
        getattr(c, name, "") for c in trainer.checkpoint_callbacks for name in ("last_model_path", "best_model_path")
    ]
    content = {
        "algorithm": f"{type(module).__module__}.{type(module).__qualname__}",
        "hyper_parameters": dict(module.hparams),
        "precision": trainer.precision,
        "state_dict": move_data_to_device(module.state_dict(), "cpu"),
        "optimizer_states": [move_data_to_device(optimizer.state_dict(), "cpu") for optimizer in trainer.optimizers],
        "minibatch": minibatch_state(failed.minibatch),
        "loss": failed.loss,
        "part": failed.part,
        "terms": dict(terms),
        "env_steps": module.env_steps,
        "planned_env_steps": module.clock.planned_env_steps,
        "policy_version": module.policy_version,
        "checkpoint_path": next((str(path) for path in saved if path), None),
    }
    name = f"failed-update-{module.env_steps}" + (f"-rank{module.global_rank}" if trainer.world_size > 1 else "")
    path = Path(trainer.default_root_dir) / f"{name}.pt"
    try:
        AtomicCheckpointIO().save_checkpoint(content, path)
    except CheckpointFailure:  # the failure itself is what matters
        return None
    return path
