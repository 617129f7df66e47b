"""Phasic policy gradient (Cobbe et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from gymnasium import spaces
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.distributed import all_reduce
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.options import OrDict
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks.mlp import HeadLinear
from lightning_rl.rollouts.batch import Batch, on_grid, set_global_weights
from lightning_rl.rollouts.replay import RolloutMemory
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.checks import check_memory
from lightning_rl.training.config import AdvantageConfig, OptimizerConfig
from lightning_rl.training.loss import Loss
from lightning_rl.training.optimizers import optimizers_and_schedulers
from lightning_rl.training.parameter_groups import ActorOrCritic, parameters_of_policy
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, check

Architecture = Literal["dual", "shared", "detached"]


class AuxiliaryActorCritic(ActorCritic):
    """An actor-critic with an auxiliary value head on the features of the policy (Cobbe et al. 2021, section 2).

    `architecture` is documented in `PPG`; all options of `ActorCritic` except `shared_encoder` work too.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        architecture: Architecture = "dual",
        **options: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, shared_encoder=architecture != "dual", **options)
        self.detached = architecture == "detached"
        features = self.actor_encoder.out_features if self.memory is None else self.memory.hidden_size
        self.auxiliary_head = HeadLinear(int(features), 1, gain=1.0)  # type: ignore[arg-type]
        expected = "not separate, since the value is read from what the policy remembers (architecture: detached)"
        check(not (self.detached and self.critic_core is not None), "policy.memory", options.get("memory"), expected)

    def forward_auxiliary(
        self, observations: Nested, sequences: Sequences | None = None
    ) -> tuple[Distribution, Tensor, Tensor]:
        """Return the action distribution, the auxiliary value and the true value; see `forward`."""
        features, value_features = self._features(observations, sequences)
        auxiliary_value = self._from_head(self.auxiliary_head, features)
        return self._distribution(features, observations), auxiliary_value, self.value_of(value_features)

    @property
    def value_heads(self) -> list[nn.Linear]:
        return [self.value_head, self.auxiliary_head]

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value; its gradient stops before the encoder if the architecture is `detached`."""
        return super().value_of(features.detach() if self.detached else features)


class PPG(PPO):
    """Phasic policy gradient (Cobbe et al. 2021, algorithm 1).

    A policy phase learns from `num_policy_iterations` rollouts like PPO. Then an auxiliary phase over all of these
    rollouts teaches the network of the policy to predict values, while its action distributions stay the same:

        auxiliary value loss + cloning_coef · KL(old policy ‖ policy) + aux_value_coef · value loss

    Args:
        num_policy_iterations: N_π, rollouts of a policy phase.
        num_aux_epochs: E_aux, passes of an auxiliary phase over all of its rollouts.
        num_aux_minibatches: Minibatches of each of these passes. None: `num_minibatches * num_policy_iterations`.
        aux_sequences: Cut these minibatches from whole sequences, the steps of one environment in one rollout.
        cloning_coef: β_clone, weight of the divergence from the policy before the auxiliary phase.
        aux_value_coef: Weight of the true value's loss in the auxiliary phase.
        aux_clip_range_value: Clip the change of both values in the auxiliary phase to ± this. None does not clip.
        aux_learning_rate_scale: Factor of the learning rate in the auxiliary phase.
        separate_aux_optimizer: Use a second optimizer of the same class, with its own moments, in the auxiliary phase.
        aux_memory_gib: Maximum memory for the rollouts of a phase, in GiB on each rank.
        architecture: `dual`: separate networks for policy and value. `shared`: one encoder, trained by both losses.
            `detached`: one encoder, not trained by the value loss.
        kl_penalty_coef: Weight of ½ (log importance ratio)² in the policy phase; with `clip_range` None this penalty
            replaces clipping.
        num_epochs: E_π, passes of the policy phase over each rollout.
        num_minibatches: Minibatches of each of these passes; must divide `num_envs * rollout_length`.
        value_coef: Weight of the value loss ½(V - return)² in the policy phase.
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        optimizer: Optimizer of both phases; gradients are not clipped by default.
        advantages: Computation of advantages and value targets; normalized over the rollout by default.
        **kwargs: Options of `PPO`, for the policy phase.
    """

    policy: AuxiliaryActorCritic

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        num_policy_iterations: PositiveInt = 32,
        num_aux_epochs: PositiveInt = 6,
        num_aux_minibatches: PositiveInt | None = None,
        aux_sequences: bool = False,
        cloning_coef: NonNegativeFloat = 1.0,
        aux_value_coef: NonNegativeFloat = 1.0,
        aux_clip_range_value: PositiveFloat | None = None,
        aux_learning_rate_scale: PositiveFloat = 1.0,
        separate_aux_optimizer: bool = True,
        aux_memory_gib: PositiveFloat = 8.0,
        architecture: Architecture = "dual",
        kl_penalty_coef: NonNegativeFloat = 0.0,
        learning_rate: Scheduled = 5e-4,
        num_epochs: PositiveInt = 1,
        num_minibatches: PositiveInt | None = 8,
        gamma: float = 0.999,
        value_coef: NonNegativeFloat = 1.0,
        entropy_coef: Scheduled = 0.01,
        optimizer: OrDict[OptimizerConfig] = OptimizerConfig(max_grad_norm=None),
        advantages: OrDict[AdvantageConfig] = AdvantageConfig(normalize="rollout"),
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            learning_rate=learning_rate,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            gamma=gamma,
            value_coef=value_coef,
            entropy_coef=entropy_coef,
            optimizer=optimizer,
            advantages=advantages,
            **kwargs,
        )
        self.kl_penalty_coef = kl_penalty_coef
        self.num_aux_epochs = num_aux_epochs
        self.num_aux_minibatches = num_aux_minibatches
        self.aux_sequences = aux_sequences
        self.cloning_coef = cloning_coef
        self.aux_value_coef = aux_value_coef
        self.aux_clip_range_value = aux_clip_range_value
        self.aux_learning_rate_scale = aux_learning_rate_scale
        self.steps.num_sets = 2 if separate_aux_optimizer else 1
        self.kept = RolloutMemory(num_policy_iterations)
        self.replays["rollouts"] = self.kept

    def make_policy(self) -> AuxiliaryActorCritic:
        options, architecture = self.policy_options(), self.options["architecture"]
        shared_encoder = options.pop("shared_encoder")
        expected = "None: architecture says who shares the encoder"
        check(shared_encoder is None, "policy.shared_encoder", shared_encoder, expected)
        expected = "dual, since critic_only gives the critic more to see"
        check(architecture == "dual" or not options["critic_only"], "architecture", architecture, expected)
        return AuxiliaryActorCritic(self.observation_space, self.action_space, architecture=architecture, **options)

    # ------------------------------------------------------------------ algorithm 1

    def update(self, rollout: Rollout) -> None:
        """Make one iteration of the policy phase; after the last iteration make the auxiliary phase."""
        places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
        batch = self.batch(rollout, places=places)
        self.store_rollout(rollout, batch)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches_of(rollout.shape)):
            self.descend(self.loss, minibatch)
        self.finish_iteration()

    def finish_iteration(self) -> None:
        """After N_π iterations, make the auxiliary phase, unless only the critic learns, and clear the memory."""
        if self.kept.is_full:
            if not self.steps.is_warming_up:
                self.auxiliary_phase()
            self.kept.clear()

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        super().add_policy_terms(loss, distribution)
        if self.kl_penalty_coef:
            log_ratios = distribution.log_prob(loss.batch.actions) - loss.batch.log_probs
            loss.add("kl_penalty", self.kl_penalty_coef * rl.approx_kl_k2(log_ratios))

    def auxiliary_phase(self) -> None:
        """Learn to predict the stored value targets without changing the action distributions."""
        with self.steps.phase("aux_", self.aux_learning_rate_scale):
            self.store_distributions()
            for _ in range(self.num_aux_epochs):
                for minibatch in self.auxiliary_minibatches():
                    self.descend(self.auxiliary_loss, minibatch)
                    if self.steps.stopped:
                        return
            self.steps.record.end_minibatches()  # log what follows, even if 16-mixed skipped the last step
            self.observe_divergence()

    def auxiliary_loss(self, batch: Batch) -> Loss:
        """Return the joint loss and the value loss over a minibatch."""
        distribution, auxiliary_values, values = self.policy.forward_auxiliary(batch.observations, batch.sequences)
        loss, clip_range = self.new_loss(batch), self.aux_clip_range_value
        loss.add_value(auxiliary_values, name="head_loss", clip_range=clip_range)
        loss.add("cloning_loss", self.divergence(batch, distribution), self.cloning_coef)
        loss.add_value(values, self.aux_value_coef, clip_range=clip_range)
        return loss

    def divergence(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return KL(old ‖ new) of each row in nats, `[N]`, from the distributions before the auxiliary phase."""
        return distribution.with_parameters(batch.old_distribution).kl(distribution)

    def configure_optimizers(self) -> Any:
        """Return the optimizers of the policy phase, and of the auxiliary phase if it has separate ones."""
        made = super().configure_optimizers()
        if self.steps.num_sets == 1:
            return made
        optimizers, schedulers = optimizers_and_schedulers(made)
        auxiliary, _ = optimizers_and_schedulers(super().configure_optimizers())
        return [*optimizers, *auxiliary], schedulers

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return the parameters that a gradient step does not change: in the policy phase also the auxiliary head."""
        if self.steps.record.prefix:  # in the auxiliary phase
            return []
        if self.policy.detached and part == "critic":  # the value loss trains only its head
            return parameters_of_policy(self.policy)
        frozen = [*super().frozen_parameters(part), *self.policy.auxiliary_head.parameters()]
        return list(dict.fromkeys(frozen))

    # ------------------------------------------------------------------ rollouts of a phase

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            check_memory(self, "aux_memory_gib", math.prod(rollout_shape) * self.kept.capacity)

    def store_rollout(self, rollout: Rollout, batch: Batch) -> None:
        """Store a rollout for the auxiliary phase; `batch` has its steps, with their indices t · B + b as `places`."""
        length, _ = rollout.shape
        fields = {"observations": map_leaves(lambda x: x[:length], rollout.observations)}
        for name in ("values", "returns", *({"weights"} & batch.fields.keys())):
            x: Tensor = batch.fields[name]
            fields[name] = on_grid(x, batch.places, x.new_zeros(rollout.shape))
        valid, starts = rollout.valid, None if rollout.memory is None else rollout.starts
        if "weights" in batch.fields:  # steps of weight 0 are left out, except with a recurrent policy
            valid = torch.zeros(rollout.shape, dtype=torch.bool, device=batch.places.device)
            valid.view(-1)[batch.places] = True
        self.kept.append(fields, valid, starts, rollout.memory, rollout.burn_in)
        self.observe_rollout(batch)

    def observe_rollout(self, batch: Batch) -> None:
        """Log the size of the stored rollouts, and the largest advantage of the newest one."""
        size = sum(replay.num_bytes for replay in self.replays.values())
        largest = batch.advantages.abs().max() if len(batch) else batch.advantages.sum()
        self.steps.observe(aux_memory_bytes=size, max_abs_advantage=all_reduce(largest, "max"))

    def auxiliary_minibatches(self) -> Iterator[Batch]:
        """Yield the minibatches of one pass over the stored steps, in random order, without those that lack rows."""
        for _, minibatch in self._stored_minibatches(self.minibatch_order):
            if minibatch.weight:
                yield minibatch

    def _stored_minibatches(self, order: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, Batch]]:
        """Yield minibatches of the stored steps or sequences, each copied to the device, and their rows' addresses."""
        has_memory = self.policy.memory is not None
        addresses, sequences = self.kept.cut() if has_memory or self.aux_sequences else (self.kept.steps(), None)
        steps = Batch({"addresses": addresses, **self.kept.gather(addresses, only="weights")}, sequences=sequences)
        items = order(steps.num_items).cpu()
        count = self.num_aux_minibatches or self.kept.capacity * self.num_minibatches_of(self.kept.shape)
        parts = [steps.ordered(some) for some in items.tensor_split(count)]
        set_global_weights(parts, self.device)
        for part in parts:
            fields = move_data_to_device(self.kept.gather(part.addresses), self.device)
            sequences = self._on_device(part.sequences) if has_memory and part.sequences is not None else None
            yield part.addresses, Batch(fields, part.weight, sequences)

    def _on_device(self, sequences: Sequences) -> Sequences:
        moved = replace(sequences, memory=move_data_to_device(sequences.memory, self.device))
        if moved.burn_in is not None:
            moved.burn_in = self._on_device(moved.burn_in)
            found = self.kept.gather(moved.burn_in_observations)["observations"]
            moved.burn_in_observations = move_data_to_device(found, self.device)
        return moved

    @torch.no_grad()
    def store_distributions(self) -> None:
        """Store the policy before the auxiliary phase: the parameters of its distribution at each kept step."""
        for addresses, minibatch in self._stored_minibatches(torch.arange):
            distribution, _ = self.actor_critic(minibatch)
            self.kept.write("old_distribution", addresses, distribution.parameters())

    @torch.no_grad()
    def observe_divergence(self) -> None:
        """Log the mean KL(old ‖ new) over the stored steps after the auxiliary phase."""
        addresses = self.kept.steps()
        rows = Batch({"addresses": addresses, **self.kept.gather(addresses, only="weights")})
        set_global_weights([rows], self.device)
        total = torch.zeros((), device=self.device)
        for _, minibatch in self._stored_minibatches(torch.arange):
            distribution, _ = self.actor_critic(minibatch)
            minibatch.weight = rows.weight
            total = total + minibatch.mean(self.divergence(minibatch, distribution))
        self.steps.observe(kl=total)
