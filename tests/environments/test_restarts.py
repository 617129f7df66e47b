"""`env.on_failure: restart` replaces an environment that fails, and loses only one step."""

import os
import signal
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import EVALUATION, TRAINING, derive_seed
from lightning_rl.functional import gae
from lightning_rl.training.normalizers import RewardNormalizer
from lightning_rl.validation import ConfigurationError
from tests.helpers import MemoryLogger, make_trainer
from tests.probes import Told, make_batch, make_collector, seeds_of, step_timeout

INDEX, EPISODE = 2, 1
SEED = derive_seed(seeds_of(4)[INDEX], EPISODE)
"""The environments below fail in this episode, after an episode of 5 steps."""

WHERE = f"environment 2 (episode 1, seed {SEED}, step 3)"
RAISES = "raised in step: ArithmeticError: the physics exploded"
FAILURES = [
    ("sync", "raise", RAISES),
    ("sync", "nan observation", "returned observation (entry 1) nan: expected a finite number that float32 can hold"),
    ("sync", "inf reward", "returned reward inf: expected a finite number that float32 can hold"),
    ("sync", "none reward", "returned reward None: expected a number"),
    ("sync", "few observation", "returned an observation of shape (1,): expected (2,)"),
    ("sync", "SystemExit", "raised in step: SystemExit: 0"),
    ("sync", "KeyboardInterrupt", "raised in step: KeyboardInterrupt"),
    ("async", "raise", RAISES),
    ("async", "SystemExit", "raised in step: SystemExit: 0"),
    ("async", "inf reward", "returned reward inf: expected a finite number that float32 can hold"),
    ("async", "kill", "is gone: its worker process died with exit code -9"),
    ("async", "exit", "is gone: its worker process died with exit code 3"),
    ("async", "hang", "gave no answer within env.step_timeout=1 seconds"),
]


class MadeOnce(gymnasium.Wrapper):
    """Can be made only once in a process, like an environment that binds a port."""

    made = 0

    def __init__(self, env):
        super().__init__(env)
        MadeOnce.made += 1
        if MadeOnce.made > 1:
            raise OSError("the port is taken")


@pytest.fixture
def failing(request):
    def make(how, at=3, episode_seed=SEED, num_envs=4, backend="sync", wrappers=None, **ends):
        env = {"wrappers": wrappers, "step_timeout": step_timeout(how, backend), "on_failure": "restart"}
        options = {"how": how, "at": at, "episode_seed": episode_seed, "lengths": (5,), **ends}
        environments = make_batch("Probe/Failing-v0", num_envs, backend=backend, env=env, **options)
        request.addfinalizer(environments.close)
        return environments

    return make


def policy():
    """Return a policy with the value 10 · episode + step."""
    return Told(value=lambda observations: 10 * observations[..., 0] + observations[..., 1])


@pytest.mark.parametrize(("backend", "how", "what"), FAILURES)
def test_failed_step_is_invalid_and_its_episode_truncated(failing, backend, how, what):
    environments = failing(how, backend=backend)
    rollout = make_collector(environments, 12).collect(policy())
    assert environments.pop_failures() == [f"{WHERE} {what}"] and environments.pop_failures() == []
    # The failed step, t = 7, has no outcome.
    assert rollout.num_steps == 4 * 12 - 1
    assert rollout.valid.logical_not().nonzero().tolist() == [[7, 2]]
    assert rollout.rewards[:, 2].tolist() == [1.0] * 7 + [0.0] + [1.0] * 4
    # The last valid step, t = 6, is truncated; its final observation is the observation of the failed step.
    assert rollout.truncated[:, 2].nonzero().flatten().tolist() == [4, 6]
    assert not rollout.terminated.any()
    place = rollout.final_indices.tolist().index([6, 2])
    assert rollout.final_observations[place].tolist() == rollout.observations[7, 2].tolist() == [1, 2]
    assert rollout.next_values[6, 2] == 12
    # The new environment counts its episodes from 0.
    assert rollout.observations[8:, 2].tolist() == [[0, step] for step in range(5)]
    # Interrupted episodes are not in the statistics.
    assert rollout.episodes.lengths == [5] * 7 and rollout.episodes.returns == [5.0] * 7


