"""Masks of invalid actions: from every source, with every backend, in every autoreset mode."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl.environments import EnvironmentFailure
from lightning_rl.masks import ActionMask
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policy import ActorCritic
from lightning_rl.validation import ConfigurationError
from tests.mask_probes import CASES, kwargs_of, source_of
from tests.probes import make_batch, make_collector

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def make(name: str, where: str = "info", num_envs: int = 2, backend: str = "sync", mode=SAME, **more: Any):
    kwargs = kwargs_of(name, where=where, **more)
    if backend == "native":
        kwargs["resets"] = mode.value
    return make_batch(
        "tests.mask_probes:Probe/Invalid-v0",
        num_envs,
        backend=backend,
        action_mask=source_of(where),
        mode=mode,
        **kwargs,
    )


def make_policy(environments) -> ActorCritic:
    torch.manual_seed(0)
    choice = "autoregressive" if environments.single_action_space == spaces.MultiDiscrete([4, 3]) else None
    return ActorCritic(
        environments.single_observation_space,
        environments.single_action_space,
        action_distribution=choice,
        hidden_sizes=(8,),
    )


def roll(environments, length: int = 16):
    """A rollout of the probe, which raises if an action is invalid."""
    try:
        return make_collector(environments, length).collect(make_policy(environments))
    finally:
        environments.close()


def masks_of(rollout) -> Any:
    return rollout.observations["legal" if "legal" in rollout.observations else "action_mask"]


def valid_rows(rollout) -> dict[str, Any]:
    """Observations, masks and actions of the real steps."""
    batch = rollout.flatten()
    observations = batch.observations
    place = observations["place" if "place" in observations else "observation"]
    mask = observations["legal" if "legal" in observations else "action_mask"]
    return {"place": place, "mask": mask, "rewards": rollout.flatten(rewards=rollout.rewards).rewards}


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["info", "observation", "method"])
@pytest.mark.parametrize("backend", ["sync", "async", "native"])
def test_masks_of_every_source_and_backend_are_obeyed_and_stored(where, backend):
    environments = make("discrete", where, backend=backend, mode=NEXT if backend == "native" else SAME)
    assert ActionMask(5) in environments.single_observation_space.spaces.values()
    rollout = roll(environments)
    mask = masks_of(rollout)
    assert mask.shape == (17, 2, 5) and mask.dtype == torch.int8
    taken = mask[:-1].gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    assert (taken[rollout.valid] if rollout.valid is not None else taken).all()
    assert 0 < mask.float().mean() < 1


@pytest.mark.parametrize(("name", "more"), CASES)
@pytest.mark.parametrize("backend", ["sync", "async", "native"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_modes_and_backends_give_the_same_steps(name, more, backend, mode):
    """Masks are scripted: the draws of rows that only reset would shift those of the steps after, so one environment
    and the mode of the policy, which depends on the masks."""

    def steps(environments) -> Any:
        policy = make_policy(environments)
        act = policy.act
        policy.act = lambda x, generator=None: act(x, deterministic=True)  # type: ignore[method-assign]
        rollout = make_collector(environments, 16).collect(policy)
        environments.close()
        return map_leaves(lambda x: x[:11], valid_rows(rollout))

    assert_same(
        steps(make(name, num_envs=1, scripted=True, **more)),
        steps(make(name, num_envs=1, scripted=True, backend=backend, mode=mode, **more)),
    )


@pytest.mark.parametrize(("name", "more"), CASES)
@pytest.mark.parametrize("where", ["info", "observation"])
def test_every_kind_of_action_obeys_its_masks(name, more, where):
    rollout = roll(make(name, where, num_envs=8, **more), 40)
    assert rollout.num_steps == 320


def test_masks_of_native_environments_with_nested_actions_that_are_resets_in_part():
    rollout = roll(make("hybrid", num_envs=3, backend="native", mode=DISABLED), 20)
    assert rollout.num_steps == 60 and rollout.truncated.any()


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_final_observations_of_vectorised_environments_have_masks_that_allow_everything(mode):
    environments = make("discrete", backend="native", mode=mode)
    environments.reset()
    # The probe takes the actions that its masks allow.
    for _ in range(3):
        actions = np.array([env.mask.argmax() + 2 for env in environments.env.unwrapped.envs])
        step = environments.step(actions)
    for _, observation in step.final_observations:
        assert observation["action_mask"].tolist() == [1] * 5 and observation["observation"].tolist()[1] == 3
    assert len(step.final_observations) == 2
    environments.close()


def test_envpool_takes_masks_from_a_wrapper():
    environments = make_batch(
        "CartPole-v1",
        2,
        backend="envpool",
        wrappers=({"class_path": "tests.mask_probes.AddMask", "init_args": {}},),
        action_mask="info.only",
    )
    rollout = make_collector(environments, 40).collect(make_policy(environments))
    assert not rollout.actions[rollout.valid].any() and not rollout.valid.all()
    assert rollout.observations["observation"].shape == (41, 2, 4)
    environments.close()


@pytest.mark.parametrize("where", ["info", "observation", "method"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_mask_that_allows_nothing_is_an_error_that_says_where(where, backend):
    environments = make("discrete", where, backend=backend, nothing_at=1)
    expected = (
        rf"^environment [01] \(episode [12], seed \d+, step 1\) raised in step: ValueError: the action mask "
        rf"\({re.escape(source_of(where))}\) allows nothing to the action: expected at least one choice"
    )
    with pytest.raises(EnvironmentFailure, match=expected):
        roll(environments)


@pytest.mark.parametrize("where", ["info", "observation", "method"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_so_it_is_in_environments_that_come_vectorised(where, mode):
    environments = make("discrete", where, backend="native", mode=mode, nothing_at=2)
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 0 \(episode [12], seed \d+, step 2\), environment 1 .*"
    ):
        roll(environments)


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_a_mask_at_the_end_of_an_episode_does_not_matter(backend):
    for mode in (NEXT, DISABLED):
        assert roll(make("discrete", backend=backend, mode=mode, nothing_at=3)).shape == (16, 2)


@pytest.mark.parametrize(("name", "part"), [("ragged", "0"), ("hybrid", "arm.1.0"), ("pair", "0")])
def test_the_component_to_which_nothing_is_allowed_is_named(name, part):
    environments = make(name, nothing_at=1, conditional=name == "pair")
    with pytest.raises(EnvironmentFailure, match=rf"allows nothing to component '{part}' of the action"):
        roll(environments)


def test_an_environment_that_allows_nothing_is_replaced_where_failures_are():
    environments = make_batch(
        "tests.mask_probes:Probe/Invalid-v0",
        2,
        action_mask="info.action_mask",
        on_env_failure="restart",
        **kwargs_of("discrete", nothing_at=1),
    )
    rollout = roll(environments)
    assert "allows nothing to the action" in environments.take_failures()[0]
    assert rollout.valid is not None and 0 < rollout.num_steps < 32


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "action_mask",
            r"^action_mask='action_mask' is not valid: expected 'info.<key>', 'observation.<path>', 'method",
        ),
        ("info.", r"^action_mask='info.' is not valid"),
        (3, r"^action_mask=3 is not valid"),
        ("info.legal", r"action_mask='info.legal' .* KeyError: 'legal'; the info of a reset has action_mask"),
        ("method.legal", r"action_mask='method.legal' .* AttributeError: .*legal"),
        ("method.reset", r"action_mask.0 has the shape \(2,\): expected|action_mask"),
        ("observation.legal", r"action_mask='observation.legal' is not valid: expected the path of a part of Box"),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_sources_without_masks_are_refused(source, message, backend):
    with pytest.raises(ConfigurationError, match=message):
        make_batch(
            "tests.mask_probes:Probe/Invalid-v0",
            backend=backend,
            action_mask=source,
            **kwargs_of("discrete"),
        )


def test_a_dict_gets_masks_as_one_more_part_unless_it_has_one_of_that_name():
    puzzle = {"env_id": "tests.nested_probes:Probe/Puzzle-v0"}
    wrapper = {"class_path": "tests.environments.test_masks.Left", "init_args": {}}
    environments = make_batch(**puzzle, wrappers=(wrapper,), action_mask="info.left")
    assert environments.single_observation_space["action_mask"] == ActionMask(2)
    assert set(environments.single_observation_space) == {"picture", "switch", "answer", "noise", "action_mask"}
    assert not make_collector(environments, 8).collect(make_policy(environments)).actions.any()
    taken = {"class_path": "tests.environments.test_masks.Left", "init_args": {"key": "action_mask"}}
    with pytest.raises(ConfigurationError, match=r"^action_mask='info.left' .* have a part of that name already"):
        make_batch(**puzzle, wrappers=(taken,), action_mask="info.left")


class Left(__import__("gymnasium").Wrapper):
    """Allows the first of two actions; with a key, an observation has a part of that name."""

    def __init__(self, env, key: str | None = None) -> None:
        super().__init__(env)
        if key is not None:
            self.observation_space = spaces.Dict({**env.observation_space.spaces, key: spaces.MultiBinary(2)})

    def reset(self, **kwargs: Any):
        observation, info = self.env.reset(**kwargs)
        return observation, {**info, "left": [1, 0]}

    def step(self, action: Any):
        *rest, info = self.env.step(action)
        return *rest, {**info, "left": [1, 0]}
