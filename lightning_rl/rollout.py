"""The one batch type: what environments and policy did over `T` steps of `B` environments.

Plain classes rather than dataclasses: Lightning leaves them as they are where it would otherwise cast every field, the
rewards and log-probabilities too, to the precision of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves
from lightning_rl.sequences import Sequences, cut
from lightning_rl.validation import ConfigurationError

OnTruncation = Literal["bootstrap", "terminal"]

# Of which no second copy is made: bytes of the rows of a rollout.
_LARGE = 2**24

_FIELDS = (
    *("observations", "actions", "rewards", "terminated", "truncated", "valid", "log_probs", "values", "next_values"),
    *("final_indices", "final_observations", "starts", "memory", "repeats"),
)


class Rollout:
    """`T` steps of `B` environments, time-major, as one version of a policy collected them.

    The collector reuses the storage of a rollout for the next one: keep `rollout.clone()`.

    Attributes:
        observations: What the policy saw, `[T + 1, B, ...]`; the last row is where the next rollout begins. For `Dict`
            and `Tuple` spaces a dict or tuple of such tensors; integers, and so images, have the type they came with.
        actions: What it did, `[T, B, ...]`, nested as the action space is: in the policy's own form, before it is
            squashed into or clipped to the environment's bounds.
        rewards: Raw rewards, `[T, B]`.
        terminated: The episode ended in a terminal state with this step, `[T, B]`.
        truncated: The episode was cut off (a time limit) with this step, `[T, B]`.
        valid: False where an environment was only being reset, failed and was replaced, or waited for other agents,
            `[T, B]`; None if every entry is a real step.
        log_probs: Log-probability of each action under the policy that took it, `[T, B]`.
        values: Its value estimate of each observation, `[T, B]`.
        next_values: Its value estimate of the observation each step really reached, `[T, B]`: where an episode was
            truncated that of the final observation, not of the one after the reset; 0 at a terminal state.
        final_indices: Time and environment of each truncated step, `[K, 2]`.
        final_observations: The observations those steps reached, `[K, ...]`, nested likewise.
        starts: Whether an observation is the first one of an episode, `[T, B]`, on the CPU; None where nobody asks.
        memory: Of a policy that has one: for each sequence to learn from the state that it is unrolled from,
            `[sequences of an environment, B, ...]`, nested as that of the policy; None of others.
        burn_in: How many steps before the sequence that is, as far as the rollout has them.
        repeats: How often the environment took each action, where the policy chooses that, `[T, B]`; None elsewhere.
        policy_version: Number of updates the policy had seen.
        episodes: Returns and lengths of the episodes that ended in this rollout.
        infos: For every requested key of `info`, the values seen.
        info_names: Where there are such, keys of `info` in steps that ended episodes, or without one in the last.
        failures: What happened to each environment that was replaced; None where a failure ends the run instead.
        frames: Steps of the simulation, where actions are repeated; None: as many as real steps.
        actor: Which asynchronous actor collected it, of those of its rank; None: the learner itself.
        log_rhos: Where an algorithm has put its own log-probabilities in the place of those of an earlier policy, by
            how much they are larger, `[T, B]`; None elsewhere.
        dropped: How many rollouts before it were too old to learn from, with asynchronous actors.
        actors_lost: How many asynchronous actors were lost, and are replaced, since the rollout before it; None where
            that ends the run instead.
        seconds: Wall time of collecting, with asynchronous actors that of waiting for it.
        parts_of_seconds: What of it went where: `env`, `policy` and `transfer` between their devices.
    """

    def __init__(
        self,
        *,
        observations: Nested,
        actions: Nested,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        log_probs: Tensor,
        values: Tensor,
        next_values: Tensor,
        final_indices: Tensor,
        final_observations: Nested,
        valid: Tensor | None = None,
        starts: Tensor | None = None,
        memory: Nested | None = None,
        burn_in: int = 0,
        repeats: Tensor | None = None,
        policy_version: int = 0,
        episodes: EpisodeSummary | None = None,
        infos: Mapping[str, list[float]] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.observations = observations
        self.actions = actions
        self.rewards = rewards
        self.terminated = terminated
        self.truncated = truncated
        self.log_probs = log_probs
        self.values = values
        self.next_values = next_values
        self.final_indices = final_indices
        self.final_observations = final_observations
        self.valid = valid
        self.starts = starts
        self.memory = memory
        self.burn_in = burn_in
        self.repeats = repeats
        self.policy_version = policy_version
        self.episodes = episodes or EpisodeSummary([], [])
        self.infos = dict(infos or {})
        self.info_names: list[str] = []
        self.failures: list[str] | None = None
        self.frames: int | None = None
        self.actor: int | None = None
        self.log_rhos: Tensor | None = None
        self.dropped = 0
        self.actors_lost: int | None = None
        self.seconds = seconds
        self.parts_of_seconds: dict[str, float] = {}
        self.num_steps = rewards.numel() if valid is None else int(valid.sum())
        """Number of real environment steps."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)`."""
        return self.rewards.shape[0], self.rewards.shape[1]

    @property
    def ends(self) -> Tensor:
        """Whether the episode ended with the step, in whichever way, `[T, B]`."""
        return self.terminated | self.truncated

    def to(self, device: torch.device | str) -> Rollout:
        """Move every tensor to `device`, in place, and return the rollout.

        `starts` stays, as what cuts sequences does. `final_indices` and `final_observations` do not follow to XLA,
        which would compile for each number of them.
        """
        if self.rewards.device == torch.device(device):
            return self
        of_finals = ("final_indices", "final_observations") if torch.device(device).type == "xla" else ()
        stays = ("starts", *of_finals)
        for name, value in self.tensors().items():
            if name not in stays:
                setattr(self, name, map_leaves(lambda x: x.to(device, non_blocking=True), value))
        return self

    def clone(self) -> Rollout:
        """Return a copy that the next rollouts do not overwrite, on the same devices."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if name in (*_FIELDS, "log_rhos") and value is not None:
                setattr(copied, name, map_leaves(torch.clone, value))
            elif isinstance(value, list | dict | EpisodeSummary):
                setattr(copied, name, copy.deepcopy(value))
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the tensors on the CPU and the version, which make another rollout."""
        copies = map_leaves(lambda x: x.detach().to("cpu", copy=True), self.tensors())
        of_memory = {"burn_in": self.burn_in} if self.memory is not None else {}
        return {"valid": None, **copies, **of_memory, "policy_version": self.policy_version}

    def tensors(self) -> dict[str, Nested]:
        """Return every field of tensors that it has, by name."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return {name: x for name, x in fields.items() if x is not None}

    def discounts(self, gamma: float, on_truncation: OnTruncation = "bootstrap") -> Tensor:
        """Return what the value of the next observation is multiplied by, `[T, B]`: gamma, or 0 at a terminal state.

        Where actions were repeated as the policy chose, gamma counts as often as they were taken.

        Args:
            gamma: Discount factor.
            on_truncation: `bootstrap` goes on from the value of the observation that was reached, `terminal` treats a
                time limit as a terminal state (wrong, but some published scores were made so).
        """
        stop = self.terminated if on_truncation == "bootstrap" else self.ends
        goes_on = (~stop).to(self.rewards.dtype)
        return gamma * goes_on if self.repeats is None else gamma ** self.repeats.to(goes_on.dtype) * goes_on

    def traces(self, lambda_: float) -> Tensor:
        """Return how much of the next step's estimate is used, `[T, B]`: λ, or 0 at any end of an episode."""
        return lambda_ * (~self.ends).to(self.rewards.dtype)

    def flatten(self, rows: Tensor | None = None, /, **per_step: Nested) -> Batch:
        """Return steps as one batch of rows.

        Those of a policy with memory are in the order of sequences, and within each of time.

        Args:
            rows: Which steps, `[T, B]`; None: the real ones. What a policy remembers goes through all real steps, so
                with memory it is these in any case.
            **per_step: More tensors `[T, B, ...]`, nested or not, that the rows are to have.
        """
        length, num_envs = self.shape
        fields: dict[str, Nested] = {
            "observations": map_leaves(itemgetter(slice(length)), self.observations),
            "actions": self.actions,
            "log_probs": self.log_probs,
            "values": self.values,
            **per_step,
        }
        if self.memory is not None:
            assert self.starts is not None
            places, sequences = cut(self.valid, self.starts, self.memory, self.burn_in, self.observations)
            index = places.to(self.rewards.device)
            return Batch(map_leaves(lambda x: x.flatten(0, 1)[index], fields), sequences=sequences)
        rows = self.valid if rows is None else rows
        together = map_leaves(lambda x: x.reshape(length * num_envs, *x.shape[2:]), fields)
        if rows is None:
            return Batch(together)
        chosen = rows.reshape(-1).nonzero().squeeze(1)  # once for all fields
        return Batch(map_leaves(lambda x: x.index_select(0, chosen), together))


