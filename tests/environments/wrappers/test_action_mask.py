"""Masks of invalid actions: from every source, with every backend, in every autoreset mode."""

import math
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.environments import EnvironmentBatch, EnvironmentFailure
from lightning_rl.environments.episodes import SeededEpisodes
from lightning_rl.environments.wrappers.action_mask import MaskedActions, MaskSource, ReadMasks
from lightning_rl.masks import ActionMask
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.spaces import space_to_dict
from lightning_rl.validation import ConfigurationError
from tests.mask_probes import CASES, Invalid, kwargs_of, source_of
from tests.probes import make_batch, make_collector

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def make(name: str, where: str = "info", num_envs: int = 2, backend: str = "sync", mode=SAME, **more: Any):
    kwargs = kwargs_of(name, where=where, **more)
    if backend == "native":
        kwargs["resets"] = mode.value
    env = {"action_mask": source_of(where)}
    return make_batch("tests.mask_probes:Probe/Invalid-v0", num_envs, backend=backend, env=env, mode=mode, **kwargs)


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
    """Collect a rollout from the probe, which raises if an action is invalid."""
    try:
        return make_collector(environments, length).collect(make_policy(environments))
    finally:
        environments.close()


def masks_of(rollout) -> Any:
    return rollout.observations["legal" if "legal" in rollout.observations else "action_mask"]


def valid_rows(rollout) -> dict[str, Any]:
    """Return observations, masks and rewards of valid steps."""
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
    """Scripted masks, one environment and deterministic actions, since resets would shift random numbers."""

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


def test_native_environments_with_nested_actions_can_be_reset_in_part():
    rollout = roll(make("hybrid", num_envs=3, backend="native", mode=DISABLED), 20)
    assert rollout.num_steps == 60 and rollout.truncated.any()


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_masks_of_final_observations_allow_everything(mode):
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
    env = {"wrappers": ["tests.mask_probes.AddMask"], "action_mask": "info.only"}
    environments = make_batch("CartPole-v1", 2, backend="envpool", env=env)
    rollout = make_collector(environments, 40).collect(make_policy(environments))
    assert not rollout.actions[rollout.valid].any() and not rollout.valid.all()
    assert rollout.observations["observation"].shape == (41, 2, 4)
    environments.close()


@pytest.mark.parametrize("where", ["info", "observation", "method"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_mask_that_allows_nothing_is_an_error(where, backend):
    environments = make("discrete", where, backend=backend, nothing_at=1)
    expected = (
        rf"^environment [01] \(episode [12], seed \d+, step 1\) raised in step: ValueError: the action mask "
        rf"\({re.escape(source_of(where))}\) allows nothing to the action: expected at least one choice"
    )
    with pytest.raises(EnvironmentFailure, match=expected):
        roll(environments)


@pytest.mark.parametrize("where", ["info", "observation", "method"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_mask_that_allows_nothing_in_a_native_environment_is_an_error(where, mode):
    environments = make("discrete", where, backend="native", mode=mode, nothing_at=2)
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 0 \(episode [12], seed \d+, step 2\), environment 1 .*"
    ):
        roll(environments)


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_mask_of_a_final_observation_may_allow_nothing(backend):
    for mode in (NEXT, DISABLED):
        assert roll(make("discrete", backend=backend, mode=mode, nothing_at=3)).shape == (16, 2)


@pytest.mark.parametrize(("name", "part"), [("ragged", "0"), ("hybrid", "arm.0"), ("pair", "0")])
def test_component_without_a_valid_choice_is_named(name, part):
    environments = make(name, nothing_at=1, conditional=name == "pair")
    with pytest.raises(EnvironmentFailure, match=rf"allows nothing to component '{part}' of the action"):
        roll(environments)


class Parameters(gymnasium.Env):
    """Choices 0 and 1, of which only choice 1 has parameters, in turn; alone, the parameters are the whole action."""

    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, alone: bool = False) -> None:
        box = spaces.Box(-1, 1, (2,))
        self.alone, self.action_space = alone, box if alone else spaces.Dict(choice=spaces.Discrete(2), parameters=box)

    def observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        turn = self.count % 2
        parameters = np.full(2, turn)
        mask = parameters if self.alone else {"choice": np.eye(2)[turn], "parameters": parameters}
        return np.zeros(1, np.float32), {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.count = 1
        return self.observe()

    def step(self, action: Any):
        assert self.count % 2 or not action["parameters"].any()
        self.count += 1
        observation, info = self.observe()
        return observation, 0.0, False, self.count == 6, info


gymnasium.register("Mask/Parameters-v0", Parameters)


def test_an_action_may_have_no_component_of_a_box_beside_other_parts():
    env = {"action_mask": "info.action_mask"}
    rollout = roll(make_batch("Mask/Parameters-v0", 2, env=env))
    assert rollout.actions["parameters"][0].all() and not rollout.actions["parameters"][1].any()
    with pytest.raises(EnvironmentFailure, match=r"allows nothing to the action"):
        roll(make_batch("Mask/Parameters-v0", 2, env=env, alone=True))


def test_parts_without_a_mask_may_be_none():
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))])
    source = MaskSource("info.action_mask", spaces.Box(-1, 1), action_space)
    assert source.by_name((np.array([1, 0]), None)).keys() == {"0"}
    rows = np.array([None, None])
    assert source.by_name({"0": np.array([[1, 0], [0, 1]]), "1": rows}, leading=1)["1"].tolist() == [1, 1]


