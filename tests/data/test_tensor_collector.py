"""Rollouts of environments of tensors, compared with the same environments of arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorWrapper
from torch import Tensor

from lightning_rl import PPO
from lightning_rl.data.collector import Collector
from lightning_rl.data.evaluation import run_episodes
from lightning_rl.environments import (
    EnvConfig,
    EnvironmentBatch,
    EnvironmentFailure,
    EnvironmentSpec,
    TensorEnvironments,
)
from lightning_rl.nested import map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.interface import tensor_conversion, to_environment
from lightning_rl.validation import ConfigurationError
from tests.helpers import Recorder, make_data, make_model, make_trainer
from tests.torch_environments import ID, MASKED_ID, AsArrays, Reach

MODES = [mode.value for mode in AutoresetMode]
FIELDS = (
    "observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "log_probs",
    "values",
    "next_values",
    "starts",
)


def collectors(policy_options: dict | None = None, length: int = 20, **env_options) -> tuple:
    """Return a policy, and collectors of the same environments as tensors and as arrays."""
    torch.manual_seed(0)
    env = Reach(3, **env_options)
    space_pair = env.single_observation_space, env.single_action_space
    policy = ActorCritic(*space_pair, hidden_sizes=(8,), **(policy_options or {}))
    tensors = TensorEnvironments(env, 5)
    arrays = EnvironmentBatch(AsArrays(Reach(3, **env_options)), [5, 6, 7], 5)
    made = [Collector(batch, length, torch.Generator().manual_seed(1)) for batch in (tensors, arrays)]
    return policy, *made


@pytest.mark.parametrize("memory", [None, "lstm", {"kind": "gru", "sequence_length": 5}])
@pytest.mark.parametrize("kind", ["box", "discrete"])
@pytest.mark.parametrize("mode", MODES)
def test_rollouts_of_tensors_equal_rollouts_of_arrays(mode, kind, memory):
    policy, tensors, arrays = collectors({"memory": memory}, mode=mode, kind=kind)
    for _ in range(3):
        own, other = tensors.collect(policy), arrays.collect(policy)
        for name in FIELDS:
            torch.testing.assert_close(getattr(own, name), getattr(other, name), rtol=0, atol=0, msg=name)
        assert (own.valid is None) == (other.valid is None) == (mode != AutoresetMode.NEXT_STEP.value)
        if own.valid is not None:
            assert torch.equal(own.valid, other.valid)
        torch.testing.assert_close(own.final_observations, other.final_observations, rtol=0, atol=0)
        assert torch.equal(own.final_indices, other.final_indices) and len(own.final_indices)
        assert own.episodes.lengths == other.episodes.lengths
        np.testing.assert_allclose(own.episodes.returns, other.episodes.returns, rtol=1e-6)
        map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), own.memory, other.memory)


class Traced(Reach):
    """Records whether PyTorch's compiler traced its step."""

    traced = False

    def step(self, actions: Tensor):
        self.traced = torch.compiler.is_compiling()
        return super().step(actions)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP.value, AutoresetMode.NEXT_STEP.value])
def test_compiled_steps_of_environments_give_the_same_rollouts(mode):
    rollouts = []
    for fast_paths in ("auto", "compiled"):
        policy, _, _ = collectors()
        policy.fast_paths = fast_paths
        env = Traced(3, mode=mode)
        collector = Collector(TensorEnvironments(env, 5), 20, torch.Generator().manual_seed(1))
        rollouts.append([collector.collect(policy) for _ in range(2)])
        assert env.traced == (fast_paths == "compiled")
    for plain, compiled in zip(*rollouts, strict=True):
        for name in FIELDS:
            torch.testing.assert_close(getattr(plain, name), getattr(compiled, name), msg=name)
        torch.testing.assert_close(plain.final_observations, compiled.final_observations)
        assert torch.equal(plain.final_indices, compiled.final_indices) and len(plain.final_indices)


