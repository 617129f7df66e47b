"""Everything that on-policy algorithms share and their authors need not write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.algorithms.hooks import Hooks
from lightning_rl.checkpointing.failed_update import explained_anomaly, skip_or_raise
from lightning_rl.checkpointing.format import read_checkpoint
from lightning_rl.checkpointing.warm_start import WarmStart, warm_start
from lightning_rl.nested import Nested
from lightning_rl.policies.acting import act
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks import DiscreteEncoding, Network
from lightning_rl.policies.normalization import RewardScale, ValueNormalization
from lightning_rl.policies.recurrent import Memory
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import OnTruncation, Rollout
from lightning_rl.spaces import SpaceDict, space_from_dict
from lightning_rl.training.advantages import Targets
from lightning_rl.training.checks import plain_settings
from lightning_rl.training.clock import RATES
from lightning_rl.training.optimization import NotFiniteError, check_optimizers, set_learning_rate, step_scheduler
from lightning_rl.training.parameter_groups import ParameterGroups, Part, WeightPenalty
from lightning_rl.training.reward_normalization import make_reward_normalizer
from lightning_rl.training.saturation import SaturationWatch
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import ClassSpec, refuse_unknown_options


class OnPolicyAlgorithm(Targets, Hooks):
    """Base of the algorithms: policy, optimiser, normalisers, the clock, evaluation and logging.

    An algorithm is a subclass whose `training_step(rollout, batch_idx)` does its updates inside
    `with self.learning(rollout):` and calls `self.optimize(loss)` for each.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimiser: a number, or a schedule; see `lightning_rl.training.schedules.parse_schedule`.
        anneal_learning_rate: Lower it linearly to 0 over the planned environment steps of the run. Where an environment
            spends steps on resets and `max_epochs` alone bounds the run, these count as planned, and it ends as much
            above 0 as they took.
        optimizer: Optimiser class, as `{"class_path": ..., "init_args": ...}`, a class, or a `functools.partial` of
            one; None is Adam with epsilon 1e-5, fused where that exists.
        lr_scheduler: Scheduler class likewise, stepped once per rollout, in place of `anneal_learning_rate`.
        critic_optimizer: Optimiser class likewise for the critic's own encoder and head, which then has an optimiser of
            its own; None with a `critic_learning_rate` is another one of the class of `optimizer`.
        critic_learning_rate: Its step size, a number or a schedule; None with a `critic_optimizer` is `learning_rate`.
        parameter_groups: Options of some parameters, by the beginning of their names in the policy or a pattern like
            `*.bias`: `learning_rate_scale`, which the learning rate is multiplied by, and any that the optimiser knows
            for a group, such as `weight_decay`. A parameter takes those of the first pattern that fits.
        max_grad_norm: Clip the global norm of the gradient, with two optimisers that of each; None does not.
        max_grad_value: Clip every entry of the gradient to ± this, before its norm; None does not.
        gamma: Discount factor.
        on_truncation: `bootstrap` goes on from the value of the observation at which a time limit cut the episode
            off, `terminal` treats the limit as a terminal state.
        network: `auto`, `mlp`, `nature`, `impala`, the class of an encoder, or one of these for some leaves of a nested
            observation, by path; see `lightning_rl.policies.networks.make_encoder`.
        hidden_sizes: Layers of the MLP.
        activation: Activation of the MLP: `tanh`, `relu`, `elu`, `gelu` or `silu`.
        discrete_encoding: What the MLP makes of `Discrete` and `MultiDiscrete` observations: `one_hot` vectors, or an
            `embedding`, which is learned.
        shared_encoder: One encoder for actor and critic instead of two; None shares it where there is an image and
            nothing is for the critic only.
        critic_only: Paths of parts of a `Dict` that the critic sees and the actor does not: `goal`, `robot.mass`.
        memory: A recurrent core between encoder and heads: `lstm`, `gru`, or `{"kind": "lstm", option: value}` with
            `hidden_size`, `num_layers`, `separate`, `sequence_length` and `burn_in`; None: none. See docs/policies.md.
        initial_log_std: Logarithm of the initial standard deviation of continuous actions.
        action_distribution: `gaussian`, `squashed_gaussian`, `beta` and others, by name, or as
            `{"kind": name, option: value}`, or for a `Dict` or `Tuple` space one for each part by its path
            (`{"arm.0": "beta"}`); None takes the default of each space. See docs/policies.md.
        normalize_observations: Standardise every `Box` of the observation that is no image by its running moments. A
            dict changes how: `clip` bounds the result (10), `epsilon` is added to the variance (1e-8),
            `initial_variance` is the variance before any data (1).
        normalize_rewards: Divide rewards by the running deviation of the discounted return (true or `return_std`), or
            by that of the rewards themselves (`reward_std`).
        normalized_reward_clip: Bound on the absolute normalised reward; None does not clip.
        value_normalization: `running_std`: the value head predicts returns over their running deviation, and the value
            loss is in these units; `popart`: less their running mean besides, with a head that is rescaled whenever
            these change (van Hasselt et al. 2016). None does neither. See `lightning_rl.policies.normalization`.
        update_normalizers: `after` the updates from a rollout the normalisers take it in, so that they are the same in
            acting and learning, or `before`, so that the rollout is seen through them: importance ratios then do not
            begin at 1.
        recompute_values: Compute the values that targets are made of anew at the beginning of the updates from a
            rollout, rather than take those of its collection. They only differ with `update_normalizers: before`, or
            by rounding.
        advantage_estimator: `gae`, or `monte_carlo`: the sum of rewards up to the end of the episode or rollout, less
            the value; the same as λ = 1.
        value_target: `td_lambda`: advantage plus value, or `empirical`: the sum of rewards, whatever λ is.
        policy_l2: Coefficient of the squares of the weights that only the actor has; no biases, no ½.
        value_l2: Of those that only the critic has.
        shared_l2: Of those that both have.
        histograms: Log histograms of each part of the actions, normalised advantages, parameters and gradients, at the
            end of the first and the last epoch of a rollout that is logged; needs a logger like TensorBoard's.
        check_numerics: Look for NaN and infinity after every minibatch rather than after every rollout; slower, for
            debugging.
        max_skipped_updates: How many rollouts in a row may give a loss or gradient that is not finite: the updates from
            there on are left out, and the rollout from the normalisers. One more ends the run with an error, which
            names a file that `FailedUpdate.load` reads.
        fast_paths: Act and learn by faster code where it gives the same numbers up to rounding; see
            docs/algorithms/ppo.md.
        **unknown: Refused: options that neither this class nor the algorithm has.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected. Or there is no such
            option; names those that are called nearly so.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        learning_rate: Scheduled = 3e-4,
        anneal_learning_rate: bool = False,
        optimizer: ClassSpec | type[Optimizer] | None = None,
        lr_scheduler: ClassSpec | type[LRScheduler] | None = None,
        critic_optimizer: ClassSpec | type[Optimizer] | None = None,
        critic_learning_rate: Scheduled | None = None,
        parameter_groups: ParameterGroups | None = None,
        max_grad_norm: float | None = 0.5,
        max_grad_value: float | None = None,
        gamma: float = 0.99,
        on_truncation: OnTruncation = "bootstrap",
        network: Network = "auto",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
        shared_encoder: bool | None = None,
        critic_only: Sequence[str] | None = None,
        memory: Memory = None,
        initial_log_std: float = 0.0,
        action_distribution: str | ClassSpec | None = None,
        normalize_observations: bool | dict[str, float] = False,
        normalize_rewards: bool | RewardScale = False,
        normalized_reward_clip: float | None = 10.0,
        value_normalization: ValueNormalization | None = None,
        update_normalizers: Literal["after", "before"] = "after",
        recompute_values: bool = False,
        advantage_estimator: Literal["gae", "monte_carlo"] = "gae",
        value_target: Literal["td_lambda", "empirical"] = "td_lambda",
        policy_l2: float = 0.0,
        value_l2: float = 0.0,
        shared_l2: float = 0.0,
        histograms: bool = False,
        check_numerics: bool = False,
        max_skipped_updates: int = 0,
        fast_paths: bool = True,
        **unknown: Any,  # noqa: ANN401 - what no class between this one and that of the algorithm has taken
    ) -> None:
        super().__init__()
        refuse_unknown_options(self, unknown)
        self.save_hyperparameters()
        plain = plain_settings(self.hparams)
        self.save_hyperparameters(plain)
        self.observation_space = space_from_dict(plain["observation_space"])
        self.action_space = space_from_dict(plain["action_space"])
        self.gamma = gamma
        self.on_truncation = on_truncation
        self.learning_rate = self.critic_learning_rate = self.scheduled("learning_rate", learning_rate, above=0)
        rates = RATES[: len(self._optimizer_specs())]
        if len(rates) > 1:
            critics_rate = learning_rate if critic_learning_rate is None else critic_learning_rate
            self.critic_learning_rate = self.scheduled("critic_learning_rate", critics_rate, above=0)
        if anneal_learning_rate:
            for name in rates:
                self._scheduled.anneal(name, getattr(self, name))
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.check_numerics = check_numerics
        self.max_skipped_updates = max_skipped_updates
        self.update_normalizers = update_normalizers
        self.recompute_values = recompute_values
        self.advantage_estimator = advantage_estimator
        self.value_target = value_target
        self.histograms = histograms
        self.fast_paths = fast_paths
        self.policy = self.make_policy()
        # Acting may happen in another process, which has the policy alone.
        self.policy.fast_paths = fast_paths  # type: ignore[assignment]
        check_optimizers(self.policy, self._optimizer_specs(), plain["parameter_groups"] or {})
        self.try_optimizers(on_any_device=True)
        self.weight_penalty = WeightPenalty(policy_l2, value_l2, shared_l2)
        self.weight_penalty.check_policy(self.policy)
        self.reward_normalizer = make_reward_normalizer(normalize_rewards, gamma, normalized_reward_clip)
        self._saturation = SaturationWatch()

    def make_policy(self) -> ActorCritic:
        """Return the policy; override it to bring your own network."""
        return ActorCritic(self.observation_space, self.action_space, **self.policy_options())

    def policy_options(self) -> dict[str, Any]:
        """Return the options that are those of `ActorCritic`."""
        names = (
            "network",
            "hidden_sizes",
            "activation",
            "discrete_encoding",
            "shared_encoder",
            "critic_only",
            "memory",
            "initial_log_std",
            "action_distribution",
            "normalize_observations",
            "value_normalization",
        )
        return {name: self.hparams[name] for name in names}

    def init_from(self, path: str | Path, parts: Sequence[Part] | None = None) -> WarmStart:
        """Take over parameters from a checkpoint of any algorithm, to begin a new run with; say what fits and what not.

        Unlike `ckpt_path` this does not go on with optimiser and clock, and network and spaces may differ.

        Args:
            path: The checkpoint.
            parts: Some of `policy` (with an encoder that actor and critic share), `critic` and `normalizers`; None
                takes all of them, as far as they are there.

        Returns:
            What became of each tensor of these parts.

        Raises:
            ConfigurationError: It is no checkpoint of this package, or nothing of a part that was asked for fits.
        """
        checkpoint = read_checkpoint(path, "init_from")
        result = warm_start(self, checkpoint, parts, str(path))
        rank_zero_info(f"Beginning with parameters from {path}:\n  {result}")
        return result

    def forward(self, observations: Nested, deterministic: bool = True, memory: Nested | None = None) -> Nested:
        """Return actions `[B, ...]` for observations `[B, ...]`: the mode of the policy, or a sample from it.

        In the units of the action space; `lightning_rl.policies.distributions.to_environment` clips, shifts and shapes them for
        an environment.

        Args:
            observations: `[B, *shape]`, nested as the space is.
            deterministic: Take the mode.
            memory: Of a policy that has one: `self.policy.initial_memory(B)` where episodes begin, then the one that
                came with the last actions. A pair is returned: actions, and the memory for the next step.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        if memory is None:
            return self.policy.act(observations, deterministic=deterministic).environment_action
        output = self.policy.act(observations, deterministic=deterministic, memory=memory)
        return output.environment_action, output.memory

    def act(
        self,
        observation: Nested,
        deterministic: bool = True,
        memory: Nested | None = None,
        begins: Any = None,  # noqa: ANN401 - flags, of one environment or several
    ) -> Nested:
        """Return what an environment takes for what it gives, one or several at once: arrays or numbers, no tensors.

        Args:
            observation: `[*shape]` of one environment or `[B, *shape]` of several, nested as the space is, with masks
                where these are in it; what only the critic sees may be missing.
            deterministic: Take the mode of the policy rather than a sample from it.
            memory: Of a policy that has one: what came with the last action, None where episodes begin. A pair is
                returned: action, and the memory for the next step.
            begins: Where in between an episode begins, `[B]`: `terminated | truncated` of a vectorised environment that
                has reset what ended. The memory is forgotten there.

        Raises:
            ConfigurationError: A part of the observation is missing or of another shape, or there is a memory too many.
        """
        return act(
            self.policy,
            self.observation_space,
            self.action_space,
            observation,
            deterministic=deterministic,
            memory=memory,
            begins=begins,
        )

    @contextmanager
    def learning(self, rollout: Rollout) -> Iterator[None]:
        """Frame the updates from one rollout: check it before, then feed normalisers, clock and log.

        Raises:
            RuntimeError: The rollout was not collected with the current parameters, and older ones are not corrected
                for.
            FloatingPointError: A loss term or gradient was not finite; no parameter was touched by it.
        """
        lag = self.policy_version - rollout.policy_version
        if lag < 0 or (lag and not self.corrects_for_lag):
            raise RuntimeError(
                f"the rollout was collected with version {rollout.policy_version} of the policy, not with version "
                f"{self.policy_version}: the train loader must have a length, or Lightning fetches one batch ahead"
            )
        start = time.perf_counter()
        self.updating = True
        self._forget_normalizers()
        self.diagnostics = self.new_diagnostics()
        if self.corrects_for_lag:
            self.diagnostics.observe(policy_lag=torch.tensor(float(lag), device=self.device))
        self._follow_schedules()
        rates = {name: x.param_groups[0]["lr"] for name, x in zip(RATES, self.optimizers_in_use, strict=False)}
        self.find_engine()
        generator_state = self.generator.get_state()
        if (share := self._saturation.share(self.policy, rollout)) is not None:
            self.diagnostics.observe(action_saturation=share)
        for replay in self.replays.values():
            replay.begin()
        profiled = self.trainer.profiler.profile("update")  # type: ignore[attr-defined]
        with suppress(NotFiniteError), profiled, explained_anomaly(), self.engine.updates(self):
            yield
        means = self.losses = self.diagnostics.means()
        if not_finite := self.diagnostics.not_finite(means):
            self.undo_what_was_taken_in()
            skip_or_raise(self, rollout, not_finite, generator_state)
            if self.reward_normalizer is not None:
                self.reward_normalizer.forget()
        else:
            self.skipped_updates = 0
            self.after_updates(means)
            if not self._kept_normalizers:  # unless they took it in before
                self.take_into_normalizers(rollout)
            self._take_into_value_normalizer()
            for replay in self.replays.values():
                replay.commit()
            self._forget_normalizers()
        self._saturation.tell(means.get("action_saturation"), self.policy_version, self.action_space)
        if self.max_skipped_updates:
            means = means | {"skipped_updates": float(bool(not_finite))}
        means = means | rates | {name: getattr(self, name) for name in self._scheduled if name not in RATES}
        for scheduler in self._schedulers():
            step_scheduler(scheduler, self.hparams["lr_scheduler"])
        self.policy_version += 1
        self.publish_policy()
        frames = rollout.num_steps if rollout.frames is None else rollout.frames
        counts = self.all_reduce(torch.tensor([rollout.num_steps, frames], device=self.device)).tolist()
        self.env_steps, self.frames = self.env_steps + counts[0], self.frames + counts[1]
        self._log_rollout(rollout, means, time.perf_counter() - start)
        self.updating = False

    def evaluate(self, batch: Batch) -> tuple[Distribution, Tensor]:
        """Return action distribution and value of every row of a batch, with what the policy remembers there."""
        if batch.sequences is None:
            return self.policy(batch.observations)  # type: ignore[no-any-return]
        return self.policy(batch.observations, batch.sequences)  # type: ignore[no-any-return]

    @torch.no_grad()
    def compute_loss(self, rollout: Rollout | Batch) -> dict[str, float]:
        """Return the loss over a rollout or batch, and what it is made of, without learning from it.

        Nothing changes: neither parameters nor their gradients, normalisers, clock, generators or what is logged. It
        needs no Trainer; with several ranks it is a collective call about the rows of all of them. With
        `update_normalizers: before` a rollout is seen through normalisers that know it, as it would be in learning.

        Args:
            rollout: A rollout, or what `targets` made of one, all of it or a part.

        Returns:
            By the name that each is logged by (`train/<name>`): `loss`, `policy_loss`, `value_loss`, `entropy`, ….

        Raises:
            NotImplementedError: The algorithm has no `loss(batch)`.
        """
        with self.leaving_no_trace():
            self.observe_loss(rollout)
            return self.diagnostics.means()

    def observe_loss(self, rollout: Rollout | Batch) -> None:
        """Compute the loss that `compute_loss` returns; override it where that is not `loss(batch)` of `targets`."""
        loss = getattr(self, "loss", None)
        if loss is None:
            raise NotImplementedError(f"{type(self).__name__} has no loss(batch), which compute_loss calls")
        batch = self.whole(self.targets(rollout) if isinstance(rollout, Rollout) else rollout.replace())
        self.weigh([batch])
        loss(batch)

    def scheduled(
        self,
        name: str,
        value: Scheduled,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> float:
        """Return what an option begins with, for `__init__` to keep as the attribute `name`: a number from then on.

        Where `value` is a schedule, `learning` sets that attribute before each update, and it is logged.

        Raises:
            ConfigurationError: It is neither a number within the bounds nor a schedule.
        """
        return self._scheduled.add(name, value, above, at_least, at_most)

    def scheduled_or_none(self, name: str, value: Scheduled | None, *, above: float | None = None) -> float | None:
        """Return the same as `scheduled` of an option that may also be left out."""
        return None if value is None else self.scheduled(name, value, above=above)

    def after_updates(self, means: dict[str, float]) -> None:
        """React to how the updates from a rollout went; called once after all of them, if none was left out.

        Args:
            means: Mean of every term over this rank's minibatches, by name.
        """

    def _follow_schedules(self) -> None:
        values = self._scheduled.values(self.env_steps, self._planned_env_steps)
        for name, value in values.items():
            setattr(self, name, value)
        for name, optimizer in zip(RATES, self.all_optimizers, strict=False):
            if name in values:
                set_learning_rate(optimizer.optimizer, values[name])
