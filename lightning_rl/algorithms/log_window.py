"""What happened since the last log: taken in rollout by rollout, and taken along by checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from torch import nn

from lightning_rl.metrics import EpisodeStatistics, Largest, ScalarMeans, Total
from lightning_rl.rollouts.rollout import EpisodeSummary

_Count: TypeAlias = Largest | Total
_COUNTS: dict[str, type[_Count]] = {
    "rollout/env_restarts": Total,
    "rollout/dropped": Total,
    "rollout/actors_lost": Total,
    "train/policy_lag_max": Largest,
}
# Rollouts whose numbers the metrics take in together, where they are not logged before.
_MOST_AT_ONCE = 32


class LogWindow(nn.Module):
    """Statistics of all rollouts since the last log, over all ranks.

    The metrics take in the numbers of several rollouts together, since a call for each would take as long as logging;
    to the last digit that is the same.

    Attributes:
        since: Environment steps of the run at which it began.
        episodes: Of episodes.
        means: Of scalars, by the name that they are logged by.
        counts: What is not a mean, by such a name, from the first rollout that has it on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.since = 0
        self.episodes, self.means, self.counts = EpisodeStatistics(), ScalarMeans(), nn.ModuleDict()
        self._pending = _Pending()

    @property
    def is_empty(self) -> bool:
        """Whether there has been no rollout; the same on every rank."""
        return not (self._pending.rollouts or self.means.update_called)

    def begin(self, env_steps: int) -> None:
        """Forget what there is.

        Args:
            env_steps: Where the run is.
        """
        self.since, self._pending = env_steps, _Pending()
        for metric in (self.episodes, self.means, *self._counts().values()):
            metric.reset()

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> None:
        """Take in a rollout of this rank; names are the same on every rank.

        Args:
            episodes: Those that ended.
            scalars: What means are wanted of, any number of values for each name.
            counts: What is added up, or the largest of which is wanted, by name.
        """
        self._pending.add(episodes, scalars)
        for name, count in counts.items():
            self._count(name).update(count)
        if self._pending.rollouts >= _MOST_AT_ONCE:
            self._flush()

    def compute(self) -> dict[str, float]:
        """Return means, statistics of episodes and counts by the name that they are logged by; a collective call."""
        self._flush()
        episodes = {f"rollout/{name}": value for name, value in self.episodes.compute().items()}
        # A run that goes on without actors has theirs from its checkpoint.
        counts = {name: count.compute() for name, count in self._counts().items() if count.update_called}
        return self.means.compute() | episodes | counts

    def snapshot(self) -> dict[str, Any]:
        """Return, as plain data, what this rank has taken in."""
        self._flush()
        return {
            "since": self.since,
            "episodes": self.episodes.snapshot(),
            "names": [*self.means.names],
            "means": self.means.snapshot() if self.means.names else None,
            "counts": {name: count.snapshot() for name, count in self._counts().items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what `snapshot` returned, in place of what there is."""
        self.begin(snapshot["since"])
        self.episodes.restore(snapshot["episodes"])
        self.means = ScalarMeans(snapshot["names"]).to(self.episodes.device)
        if snapshot["means"] is not None:
            self.means.restore(snapshot["means"])
        self.counts.clear()
        for name, count in snapshot["counts"].items():
            self._count(name).restore(count)

    def _flush(self) -> None:
        """Have the metrics take in what is pending."""
        if self._pending.rollouts:
            self.episodes.update(self._pending.episodes.returns, self._pending.episodes.lengths)
            self.means.update(self._pending.scalars)
            self._pending = _Pending()

    def _count(self, name: str) -> _Count:
        if name not in self.counts:
            self.counts[name] = _COUNTS[name]().to(self.episodes.device)
        return cast(_Count, self.counts[name])

    def _counts(self) -> dict[str, _Count]:
        return cast(dict[str, _Count], dict(self.counts.items()))


class _Pending:
    """What rollouts have brought that the metrics have not taken in yet."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.episodes = EpisodeSummary([], [])
        self.scalars: dict[str, list[float]] = {}

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]]) -> None:
        """Take in one rollout."""
        self.rollouts += 1
        self.episodes.returns += episodes.returns
        self.episodes.lengths += episodes.lengths
        for name, values in scalars.items():
            self.scalars.setdefault(name, []).extend(values)
