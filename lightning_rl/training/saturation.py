"""How many actions the bounds of the environment clip."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import map_leaves, space_leaves
from lightning_rl.rollouts.rollout import Rollout

_MOST = 0.1
# Policies begin wide and narrow down on their own.
_FIRST_ROLLOUTS = 10


class SaturationWatch:
    """Measures the share of action components that are clipped, and warns once where it stays large.

    Clipped actions do the same, but have different log-probabilities: the policy learns from differences that there
    are not.
    """

    def __init__(self) -> None:
        self._warned = False

    def share(self, policy: Any, rollout: Rollout) -> Tensor | None:  # noqa: ANN401 - a policy of any make
        """Return the share of the components of a rollout's actions that are clipped; None where none may be."""
        if not hasattr(policy, "saturation"):
            return None
        valid, actions = rollout.valid, rollout.actions
        share: Tensor | None = policy.saturation(actions if valid is None else map_leaves(lambda x: x[valid], actions))
        return share

    def report(self, share: float | None, num_rollouts: int, action_space: spaces.Space[Any]) -> None:
        """Warn once if, after the first rollouts, more than a tenth is clipped."""
        if share is None or share <= _MOST or num_rollouts < _FIRST_ROLLOUTS or self._warned:
            return
        self._warned = True
        parts = [path for path, leaf in space_leaves(action_space).items() if path and isinstance(leaf, spaces.Box)]
        where = f" for {', '.join(map(repr, parts))}" if parts else ""
        rank_zero_warn(
            f"{share:.0%} of the action components in rollout {num_rollouts} lie outside the bounds of the space and "
            "were clipped by the environment, so that different actions do the same: lower initial_log_std, or set "
            f"action_distribution to 'squashed_gaussian' or 'beta'{where}, which need finite bounds. "
            "train/action_saturation has the share"
        )
