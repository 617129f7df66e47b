"""RolloutDataModule: separate evaluation (contract 9), seeds of roles and ranks, and invalid options."""

import multiprocessing
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
import torch
import yaml
from gymnasium import spaces
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.data import collector, evaluation
from lightning_rl.data.datamodule import OnDemandLoader
from lightning_rl.environments import AtariPreprocessing, EnvironmentFailure
from lightning_rl.environments.contract import EVALUATION, TRAINING
from lightning_rl.tools.trained import load_data
from lightning_rl.validation import ConfigurationError
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, parameters_of
from tests.probes import Told


def attach(data, rank=0, world_size=1, policy=None):
    """Attach the data to a fake Trainer with this rank and policy."""
    policy = policy or Told()
    policy.parameters = lambda: iter([torch.zeros(1)])
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
        profiler=PassThroughProfiler(),
        lightning_module=SimpleNamespace(policy=policy, device=torch.device("cpu"), policy_version=0),
    )
    return data


def summary(episodes):
    return [(episode.length, episode.episode_return) for episode in episodes]


# ----------------------------------------------------------------------------------------------- evaluation is separate


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Probe/Random-v0"])
def test_validation_does_not_change_training(env_id, normalize):
    """No validation, after every rollout, with the sanity check, with samples, with other numbers of episodes."""
    kinds = {
        "none": ({"limit_val_batches": 0}, {}),
        "every rollout": ({"val_check_interval": 1, "limit_val_batches": 1.0}, {}),
        "sanity check": ({"val_check_interval": 1, "limit_val_batches": 1.0, "num_sanity_val_steps": 1}, {}),
        "samples": ({"limit_val_batches": 1.0, "val_check_interval": 2}, {"evaluation": {"deterministic": False}}),
        "many": ({"limit_val_batches": 1.0}, {"evaluation": {"episodes": 7, "num_envs": 3}}),
    }
    expected, validations = None, {}
    for name, (trainer_options, data_options) in kinds.items():
        data = make_data(env_id, rollouts_per_epoch=4, **data_options)
        model = make_model(data, normalization={"observations": normalize, "rewards": normalize})
        seen = []
        play = data.run_episodes
        data.run_episodes = lambda *args, play=play, seen=seen: seen.append(1) or play(*args)
        make_trainer(**trainer_options).fit(model, data)
        validations[name] = len(seen)
        expected = expected or (parameters_of(model), {k: v.clone() for k, v in model.state_dict().items()})
        assert_equal_parameters(model, expected[0])
        for key, value in model.state_dict().items():
            assert torch.equal(value, expected[1][key]), (name, key)
    assert validations == {"none": 0, "every rollout": 4, "sanity check": 5, "samples": 2, "many": 1}


def test_data_module_can_be_printed():
    assert str(make_data()) == "RolloutDataModule('CartPole-v1', num_envs=2, rollout_length=16, backend='sync')"


@pytest.mark.parametrize("backend", ["sync", "async", "native", "envpool"])
def test_every_evaluation_plays_the_same_episodes(backend):
    data = make_data(backend=backend, evaluation={"episodes": 5, "num_envs": 2})
    attach(data, policy=Told(action=lambda o: (o[..., 2] > 0).long()))
    first = summary(data.run_episodes())
    data.collect()
    assert len(first) == 5 and summary(data.run_episodes()) == first
    assert summary(data.run_episodes(record=True)) == first
    data.teardown("fit")
    assert summary(data.run_episodes()) == first
    data.teardown("validate")


def test_evaluation_with_sampled_actions_is_reproducible():
    data = make_data(evaluation={"deterministic": False, "episodes": 4})
    model = make_model(data)
    trainer = make_trainer(limit_val_batches=1.0)
    played = [trainer.predict(model, data)[0] for _ in range(2)]
    assert summary(played[0]) == summary(played[1])
    deterministic = make_trainer().predict(model, make_data(evaluation={"episodes": 4}))[0]
    assert summary(deterministic) != summary(played[0])


