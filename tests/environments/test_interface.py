"""What environments return is held to today's interface, and their first observation to its space."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lightning_rl.environments import EnvironmentFailure, make_environments
from lightning_rl.environments.interface import misfit
from tests.helpers import make_data

UNIT = spaces.Box(-1, 1, (3,), np.float32)


class Given(gymnasium.Env):
    """Returns what it is given."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=UNIT, first=0.0, reset=None, step=None):
        self.observation_space = space
        self._first, self._reset, self._step = first, reset, step

    def reset(self, *, seed=None, options=None):
        if self._reset is not None:
            return self._reset
        return self._observe(self._first), {}

    def step(self, action):
        if self._step is not None:
            return self._step
        return self._observe(0.0), 1.0, True, False, {}

    def _observe(self, value):
        return np.full(self.observation_space.shape, value) if np.isscalar(value) else value


class Seedless(Given):
    def reset(self):
        return self._observe(0.0)


class Unpacks(gymnasium.Wrapper):
    """A wrapper of the user's own, whose mistakes are its own."""

    def step(self, action):
        first, second = (1,)
        return self.env.step(first + second)


for name, entry_point in (("Given", Given), ("Seedless", Seedless)):
    if f"lightning_rl_tests/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"lightning_rl_tests/{name}-v0", f"{__name__}:{entry_point.__name__}")
        gymnasium.register(f"lightning_rl_tests/{name}Limited-v0", f"{__name__}:{name}", max_episode_steps=9)


def play(env_id="Given", **options):
    environments = make_environments(make_data(f"lightning_rl_tests/{env_id}-v0", **options).spec, 2, [3, 4])
    try:
        environments.reset()
        environments.step(np.zeros(2, np.int64))
    finally:
        environments.close()


OLD = r"environment 0 \(episode 0, seed .*, step {}\) does not have the interface of Gymnasium 0\.26 .*\({}\): .*{}"


@pytest.mark.parametrize("env_id", ["Given", "GivenLimited"])
def test_a_step_of_four_values_is_refused_by_name(env_id):
    step = (np.zeros(3, np.float32), 1.0, True, {})
    expected = rf"expected of lightning_rl_tests/{env_id}-v0 a step\(action\) that returns five values"
    with pytest.raises(EnvironmentFailure, match=OLD.format(1, r"not enough values to unpack.*got 4\)", expected)):
        play(env_id, env_kwargs={"step": step})


@pytest.mark.parametrize(
    ("env_id", "kwargs", "why"),
    [
        ("Given", {"reset": np.zeros(3, np.float32)}, "reset returned ndarray"),
        # Two entries could be taken for an observation and its info.
        ("Given", {"space": spaces.Box(-1, 1, (2,), np.float32), "reset": np.zeros(2)}, "reset returned ndarray"),
        ("GivenLimited", {"reset": np.zeros(3, np.float32)}, "reset returned ndarray"),
        ("Seedless", {}, r"Seedless.reset\(\) got an unexpected keyword argument 'seed'"),
    ],
)
def test_a_reset_of_old_is_refused_by_name(env_id, kwargs, why):
    expected = rf"expected of lightning_rl_tests/{env_id}-v0 a reset\(\*, seed=None, options=None\) that returns two"
    with pytest.raises(EnvironmentFailure, match=OLD.format(0, why, expected)):
        play(env_id, env_kwargs=kwargs)


def test_a_mistake_of_the_environments_own_is_told_as_it_is():
    with pytest.raises(EnvironmentFailure, match=r"raised in step: ValueError: not enough values to unpack"):
        play(wrappers=[f"{__name__}.Unpacks"])


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_observation_that_its_space_cannot_hold_is_refused(backend):
    kwargs = {"space": spaces.Box(0, 255, (3,), np.uint8), "first": 0.5}
    with pytest.raises(
        EnvironmentFailure, match=r"environment [01] .* returned an observation of float64, .*: expected ui"
    ):
        play(backend=backend, env_kwargs=kwargs)


def test_an_observation_outside_of_its_bounds_is_warned_of_once(recwarn):
    play(env_kwargs={"first": 2.5})
    (message,) = [str(one.message) for one in recwarn if "space" in str(one.message)]
    assert message == (
        "lightning_rl_tests/Given-v0 returned an observation outside of its space: (entry 0) 2.5: expected -1.0 to 1.0"
    )


@pytest.mark.parametrize(
    ("space", "x", "expected"),
    [
        (UNIT, np.array([1, -1, 1 + 1e-9]), None),  # rounded as it will be
        (UNIT, np.ones(3, np.int64), None),
        (UNIT, np.array([0, np.nan, 0], np.float32), None),  # has an error of its own
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), np.array([1e300]), None),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 255]), None),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 256]), ("of int64, which loses by becoming uint8", True)),
        (spaces.Box(0, 1, (2,), np.uint8), np.array([0, 3]), ("(entry 1) 3: expected 0 to 1", False)),
        (spaces.Discrete(3, start=1), 3, None),
        (spaces.Discrete(3, start=1), 0, ("0: expected 1 to 3", True)),
        (spaces.MultiDiscrete([2, 5]), np.array([1, 5]), ("(entry 1) 5: expected 0 to 4", True)),
        (spaces.MultiBinary(2), np.array([True, False]), None),
        (spaces.MultiBinary(2), np.array([0, 2]), ("(entry 1) 2: expected 0 to 1", True)),
    ],
)
def test_what_does_not_fit_a_space(space, x, expected):
    found = misfit(space, x)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found[0].startswith(expected[0]) and found[1] is expected[1]
