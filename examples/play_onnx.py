"""Run an exported policy without PyTorch: onnxruntime, NumPy and Gymnasium are enough.

    python examples/play_onnx.py

Run `lightning-rl fit --config ppo/cartpole` and `lightning-rl export --ckpt_path last --output policy` before.
The metadata of the model has the names, dtypes and shapes of inputs and outputs. Recurrent state is zero at the start
of an episode; the output `next_memory.…` is the input `memory.…` of the next step.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime


class Policy:
    """A policy from `lightning-rl export`, for one environment with array observations."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            sys.exit(f"{path} does not exist: expected a model that `lightning-rl export --output policy` has written")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["policy"])
        self.outputs = [output["name"] for output in self.about["outputs"]]

    def reset(self) -> None:
        """Set the recurrent state to zero, at the start of an episode."""
        rows = {part["name"]: np.zeros((1, *part["shape"]), part["dtype"]) for part in self.about["inputs"]}
        self.memory = {name: zeros for name, zeros in rows.items() if name.startswith("memory")}
        self.dtype = rows["observation"].dtype

    def act(self, observation: np.ndarray) -> Any:  # an action of any space
        """Return the action, and keep the recurrent state."""
        inputs = {"observation": observation[None].astype(self.dtype), **self.memory}
        outputs = dict(zip(self.outputs, self.session.run(self.outputs, inputs), strict=True))
        self.memory = {name: outputs[f"next_{name}"] for name in self.memory}
        return outputs["action"][0]


def positions(observation: np.ndarray) -> np.ndarray:
    """Return the observation without velocities, as in configs/ppo/cartpole_memory.yaml."""
    return observation[[0, 2]]


def main(
    path: str = "policy/greedy.onnx", episodes: int = 5, transform: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> list[float]:
    """Play episodes, and return their returns; `transform=positions` hides the velocities."""
    policy, returns = Policy(path), []
    env = gymnasium.make(policy.about["env_id"])
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        policy.reset()
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy.act(transform(observation)))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
        print(f"episode {seed}: return {total:g}")
    return returns


if __name__ == "__main__":
    main()
