"""What a policy remembers while it acts: one state for each environment, zero where an episode begins."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked

Array = np.ndarray[Any, Any]


def forget(memory: Nested, episode_starts: Array | Tensor) -> Nested:
    """Return a memory `[B, ...]` with zeros where a new episode begins, `[B]`."""
    if isinstance(episode_starts, np.ndarray):
        if not episode_starts.any():
            return memory
        episode_starts = torch.from_numpy(episode_starts)
    mask = episode_starts.to(first_leaf(memory).device)
    return map_leaves(lambda x: torch.where(mask.view(-1, *[1] * (x.dim() - 1)), 0, x), memory)


class RecurrentState:
    """The memory of a policy over rollouts, and what of it learning needs.

    Attributes:
        state: Before the next step, `[B, ...]`; None before the first rollout, and of a policy that has no memory.
        stored: That of the steps of this rollout at which it is wanted.
        burn_in: How many steps these are before the sequences that are learned from.
    """

    def __init__(self) -> None:
        self.state: Nested | None = None
        self.stored: list[Nested] = []
        self.burn_in = 0
        self._steps: Sequence[int] = ()
        # Of single environments, after the steps whose values go on from another observation than the next one.
        self._after: dict[tuple[int, int], Nested] = {}

    def start_rollout(self, policy: Any, num_envs: int, length: int) -> None:  # noqa: ANN401 - of any make
        """Forget what was kept of the last rollout; where this is the first one, begin with an empty memory."""
        self.stored, self._after = [], {}
        self._steps, self.burn_in = policy.memory.stored_steps(length), policy.memory.burn_in
        initial = policy.initial_memory(num_envs)
        # One that was restored may be of a run in another precision.
        self.state = initial if self.state is None else map_leaves(lambda x, y: x.to(y.dtype), self.state, initial)

    def before(self, t: int) -> Nested | None:
        """Return the state to act from at step `t`, and keep it if it is wanted."""
        self.stored += [self.state] * self._steps.count(t)
        return self.state

    def after(
        self, t: int, state: Nested, episode_starts: Array | Tensor, truncated: Sequence[int], failed: Sequence[int]
    ) -> None:
        """Take in the state after step `t`.

        Args:
            t: The step.
            state: What acting gave.
            episode_starts: Where the next observation is an episode's first, `[B]`.
            truncated: Environments whose episode goes on from the value of a final observation.
            failed: Those whose episode ended, without an observation of its own, with the step before.
        """
        self.store(t, truncated, state)
        # Where the step before ended the episode, there is nothing to go on from, or it was kept with that step.
        self.store(t - 1, [index for index in failed if (t - 1, index) not in self._after], self.state)
        self.state = forget(state, episode_starts)

    def store(self, t: int, indices: Sequence[int], state: Nested) -> None:
        """Have the values of what some environments reached with step `t` be those from `state`, `[B, ...]`."""
        for index in indices:
            self._after[t, index] = map_leaves(itemgetter(index), state)

    def at(self, places: Sequence[Sequence[int]]) -> Nested | None:
        """Return the states after some steps `(t, environment)`, `[K, ...]`; None of a policy that has no memory."""
        kept = [self._after[t, index] for t, index in places] if self._after else []
        return map_stacked(torch.stack, kept) if kept else None

    def state_dict(self) -> Nested | None:
        """Return a copy of the state on the CPU."""
        return None if self.state is None else map_leaves(lambda x: x.to("cpu", copy=True), self.state)

    def load_state_dict(self, state: Nested | None, exact: Array, device: torch.device) -> None:
        """Go on from a state; environments that are not `exact`, `[B]`, or were not there begin with an empty one."""
        if state is None:
            self.state = None
            return

        def load(stored: Tensor) -> Tensor:
            own = torch.zeros(len(exact), *stored.shape[1:], dtype=stored.dtype)
            count = min(len(stored), len(exact))
            own[:count] = stored[:count]
            return own.to(device)

        self.state = forget(map_leaves(load, state), ~exact)
