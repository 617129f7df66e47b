"""Runs on every kind of action: on-policy to rounding, evaluated, and learned."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import PPO, Rollout, RolloutDataModule
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.spaces import space_to_dict
from lightning_rl.training.metrics import RolloutMetrics
from tests.helpers import (
    MemoryLogger,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    merged,
    parameters_of,
)

BOUNDED = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 0.5], np.float32))
HALF_BOUNDED = spaces.Box(np.array([-1, -np.inf, -np.inf]), np.array([np.inf, 1, np.inf]), dtype=np.float64)
HYBRID = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=-1),
        "arm": spaces.Tuple(
            [BOUNDED, spaces.MultiDiscrete([3, 2], start=[1, 5]), spaces.Dict({"grip": spaces.MultiBinary((1, 2))})]
        ),
    }
)
SPACES: dict[str, tuple[spaces.Space[Any], Any]] = {
    "discrete": (spaces.Discrete(4, start=-2), None),
    "multi_discrete": (spaces.MultiDiscrete([[2, 4], [3, 2]], start=[[0, 1], [-5, 0]]), None),
    "multi_binary": (spaces.MultiBinary([2, 3]), None),
    "integers": (spaces.Box(np.array([-2, 3], np.int8), np.array([1, 5], np.int8), dtype=np.int8), None),
    "gaussian": (BOUNDED, None),
    "half_bounded": (HALF_BOUNDED, None),
    "state_dependent": (
        BOUNDED,
        {"kind": "gaussian", "std": "state_dependent", "std_transform": "softplus", "initial_std": 0.5, "min_std": 0.1},
    ),
    "squashed": (BOUNDED, "squashed_gaussian"),
    "beta": (BOUNDED, "beta"),
    "tf_agents": (BOUNDED, "tf_agents_normal"),
    "hybrid": (HYBRID, {"arm.0": "beta"}),
}
ALL = pytest.mark.parametrize("name", SPACES)


def make(name: str, num_epochs: int = 2, **options: Any) -> tuple[PPO, RolloutDataModule]:
    space, choice = SPACES[name]
    data_options = {"num_envs": 4, "rollout_length": 32} | options
    data = make_data(
        "tests.probes:Probe/Aim-v0", **merged({"env": {"kwargs": {"action_space": space_to_dict(space)}}}, data_options)
    )
    model = {"num_epochs": num_epochs, "gamma": 0.0, "learning_rate": 0.01}
    return make_model(data, policy={"action_distribution": choice}, **model), data


@ALL
@pytest.mark.parametrize(
    ("shared_encoder", "precision", "bound"),
    [(False, "32-true", 2e-6), (True, "32-true", 2e-6), (False, "64-true", 1e-12), (True, "bf16-mixed", 1e-2)],
)
def test_recomputed_log_probs_equal_log_probs_of_acting(
    name: str, shared_encoder: bool, precision: str, bound: float
) -> None:
    recorder = Recorder()
    space, choice = SPACES[name]
    kwargs = {"observation_space": spaces.Box(-3, 3, (5,)), "action_space": space}
    data = make_data(
        "tests.probes:Probe/Space-v0", env={"kwargs": kwargs}, num_envs=4, rollout_length=32, rollouts_per_epoch=4
    )
    model = make_model(
        data, policy={"action_distribution": choice, "shared_encoder": shared_encoder}, learning_rate=0.01
    )
    make_trainer(callbacks=[recorder], precision=precision).fit(model, data)
    assert len(recorder.rows) == 4
    assert max(recorder.column("first_ratio_error")) <= bound
    assert min(recorder.column("approx_kl")) > 1e-5  # the policy changed after each


@ALL
def test_recorded_episodes_hold_environment_actions(name: str) -> None:
    model, data = make(name)
    episodes = make_trainer().predict(model, data)
    assert episodes is not None
    for episode in episodes[0]:
        for t in range(episode.length):
            assert data.action_space.contains(map_leaves(lambda x, t=t: x[t], episode.actions))
        assert all(len(leaf) == episode.length for leaf in leaves(episode.actions))


@pytest.mark.filterwarnings("ignore:.* of the action components")
@ALL
def test_policy_reaches_nine_tenths_of_the_optimum(name: str) -> None:
    slow = {"gaussian": 40, "beta": 24, "tf_agents": 24}  # a standard deviation of 1 takes long to shrink
    rollouts = slow.get(name, 14)
    model, data = make(name, num_epochs=8, rollouts_per_epoch=rollouts, num_envs=8, evaluation={"episodes": 20})
    trainer = make_trainer(limit_val_batches=1, check_val_every_n_epoch=1000)
    (before,) = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    (after,) = trainer.validate(model, data, verbose=False)
    assert before["val/episode_return"] < 0.75 * 8
    assert after["val/episode_return"] >= 0.9 * 8


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_worker_processes_get_the_same_nested_actions(backend: str) -> None:
    model, data = make("hybrid", backend=backend)
    make_trainer().fit(model, data)
    reference, in_process = make("hybrid")
    make_trainer().fit(reference, in_process)
    assert_equal_parameters(model, parameters_of(reference))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_module_returns_actions_in_units_of_the_space(num_rows: int) -> None:
    model, _ = make("squashed")
    torch.nn.init.constant_(model.policy.action_head.mean.bias, 50.0)
    actions = model(torch.zeros(num_rows, 1))
    assert actions.tolist() == [[2.0, 0.5]] * num_rows


def test_entropy_of_every_part_is_logged() -> None:
    logger = MemoryLogger()
    model, data = make("hybrid")
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    metrics = logger.calls[-1][0]
    names = {name.removeprefix("train/entropy.") for name in metrics if name.startswith("train/entropy.")}
    assert names == {"arm.0", "arm.1.0", "arm.1.1", "arm.2.grip", "move"}
    parts = sum(metrics[f"train/entropy.{name}"] for name in names)
    assert metrics["train/entropy"] == pytest.approx(parts, rel=1e-5)


def test_flat_action_logs_one_entropy() -> None:
    logger = MemoryLogger()
    model, data = make("gaussian")
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    assert [name for name in logger.calls[-1][0] if "entropy" in name] == ["train/entropy", "train/entropy_coef"]


def test_share_of_clipped_components_is_logged() -> None:
    logger = MemoryLogger()
    model, data = make("gaussian")
    make_trainer(logger=logger, log_every_n_steps=1, limit_train_batches=1).fit(model, data)
    # With mean 0 and standard deviation 1: outside [-2, 2] and outside [0, 0.5].
    expected = (0.0455 + 1 - 0.1915) / 2
    assert logger.calls[-1][0]["train/action_saturation"] == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("name", ["squashed", "beta", "discrete"])
def test_unbounded_actions_log_no_saturation(name: str) -> None:
    logger = MemoryLogger()
    model, data = make(name)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    assert "train/action_saturation" not in logger.calls[-1][0]


def test_saturation_counts_gaussian_parts_of_nested_actions() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,)), "c": spaces.Box(-np.inf, 3, (1,))})
    policy = ActorCritic(spaces.Box(-1, 1, (1,)), space)
    b = torch.tensor([[[0.0, 2.0]], [[-1.5, 1.0]]])
    actions = {"a": torch.zeros(2, 1, dtype=torch.long), "b": b, "c": torch.tensor([[[-9.0]], [[3.5]]])}
    share = policy.saturation(torch.zeros(2, 1, 1), actions)
    assert share is not None
    assert share.item() == 3 / 6
    unbounded = ActorCritic(spaces.Box(-1, 1, (1,)), spaces.Box(-np.inf, np.inf, (1,)))
    assert unbounded.saturation(torch.zeros(2, 1, 1), b) is None


def test_large_saturation_warns_once_after_the_first_rollouts() -> None:
    recorder = Recorder()
    model, data = make("gaussian", rollouts_per_epoch=10)
    model.learning_rate = 1e-6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callbacks=[recorder]).fit(model, data)
        assert not [w for w in caught if "action components" in str(w.message)]
        make_trainer(max_epochs=2).fit(model, data)
    told = [str(w.message) for w in caught if "action components" in str(w.message)]
    assert len(told) == 1
    assert "set policy.action_distribution to 'squashed_gaussian' or 'beta', which" in told[0]


def test_small_saturation_does_not_warn() -> None:
    metrics, space = RolloutMetrics(), spaces.Box(-1, 1, (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.warn_of_saturation(0.1, 100, space)
        metrics.warn_of_saturation(0.9, 9, space)
    with pytest.warns(UserWarning, match="11% of the action components in rollout 100"):
        metrics.warn_of_saturation(0.11, 100, space)


def test_saturation_warning_names_parts_of_nested_actions() -> None:
    space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
    with pytest.warns(UserWarning, match="policy.action_distribution to 'squashed_gaussian' or 'beta' for '1', which"):
        RolloutMetrics().warn_of_saturation(0.5, 10, space)
    ActorCritic(spaces.Box(-1, 1, (1,)), space, action_distribution={"1": "squashed_gaussian"})  # as it says


def test_rollout_copies_and_moves_nested_actions() -> None:
    model, data = make("hybrid")
    rollouts: list[Rollout] = []

    class Keep(Recorder):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
            rollouts.append(batch)

    make_trainer(callbacks=[Keep()], limit_train_batches=1).fit(model, data)
    state = rollouts[0].state_dict()
    copied = Rollout(**state).to("cpu")
    for one, other in zip(leaves(copied.actions), leaves(rollouts[0].actions), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    rows = copied.flatten().shuffled(torch.Generator().manual_seed(0))
    assert [len(leaf) for leaf in leaves(rows.actions)] == [128] * 4
    parts = list(rows.split(2))
    assert torch.equal(torch.cat([part.actions["arm"][1] for part in parts]), rows.actions["arm"][1])
    assert isinstance(parts[0].actions["arm"], tuple)
