"""Values of vectorized environments are checked in the first step, and flags of any type are booleans."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lightning_rl.environments import EnvConfig, EnvironmentFailure, EnvironmentSpec, make_environments
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_model, make_trainer

MODES = [mode.value for mode in AutoresetMode]


class Steps(VectorEnv):
    """Observes (step, step, step); episode i has i + 3 steps, and the reward is 1. `change` changes values of steps."""

    single_observation_space, single_action_space = spaces.Box(-100, 100, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, num_envs=1, mode="SameStep", change=lambda *values: values, first=lambda x: x, space=None):
        self.num_envs, self.mode, self.change, self.first = num_envs, AutoresetMode(mode), change, first
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = space or self.single_observation_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.steps, self.limits = np.zeros(num_envs, np.int64), np.arange(num_envs) + 3
        self.ended = np.zeros(num_envs, bool)

    def see(self):
        return np.repeat(self.steps[:, None], 3, 1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps[(options or {}).get("reset_mask", slice(None))] = 0
        return self.first(self.see()), {}

    def step(self, actions):
        resets = self.ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self.steps = np.where(resets, 0, self.steps + 1)
        ended, infos = self.steps >= self.limits, {}
        self.ended = ended
        if self.mode is AutoresetMode.SAME_STEP:
            infos = {"final_obs": self.see()}
            self.steps[ended] = 0
        return self.change(self.see(), 1.0 - resets, ended, np.zeros_like(ended), infos)


class TensorSteps(Steps):
    """The same in tensors."""

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask")
        observations, infos = super().reset(options={} if mask is None else {"reset_mask": mask.numpy()})
        return torch.from_numpy(observations), infos

    def step(self, actions):
        *values, infos = super().step(actions)
        return *map(torch.from_numpy, values), {key: torch.from_numpy(x) for key, x in infos.items()}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, kind in (("Steps-v0", Steps), ("TensorSteps-v0", TensorSteps)):
        monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, vector_entry_point=kind))


def make(backend="native", evaluation=False, options=None, **kwargs):
    name = "TensorSteps-v0" if backend == "torch" else "Steps-v0"
    spec = EnvironmentSpec(name, EnvConfig(kwargs=kwargs, **(options or {})), backend, evaluation)
    return make_environments(spec, 2, [0, 1])


def play(backend="native", num_steps=8, **options):
    """Return the values of each step as plain data."""
    environments = make(backend, **options)
    environments.reset()
    played = []
    for _ in range(num_steps):
        actions = torch.zeros(2, dtype=torch.int64) if backend == "torch" else np.zeros(2, np.int64)
        step = environments.step(actions)
        played.append(
            [
                *(
                    None if x is None else [bool(one) for one in x]
                    for x in (step.terminated, step.truncated, step.valid)
                ),
                [x.tolist() for x in (step.observations, step.rewards)],
                [(index, x.tolist()) for index, x in step.final_observations],
            ]
        )
    return played


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("options", [{}, {"frame_stack": 2}])
def test_flags_of_any_type_give_the_same_steps_as_booleans(mode, dtype, options):
    def as_numbers(observations, rewards, terminated, truncated, infos):
        return observations, rewards, terminated.astype(dtype), truncated.astype(dtype), infos

    expected = play(mode=mode, options=options)
    assert play(mode=mode, options=options, change=as_numbers) == expected
    assert any(terminated[0] for terminated, *_ in expected)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("num_envs", [1, 2, 4])
def test_another_number_of_vectorized_environments_is_an_error_before_training(backend, num_envs, monkeypatch):
    kind = TensorSteps if backend == "torch" else Steps
    spec = EnvSpec("Fixed-v0", vector_entry_point=lambda num_envs: kind(3))
    monkeypatch.setitem(gymnasium.registry, "Fixed-v0", spec)
    data = make_data("Fixed-v0", backend=backend, num_envs=num_envs)
    assert data.observation_space.shape == (3,)
    expected = f"^num_envs={num_envs} is not valid: expected 3, since the vector_entry_point of Fixed-v0 made 3 env"
    with pytest.raises(ConfigurationError, match=expected):
        make_trainer().fit(make_model(data), data)
    data = make_data("Fixed-v0", backend=backend, num_envs=3, evaluation={"episodes": 3})
    make_trainer(limit_val_batches=1.0).fit(make_model(data, num_minibatches=3), data)
    data = make_data("Fixed-v0", backend=backend, num_envs=3, evaluation={"num_envs": 3, "episodes": 2})
    with pytest.raises(ConfigurationError, match=r"^evaluation.num_envs=2 .* evaluation.episodes must be at least 3"):
        make_trainer(limit_val_batches=1.0).validate(make_model(data), data, verbose=False)


WRONG = [
    (lambda o, r, *rest: (o, r[:, None], *rest), r"returned rewards of shape \(2, 1\) and dtype float64: expected one"),
    (lambda o, r, t, *rest: (o, r, t[:1], *rest), r"returned terminated of shape \(1,\) and dtype bool: expected one"),
    (lambda o, r, t, c, i: (o, r, t, c[:, None], i), r"returned truncated of shape \(2, 1\) and dtype bool: expected"),
    (lambda o, *rest: (o[:, :1], *rest), r"returned an observation of shape \(2, 1\): expected \(2, 3\)"),
    (lambda o, *rest: (o[:1], *rest), r"returned an observation of shape \(1, 3\): expected \(2, 3\)"),
    (lambda *values: (*values[:-1], None), r"returned info None: expected a dict"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("change", "message"), WRONG[:-1])
def test_wrong_shape_in_the_first_step_is_an_error(backend, mode, change, message):
    with pytest.raises(EnvironmentFailure, match=rf"^the environments {message}.* \(step 1, seeds 0"):
        play(backend, 1, mode=mode, change=change)


def test_wrong_info_in_the_first_step_is_an_error():
    with pytest.raises(EnvironmentFailure, match=WRONG[-1][1]):
        play(change=WRONG[-1][0], options={"previous_reward": True})


@pytest.mark.parametrize("mode", MODES)
def test_single_number_in_info_applies_to_all_environments(mode):
    environments = make(mode=mode, change=lambda *values: (*values[:-1], {**values[-1], "level": 3}))
    environments.reset()
    step = environments.step(np.zeros(2, np.int64))
    assert environments.info_values(step, "level").tolist() == [3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_info_of_a_final_step_counts_without_final_info(mode):
    def change(observations, rewards, terminated, truncated, infos):
        success = {"success": np.where(terminated, 2.0, 0.0), "_success": terminated, "level": np.array([4, 5])}
        return observations, rewards, terminated, truncated, infos | success

    environments = make(mode=mode, change=change)
    environments.reset()
    for _ in range(3):
        step = environments.step(np.zeros(2, np.int64))
    assert [index for index, _ in step.final_observations] == [0]
    np.testing.assert_array_equal(environments.info_values(step, "success"), [2, np.nan])
    assert environments.info_values(step, "level").tolist() == [4, 5]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_wrong_values_in_the_first_reset_are_errors(backend):
    with pytest.raises(EnvironmentFailure, match=r"^the environments returned an observation of shape \(2, 1\)"):
        make(backend, first=lambda x: x[:, :1]).reset()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_fractions_for_integers_are_errors(backend):
    environments = make(
        backend, space=spaces.Box(0, 100, (3,), np.int32), change=lambda o, *rest: (o + np.float32(0.5), *rest)
    )
    environments.reset()
    with pytest.raises(EnvironmentFailure, match="of float32, which changes as int32: expected int32"):
        environments.step(torch.zeros(2, dtype=torch.int64) if backend == "torch" else np.zeros(2, np.int64))


@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 0.5), (np.int64, 256)])
def test_values_that_change_as_integers_in_a_later_step_are_errors(dtype, factor):
    space = spaces.Box(0, 255, (3,), np.uint8)
    environments = make(space=space, change=lambda o, *rest: ((o // 2 * factor).astype(dtype), *rest))
    environments.reset()
    assert (environments.step(np.zeros(2, np.int64)).observations == 0).all()
    with pytest.raises(EnvironmentFailure, match=r"which changes as uint8: expected uint8.* \(step 2, seeds 0, 1\)$"):
        environments.step(np.zeros(2, np.int64))


def test_wrong_shape_in_evaluation_of_tensors_is_an_error():
    environments = make("torch", evaluation=True, change=WRONG[0][0])
    environments.reset()
    with pytest.raises(EnvironmentFailure, match=r"^the evaluation environments returned rewards of shape"):
        environments.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("options", [{}, {"frame_stack": 2}])
def test_missing_final_observation_is_an_error(options):
    message = r"^the environments returned no info\['final_obs'\] at the end of an episode: expected it in SAME_STEP"
    with pytest.raises(EnvironmentFailure, match=rf"{message} mode \(step 3, seeds 0, 1\)$"):
        play(change=lambda *values: (*values[:-1], {}), options=options)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_final_observations_of_ended_episodes_alone_are_an_error(backend, evaluation):
    def change(observations, rewards, ended, _, infos):
        return observations, rewards, np.zeros_like(ended), ended, {"final_obs": infos["final_obs"][ended]}

    environments = make(backend, evaluation, change=change)
    environments.reset()
    tensors = backend == "torch" and not evaluation
    with pytest.raises(EnvironmentFailure, match=r"environments returned .*info\['final_obs'\].* \(step 3, seeds 0"):
        for _ in range(3):
            environments.step(torch.zeros(2, dtype=torch.int64) if tensors else np.zeros(2, np.int64))


def test_native_environment_that_changes_its_actions_does_not_change_previous_actions(monkeypatch):
    def step(self, actions):
        actions[:] = 0
        return played(self, actions)

    played = Steps.step
    monkeypatch.setattr(Steps, "step", step)
    environments = make(options={"previous_action": True})
    environments.reset()
    actions = np.array([0, 1])
    observations = environments.step(actions).observations
    assert observations["previous_action"].tolist() == [[1, 0], [0, 1]] and actions.tolist() == [0, 1]


class InPlace(gymnasium.Env):
    """Writes zeros into its actions, and returns the sum of an action as the reward."""

    observation_space, action_space = spaces.Box(-9, 9, (1,), np.float32), spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = float(action.sum())
        action[:] = 0
        return np.zeros(1, np.float32), reward, False, False, {}


@pytest.mark.parametrize(
    ("options", "reward"), [({}, 1.0), ({"action_repeat": 3}, 3.0), ({"learned_action_repeat": 3}, 2.0)]
)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environment_that_changes_its_action_does_not_change_previous_or_repeated_actions(
    backend, options, reward, monkeypatch
):
    monkeypatch.setitem(gymnasium.registry, "InPlace-v0", EnvSpec("InPlace-v0", InPlace))
    spec = EnvironmentSpec("InPlace-v0", EnvConfig(previous_action=True, **options), backend)
    environments = make_environments(spec, 2, [0, 1])
    environments.reset()
    given = np.full((2, 2), 0.5, np.float32)
    learned = "learned_action_repeat" in options
    step = environments.step({"action": given, "repeat": np.array([2, 2])} if learned else given)
    environments.close()
    seen = step.observations["previous_action"]
    assert (seen["action"] if learned else seen).tolist() == given.tolist() == [[0.5, 0.5]] * 2
    assert step.rewards.tolist() == [reward] * 2


class Owner(Steps):
    """Steps with an own state."""

    def state_dict(self):
        return {"steps": self.steps, "ended": self.ended}

    def load_state_dict(self, state):
        self.steps, self.ended = state["steps"].copy(), state["ended"].copy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"frame_stack": 2}])
@pytest.mark.parametrize("kind", [np.asarray, memoryview])  # as arrays of another library, such as JAX
def test_native_environments_with_an_own_state_are_restored(monkeypatch, mode, options, kind):
    def change(*values):
        return *map(kind, values[:-1]), {key: kind(x) for key, x in values[-1].items()}

    monkeypatch.setitem(gymnasium.registry, "Steps-v0", EnvSpec("Steps-v0", vector_entry_point=Owner))
    first, again = (make(mode=mode, options=options, first=kind, change=change) for _ in range(2))
    observations = first.reset()
    for _ in range(4):
        observations = first.step(np.zeros(2, np.int64)).observations
    exact, restored = again.load_state_dict(first.state_dict())
    assert exact.all()
    np.testing.assert_array_equal(restored, observations)
    for _ in range(4):
        expected, found = (batch.step(np.zeros(2, np.int64)) for batch in (first, again))
        np.testing.assert_array_equal(found.observations, expected.observations)
        np.testing.assert_array_equal(found.terminated, expected.terminated)


def test_info_may_mark_its_environments_by_numbers():
    environments = make()
    environments.reset()
    step = environments.step(np.zeros(2, np.int64))
    for marks in (np.array([0, 1]), np.array([0.0, 1.0])):
        found = environments.info_values(step._replace(infos={"level": np.array([4, 5]), "_level": marks}), "level")
        np.testing.assert_array_equal(found, [np.nan, 5])


@pytest.mark.parametrize("first", [None, 1])
def test_error_shows_the_value_in_info_that_is_no_number(first):
    environments = make()
    environments.reset()
    step = environments.step(np.zeros(2, np.int64))._replace(infos={"level": np.array([first, "high"], object)})
    with pytest.raises(ConfigurationError, match=r"info\['level'\] is 'high', expected a number"):
        environments.info_values(step, "level")