class Reusing(Reach):
    """Returns the same tensor objects in each step, and clears the rows that it resets."""

    def step(self, actions: Tensor):
        if not hasattr(self, "rewards"):
            self.rewards, self.place = torch.zeros(self.num_envs), torch.zeros(self.num_envs).double()
            self.flags = torch.zeros(2, self.num_envs, dtype=torch.bool)
        observations, rewards, *flags, infos = super().step(actions)
        self.rewards.copy_(rewards)
        self.place.copy_(self.state[:, 0])
        self.flags.copy_(torch.stack(flags))
        return observations, self.rewards, *self.flags, infos | {"place": self.place}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if options and "reset_mask" in options:
            self.rewards[options["reset_mask"]] = 0
            self.flags[:, options["reset_mask"]] = False
            self.place[options["reset_mask"]] = torch.nan
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_are_copies_of_tensors_that_environments_reuse(mode):
    policy, _, _ = collectors()
    rollouts = []
    for kind in (Reach, Reusing):
        env = kind(3, mode=mode)
        options = 20, torch.Generator().manual_seed(1)
        rollouts.append(Collector(TensorEnvironments(env, 5), *options, info_keys=("place",)).collect(policy))
    first, other = rollouts
    assert torch.equal(first.rewards, other.rewards) and torch.equal(first.dones, other.dones)
    assert len(set(other.infos["place"].flatten().tolist())) > 20
    assert not other.infos["place"][other.valid].isnan().any()  # a step that only resets has no number


def test_infos_of_tensor_environments_have_one_number_or_one_for_each():
    environments = TensorEnvironments(Reach(3), 5)
    step = environments.step(torch.zeros(environments.single_action_space.shape).expand(3, -1))
    for value, expected in ((2, [2.0] * 3), (torch.tensor([[1], [2], [3]]), [1.0, 2.0, 3.0])):
        assert environments.info_values(step._replace(infos={"level": value}), "level").tolist() == expected
    with pytest.raises(ConfigurationError, match=r"one number or 3 in info\['level'\], got 2"):
        environments.info_values(step._replace(infos={"level": torch.zeros(2)}), "level")


def test_info_of_final_steps_and_of_some_environments_is_not_mixed_with_others():
    environments = TensorEnvironments(Reach(3), 5)
    environments.reset()
    step = environments.step(torch.zeros(3, 1))._replace(terminated=torch.tensor([True, False, False]))
    infos = {"level": torch.tensor([0, 2, 0]), "_level": torch.tensor([True, True, False])}
    found = environments.info_values(step._replace(infos=infos), "level")
    torch.testing.assert_close(found, torch.tensor([0, 2, torch.nan]).double(), equal_nan=True)
    final = {"level": torch.tensor([9, 0, 0]), "_level": torch.tensor([True, False, False])}
    found = environments.info_values(step._replace(infos=infos | {"final_info": final}), "level")
    torch.testing.assert_close(found, torch.tensor([9, 2, torch.nan]).double(), equal_nan=True)


def test_stepping_does_not_convert_to_arrays(monkeypatch):
    policy, tensors, _ = collectors()

    def refuse(*args: object) -> None:
        raise AssertionError("went through NumPy")

    policy.fast_paths = "none"  # NumPy networks only exist on the CPU
    tensors.collect(policy)  # moves the bounds of actions to the device, once
    tensors.start(policy.act)
    for name in ("numpy", "__array__"):
        monkeypatch.setattr(Tensor, name, refuse)
    monkeypatch.setattr(torch, "from_numpy", refuse)
    for t in range(20):
        tensors.advance(t)
    assert tensors.environments.env.seen_types == {Tensor}


@pytest.mark.parametrize("memory", [None, "gru"])
def test_truncation_without_final_observation_bootstraps_from_the_previous_value_with_a_warning(memory):
    policy, tensors, _ = collectors({"memory": memory}, tells_final=False)
    with pytest.warns(UserWarning, match=r"do not return info\['final_obs'\]"):
        rollout = tensors.collect(policy)
    cut = rollout.truncated
    assert cut.any()
    torch.testing.assert_close(rollout.next_values[cut], rollout.values[cut])


