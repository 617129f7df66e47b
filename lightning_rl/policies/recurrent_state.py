"""The recurrent state of a policy while it acts: one row per environment, zero at the start of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked

Array = np.ndarray[Any, Any]


def reset_memory(memory: Nested, episode_starts: Array | Tensor) -> Nested:
    """Return a recurrent state `[B, ...]` with zeros where a new episode begins, `[B]`."""
    if isinstance(episode_starts, np.ndarray):
        if not episode_starts.any():
            return memory
        episode_starts = torch.from_numpy(episode_starts)
    mask = episode_starts.to(first_leaf(memory).device)
    return map_leaves(lambda x: torch.where(mask.view(-1, *[1] * (x.dim() - 1)), 0, x), memory)


class RecurrentState:
    """The recurrent state across rollouts, and the states that learning needs.

    Attributes:
        state: State before the next step, `[B, ...]`; None before the first rollout, and without memory.
        stored: States of this rollout from which sequences are unrolled.
        burn_in: Number of steps from each of these states to the beginning of its sequence.
    """

    def __init__(self) -> None:
        self.state: Nested | None = None
        self.stored: list[Nested] = []
        self.burn_in = 0
        self._steps: Sequence[int] = ()
        # States of single environments after steps that bootstrap from another observation than the next one.
        self._after: dict[tuple[int, int], Nested] = {}

    def start_rollout(self, policy: Any, num_envs: int, length: int) -> None:  # noqa: ANN401 - a `RecurrentPolicy`
        """Drop the stored states of the last rollout; the first rollout begins with the initial state."""
        self.stored, self._after = [], {}
        self._steps, self.burn_in = policy.memory.stored_steps(length), policy.memory.burn_in
        initial = policy.initial_memory(num_envs)
        # A resumed run may have another precision.
        self.state = initial if self.state is None else map_leaves(lambda x, y: x.to(y.dtype), self.state, initial)

    def before(self, t: int) -> Nested | None:
        """Return the state before step `t`, and store it if a sequence is unrolled from it."""
        self.stored += [self.state] * self._steps.count(t)
        return self.state

    def after(
        self, t: int, state: Nested, episode_starts: Array | Tensor, truncated: Sequence[int], failed: Sequence[int]
    ) -> None:
        """Continue with the state `[B, ...]` that the policy returned for step `t`.

        `truncated` environments bootstrap from a final observation. Episodes of `failed` ones ended a step earlier.
        """
        self.store(t, truncated, state)
        # An episode that had ended anyway keeps the state that was stored then.
        self.store(t - 1, [index for index in failed if (t - 1, index) not in self._after], self.state)
        self.state = reset_memory(state, episode_starts)

    def store(self, t: int, indices: Sequence[int], state: Nested) -> None:
        """Store the rows `indices` of a state `[B, ...]` as the states after step `t`."""
        for index in indices:
            self._after[t, index] = map_leaves(itemgetter(index), state)

    def at(self, places: Sequence[Sequence[int]]) -> Nested | None:
        """Return the stored states after steps `(t, environment)`, `[K, ...]`; None if there are none."""
        kept = [self._after[t, index] for t, index in places] if self._after else []
        return map_stacked(torch.stack, kept) if kept else None

    def state_dict(self) -> Nested | None:
        """Return a copy of the state on the CPU."""
        return None if self.state is None else map_leaves(lambda x: x.to("cpu", copy=True), self.state)

    def load_state_dict(self, state: Nested | None, exact: Array, device: torch.device) -> None:
        """Restore a state; environments that are new or not `exact`, `[B]`, get the initial state."""
        if state is None:
            self.state = None
            return

        def load(stored: Tensor) -> Tensor:
            own = torch.zeros(len(exact), *stored.shape[1:], dtype=stored.dtype)
            count = min(len(stored), len(exact))
            own[:count] = stored[:count]
            return own.to(device)

        self.state = reset_memory(map_leaves(load, state), ~exact)
