"""The history of vector wrappers is restored exactly in every backend with a state."""

import cProfile
import pstats
from operator import itemgetter

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.wrappers.history import FlatObservations
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from tests.mask_probes import kwargs_of, source_of
from tests.probes import make_batch, make_collector

EVERYTHING = {"frame_stack": 3, "previous_action": True, "previous_reward": True, "reward_scale": 0.5}


def assert_restored(env_id: str, num_envs: tuple[int, int] = (3, 3), **options) -> None:
    """Check that a second collector with the state of the first collects the same rollout."""
    collectors = [make_collector(make_batch(env_id, count, **options), 9) for count in num_envs]
    environments = collectors[0].environments
    torch.manual_seed(0)
    pair = environments.single_observation_space, environments.single_action_space
    policy = ActorCritic(*pair, hidden_sizes=(8,))
    policy.act = lambda x, *_, act=policy.act: act(x, deterministic=True)  # type: ignore[method-assign]
    for _ in range(3):
        collectors[0].collect(policy)
    assert collectors[1].load_state_dict(collectors[0].state_dict()) == []
    expected, found = (collector.collect(policy) for collector in collectors)
    both = slice(min(num_envs))
    for name in ("observations", "rewards", "actions", "terminated", "truncated"):
        for x, y in zip(leaves(getattr(expected, name)), leaves(getattr(found, name)), strict=True):
            assert torch.equal(x[:, both], y[:, both]), name
    assert expected.dones.any() or num_envs[0] == 1
    for collector in collectors:
        collector.environments.close()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async", "native"])
def test_stacks_and_previous_steps_are_restored(backend, flatten):
    assert_restored("CartPole-v1", backend=backend, env=EVERYTHING | {"flatten_observations": flatten})


@pytest.mark.parametrize("where", ["info", "method", "observation"])
def test_masks_are_restored(where):
    env = {"action_mask": source_of(where), "previous_action": True}
    if where != "observation":
        env["frame_stack"] = 2
    assert_restored("Probe/Invalid-v0", env=env, **kwargs_of("discrete", where=where))


@pytest.mark.parametrize("num_envs", [(2, 4), (4, 2)])
def test_additional_environments_begin_new_episodes(num_envs):
    env = {"action_mask": "info.action_mask", "previous_action": True, "frame_stack": 2}
    assert_restored("Probe/Invalid-v0", num_envs, env=env, **kwargs_of("discrete"))


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_environments_with_other_vector_wrappers_are_not_restored(backend):
    """The wrapper may have a state."""
    env = {"wrappers": ["tests.environments.wrappers.test_history.Counting"], "frame_stack": 2}
    batch = make_batch("CartPole-v1", 2, backend=backend, env=env)
    batch.reset()
    assert batch.state_dict() is None


class Counting(gymnasium.vector.VectorWrapper):
    """A wrapper that may have a state."""


class Summing(gymnasium.vector.VectorRewardWrapper):
    """A wrapper that can save its own state, but not that of the environments."""

    total = 0.0

    def rewards(self, rewards):
        self.total += float(rewards.sum())
        return rewards

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@pytest.mark.parametrize("backend", ["sync", "async", "native"])
def test_the_state_of_a_vector_wrapper_is_not_taken_for_that_of_its_environments(backend):
    batch = make_batch("CartPole-v1", 2, backend=backend, env={"wrappers": [f"{__name__}.Summing"]})
    batch.reset()
    assert batch.state_dict() is None
    batch.close()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([[3, 2], [4, 2]], start=[[1, 0], [0, -3]]),
        spaces.Box(-2, 5, (3,), np.int8),
        spaces.Dict(
            b=spaces.Tuple([spaces.Box(-1, 1, (), np.float32), spaces.Discrete(3)]), a=spaces.MultiBinary((2, 2))
        ),
    ],
)
def test_all_environments_are_flattened_together_as_gymnasium_flattens_each(space):
    history, calls = FlatObservations(space), []
    for num_envs in (2, 200):
        observations = batch_space(space, num_envs).sample()
        with cProfile.Profile() as profile:
            found = history.show(observations)
        calls.append(pstats.Stats(profile).total_calls)
        expected = np.stack(
            [spaces.flatten(space, map_leaves(itemgetter(index), observations)) for index in range(num_envs)]
        )
        assert found.dtype == expected.dtype == history.space.dtype and np.array_equal(found, expected)
    assert calls[0] == calls[1]
