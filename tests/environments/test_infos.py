"""Values of `info` from several environments, and of environments that reuse one dict."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lightning_rl.environments.contract import batch_infos
from lightning_rl.environments.pettingzoo import ParallelEnvVector
from tests.environments.test_pettingzoo import Relay
from tests.probes import Told, make_batch, make_collector


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 0.5], "f"),
        ([0.5, 0], "f"),
        ([False, 3], "i"),
        ([np.bool_(True), np.bool_(False)], "b"),
        ([np.float32(0.1), 0.5], "f"),
        ([2**100, 1], "O"),
        ([1, None], "O"),
        ([1, "a"], "O"),
        ([[1], [2]], "O"),
        ([{"a": 1}, 2], "O"),
    ],
)
def test_values_of_info_do_not_change_beside_values_of_other_types(values, kind):
    batched = batch_infos([{"x": value} for value in values])["x"]
    assert batched.tolist() == values and batched.dtype.kind == kind


def test_info_of_some_environments_is_zero_elsewhere():
    batched = batch_infos([{}, {"x": 0.5}, {"x": 2}, {}])
    assert batched["x"].tolist() == [0, 0.5, 2, 0] and batched["_x"].tolist() == [False, True, True, False]


class OneInfo(gymnasium.Env):
    """Writes into the same `info` in each step and reset; an episode has two steps."""

    observation_space, action_space = spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(3)

    def __init__(self):
        self.info = {}

    def reset(self, *, seed=None, options=None):
        self.info["success"] = self.steps = 0
        return np.zeros(1, np.float32), self.info

    def step(self, action):
        self.steps += 1
        self.info["success"] = self.steps / 2
        return np.zeros(1, np.float32), 1.0, self.steps == 2, False, self.info


class OneInfoRelay(Relay):
    """Agents whose `info` is the same dict in each step and reset."""

    infos = {"runner_0": {}, "runner_1": {}}  # noqa: RUF012

    def reset(self, **kwargs):
        for info in self.infos.values():
            info["success"] = 0.0
        return super().reset(**kwargs)[0], self.infos

    def step(self, actions):
        for info in self.infos.values():
            info["success"] += 0.5
        *rest, _ = super().step(actions)
        return *rest, self.infos


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_info_of_a_final_step_is_not_that_of_the_reset(backend, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "OneInfo-v0", gymnasium.envs.registration.EnvSpec("OneInfo-v0", OneInfo))
    environments = make_batch("OneInfo-v0", backend=backend)
    rollout = make_collector(environments, 4, info_keys=("success",)).collect(Told())
    environments.close()
    assert rollout.infos["success"].flatten().tolist() == [0.5, 1.0, 0.5, 1.0]


def test_info_of_an_agents_final_step_is_not_that_of_the_reset():
    env = ParallelEnvVector(lambda: OneInfoRelay(lives=(2, 2)), 2)
    env.reset(seed=0)
    env.step(np.zeros(2, np.int64))
    *_, infos = env.step(np.zeros(2, np.int64))
    assert infos["final_info"]["success"].tolist() == [1.0, 1.0] and infos["success"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_info_may_have_keys_that_are_not_strings(backend, monkeypatch):
    class Numbered(OneInfo):
        def __init__(self):
            self.info = {0: 1.0, (1, "a"): 2.0}

    monkeypatch.setitem(gymnasium.registry, "Numbered-v0", gymnasium.envs.registration.EnvSpec("Numbered-v0", Numbered))
    environments = make_batch("Numbered-v0", backend=backend)
    rollout = make_collector(environments, 3, info_keys=("success",)).collect(Told())
    environments.close()
    assert rollout.infos["success"].flatten().tolist() == [0.5, 1.0, 0.5]
    assert "success" in rollout.info_names and {*map(type, rollout.info_names)} == {str}


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_final_observation_is_not_lost_if_the_info_of_a_reset_has_this_key(backend, monkeypatch):
    class Named(OneInfo):
        def __init__(self):
            self.info = {"final_obs": None}

    monkeypatch.setitem(gymnasium.registry, "Named-v0", gymnasium.envs.registration.EnvSpec("Named-v0", Named))
    environments = make_batch("Named-v0", backend=backend)
    rollout = make_collector(environments, 3, info_keys=("success",)).collect(Told())
    environments.close()
    assert rollout.infos["success"].flatten().tolist() == [0.5, 1.0, 0.5]
