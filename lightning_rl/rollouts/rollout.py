"""The one batch type: what environments and policy did over `T` steps of `B` environments.

Plain classes rather than dataclasses: Lightning leaves them as they are where it would otherwise cast every field, the
rewards and log-probabilities too, to the precision of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.nested import Nested, map_leaves
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.sequences import cut

OnTruncation = Literal["bootstrap", "terminal"]
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
    def dones(self) -> Tensor:
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
        stop = self.terminated if on_truncation == "bootstrap" else self.dones
        goes_on = (~stop).to(self.rewards.dtype)
        return gamma * goes_on if self.repeats is None else gamma ** self.repeats.to(goes_on.dtype) * goes_on

    def traces(self, lambda_: float) -> Tensor:
        """Return how much of the next step's estimate is used, `[T, B]`: λ, or 0 at any end of an episode."""
        return lambda_ * (~self.dones).to(self.rewards.dtype)

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
            indices, sequences = cut(self.valid, self.starts, self.memory, self.burn_in, self.observations)
            index = indices.to(self.rewards.device)
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
