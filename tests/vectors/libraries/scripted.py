"""A scripted environment and the file of one recorded update, shared by the `make_*.py` scripts.

Needs NumPy, Gymnasium and PyTorch only, so that it runs in the virtual environment of every library.
"""

from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

NUM_ENVS, LENGTH, NUM_OBSERVATIONS, HIDDEN = 4, 16, 3, (8, 8)
NUM_EPOCHS, NUM_MINIBATCHES, LEARNING_RATE = 3, 4, 3e-3
ROWS = NUM_ENVS * LENGTH
SPACES = {"discrete": spaces.Discrete(3), "continuous": spaces.Box(-1.0, 1.0, (2,), np.float32)}
OBSERVATION_SPACE = spaces.Box(-np.inf, np.inf, (NUM_OBSERVATIONS,), np.float32)


class Script:
    """What happens in one environment, whatever the actions are.

    Attributes:
        firsts: Observation of an episode that begins at step t, `[T + 1, D]`.
        nexts: Observation that step t leads to, `[T, D]`.
        rewards: `[T]`.
        terminated: `[T]`.
        truncated: `[T]`.
    """

    def __init__(self, index: int) -> None:
        random = np.random.default_rng(index)
        self.firsts = random.normal(size=(LENGTH + 1, NUM_OBSERVATIONS)).astype(np.float32)
        self.nexts = random.normal(size=(LENGTH, NUM_OBSERVATIONS)).astype(np.float32)
        self.rewards = random.normal(size=LENGTH).astype(np.float32)
        chance = random.random(LENGTH)
        self.terminated, self.truncated = chance < 0.12, (chance >= 0.12) & (chance < 0.24)


class Scripted(gymnasium.Env):
    """Plays a script; each new environment plays the next one."""

    observation_space = OBSERVATION_SPACE
    made = 0

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        self.script, self.t, self.render_mode = Script(Scripted.made), 0, render_mode
        Scripted.made += 1
        self.action_space = SPACES[kind]

    def reset(self, *, seed=None, options=None):
        return self.script.firsts[self.t], {}

    def step(self, action):
        script, t = self.script, self.t
        self.t += 1
        return (
            script.nexts[t],
            float(script.rewards[t]),
            bool(script.terminated[t]),
            bool(script.truncated[t]),
            {},
        )


class ScriptedVector:
    """The same scripts for libraries whose vectorized environments are an interface of their own; arrays `[B, ...]`."""

    def __init__(self) -> None:
        self.scripts, self.t = [Script(index) for index in range(NUM_ENVS)], 0

    def reset(self):
        return self._all("firsts", self.t)

    def step(self):
        """Return observations, final observations, rewards, terminated and truncated of the next step."""
        t, self.t = self.t, self.t + 1
        finals, terminated, truncated = self._all("nexts", t), self._all("terminated", t), self._all("truncated", t)
        observations = np.where((terminated | truncated)[:, None], self._all("firsts", t + 1), finals)
        return observations, finals, self._all("rewards", t), terminated, truncated

    def _all(self, name: str, t: int):
        return np.stack([getattr(script, name)[t] for script in self.scripts])


def recorded_script() -> dict[str, np.ndarray]:
    """Return the arrays of the whole rollout, `[T, B, ...]`; observations `[T + 1, B, D]`."""
    environments = ScriptedVector()
    observations, rows = [environments.reset()], []
    for _ in range(LENGTH):
        step = environments.step()
        observations.append(step[0])
        rows.append(step[1:])
    names = ("finals", "rewards", "terminated", "truncated")
    columns = {name: np.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return {"observations": np.stack(observations)} | columns


def mlp(outputs: int) -> nn.Sequential:
    """Return the network of an actor or a critic; its layers with weights are `mlp(outputs)[::2]`."""
    first, second = HIDDEN
    layers = (nn.Linear(NUM_OBSERVATIONS, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(second, outputs))


def recorded_permutations() -> list[np.ndarray]:
    """Return a list to which `np.random.permutation` adds its results from now on."""
    permutation, orders = np.random.permutation, []

    def recorded(count):
        orders.append(permutation(count))
        return orders[-1]

    np.random.permutation = recorded
    return orders


def perturb(parameters) -> None:
    """Move parameters away from their initial values, which are symmetric: biases of 0, an almost uniform policy."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def weights(layers, log_std=None) -> dict[str, np.ndarray]:
    """Return weights by neutral names from `{"actor": layers, "critic": layers}`."""
    found = {} if log_std is None else {"log_std": log_std.detach().numpy().reshape(-1).copy()}
    for part, linears in layers.items():
        for number, layer in enumerate(linears):
            found[f"{part}.{number}.weight"] = layer.weight.detach().numpy().copy()
            found[f"{part}.{number}.bias"] = layer.bias.detach().numpy().copy()
    return found


def time_major(order) -> np.ndarray:
    """Return indices of rows of `[T, B]` from indices of rows of `[B, T]`."""
    order = np.asarray(order)
    return (order % LENGTH) * NUM_ENVS + order // LENGTH


def save(name, *, initial, final, orders, **arrays) -> None:
    """Write `<name>.npz`: weights before and after, orders of the rows `[epochs, T * B]`, and the rollout."""
    everything = recorded_script() | arrays | {"orders": np.asarray(orders, np.int16)}
    everything |= {f"initial/{key}": value for key, value in initial.items()}
    everything |= {f"final/{key}": value for key, value in final.items()}
    assert max(np.abs(initial[key] - final[key]).max() for key in initial) > 1e-3
    np.savez_compressed(Path(__file__).with_name(f"{name}.npz"), **everything)
    print(name, {key: value.shape for key, value in arrays.items()})