@pytest.mark.parametrize("mask", [[0.0, -math.inf], [0.5, 1.0], [256, 1]])
def test_masks_must_be_zeros_and_ones(mask):
    source = MaskSource("info.action_mask", spaces.Box(-1, 1), spaces.Discrete(2))
    source.take_space(ActionMask(2))
    np.testing.assert_array_equal(source.read(np.array([1.0, 0.0])), [1, 0])
    with pytest.raises(ValueError, match=r"^action mask \(info.action_mask\) has the entry .*: expected 1 for valid"):
        source.read(np.array(mask))


def test_mask_that_allows_nothing_restarts_the_environment():
    env = {"action_mask": "info.action_mask", "on_failure": "restart"}
    kwargs = kwargs_of("discrete", nothing_at=1)
    environments = make_batch("tests.mask_probes:Probe/Invalid-v0", 2, env=env, **kwargs)
    rollout = roll(environments)
    assert "allows nothing to the action" in environments.pop_failures()[0]
    assert rollout.valid is not None and 0 < rollout.num_steps < 32


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "action_mask",
            r"^env.action_mask='action_mask' is not valid: expected 'info.<key>', 'observation.<path>', 'method",
        ),
        ("info.", r"^env.action_mask='info.' is not valid"),
        (3, r"^env.action_mask=3 is not valid"),
        ("info.legal", r"env.action_mask='info.legal' .* KeyError: 'legal'; the info of a reset has action_mask"),
        ("method.legal", r"env.action_mask='method.legal' .* AttributeError: [^;]*legal[^;]*$"),
        ("observation.legal", r"env.action_mask='observation.legal' is not valid: expected the path of a part of Box"),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_sources_without_masks_are_errors(source, message, backend):
    with pytest.raises(ConfigurationError, match=message):
        make_batch(
            "tests.mask_probes:Probe/Invalid-v0",
            backend=backend,
            env={"action_mask": source},
            **kwargs_of("discrete"),
        )


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("form", ["list", "tuple", "dict", "numbers"])
def test_masks_of_all_components_are_concatenated(form, backend):
    """Masks as arrays, in the form of Gymnasium's `sample`, or concatenated in a list."""
    environments = make_batch(
        "tests.environments.wrappers.test_action_mask:Probe/Forms-v0",
        2,
        backend=backend,
        env={"action_mask": "info.action_mask"},
        form=form,
    )
    assert environments.single_observation_space["action_mask"] == ActionMask(5)
    assert environments.reset()["action_mask"].tolist() == [[1, 0, 1, 0, 1]] * 2
    rollout = make_collector(environments, 8).collect(make_policy(environments))
    actions = rollout.flatten().actions
    assert (actions[:, 0] != 1).all() and (actions[:, 1] == 1).all()
    environments.close()


class Forms(Invalid):
    """Returns the same masks of two components in several forms."""

    def __init__(self, form: str) -> None:
        super().__init__(space_to_dict(spaces.MultiDiscrete([3, 2])))
        first, second = np.array([True, False, True]), [0, 1]
        self.form = {
            "list": [*first, *second],
            "tuple": (first, second),
            "dict": {"0": first, "1": second},
            "numbers": {0: first, 1: second},
        }[form]

    def draw(self) -> Any:
        return self.form

    def check(self, action: Any) -> None:
        assert action[0] != 1 and action[1] == 1


