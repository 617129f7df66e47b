"""Measure what random actions score on the tasks with a published score: `python benchmarks/random_scores.py`.

Writes `benchmarks/random_scores.json`, by configuration: the mean return of 100 episodes. The page of results puts its
scores between this and the published one.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import gymnasium
import yaml
from zoo import CONFIGS, HERE, PUBLISHED

from lightning_rl.environments.registry import find_spec, import_modules

PATH = HERE / "random_scores.json"
EPISODES = 100


def play(env_id: str, kwargs: dict[str, Any]) -> float:
    """Return the mean return of random actions."""
    env = gymnasium.make(find_spec(env_id), **kwargs)
    env.action_space.seed(0)
    returns = []
    for seed in range(EPISODES):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.fmean(returns)


def main() -> None:
    """Measure what is missing."""
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name in json.loads(PUBLISHED.read_text())["scores"]:
        data = yaml.safe_load(Path(CONFIGS, f"{name}.yaml").read_text())["data"]
        options = data.get("init_args", data)
        # Image games are not trained to their ends here.
        if name not in found and "ALE/" not in options["env_id"] and "Starpilot" not in options["env_id"]:
            env = options.get("env") or {}
            import_modules(env.get("imports", ()))
            found[name] = round(play(options["env_id"], env.get("kwargs") or {}), 3)
    PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
