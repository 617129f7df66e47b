"""The tree of seeds: run → role → rank → environment → episode."""

import itertools

import numpy as np
import pytest
import torch

from lightning_rl.environments.contract import EVALUATION, SAMPLING, TRAINING, derive_seed
from lightning_rl.environments.episodes import SeededEpisodes
from lightning_rl.policies.actor_critic import ActorCritic
from tests.probes import Random, make_batch, make_collector, seeds_of


def episodes_of(environments, index, steps=60):
    """Return the observations and rewards of one environment."""
    rows = [environments.reset()[index].copy()]
    rewards = []
    for t in range(steps):
        step = environments.step(np.full(environments.num_envs, t % 2))
        rows.append(step.observations[index].copy())
        rewards.append(step.rewards[index])
    environments.close()
    return np.stack(rows), np.array(rewards)


def test_seeds_differ_and_have_31_bits():
    paths = [
        (0,),
        (1,),
        *itertools.product((0, 1), range(3)),
        *itertools.product((0, 1), (TRAINING, EVALUATION, SAMPLING), range(4), range(8)),
    ]
    seeds = [derive_seed(*path) for path in paths]
    assert len(set(seeds)) == len(paths)
    assert all(0 <= seed < 2**31 for seed in seeds)
    # Golden: another value would change every run.
    assert derive_seed(0, TRAINING, 0, 0) == 1839233791


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [("Probe/Random-v0", "sync"), ("Probe/Random-v0", "async"), ("CartPole-v1", "sync"), ("CartPole-v1", "envpool")],
)
def test_more_environments_do_not_change_the_episodes_of_the_others(env_id, backend):
    assert seeds_of(2, 3) == seeds_of(5, 3)[:2]
    for index in range(2):
        one = episodes_of(make_batch(env_id, 2, backend=backend, seed=3), index)
        other = episodes_of(make_batch(env_id, 5, backend=backend, seed=3), index)
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_async_plays_the_same_episodes_as_sync():
    one = episodes_of(make_batch("Probe/Random-v0", 2), 1)
    other = episodes_of(make_batch("Probe/Random-v0", 2, backend="async"), 1)
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


def test_all_episodes_of_all_environments_differ():
    environments = make_batch("CartPole-v1", 8)
    first = environments.reset().copy()
    assert len(np.unique(first, axis=0)) == 8
    starts = []
    for _ in range(60):
        step = environments.step(np.zeros(8, np.int64))
        starts += [step.observations[index].copy() for index, _ in step.final_observations]
    assert len(starts) > 30
    assert len(np.unique(np.concatenate([first, starts]), axis=0)) == len(starts) + 8


def test_episode_depends_on_its_number_not_on_earlier_episodes():
    """Each episode has its own generator, so that the length of earlier episodes has no effect."""
    long, short = SeededEpisodes(Random()), SeededEpisodes(Random())
    for env, steps in ((long, 17), (short, 2)):
        env.reset(seed=5)
        for _ in range(steps):
            env.step(0)
    np.testing.assert_array_equal(long.reset()[0], short.reset()[0])
    np.testing.assert_array_equal(long.step(1)[0], short.step(1)[0])


def test_reset_with_the_seed_begins_the_stream_again():
    environments = make_batch("Probe/Random-v0", 3)
    runs = []
    for _ in range(2):
        rows = [environments.reset().copy()]
        rows += [environments.step(np.zeros(3, np.int64)).observations.copy() for _ in range(50)]
        runs.append(np.stack(rows))
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        ("CartPole-v1", "sync"),
        ("CartPole-v1", "async"),
        ("CartPole-v1", "native"),
        ("CartPole-v1", "envpool"),
        ("HalfCheetah-v5", "sync"),
        ("ALE/Pong-v5", "native"),
    ],
)
def test_same_seed_gives_the_same_rollout_bit_for_bit_and_another_seed_another(env_id, backend):
    rollouts = []
    for seed in (7, 7, 8):
        environments = make_batch(env_id, 2, backend=backend, seed=seed)
        torch.manual_seed(0)
        policy = ActorCritic(environments.single_observation_space, environments.single_action_space)
        rollouts.append(make_collector(environments, 20).collect(policy))
        environments.close()
    one, same, other = rollouts
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values"):
        assert torch.equal(getattr(one, name), getattr(same, name)), name
    assert not torch.equal(one.observations, other.observations)