@pytest.mark.parametrize("episodes", [1, 3, 4, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_ranks_together_play_evaluation_episodes_exactly_once(episodes, world_size, num_envs):
    counts, played = [], []
    for rank in range(world_size):
        data = make_data("Probe/Random-v0", evaluation={"episodes": episodes, "num_envs": num_envs})
        share = attach(data, rank, world_size).run_episodes()
        counts.append(len(share))
        played += summary(share)
        data.teardown("validate")
    assert sum(counts) == episodes and max(counts) - min(counts) <= 1
    assert len(set(played)) == episodes  # ranks play different episodes


def test_episodes_are_assigned_to_evaluation_environments_beforehand():
    """3 episodes in each of two environments and 2 in the others, however long the episodes are."""
    env = {"kwargs": {"lengths": [1, 9, 4]}}
    data = make_data("Probe/Counter-v0", env=env, evaluation={"episodes": 10, "num_envs": 4})
    assert [e.length for e in attach(data).run_episodes()] == [1, 9, 4, 1, 9, 4, 1, 9, 1, 9]
    data.teardown("validate")


def test_evaluation_has_raw_rewards_and_whole_episodes():
    """Evaluation uses `wrappers` but not `training_wrappers`, which double rewards and cut episodes here."""
    double, kwargs = "tests.probes.DoubleReward", {"lengths": [5], "reward": 1.0}
    env = {"kwargs": kwargs, "training_wrappers": [double]}
    data = attach(make_data("Probe/Counter-v0", env=env, rollout_length=6))
    rollout = data.collect()
    assert (rollout.rewards == 2).all() and rollout.episodes.lengths == [3, 3, 3, 3]
    assert summary(data.run_episodes()) == [(5, 5.0)] * 2
    data.teardown("fit")
    both = attach(make_data("Probe/Counter-v0", env={"kwargs": kwargs, "wrappers": [double]}))
    assert summary(both.run_episodes()) == [(3, 6.0)] * 2
    both.teardown("validate")


def test_evaluation_of_games_counts_the_score_of_whole_games():
    env = {"atari": {"noop_max": 0, "repeat_action_probability": 0.0}}
    data = attach(
        make_data("ALE/Breakout-v5", env=env, num_envs=1, rollout_length=60, evaluation={"episodes": 1}),
        policy=Told(value=lambda o: torch.zeros(o.shape[:-3]), action=lambda o: torch.full(o.shape[:-3], 2)),
    )
    rollout = data.collect()
    assert rollout.terminated.any()  # a lost life
    shortest = min(rollout.episodes.lengths)
    (episode,) = data.run_episodes()
    assert episode.length > 4 * shortest and episode.terminated
    data.teardown("fit")


def test_more_evaluation_episodes_take_more_environments():
    data = attach(make_data(evaluation={"episodes": 2}))
    assert len(data.run_episodes()) == 2
    data.evaluation = replace(data.evaluation, episodes=5)
    assert len(data.run_episodes()) == 5
    assert data._evaluator.environments.num_envs == 5
    data.teardown("validate")


def test_env_id_must_be_a_string():
    with pytest.raises(ConfigurationError, match=r"env_id=<.*CartPole.* is not valid: expected a string; register"):
        RolloutDataModule(gymnasium.make("CartPole-v1"))


def test_data_module_without_a_trainer_is_an_error():
    for collect in (make_data().collect, make_data().run_episodes):
        with pytest.raises(ConfigurationError, match=r"^RolloutDataModule has no Trainer, which provides the policy"):
            collect()


class DictInInfo(gymnasium.Wrapper):
    def step(self, action):
        return (*self.env.step(action)[:4], {"parts": {"x": 1.0}})


def test_info_key_of_a_dict_is_refused_by_name():
    data = attach(make_data(info_keys=["parts"], env={"wrappers": [DictInInfo]}))
    with pytest.raises(
        ConfigurationError, match=r"info_keys='parts' is not valid: info\['parts'\] is .*, expected a num"
    ):
        data.collect()
    data.teardown("fit")


def test_missing_info_key_warns_once(recwarn):
    data = attach(make_data(info_keys=["nowhere"], rollouts_per_epoch=2))
    for _ in range(5):
        data.collect()
    data.teardown("fit")
    messages = [str(warning.message) for warning in recwarn]
    expected = "info_keys='nowhere' did not appear in info before an episode or the first epoch ended (keys: none)"
    assert messages.count(expected) == 1


def test_misspelled_info_key_warns_after_the_first_episode(recwarn):
    data = attach(make_data("Probe/Counter-v0", info_keys=["scroe", "level"], rollouts_per_epoch=1000))
    for _ in range(5):
        data.collect()
    data.teardown("fit")
    (message,) = [str(warning.message) for warning in recwarn if "info_keys" in str(warning.message)]
    expected = (
        "info_keys='scroe' did not appear in info before an episode or the first epoch ended (keys: level, name, "
        "score); did you mean score?"
    )
    assert message == expected


def test_info_key_of_episode_ends_does_not_warn_before_an_episode_ends(recwarn):
    data = attach(make_data("Probe/Counter-v0", info_keys=["score"], rollouts_per_epoch=1000, rollout_length=1))
    while data.collect().infos["score"].isnan().all():
        pass
    data.teardown("fit")
    assert not [warning for warning in recwarn if "info_keys" in str(warning.message)]


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_of_an_environment_names_the_rank_if_there_are_several(rank):
    failing = {"env": {"kwargs": {"how": "raise", "at": 2, "episode_seed": None}}, "num_envs": 1}
    for play, role in (("collect", ""), ("run_episodes", "evaluation ")):
        data = attach(make_data("Probe/Failing-v0", **failing), rank, 2)
        with pytest.raises(
            EnvironmentFailure, match=rf"^rank {rank}: {role}environment 0 \(episode 0, .* raised in step"
        ):
            getattr(data, play)()
        alone = attach(make_data("Probe/Failing-v0", **failing))
        with pytest.raises(EnvironmentFailure, match=rf"^{role}environment 0 "):
            getattr(alone, play)()


def test_each_rank_warns_about_its_first_replaced_environment():
    failing = {"env": {"kwargs": {"how": "raise", "at": 2, "episode_seed": None}, "on_failure": "restart"}}
    data = attach(make_data("Probe/Failing-v0", **failing), 1, 2)
    with pytest.warns(UserWarning, match=r"^rank 1: environment 0 .* raised in step: .* was replaced"):
        data.collect()
    data.teardown("fit")


def test_evaluation_has_other_seeds_than_training(monkeypatch):
    made = []
    make = collector.make_environments

    def spy(spec, num_envs, seeds, **options):
        made.append((spec.evaluation, tuple(seeds)))
        return make(spec, num_envs, seeds, **options)

    for module in (collector, evaluation):
        monkeypatch.setattr(module, "make_environments", spy)
    for rank in range(2):
        data = attach(make_data(seed=5, num_envs=3), rank, 2)
        data.collect()
        data.run_episodes()
        data.teardown("fit")
    assert [evaluation for evaluation, _ in made] == [False, True, False, True]
    seeds = [seed for _, seeds in made for seed in seeds]
    assert len(seeds) == 3 + 1 + 3 + 1 == len(set(seeds))
    assert TRAINING != EVALUATION


def test_statistics_are_frozen_in_evaluation():
    data = make_data("HalfCheetah-v5", env={"kwargs": {"max_episode_steps": 20}})
    model = make_model(data, normalization={"observations": True, "rewards": True})
    trainer = make_trainer()
    trainer.fit(model, data)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(model, data)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


# ------------------------------------------------------------------------------------------------------------- training


def test_seed_determines_the_run():
    weights = []
    for seed in (3, 3, 4):
        data = make_data(seed=seed)
        model = make_model(data)
        make_trainer().fit(model, data)
        weights.append(parameters_of(model))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_ranks_have_different_environments_and_actions():
    rollouts = []
    for rank in range(2):
        data = make_data()
        model = make_model(data)
        attach(data, rank, 2).trainer.lightning_module.policy = model.policy
        rollouts.append(data.collect())
        data.teardown("fit")
    assert not torch.equal(rollouts[0].observations[0], rollouts[1].observations[0])
    assert not torch.equal(rollouts[0].actions, rollouts[1].actions)


def test_seed_defaults_to_the_seed_of_torch():
    seeds = []
    for options in ({"seed": None}, {"seed": None}, {"seed": 8}):
        torch.manual_seed(8)
        data = attach(make_data(**options))
        data.collect()
        seeds.append(data.seed)
        data.teardown("fit")
    assert seeds == [8, 8, 8]
    torch.manual_seed(9)
    data = attach(make_data(seed=None))
    data.collect()
    assert data.seed == 9
    data.teardown("fit")


def test_loaders_have_a_length_and_make_batches_on_demand():
    data = make_data(rollouts_per_epoch=3)
    assert len(data.train_dataloader()) == 3
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert len(loader) == 1
    made = []
    loader = OnDemandLoader(lambda: made.append(len(made)) or made[-1], 2)
    batches = iter(loader)
    assert made == []
    assert next(batches) == 0 and made == [0]
    assert list(loader) == [1, 2]


def test_options_that_are_set_after_a_fit_apply_to_the_next_one():
    shapes, evaluated = [], []

    class Shapes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            shapes.append((batch.shape, [*(batch.infos or ())]))

        def on_validation_end(self, trainer, pl_module):
            evaluated.append(data._evaluator.environments.num_envs)

    data = make_data("Probe/Counter-v0", rollouts_per_epoch=1)
    model = make_model(data)
    make_trainer(callbacks=[Shapes()], limit_val_batches=1.0).fit(model, data)
    data.num_envs, data.rollout_length, data.rollouts_per_epoch, data.info_keys = 4, 8, 2, ["level"]
    data.evaluation = replace(data.evaluation, num_envs=1)
    make_trainer(callbacks=[Shapes()], limit_val_batches=1.0).fit(model, data)
    assert shapes == [((16, 2), []), *[((8, 4), ["level"])] * 2]
    assert evaluated == [2, 1]
    assert model.env_steps == model.clock.planned_env_steps == 16 * 2 + 2 * 8 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_environments_are_closed_after_training_and_after_a_failure():
    class Interrupt(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("stop here")

    def children():
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()  # of other tests, such as the server of Python's `forkserver`
    for callbacks in ([], [Interrupt()]):
        data = make_data(backend="async", evaluation={"episodes": 1})
        model = make_model(data)
        try:
            make_trainer(callbacks=callbacks, limit_val_batches=1.0).fit(model, data)
        except RuntimeError as error:
            assert str(error) == "stop here"
        commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children() - before]
        assert not [command for command in commands if not re.search("resource_tracker|tests.programs", command)]
        assert data._evaluator.environments is data._sampler._collector is None


def test_spaces_include_wrappers():
    data = make_data("MiniGrid-Empty-5x5-v0", env={"wrappers": ["minigrid.wrappers.ImgObsWrapper"]})
    assert data.observation_space.shape == (7, 7, 3) and data.action_space.n == 7
    atari = make_data("ALE/Pong-v5", backend="envpool", env={"atari": AtariPreprocessing(frame_stack=2)})
    assert atari.observation_space == spaces.Box(0, 255, (2, 84, 84), "uint8")
    assert make_data(num_envs=3, rollout_length=5).rollout_shape == (5, 3)


def test_reading_the_spaces_leaves_no_process():
    before = multiprocessing.active_children()
    assert make_data("Probe/Counter-v0", backend="async").action_space.n == 3
    assert multiprocessing.active_children() == before


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "^num_envs=0 is not valid: expected an integer of at least 1$"),
        ({"num_envs": 2.0}, "^num_envs=2.0 is not valid"),
        ({"num_envs": True}, "^num_envs=True is not valid"),
        ({"rollout_length": -1}, "^rollout_length=-1 is not valid"),
        ({"rollouts_per_epoch": 0}, "^rollouts_per_epoch=0 is not valid"),
        ({"evaluation": {"episodes": 0}}, "^evaluation.episodes=0 is not valid"),
        ({"evaluation": {"num_envs": 0}}, "^evaluation.num_envs=0 is not valid"),
        ({"seed": -1}, "^seed=-1 is not valid: expected an integer of at least 0, or None$"),
        ({"seed": 1.5}, "^seed=1.5 is not valid"),
        (
            {"evaluation": {"deterministic": "no"}},
            "^evaluation.deterministic='no' is not valid: expected true or false$",
        ),
        ({"info_keys": "score"}, "^info_keys='score' is not valid: expected a list of keys$"),
        (
            {"info_keys": ["x", "episodes"]},
            r"^info_keys=\['episodes'\] is not valid: expected keys whose",
        ),
        ({"backend": "threads"}, "^backend='threads' is not valid"),
        ({"env": {"step_timeout": -1.0}, "backend": "async"}, "^env.step_timeout=-1.0 is not valid"),
        (
            {"env": {"wrappers": [{"path": "x"}]}},
            "^env.wrappers={'path': 'x'} is not valid: expected a dict with 'class_path'",
        ),
        ({"env": {"training_wrappers": [lambda env: env]}}, "^env.training_wrappers=<function .* cannot be stored"),
    ],
)
def test_options_out_of_range_are_refused_at_once(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_data(**options)


def test_training_wrapper_must_not_change_the_spaces():
    data = make_data(env={"training_wrappers": [{"class_path": "gymnasium.wrappers.TimeAwareObservation"}]})
    with pytest.raises(
        ConfigurationError, match=r"^env.training_wrappers=\['gymnasium.wrappers.Time.*'\] is not valid: expected"
    ):
        _ = data.observation_space


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(5), r"^observation_space: Text is not supported"),
        (
            spaces.Dict({"words": spaces.Tuple([spaces.Sequence(spaces.Discrete(3))])}),
            r"^observation_space\.words\.0: Sequence is not supported",
        ),
        (
            spaces.Dict({"map": spaces.Graph(spaces.Discrete(2), None)}),
            r"^observation_space\.map: Graph is not supported",
        ),
    ],
)
def test_unsupported_observation_space_is_named_with_what_is_supported(space, message):
    data = make_data("Probe/Space-v0", env={"kwargs": {"observation_space": space}})
    with pytest.raises(ConfigurationError, match=message) as caught:
        PPO(data.observation_space, data.action_space)
    expected = "expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
    assert f"{expected}; " in str(caught.value)


