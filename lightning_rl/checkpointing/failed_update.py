"""Updates that met NaN or infinity: saved with all that it takes to make them again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, CheckpointFailure
from lightning_rl.checkpointing.run_state import replay_states, restore_replays
from lightning_rl.distributed import gather_ranks
from lightning_rl.files import load_plain
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.optimization import Updates, not_finite_throughout, optimizers_and_schedulers
from lightning_rl.validation import ConfigurationError, constructor_options, import_class, loading

WHAT_TO_TRY = (
    "Look at the rewards and observations (normalize_rewards, normalize_observations bound them), lower learning_rate, "
    "or max_grad_norm"
)
_ANOMALY = re.compile(r"Function '(\w+)' returned nan values")


class FailedUpdate:
    """An update that was stopped because a loss term or gradient was not finite.

    Parameters are only changed by updates before it, so from those that the run was left with, the same rollout and the
    same order of minibatches, `replay` arrives at the same numbers (to rounding, where PPO learned by its closed form).
    Of several ranks the one where it began saves it, and a replay takes that rank's rows for those of all. What is made
    with the parameters as they were before the first updates or during them is made with those that the run was left
    with: the distributions that KL penalties and V-MPO measure from, so that the divergence of a replay is about 0, and
    what `recompute_advantages` estimates.

    Attributes:
        module: The algorithm with the parameters that the update began with, on the CPU.
        rollout: What it learned from: that of the rank that saved it.
        minibatch: The rows of the update; None before `replay`.
        terms: What was not finite, by name, as it was reported: means over the updates from the rollout.
        phase: In which phase of the updates from the rollout it was, counted from 0.
        number: How many updates were made in that phase before it.
        env_steps: The clock.
        checkpoint_path: The newest checkpoint of the run at that time; None if there was none.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        algorithm = import_class("algorithm", content["algorithm"], Updates)
        self.module: Updates = algorithm(**constructor_options(algorithm, content["hyper_parameters"]))
        # A real Trainer, for its precision: nothing is fitted.
        self._trainer = Trainer(
            accelerator="cpu", precision=content["precision"], logger=False, enable_checkpointing=False, barebones=True
        )
        self._trainer.precision_plugin.convert_module(self.module)
        self.module.load_state_dict(content["state_dict"])
        self.module.trainer = self._trainer
        optimizers, _ = optimizers_and_schedulers(self.module.configure_optimizers())
        self._trainer.strategy.optimizers = list(optimizers)
        for optimizer, state in zip(self._trainer.optimizers, content["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        self.rollout = Rollout(**content["rollout"])
        self.minibatch: Batch | None = None
        self.terms: dict[str, float] = content["terms"]
        self.phase: int = content["phase"]
        self.number: int = content["number"]
        restore_replays(self.module, content)
        self.env_steps: int = content["env_steps"]
        # That of the learner: the rollout may be of an earlier one.
        self._policy_version: int = content["policy_version"]
        self.checkpoint_path: str | None = content["checkpoint_path"]
        self._generator_state: Tensor = content["generator"]
        self._planned_env_steps: int | None = content["planned_env_steps"]  # schedules may end with the run
        if self.module.reward_normalizer is not None and (running := content["discounted_return"]) is not None:
            self.module.reward_normalizer.discounted_return = running

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
        if not isinstance(content, dict) or "number" not in content:
            raise ConfigurationError(f"path={str(path)!r} was not left by a failed update: expected a file that was")
        with loading(trust):
            return cls(content)

    def replay(self) -> dict[str, float]:
        """Make the update again, up to its gradient, and return its terms, `grad_norm` included.

        Afterwards the gradient is in the parameters of `module`, and its rows are in `minibatch`.

        Raises:
            RuntimeError: `training_step` ended before it came to that update.
        """
        module, reached = self.module, 0
        begin = module.start_minibatch

        def start_minibatch(batch: Batch) -> Batch:
            self.minibatch = begin(batch)
            return self.minibatch

        def optimize(loss: Tensor, **_: object) -> None:
            nonlocal reached
            if module.diagnostics.phase == self.phase and reached == self.number:
                module.zero_grad()
                not_finite_throughout(loss).backward()  # type: ignore[no-untyped-call]
                module.diagnostics.add(**module.gradient_norms())
                raise _Reached
            reached += module.diagnostics.phase == self.phase
            # The updates before were made with other parameters: what they report here says nothing.
            module.diagnostics.forget()

        module.policy_version, module.env_steps = self._policy_version, self.env_steps
        module._planned_env_steps = self._planned_env_steps
        module.generator.set_state(self._generator_state)
        instead: dict[str, Any] = {"start_minibatch": start_minibatch, "optimize": optimize}
        vars(module).update(instead)
        try:
            with self._trainer.precision_plugin.train_step_context():
                module.training_step(self.rollout, 0)
        except _Reached:
            return module.diagnostics.means()
        finally:
            for name in instead:
                del vars(module)[name]
        raise RuntimeError(f"training_step made {reached} updates, and did not come to the one after {self.number}")


@contextmanager
def explained_anomaly() -> Iterator[None]:
    """Say what to try where `detect_anomaly` has found the operation whose gradient is not a number.

    Raises:
        FloatingPointError: It has; names the operation.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := _ANOMALY.search(str(error))) is None:
            raise
        raise FloatingPointError(
            f"the gradient of {found[1]} is not a number: detect_anomaly printed above where it was computed. "
            f"{WHAT_TO_TRY}; run without detect_anomaly to save the update and make it again (FailedUpdate)"
        ) from error


class _Reached(Exception):
    """The update to look at has been made."""


def skip_or_raise(module: Updates, rollout: Rollout, terms: Mapping[str, float], generator_state: Tensor) -> None:
    """Go on without the rest of the updates from a rollout, if that is allowed once more in a row.

    Args:
        module: The algorithm, with the parameters that the update began with.
        rollout: What it learned from.
        terms: What was not finite.
        generator_state: Of the generator that orders the minibatches, before the first of them.

    Raises:
        FloatingPointError: It is not; names the term, and the file in which the update was saved.
    """
    name, value = next(iter(terms.items()))
    what = f"{name} is {value} in the update from rollout {module.policy_version} (environment step {module.env_steps})"
    if module.skipped_updates < module.max_skipped_updates:
        module.skipped_updates += 1
        rank_zero_warn(
            f"{what}: this and the later updates from it were left out, {module.skipped_updates} of at most "
            f"max_skipped_updates={module.max_skipped_updates} times in a row"
        )
        return
    # Ranks have the gradient in common, and normalised advantages: it began where the rollout is not finite, or else
    # where a term of the rank's own is not.
    evidence = gather_ranks((not _is_finite(rollout), set(terms) != {"grad_norm"}))
    culprit = evidence.index(max(evidence))
    mine = None
    if module.global_rank == culprit:
        path = save_failed_update(module, rollout, terms, generator_state)
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


def save_failed_update(
    module: Updates, rollout: Rollout, terms: Mapping[str, float], generator_state: Tensor
) -> Path | None:
    """Save an update where the run keeps its files, and return the path; None if nothing can be written."""
    trainer, rewards = module.trainer, module.reward_normalizer
    saved = [
        getattr(c, name, "") for c in trainer.checkpoint_callbacks for name in ("last_model_path", "best_model_path")
    ]
    phase, number = module.diagnostics.reached()
    content = {
        "algorithm": f"{type(module).__module__}.{type(module).__qualname__}",
        "hyper_parameters": dict(module.hparams),
        "precision": trainer.precision,
        "state_dict": move_data_to_device(module.state_dict(), "cpu"),
        "optimizer_states": [move_data_to_device(optimizer.state_dict(), "cpu") for optimizer in trainer.optimizers],
        "rollout": rollout.state_dict(),
        "terms": dict(terms),
        "phase": phase,
        "number": number,
        "replays": replay_states(module),
        "env_steps": module.env_steps,
        "planned_env_steps": module._planned_env_steps,
        "policy_version": module.policy_version,
        "generator": generator_state,
        "discounted_return": None if rewards is None else rewards.discounted_return.cpu(),
        "checkpoint_path": next((str(path) for path in saved if path), None),
    }
    name = f"failed-update-{module.env_steps}" + (f"-rank{module.global_rank}" if trainer.world_size > 1 else "")
    path = Path(trainer.default_root_dir) / f"{name}.pt"
    try:
        AtomicCheckpointIO().save_checkpoint(content, path)
    except CheckpointFailure:  # the failure itself is what matters
        return None
    return path