def test_advantages_stop_at_a_failed_step(failing):
    gamma, lambda_ = 0.9, 0.5
    rollout = make_collector(failing("raise"), 12).collect(policy())
    discounts, traces = rollout.discounts(gamma), rollout.traces(lambda_)
    advantages = gae(rollout.rewards, rollout.values, rollout.next_values, discounts, traces)[:, 2]
    # By hand: r + gamma · V(next) - V(current), and the later steps of the same episode.
    delta_6 = 1 + 0.9 * 12 - 11
    delta_5 = 1 + 0.9 * 11 - 10
    assert advantages[6].item() == pytest.approx(delta_6)
    assert advantages[5].item() == pytest.approx(delta_5 + 0.45 * delta_6)
    deltas = [1 + 0.9 * (step + 1) - step for step in range(4)]
    assert advantages[8].item() == pytest.approx(sum(0.45**k * delta for k, delta in enumerate(deltas)))
    flat = rollout.flatten(advantages=advantages.expand(4, 12).T)
    assert len(flat) == 47


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("async", "kill"), ("async", "hang")])
def test_restart_does_not_affect_other_environments(failing, backend, how):
    rollouts = [
        make_collector(failing(how, episode_seed=seed, backend=backend), 20).collect(policy()) for seed in (SEED, -1)
    ]
    for name in ("observations", "rewards", "truncated", "next_values"):
        one, other = (getattr(rollout, name)[:, [0, 1, 3]] for rollout in rollouts)
        assert torch.equal(one, other), name
    assert not torch.equal(rollouts[0].observations, rollouts[1].observations)


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("async", "raise"), ("async", "kill")])
def test_restart_begins_the_next_episode_of_the_stream(failing, backend, how):
    environments = failing(how, backend=backend)
    environments.reset()
    labels = []
    for _ in range(14):
        environments.step(np.zeros(4, np.int64))
        labels.append(environments.label(2))
    seeds = [derive_seed(seeds_of(4)[2], episode) for episode in range(4)]
    assert labels[6] == f"environment 2 (episode 1, seed {seeds[1]}, step 2)"
    assert labels[7] == f"environment 2 (episode 2, seed {seeds[2]}, step 0)"
    assert labels[12] == f"environment 2 (episode 3, seed {seeds[3]}, step 0)"
    record = environments.state_dict()["environments"][2]
    assert (record["first_episode"], record["episode"], record["step_count"]) == (3, 3, 1)


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("async", "kill")])
def test_failure_in_the_first_step_of_a_rollout_invalidates_one_row(failing, backend, how):
    collector = make_collector(failing(how, backend=backend), 7)
    rollouts = []
    for _ in range(2):
        rollout = collector.collect(policy())
        rollouts.append((rollout.truncated[:, 2].clone(), rollout.valid, rollout.episodes.lengths))
    assert [x[0].nonzero().flatten().tolist() for x in rollouts] == [[4], [5]]
    assert rollouts[0][1] is None
    assert rollouts[1][1].logical_not().nonzero().tolist() == [[0, 2]]
    # In the second rollout the other three environments end an episode at t = 2, the new one at t = 5.
    assert rollouts[1][2] == [5, 5, 5, 5]


def test_reward_normalizer_restarts_after_a_failure_in_the_first_step_of_a_rollout():
    normalizer = RewardNormalizer(0.5)
    rewards, ends, valid = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)
    normalizer.update(rewards, ends, valid)
    assert normalizer.discounted_return.tolist() == [0.875, 0.875]
    valid[0, 1] = False
    normalizer.update(rewards, ends, valid)
    assert normalizer.discounted_return.tolist() == [0.984375, 0.75]


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("sync", "nan observation"), ("async", "raise")])
def test_failure_in_a_reset_costs_no_step(failing, backend, how):
    environments = failing(how, at=0, backend=backend)
    rollout = make_collector(environments, 12).collect(policy())
    assert rollout.valid is None
    assert rollout.truncated[:, 2].nonzero().flatten().tolist() == [4, 9]
    assert rollout.final_observations[rollout.final_indices.tolist().index([4, 2])].tolist() == [0, 5]
    assert rollout.observations[5:10, 2].tolist() == [[0, step] for step in range(5)]
    assert rollout.episodes.lengths == [5] * 8
    (failure,) = environments.pop_failures()
    assert failure.startswith(f"environment 2 (episode 1, seed {SEED}, step 0) r")
    assert environments.label(2).startswith("environment 2 (episode 3, ")


