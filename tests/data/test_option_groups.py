"""The option groups of the data module: `env`, `actors`, `evaluation`."""

import dataclasses
import inspect

import pytest
import torch

from lightning_rl import ActorConfig, AtariPreprocessing, EnvConfig, EvaluationConfig, RecordedEpisodes
from lightning_rl.cli.main import main
from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.environments import EnvironmentSpec
from lightning_rl.tools.trained import load_data
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_model, make_trainer


class TwoFrames(RolloutDataModule):
    """Has another default group, and saves its options in checkpoints."""

    def __init__(self, env_id="CartPole-v1", env=EnvConfig(frame_stack=2), seed=0, **kwargs):
        super().__init__(env_id, env=env, seed=seed, **kwargs)
        self.save_hyperparameters()


class Short(TwoFrames):
    """Changes one field of its base class's group."""

    def __init__(self, env_id="CartPole-v1", env={"max_episode_steps": 5}, **kwargs):  # noqa: B006
        super().__init__(env_id, env=env, **kwargs)


def test_a_dict_and_a_group_give_the_same_options():
    atari = {"frame_skip": 2}
    one = RolloutDataModule(
        "ALE/Pong-v5",
        env={"atari": atari, "max_episode_steps": 9},
        actors={"count": 1},
        evaluation={"episodes": 3},
    )
    other = RolloutDataModule(
        "ALE/Pong-v5",
        env=EnvConfig(atari=AtariPreprocessing(frame_skip=2), max_episode_steps=9),
        actors=ActorConfig(count=1),
        evaluation=EvaluationConfig(episodes=3),
    )
    mixed = RolloutDataModule("ALE/Pong-v5", env=EnvConfig(atari=atari, max_episode_steps=9))
    assert one.spec == other.spec == mixed.spec and one.spec.env.atari.frame_skip == 2
    assert one.actors == other.actors and one.evaluation == other.evaluation == EvaluationConfig(3)


@pytest.mark.parametrize(
    ("kind", "given", "frames", "limit"),
    [
        (TwoFrames, {}, 2, None),
        (TwoFrames, {"env": {"max_episode_steps": 7}}, 2, 7),
        (TwoFrames, {"env": EnvConfig(max_episode_steps=7)}, None, 7),
        (Short, {}, 2, 5),
        (Short, {"env": {"frame_stack": 3}}, 3, 5),
    ],
)
def test_a_dict_changes_single_fields_of_the_default_of_the_class(kind, given, frames, limit):
    env = kind(**given).spec.env
    assert (env.frame_stack, env.max_episode_steps) == (frames, limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"frame_stak": 2}}, r"^env\.frame_stak=2 is no option; did you mean frame_stack"),
        ({"env": {"atari": {"frameskip": 2}}}, r"^env\.atari\.frameskip=2 is no option; did you mean frame_skip"),
        ({"actors": {"num_actors": 2}}, r"^actors\.num_actors=2 is no option; actors has count, prefetch"),
        ({"evaluation": {"episode": 2}}, r"^evaluation\.episode=2 is no option; did you mean episodes"),
        ({"env": None}, r"^env=None is not valid: expected EnvConfig\(\.\.\.\) or a dict of its options$"),
        ({"env": {"atari": None}}, r"^env\.atari=None is not valid: expected AtariPreprocessing"),
        ({"env": {"frame_stack": 0}}, r"^env\.frame_stack=0 is not valid"),
        ({"env": EnvConfig(atari=AtariPreprocessing(noop_max=-1))}, r"^env\.atari\.noop_max=-1 is not valid"),
        ({"env": {"on_failure": "ignore"}}, r"^env\.on_failure='ignore' is not valid: expected one of raise, restart"),
        ({"env": {"on_failure": "restart"}, "backend": "native"}, r"expected 'raise' with backend='native'.* replaced"),
        ({"env": {"wrappers": [5]}}, r"^env\.wrappers=5 cannot be stored"),
        ({"env": {"training_wrappers": "x"}}, r"^env\.training_wrappers='x' is not valid"),
        ({"actors": {"count": -1}}, r"^actors\.count=-1 is not valid"),
        ({"actors": {"prefetch": 2}}, r"^actors\.prefetch=2 is not valid: expected None where actors\.count is 0"),
        ({"evaluation": {"episodes": 0}}, r"^evaluation\.episodes=0 is not valid"),
        ({"frame_stack": 2}, r"^frame_stack=2 is no option of RolloutDataModule; did you mean env\.frame_stack or"),
        ({"n_envs": 2}, r"^n_envs=2 is no option of RolloutDataModule; did you mean num_envs or"),
        ({"evaluation": {"deterministic": 1}}, r"^evaluation\.deterministic=1 is not valid"),
    ],
)
def test_errors_name_the_group_and_the_option(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RolloutDataModule("CartPole-v1", **options)


def test_options_of_atari_games_are_refused_for_other_environments():
    with pytest.raises(
        ConfigurationError, match=r"^env\.atari=.*: expected its default, since CartPole-v1 is no Atari"
    ):
        RolloutDataModule("CartPole-v1", env={"atari": {"frame_skip": 2}}).observation_space  # noqa: B018


def test_training_wrappers_are_not_used_in_evaluation():
    limits = [{"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": n}} for n in (4, 2)]
    spec = EnvironmentSpec("CartPole-v1", EnvConfig(wrappers=limits[:1], training_wrappers=limits[1:]))
    assert spec.wrappers == limits and spec.for_evaluation().wrappers == limits[:1]