class FormsVector(SyncVectorEnv):
    """Two of them."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__([lambda: Forms(**kwargs)] * num_envs)


gymnasium.register("Probe/Forms-v0", Forms, vector_entry_point=FormsVector)


@pytest.mark.parametrize(("where", "step"), [("info", 0), ("method", 0), ("info", 2), ("method", 2)])
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_masks_with_changing_shape_and_failing_resets_are_errors(where, step, backend):
    options = {"backend": backend, "env": {"action_mask": source_of(where)}, "where": where, "at": step}
    if step == 0:
        with pytest.raises(
            EnvironmentFailure, match=r"raised in the reset that shows its action masks: ArithmeticError"
        ):
            make_batch("tests.environments.wrappers.test_action_mask:Probe/Spoilt-v0", 2, **options)
        return
    environments = make_batch("tests.environments.wrappers.test_action_mask:Probe/Spoilt-v0", 2, **options)
    message = (
        r"action_mask of shape \(4,\): expected \(5,\)" if backend == "sync" else "the environments raised in step: "
    )
    with pytest.raises(EnvironmentFailure, match=message):
        roll(environments)


class Spoilt(Invalid):
    """Raises in its resets, or returns a short mask at some step."""

    def __init__(self, where: str, at: int) -> None:
        self.at = at
        super().__init__(space_to_dict(spaces.Discrete(5)), where=where)

    def draw(self) -> Any:
        if self.at == 0:
            raise ArithmeticError("the physics exploded")
        mask = super().draw()
        return mask[:4] | True if self.count == self.at else mask


class SpoiltVector(SyncVectorEnv):
    """Several of them."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__([lambda: Spoilt(**kwargs)] * num_envs)

    def action_masks(self) -> np.ndarray:
        return np.stack([env.action_masks() for env in self.envs])


gymnasium.register("Probe/Spoilt-v0", Spoilt, vector_entry_point=SpoiltVector)


def test_masks_are_added_to_dicts_unless_their_name_is_taken():
    puzzle = "tests.nested_probes:Probe/Puzzle-v0"
    wrapper = {"class_path": "tests.environments.wrappers.test_action_mask.Left", "init_args": {}}
    environments = make_batch(puzzle, env={"wrappers": [wrapper], "action_mask": "info.left"})
    assert environments.single_observation_space["action_mask"] == ActionMask(2)
    assert set(environments.single_observation_space) == {"picture", "switch", "answer", "noise", "action_mask"}
    assert not make_collector(environments, 8).collect(make_policy(environments)).actions.any()
    taken = {"class_path": "tests.environments.wrappers.test_action_mask.Left", "init_args": {"key": "action_mask"}}
    with pytest.raises(ConfigurationError, match=r"^env.action_mask='info.left' .* have a part of that name already"):
        make_batch(puzzle, env={"wrappers": [taken], "action_mask": "info.left"})


class Left(gymnasium.Wrapper):
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


@pytest.mark.parametrize("where", ["info", "observation", "method"])
def test_masks_are_copies(where):
    env = Invalid(**kwargs_of("discrete", where=where))
    vector = SyncVectorEnv([lambda: ReadMasks(env, source_of(where))], copy=False)
    masked = MaskedActions(vector.single_observation_space, vector, source_of(where))
    batch = EnvironmentBatch(vector, [1], [1], [masked])
    observations = batch.reset()
    mask = observations["legal" if where == "observation" else "action_mask"]
    before = mask.copy()
    env.mask[:] = ~env.mask
    assert np.array_equal(mask, before) and mask.dtype == np.int8
    assert batch.single_observation_space.contains(map_leaves(lambda x: x[0], observations))


def test_environment_with_own_state_and_masks_is_restored_from_its_state():
    episodes = SeededEpisodes(ReadMasks(WithState(**kwargs_of("discrete")), "info.action_mask"))
    observation, _ = episodes.reset(seed=3)
    record = episodes.recorded()
    assert record["own"] == {"count": 0}
    again = SeededEpisodes(ReadMasks(WithState(**kwargs_of("discrete")), "info.action_mask"))
    exact, found, _ = again.restore(record)
    assert exact and np.array_equal(found, observation)


class WithState(Invalid):
    """Has its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