def test_number_of_copies_does_not_depend_on_how_many_episodes_are_truncated():
    """On a GPU each copy is a launch, and thousands of environments may reach their time limit in one step."""
    counts = []
    for num_envs in (3, 30):
        env = Reach(num_envs, limit=1)
        policy = ActorCritic(env.single_observation_space, env.single_action_space, hidden_sizes=(8,))
        collector = Collector(TensorEnvironments(env, 5), 20, torch.Generator())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            rollout = collector.collect(policy)
        assert len(rollout.final_indices) == 20 * num_envs
        counts.append(sum(event.name == "aten::copy_" for event in profile.events()))
    assert counts[0] == counts[1] > 0


def test_non_finite_reward_names_the_environment():
    policy, tensors, _ = collectors(spoil_at=25)
    tensors.collect(policy)
    with pytest.raises(EnvironmentFailure, match=r"^environment 1 returned an observation or reward that is NaN"):
        tensors.collect(policy)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_infinite_reward_is_not_clipped(mode, ended):
    env = Reach(3, mode=mode)
    transform = EnvironmentSpec(ID, EnvConfig(reward_clip="abs_one")).reward_transform
    tensors, step = TensorEnvironments(env, 0, transform), env.step
    tensors.reset()

    def spoiled(actions: Tensor) -> tuple:
        observations, _, terminated, *rest = step(actions)
        return observations, torch.tensor([0.0, torch.inf, 9.0]), terminated | ended, *rest

    env.step = spoiled
    assert tensors.step(torch.zeros(3, 1)).rewards.tolist() == [0, 1, 1]
    with pytest.raises(EnvironmentFailure, match=r"^environment 1 returned"):
        tensors.check_finite()


@pytest.mark.parametrize("mode", MODES)
def test_final_observations_must_be_finite(monkeypatch, mode):
    """With SAME_STEP it is in no row of the rollout."""
    policy, tensors, _ = collectors(mode=mode)
    env, same_step = tensors.environments.env, mode == AutoresetMode.SAME_STEP.value
    step = env.step

    def spoiled(actions: Tensor) -> tuple:
        observations, rewards, terminated, truncated, infos = step(actions)
        cut = (truncated & ~terminated).unsqueeze(1)
        if not same_step:
            return torch.where(cut, torch.nan, observations), rewards, terminated, truncated, infos
        infos = infos | {"final_obs": torch.where(cut, torch.nan, infos["final_obs"])}
        return observations, rewards, terminated, truncated, infos

    monkeypatch.setattr(env, "step", spoiled)
    with pytest.raises(EnvironmentFailure, match=r"returned an observation or reward that is NaN"):
        for _ in range(4):
            tensors.collect(policy)


@pytest.mark.parametrize("wrong", [list, lambda x: {"point": x}, lambda x: x[:, :1]])
def test_final_observations_must_be_tensors_that_fit_their_space(monkeypatch, wrong):
    policy, tensors, _ = collectors()
    step = tensors.environments.env.step

    def changed(actions: Tensor) -> tuple:
        *values, infos = step(actions)
        return *values, {"final_obs": wrong(infos["final_obs"])}

    monkeypatch.setattr(tensors.environments.env, "step", changed)
    with pytest.raises(EnvironmentFailure, match=r"^the environments returned .*, in info\['final_obs'\] \(step 7, se"):
        tensors.collect(policy)


def test_terminal_observations_may_be_nan_if_environments_reset_on_request():
    env = Reach(3, mode=AutoresetMode.DISABLED.value)
    tensors, step = TensorEnvironments(env, 0), env.step
    tensors.reset()

    def terminate(actions: Tensor) -> tuple:
        observations, rewards, _, truncated, infos = step(actions)
        ended = torch.tensor([False, True, False])
        return torch.where(ended.unsqueeze(1), torch.nan, observations), rewards, ended, truncated & ~ended, infos

    env.step = terminate
    tensors.step(torch.zeros(3, 1))
    tensors.check_finite()
    assert torch.isfinite(tensors.observations).all()


def test_scalar_observations_must_be_finite():
    env = Reach(3)
    env.single_observation_space = spaces.Box(-np.inf, np.inf, (), np.float32)
    env.reset = lambda **_: (torch.zeros(3), {})
    tensors, step = TensorEnvironments(env, 0), env.step
    tensors.reset()
    env.step = lambda actions: (torch.tensor([0.0, torch.inf, 1.0]), *step(actions)[1:])
    tensors.step(torch.zeros(3, 1))
    with pytest.raises(EnvironmentFailure, match=r"^environment 1 returned"):
        tensors.check_finite()