def test_worker_that_dies_in_a_reset_loses_its_last_step(failing):
    environments = failing("kill", at=0, backend="async")
    rollout = make_collector(environments, 12).collect(policy())
    assert rollout.valid.logical_not().nonzero().tolist() == [[4, 2]]
    assert rollout.truncated[:, 2].nonzero().flatten().tolist() == [3, 9]
    # The first new process dies in the same reset, the second one begins the episode after that.
    assert [failure.partition(" seed")[0] for failure in environments.pop_failures()] == [
        "environment 2 (episode 0,",
        "environment 2 (episode 1,",
    ]
    assert environments.label(2).startswith("environment 2 (episode 3, ")


def test_failure_in_the_very_first_reset_begins_the_next_episode(failing):
    for backend, how in (("sync", "raise"), ("async", "kill")):
        environments = failing(how, at=0, episode_seed=derive_seed(seeds_of(4)[2], 0), backend=backend)
        assert environments.reset().tolist() == [[0, 0]] * 4
        assert len(environments.pop_failures()) == 1
        assert environments.label(2).startswith("environment 2 (episode 1, ")


def test_failure_in_the_first_step_of_an_episode_keeps_the_end_of_the_last_episode(failing):
    rollout = make_collector(failing("raise", at=1), 12).collect(policy())
    assert rollout.truncated[:, 2].nonzero().flatten().tolist() == [4, 10]
    assert rollout.final_observations[rollout.final_indices.tolist().index([4, 2])].tolist() == [0, 5]
    assert rollout.next_values[4, 2] == 5
    assert rollout.valid.logical_not().nonzero().tolist() == [[5, 2]]


def test_failures_truncate_no_episode_that_has_terminated_or_not_begun(failing):
    rollout = make_collector(failing("raise", at=1, ends=("terminated",)), 12).collect(policy())
    assert rollout.terminated[4, 2] and not rollout.valid[5, 2] and not rollout.truncated.any()
    rollout = make_collector(failing("raise", at=1, episode_seed=None), 2).collect(policy())
    assert not rollout.valid.any() and not rollout.truncated.any()


def test_info_of_a_failed_step_is_not_reported(failing):
    rollout = make_collector(failing("nan observation"), 12, info_keys=("level",)).collect(policy())
    assert (~rollout.infos["level"].isnan()).sum() == 47


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("async", "kill")])
def test_environment_that_fails_in_every_first_step_ends_the_run(failing, backend, how):
    environments = failing(how, at=1, episode_seed=None, num_envs=2, backend=backend)
    environments.reset()
    for _ in range(3):
        assert list(environments.step(np.zeros(2, np.int64)).failed) == [0, 1]
    with pytest.raises(EnvironmentFailure, match=r"^environment \d \(episode 3, .*; 3 restarts in a row, without a"):
        environments.step(np.zeros(2, np.int64))


def test_occasional_failures_do_not_end_the_run(failing):
    rollout = make_collector(failing("raise", at=2, episode_seed=None, num_envs=1), 20).collect(policy())
    assert rollout.valid[:, 0].tolist() == [True, False] * 10
    assert rollout.episodes.lengths == []


def test_environment_that_cannot_be_made_again_ends_the_run(failing):
    MadeOnce.made = 0
    environments = failing("raise", num_envs=1, episode_seed=None, wrappers=[f"{__name__}.MadeOnce"])
    with pytest.raises(EnvironmentFailure, match=r"in the making of a new environment: .*OSError: the port is taken"):
        make_collector(environments, 5).collect(policy())
    assert MadeOnce.made == 4


def test_worker_killed_between_a_step_and_a_checkpoint_does_not_stop_the_checkpoint(failing):
    environments = failing("raise", at=99, backend="async")
    environments.reset()
    environments.step(np.zeros(4, np.int64))
    os.kill(environments.env.processes[1].pid, signal.SIGKILL)
    environments.env.processes[1].join()
    records = environments.state_dict()
    assert records["environments"][1] == {"stream_seed": seeds_of(4)[1], "episode": 0}
    step = environments.step(np.zeros(4, np.int64))
    assert list(step.failed) == [1] and step.observations.tolist() == [[0, 2], [0, 0], [0, 2], [0, 2]]
    # A run that resumes from this checkpoint begins a new episode there.
    again = failing("raise", at=99)
    exact, observations = again.load_state_dict(records)
    assert exact.tolist() == [True, False, True, True]
    assert observations.tolist() == [[0, 1], [0, 0], [0, 1], [0, 1]]
    assert again.label(1).startswith("environment 1 (episode 1, ")