class WithoutState(RolloutDataModule):
    def state_dict(self):
        return {"own": 1}


def test_state_of_a_data_module_without_its_base_is_named_on_resume(tmp_path):
    data, trainer = WithoutState("CartPole-v1", num_envs=2, rollout_length=8), make_trainer()
    trainer.fit(model := make_model(data), data)
    trainer.save_checkpoint(path := tmp_path / "run.ckpt")
    with pytest.raises(ConfigurationError, match=r"call super\(\) in WithoutState\.state_dict"):
        make_trainer(max_epochs=2).fit(model, data, ckpt_path=path)


def test_changed_options_of_a_resumed_run_are_logged_by_full_name(caplog):
    before = RolloutDataModule("CartPole-v1", env={"reward_scale": 2.0}).state_dict()
    assert all(isinstance(name, str) for name in before["settings"])
    caplog.set_level("INFO")
    RolloutDataModule("CartPole-v1", env={"reward_scale": 0.5}, actors={"count": 2}).load_state_dict(before)
    assert "Resuming with env.reward_scale=0.5 (before: 2.0)" in caplog.text
    assert "Resuming with actors.count=2 (before: 0)" in caplog.text
    assert caplog.text.count("Resuming with") == 2


def test_load_data_restores_the_options_of_the_run(in_tmp_path):
    limits = [{"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": n}} for n in (4, 2)]
    env = {"frame_stack": 2, "wrappers": limits[:1], "training_wrappers": limits[1:]}
    data = RolloutDataModule("CartPole-v1", 2, 4, 1, env=env, evaluation={"episodes": 3}, seed=0)
    trainer = make_trainer()
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint("run.ckpt")
    loaded = load_data("run.ckpt")
    assert loaded.eval_spec.wrappers == limits[:1] and loaded.spec.wrappers == limits
    assert loaded.spec.env.frame_stack == 2 and loaded.evaluation == EvaluationConfig(3)


def test_saved_hyper_parameters_are_plain_data(in_tmp_path):
    data = TwoFrames(num_envs=2, rollout_length=4, evaluation=EvaluationConfig(episodes=3))
    trainer = make_trainer()
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint("run.ckpt")
    stored = torch.load("run.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert stored["env"]["frame_stack"] == 2 and stored["evaluation"]["episodes"] == 3
    loaded = TwoFrames.load_from_checkpoint("run.ckpt")
    assert loaded.spec == data.spec and loaded.evaluation == data.evaluation


@pytest.mark.parametrize(
    "data",
    [
        "data: {env_id: CartPole-v1, num_envs: 2, env: {frame_stack: 2, max_episode_steps: 9}}",
        "data: {class_path: RolloutDataModule, init_args: {env_id: CartPole-v1, num_envs: 2, env: {frame_stack: 2}}}",
    ],
    ids=["flat", "class"],
)
def test_the_command_line_changes_single_options_of_a_configuration(in_tmp_path, data):
    (in_tmp_path / "run.yaml").write_text(f"model: PPO\n{data}\n")
    options = {"env.max_episode_steps": 8, "env.kwargs.render_mode": "rgb_array", "evaluation.episodes": 3}
    small = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--data.rollout_length=4"]
    cli = main(["fit", "--config=run.yaml", *small, *(f"--data.{name}={value}" for name, value in options.items())])
    env = cli.datamodule.spec.env
    assert env == EnvConfig(
        kwargs={"render_mode": "rgb_array"}, frame_stack=2, max_episode_steps=8, imports=env.imports
    )
    assert cli.datamodule.evaluation == EvaluationConfig(episodes=3)


def test_the_groups_have_no_common_base_class_and_each_option_is_documented():
    for group in (EnvConfig, ActorConfig, EvaluationConfig):
        assert group.__bases__ == (object,)
        documented = inspect.getdoc(group).splitlines()
        for field in dataclasses.fields(group):
            assert any(line.startswith(f"    {field.name}: ") for line in documented), field.name


def test_recorded_episodes_have_the_same_groups(in_tmp_path):
    data = RolloutDataModule("CartPole-v1", 2, 4, 1, seed=0)
    episodes = make_trainer().predict(make_model(data), data)[0]
    recorded = RecordedEpisodes("CartPole-v1", episodes, env={"max_episode_steps": 9}, evaluation={"episodes": 2})
    assert recorded.eval_spec.env.max_episode_steps == 9 and recorded.evaluation.episodes == 2
