"""Repeated actions: rewards, discounts, frames and ends by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from lightning_rl import A2C, CLEAR, IMPALA, PPG, PPO
from lightning_rl.environments import EnvConfig, EnvironmentBatch, EnvironmentSpec
from lightning_rl.environments.wrappers.action_repeat import REPEATED, LearnedActionRepeat
from lightning_rl.policies.actor_critic import PolicyOutput
from lightning_rl.validation import ConfigurationError
from tests.environments.test_atari_lives import whole_game
from tests.helpers import MemoryLogger, Recorder, make_data, make_trainer
from tests.probes import Counter, Told, make_batch, make_collector
from tests.vectors.load import load

COUNTER = "Probe/Counter-v0"


class Repeating(Told):
    """Action 1, repeated 2, 3, 1, 2, 3, 1 … times (the policy counts from 0)."""

    def act(self, observations: Tensor, generator: Any = None, deterministic: bool = False) -> PolicyOutput:
        self.seen.append(observations.clone())
        repeat = (1, 2, 0)[(len(self.seen) - 1) % 3]
        ones = torch.ones(observations.shape[0], dtype=torch.long)
        return PolicyOutput({"action": ones, "repeat": repeat * ones})

    def log_prob(self, observations: Tensor, actions: Any) -> Tensor:
        return torch.zeros(observations.shape[:-1])


@pytest.mark.parametrize(
    ("mode", "backend"),
    [(AutoresetMode.SAME_STEP, "sync"), (AutoresetMode.DISABLED, "sync"), (AutoresetMode.SAME_STEP, "async")],
)
def test_rewards_repeats_discounts_and_frames_by_hand(mode, backend):
    """Episodes of 5 and 4 frames: steps of 2 and 3 frames, then of 1, 2 and 1 instead of 3."""
    scripted = {"lengths": (5, 4), "ends": ("truncated", "terminated")}
    env = {"learned_action_repeat": {"max": 3, "gamma": 0.5}}
    environments = make_batch(COUNTER, mode=mode, backend=backend, env=env, **scripted)
    rollout = make_collector(environments, 6).collect(Repeating())
    environments.close()
    # Rewards are 1 to 5 in the first episode, 101 to 104 in the second, 201 and so on in the third.
    expected = [1 + 0.5 * 2, 3 + 0.5 * 4 + 0.25 * 5, 101, 102 + 0.5 * 103, 104, 201]
    assert rollout.rewards[:, 0].tolist() == expected
    assert rollout.repeats[:, 0].tolist() == [2, 3, 1, 2, 1, 1]
    assert rollout.truncated[:, 0].tolist() == [False, True, False, False, False, False]
    assert rollout.terminated[:, 0].tolist() == [False, False, False, False, True, False]
    assert rollout.discounts(0.5)[:, 0].tolist() == [0.25, 0.125, 0.5, 0.25, 0, 0.5]
    assert rollout.discounts(0.5, "terminal")[:, 0].tolist() == [0.25, 0, 0.5, 0.25, 0, 0.5]
    assert rollout.frames == 10 and rollout.num_steps == 6


def test_previous_reward_in_evaluation_is_the_training_reward_of_all_repeats():
    env = {"learned_action_repeat": {"max": 3, "gamma": 0.5}, "previous_reward": True, "reward_scale": 0.25}
    actions = {"action": np.ones(1, np.int64), "repeat": np.full(1, 3)}
    earned, shown = [], []
    for evaluation in (False, True):
        batch = make_batch(COUNTER, env=env, evaluation=evaluation, lengths=(9,))
        batch.reset()
        step = batch.step(actions)
        shown.append(step.observations["previous_reward"].item())
        earned.append(step.rewards.item())
        batch.close()
    as_learned = 0.25 * (1 + 0.5 * 2 + 0.25 * 3)
    assert shown == [as_learned, as_learned] and earned == [as_learned, 1 + 2 + 3]


def test_repeats_in_evaluation_end_with_a_life_and_show_clipped_rewards():
    game = whole_game((3, 3), (0, 3), (5, 2), (9, 2), (-2, 2), (7, 0))
    game.action_space, game.observation_space = spaces.Discrete(2), spaces.Box(0, 9, (1,))
    repeating = LearnedActionRepeat(game, 4, 0.5, evaluation=True, clips=np.sign)
    options = EnvConfig(previous_reward=True, learned_action_repeat={"max": 4, "gamma": 0.5})
    spec = EnvironmentSpec("ALE/Pong-v5", options, evaluation=True)
    vector = SyncVectorEnv([lambda: repeating])
    batch = EnvironmentBatch(vector, [0], [0], spec.histories(vector, np.sign))
    batch.reset()
    action = {"action": np.array([1]), "repeat": np.array([4])}
    observation, reward, terminated, *_, info, _, _, _ = batch.step(action)
    # The third step loses a life, and the no-op after it scores.
    assert (info[REPEATED]["repeats"], terminated, observation["previous_reward"].item()) == (3, False, 0)
    assert reward == 3 + 0 + 5 + 9
    observation, reward, terminated, *_, info, _, _, _ = batch.step(action)
    assert (info[REPEATED]["repeats"], terminated, observation["previous_reward"].item()) == (2, True, -1 + 0.5)
    assert reward == -2 + 7


def test_repeats_stop_at_the_end_of_an_episode():
    env = LearnedActionRepeat(Counter((5,), reward=1.0), 4)
    assert env.action_space == spaces.Dict({"action": spaces.Discrete(3), "repeat": spaces.Discrete(4, start=1)})
    env.reset()
    _, reward, _, truncated, info = env.step({"action": 0, "repeat": 4})
    assert (reward, truncated, info[REPEATED]) == (4.0, False, {"frames": 4, "repeats": 4})
    _, reward, _, truncated, info = env.step({"action": 0, "repeat": 4})
    assert (reward, truncated, info[REPEATED]) == (1.0, True, {"frames": 1, "repeats": 1})


def test_repeats_and_frames_of_environments_that_end_at_different_steps():
    """One of the two environments ends an episode in each of these steps, and has its `info` in `final_info`."""
    environments = make_batch(COUNTER, 2, env={"learned_action_repeat": 3}, lengths=(3,), reward=1.0)
    environments.reset()
    given = [(3, 1), (1, 3), (2, 1)]
    steps = [environments.step({"action": np.ones(2, np.int64), "repeat": np.array(times)}) for times in given]
    environments.close()
    assert [step.repeats.tolist() for step in steps] == [[3, 1], [1, 2], [2, 1]]
    assert [step.frames for step in steps] == [4, 3, 3]


def test_fixed_and_learned_repeats_multiply():
    """Repeated steps of two frames; the episode of five frames ends in the middle of a step."""
    environments = make_batch(COUNTER, env={"learned_action_repeat": 3, "action_repeat": 2}, lengths=(5,), reward=1.0)
    rollout = make_collector(environments, 2).collect(Repeating())
    environments.close()
    assert rollout.repeats[:, 0].tolist() == [2, 1] and rollout.rewards[:, 0].tolist() == [4, 1]
    assert rollout.frames == 5


def test_frame_count_matches_the_reference_with_a_fixed_repeat():
    """The reference counts all repeats of its unrolls; here most end with an episode, and do not run."""
    reference = load("ppg_vtrace/seed_learner_tf")["learner"]["fixed_step_mul"]
    given = reference["kwargs"]
    length, num_envs = given["unroll_length"], given["batch_size"] - given["batch_size_from_replay"]
    frames = {}
    for count in ("simulated", "nominal"):
        env = {"action_repeat": given["step_mul"], "frame_count": count}
        environments = make_batch(COUNTER, num_envs, env=env, lengths=(5, 9), start=1)
        frames[count] = make_collector(environments, length).collect(Told(torch.zeros(1, dtype=torch.long))).frames
        environments.close()
    assert frames["nominal"] == reference["frames_added"] == 96
    assert frames["simulated"] == num_envs * (5 + (8 + 1) + 5 + (8 + 1))


@pytest.mark.parametrize(("case", "theirs"), [("base", 34), ("no_replay", 70)])
def test_frames_of_chosen_repeats_are_those_of_the_actor(case, theirs):
    """The reference counts a new sample of its own policy, which nobody has executed."""
    inputs, expected = (
        load("ppg_vtrace/seed_learner_tf")["inputs"],
        load("ppg_vtrace/seed_learner_right")["cases"][case],
    )
    given = load("ppg_vtrace/seed_learner_tf")["learner"][case]["kwargs"]
    chosen = torch.tensor(inputs["behaviour"]["step_mul"])[1:, given["batch_size_from_replay"] :, 0] + 1
    environments = make_batch(COUNTER, chosen.shape[1], env={"learned_action_repeat": 8}, lengths=(100,))
    environments.reset()
    steps = [environments.step({"action": np.ones(len(row), np.int64), "repeat": row.numpy()}) for row in chosen]
    environments.close()
    assert sum(step.frames for step in steps) == expected["frames_right"]
    assert expected["frames_counted_by_seed"] == theirs != expected["frames_right"]


def test_nominal_frame_count_of_learned_repeats_counts_chosen_repeats():
    """Steps of 2, 3, 1 and 2 repeats of 2 frames; episodes of 5 frames end in the second and the fourth of these."""
    env = {"learned_action_repeat": 3, "action_repeat": 2, "frame_count": "nominal"}
    environments = make_batch(COUNTER, env=env, lengths=(5,), reward=1.0)
    rollout = make_collector(environments, 4).collect(Repeating())
    environments.close()
    assert rollout.rewards[:, 0].tolist() == [4, 1, 2, 3]
    assert rollout.frames == 2 * (2 + 3 + 1 + 2)


def test_discount_per_step_counts_each_choice_once():
    """The rewards of a step are summed as before."""
    env = {"learned_action_repeat": {"max": 3, "gamma": 0.5, "discount": "per_step"}}
    scripted = {"lengths": (5, 4), "ends": ("truncated", "terminated")}
    environments = make_batch(COUNTER, env=env, **scripted)
    rollout = make_collector(environments, 6).collect(Repeating())
    environments.close()
    assert rollout.rewards[:, 0].tolist() == [1 + 0.5 * 2, 3 + 0.5 * 4 + 0.25 * 5, 101, 102 + 0.5 * 103, 104, 201]
    assert rollout.discounts(0.5)[:, 0].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0.5]
    assert rollout.frames == 10


def test_every_algorithm_discounts_by_the_number_of_repeats():
    """Advantages of the first step, by hand: three frames of reward 1 and γ = 0.5."""
    data = make_data(
        f"tests.probes:{COUNTER}",
        num_envs=1,
        rollout_length=4,
        rollouts_per_epoch=1,
        env={"kwargs": {"lengths": (50,), "reward": 1.0}, "learned_action_repeat": {"max": 3, "gamma": 0.5}},
    )
    for algorithm, name in ((PPO, "gae_lambda"), (A2C, "gae_lambda"), (PPG, "gae_lambda"), (IMPALA, "vtrace_lambda")):
        torch.manual_seed(0)
        options = {} if algorithm in (A2C, IMPALA) else {"num_minibatches": 1}
        model = algorithm(
            data.observation_space,
            data.action_space,
            gamma=0.5,
            policy={"hidden_sizes": (4,)},
            **{name: 0.0},
            **options,
        )
        seen: list[tuple[Tensor, Tensor]] = []

        class Spy(Recorder):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                k = batch.repeats.float()
                expected = (1 - 0.5**k) / 0.5 + 0.5**k * batch.next_values - batch.values
                if hasattr(pl_module, "vtrace"):
                    steps = pl_module.batch(batch)
                    pl_module.loss(steps)
                    found = steps.estimates.advantages
                else:
                    found = pl_module.batch(batch).advantages
                seen.append((found, expected.flatten()))  # noqa: B023 - called in this turn of the loop

        make_trainer(callbacks=[Spy()]).fit(model, data)
        torch.testing.assert_close(*seen[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_evaluation_has_raw_rewards_and_training_counts_frames(backend):
    data = make_data(
        f"tests.probes:{COUNTER}",
        backend=backend,
        env={
            "kwargs": {"lengths": (7,), "reward": 1.0},
            "learned_action_repeat": {"max": 3, "gamma": 0.5},
            "previous_action": True,
        },
    )
    torch.manual_seed(0)
    model = PPO(data.observation_space, data.action_space, num_minibatches=1, policy={"hidden_sizes": (4,)})
    logger = MemoryLogger()
    trainer = make_trainer(limit_val_batches=1, logger=logger, log_every_n_steps=1)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/episode_return"] == 7
    assert trainer.callback_metrics["val/episode_length"] <= 7
    assert model.env_steps == 64 and 64 < model.clock.frames <= 192
    assert logger.rows("time/frames")[-1] == (64, model.clock.frames)


@pytest.mark.parametrize("algorithm", [PPO, CLEAR])
def test_policy_learns_to_repeat_actions(algorithm):
    """Rewards within a step are not discounted: with reward 1 per frame and a small γ, more repeats are better."""
    data = make_data(
        f"tests.probes:{COUNTER}",
        num_envs=8,
        rollout_length=16,
        rollouts_per_epoch=30,
        env={
            "kwargs": {"lengths": (24,), "ends": ("terminated",), "reward": 1.0, "blind": True},
            "learned_action_repeat": 4,
        },
    )
    torch.manual_seed(0)
    options = {"num_minibatches": 2} if algorithm is PPO else {"optimizer": {"name": "torch.optim.Adam"}}
    model = algorithm(
        data.observation_space,
        data.action_space,
        policy={"hidden_sizes": (8,)},
        learning_rate=1e-2,
        gamma=0.5,
        **options,
    )
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/episode_length"] <= 8  # of 24 frames


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"learned_action_repeat": 1}}, "env.learned_action_repeat.max=1 "),
        ({"env": {"learned_action_repeat": {"gamma": 0.9}}}, "env.learned_action_repeat.max=0 "),
        ({"env": {"learned_action_repeat": {"max": 2, "gamma": 1.1}}}, "env.learned_action_repeat.gamma=1.1"),
        (
            {"env": {"learned_action_repeat": {"max": 2, "discount": "step"}}},
            "discount='step' .* one of per_repeat, per_step",
        ),
        ({"env": {"frame_count": "nominal"}}, "env.frame_count='nominal' .* with env.action_repeat"),
        ({"env": {"frame_count": "all", "action_repeat": 2}}, "env.frame_count='all' "),
        (
            {"env": {"learned_action_repeat": 2}, "backend": "native"},
            "env.learned_action_repeat=2 .* expected None with backend",
        ),
    ],
)
def test_invalid_repeat_options_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_data(**options)