def test_stopped_worker_is_replaced_after_one_timeout(failing):
    environments = failing("hang", at=99, backend="async")  # with a short timeout; none hangs on its own
    environments.reset()
    stopped = environments.env.processes[3]
    os.kill(stopped.pid, signal.SIGSTOP)
    assert list(environments.step(np.zeros(4, np.int64)).failed) == [3]
    assert not stopped.is_alive()
    step = environments.step(np.zeros(4, np.int64))
    assert step.valid is None and step.observations.tolist() == [[0, 2], [0, 2], [0, 2], [0, 1]]


def make_data(role, episode, at=2, how="raise", seed=0, **options):
    """Return data with two environments, the second of which fails in one episode."""
    start = (0,) if role == TRAINING else ()
    episode_seed = derive_seed(derive_seed(seed, role, 0, 1, *start), episode)
    kwargs = {"how": how, "at": at, "lengths": [5], "episode_seed": episode_seed}
    env = {"kwargs": kwargs, "on_failure": "restart"}
    options = {"evaluation": {"episodes": 4}} | options
    return RolloutDataModule("Probe/Failing-v0", 2, 6, env=env, seed=seed, **options)


class CountSteps(Callback):
    def on_train_end(self, trainer, pl_module):
        self.env_steps = pl_module.env_steps


@pytest.mark.parametrize(("backend", "how"), [("sync", "raise"), ("async", "kill")])
def test_restarts_are_logged_and_the_first_one_is_a_warning(backend, how):
    data = make_data(TRAINING, 2, how=how, backend=backend, rollouts_per_epoch=4)
    logger, count = MemoryLogger(), CountSteps()
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.warns(
        UserWarning, match=r"^environment 1 \(episode 2, seed \d+, step 2\) .*\. It was replaced"
    ) as told:
        make_trainer(logger=logger, log_every_n_steps=2, callbacks=[count]).fit(model, data)
    assert len([warning for warning in told if "was replaced" in str(warning.message)]) == 1
    # Step 12 of 24 fails, in the second of four rollouts; every second rollout is logged.
    assert [value for _, value in logger.rows("rollout/env_restarts")] == [1, 0]
    assert count.env_steps == 2 * 24 - 1


def test_restarts_are_not_logged_if_failures_raise():
    data = RolloutDataModule("CartPole-v1", 2, 6, 2)
    logger = MemoryLogger()
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    assert logger.rows("time/steps_per_second") and not logger.rows("rollout/env_restarts")


def test_means_over_last_steps_of_episodes_leave_out_failed_episodes():
    data = make_data(TRAINING, 0, at=3, info_keys=["level"])  # environment 0 ends with level 5, the other fails after 2
    logger = MemoryLogger()
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.warns(UserWarning, match="It was replaced"):
        make_trainer(logger=logger, log_every_n_steps=1, limit_train_batches=1).fit(model, data)
    assert [value for _, value in logger.rows("rollout/episodes")] == [1]
    assert [value for _, value in logger.rows("rollout/level_last")] == [5]


def test_evaluation_replaces_a_failed_episode():
    data = make_data(EVALUATION, 1, evaluation={"episodes": 4, "num_envs": 2})
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.warns(UserWarning, match=r"^evaluation environment 1 \(episode 1, "):
        (result,) = make_trainer(limit_val_batches=1).validate(model, data, verbose=False)
    assert (result["val/episodes"], result["val/episode_length"], result["val/episode_return"]) == (4, 5, 5)


def test_evaluation_ends_after_four_failed_episodes():
    data = make_data(EVALUATION, 0)
    data.eval_spec.env.kwargs["episode_seed"] = None
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with warnings.catch_warnings(), pytest.raises(EnvironmentFailure, match="the 3 episodes before failed too"):
        make_trainer(limit_val_batches=1).validate(model, data, verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"on_failure": "ignore"}}, "^env.on_failure='ignore' is not valid: expected one of raise, restart$"),
        (
            {"env": {"on_failure": "restart"}, "backend": "native"},
            "^env.on_failure='restart' is not valid: expected 'raise' with backend='native', whose environments cannot",
        ),
        ({"env": {"on_failure": "restart"}, "backend": "envpool"}, "expected 'raise' with backend='envpool'"),
    ],
)
def test_on_failure_option_is_checked(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RolloutDataModule("CartPole-v1", **options)