class EpisodeSummary:
    """Undiscounted returns and lengths of finished episodes.

    Attributes:
        returns: Sum of raw rewards of each episode.
        lengths: Number of steps of each episode.
    """

    def __init__(self, returns: list[float], lengths: list[int]) -> None:
        self.returns = returns
        self.lengths = lengths


class Batch:
    """Rows of a rollout, in any order: tensors of equal length by name, nested or not, read as attributes.

    Attributes:
        sequences: For a policy with memory, which of the rows follow one another; None: each stands for itself.
        weight: What each row counts for in a mean. Losses are `weight · Σ` over rows; with several ranks the weights
            are such that the average over ranks, which DDP takes, is the mean over all ranks' rows.
        weights: Where it is there, `[N]`: rows count for `weight · weights` instead.
    """

    observations: Nested
    actions: Nested
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor

    def __init__(
        self, fields: dict[str, Nested], weight: float | None = None, sequences: Sequences | None = None
    ) -> None:
        self.fields = fields
        self.sequences = sequences
        self._given_weight = weight
        self._own_weight: float | None = None
        self._normalized: tuple[Tensor, int, Tensor] | None = None

    @property
    def weight(self) -> float:
        """One over the total weight of the rows, 0 where that is 0, unless it was set."""
        if self._given_weight is not None:
            return self._given_weight
        if self._own_weight is None:
            total = float(self.total_weight)
            self._own_weight = 1 / total if total else 0.0
        return self._own_weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._given_weight = weight

    @property
    def total_weight(self) -> Tensor | int:
        """Sum of the rows' weights: their number, where they have none."""
        return self.fields["weights"].sum() if "weights" in self.fields else len(self)

    @property
    def normalized_advantages(self) -> Tensor | None:
        """What `advantages` normalised are, if somebody has said so and they are still what they were then."""
        if self._normalized is None:
            return None
        advantages, version, normalized = self._normalized
        return normalized if self.fields["advantages"] is advantages and advantages._version == version else None

    @normalized_advantages.setter
    def normalized_advantages(self, normalized: Tensor) -> None:
        self._normalized = self.advantages, self.advantages._version, normalized

    @property
    def is_plain(self) -> bool:
        """Whether its rows count alike and belong to no sequences."""
        return self.sequences is None and "weights" not in self.fields

    @property
    def num_items(self) -> int:
        """Number of things that `ordered` puts in order: rows, or sequences where rows belong to such."""
        return len(self) if self.sequences is None else len(self.sequences)

    def __getattr__(self, name: str) -> Nested:
        fields: dict[str, Nested] = self.__dict__.get("fields", {})  # missing while a copy is being made
        if name not in fields:
            raise AttributeError(f"batch has no field {name!r}: it has {', '.join(fields)}")
        return fields[name]

    def __len__(self) -> int:
        return len(first_leaf(self.fields))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of `x`, one number per row, over the rows of all ranks (see `weight`).

        Rows of weight 0 take no part, not even by a NaN in `x`.
        """
        if "weights" in self.fields:
            x = torch.where(self.weights != 0, x, 0) * self.weights.to(x.dtype)
        elif self._given_weight is None and len(x):
            return x.mean()
        return x.sum() * self.weight

    def shuffled(self, generator: torch.Generator | None = None) -> Batch:
        """Return the rows in a fresh random order; where there are sequences, these are what is put into it."""
        return self.ordered(torch.randperm(self.num_items, generator=generator))

    def ordered(self, order: Tensor) -> Batch:
        """Return the rows, or sequences, with the indices `order`, which may leave some out or repeat them."""
        weight = self._given_weight if len(order) == self.num_items else None
        if self.sequences is not None:
            rows, sequences = self.sequences.select(order)
            return self._of(rows.to(first_leaf(self.fields).device), sequences, weight)
        order = order.to(first_leaf(self.fields).device)
        return Batch(map_leaves(lambda x: x.index_select(0, order), self.fields), weight)

    def split(self, num_minibatches: int) -> Iterator[Batch]:
        """Cut the rows, in their order, into `num_minibatches` parts whose sizes differ by one at the most.

        Sequences stay whole: it is their numbers that differ by one at the most.
        """
        if self.sequences is not None:
            for rows, sequences in self.sequences.split(num_minibatches):
                yield self._of(rows, sequences)
            return
        # Lists, which are leaves: a tuple would be nested.
        parts = map_leaves(lambda x: list(torch.tensor_split(x, num_minibatches)), self.fields)
        for index in range(num_minibatches):
            yield Batch(map_leaves(itemgetter(index), parts))

    def minibatches(self, order: Tensor, num_minibatches: int) -> Iterator[Batch]:
        """Yield what `ordered(order).split(num_minibatches)` yields.

        Where that would put a large copy of the rows beside them, as of images, each minibatch is gathered by itself.
        """
        large = self.sequences is None and sum(leaf.nbytes for leaf in leaves(self.fields)) > _LARGE
        if not large:
            yield from self.ordered(order).split(num_minibatches)
            return
        for part in torch.tensor_split(order.to(first_leaf(self.fields).device), num_minibatches):
            yield Batch(map_leaves(lambda x, part=part: x.index_select(0, part), self.fields))

    def replace(self, **fields: Nested) -> Batch:
        """Return a batch with some fields replaced or added."""
        return Batch({**self.fields, **fields}, self._given_weight, self.sequences)

    def _of(self, rows: Tensor | slice, sequences: Sequences, weight: float | None = None) -> Batch:
        return Batch(map_leaves(itemgetter(rows), self.fields), weight, sequences)


def on_grid(rows: Tensor, places: Tensor, elsewhere: Tensor) -> Tensor:
    """Return a copy of `elsewhere`, `[T, B, ...]`, that has `rows`, `[N, ...]`, at the places t · B + b, `[N]`."""
    grid = elsewhere.clone(memory_format=torch.contiguous_format)
    grid.view(-1, *grid.shape[2:])[places] = rows.to(grid.dtype)
    return grid


def check_minibatches(num_rows: int, num_minibatches: int, num_sequences: int | None = None) -> None:
    """Raise unless a rollout can be cut into equal minibatches.

    Args:
        num_rows: Steps of a rollout.
        num_minibatches: Parts.
        num_sequences: Of which each part has to have whole ones; None: of steps.

    Raises:
        ConfigurationError: `num_minibatches` does not divide that.
    """
    if num_sequences is not None and num_sequences % num_minibatches:
        raise ConfigurationError(
            f"num_minibatches={num_minibatches} does not divide the {num_sequences} sequences of a rollout "
            "(num_envs * rollout_length / memory.sequence_length): expected a divisor of it"
        )
    if num_rows % num_minibatches:
        raise ConfigurationError(
            f"num_minibatches={num_minibatches} does not divide the {num_rows} steps of a rollout "
            "(num_envs * rollout_length): expected a divisor of it"
        )
