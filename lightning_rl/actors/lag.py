"""Rollouts of asynchronous actors as a learner takes them: none that is too old."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from lightning_rl.actors.options import RolloutSource
from lightning_rl.rollouts.rollout import Rollout


class BoundedLag:
    """A source of rollouts that leaves out those of policies too far behind.

    Args:
        source: Whose rollouts.
        max_policy_lag: Versions of the policy that a rollout may be behind; None: any number.
        version: Of the policy that was published.
    """

    def __init__(self, source: RolloutSource, max_policy_lag: int | None, version: int) -> None:
        self.source = source
        self.max_policy_lag = max_policy_lag
        self._version = version

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with from now on, unless it is that already."""
        if version != self._version:
            self.source.publish(policy, version)
            self._version = version

    def take(self, while_waiting: Callable[[], None] = lambda: None) -> Rollout:
        """Wait for a rollout that is young enough; what happened to environments in those before it is in it too."""
        begin, dropped, lost, failures = time.perf_counter(), 0, 0, list[str]()
        while True:
            rollout = self.source.take(while_waiting)
            failures += rollout.failures or []
            lost += rollout.actors_lost or 0
            if self.max_policy_lag is None or self._version - rollout.policy_version <= self.max_policy_lag:
                break
            dropped += 1
        rollout.failures = None if rollout.failures is None else failures
        rollout.actors_lost = None if rollout.actors_lost is None else lost
        rollout.dropped = dropped
        rollout.seconds = time.perf_counter() - begin
        return rollout

    def close(self) -> None:
        """End what collects; may be called twice."""
        self.source.close()
