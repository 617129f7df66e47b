"""What a policy is to those who let it act and learn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.recurrent import MemoryOptions
from lightning_rl.rollouts.sequences import Sequences


@dataclass
class PolicyOutput:
    """What acting on a batch of observations gave.

    Attributes:
        action: One action per row, shape `[B]` or `[B, a]`, nested as the action space is. In the policy's own form,
            in which its log-probability is exact (see `lightning_rl.policies.distributions.Distribution`).
        log_prob: Its log-probability, shape `[B]`; None when it is cheaper to compute for the whole rollout at once.
        value: Value estimate of the observation, shape `[B]`; None likewise.
        environment_action: The action in the units of the action space, for `to_environment`; None: the same.
        memory: What to act from at the next step, `[B, ...]`; None of a policy without memory.
    """

    action: Nested
    log_prob: Tensor | None = None
    value: Tensor | None = None
    environment_action: Nested | None = None
    memory: Nested | None = None

    def __post_init__(self) -> None:
        if self.environment_action is None:
            self.environment_action = self.action


class Policy(Protocol):
    """What a collector needs: `ActorCritic` is one, and so is any object with these three methods.

    Observations are tensors, or for `Dict` and `Tuple` spaces dicts and tuples of them. An attribute
    `chooses_rows_alone = True` declares that each action depends only on its own observation and a fixed amount of
    noise: then the policy acts for half of the worker processes while the other half steps.
    """

    def act(
        self, observations: Nested, generator: torch.Generator | None = None, deterministic: bool = False
    ) -> PolicyOutput:
        """Choose an action for every row of `observations`, shape `[B, ...]`."""
        ...

    def log_prob(self, observations: Nested, actions: Nested) -> Tensor:
        """Return log-probabilities `[...]` of actions taken at observations `[..., *shape]`."""
        ...

    def value(self, observations: Nested) -> Tensor:
        """Return value estimates `[...]` of observations `[..., *shape]`."""
        ...


class RecurrentPolicy(Protocol):
    """What a collector needs of a policy that remembers: `ActorCritic` with `memory` is one.

    Attributes:
        memory: How rollouts are cut into sequences; None of a policy that does not remember.
    """

    memory: MemoryOptions | None

    def initial_memory(self, batch_size: int, critic: bool = True) -> Nested:
        """Return the memory before an episode, nested zeros `[B, ...]`, with that of the critic or without."""
        ...

    def act(
        self,
        observations: Nested,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        memory: Nested = None,
    ) -> PolicyOutput:
        """Choose actions for rows `[B, ...]`, and say in the output what to act from next.

        With the memory of the critic it gives log-probabilities and values too.
        """
        ...

    def value(self, observations: Nested, memory: Nested) -> Tensor:
        """Return value estimates `[B]` of observations `[B, ...]` that are seen with a memory."""
        ...

    def __call__(self, observations: Nested, sequences: Sequences) -> tuple[Distribution, Tensor]:
        """Return the action distribution and values `[N]` of rows `[N, ...]`, which follow one another in sequences."""
        ...


def as_recurrent(policy: object) -> RecurrentPolicy | None:
    """Return a policy that remembers as such; None where it does not, which need not know of memories at all."""
    return cast(RecurrentPolicy, policy) if getattr(policy, "memory", None) is not None else None
