"""What an algorithm of two phases needs besides its losses: rollouts kept for the second, optimisers of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_rl.algorithms.auxiliary_head import AuxiliaryActorCritic
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.nested import map_leaves, space_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch, on_grid
from lightning_rl.rollouts.replay import Layout, RolloutMemory, drop_unless_alike
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.spaces import observation_dtype
from lightning_rl.training.parameter_groups import Half
from lightning_rl.validation import check


class Phases(PPO):
    """PPO in the first phase; in the second, updates from all rollouts of the first.

    Attributes:
        kept: Observations, values and returns of the rollouts of the first phase so far.
        aux_sequences: Whether minibatches of the second phase are of sequences rather than of steps.
        num_aux_minibatches: Parts of one pass of the second phase.
        aux_learning_rate_scale: What the learning rates are multiplied by there.
        separate_aux_optimizer: Whether it has optimisers with moments of their own.
        aux_memory_gib: Bound on the size of the memory.
    """

    policy: AuxiliaryActorCritic
    kept: RolloutMemory
    aux_sequences: bool
    num_aux_minibatches: int
    aux_learning_rate_scale: float
    separate_aux_optimizer: bool
    aux_memory_gib: float
    _in_auxiliary_phase = False
    can_overlap = False

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

    # ------------------------------------------------------------------ optimisers

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Make those of the policy phase and, if it has its own, of the auxiliary phase, in the same order."""
        made = super().configure_optimizers()
        if not self.separate_aux_optimizer:
            return made
        pairs = [one if isinstance(one, tuple) else (one, []) for one in (made, super().configure_optimizers())]
        optimizers = [x for some, _ in pairs for x in (some if isinstance(some, list) else [some])]
        return optimizers, pairs[0][1]

    @property
    def optimizers_in_use(self) -> list[LightningOptimizer]:
        """Those of the present phase."""
        made = self.all_optimizers
        if not self.separate_aux_optimizer:
            return made
        half = len(made) // 2
        return made[half:] if self._in_auxiliary_phase else made[:half]

    def idle_parameters(self, only: Half | None) -> list[nn.Parameter]:
        """Return those that an update leaves as they are: in the policy phase the auxiliary head, too."""
        if self._in_auxiliary_phase:
            return []
        if self.is_warming_up:
            return super().idle_parameters(only)
        others = {n: p for n, p in self.policy.named_parameters() if n.startswith("auxiliary_head")}
        if self.policy.detached and only == "critic":  # which then shapes nothing but its head
            others = {n: p for n, p in self.policy.named_parameters() if not n.startswith("value_head")}
        taken = {id(parameter) for parameter in others.values()}
        return [*others.values(), *(p for p in super().idle_parameters(only) if id(p) not in taken)]

    @contextmanager
    def auxiliary_updates(self) -> Iterator[None]:
        """Frame the updates of an auxiliary phase: of all parameters, at rates of its own, under names of their own."""
        rates = self._rates()
        self._in_auxiliary_phase = True
        self.diagnostics.begin_phase("aux_")
        self._set_rates([[rate * self.aux_learning_rate_scale for rate in some] for some in rates])
        self.diagnostics.observe(learning_rate=torch.tensor(self._rates()[0][0], device=self.device))
        try:
            yield
        finally:
            self._set_rates(rates)
            self._in_auxiliary_phase = False

    def _rates(self) -> list[list[float]]:
        """Return the learning rates of all groups of each optimiser in use."""
        return [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers_in_use]

    def _set_rates(self, rates: Sequence[Sequence[float]]) -> None:
        for optimizer, some in zip(self.optimizers_in_use, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, some, strict=True):
                group["lr"] = rate

    # ------------------------------------------------------------------ memory

    def remember(self, rollout: Rollout, batch: Batch) -> None:
        """Keep what the auxiliary phase needs of a rollout.

        Args:
            rollout: Has observations and values.
            batch: Its steps, with `returns`, and with their numbers t · B + b as `steps`.
        """
        drop_unless_alike(self.kept, Layout.of(rollout.shape, rollout.memory, rollout.burn_in), "the policy phase")
        length, _ = rollout.shape
        fields = {"observations": map_leaves(lambda x: x[:length], rollout.observations)}
        for name in ("values", "returns", *({"weights"} & batch.fields.keys())):
            x: Tensor = batch.fields[name]
            fields[name] = on_grid(x, batch.steps, x.new_zeros(rollout.shape))
        starts = None if rollout.memory is None else rollout.starts
        self.kept.append(fields, rollout.valid, starts, rollout.memory, rollout.burn_in)
        self.observe_rollout(batch)

    def observe_rollout(self, batch: Batch) -> None:
        """Observe what is kept, and the largest advantage of the newest rollout's steps."""
        size = sum(replay.num_bytes for replay in self.replays.values())
        largest = batch.advantages.abs().max() if len(batch) else batch.advantages.sum()
        self.diagnostics.observe(
            aux_memory_bytes=torch.tensor(float(size), device=self.device),
            max_abs_advantage=self.all_reduce(largest, "max"),
        )

    def auxiliary_minibatches(self) -> Iterator[Batch]:
        """Yield the steps that are kept, or their sequences, in a fresh random order, cut into minibatches.

        Each comes to the device when it is its turn. With several ranks, the k-th of all ranks are one minibatch. Those
        without rows that count are left out, as where there are more parts than sequences.
        """
        for _, part in self._parts(self.minibatch_order):
            if self.has_rows(part):
                yield self.begin_minibatch(part)

    def _parts(self, order: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, Batch]]:
        """Yield, in some order, the addresses of the rows of minibatches and the rows themselves."""
        has_memory = self.policy.memory is not None
        if has_memory or self.aux_sequences:
            found, sequences = self.kept.cut()
            selected = [sequences.select(x) for x in order(len(sequences)).tensor_split(self.num_aux_minibatches)]
            parts = [(found[rows], some if has_memory else None) for rows, some in selected]
        else:
            found = self.kept.steps()
            parts = [(found[x], None) for x in order(len(found)).tensor_split(self.num_aux_minibatches)]
        weighed = [self.kept.gather(addresses, only="weights") for addresses, _ in parts]
        rows_of = [Batch({"addresses": x, **fields}) for (x, _), fields in zip(parts, weighed, strict=True)]
        self.weigh(rows_of)
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
    def keep_distributions(self) -> None:
        """Keep with every step the distribution that the policy has there now."""
        for addresses, part in self._parts(torch.arange):
            distribution, _ = self.evaluate(part)
            self.kept.write("old_distribution", addresses, distribution.parameters())

    def divergence(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return KL(old ‖ new) of each row `[N]` in nats, from the distribution that was kept."""
        return distribution.with_parameters(batch.old_distribution).kl(distribution)

    @torch.no_grad()
    def observe_divergence(self) -> None:
        """Observe how far the auxiliary phase has moved the policy: mean KL(old ‖ new) over what is kept."""
        rows = Batch({"addresses": self.kept.steps()})
        self.weigh([rows])
        total = torch.zeros((), device=self.device)
        for _, part in self._parts(torch.arange):
            distribution, _ = self.evaluate(part)
            total = total + self.divergence(part, distribution).sum()
        self.diagnostics.observe(kl=total * rows.weight)

    def to_device(self, x: Tensor) -> Tensor:
        """Return a tensor of a memory where it is learned from."""
        return x.to(self.device, non_blocking=True)


def bytes_per_step(space: spaces.Space[Any], dtype: torch.dtype) -> int:
    """Return what one step takes: its observation, its value and its return."""
    number = 8 if dtype == torch.float64 else 4
    sizes = [math.prod(x.shape or ()) * observation_dtype(x, dtype).itemsize for x in space_leaves(space).values()]
    return sum(sizes) + 2 * number
