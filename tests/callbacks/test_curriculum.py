"""A curriculum changes the training environments from stage to stage, in every backend, and resumes bit for bit."""

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from lightning.pytorch import Callback, Trainer

from lightning_rl import IMPALA, Curriculum, CurriculumStage
from lightning_rl.cli.main import main
from lightning_rl.environments import EnvironmentFailure, EnvironmentSpec, make_environments
from lightning_rl.environments.episodes import RestartingEpisodes
from lightning_rl.validation import ConfigurationError
from tests import torch_environments
from tests.helpers import MemoryLogger, assert_equal_parameters, make_data, make_model, make_trainer, parameters_of
from tests.probes import make_batch

ENV_ID = "lightning_rl_tests/Adjustable-v0"


class Adjustable(gymnasium.Env):
    """Episodes of `length` steps; observations are `[step, length, option]` at the start of the episode."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)
    length = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.began = 0, (self.length, (options or {}).get("level", 0))
        return np.array([0, *self.began], np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.array([self.steps, self.length, self.began[1]], np.float32)
        return observation, 1.0 if action else 0.5, False, self.steps == self.began[0], {}


gymnasium.register(ENV_ID, Adjustable)


class Seen(Callback):
    """Keeps the observations of all rollouts."""

    def __init__(self):
        self.observations = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.observations.append(batch.observations[:-1].clone())


def stages_of(name, *values, every=32, **more):
    """Return stages that end after `every` steps each."""
    ends = [{"until_env_steps": every * (number + 1)} for number in range(len(values) - 1)]
    return [{"attributes": {name: value}, **end, **more} for value, end in zip(values, [*ends, {}], strict=True)]


def fit(curriculum, data, *callbacks, model=None, **options):
    model = make_model(data) if model is None else model
    make_trainer(callbacks=[curriculum, *callbacks], **options).fit(model, data)
    return model


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environments_change_at_the_start_of_their_next_episode(backend):
    stages = stages_of("length", 3, 10)
    stages[1]["reset_options"] = {"level": 7}
    seen, logger = Seen(), MemoryLogger()
    data = make_data(ENV_ID, backend=backend, rollouts_per_epoch=2)
    fit(curriculum := Curriculum(stages), data, seen, logger=logger, log_every_n_steps=1)
    before, after = (x[:, 0].tolist() for x in seen.observations)
    # The last episode of the first stage began with a length of 3 and keeps it.
    assert before == [[t % 3, 3, 0] for t in range(16)]
    assert after == [[1, 3, 0], [2, 3, 0], *([t % 10, 10, 7] for t in range(14))]
    assert curriculum.stage == 1
    assert [value for _, value in logger.rows("curriculum/stage")] == [1, 1]
    assert [value for _, value in logger.rows("curriculum/length")] == [10, 10]


def test_native_environments_change_at_once():
    class Look(Callback):
        lengths = ()

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.lengths += (trainer.datamodule._sampler._collector.environments.env.unwrapped.length,)

    curriculum, look = Curriculum(stages_of("length", 0.5, 0.25)), Look()
    fit(curriculum, make_data("CartPole-v1", backend="native", rollouts_per_epoch=3), look)
    assert look.lengths == (0.25, 0.25, 0.25)  # this hook runs after the hook of the curriculum


def test_environments_of_tensors_change_at_once():
    seen = Seen()
    data = make_data(torch_environments.ID, backend="torch", rollouts_per_epoch=2)
    fit(Curriculum(stages_of("limit", 2, 20)), data, seen)
    ends = [(x[1:, :, 1] != x[:-1, :, 1]).sum().item() for x in seen.observations]  # the goal changes with the episode
    assert ends[0] == 14 and ends[1] <= 2


def test_actors_change_with_the_next_requested_rollout():
    seen = Seen()
    data = make_data(ENV_ID, actors={"start_method": "fork", "count": 1}, rollouts_per_epoch=6)
    model = IMPALA(data.observation_space, data.action_space)
    stages = stages_of("length", 3, 4)
    stages[1]["reset_options"] = {"map": np.eye(2)}
    fit(Curriculum(stages), data, seen, model=model)
    lengths = [set(x[..., 1].flatten().tolist()) for x in seen.observations]
    assert lengths[0] == {3} and lengths[-1] == {4}
    assert not seen.observations[0][..., 2].any()


def test_episodes_that_actors_play_in_an_earlier_stage_do_not_end_the_next_one():
    """Episodes of length 10 return at least 5; episodes of length 2 return at most 2."""
    stages = stages_of("length", 10, 2, 3)
    for stage in stages[:2]:
        stage["until_return"] = 5
        del stage["until_env_steps"]
    data = make_data(ENV_ID, actors={"start_method": "fork", "count": 1}, rollout_length=40, rollouts_per_epoch=8)
    model = IMPALA(data.observation_space, data.action_space)
    seen, curriculum = Seen(), Curriculum(stages, episodes=2)
    fit(curriculum, data, seen, model=model)
    lengths = [set(x[..., 1].flatten().tolist()) for x in seen.observations]
    assert 10 in lengths[1] and 2 in lengths[-1]
    assert curriculum.stage == 1


def test_environments_that_replace_failed_ones_keep_the_stage():
    class Fragile(Adjustable):
        def step(self, action):
            if self.steps == 2:
                raise ArithmeticError
            return super().step(action)

    env = RestartingEpisodes(Fragile)
    env.set_env_settings(({"length": 9}, {"level": 2}))
    env.reset(seed=0)
    observations = [env.step(0)[0].tolist() for _ in range(3)]
    assert observations == [[1, 9, 2], [2, 9, 2], [0, 9, 2]]


class TakesLevels(Adjustable):
    """Removes the last of its `levels`, or of those in the reset options, in each episode of one step."""

    levels = (0,)

    def reset(self, *, seed=None, options=None):
        levels = (options or {}).get("levels", self.levels)
        self.level = levels[0] if len(levels) == 1 else levels.pop()
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, _, _, info = super().step(action)
        return observation, float(self.level), True, False, info


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("kind", ["attributes", "reset_options"])
def test_environments_that_write_into_a_value_change_neither_other_environments_nor_episodes(
    backend, kind, monkeypatch
):
    monkeypatch.setitem(gymnasium.registry, "Levels-v0", EnvSpec("Levels-v0", TakesLevels))
    environments = make_environments(EnvironmentSpec("Levels-v0", backend=backend), 2, [0, 1])
    environments.reset()
    levels = {"levels": [1, 2, 3]}
    environments.set_env_settings((levels, {}) if kind == "attributes" else ({}, levels))
    rewards = [environments.step(np.zeros(2, np.int64)).rewards.tolist() for _ in range(3)]
    environments.close()
    assert rewards == [[0, 0], [3, 3], [3, 3]] and levels == {"levels": [1, 2, 3]}


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_value_that_changes_after_the_call_changes_no_environment(backend):
    environments = make_environments(EnvironmentSpec(ENV_ID, backend=backend), 1, [0])
    environments.set_env_settings(({}, options := {"level": 1}))
    environments.reset()
    options["level"] = 2
    assert environments.state_dict()["environments"][0]["settings"][1] == {"level": 1}
    assert environments.reset()[0].tolist() == [0, 5, 1]
    environments.close()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_settings_take_the_place_of_earlier_settings(backend):
    """Otherwise a resumed run, whose new environments have the last settings only, would go another way."""
    environments = make_batch(ENV_ID, backend=backend)
    for settings in (({"length": 9}, {"level": 2}), ({}, {})):
        environments.set_env_settings(settings)
        first = environments.reset().tolist()
    state = environments.state_dict()
    again = make_batch(ENV_ID, backend=backend)
    exact, _ = again.load_state_dict(state)
    environments.close()
    again.close()
    assert first == [[0, 5, 0]] and exact.all()


def test_settings_of_native_environments_take_the_place_of_earlier_settings():
    environments = make_batch("CartPole-v1", backend="native")
    lengths = []
    for attributes in ({"length": 0.3}, {"gravity": 1.0}, {}):
        environments.set_env_settings((attributes, {}))
        lengths.append((environments.env.unwrapped.length, environments.env.unwrapped.gravity))
    environments.close()
    assert lengths == [(0.3, 9.8), (0.5, 1.0), (0.5, 9.8)]


def test_workers_that_replace_lost_ones_keep_the_stage():
    seen = Seen()

    class Kill(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.datamodule._sampler._collector.environments.env.unwrapped.processes[1].kill()

    data = make_data(ENV_ID, backend="async", env={"on_failure": "restart"}, rollouts_per_epoch=2)
    with pytest.warns(UserWarning, match="was replaced"):
        fit(Curriculum(stages_of("length", 3, 4, every=1000)), data, seen, Kill())
    assert set(seen.observations[1][:, 1, 1].tolist()) == {3}


def test_stage_ends_once_the_mean_return_of_recent_episodes_is_reached():
    """An episode of length 3 returns between 1.5 and 3, one of length 6 between 3 and 6."""
    stages = [
        {"attributes": {"length": 3}, "until_return": 1.5},
        CurriculumStage({"length": 6}, until_return=6.1),
        CurriculumStage({"length": 9}),
    ]
    curriculum = Curriculum(stages, episodes=12)
    reached = []

    class Watch(Callback):
        def on_train_batch_end(self, *_):
            reached.append((curriculum.stage, len(curriculum._returns)))

    # A rollout has 5 episodes of each of the 2 environments in the first stage, 12 after the second rollout.
    fit(curriculum, make_data(ENV_ID, rollouts_per_epoch=5), Watch())
    assert [stage for stage, _ in reached] == [0, 1, 1, 1, 1]
    assert reached[0] == (0, 10) and reached[1] == (1, 0)


@pytest.mark.parametrize("num_envs", [2, 4])
def test_episodes_that_began_in_an_earlier_stage_do_not_end_the_next_one(num_envs):
    """Returns are 10 or more for episodes of length 20, and 9 or less for length 9; rollouts have 16 steps."""
    stages = stages_of("length", 20, 9, 3)
    for stage in stages[:2]:
        stage["until_return"] = 10
        del stage["until_env_steps"]
    curriculum, reached = Curriculum(stages, episodes=2), []

    class Watch(Callback):
        def on_train_batch_end(self, *_):
            reached.append(curriculum.stage)

    # The second stage begins with the third rollout, in which the second episodes end.
    fit(curriculum, make_data(ENV_ID, num_envs=num_envs, rollouts_per_epoch=5), Watch())
    assert reached == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("env_id", "options", "name", "values"),
    [
        ("CartPole-v1", {}, "length", (0.4, 0.2, 0.1)),
        (ENV_ID, {}, "length", (30, 50, 7)),
        ("CartPole-v1", {"backend": "native"}, "length", (0.4, 0.2, 0.1)),
        (torch_environments.ID, {"backend": "torch"}, "limit", (30, 50, 7)),
        ("CartPole-v1", {"backend": "async"}, "length", (0.4, 0.2, 0.1)),
    ],
)
def test_resumed_run_is_equal_bit_for_bit(env_id, options, name, values, tmp_path):
    """The checkpoint is made right after a change, when unfinished episodes have the values of the stage before."""

    def run(rollouts, ckpt_path=None):
        data = make_data(env_id, rollouts_per_epoch=1, **options)
        model, seen = make_model(data), Seen()
        curriculum = Curriculum(stages_of(name, *values, every=64))
        trainer = make_trainer(max_epochs=rollouts, callbacks=[curriculum, seen])
        trainer.fit(model, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{rollouts}.ckpt")
        return model, seen.observations, curriculum

    whole, observations, _ = run(6)
    run(2)
    resumed, rest, curriculum = run(6, tmp_path / "2.ckpt")
    assert all(map(torch.equal, observations[2:], rest))
    assert_equal_parameters(resumed, parameters_of(whole))
    assert curriculum.stage == 2


def test_callback_of_an_earlier_run_starts_anew_or_where_the_checkpoint_is(tmp_path):
    curriculum, seen = Curriculum(stages_of("length", 3, 10)), Seen()
    data = make_data(ENV_ID, rollouts_per_epoch=2)
    fit(curriculum, data, seen)
    fit(curriculum, make_data(ENV_ID, rollouts_per_epoch=2), seen)
    assert torch.equal(seen.observations[2], seen.observations[0])
    state = curriculum.state_dict()
    curriculum.load_state_dict(state)
    assert curriculum.state_dict() == state and state["returns"]


def test_evaluation_environments_do_not_change():
    data = make_data(ENV_ID, rollouts_per_epoch=1, evaluation={"episodes": 2})
    model = fit(Curriculum(stages_of("length", 3, 4, every=1000)), data)
    (metrics,) = make_trainer(limit_val_batches=1.0).validate(model, data, verbose=False)
    assert metrics["val/episode_length"] == 5


VALID = {"attributes": {"length": 3}, "until_return": 1}
INVALID = [
    ([VALID], {}, "expected a list of at least two stages"),
    ([VALID, VALID], {}, "stages[1]=CurriculumStage("),
    ([{"attributes": {"length": 1}}, {"attributes": {"length": 2}}], {}, "but in the last stage neither"),
    ([VALID, {"attributes": {"width": 3}}], {}, "stages[1].attributes=['width'] is not valid: expected ['length']"),
    (stages_of("length", 1, 2, 3, every=-1), {}, "stages[0].until_env_steps=-1 is not valid"),
    (
        [{**VALID, "until_env_steps": 5}, {**VALID, "until_env_steps": 5}, {"attributes": {"length": 1}}],
        {},
        "increasing",
    ),
    ([{**VALID, "until_return": "a"}, {"attributes": {"length": 1}}], {}, "stages[0].until_return='a' is not valid"),
    (stages_of("length", 1, 2), {"episodes": 0}, "episodes=0 is not valid"),
    ([{**VALID, "until_retrun": 1}, VALID], {}, "stages[0].until_retrun=1 is no option; did you mean until_return"),
    ([VALID, 3], {}, "stages[1]=3 is not valid: expected CurriculumStage(...) or a dict of its options"),
]


@pytest.mark.parametrize(("stages", "options", "message"), INVALID)
def test_invalid_stages_are_refused(stages, options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Curriculum(stages, **options)


@pytest.mark.parametrize("options", [{}, {"backend": "async"}, {"backend": "native"}])
def test_unknown_attribute_is_refused_before_the_first_rollout(options):
    data, seen = make_data("CartPole-v1", **options), Seen()
    with pytest.raises(ConfigurationError, match=r"attributes=\['lenght'\] is not valid: expected attributes of"):
        fit(Curriculum(stages_of("lenght", 1, 2)), data, seen)
    assert not seen.observations


def test_a_loader_in_place_of_the_data_module_is_refused():
    data = make_data()
    message = r"^datamodule='NoneType' is not valid: expected a RolloutDataModule$"
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(callbacks=[Curriculum(stages_of("length", 0.5, 0.1))]).fit(
            make_model(data), data.train_dataloader()
        )


def test_reset_options_need_environments_that_are_reset_one_by_one():
    data = make_data("CartPole-v1", backend="native")
    with pytest.raises(ConfigurationError, match="reset_options="):
        fit(Curriculum(stages_of("length", 1, 2, reset_options={"low": 0})), data)


def test_value_that_the_environment_rejects_names_the_environment():
    class Strict(Adjustable):
        @property
        def width(self):
            return 1

    gymnasium.register(strict := "lightning_rl_tests/Strict-v0", Strict)
    with pytest.raises(EnvironmentFailure, match=r"environment 0 \(episode 0, .*raised in reset: AttributeError"):
        fit(Curriculum(stages_of("width", 1, 2)), make_data(strict))


def test_data_module_must_have_environments():
    model, curriculum = make_model(make_data()), Curriculum(stages_of("length", 1, 2))
    with pytest.raises(ConfigurationError, match="a RolloutDataModule"):
        Trainer(callbacks=[curriculum], logger=False, enable_checkpointing=False).fit(model, [0])


def test_configuration_has_stages(in_tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-rl"])
    Path("curriculum.yaml").write_text(
        """
        max_env_steps: 64
        data: {env_id: CartPole-v1, num_envs: 2, rollout_length: 16, evaluation: {episodes: 1}}
        model: {class_path: PPO}
        trainer:
          accelerator: cpu
          callbacks:
            - class_path: Curriculum
              init_args:
                episodes: 5
                stages:
                  - {attributes: {length: 0.5}, until_return: 400, until_env_steps: 32}
                  - {attributes: {length: 0.25}}
        """
    )
    cli = main(["fit", "--config", "curriculum.yaml"])
    (curriculum,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, Curriculum))
    assert curriculum.stages == [CurriculumStage({"length": 0.5}, {}, 400, 32), CurriculumStage({"length": 0.25})]
    assert curriculum.stage == 1


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_numpy_values_of_stages_are_stored_and_resumed(backend, tmp_path):
    stages = stages_of("length", *np.array([3, 40]))
    for number, stage in enumerate(stages):
        stage["reset_options"] = {"level": np.float32(0.1), "map": np.full((2, 2), number)}

    def train(max_epochs, seen, **options):
        data = make_data(ENV_ID, backend=backend)
        model = make_model(data)
        trainer = make_trainer(max_epochs=max_epochs, callbacks=[Curriculum(stages), seen])
        trainer.fit(model, data, **options)
        return trainer, model

    whole, first, rest = Seen(), Seen(), Seen()
    _, expected = train(2, whole)
    trainer, _ = train(1, first)
    trainer.save_checkpoint(tmp_path / "ckpt")
    torch.load(tmp_path / "ckpt", weights_only=True)
    _, resumed = train(2, rest, ckpt_path=tmp_path / "ckpt")
    assert_equal_parameters(resumed, parameters_of(expected))
    assert all(map(torch.equal, whole.observations, first.observations + rest.observations))


def test_values_of_stages_that_a_checkpoint_cannot_hold_are_refused():
    for values in ({"attributes": {"length": slice(3)}}, {"reset_options": {"level": slice(3)}}):
        (field,) = values
        stages = [{"until_env_steps": 9}, {**values}]
        if field == "attributes":
            stages[0]["attributes"] = {"length": 3}
        message = rf"^stages\[1\]\.{field}\.\w+=slice\(None, 3, None\) is not valid: expected numbers, strings"
        with pytest.raises(ConfigurationError, match=message):
            Curriculum(stages)


def test_settings_that_a_checkpoint_cannot_hold_are_refused_when_they_are_set():
    data = make_data(ENV_ID)
    data.set_env_settings({"length": slice(3)})
    with pytest.raises(ConfigurationError, match=r"^env_settings\.length=slice"):
        make_trainer().fit(make_model(data), data)


def test_environments_that_refuse_a_setting_are_closed(monkeypatch):
    data, closed = make_data(ENV_ID, num_envs=2), []
    model = make_model(data)
    monkeypatch.setattr(Adjustable, "close", lambda env: closed.append(env))
    data.set_env_settings({"width": 3})
    with pytest.raises(ConfigurationError, match=r"attributes=\['width'\] is not valid"):
        make_trainer().fit(model, data)
    assert len({*closed}) == 2