@pytest.mark.parametrize("space", [spaces.Box(0, 256, (2,), int), spaces.Dict(a=spaces.Box(-(2**40), 0, (1,), int))])
def test_unsupported_action_space_is_named_with_what_is_supported(space):
    kwargs = {"observation_space": spaces.Box(-1, 1, (2,)), "action_space": space}
    data = make_data("Probe/Space-v0", env={"kwargs": kwargs})
    with pytest.raises(ConfigurationError, match=r"^action_space=Box.* is not supported: expected Discrete"):
        PPO(data.observation_space, data.action_space)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))])
def test_action_space_of_another_type_is_named_with_what_is_supported(space):
    kwargs = {"observation_space": spaces.Box(-1, 1, (2,)), "action_space": space}
    data = make_data("Probe/Space-v0", env={"kwargs": kwargs})
    with pytest.raises(
        ConfigurationError, match=r"^action_space(\.a)?: (Text|Sequence) is not supported; expected Box, Disc"
    ):
        PPO(data.observation_space, data.action_space)


class Named(RolloutDataModule):
    """Has its own constructor, and stores no options."""

    def __init__(self, name):
        super().__init__(f"{name}-v1", rollout_length=4)


def save(data):
    trainer = make_trainer()
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint("run.ckpt")


def test_a_data_module_is_loaded_with_the_options_and_the_seed_of_its_run(in_tmp_path):
    limit = {"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": 4}}
    env = {"wrappers": [limit], "frame_stack": 2, "reward_scale": 0.5}
    save(data := make_data(rollout_length=4, env=env, info_keys=["x"], evaluation={"episodes": 3}, seed=None))
    loaded = RolloutDataModule.load_from_checkpoint("run.ckpt")
    assert loaded.spec.wrappers == data.spec.wrappers and loaded.evaluation == data.evaluation
    assert loaded.spec.env.frame_stack == 2 and loaded.spec.env.reward_scale == 0.5
    assert loaded.rollout_shape == data.rollout_shape and loaded.info_keys == ["x"] and loaded.seed == data.seed
    changed = RolloutDataModule.load_from_checkpoint("run.ckpt", env={"frame_stack": 3}, num_envs=5, seed=7)
    assert changed.spec.env == replace(loaded.spec.env, frame_stack=3) and changed.num_envs == 5 and changed.seed == 7
    with pytest.raises(ConfigurationError, match=r"^env=None is not valid: expected EnvConfig\(.*a dict of its"):
        RolloutDataModule.load_from_checkpoint("run.ckpt", env=None)


