"""Phasic policy gradient (Cobbe et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.distributed import all_reduce
from lightning_rl.nested import Nested, map_leaves, space_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks.mlp import HeadLinear
from lightning_rl.rollouts.batch import Batch, on_grid, set_global_weights
from lightning_rl.rollouts.replay import Layout, RolloutMemory, drop_unless_alike
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.spaces import SpaceOrDict, observation_dtype
from lightning_rl.training.config import AdvantageConfig, AdvantageOptions, OptimizerConfig, OptimizerOptions
from lightning_rl.training.loss import Loss
from lightning_rl.training.parameter_groups import ActorOrCritic
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_bool, check_number, check_positive_int, is_one_of

Architecture = Literal["dual", "shared", "detached"]


class AuxiliaryActorCritic(ActorCritic):
    """An actor-critic with an auxiliary value head on the features of the policy (Cobbe et al. 2021, section 2).

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        architecture: `dual`: value and policy have networks of their own. `shared`: one encoder, which both shape.
            `detached`: one encoder, which the value is read from but does not shape.
        **options: Those of `ActorCritic`, but `shared_encoder`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        architecture: Architecture = "dual",
        **options: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, shared_encoder=architecture != "dual", **options)
        self.detached = architecture == "detached"
        features = self.actor_encoder.out_features if self.memory is None else self.memory.hidden_size
        self.auxiliary_head = HeadLinear(int(features), 1, gain=1.0)  # type: ignore[arg-type]
        expected = "not separate, since the value is read from what the policy remembers (architecture: detached)"
        check(not (self.detached and self.critic_core is not None), "memory", options.get("memory"), expected)

    def forward_auxiliary(
        self, observations: Nested, sequences: Sequences | None = None
    ) -> tuple[Distribution, Tensor, Tensor]:
        """Return the action distribution, the auxiliary value and the true value; see `forward`."""
        features, value_features = self._features(observations, sequences)
        auxiliary_value = self._from_head(self.auxiliary_head, features)
        return self._distribution(features, observations), auxiliary_value, self.value_of(value_features)

    @property
    def value_heads(self) -> list[HeadLinear]:
        """Every head that predicts returns."""
        return [self.value_head, self.auxiliary_head]

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value, without a gradient for the encoder where the architecture is `detached`."""
        return super().value_of(features.detach() if self.detached else features)


def check_architecture(architecture: str, shared_encoder: bool | None, critic_only: object) -> None:
    """Raise unless an architecture exists, and is the only option that says who shares what.

    Raises:
        ConfigurationError: It does not, or another option contradicts it.
    """
    choices = get_args(Architecture)
    check(is_one_of(architecture, choices), "architecture", architecture, f"one of {', '.join(choices)}")
    check(
        shared_encoder is None,
        "policy.shared_encoder",
        shared_encoder,
        "None: architecture says who shares the encoder",
    )
    apart = architecture == "dual" or not critic_only
    check(apart, "architecture", architecture, "dual, since critic_only gives the critic more to see")


def bytes_per_step(space: spaces.Space[Any], dtype: torch.dtype) -> int:
    """Return what one step takes: its observation, its value and its return."""
    number = 8 if dtype == torch.float64 else 4
    sizes = [math.prod(x.shape or ()) * observation_dtype(x, dtype).itemsize for x in space_leaves(space).values()]
    return sum(sizes) + 2 * number


class PPG(PPO):
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
        num_aux_minibatches: Minibatches of each of these passes. None takes as many as in the passes of all policy
            phases together.
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
        optimizer: Optimizer of both phases; gradients are not clipped by default.
        advantages: How advantages and value targets are computed; normalized over the rollout by default.
        **kwargs: Options of `PPO`, for the policy phase.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    policy: AuxiliaryActorCritic
    _in_auxiliary_phase = False

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
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
        num_minibatches: int | None = 8,
        gamma: float = 0.999,
        value_coef: float = 1.0,
        entropy_coef: Scheduled = 0.01,
        optimizer: OptimizerOptions = OptimizerConfig(max_grad_norm=None),
        advantages: AdvantageOptions = AdvantageConfig(normalize="rollout"),
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
            optimizer=optimizer,
            advantages=advantages,
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
        self.num_aux_minibatches = num_aux_minibatches
        self.aux_sequences = aux_sequences
        self.cloning_coef = cloning_coef
        self.aux_value_coef = aux_value_coef
        self.aux_clip_range_value = aux_clip_range_value
        self.aux_learning_rate_scale = aux_learning_rate_scale
        self.steps.num_sets = 2 if separate_aux_optimizer else 1
        self.aux_memory_gib = aux_memory_gib
        self.kept = RolloutMemory(num_policy_iterations)
        self.replays["rollouts"] = self.kept

    def make_policy(self) -> AuxiliaryActorCritic:
        """Return the policy; override it to bring your own network with an auxiliary head."""
        options = self.policy_options()
        architecture, shared_encoder = self.options["architecture"], options.pop("shared_encoder")
        check_architecture(architecture, shared_encoder, options["critic_only"])
        return AuxiliaryActorCritic(self.observation_space, self.action_space, architecture=architecture, **options)

    # ------------------------------------------------------------------ algorithm 1

    def update(self, rollout: Rollout) -> None:
        """Make one iteration of a policy phase, and after the last of them the auxiliary phase."""
        places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
        batch = self.batch(rollout, places=places)
        self.store_rollout(rollout, batch)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches_of(rollout.shape)):
            self.descend(self.loss, minibatch)
        if self.kept.is_full and not self.steps.is_warming_up:
            self.auxiliary_phase()

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add those of `PPO`, and the penalty on the divergence from the policy that acted, if it is wanted."""
        super().add_policy_terms(loss, distribution)
        if self.kl_penalty_coef:
            log_ratios = distribution.log_prob(loss.batch.actions) - loss.batch.log_probs
            loss.add("kl_penalty", self.kl_penalty_coef * rl.approx_kl_k2(log_ratios))

    def auxiliary_phase(self) -> None:
        """Learn to predict the kept value targets, without changing what the policy does."""
        self._in_auxiliary_phase = True
        try:
            with self.steps.phase("aux_", self.aux_learning_rate_scale):
                self.store_distributions()
                for _ in range(self.num_aux_epochs):
                    for minibatch in self.auxiliary_minibatches():
                        self.descend(self.auxiliary_loss, minibatch)
                        if self.steps.stopped:
                            return
                self.observe_divergence()
        finally:
            self._in_auxiliary_phase = False

    def auxiliary_loss(self, batch: Batch) -> Loss:
        """Return the joint loss and the value loss over a minibatch."""
        distribution, auxiliary_values, values = self.policy.forward_auxiliary(batch.observations, batch.sequences)
        loss, clip_range = self.new_loss(batch), self.aux_clip_range_value
        loss.add_value(auxiliary_values, name="head_loss", clip_range=clip_range)
        loss.add("cloning_loss", self.divergence(batch, distribution), self.cloning_coef)
        loss.add_value(values, self.aux_value_coef, clip_range=clip_range)
        return loss

    def after_update(self, means: dict[str, float]) -> None:
        """Begin a new phase."""
        if self.kept.is_full:
            self.kept.clear()

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check, besides what PPO does, that the rollouts of a phase fit into the memory."""
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            self.check_memory(math.prod(rollout_shape) * self.kept.capacity)

    def check_memory(self, num_steps: int) -> None:
        """Raise unless that many steps may be kept.

        Raises:
            ConfigurationError: They take more than `aux_memory_gib`.
        """
        bytes_ = bytes_per_step(self.observation_space, next(self.policy.parameters()).dtype)
        needed = num_steps * bytes_ / 2**30
        expected = f"at least {needed:.3g}, for {num_steps} steps of {bytes_} bytes"
        check(needed <= self.aux_memory_gib, "aux_memory_gib", self.aux_memory_gib, expected)

    # ------------------------------------------------------------------ optimizers

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Make those of the policy phase and, if it has its own, of the auxiliary phase, in the same order."""
        made = super().configure_optimizers()
        if self.steps.num_sets == 1:
            return made
        pairs = [one if isinstance(one, tuple) else (one, []) for one in (made, super().configure_optimizers())]
        optimizers = [x for some, _ in pairs for x in (some if isinstance(some, list) else [some])]
        return optimizers, pairs[0][1]

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return those that a step leaves as they are: in the policy phase the auxiliary head, too."""
        if self._in_auxiliary_phase:
            return []
        if self.steps.is_warming_up:
            return super().frozen_parameters(part)
        others = {n: p for n, p in self.policy.named_parameters() if n.startswith("auxiliary_head")}
        if self.policy.detached and part == "critic":  # which then shapes nothing but its head
            others = {n: p for n, p in self.policy.named_parameters() if not n.startswith("value_head")}
        taken = {id(parameter) for parameter in others.values()}
        return [*others.values(), *(p for p in super().frozen_parameters(part) if id(p) not in taken)]

    # ------------------------------------------------------------------ memory

    def store_rollout(self, rollout: Rollout, batch: Batch) -> None:
        """Keep what the auxiliary phase needs of a rollout.

        Args:
            rollout: Has observations and values.
            batch: Its steps, with `returns`, and with their numbers t · B + b as `places`.
        """
        drop_unless_alike(self.kept, Layout.of(rollout.shape, rollout.memory, rollout.burn_in), "the policy phase")
        length, _ = rollout.shape
        fields = {"observations": map_leaves(lambda x: x[:length], rollout.observations)}
        for name in ("values", "returns", *({"weights"} & batch.fields.keys())):
            x: Tensor = batch.fields[name]
            fields[name] = on_grid(x, batch.places, x.new_zeros(rollout.shape))
        starts = None if rollout.memory is None else rollout.starts
        self.kept.append(fields, rollout.valid, starts, rollout.memory, rollout.burn_in)
        self.observe_rollout(batch)

    def observe_rollout(self, batch: Batch) -> None:
        """Observe what is kept, and the largest advantage of the newest rollout's steps."""
        size = sum(replay.num_bytes for replay in self.replays.values())
        largest = batch.advantages.abs().max() if len(batch) else batch.advantages.sum()
        self.steps.observe(
            aux_memory_bytes=torch.tensor(float(size), device=self.device),
            max_abs_advantage=all_reduce(largest, "max"),
        )

    def auxiliary_minibatches(self) -> Iterator[Batch]:
        """Yield the steps that are kept, or their sequences, in a fresh random order, cut into minibatches.

        Each comes to the device when it is its turn. With several ranks, the k-th of all ranks are one minibatch. Those
        without rows that count are left out, as where there are more parts than sequences.
        """
        for _, part in self._parts(self.minibatch_order):
            if part.weight:
                yield part

    @property
    def num_aux_parts(self) -> int:
        """Number of minibatches of a pass over the kept rollouts."""
        assert self.kept.layout is not None
        return self.num_aux_minibatches or self.kept.capacity * self.num_minibatches_of(self.kept.layout.shape)

    def _parts(self, order: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, Batch]]:
        """Yield, in some order, the addresses of the rows of minibatches and the rows themselves."""
        has_memory = self.policy.memory is not None
        if has_memory or self.aux_sequences:
            found, sequences = self.kept.cut()
            selected = [sequences.select(x) for x in order(len(sequences)).tensor_split(self.num_aux_parts)]
            parts = [(found[rows], some if has_memory else None) for rows, some in selected]
        else:
            found = self.kept.steps()
            parts = [(found[x], None) for x in order(len(found)).tensor_split(self.num_aux_parts)]
        weighed = [self.kept.gather(addresses, only="weights") for addresses, _ in parts]
        rows_of = [Batch({"addresses": x, **fields}) for (x, _), fields in zip(parts, weighed, strict=True)]
        set_global_weights(rows_of)
        for (addresses, some), rows in zip(parts, rows_of, strict=True):
            fields = map_leaves(self.to_device, self.kept.gather(addresses))
            yield addresses, Batch(fields, rows.weight, None if some is None else self._on_device(some))

    def _on_device(self, sequences: Sequences) -> Sequences:
        """Return sequences with what they begin with where it is learned from, observations in place of addresses."""
        burn_in = observations = None
        if sequences.burn_in is not None:
            burn_in = self._on_device(sequences.burn_in)
            found = self.kept.gather(sequences.burn_in_observations)["observations"]
            observations = map_leaves(self.to_device, found)
        memory = map_leaves(self.to_device, sequences.memory)
        return Sequences(sequences.lengths, sequences.starts, memory, burn_in, observations)

    @torch.no_grad()
    def store_distributions(self) -> None:
        """Keep with every step the distribution that the policy has there now."""
        for addresses, part in self._parts(torch.arange):
            distribution, _ = self.actor_critic(part)
            self.kept.write("old_distribution", addresses, distribution.parameters())

    def divergence(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return KL(old ‖ new) of each row `[N]` in nats, from the distribution that was kept."""
        return distribution.with_parameters(batch.old_distribution).kl(distribution)

    @torch.no_grad()
    def observe_divergence(self) -> None:
        """Observe how far the auxiliary phase has moved the policy: mean KL(old ‖ new) over what is kept."""
        rows = Batch({"addresses": self.kept.steps()})
        set_global_weights([rows])
        total = torch.zeros((), device=self.device)
        for _, part in self._parts(torch.arange):
            distribution, _ = self.actor_critic(part)
            total = total + self.divergence(part, distribution).sum()
        self.steps.observe(kl=total * rows.weight)

    def to_device(self, x: Tensor) -> Tensor:
        """Return a tensor of a memory where it is learned from."""
        return x.to(self.device, non_blocking=True)