def test_environment_must_declare_its_autoreset_mode():
    env = Reach(2)
    env.metadata = {}
    with pytest.raises(ValueError, match="metadata\\['autoreset_mode'\\]=None: expected one of"):
        TensorEnvironments(env, 0)


def test_environments_that_return_arrays_are_refused():
    data = make_data("CartPole-v1", backend="torch")
    with pytest.raises(ConfigurationError, match=r"^backend='torch' is not valid: expected 'native', since .* ndarray"):
        make_trainer().fit(make_model(data), data)
    with pytest.raises(ConfigurationError, match=r"^backend='torch' is not valid: expected 'native', since .* ndarray"):
        make_trainer(limit_val_batches=1).validate(make_model(data), data, verbose=False)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3, start=-1), torch.tensor([0, 2])),
        (spaces.MultiDiscrete([2, 3], start=[1, 0]), torch.tensor([[0, 2], [1, 1]])),
        (spaces.MultiDiscrete([[2, 3], [4, 2]]), torch.tensor([[0, 2, 1, 0], [1, 1, 3, 1]])),
        (spaces.MultiBinary(2), torch.tensor([[0, 1], [1, 1]], dtype=torch.int8)),
        (spaces.Box(-1, np.array([0.5, np.inf], np.float32), (2,)), torch.tensor([[-2.0, 7.0], [0.7, 0.1]])),
        (spaces.Box(3, 5, (1, 2), np.uint8), torch.tensor([[0, 2], [1, 1]])),
        (spaces.Box(65000, 65002, (2,), np.uint16), torch.tensor([[0, 2], [1, 1]])),
        (spaces.Box(2**64 - 3, 2**64 - 1, (2,), np.uint64), torch.tensor([[0, 2], [1, 1]])),
        (spaces.Box(-1, 1, (), np.float64), torch.tensor([[-2.0], [0.5]])),
    ],
)
def test_actions_are_converted_as_for_arrays(space, action):
    expected = to_environment(space, action.numpy())
    result = tensor_conversion(space, torch.device("cpu"))(action)
    np.testing.assert_array_equal(result.numpy(), expected)
    assert result.numpy().dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("clip", [None, "abs_one", "soft_asymmetric", 0.3])
def test_rewards_are_scaled_and_clipped_as_for_arrays(clip):
    rewards = np.linspace(-12, 12, 41)
    transform = EnvironmentSpec(ID, EnvConfig(reward_scale=0.5, reward_clip=clip)).reward_transform
    np.testing.assert_allclose(transform(torch.from_numpy(rewards)).numpy(), transform(rewards), rtol=1e-15)


def test_reward_options_apply_only_in_training():
    data = make_data(ID, backend="torch", num_envs=4, env={"reward_scale": 100.0})
    trainer = make_trainer(limit_val_batches=1)
    model = make_model(data)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/episode_return"] > -7 * 4 > trainer.callback_metrics["rollout/episode_return"]
    with pytest.raises(
        ConfigurationError, match=r"^env.frame_stack=2 is not valid: expected its default with backend='torch'"
    ):
        make_trainer().fit(make_model(data), make_data(ID, backend="torch", env={"frame_stack": 2}))


