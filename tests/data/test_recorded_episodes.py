"""Recorded episodes: saving, loading, behavior cloning, and critic pretraining and PPO after it."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import PPO, BehaviourCloning, CriticPretraining, RecordedEpisodes, load_episodes, save_episodes
from lightning_rl.cli.main import main
from lightning_rl.data.recorded_episodes import _actions_of_space, _check_observations, write_minari
from lightning_rl.masks import ActionMask
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.interface import from_environment, to_environment
from lightning_rl.rollouts.rollout import Episode
from lightning_rl.validation import ConfigurationError, ExplainedError
from tests.helpers import PIXELS, Recorder, full_disk, make_data, make_trainer, parameters_of

ROOT = Path(__file__).parents[2]
AIM: dict[str, Any] = {"env": {"kwargs": {"action_space": {"type": "Discrete", "n": 3, "start": 5}}}}
SMALL: dict[str, Any] = {"num_envs": 8, "rollout_length": 16, "seed": 1, "evaluation": {"episodes": 4}}


def expert(num_episodes: int = 10) -> list[Episode]:
    """Episodes that always reach the goal: goal -1 by action 5, goal 1 by action 7."""
    generator, episodes = np.random.default_rng(0), []
    for _ in range(num_episodes):
        goals = 2 * generator.integers(2, size=(9, 1)) - 1
        episode = Episode(episode_return=8.0, length=8, terminated=False)
        episode.observations, episode.rewards = goals.astype(np.float32), np.ones(8)
        episode.actions = np.where(goals[:-1, 0] > 0, 7, 5)
        episodes.append(episode)
    return episodes


def recorded(episodes: Any = None, **options: Any) -> RecordedEpisodes:
    return RecordedEpisodes(
        "tests.probes:Probe/Aim-v0", expert() if episodes is None else episodes, **AIM | SMALL | options
    )


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([[3, 2], [4, 2]], start=[[1, 0], [0, -3]]),
        spaces.MultiBinary((2, 2)),
        spaces.Box(-2, 2, (2, 3), np.float32),
        spaces.Box(-2, 5, (3,), np.int8),
        spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float64)])}),
    ],
)
def test_environment_actions_convert_back_to_policy_actions(space):
    space.seed(0)
    samples = [space.sample() for _ in range(6)]
    batch = map_leaves(lambda *xs: np.stack(xs), *samples)
    there = to_environment(space, from_environment(space, batch))
    for own, theirs in zip(leaves(there), leaves(batch), strict=True):
        np.testing.assert_array_equal(own, theirs)


def test_batch_has_recorded_steps_with_policy_actions():
    data = recorded()
    model = BehaviourCloning(data.observation_space, data.action_space, policy={"hidden_sizes": (4,)})
    batches: list[Any] = []

    class Keep(Recorder):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batches.append(batch)

    make_trainer(callbacks=[Keep()], limit_train_batches=2).fit(model, data)
    for batch in batches:
        assert batch.shape == (16, 8) and batch.rewards.eq(1).all()
        assert torch.equal(batch.actions, torch.where(batch.observations[:-1, ..., 0] > 0, 2, 0).unsqueeze(-1)[..., 0])
    assert not torch.equal(batches[0].observations, batches[1].observations)


def test_recorded_steps_and_rollouts_are_not_taken_for_each_other():
    steps, rollouts = recorded(), make_data("tests.probes:Probe/Aim-v0", **AIM | SMALL)
    expected = {
        PPO: (steps, "RecordedEpisodes", "RolloutDataModule"),
        BehaviourCloning: (rollouts, "RolloutDataModule", "RecordedEpisodes"),
    }
    for algorithm, (data, given, needed) in expected.items():
        model = algorithm(data.observation_space, data.action_space)
        with pytest.raises(ConfigurationError, match=f"^data='{given}' is not valid: expected {needed}, "):
            make_trainer().fit(model, data)


def test_cloning_trains_only_the_actor_and_critic_pretraining_keeps_its_return(tmp_path):
    data = recorded(rollouts_per_epoch=40)
    torch.manual_seed(0)
    options: dict[str, Any] = {"policy": {"hidden_sizes": (16,)}, "learning_rate": 1e-2}
    cloned = BehaviourCloning(data.observation_space, data.action_space, **options)
    before = parameters_of(cloned)
    trainer, recorder = make_trainer(limit_val_batches=1), Recorder()
    trainer.callbacks.append(recorder)
    trainer.fit(cloned, data)
    assert trainer.callback_metrics["val/episode_return"] == 8
    losses = recorder.column("cloning_loss")
    assert losses[0] == pytest.approx(np.log(3), rel=0.2) and losses[-1] < 0.05
    for name, parameter in parameters_of(cloned).items():
        of_critic = name.startswith(("policy.critic_", "policy.value_"))
        assert torch.equal(parameter, before[name]) == of_critic, name
    trainer.save_checkpoint(tmp_path / "cloned.ckpt")

    played = make_data("tests.probes:Probe/Aim-v0", **AIM | SMALL, rollouts_per_epoch=20)
    critic = CriticPretraining(played.observation_space, played.action_space, gamma=0.5, **options)
    critic.init_from(tmp_path / "cloned.ckpt")
    trainer = make_trainer()
    trainer.fit(critic, played)
    trainer.save_checkpoint(tmp_path / "critic.ckpt")

    first_losses = {}
    for name in ("cloned", "critic"):
        model = PPO(played.observation_space, played.action_space, gamma=0.5, **options)
        model.init_from(tmp_path / f"{name}.ckpt")
        recorder, trainer = Recorder(), make_trainer(limit_val_batches=1, limit_train_batches=3)
        trainer.callbacks.append(recorder)
        trainer.fit(model, played)
        assert trainer.callback_metrics["val/episode_return"] == 8
        first_losses[name] = recorder.column("value_loss")[0]
    assert first_losses["critic"] < 0.1 * first_losses["cloned"]


def test_cloning_from_the_command_line(in_tmp_path, monkeypatch):
    """The shipped configurations for cloning, critic pretraining and PPO, shortened, work in sequence."""
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    played = make_data("CartPole-v1", evaluation={"episodes": 2})
    untrained = PPO(played.observation_space, played.action_space)
    save_episodes([e for batch in make_trainer().predict(untrained, played) for e in batch], "episodes.pt")
    small = ["--max_env_steps=64", "--data.num_envs=4", "--data.rollout_length=8", "--data.evaluation.episodes=1"]
    small += ["--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false", "--model.num_epochs=1"]

    def fit(algorithm: str, *arguments: str) -> dict[str, torch.Tensor]:
        cli = main(["fit", "--config", str(ROOT / f"configs/{algorithm}/cartpole.yaml"), *small, *arguments])
        assert cli.model.env_steps == 64
        return parameters_of(cli.model)

    cloned = fit("behaviour_cloning", "--data.episodes=episodes.pt")
    last = "runs/{}/CartPole-v1/version_0/checkpoints/last.ckpt"
    with_values = fit("critic_pretraining", "--init_from", last.format("behaviourcloning"))
    learned = fit("ppo", "--init_from", last.format("criticpretraining"), "--model.learning_rate=1e-30")
    for name, parameter in with_values.items():
        of_critic = name.startswith(("policy.critic_", "policy.value_"))
        assert torch.equal(parameter, cloned[name]) != of_critic, name
        assert torch.equal(parameter, learned[name])


def test_full_disk_is_named_and_keeps_the_earlier_episodes(tmp_path, monkeypatch):
    save_episodes(expert(1), path := tmp_path / "episodes.pt")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ExplainedError, match=r"episodes\.pt' could not be written: No space left on device"):
        save_episodes(expert(1), path)
    assert len(load_episodes(path)) == 1 and list(tmp_path.iterdir()) == [path]


def test_predicted_episodes_can_be_saved_and_learned_from(tmp_path):
    played = make_data("tests.probes:Probe/Aim-v0", **AIM | SMALL)
    model = PPO(played.observation_space, played.action_space, policy={"hidden_sizes": (4,)})
    episodes = [e for batch in make_trainer().predict(model, played) for e in batch]
    save_episodes(episodes, tmp_path / "episodes.pt")
    found = load_episodes(tmp_path / "episodes.pt")
    assert [e.episode_return for e in found] == [e.episode_return for e in episodes]
    for own, theirs in zip(found, episodes, strict=True):
        np.testing.assert_array_equal(own.actions, theirs.actions)
        np.testing.assert_array_equal(own.observations, theirs.observations)
    one, other = recorded(tmp_path / "episodes.pt"), recorded(episodes)
    assert all(np.array_equal(one._steps[name], other._steps[name]) for name in one._steps)


def test_loggers_get_the_source_of_the_episodes(tmp_path):
    save_episodes(expert(2), path := tmp_path / "episodes.pt")
    found = [recorded(episodes).hparams_initial["data"]["episodes"] for episodes in (path, str(path), expert(2))]
    assert found == [str(path), str(path), "2 episodes"]


@pytest.mark.parametrize("kind", ["BetaHead", "SquashedGaussianHead"])
def test_cloning_refuses_bounded_heads_by_their_class_too(kind):
    head = {"class_path": f"lightning_rl.policies.distributions.continuous.{kind}"}
    box = spaces.Box(0, 10, (1,))
    with pytest.raises(ConfigurationError, match=r"policy.action_distribution=.* in the units of the space"):
        BehaviourCloning(box, box, policy={"action_distribution": head})
    BehaviourCloning(box, spaces.Dict(beta=box), policy={"action_distribution": {"beta": "gaussian"}})


def test_resumed_run_draws_the_same_steps(tmp_path):
    def learn(epochs: int, ckpt_path: Any = None) -> dict[str, torch.Tensor]:
        data = recorded(rollouts_per_epoch=3)
        torch.manual_seed(0)
        model = BehaviourCloning(
            data.observation_space,
            data.action_space,
            policy={"hidden_sizes": (4,)},
            normalization={"observations": True},
        )
        trainer = make_trainer(max_epochs=epochs)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return parameters_of(model)

    whole = learn(2)
    learn(1)
    resumed = learn(2, tmp_path / "1.ckpt")
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())


def test_minari_data_sets_are_read_by_their_id(monkeypatch):
    found = [
        types.SimpleNamespace(
            observations=e.observations,
            actions=e.actions,
            rewards=e.rewards,
            terminations=np.zeros(8, bool),
            truncations=np.arange(8) == 7,
        )
        for e in expert(3)
    ]
    fake: Any = types.ModuleType("minari")
    fake.__spec__ = importlib.machinery.ModuleSpec("minari", None)
    fake.load_dataset = lambda name: (
        types.SimpleNamespace(iterate_episodes=lambda: iter(found)) if name == "aim" else 1 / 0
    )
    monkeypatch.setitem(sys.modules, "minari", fake)
    data = recorded("minari:aim")
    assert data._steps["actions"].shape == (24,) and set(data._steps["actions"]) == {0, 2}
    with pytest.raises(ConfigurationError, match=r"minari:other' cannot be loaded: .* 'minari download <id>'"):
        recorded("minari:other")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigurationError, match="needs minari, which is not installed: pip install 'lightning-rl"):
        recorded("minari:aim")


def test_damaged_minari_data_set_is_named(tmp_path):
    space_pair = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(3, start=5)
    name = write_minari(expert(3), tmp_path, "Aim-v0/expert", space_pair, "Aim-v0", "expert")
    path = tmp_path / name / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigurationError, match=r"minari:.*expert-v0' cannot be loaded: expected .*truncated file"):
        load_episodes(f"minari:{tmp_path / name}")


def test_episodes_must_fit_the_spaces(tmp_path):
    bare = [Episode(episode_return=1.0, length=3, terminated=True)]
    with pytest.raises(ConfigurationError, match="episodes='1 episodes'"):
        recorded(bare)
    with pytest.raises(ConfigurationError, match=r"none\.pt' does not exist: expected a file that save_episodes"):
        recorded(tmp_path / "none.pt")
    with pytest.raises(ConfigurationError, match=r"is a folder: .*, or 'minari:' and the id or folder"):
        recorded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": np.zeros((9, 4), np.float32)}, r"episodes: observations=.* expected observations in Box\(-1"),
        ({"actions": np.full(8, 8)}, r"episodes: actions=array.* expected integers in Discrete\(3, start=5\)"),
        ({"actions": np.full(8, 4)}, "expected integers in Discrete"),
        ({"actions": np.full(8, 6.5)}, "expected integers in Discrete"),
        ({"actions": np.eye(8, 3, dtype=int) + 5}, r"integers in Discrete\(3, start=5\), one action per step"),
        (
            {"observations": np.full((9, 1), np.nan)},
            "episodes: step 0 returned observation .* expected a finite",
        ),
        ({"rewards": None}, "episodes='1 episodes' .* observations, actions, rewards"),
        ({"rewards": np.ones(9)}, r"episodes\[0\]: lengths=.* expected 9 actions, as many as rewards"),
        ({"actions": np.full(7, 5)}, r"episodes\[0\]: lengths=.* expected 8 actions"),
        (
            {"rewards": np.ones((8, 2))},
            r"episodes\[0\]: lengths=.* as many as rewards, each a number",
        ),
        (
            {"observations": np.ones((1, 1)), "actions": np.ones(0, int), "rewards": np.ones(0)},
            "episodes='1 episodes' is not valid: expected recorded episodes of at least one step",
        ),
    ],
)
def test_parts_of_an_episode_must_fit_the_spaces_and_each_other(changes, message):
    episodes = expert(1)
    vars(episodes[0]).update(changes)
    with pytest.raises(ConfigurationError, match=message):
        recorded(episodes)


def test_recorded_actions_must_be_allowed_by_their_masks():
    """Also by masks that depend on the choice of another component; the cloning loss would be a billion."""
    masks = spaces.Dict(a=ActionMask([2, 3], given="b"), b=ActionMask(2))
    kwargs = {
        "observation_space": spaces.Dict(x=spaces.Box(-1, 1, (1,)), mask=masks),
        "action_space": spaces.Dict(a=spaces.Discrete(3, start=5), b=spaces.Discrete(2), c=spaces.Box(-1, 1, (1,))),
    }

    def clone(a: int, b: int) -> RecordedEpisodes:
        given = {"a": np.tile([[1, 1, 0], [0, 0, 1]], (3, 1, 1)), "b": np.ones((3, 2))}
        given["a"][2] = given["b"][2] = 0  # the last observation needs no mask
        episode = Episode(episode_return=0.0, length=2, terminated=True, rewards=np.zeros(2))
        episode.observations = {"x": np.zeros((3, 1)), "mask": given}
        episode.actions = {"a": np.full(2, a), "b": np.full(2, b), "c": np.zeros((2, 1))}
        return RecordedEpisodes("tests.probes:Probe/Space-v0", [episode], env={"kwargs": kwargs})

    for a, b in ((5, 0), (6, 0), (7, 1)):
        assert clone(a, b)._steps["actions"]["a"].tolist() == [a - 5, a - 5]
    for a, b in ((7, 0), (5, 1)):
        with pytest.raises(ConfigurationError, match=r"episodes: actions a='forbidden in 2 steps' .* mask"):
            clone(a, b)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), 0.5, r"observations x=array.* numbers that are exact in uint8"),
        (spaces.Box(0, 255, (2,), np.uint8), 256, r"observations x=array.* numbers that are exact in uint8"),
        (spaces.Discrete(3, start=2), 5, r"step 4 .* observation x 5: .* element of Discrete\(3, start=2\)"),
        (spaces.MultiDiscrete([3, 4]), 3, r"step 4 .* observation x \[3 3\]: .* element of MultiDiscrete\(\[3 4\]\)"),
        (spaces.MultiBinary(2), -1, r"step 4 .* observation x \[-1 -1\]: .* element of MultiBinary\(2\)"),
    ],
)
def test_every_observation_must_be_in_the_space(space, value, expected):
    """Not only the first one."""
    given = {"x": np.full((9, *space.shape), 1.0 if isinstance(space, spaces.MultiBinary) else 2.0)}
    given["x"][4] = value
    converted = map_leaves(lambda x: x.astype(space.dtype), given)
    with pytest.raises(ConfigurationError, match=f"^episodes: {expected}"):
        _check_observations(spaces.Dict(x=space), given, converted)


@pytest.mark.parametrize(
    ("space", "shapes", "others"),
    [
        (spaces.Box(-1, 1, (3,)), [(3,)], [(), (1,), (2,), (3, 1)]),
        (spaces.Box(-1, 1, (2, 3)), [(2, 3), (6,)], [(3, 2), (3,)]),
        (spaces.Box(-1, 1, (1,)), [(1,), ()], [(2,)]),
        (spaces.MultiDiscrete([2, 2]), [(2,)], [(1,)]),
        (spaces.MultiBinary(3), [(3,)], [(), (1,)]),
    ],
)
def test_actions_of_another_shape_are_refused(space, shapes, others):
    """They would be broadcast to the distribution, and clone other actions."""
    for shape in shapes:
        assert _actions_of_space(space, np.ones((8, *shape), space.dtype)).shape == (8, np.prod(space.shape))
    for shape in others:
        with pytest.raises(ConfigurationError, match=r"(?s)^episodes: actions=.* one action per step"):
            _actions_of_space(space, np.ones((8, *shape), space.dtype))


def test_saturation_of_recorded_actions_follows_the_names_of_parts():
    """The space lists them in another order than the policy, which sorts them."""
    space = spaces.Dict([("b", spaces.Box(-9, 9, (1,))), ("a", spaces.Box(-1, 1, (2,)))])
    model = BehaviourCloning(spaces.Box(-1, 1, (1,)), space)
    actions = {"b": torch.tensor([[5.0]]), "a": torch.tensor([[0.5, 0.5]])}
    assert not model.policy.action_head.clipped(actions).any()


def test_a_file_of_other_content_is_one_error(tmp_path):
    torch.save({"episodes": [{"observations": torch.zeros(3)}]}, tmp_path / "x.pt")
    with pytest.raises(ConfigurationError, match=r"x\.pt' is not valid: expected a file that save_episodes wrote"):
        recorded(tmp_path / "x.pt")


def test_cloning_weighs_steps():
    class Weighted(BehaviourCloning):
        def step_weights(self, rollout):
            return torch.where(rollout.actions == 2, 3.0, 0.0) + (rollout.observations[:-1, :, 0] < 0) * rollout.place

    data = recorded(rollouts_per_epoch=1)
    model, kept = Weighted(data.observation_space, data.action_space, num_minibatches=1), []

    def keep(rollout, _):
        rollout.place = torch.arange(16.0).unsqueeze(1).expand(16, 8) % 2
        distribution, _ = model.policy(rollout.observations[:-1].flatten(0, 1))
        losses, weights = -distribution.log_prob(rollout.actions.flatten()), model.step_weights(rollout).flatten()
        kept.append(float((losses * weights).sum() / weights.sum()))

    model.on_train_batch_start = keep
    make_trainer(limit_val_batches=0).fit(model, data)
    assert model.losses["cloning_loss"] == pytest.approx(kept[0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("policy.memory", {"policy": {"memory": "lstm"}}),
        ("gamma", {"gamma": 0.5}),
        ("policy.action_distribution", {"policy": {"action_distribution": "beta"}}),
        ("num_epochs", {"num_epochs": 0}),
        ("optimizer.l2.value", {"optimizer": {"l2": {"value": 0.1}}}),
    ],
)
def test_options_that_have_no_meaning_are_refused(name, options):
    data = recorded()
    space = data.action_space if name != "policy.action_distribution" else spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(ConfigurationError, match=name):
        BehaviourCloning(data.observation_space, space, **options)


def test_keys_of_info_are_logged_of_evaluation_only_since_recorded_episodes_have_none():
    played = make_data("tests.probes:Probe/Counter-v0")
    (episodes,) = make_trainer().predict(PPO(played.observation_space, played.action_space), played)
    data = RecordedEpisodes("tests.probes:Probe/Counter-v0", episodes, **SMALL, info_keys=["level", "score"])
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(BehaviourCloning(data.observation_space, data.action_space), data)
    logged = trainer.callback_metrics
    assert logged["val/score"] == logged["val/score_last"] == 5 and logged["val/level"] == logged["val/level_last"] - 2
    assert not any(name.startswith("rollout/") for name in logged)


@pytest.mark.parametrize("step", [0, 3])
def test_observations_outside_of_their_bounds_are_read_with_a_warning(step):
    """As environments, which may return them."""
    episodes = expert(1)
    episodes[0].observations[step] = 1.25
    with pytest.warns(UserWarning, match=r"episodes: observations=1\.25 lies outside of the space: .* Box\(-1"):
        assert recorded(episodes)._steps["observations"][step] == 1.25


@pytest.mark.filterwarnings("error:.*Casting input x")
def test_observations_are_copied_once():
    episode = Episode(episode_return=0.0, length=20_000, terminated=True, rewards=np.zeros(20_000))
    episode.observations, episode.actions = np.zeros((20_001, 7, 7, 3), np.uint8), np.zeros(20_000, np.int64)
    tracemalloc.start()
    try:
        RecordedEpisodes(PIXELS, [episode])
        # One copy of the observations, a flag for each of their numbers, actions and rewards.
        assert tracemalloc.get_traced_memory()[1] < 2.5 * episode.observations.nbytes
    finally:
        tracemalloc.stop()


def test_episodes_with_scalar_observations_are_read_without_a_warning():
    seen = {"observations": np.zeros(2, np.float32), "actions": np.zeros(1, int), "rewards": np.ones(1)}
    episode = Episode(episode_return=1.0, length=1, terminated=True, **seen)
    scalar = {"observation_space": spaces.Box(-1, 1, (), np.float32)}
    data = RecordedEpisodes("tests.probes:Probe/Space-v0", episodes=[episode], env={"kwargs": scalar})
    assert data.observation_space.shape == ()
