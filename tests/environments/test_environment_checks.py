"""Values that environments return are checked against Gymnasium's interface and the spaces."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl.environments import EnvironmentFailure, make_environments
from lightning_rl.environments.episodes import SeededEpisodes, Unexpected, fit_leaf, to_flag
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data
from tests.probes import make_batch

UNIT = spaces.Box(-1, 1, (3,), np.float32)


class Given(gymnasium.Env):
    """Returns given values."""

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
        return np.full(self.observation_space.shape, value) if isinstance(value, float) else value


class Series(Given):
    """Returns a sequence of given observations; every third step ends an episode."""

    def __init__(self, space, observations):
        super().__init__(space)
        self._observations, self._steps = iter(observations), 0

    def reset(self, *, seed=None, options=None):
        return next(self._observations), {}

    def step(self, action):
        self._steps += 1
        return next(self._observations), 1.0, self._steps % 3 == 0, False, {}


class Seedless(Given):
    def reset(self):
        return self._observe(0.0)


for name, entry_point in (("Given", Given), ("Series", Series), ("Seedless", Seedless)):
    if f"lightning_rl_tests/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"lightning_rl_tests/{name}-v0", f"{__name__}:{entry_point.__name__}")
        gymnasium.register(f"lightning_rl_tests/{name}Limited-v0", f"{__name__}:{name}", max_episode_steps=9)


def play(env_id="Given", steps=1, **options):
    """Return copies of the observations and final observations of two environments."""
    environments = make_environments(make_data(f"lightning_rl_tests/{env_id}-v0", **options).spec, 2, [3, 4])
    try:
        seen, finals = [copy.deepcopy(environments.reset())], []
        for _ in range(steps):
            step = environments.step(np.zeros(2, np.int64))
            seen.append(copy.deepcopy(step.observations))
            finals += [final for _, final in step.final_observations]
        return seen, finals
    finally:
        environments.close()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "step", "what"),
    [
        ("Given", {"step": (np.zeros(3, np.float32), 1.0, True, {})}, 1, r"step: .* got 4\); since Gym 0.26, reset"),
        (
            "GivenLimited",
            {"step": (np.zeros(3, np.float32), 1.0, True, {})},
            1,
            r"step: ValueError: not enough .* got 4",
        ),
        ("Given", {"reset": np.zeros(3, np.float32)}, 0, r"reset: ValueError: too many values to unpack \(expected 2"),
        ("Seedless", {}, 0, r"reset: TypeError: Seedless.reset\(\) got an unexpected keyword argument 'seed'"),
    ],
)
def test_environment_with_the_interface_before_gymnasium_0_26_is_named(env_id, kwargs, step, what):
    with pytest.raises(
        EnvironmentFailure, match=rf"environment 0 \(episode 0, seed \d+, step {step}\) raised in {what}"
    ):
        play(env_id, env={"kwargs": kwargs})


def test_reset_with_an_array_of_two_entries_is_an_error():
    """The array could be unpacked into observation and info."""
    kwargs = {"space": spaces.Box(-1, 1, (2,), np.float32), "reset": np.zeros(2)}
    with pytest.raises(EnvironmentFailure, match=r"environment 0 .* returned info .*0\.0.*: expected a dict"):
        play(env={"kwargs": kwargs})


def test_space_of_another_type_is_an_error():
    message = r"^observation_space=\[3\] is not valid: expected a space of Gymnasium"
    with pytest.raises(ConfigurationError, match=message):
        play(env={"kwargs": {"space": [3]}})


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_first_observation_of_another_type_than_its_space_is_an_error(backend):
    kwargs = {"space": spaces.Box(0, 255, (3,), np.uint8), "first": 0.5}
    with pytest.raises(
        EnvironmentFailure, match=r"environment [01] .* returned an observation of float64, .*: expected ui"
    ):
        play(backend=backend, env={"kwargs": kwargs})


def test_observation_out_of_bounds_causes_one_warning(recwarn):
    play(env={"kwargs": {"first": 2.5}})
    (message,) = [str(one.message) for one in recwarn if "space" in str(one.message)]
    assert message == (
        "lightning_rl_tests/Given-v0 returned an observation outside of its space: (entry 0) 2.5: expected -1.0 to 1.0"
    )


PIXELS = spaces.Box(0, 255, (2,), np.uint8)
BYTES = np.array([3, 200], np.uint8)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("at", "x", "what"),
    [
        (2, np.array([0.78, 1], np.float32), "of float32, which changes as uint8: expected uint8"),
        (3, np.array([3, 256]), "of int64, which changes as uint8: expected uint8"),  # a final observation
        (4, [3, -1], "of int64, which changes as uint8: expected uint8"),  # a first observation
        (2, np.array(["3", "4"]), "of <U1: expected uint8"),
        (2, np.array([3, None]), "of object: expected uint8"),
        (2, np.array([1j, 2]), "of complex128: expected uint8"),
    ],
)
def test_later_observation_that_conversion_would_change_is_an_error(at, x, what, backend):
    observations = [{"img": x if step == at else BYTES, "speed": np.zeros(3)} for step in range(6)]
    kwargs = {"space": spaces.Dict(img=PIXELS, speed=UNIT), "observations": observations}
    where = rf"environment [01] \(episode {at // 4}, seed \d+, step {at % 4}\)"
    with pytest.raises(EnvironmentFailure, match=rf"(?m)^{where} returned an observation img {what}; the .*DtypeObs"):
        play("Series", 5, backend=backend, env={"kwargs": kwargs})


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("nested", [False, True])
def test_observation_is_converted_if_no_value_changes(nested, backend):
    """Checks first, middle and final observations."""
    given = [BYTES, BYTES.astype(np.float32), BYTES.tolist(), BYTES.astype(object), BYTES.astype(np.int64), BYTES]
    space = spaces.Dict(img=PIXELS) if nested else PIXELS
    observations = [{"img": x} for x in given] if nested else given
    seen, finals = play("Series", 4, backend=backend, env={"kwargs": {"space": space, "observations": observations}})
    for x in seen + finals:
        x = x["img"] if nested else x
        assert x.dtype == np.uint8 and (x == BYTES).all()
    assert len(finals) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_of_any_width_are_returned_without_conversion(monkeypatch, dtype):
    fitted = []
    fit = SeededEpisodes._fit
    monkeypatch.setattr(SeededEpisodes, "_fit", lambda self, x: fitted.append(x) or fit(self, x))
    given = [np.full(3, 0.1, dtype) for _ in range(6)]
    env = SeededEpisodes(Series(UNIT, given))
    returned = [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(2))]
    assert all(x is y for x, y in zip(returned, given, strict=False))
    assert len(fitted) == 1  # in the reset


def test_observation_that_is_no_array_is_an_error():
    env = SeededEpisodes(Series(UNIT, [np.zeros(3), torch.zeros(3), torch.zeros(3, requires_grad=True)]))
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(EnvironmentFailure, match=r"step 2\) returned an observation that is not an array \(Runtime"):
        env.step(0)


ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("kwargs", "step", "what"),
    [
        ({"reset": (ZEROS, [1, 2])}, 0, r"info \[1, 2\]: expected a dict"),
        ({"step": (ZEROS, 0.0, False, False, [1, 2])}, 1, r"info \[1, 2\]: expected a dict"),
        ({"step": (ZEROS, 0.0, False, False, None)}, 1, "info None: expected a dict"),
        ({"step": (ZEROS, 0.0, "no", False, {})}, 1, "terminated 'no': expected True or False"),
        ({"step": (ZEROS, 0.0, False, None, {})}, 1, "truncated None: expected True or False"),
        ({"step": (ZEROS, 0.0, np.ones(2, bool), False, {})}, 1, r"terminated array\(.*: expected True or False"),
    ],
)
def test_invalid_flags_and_info_are_errors(kwargs, step, what, backend):
    with pytest.raises(
        EnvironmentFailure, match=rf"(?m)^environment [01] \(episode 0, seed \d+, step {step}\) returned {what}$"
    ):
        play(backend=backend, env={"kwargs": kwargs})


@pytest.mark.parametrize(
    "kind", [bool, int, float, np.bool_, np.int64, np.uint8, np.array, lambda x: np.array([int(x)]), torch.tensor]
)
def test_zero_and_one_of_any_type_are_flags(kind):
    for flag in (False, True):
        assert to_flag("truncated", kind(flag)) is flag
        result = SeededEpisodes(Given(step=(ZEROS, 0.0, kind(flag), kind(not flag), {}))).step(0)
        assert (bool(result[2]), bool(result[3])) == (flag, not flag)


@pytest.mark.parametrize("flag", [2, -1, 0.5, float("nan"), torch.ones(2, dtype=torch.bool), "", (), [[]]])
def test_other_values_are_no_flags(flag):
    with pytest.raises(Unexpected, match=r"^returned truncated .*: expected True or False$"):
        to_flag("truncated", flag)


def test_invalid_flags_restart_environments():
    kwargs = {"step": (ZEROS, 0.0, None, False, {})}
    with pytest.raises(EnvironmentFailure, match=r"returned terminated None.*; 3 restarts in a row"):
        play(steps=5, env={"on_failure": "restart", "kwargs": kwargs})


@pytest.mark.parametrize(
    ("x", "dtype", "lost"),
    [
        (np.array([3.0, 255.0]), np.uint8, None),
        (np.array([3.0, 255.5]), np.uint8, "of float64, which changes as uint8"),
        (np.array([3, 256]), np.uint8, "of int64, which changes as uint8"),
        (np.array([np.nan]), np.int64, "of float64, which changes as int64"),
        (np.array([2**40]), np.int32, "of int64, which changes as int32"),
        (np.array([0.0, 1.0]), np.bool_, None),
        (np.array([0, 2]), np.bool_, "of int64, which changes as bool"),
        (np.array([True]), np.int8, None),
        (np.array([1, 2], object), np.int64, None),
        (np.array([2**70], object), np.int64, "of object: expected int64"),
        (np.array([16777217]), np.float32, None),  # rounding is allowed
        (np.array(["1.5"]), np.float32, "of <U3: expected float32"),
    ],
)
def test_conversion_of_observations_changes_no_value(x, dtype, lost):
    space = spaces.Box(0, 1, x.shape, dtype)
    if lost is None:
        found = fit_leaf("", space, x)
        assert found.dtype == dtype and np.array_equal(found, x.astype(dtype))
    else:
        with pytest.raises(Unexpected, match=rf"^returned an observation {lost}"):
            fit_leaf("", space, x)


@pytest.mark.parametrize(
    ("space", "x", "expected"),
    [
        (UNIT, np.array([1, -1, 1 + 1e-9]), None),  # after rounding to float32
        (UNIT, np.array([0, np.nan, 0], np.float32), None),  # another check raises
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), np.array([1e300]), None),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 255]), None),
        (spaces.Box(0, 1, (2,), np.uint8), np.array([0, 3]), r"outside of its space: \(entry 1\) 3: expected 0 to 1$"),
        (spaces.Discrete(3, start=1), 3, None),
        (spaces.MultiBinary(2), np.array([True, False]), None),
    ],
)
def test_first_observation_outside_of_its_space_causes_a_warning(space, x, expected, recwarn):
    env = SeededEpisodes(Given(space, x))
    if expected is None:
        env.reset(seed=0)
        assert not recwarn.list
    else:
        with pytest.warns(UserWarning, match=expected):
            env.reset(seed=0)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("space", "inside", "outside", "what"),
    [
        (spaces.Discrete(3), 2, 3, r"3: expected an element of Discrete\(3\)"),
        (spaces.Discrete(3, start=1), 3, 0, r"0: expected an element of Discrete\(3, start=1\)"),
        (spaces.MultiDiscrete([3, 5]), [2, 4], [3, 0], r"\[3 0\]: expected an element of MultiDiscrete\(\[3 5\]\)"),
        (spaces.MultiBinary(2), [0, 1], [7, 0], r"\[7 0\]: expected an element of MultiBinary\(2\)"),
    ],
)
def test_observation_outside_of_a_discrete_space_is_an_error(at, nested, backend, space, inside, outside, what):
    rows = [np.array(inside, space.dtype)] * 9
    rows[at] = np.array(outside, space.dtype)  # the third step ends an episode
    rows = [{"a": x} for x in rows] if nested else rows
    given = {"space": spaces.Dict(a=space) if nested else space, "observations": rows}
    path = "a " if nested else ""
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 0 \(.*, step {at}\) returned an observation {path}{what}"
    ):
        play("Series", 4, backend=backend, env={"kwargs": given})


@pytest.mark.parametrize("at", [0, 1, 3, 4])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_flattened_observation_outside_of_its_space_raises_the_error_of_the_observation(at, mode):
    rows = [{"a": 2, "b": np.zeros(1, np.float32)} for _ in range(9)]
    rows[at]["a"] = -1  # the third step ends an episode, and the next row begins one
    kwargs = {"space": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (1,))), "observations": rows}
    messages = []
    for flatten in (False, True):
        options = {"kwargs": kwargs, "flatten_observations": flatten}
        environments = make_batch("lightning_rl_tests/Series-v0", 2, mode=mode, env=options)
        with pytest.raises(EnvironmentFailure, match="returned an observation a -1: expected an element") as error:
            environments.reset()
            for _ in range(5):
                environments.step(np.zeros(2, np.int64))
        messages.append(str(error.value))
        environments.close()
    assert messages[0] == messages[1] and f"episode {at // 4}" in messages[0]


def test_infinity_in_float16_is_an_error():
    space = spaces.Box(-np.inf, np.inf, (2,), np.float16)
    largest, infinite = np.array([65504, 0], np.float16), np.array([0, np.inf], np.float16)
    given = {"space": space, "observations": [largest, largest, infinite]}
    with pytest.raises(EnvironmentFailure, match=r"step 2\) returned observation \(entry 1\) inf: expected a finite"):
        play("Series", 2, env={"kwargs": given})


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_part_of_an_observation_may_be_empty(backend):
    space = spaces.Dict(empty=spaces.Box(-1, 1, (0,), np.float32), full=spaces.Box(-1, 1, (2,), np.float64))
    row = {"empty": np.zeros(0, np.float32), "full": np.array([0.25, -1])}
    seen, _ = play("Series", 2, backend=backend, env={"kwargs": {"space": space, "observations": [row] * 4}})
    assert seen[1]["empty"].shape == (2, 0) and seen[1]["full"].tolist() == [[0.25, -1]] * 2
