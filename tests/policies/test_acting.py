"""`model.act`: actions for one or several environments."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl import PPO
from lightning_rl.masks import ActionMask
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.tools.export import export_policy
from lightning_rl.validation import ConfigurationError
from tests.helpers import DISCRETE, VECTOR
from tests.tools.test_export import act, inputs, make, observations


@pytest.mark.parametrize("case", ["normalised_gaussian", "squashed", "masks", "nested"])
def test_act_on_one_observation_equals_its_row_in_a_batch(case):
    model = make(case)
    batch = map_leaves(lambda x: x.numpy(), inputs(model, 5)[0])
    together = model.act(batch)
    for found, expected in zip(leaves(together), leaves(act(model, True, *inputs(model, 5))), strict=True):
        np.testing.assert_array_equal(found, expected.numpy())
    for row in range(5):
        single = model.act(map_leaves(lambda x, row=row: x[row], batch))
        for found, expected in zip(leaves(single), leaves(together), strict=True):
            np.testing.assert_allclose(found, expected[row], rtol=0, atol=1e-6)
        assert model.action_space.contains(single)


def test_critic_only_parts_are_optional_in_act():
    model = make("nested")
    everything = map_leaves(lambda x: x.numpy(), observations(model, 3))
    needed = {name: part for name, part in everything.items() if name != "camera"}
    for one, other in zip(leaves(model.act(everything)), leaves(model.act(needed)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_actor_gets_the_masks_inside_a_part_that_only_the_critic_sees(tmp_path):
    masks = {"mask": ActionMask(3), "deep": spaces.Dict({"mass": VECTOR}), "mass": VECTOR}
    space = spaces.Dict({"info": spaces.Dict(masks), "place": VECTOR})
    model = PPO(space, spaces.Discrete(3), policy={"hidden_sizes": (4,), "critic_only": ["info"]})
    for choice, mask in enumerate(np.eye(3, dtype=np.int8)):
        assert model.act({"info": {"mask": mask}, "place": np.zeros(3, np.float32)}) == choice
    about = json.loads((export_policy(model, tmp_path / "policy") / "policy.json").read_text())
    assert about["observations"].keys() == {"info", "place"} and about["observations"]["info"].keys() == {"mask"}


def test_policy_whose_critic_alone_sees_each_entry_of_a_part_is_exported(tmp_path):
    space = spaces.Dict({"goal": spaces.Dict({"mass": VECTOR}), "place": VECTOR})
    model = PPO(space, DISCRETE, policy={"hidden_sizes": (4,), "critic_only": ["goal.mass"]})
    about = json.loads((export_policy(model, tmp_path / "policy") / "policy.json").read_text())
    assert list(about["observations"]) == ["place"]


def test_act_passes_memory_between_steps_and_resets_it_at_episode_starts():
    model = make("lstm")
    steps = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    alone, memory = [], None
    for step in steps:
        action, memory = model.act(step[1], memory=memory)
        assert action in DISCRETE
        alone.append(memory)
    memory = None
    for t, step in enumerate(steps):
        _, memory = model.act(step, memory=memory, episode_starts=np.array([t == 2, False]))
        if t == 2:
            _, fresh = model.act(step[0])
            for together, one in zip(leaves(memory), leaves(fresh), strict=True):
                torch.testing.assert_close(together[:1], one)
        for together, one in zip(leaves(memory), leaves(alone[t]), strict=True):
            torch.testing.assert_close(together[1:], one)
            assert one.abs().sum() > 0


@pytest.mark.parametrize("case", ["lstm", "mingru"])
@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 1), (4, 3)])
def test_act_refuses_the_recurrent_state_of_another_number_of_rows(case, before, now):
    model = make(case)
    _, memory = model.act(np.ones((before, 3)))
    with pytest.raises(ConfigurationError, match=f"memory: rows={before} is not valid: expected {now}, as many as obs"):
        model.act(np.ones((now, 3)), memory=memory)


@pytest.mark.parametrize("starts", [True, [True], [True, False, False]])
def test_act_refuses_starts_of_another_number_of_rows(starts):
    model, rows = make("lstm"), np.ones((4, 3))
    _, memory = model.act(rows)
    with pytest.raises(ConfigurationError, match=r"episode_starts: rows=\d is not valid: expected 4, as many as obs"):
        model.act(rows, memory=memory, episode_starts=starts)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_act_starts_episodes_of_vectorized_environments_without_recurrent_state(mode):
    env = gymnasium.make_vec(
        "CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    torch.manual_seed(0)
    memory = {"kind": "gru", "hidden_size": 8}
    model = PPO(env.single_observation_space, env.single_action_space, policy={"hidden_sizes": (4,), "memory": memory})
    observations, _ = env.reset(seed=0)
    actions, state = model.act(observations)
    ended, episodes = np.zeros(2, bool), 0
    for _ in range(40):
        starts = ended
        observations, _, terminated, truncated, _ = env.step(actions)
        ended = terminated | truncated
        if mode is not AutoresetMode.NEXT_STEP:
            starts = ended
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = env.reset(options={"reset_mask": ended})
        actions, state = model.act(observations, memory=state, episode_starts=starts)
        for row in np.flatnonzero(starts):
            _, fresh = model.act(observations[row])
            torch.testing.assert_close(state["actor"][row], fresh["actor"][0])
            assert np.abs(observations[row]).max() <= 0.05  # CartPole begins near zero
            episodes += 1
    assert episodes > 2
    env.close()


def test_act_obeys_masks_and_samples_if_not_deterministic():
    model = make("masks")
    rows = {"place": np.zeros((300, 3), np.float32), "action_mask": np.tile(np.int8([1, 0, 1]), (300, 1))}
    assert len(set(model.act(rows))) == 1
    assert set(model.act(rows, deterministic=False)) == {0, 2}


def test_act_raises_on_wrong_shapes_and_unused_memory():
    model = make("masks")
    with pytest.raises(ConfigurationError, match=r"'place': \(4,\).*expected .*'place': \(3,\)}, or"):
        model.act({"place": np.zeros(4), "action_mask": np.ones(3)})
    with pytest.raises(ConfigurationError, match="or the same number of rows of each"):
        model.act({"place": np.zeros((2, 3)), "action_mask": np.ones((1, 3))})
    with pytest.raises(ConfigurationError, match="memory='given' is not valid: expected None, since the policy has"):
        PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,)}).act(np.zeros(3), memory={})


@pytest.mark.parametrize(
    ("observation", "given"),
    [
        ({"place": np.zeros(3)}, "place"),
        (np.zeros(3), "ndarray"),
        ([0.0], "list"),
        (({"place": np.zeros(3), "action_mask": np.ones(3)}, {}), "0.place, 0.action_mask"),  # of env.reset()
    ],
)
def test_act_names_the_parts_of_an_observation_that_lacks_some(observation, given):
    message = f"observation: parts='{given}' is not valid: expected dicts and tuples with action_mask, place"
    with pytest.raises(ConfigurationError, match=message):
        make("masks").act(observation)


@pytest.mark.parametrize("given", [(np.zeros(3), {}), torch.zeros(3, device="meta")])
def test_act_says_that_observations_are_arrays_on_the_cpu(given):
    message = f"=<class '.*{type(given).__name__}'> is not valid: expected an array of numbers on the CPU"
    with pytest.raises(ConfigurationError, match=f"observation{message}"):
        PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,)}).act(given)
    with pytest.raises(ConfigurationError, match=f"observation place{message}"):
        make("masks").act({"place": given, "action_mask": np.ones(3)})


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("camera", np.full((4, 4, 3), 0.5), r"0\.5\b.* uint8"),
        ("camera", np.full((4, 4, 3), 256), "256.* uint8"),
        ("cell", 1.5, r"1\.5\b.* int64"),
        ("place", np.array([0, np.nan, 0]), "nan.* float32"),
        ("place", np.array([0, 0, 1e300]), r"1e\+300.* float32"),
    ],
)
def test_act_refuses_numbers_that_the_dtype_of_the_space_would_change(part, value, named):
    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    space = spaces.Dict({"camera": image, "cell": spaces.Discrete(4), "place": VECTOR})
    model = PPO(space, DISCRETE, policy={"hidden_sizes": (4,)})
    whole = {"camera": np.ones((4, 4, 3)), "cell": 1.0, "place": [0, 0, 0]}  # other dtypes that lose nothing
    assert model.act(whole) in DISCRETE
    with pytest.raises(ConfigurationError, match=f"observation {part}=.*{named}"):
        model.act(whole | {part: value})


def test_act_accepts_python_numbers():
    space = spaces.Dict({"cell": spaces.Discrete(4), "action_mask": ActionMask((3,))})
    torch.manual_seed(0)
    model = PPO(space, DISCRETE, policy={"hidden_sizes": (4,)})
    one = {"cell": 2, "action_mask": np.int8([0, 1, 0])}
    assert model.act(one) == 1
    assert model.act(map_leaves(lambda x: np.stack([x] * 2), one)).tolist() == [1, 1]