def test_a_data_module_of_a_run_on_a_gpu_is_loaded_without_a_gpu(in_tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save(data := make_data(rollout_length=4))
    assert RolloutDataModule.load_from_checkpoint("run.ckpt").rollout_shape == data.rollout_shape


def test_loggers_get_the_algorithm_its_options_and_those_of_the_data(in_tmp_path):
    data = make_data(rollout_length=4, env={"frame_stack": 2})
    trainer = make_trainer(logger=CSVLogger("."))
    trainer.fit(make_model(data), data)
    logged = yaml.safe_load(Path(trainer.logger.log_dir, "hparams.yaml").read_text())
    assert logged["algorithm"] == "PPO" and logged["num_epochs"] and logged["data"]["rollout_length"] == 4
    assert logged["data"]["env"]["frame_stack"] == 2 and logged["data"]["env_id"] == data.spec.env_id


@pytest.mark.parametrize("given", [None, 7])
def test_loggers_get_the_seed_of_the_run(in_tmp_path, given):
    for pytorch, start in ((5, {}), (6, {"ckpt_path": "run.ckpt"})):  # a resumed run keeps its seed
        data = make_data(rollout_length=4, seed=given)
        model, trainer = make_model(data), make_trainer(logger=CSVLogger("."))
        torch.manual_seed(pytorch)
        trainer.fit(model, data, **start)
        trainer.save_checkpoint("run.ckpt")
        logged = yaml.safe_load(Path(trainer.logger.log_dir, "hparams.yaml").read_text())
        assert logged["data"]["seed"] == (given or 5)


def test_loading_a_data_module_names_the_options_that_a_checkpoint_cannot_hold(in_tmp_path):
    space = spaces.Box(-1, 1, (2,))
    save(make_data("Probe/Space-v0", env={"kwargs": {"observation_space": space, "action_space": space}}))
    expected = (
        "RolloutDataModule.load_from_checkpoint: the checkpoint cannot hold env.kwargs: pass the value of the run"
    )
    for given in ({}, {"env": {"frame_stack": 2}}):
        with pytest.raises(ConfigurationError, match=re.escape(expected)):
            RolloutDataModule.load_from_checkpoint("run.ckpt", **given)
    expected = "config: expected the run's configuration: the checkpoint cannot hold env.kwargs: pass the value"
    with pytest.raises(ConfigurationError, match=expected):
        load_data("run.ckpt")
    env = {"kwargs": {"observation_space": space, "action_space": space}}
    assert RolloutDataModule.load_from_checkpoint("run.ckpt", env=env).spec.env_id == "Probe/Space-v0"


def test_loading_a_subclass_says_which_options_it_lacks(in_tmp_path):
    save(Named("CartPole"))
    expected = "Named.load_from_checkpoint: missing a required argument: 'name'; pass it as a keyword argument"
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        Named.load_from_checkpoint("run.ckpt")
    assert Named.load_from_checkpoint("run.ckpt", name="CartPole").rollout_length == 4