def test_evaluation_works_without_final_observations():
    """The final observation is unknown; the observation before it is recorded instead."""
    played = []
    for tells_final in (True, False):
        data = make_data(ID, backend="torch", env={"kwargs": {"tells_final": tells_final}})
        (episodes,) = make_trainer().predict(make_model(data), data)
        played.append(episodes)
    for told, other in zip(*played, strict=True):
        assert (other.length, other.episode_return) == (told.length, told.episode_return)
        np.testing.assert_array_equal(other.observations[:-1], told.observations[:-1])
        np.testing.assert_array_equal(other.observations[-1], told.observations[-2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("noise", [-2.0, 1.0])  # the noise lets most episodes terminate
def test_episodes_of_tensors_equal_episodes_of_arrays(mode, noise):
    torch.manual_seed(0)
    policy = ActorCritic(Reach().single_observation_space, Reach().single_action_space, initial_log_std=noise)
    tensors = TensorEnvironments(Reach(3, mode=mode), 5, evaluation=True)
    arrays = EnvironmentBatch(AsArrays(Reach(3, mode=mode)), [5, 6, 7], 5)
    own, others = (
        run_episodes(batch, policy, [3, 1, 2], torch.Generator().manual_seed(1), deterministic=False, record=True)
        for batch in (tensors, arrays)
    )
    assert len(own) == 6
    for episode, other in zip(own, others, strict=True):
        assert (episode.length, episode.terminated) == (other.length, other.terminated)
        assert episode.episode_return == pytest.approx(other.episode_return, rel=1e-6)
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(episode, name), getattr(other, name), strict=name != "rewards")


def test_non_finite_reward_of_an_evaluation_names_the_environment():
    data = make_data(ID, backend="torch", env={"kwargs": {"spoil_at": 5}})
    with pytest.raises(EnvironmentFailure, match=r"^evaluation environment 1 returned an observation or reward that"):
        make_trainer(limit_val_batches=1).validate(make_model(data), data, verbose=False)


def test_a_run_trains_evaluates_and_learns():
    data = make_data(
        ID, backend="torch", num_envs=64, rollout_length=14, rollouts_per_epoch=30, evaluation={"episodes": 20}
    )
    model = make_model(data, learning_rate=3e-3, num_minibatches=4, num_epochs=4)
    trainer = make_trainer(limit_val_batches=1, num_sanity_val_steps=1)
    trainer.validate(model, data, verbose=False)
    before = trainer.callback_metrics["val/episode_return"]
    trainer.fit(model, data)
    assert model.env_steps == 64 * 14 * 30
    assert trainer.callback_metrics["val/episode_return"] > before / 2  # minus the distance, summed over seven steps


@pytest.mark.parametrize(("memory", "env"), [(None, {}), ("lstm", {}), (None, {"reward_scale": 0.5})])
def test_a_run_resumes_bit_for_bit(tmp_path, memory, env):
    def run(max_epochs: int, ckpt_path: Path | None = None) -> PPO:
        data = make_data(ID, backend="torch", num_envs=4, rollout_length=10, rollouts_per_epoch=3, env=env)
        model = make_model(data, policy={"memory": memory})
        trainer = make_trainer(max_epochs=max_epochs)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.ckpt")
        return model

    whole = run(2).state_dict()
    run(1)
    resumed = run(2, tmp_path / "1.ckpt").state_dict()
    for name, parameter in whole.items():
        assert torch.equal(parameter, resumed[name]), name


def test_state_of_environments_on_a_gpu_is_stored_on_the_cpu():
    environments = TensorEnvironments(env := Reach(2), 0)
    environments.reset()
    env.state = env.state.to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        environments.state_dict()


class Summing(VectorWrapper):
    """A wrapper that can save its own state, but not that of the environments."""

    def state_dict(self):
        return {"total": 0.0}

    def load_state_dict(self, state):
        pass


def test_the_state_of_a_wrapper_is_not_taken_for_that_of_its_environments():
    environments = TensorEnvironments(Summing(Reach(2)), 0, is_wrapped=True)
    environments.reset()
    assert environments.state_dict() is None


def test_a_vector_entry_point_may_return_a_wrapper_that_saves_the_whole_state():
    environments = TensorEnvironments(Summing(Reach(2)), 0)
    environments.reset()
    assert environments.state_dict() is not None


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP.value, AutoresetMode.DISABLED.value])
def test_observed_masks_and_recurrent_policies_work_with_tensors(mode):
    """The environment raises if an action is invalid, in training and evaluation."""
    data = make_data(
        f"tests.torch_environments:{MASKED_ID}", backend="torch", env={"kwargs": {"mode": mode}}, num_envs=4
    )
    model, recorder = make_model(data, policy={"memory": "gru"}, learning_rate=1e-2), Recorder()
    trainer = make_trainer(callbacks=[recorder], limit_val_batches=1)
    trainer.fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-6
    assert min(recorder.column("approx_kl")) > 1e-6
    assert trainer.callback_metrics["val/episodes"] == 2
