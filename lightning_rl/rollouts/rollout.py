"""`Rollout`: the steps that a policy collected, and `Episode`: one evaluation episode."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.sequences import cut

OnTruncation = Literal["bootstrap", "terminal"]
_FIELDS = (
    *("observations", "actions", "rewards", "terminated", "truncated", "valid", "log_probs", "values", "next_values"),
    *("final_indices", "final_observations", "starts", "memory", "repeats", "weights", "infos"),
)


@dataclass(frozen=True)
class EpisodeSummary:
    """Undiscounted returns and lengths of finished episodes, and time and environment of their last steps."""

    returns: Sequence[float] = ()
    lengths: Sequence[int] = ()
    ends: Sequence[tuple[int, int]] = ()


OF_EPISODES = [f"episode_{name}{kind}" for name in ("return", "length") for kind in ("", "_min", "_max")]
# Names <name> of `rollout/<name>` in the log, beside the `info_keys`.
LOGGED = [*OF_EPISODES, "episodes", "env_restarts", "dropped", "actors_lost"]


def names_of_infos(info_keys: Sequence[str]) -> list[str]:
    """Return the names <name> of `rollout/<name>` and `val/<name>` for the `info_keys`."""
    return [f"{key}{part}" for key in info_keys for part in ("", "_last")]


# A type checker accepts attributes of any name in subclasses of `SimpleNamespace`.
class _Fields:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Rollout(_Fields):
    """`T` steps of `B` environments, time-major, collected with one version of a policy.

    The collector reuses the storage for the next rollout; to keep a rollout, keep `rollout.clone()`. (The class is no
    dataclass because Lightning would cast each tensor of a dataclass to the precision of the network.)

    Attributes:
        observations: Observations that the policy acted on, `[T + 1, B, ...]`; the next rollout begins with the last
            row. A dict or tuple of tensors for `Dict` and `Tuple` spaces. Integers, and so images, keep their dtype.
        actions: Actions, `[T, B, ...]`, nested as the action space, before they are squashed or clipped to its bounds.
        rewards: Rewards of the training environments, before `normalization.rewards`, `[T, B]`.
        terminated: Whether the step ended the episode in a terminal state, `[T, B]`.
        truncated: Whether the step ended the episode by truncation, as at a time limit, `[T, B]`.
        valid: False where an environment was only reset, failed and was replaced, or waited for other agents, `[T, B]`;
            None if every step is real.
        log_probs: Log-probabilities of the actions under the policy that acted, `[T, B]`.
        values: Value estimates of the policy that acted for the observations, `[T, B]`.
        next_values: Its value estimates for the observations that the steps led to, `[T, B]`: 0 at terminal states,
            values of the final observations at truncated steps.
        final_indices: Time and environment of each truncated step, `[K, 2]`.
        final_observations: Observations that these steps led to, `[K, ...]`, nested as the space.
        starts: Whether an observation is the first of an episode, `[T, B]`, on the CPU; None if unknown.
        memory: Recurrent states from which the `K` sequences of each environment are unrolled, `[K, B, ...]`.
        burn_in: Number of steps from the states in `memory` to their sequences; fewer at the start of the rollout.
        repeats: Repeats of each action, `[T, B]`, if the policy chooses it and each repeat discounts; or None.
        weights: Weight of each step in losses, `[T, B]`, see `OnPolicyAlgorithm.step_weights`; None: equal weights.
        policy_version: Number of updates of the policy that acted.
        episodes: Returns and lengths of the episodes that ended in this rollout.
        infos: Numbers under each key in `info_keys` of the data module, float64 `[T, B]` on the CPU, NaN where `info`
            has no number; None without `info_keys`.
        info_names: With `info_keys`, the keys of `info` in all steps.
        failures: Message for each environment that was replaced; None if failures end the run.
        frames: Number of simulator steps if actions are repeated; None: one for each real step.
        actor: Asynchronous actor that collected the rollout; None: the learner.
        has_old_settings: Whether the settings of the environments have changed since the learner requested the rollout.
        log_rhos: Log importance ratios of the learner's policy, `[T, B]`, if an algorithm that corrects for older
            policies has replaced `log_probs`; else None.
        dropped: Number of rollouts that were dropped before this one because their policy was too old.
        actors_lost: Number of asynchronous actors that were lost before this rollout; None if they are not replaced.
        seconds: Seconds to collect the rollout, or to wait for it.
        parts_of_seconds: Seconds of the parts `env`, `policy` and `transfer`.
    """

    observations: Nested
    actions: Nested
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    log_probs: Tensor
    values: Tensor
    next_values: Tensor
    final_indices: Tensor
    final_observations: Nested
    valid: Tensor | None = None
    starts: Tensor | None = None
    memory: Nested | None = None
    burn_in: int = 0
    repeats: Tensor | None = None
    weights: Tensor | None = None
    policy_version: int = 0
    episodes: EpisodeSummary = EpisodeSummary()
    infos: dict[str, Tensor] | None = None
    info_names: Sequence[str] = ()
    failures: list[str] | None = None
    frames: int | None = None
    actor: int | None = None
    has_old_settings: bool = False
    log_rhos: Tensor | None = None
    dropped: int = 0
    actors_lost: int | None = None
    seconds: float = 0.0
    parts_of_seconds: Mapping[str, float] = MappingProxyType({})

    @cached_property
    def num_steps(self) -> int:
        """Number of real steps."""
        return self.rewards.numel() if self.valid is None else int(self.valid.sum())

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)`."""
        return self.rewards.shape[0], self.rewards.shape[1]

    @property
    def dones(self) -> Tensor:
        """Whether the step ended the episode, by termination or truncation, `[T, B]`."""
        return self.terminated | self.truncated

    def to(self, device: torch.device | str) -> Rollout:
        """Move the tensors to `device`, in place, and return the rollout.

        `starts` stays on the CPU, where sequences are cut, and `infos` too. `final_indices` and `final_observations`
        are not moved to XLA, which would compile for each number of truncated steps.
        """
        if self.rewards.device == torch.device(device):
            return self
        is_xla = torch.device(device).type == "xla"
        stay = {"starts", "infos"} | ({"final_indices", "final_observations"} if is_xla else set())
        for name, value in self.tensors().items():
            if name not in stay:
                setattr(self, name, move_data_to_device(value, device))
        return self

    def clone(self) -> Rollout:
        """Return a copy that the next rollouts do not overwrite, on the same devices."""
        return copy.deepcopy(self)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the tensors on the CPU and plain values; `Rollout(**state)` makes an equal rollout."""
        copies = map_leaves(lambda x: x.detach().to("cpu", copy=True), self.tensors())
        of_memory = {"burn_in": self.burn_in} if self.memory is not None else {}
        return {"valid": None, **copies, **of_memory, "policy_version": self.policy_version}

    def tensors(self) -> dict[str, Nested]:
        """Return the fields of tensors that are not None, by name."""
        return {name: x for name in _FIELDS if (x := getattr(self, name)) is not None}

    def discounts(self, gamma: float, on_truncation: OnTruncation = "bootstrap") -> Tensor:
        """Return the discount of the next value, `[T, B]`: gamma (to the power of `repeats`), or 0 at terminal states.

        `on_truncation="terminal"` treats truncation as a terminal state, as some published scores did.
        """
        stop = self.terminated if on_truncation == "bootstrap" else self.dones
        continues = (~stop).to(self.rewards.dtype)
        return gamma * continues if self.repeats is None else gamma ** self.repeats.to(continues.dtype) * continues

    def traces(self, lambda_: float) -> Tensor:
        """Return the trace-decay parameter of each step, `[T, B]`: λ, or 0 at the end of an episode."""
        return lambda_ * (~self.dones).to(self.rewards.dtype)

    def flatten(self, rows: Tensor | None = None, /, **per_step: Nested) -> Batch:
        """Return real steps, or those in the mask `rows` `[T, B]`, as a batch with further fields `[T, B, ...]`.

        Fields that are None are left out. A recurrent policy always returns all real steps in the order of sequences,
        since its state passes through them.
        """
        length, num_envs = self.shape
        for name, given in per_step.items():
            for x in () if given is None else leaves(given):
                found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                if found[:2] != self.shape:
                    raise ValueError(f"{name} has the shape {found}: expected a tensor [{length}, {num_envs}, ...]")
        fields: dict[str, Nested] = {
            "observations": map_leaves(itemgetter(slice(length)), self.observations),
            "actions": self.actions,
            "log_probs": self.log_probs,
            "values": self.values,
            **{name: x for name, x in per_step.items() if x is not None},
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
        chosen = rows.reshape(-1).nonzero().squeeze(1)
        return Batch(map_leaves(lambda x: x.index_select(0, chosen), together))


class Episode(_Fields):
    """One evaluation episode; no dataclass, since Lightning would copy its arrays.

    Attributes:
        episode_return: Undiscounted sum of raw rewards.
        length: Number of steps.
        terminated: Whether it ended in a terminal state rather than by truncation.
        observations: `[length + 1, ...]`, nested as the space, with the final observation; None unless recorded.
        actions: `[length, ...]`, nested as the action space, as the environment received them; None unless recorded.
        rewards: `[length]`; None unless recorded.
        infos: Numbers under each key in `info_keys` of the data module, `[length]`, NaN where `info` has no number.
    """

    episode_return: float
    length: int
    terminated: bool
    observations: Nested | None = None
    actions: Nested | None = None
    rewards: np.ndarray[Any, Any] | None = None
    infos: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({})

    def __repr__(self) -> str:
        return f"Episode(episode_return={self.episode_return:g}, length={self.length}, terminated={self.terminated})"
