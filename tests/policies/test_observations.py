"""Nested observations from the environments to the update."""

from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl import PPO
from lightning_rl.checkpointing.failed_update import FailedUpdate
from lightning_rl.data.evaluation import run_episodes
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.episodes import SeededEpisodes
from lightning_rl.functional import gae
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.training.loss import Loss
from tests.helpers import Recorder, make_data, make_model, make_trainer, merged
from tests.nested_probes import PAIR, SENSORS, Sensors
from tests.probes import Greedy, make_batch, make_collector
from tests.programs import run_ranks

SENSORS_ID, PUZZLE = "tests.nested_probes:Probe/Sensors-v0", "tests.nested_probes:Probe/Puzzle-v0"
SCRIPT = {"lengths": (5, 3, 4), "ends": ("terminated", "truncated", "both")}
SPACES = {
    "multi_discrete": spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 0], [0, -2]]),
    "multi_binary": spaces.MultiBinary([2, 3]),
    "dict": SENSORS,
    "tuple": PAIR,
}


class Fixed:
    """A policy with the action 0, and a different value for every place."""

    def value(self, observations: Any) -> torch.Tensor:
        return 1000 * observations["place"][..., 0] + 10 * observations["place"][..., 1]

    def act(self, observations: Any, generator: Any = None, deterministic: bool = False) -> PolicyOutput:
        return PolicyOutput(torch.zeros(observations["place"].shape[:-1], dtype=torch.long))

    def log_prob(self, observations: Any, actions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(actions.shape)


def equal(one: Any, other: Any) -> bool:
    return all(leaves(map_leaves(torch.equal, one, other)))


def make_policy(space: spaces.Space[Any] = SENSORS, **options: Any) -> ActorCritic:
    torch.manual_seed(0)
    options = merged({"hidden_sizes": (16,), "network": "mlp", "shared_encoder": False}, options)
    return ActorCritic(space, spaces.Discrete(3), **options)


def slow_loop(num_steps: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return observations and next observations of a single environment."""
    env = Sensors(**options)
    seen, reached = [env.reset()[0]], []
    for _ in range(num_steps):
        observation, _, terminated, truncated, _ = env.step(0)
        reached.append(observation)
        seen.append(env.reset()[0] if terminated or truncated else observation)
    return seen, reached


@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rollout_leaves_equal_environment_observations(backend, mode, reuse_buffer):
    environments = make_batch(SENSORS_ID, 2, mode=mode, backend=backend, reuse_buffer=reuse_buffer, **SCRIPT)
    rollout = make_collector(environments, 20).collect(Fixed())
    environments.close()
    seen, reached = slow_loop(20, **SCRIPT)
    valid = torch.ones(20, dtype=torch.bool) if rollout.valid is None else rollout.valid[:, 1]
    rows = map_leaves(lambda x: x[:-1, 1][valid], rollout.observations)
    for t, row in enumerate(seen[: int(valid.sum())]):
        assert all(leaves(map_leaves(lambda x, y, t=t: np.array_equal(x[t], y), rows, row))), t
    # The value of the final observation, not of the first one of the next episode.
    expected = [1000 * o["place"][0] + 10 * o["place"][1] for o in reached]
    next_values = rollout.next_values[:, 1][valid]
    ended = rollout.terminated[:, 1][valid]
    assert next_values.tolist() == [0 if end else v for v, end in zip(expected, ended.tolist(), strict=False)]
    for (t, index), camera in zip(
        rollout.final_indices.tolist(), rollout.final_observations["camera"].unbind(), strict=True
    ):
        if index == 1:
            assert np.array_equal(camera, reached[int(valid[:t].sum())]["camera"])


def test_leaves_keep_their_dtype_and_images_stay_uint8():
    environments = make_batch(SENSORS_ID, 2)
    policy = make_policy(network="auto", normalize_observations=True)
    seen = []
    for encoder in (policy.actor_encoder, policy.critic_encoder):
        encoder.encoders[":camera"].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    rollout = make_collector(environments, 6).collect(policy)
    dtypes = map_leaves(lambda x: x.dtype, rollout.observations)
    assert dtypes == {
        "arm": (torch.int64, torch.float32),
        "body": {"lamps": torch.int8, "wheels": torch.int64},
        "camera": torch.uint8,
        "place": torch.float32,
    }
    assert map_leaves(lambda x: x.dtype, rollout.final_observations) == dtypes
    assert map_leaves(lambda x: x.dtype, rollout.flatten().observations) == dtypes
    assert len(seen) > 6 and set(seen) == {torch.uint8}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("num_rows", [19, 20, 21])
def test_autoreset_modes_give_the_same_rows_and_targets(mode, num_rows):
    results = []
    for one, length in ((AutoresetMode.SAME_STEP, num_rows), (mode, 2 * num_rows)):
        environments = make_batch(SENSORS_ID, 1, mode=one, **SCRIPT)
        policy = make_policy(environments.single_observation_space).double()
        rollout = make_collector(environments, length, torch.float64).collect(Greedy(policy))
        targets = gae(rollout.rewards, rollout.values, rollout.next_values, rollout.discounts(0.9), rollout.traces(0.0))
        batch = rollout.flatten(targets=targets + rollout.values)
        results.append(map_leaves(lambda x: x[:num_rows], batch.fields))
    for x, y in zip(*map(leaves, results), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("env_id", [SENSORS_ID, PUZZLE])
def test_worker_processes_give_bit_identical_rollouts(env_id):
    rollouts = []
    for backend in ("sync", "async"):
        environments = make_batch(env_id, 3, backend=backend)
        rollouts.append(make_collector(environments, 25).collect(make_policy(environments.single_observation_space)))
        environments.close()
    one, other = (rollout.state_dict() for rollout in rollouts)
    assert one.pop("valid") is other.pop("valid") is None
    assert one.pop("policy_version") == other.pop("policy_version")
    assert equal(one, other)


def test_replaced_environments_give_the_same_rollouts_in_worker_processes():
    rollouts = []
    for backend in ("sync", "async"):
        options = {"spoil": "nan", "at": 3, "env": {"on_failure": "restart"}, "backend": backend}
        environments = make_batch(SENSORS_ID, 2, **options)
        rollouts.append(make_collector(environments, 12).collect(make_policy()))
        assert "returned observation arm.1 nan" in environments.pop_failures()[0]
        environments.close()
    one, other = (rollout.state_dict() for rollout in rollouts)
    assert not one["valid"].all() and one.pop("policy_version") == other.pop("policy_version")
    assert equal(one, other)
    assert len(rollouts[0].final_indices) and all(x.isfinite().all() for x in leaves(rollouts[0].observations))


@pytest.mark.parametrize("name", SPACES)
def test_rollouts_of_nested_observations_are_on_policy(name):
    data = make_data("tests.probes:Probe/Space-v0", env={"kwargs": {"observation_space": SPACES[name]}})
    recorder = Recorder()
    model = make_model(data)
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert len(recorder.column("first_ratio_error")) == 2
    assert max(recorder.column("first_ratio_error")) <= 1e-6


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_non_finite_observation_raises_with_the_path_of_its_leaf(at, value, backend):
    """At a reset, within an episode, and at its last step."""
    environments = make_batch(SENSORS_ID, 2, spoil=value, at=at, backend=backend)
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 0 \(.*\) returned observation arm\.1 {value}: expected"
    ):
        make_collector(environments, 8).collect(Fixed())
    environments.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("shape", r"an observation body\.wheels of shape \(3,\): expected \(2,\)"),
        ("missing", r"another structure than its space has \(KeyError: 'lamps'\): expected an element of Dict\("),
        ("array", r"another structure than its space has \(IndexError: .*\): expected an element of Dict\("),
        ("entries", r"another structure than its space has \(ValueError: .*\): expected an element of Dict\("),
    ],
)
def test_observation_with_wrong_structure_raises(spoil, message):
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 0 \(episode 0, seed \d+, step 2\) returned .*{message}"
    ):
        make_collector(make_batch(SENSORS_ID, 2, spoil=spoil), 8).collect(Fixed())


@pytest.mark.parametrize("mode", AutoresetMode)
def test_recorded_episodes_hold_every_leaf(mode):
    environments = make_batch(SENSORS_ID, 2, mode=mode, **SCRIPT)
    episodes = run_episodes(environments, Fixed(), [2, 1], torch.Generator(), record=True)
    assert [episode.length for episode in episodes] == [5, 3, 5]
    seen, reached = slow_loop(8, **SCRIPT)
    for episode, first in ((episodes[0], 0), (episodes[1], 5), (episodes[2], 0)):
        for t in range(episode.length):
            expected = [seen[first + t], reached[first + t]]
            for place, row in zip((t, t + 1), expected, strict=True):
                same = map_leaves(lambda x, y, place=place: np.allclose(x[place], y), episode.observations, row)
                assert all(leaves(same))
    assert episodes[0].observations["camera"].dtype == np.uint8


@pytest.mark.parametrize("changed", [None, "picture", "switch", "noise"])
def test_replayed_episode_is_compared_leaf_by_leaf(changed):
    env = SeededEpisodes(gymnasium.make(PUZZLE))
    env.reset(seed=1)
    for _ in range(3):
        reached = env.step(0)[0]
    record = env.recorded()
    if changed is not None:
        record["observation"][changed] = record["observation"][changed] + 1
    exact, observation, _ = SeededEpisodes(gymnasium.make(PUZZLE)).restore(record)
    assert exact is (changed is None)
    assert all(leaves(map_leaves(np.array_equal, observation, reached))) is exact


def test_trainer_validates_and_predicts():
    data = make_data(PUZZLE, evaluation={"episodes": 3})
    model = make_model(data, policy={"network": "mlp"})
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(model, data)
    assert 0 <= trainer.callback_metrics["val/episode_return"] <= 10
    (episodes,) = trainer.predict(model, data)
    assert len(episodes) == 3
    for episode in episodes:
        shown = map_leaves(torch.from_numpy, episode.observations)
        assert shown["picture"].shape == (11, 6, 6, 1)
        assert episode.rewards.tolist() == (shown["answer"][:-1].numpy() == episode.actions).tolist()
        assert model(map_leaves(lambda x: x[:-1], shown)).tolist() == episode.actions.tolist()


def test_learns_from_image_and_switch_with_a_critic_only_answer():
    small = {
        "class_path": "lightning_rl.policies.networks.images.ImpalaEncoder",
        "init_args": {"channels": [4], "out_features": 16},
    }
    data = make_data(PUZZLE, num_envs=8, rollout_length=64, rollouts_per_epoch=15, evaluation={"episodes": 20})
    options = {"learning_rate": 3e-3, "entropy_coef": 0.01, "gamma": 0.0, "num_epochs": 4, "num_minibatches": 4}
    policy = {"network": {"picture": small}, "critic_only": ["answer"], "hidden_sizes": (32,)}
    model = make_model(data, policy=policy, **options)
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/episode_return"] >= 9.5  # 5 by chance, or with only one of the two parts


class Broken(PPO):
    """The loss of the second minibatch is not finite."""

    spoil = 1

    def loss(self, batch: Any) -> Loss:
        loss = super().loss(batch)
        if self.steps.record.num_updates == self.spoil:
            loss.add_scalar(None, torch.tensor(float("nan")))
        return loss


def test_failed_update_with_nested_observations_is_replayed(tmp_path):
    data = make_data(SENSORS_ID)
    torch.manual_seed(0)
    small = {"policy": {"hidden_sizes": (16,), "network": "mlp"}, "num_epochs": 2, "num_minibatches": 2}
    model = Broken(data.observation_space, data.action_space, **small)
    kept: list[Any] = []
    in_order = model.minibatches
    model.minibatches = lambda *args: (kept.append(b) or b for b in in_order(*args))
    with pytest.raises(FloatingPointError, match=r"FailedUpdate\.load"):
        make_trainer(default_root_dir=tmp_path, check_val_every_n_epoch=None).fit(model, data)
    failed = FailedUpdate.load(next(tmp_path.glob("failed-update*.pt")))
    failed.replay()
    assert equal(failed.minibatch.observations, kept[1].observations)
    assert isinstance(failed.minibatch.observations["arm"], tuple)


def test_shuffled_and_split_rows_stay_together():
    rollout = make_collector(make_batch(SENSORS_ID, 3, **SCRIPT), 10).collect(Fixed())
    batch = rollout.flatten(number=torch.arange(30).view(10, 3))
    assert len(batch) == 30
    parts = list(batch.shuffled(torch.Generator().manual_seed(0)).split(4))
    assert [len(part) for part in parts] == [8, 8, 7, 7]
    assert sorted(torch.cat([part.number for part in parts]).tolist()) == list(range(30))
    for part in parts:
        assert equal(part.observations, map_leaves(lambda x, part=part: x[part.number], batch.observations))
        assert not torch.equal(part.number, part.number.sort().values)


def test_rollout_moves_and_copies_every_leaf(tmp_path):
    rollout = make_collector(make_batch(SENSORS_ID, 2, **SCRIPT), 6).collect(Fixed())
    torch.save(rollout.state_dict(), tmp_path / "rollout.pt")
    stored = torch.load(tmp_path / "rollout.pt", weights_only=True)
    assert equal(stored["observations"], rollout.observations)
    rollout.observations["place"].zero_()
    assert stored["observations"]["place"].any()
    rollout.to("meta")
    assert {x.device.type for x in (*leaves(rollout.observations), *leaves(rollout.final_observations))} == {"meta"}


def test_envpool_returns_dict_observations():
    environments = make_batch("CheetahRun-v1", 2, backend="envpool")
    policy = ActorCritic(
        environments.single_observation_space, environments.single_action_space, normalize_observations=True
    )
    rollout = make_collector(environments, 4).collect(policy)
    environments.close()
    assert map_leaves(lambda x: x.shape, rollout.observations) == {"position": (5, 2, 8), "velocity": (5, 2, 9)}
    for x in rollout.observations.values():
        assert x.dtype == torch.float32 and all(not torch.equal(a, b) for a, b in pairwise(x))


def test_ranks_agree_on_nested_observations(tmp_path):
    code = (
        "import torch\n"
        "from tests.helpers import make_data, make_model, make_trainer\n"
        f"data = make_data({PUZZLE!r})\n"
        "policy = {'network': 'mlp', 'critic_only': ['answer']}\n"
        "model = make_model(data, policy=policy, normalization={'observations': True})\n"
        "trainer = make_trainer(devices=2, strategy='ddp')\n"
        "trainer.fit(model, data)\n"
        f"torch.save(model.state_dict(), {str(tmp_path)!r} + f'/{{trainer.global_rank}}.pt')\n"
    )
    run_ranks("-c", code)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert equal(one, other)
    assert one["policy.observation_normalizer.leaves.:noise.moments.count"] == 2 * 2 * 2 * 16
