"""Contract 2: terminated is not truncated, and neither leaks into the next episode."""

import pytest
import torch
from gymnasium.vector import AutoresetMode

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.functional import gae
from tests.helpers import make_trainer
from tests.probes import Told, collect

GAMMA, LAMBDA = 0.9, 0.95


def targets(rollout, lambda_=LAMBDA, on_truncation="bootstrap"):
    discounts = rollout.discounts(GAMMA, on_truncation)
    advantages = gae(rollout.rewards, rollout.values, rollout.next_values, discounts, rollout.traces(lambda_))
    return advantages + rollout.values


def where_it_is(observations):
    """Return a unique value: 1000 · episode + 10 · step."""
    return 1000 * observations[..., 0] + 10 * observations[..., 1]


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
def test_constant_reward_until_a_time_limit_has_value_one_over_one_minus_gamma(mode, lambda_):
    perfect = Told(value=1 / (1 - GAMMA))
    rollout = collect("Probe/Counter-v0", 40, perfect, num_envs=2, mode=mode, lengths=(7,), reward=1.0)
    assert rollout.truncated.sum() >= 8 and not rollout.terminated.any()
    found = targets(rollout, lambda_)[slice(None) if rollout.valid is None else rollout.valid]
    torch.testing.assert_close(found, torch.full_like(found, 1 / (1 - GAMMA)), rtol=2e-7, atol=0)


def test_terminal_state_has_value_zero():
    wrong = Told(value=1e6)
    rollout = collect("Probe/Counter-v0", 6, wrong, lengths=(3,), ends=("terminated",), reward=1.0)
    expected = torch.tensor([1 + GAMMA * (1 + GAMMA), 1 + GAMMA, 1.0] * 2).unsqueeze(1)
    # The advantage is a difference of numbers near 10^6, so compare the returns computed without the critic.
    found = targets(rollout, lambda_=1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)
    assert (rollout.discounts(GAMMA)[rollout.terminated] == 0).all()


def test_truncated_episode_bootstraps_from_the_final_observation():
    rollout = collect("Probe/Counter-v0", 7, Told(where_it_is), lengths=(3, 2))
    assert rollout.observations[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2]]
    assert rollout.next_values[:, 0].tolist() == [10, 20, 30, 1010, 1020, 2010, 2020]
    assert rollout.final_indices.tolist() == [[2, 0], [4, 0]]
    assert rollout.final_observations.tolist() == [[0, 3], [1, 2]]
    one_step = targets(rollout, lambda_=0.0)
    torch.testing.assert_close(one_step[2, 0].item(), 3 + GAMMA * 30, rtol=1e-6, atol=0)


def test_terminated_and_truncated_counts_as_terminated():
    rollout = collect("Probe/Counter-v0", 3, Told(where_it_is), lengths=(3,), ends=("both",))
    assert rollout.terminated[2] and rollout.truncated[2]
    assert targets(rollout)[2].item() == 3.0
    assert len(rollout.final_indices) == 0


def test_time_limit_can_be_treated_as_a_terminal_state():
    rollout = collect("Probe/Counter-v0", 3, Told(where_it_is), lengths=(3,), reward=1.0)
    assert targets(rollout, on_truncation="terminal")[2].item() == 1.0
    assert targets(rollout)[2].item() == pytest.approx(1 + GAMMA * 30)


@pytest.mark.parametrize("ends", [("terminated",), ("truncated",), ("terminated", "truncated")])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_two_episodes_in_one_rollout_do_not_affect_each_other(mode, ends):
    policy = Told(where_it_is)
    bogus = mode is AutoresetMode.NEXT_STEP
    together = collect("Probe/Counter-v0", 12 + bogus, policy, mode=mode, lengths=(5, 7), ends=ends)
    first = collect("Probe/Counter-v0", 5, policy, lengths=(5,), ends=ends[:1])
    # The second trajectory is the second episode of its environment, after one of a single step.
    second = collect("Probe/Counter-v0", 8, policy, lengths=(1, 7), ends=ends)
    valid = torch.ones(12 + bogus, 1, dtype=torch.bool) if together.valid is None else together.valid
    for quantity in (targets, lambda r: r.values, lambda r: r.next_values, lambda r: r.rewards):
        both = quantity(together)[valid]
        assert torch.equal(both[:5], quantity(first)[:, 0])
        assert torch.equal(both[5:], quantity(second)[1:, 0])


def test_final_observation_survives_an_environment_that_reuses_its_array():
    rollout = collect("Probe/Counter-v0", 7, Told(where_it_is), lengths=(3, 2), reuse_buffer=True)
    assert rollout.final_observations.tolist() == [[0, 3], [1, 2]]
    assert rollout.next_values[:, 0].tolist() == [10, 20, 30, 1010, 1020, 2010, 2020]


def test_critic_learns_the_value_of_an_endless_task_from_short_episodes():
    """The value is 1 / (1 - 0.8) = 5, although every episode is truncated after 4 steps."""
    endless = {"lengths": [4], "reward": 1.0, "blind": True}
    data = RolloutDataModule("Probe/Counter-v0", 4, 16, 40, env={"kwargs": endless}, seed=0)
    torch.manual_seed(0)
    model = PPO(
        data.observation_space,
        data.action_space,
        gamma=0.8,
        learning_rate=5e-2,
        optimizer={"anneal": True, "max_grad_norm": None},
        policy={"hidden_sizes": ()},
    )
    make_trainer().fit(model, data)
    with torch.no_grad():
        assert model.policy.value(torch.zeros(2)).item() == pytest.approx(5, rel=0.01)
