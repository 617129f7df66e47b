"""Phasic policy gradient from data that are used again (as DI-engine's `ppg_offpolicy`, with its faults mended)."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl.algorithms.ppg import PPG
from lightning_rl.distributed import exact_dtype
from lightning_rl.nested import map_leaves
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.replay import Layout, UseLimitedBuffer, drop_unless_alike
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.parameter_groups import ActorOrCritic
from lightning_rl.validation import check, check_positive_int

Samples = dict[str, Batch]
"""One batch for the loss of the policy, one for that of the value: `{"policy": …, "value": …}`."""


class OffPolicyPPG(PPG):
    """Phasic policy gradient whose policy and value learn from buffers of their own.

    Every step that is collected goes into both, with the log-probability, advantage and return that it had then. An
    iteration of the policy phase draws a batch from each, so that values can be learned from older data, and more
    often, than the policy. Auxiliary phases learn from the batches of the value.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        updates_per_rollout: Iterations of the policy phase after each rollout; fewer where a buffer has not enough rows
            left for a batch.
        batch_size: Rows of each batch, on each rank.
        policy_buffer_size: Steps that the buffer of the policy has room for; new ones take the place of the oldest.
        policy_max_use: How often each of them may be drawn; None: until it is overwritten.
        value_buffer_size: Likewise for the value.
        value_max_use: Likewise for the value.
        num_policy_iterations: N_π, iterations of a policy phase: they may begin in one rollout and end in another.
        num_epochs: Passes over each pair of batches.
        num_minibatches: Parts of each pass.
        normalize_advantages: Over each `minibatch`, over the `rollout` that a step was collected in, or `none`.
        **kwargs: Those of `PPG`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        updates_per_rollout: int = 4,
        batch_size: int = 256,
        policy_buffer_size: int = 4096,
        policy_max_use: int | None = 3,
        value_buffer_size: int = 4096,
        value_max_use: int | None = 5,
        num_policy_iterations: int = 32,
        num_epochs: int = 1,
        num_minibatches: int = 1,
        normalize_advantages: Literal["minibatch", "rollout", "none"] = "minibatch",
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            num_policy_iterations=num_policy_iterations,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            normalize_advantages=normalize_advantages,
            **kwargs,
        )
        sizes = {"policy": policy_buffer_size, "value": value_buffer_size}
        limits = {"policy": policy_max_use, "value": value_max_use}
        check_positive_int("updates_per_rollout", updates_per_rollout)
        check_positive_int("batch_size", batch_size)
        for name, size in sizes.items():
            check_positive_int(f"{name}_buffer_size", size)
            check(size >= batch_size, f"{name}_buffer_size", size, f"at least batch_size={batch_size}")
            if (limit := limits[name]) is not None:
                check_positive_int(f"{name}_max_use", limit)
        for name, off, reason in (
            ("memory", None, "steps are drawn one by one, not in sequences"),
            ("recompute_advantages", False, "those of a step are made once, when it is collected"),
            ("aux_sequences", False, "auxiliary phases learn from steps that were drawn one by one"),
        ):
            check(self.hparams[name] == off, name, self.hparams[name], f"{off}: {reason}")
        fits = num_minibatches <= batch_size
        check(fits, "num_minibatches", num_minibatches, f"no more than batch_size={batch_size}")
        self.updates_per_rollout = updates_per_rollout
        self.batch_size = batch_size
        self.sources = {name: UseLimitedBuffer(size, limits[name]) for name, size in sizes.items()}
        self.replays.update(self.sources)

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check what does not depend on the rollouts, whose steps are drawn one by one, and that all buffers fit."""
        super().check_run(trainer, None)
        self.check_rows(self.batch_size * trainer.world_size)
        self.check_memory(self.kept.capacity * self.batch_size + sum(buffer.size for buffer in self.sources.values()))

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Keep one rollout, then make iterations of the policy phase, each N_π-th followed by an auxiliary phase."""
        with self.learning(rollout):
            self.store(rollout)
            for _ in range(self.updates_per_rollout):
                samples = self.sample()
                if samples is None:
                    break
                self.policy_iteration(samples)
                if self.kept.is_full:
                    if not self.is_warming_up:
                        self.auxiliary_phase()
                    self.kept.clear()
        return {"losses": self.losses}

    def store(self, rollout: Rollout) -> None:
        """Put every step of a rollout into both buffers, with what is known of it now."""
        batch = self.prepare_batch(self.targets(rollout))
        newest = batch.replace(versions=torch.full((len(batch),), rollout.policy_version))
        for buffer in self.sources.values():
            buffer.append(newest.fields)
        self.observe_rollout(batch)
        with torch.no_grad():  # rows that are drawn later were collected by other policies
            some = Batch(map_leaves(lambda x: x[: self.batch_size], batch.fields))
            distribution, _ = self.policy(some.observations)
            self.observe_first_ratios(distribution.log_prob(some.actions) - some.log_probs)

    def sample(self) -> Samples | None:
        """Draw a batch from each buffer, on the CPU; None if there are too few rows left on any rank."""
        too_few = any(len(buffer) < self.batch_size for buffer in self.sources.values())
        if self.all_reduce(torch.tensor(float(too_few), device=self.device), "max"):
            return None
        drawn = {name: buffer.sample(self.batch_size, self.generator) for name, buffer in self.sources.items()}
        return {name: Batch(fields) for name, fields in drawn.items() if fields is not None}

    def policy_iteration(self, samples: Samples) -> None:
        """Learn the policy from one batch and the value from the other, which the auxiliary phase gets too."""
        names = ("observations", "values", "returns", "weights")
        kept = {name: x for name, x in samples["value"].fields.items() if name in names}
        drop_unless_alike(self.kept, Layout((1, len(samples["value"]))), "the policy phase")
        self.kept.append(map_leaves(lambda x: x.unsqueeze(0), kept))
        samples = {name: Batch(map_leaves(self.to_device, batch.fields)) for name, batch in samples.items()}
        self.diagnostics.start_phase("")
        ages = {
            f"{name}_age": self.policy_version - x.versions.to(exact_dtype(self.device)).mean()
            for name, x in samples.items()
        }
        self.diagnostics.observe(**ages)
        for epoch in range(self.num_passes):
            half = self._half(epoch)
            parts = [self.minibatches(samples[name], self.num_minibatches) for name in ("policy", "value")]
            for policy_part, value_part in zip(*parts, strict=True):
                keep_if = partial(self._is_close, policy_part) if self.kl_rollback and half != "critic" else None
                self.optimize(self.loss_of_both(half, policy_part, value_part), only=half, keep_if=keep_if)
                if self.diagnostics.stopped:
                    return

    def loss_of_both(self, half: ActorOrCritic | None, policy_batch: Batch, value_batch: Batch) -> Tensor:
        """Return the loss of PPO, or a half of it: the policy's over one minibatch, the value's over another."""
        terms: list[Tensor] = []
        if half != "critic":
            distribution, _ = self.evaluate(policy_batch)
            terms += self.actor_terms(policy_batch, distribution)
        if half != "actor":
            values = self.policy.value(value_batch.observations)
            terms += [self.value_coef * self.value_loss(value_batch, values)]
        return self.total(*terms)
