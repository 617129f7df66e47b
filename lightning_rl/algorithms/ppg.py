"""Phasic policy gradient (Cobbe et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.auxiliary_head import Architecture, AuxiliaryActorCritic, check_architecture
from lightning_rl.algorithms.phases import Phases
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.replay import RolloutMemory
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check_bool, check_number, check_positive_int


class PPG(Phases):
    """Phasic policy gradient (Cobbe et al. 2021, algorithm 1).

    A policy phase of `num_policy_iterations` rollouts, from each of which PPO learns; then an auxiliary phase over all
    of them, in which the policy's network learns to predict values too, while its distributions are held where they
    were:

        auxiliary value loss + cloning_coef · KL(old policy ‖ policy) + aux_value_coef · value loss

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        num_policy_iterations: N_π, rollouts of a policy phase.
        num_aux_epochs: E_aux, passes of an auxiliary phase over all of them.
        num_aux_minibatches: Parts of each of these passes; None: `num_minibatches` for each rollout.
        aux_sequences: Make these parts of whole sequences, what one environment did in one rollout, not of steps.
        cloning_coef: β_clone, weight of the divergence from the policy that the auxiliary phase began with.
        aux_value_coef: Weight of the true value's loss in the auxiliary phase.
        aux_clip_range_value: In the auxiliary phase, clip the difference of both values from the one that the rollout
            was collected with to this; None does not.
        aux_learning_rate_scale: What the learning rate is multiplied by in the auxiliary phase.
        separate_aux_optimizer: Whether the auxiliary phase has an optimiser with moments of its own, of the same class.
        aux_memory_gib: How much the rollouts of a phase may take, in GiB on each rank.
        architecture: `dual`: value and policy have networks of their own. `shared`: one encoder, which both shape.
            `detached`: one encoder, which the value is read from but does not shape.
        kl_penalty_coef: In the policy phase, weight of ½ (log importance ratio)²; with `clip_range` None it is the
            penalty in place of clipping.
        learning_rate: Step size of the optimiser.
        num_epochs: E_π, passes of the policy phase over each rollout.
        num_minibatches: Parts of each pass; must divide `num_envs * rollout_length`.
        gamma: Discount factor.
        value_coef: Weight of the value loss ½(V - return)² in the policy phase.
        entropy_coef: Weight of the entropy bonus.
        normalize_advantages: Over each `minibatch`, over the whole `rollout`, or `none`.
        max_grad_norm: Clip the global norm of the gradient, in both phases; None does not.
        **kwargs: Those of `PPO`, for the policy phase.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    policy: AuxiliaryActorCritic

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        num_policy_iterations: int = 32,
        num_aux_epochs: int = 6,
        num_aux_minibatches: int | None = None,
        aux_sequences: bool = False,
        cloning_coef: float = 1.0,
        aux_value_coef: float = 1.0,
        aux_clip_range_value: float | None = None,
        aux_learning_rate_scale: float = 1.0,
        separate_aux_optimizer: bool = True,
        aux_memory_gib: float = 8.0,
        architecture: Architecture = "dual",
        kl_penalty_coef: float = 0.0,
        learning_rate: Scheduled = 5e-4,
        num_epochs: int = 1,
        num_minibatches: int = 8,
        gamma: float = 0.999,
        value_coef: float = 1.0,
        entropy_coef: Scheduled = 0.01,
        normalize_advantages: Literal["minibatch", "rollout", "none"] = "rollout",
        max_grad_norm: float | None = None,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
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
            normalize_advantages=normalize_advantages,
            max_grad_norm=max_grad_norm,
            **kwargs,
        )
        check_positive_int("num_policy_iterations", num_policy_iterations)
        check_positive_int("num_aux_epochs", num_aux_epochs)
        if num_aux_minibatches is not None:
            check_positive_int("num_aux_minibatches", num_aux_minibatches)
        check_bool("aux_sequences", aux_sequences)
        check_number("cloning_coef", cloning_coef, at_least=0)
        check_number("aux_value_coef", aux_value_coef, at_least=0)
        if aux_clip_range_value is not None:
            check_number("aux_clip_range_value", aux_clip_range_value, above=0)
        check_number("aux_learning_rate_scale", aux_learning_rate_scale, above=0)
        check_bool("separate_aux_optimizer", separate_aux_optimizer)
        check_number("aux_memory_gib", aux_memory_gib, above=0)
        check_number("kl_penalty_coef", kl_penalty_coef, at_least=0)
        self.kl_penalty_coef = kl_penalty_coef
        self.num_aux_epochs = num_aux_epochs
        self.num_aux_minibatches = num_aux_minibatches or num_minibatches * num_policy_iterations
        self.aux_sequences = aux_sequences
        self.cloning_coef = cloning_coef
        self.aux_value_coef = aux_value_coef
        self.aux_clip_range_value = aux_clip_range_value
        self.aux_learning_rate_scale = aux_learning_rate_scale
        self.separate_aux_optimizer = separate_aux_optimizer
        self.aux_memory_gib = aux_memory_gib
        self.kept = RolloutMemory(num_policy_iterations)
        self.replays["rollouts"] = self.kept

    def make_policy(self) -> AuxiliaryActorCritic:
        """Return the policy; override it to bring your own network with an auxiliary head."""
        options = self.policy_options()
        architecture, shared_encoder = self.hparams["architecture"], options.pop("shared_encoder")
        check_architecture(architecture, shared_encoder, options["critic_only"])
        return AuxiliaryActorCritic(self.observation_space, self.action_space, architecture=architecture, **options)

    # ------------------------------------------------------------------ algorithm 1

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Make one iteration of a policy phase, and after the last of them the auxiliary phase."""
        with self.learning(rollout):
            self.policy_phase(rollout)
            if self.kept.is_full and not self.is_warming_up:
                self.auxiliary_phase()
        if self.kept.is_full:
            self.kept.clear()
        return {"losses": self.losses}

    def policy_phase(self, rollout: Rollout) -> None:
        """Learn from one rollout as PPO does, and keep its observations and value targets."""
        steps = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
        batch = self.targets(rollout, steps=steps)
        self.remember(rollout, batch)
        self.update(rollout, batch)

    def penalties(self, batch: Batch, distribution: Distribution) -> Sequence[Tensor]:
        """Return the penalty on the divergence from the policy that acted, if it is wanted."""
        if not self.kl_penalty_coef:
            return ()
        log_ratios = distribution.log_prob(batch.actions) - batch.log_probs
        penalty = self.kl_penalty_coef * batch.mean(rl.approx_kl_k2(log_ratios))
        self.diagnostics.add(kl_penalty=penalty)
        return (penalty,)

    def auxiliary_phase(self) -> None:
        """Learn to predict the kept value targets, without changing what the policy does."""
        with self.auxiliary_updates():
            self.keep_distributions()
            for _ in range(self.num_aux_epochs):
                for minibatch in self.auxiliary_minibatches():
                    self.optimize(self.auxiliary_loss(minibatch))
                    if self.diagnostics.known_closed:
                        return
            self.observe_divergence()

    def auxiliary_loss(self, batch: Batch) -> Tensor:
        """Return the joint loss and the value loss over a minibatch."""
        distribution, auxiliary, values = self.policy.forward_auxiliary(batch.observations, batch.sequences)
        head, values, returns, old_values = self.normalize_values(auxiliary, values, batch.returns, batch.values)
        clip = math.inf if self.aux_clip_range_value is None else self.aux_clip_range_value
        losses = {
            "head_loss": batch.mean(rl.clipped_value_loss(head, returns, old_values, clip)),
            "cloning_loss": batch.mean(self.divergence(batch, distribution)),
            "value_loss": batch.mean(rl.clipped_value_loss(values, returns, old_values, clip)),
        }
        self.diagnostics.add(**losses)
        return self.total(
            losses["head_loss"],
            self.cloning_coef * losses["cloning_loss"],
            self.aux_value_coef * losses["value_loss"],
        )
