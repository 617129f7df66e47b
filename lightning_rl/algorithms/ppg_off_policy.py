"""Phasic policy gradient with replay buffers, as DI-engine's `ppg_offpolicy` with its errors corrected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer

from lightning_rl.algorithms.ppg import PPG
from lightning_rl.distributed import all_reduce, exact_dtype
from lightning_rl.nested import map_leaves
from lightning_rl.options import OrDict
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.replay import UseLimitedBuffer
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.checks import check_memory
from lightning_rl.training.config import AdvantageConfig
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import BatchPair
from lightning_rl.validation import PositiveInt, check


class OffPolicyPPG(PPG):
    """Phasic policy gradient whose policy and value learn from separate replay buffers.

    Every collected step enters both buffers, with its log-probability, advantage and return at that time. An iteration
    of the policy phase draws a batch from each buffer, so that values can be learned from older data, and more often,
    than the policy. After `num_policy_iterations` iterations, which may span several rollouts, an auxiliary phase
    learns from the batches of the value. `num_epochs` are passes over each pair of batches.

    Args:
        updates_per_rollout: Iterations of the policy phase after each rollout, while each buffer has a whole batch.
        batch_size: Rows of each batch, on each rank.
        policy_buffer_size: Steps in the buffer of the policy; new steps replace the oldest.
        policy_max_use: Maximum number of draws of each step from this buffer. None sets no limit.
        value_buffer_size: Steps in the buffer of the value.
        value_max_use: Maximum number of draws of each step from this buffer. None sets no limit.
        num_minibatches: Minibatches of each pass.
        advantages: As in `PPG`; `normalize: rollout` normalizes over the rollout that collected the step.
        **kwargs: Options of `PPG`.
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        "policy.memory": "steps are drawn one by one, not in sequences",
        "advantages.recompute_advantages": "advantages are computed once, when a step is collected",
        "aux_sequences": "auxiliary phases learn from steps that were drawn one by one",
    }

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        updates_per_rollout: PositiveInt = 4,
        batch_size: PositiveInt = 256,
        policy_buffer_size: PositiveInt = 4096,
        policy_max_use: PositiveInt | None = 3,
        value_buffer_size: PositiveInt = 4096,
        value_max_use: PositiveInt | None = 5,
        num_minibatches: PositiveInt | None = 1,
        advantages: OrDict[AdvantageConfig] = AdvantageConfig(normalize="minibatch"),
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(
            observation_space, action_space, num_minibatches=num_minibatches, advantages=advantages, **kwargs
        )
        self.updates_per_rollout = updates_per_rollout
        self.batch_size = batch_size
        self.sources = {
            "policy": UseLimitedBuffer(policy_buffer_size, policy_max_use),
            "value": UseLimitedBuffer(value_buffer_size, value_max_use),
        }
        self.replays.update(self.sources)
        for name, buffer in self.sources.items():
            check(buffer.size >= batch_size, f"{name}_buffer_size", buffer.size, f"at least batch_size={batch_size}")
        if (given := self.minibatch_size) is not None:
            check(batch_size % given == 0, "minibatch_size", given, f"a divisor of batch_size={batch_size}")
        else:
            number = self.num_minibatches_of([batch_size])
            check(number <= batch_size, "num_minibatches", number, f"no more than batch_size={batch_size}")

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, None)
        self.check_rows(self.batch_size * trainer.world_size, self.num_minibatches_of([self.batch_size]))
        num_steps = self.kept.capacity * self.batch_size + sum(buffer.size for buffer in self.sources.values())
        check_memory(self, "aux_memory_gib", num_steps)

    def update(self, rollout: Rollout) -> None:
        """Store one rollout, then make iterations of the policy phase; an auxiliary phase follows N_π iterations."""
        self.store(rollout)
        for iteration in range(self.updates_per_rollout):
            samples = self.sample()
            if samples is None:
                break
            self.policy_iteration(samples)
            if iteration == 0 and not self.steps.stopped:  # before an auxiliary phase, which has other gradients
                self.on_pass_end(samples.policy, "update")
            self.finish_iteration()

    def store(self, rollout: Rollout) -> None:
        """Add the steps of a rollout to each buffer, with their advantages and returns."""
        raw = self.batch(rollout)
        batch = self.estimator.normalized_over_rollout(raw)
        newest = batch.replace(versions=torch.full((len(batch),), rollout.policy_version))
        for buffer in self.sources.values():
            buffer.append(newest.fields)
        self.observe_rollout(raw)
        with torch.no_grad():  # rows that are drawn later were collected by other policies
            some = Batch(map_leaves(lambda x: x[: self.batch_size], batch.fields))
            distribution, _ = self.policy(some.observations)
            self.steps.observe_first_ratios(distribution.log_prob(some.actions) - some.log_probs)

    def sample(self) -> BatchPair | None:
        """Return a batch from each buffer, or None if any rank has too few rows left."""
        too_few = any(len(buffer) < self.batch_size for buffer in self.sources.values())
        if all_reduce(torch.tensor(float(too_few), device=self.device), "max"):
            return None
        drawn: Any = [buffer.sample(self.batch_size, self.generator) for buffer in self.sources.values()]
        is_normalized = self.estimator.normalize == "rollout"
        on_device = move_data_to_device(drawn, self.device)
        return BatchPair(*(Batch(fields, is_normalized=is_normalized) for fields in on_device))

    def policy_iteration(self, samples: BatchPair) -> None:
        """Learn the policy from one batch and the value from the other; store the latter for the auxiliary phase."""
        names = ("observations", "values", "returns", "weights")
        kept = {name: x for name, x in samples.value.fields.items() if name in names}
        self.kept.append(map_leaves(lambda x: x.unsqueeze(0), kept))
        self.steps.record.start_phase("")
        for name, batch in samples._asdict().items():
            age = self.policy_version - batch.versions.to(exact_dtype(self.device)).mean()
            self.steps.observe(**{f"{name}_age": age})
        for _ in self.steps.epochs(self.num_epochs):
            parts = [self.one_pass(batch, self.num_minibatches_of([self.batch_size])) for batch in samples]
            for pair in zip(*parts, strict=True):
                self.descend(self.loss_of_both, BatchPair(*pair))
                if self.steps.stopped:
                    return

    def loss_of_both(self, pair: BatchPair) -> Loss:
        """Return the loss of PPO, with the terms of the policy over one minibatch and of the value over another."""
        distribution, _ = self.actor_critic(pair.policy)
        loss = self.new_loss(pair.policy)
        self.add_policy_terms(loss, distribution)
        values = self.policy.value(pair.value.observations)
        clip_range, huber_delta = self.clip_range_value, self.value_huber_delta
        loss.add_value(values, self.value_coef, clip_range=clip_range, huber_delta=huber_delta, batch=pair.value)
        return loss
