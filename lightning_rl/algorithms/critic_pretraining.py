"""Values of a policy that stays as it is, to begin with a critic that is worth something."""

from __future__ import annotations

from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.unrolls import UnrollLearner
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.parameter_groups import ActorOrCritic, check_critic, parameters_of_policy
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_positive_int, is_one_of


class CriticPretraining(UnrollLearner):
    """Learns the value of a policy that it does not change: one that was loaded by `init_from`, usually.

    Any algorithm can go on from its checkpoint by `init_from`.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        target: `discounted_return`: the discounted rewards to the end of the episode or rollout, and the value of
            what was reached there, whoever acted; `vtrace`: V-trace targets, which correct for another policy.
        vtrace_lambda: λ of these, 0 to 1. May be a schedule.
        num_epochs: Passes over each rollout.
        num_minibatches: Parts of each pass.
        learning_rate: Step size of the optimiser.
        **kwargs: Those of `UnrollLearner`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected. Or `make_policy` is
            overridden, and no parameter of its policy has a name that begins with `critic_` or `value_`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        target: Literal["discounted_return", "vtrace"] = "discounted_return",
        vtrace_lambda: Scheduled = 1.0,
        num_epochs: int = 4,
        num_minibatches: int = 4,
        learning_rate: Scheduled = 1e-3,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        check(is_one_of(target, ("discounted_return", "vtrace")), "target", target, "discounted_return or vtrace")
        check_positive_int("num_epochs", num_epochs)
        check_positive_int("num_minibatches", num_minibatches)
        of_target = "target says what is learned"
        for name, only, reason in (
            ("advantage_estimator", "gae", of_target),
            ("value_target", "td_lambda", of_target),
            ("policy_l2", 0, "the policy is not learned"),
            ("shared_l2", 0, "what it shares is not learned"),
        ):
            check(self.hparams[name] == only, name, self.hparams[name], f"{only}: {reason}")
        if target != "vtrace":
            check(vtrace_lambda == 1, "vtrace_lambda", vtrace_lambda, "1 unless target is vtrace")
        check_critic(self.policy, "model", type(self).__name__)
        self.target = target
        self.vtrace_lambda = self.scheduled("vtrace_lambda", vtrace_lambda, at_least=0, at_most=1)
        self.num_epochs = num_epochs
        self.num_minibatches = num_minibatches

    def frozen_parameters(self, only: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return those that are never learned: all that actions depend on."""
        return parameters_of_policy(self.policy)

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout, and return the losses."""
        with self.learning(rollout):
            self.update(self.targets(rollout))
        return {"losses": self.losses}

    def update(self, batch: Batch) -> None:
        """Make passes of gradient steps over a batch, unless they are stopped."""
        for minibatch in self.passes(batch, self.num_epochs, self.num_minibatches):
            self.optimize(self.loss(minibatch))
        if not self.diagnostics.stopped:
            self.log_histograms(batch, "update")

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return the targets less the values, and the targets, `[T, B]`."""
        rewards, discounts = self.normalized_rewards(rollout), rollout.discounts(self.gamma, self.on_truncation)
        if self.target == "discounted_return":
            returns = rl.td_lambda_returns(rewards, rollout.next_values, discounts, rollout.traces(1.0))
        else:
            traces = rollout.traces(self.vtrace_lambda)
            log_rhos = self._log_rhos(rollout)
            returns, _ = rl.vtrace(log_rhos, rewards, rollout.values, rollout.next_values, discounts, traces)
        return returns - rollout.values, returns

    @torch.no_grad()
    def _log_rhos(self, rollout: Rollout) -> Tensor:
        """Return logarithms of the importance weights, `[T, B]`."""
        unroll = self.unroll(rollout)
        distribution, _ = self.evaluate(unroll.batch)
        log_rhos = distribution.log_prob(unroll.batch.actions) - unroll.batch.log_probs
        return unroll.grid(log_rhos, torch.zeros_like(rollout.values))

    def loss(self, batch: Batch) -> Tensor:
        """Return the value loss over a minibatch; it is recorded as a mean, whatever `reduction` is."""
        distribution, values = self.evaluate(batch)
        self.observe_first_ratios(distribution.log_prob(batch.actions).detach() - batch.log_probs)
        value_loss = batch.mean(rl.value_loss(*self.normalize_values(values, batch.returns)))
        self.diagnostics.add(value_loss=value_loss)
        return self.total(self.scale(batch) * value_loss)
