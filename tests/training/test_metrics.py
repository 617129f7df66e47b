"""Statistics of a log window: values by hand, precision and new names; histograms and gradient norms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rl import PPO, fast
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Episode, EpisodeSummary
from lightning_rl.training.metrics import LogWindow, RolloutMetrics
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_model,
    make_trainer,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_episode_statistics_cover_all_episodes_since_the_reset():
    window = LogWindow()
    for episodes in (EpisodeSummary([1.0, 4.0], [10, 20]), EpisodeSummary([], []), EpisodeSummary([-2.0], [6])):
        window.add(episodes, {}, {}, {})
    assert window.compute() == {
        "rollout/episode_return": 1.0,
        "rollout/episode_return_min": -2.0,
        "rollout/episode_return_max": 4.0,
        "rollout/episode_length": 12.0,
        "rollout/episode_length_min": 6.0,
        "rollout/episode_length_max": 20.0,
        "rollout/episodes": 3.0,
    }
    window.begin(0)
    window.add(EpisodeSummary([], []), {}, {}, {})
    assert window.compute() == {}
    window.add(EpisodeSummary([7.0], [3]), {}, {}, {})
    assert window.compute()["rollout/episode_return_min"] == 7.0


def window_of(*rollouts: dict[str, list[float]], **counts: int) -> LogWindow:
    window = LogWindow()
    for scalars in rollouts:
        window.add(EpisodeSummary([], []), scalars, {f"rollout/{name}": count for name, count in counts.items()}, {})
    return window


def test_means_average_values_not_means():
    assert window_of({"a": [1.0, 2.0, 3.0], "b": [5.0], "c": []}, {"a": [10.0]}).compute() == {"a": 4.0, "b": 5.0}


def test_means_accept_new_and_missing_names():
    window = window_of({"a": [1.0]}, {"b": [4.0], "a": [3.0]}, {"b": [6.0]})
    assert window.compute() == {"a": 2.0, "b": 5.0}
    window.begin(0)
    window.add(EpisodeSummary([], []), {"b": [1.0]}, {}, {})
    assert window.compute() == {"b": 1.0}


def test_names_are_in_the_same_order_on_all_ranks():
    ones = window_of({"b": [1.0], "a": [2.0]}, {"d": [3.0]}, {"c": [4.0], "b": [5.0]}, dropped=1, env_restarts=2)
    others = window_of({"d": [3.0]}, {"a": [2.0], "b": [1.0]}, {"b": [5.0], "c": [4.0]}, env_restarts=2, dropped=1)
    assert [*ones.compute().items()] == [*others.compute().items()]


def test_counts_are_summed_and_the_largest_lag_is_kept():
    window = LogWindow()
    for lag in (2, 5, 3):
        window.add(EpisodeSummary([], []), {}, {"rollout/dropped": lag}, {"train/policy_lag_max": lag})
    assert window.compute() == {"rollout/dropped": 10.0, "train/policy_lag_max": 5.0}


def test_statistics_are_exact_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)  # as under Lightning's bf16-true
    try:
        window = LogWindow()
        for _ in range(300):
            window.add(EpisodeSummary([1001.0], [12345]), {"x": [1 / 3]}, {}, {})
        found = window.compute()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found["rollout/episodes"], found["rollout/episode_return"]) == (300, 1001)
    assert found["rollout/episode_length_max"] == 12345
    assert found["x"] == pytest.approx(1 / 3, rel=1e-12)


def test_rounding_does_not_depend_on_the_number_of_updates():
    values, lengths = [0.1, 0.2, 0.3, 1e16, -1e16, 0.7], [1, 2, 3, 4, 5, 6]
    one_by_one, together = LogWindow(), LogWindow()
    for value, length in zip(values, lengths, strict=True):
        one_by_one.add(EpisodeSummary([value], [length]), {"a": [value], "b": []}, {}, {})
    together.add(EpisodeSummary(values, lengths), {"a": values, "b": []}, {}, {})
    total = 0.0
    for value in values:
        total += value
    assert one_by_one.compute() == together.compute()
    assert together.compute()["a"] == together.compute()["rollout/episode_return"] == total / 6
    assert not math.isclose(total, sum(sorted(values)))


def test_histograms_are_logged_after_the_first_and_the_last_epoch(tmp_path):
    torch.manual_seed(0)
    actions = spaces.Dict({"move": spaces.Discrete(3), "aim": spaces.Box(-1, 1, (2,), np.float32)})
    model = PPO(
        VECTOR, actions, policy={"hidden_sizes": (4,)}, debug={"histograms": True}, num_epochs=3, num_minibatches=1
    )
    rollouts = []
    for seed in range(4):
        rollout = random_rollout(PPO(VECTOR, spaces.Discrete(3), policy={"hidden_sizes": (4,)}).policy, seed=seed)
        rollout.actions = {"aim": torch.rand(*rollout.shape, 2), "move": rollout.actions}
        rollouts.append(rollout)
    logger: Any = TensorBoardLogger(tmp_path)
    make_trainer(logger=logger, log_every_n_steps=2).fit(model, FixedRollouts(rollouts, model))
    logger.experiment.flush()
    found = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload()
    tags = found.Tags()["histograms"]
    parts = ["actions/move", "actions/aim", "advantages"]
    parts += [f"{kind}/{name}" for kind in ("parameters", "gradients") for name, _ in model.policy.named_parameters()]
    assert sorted(tags) == sorted(f"{epoch}/{part}" for epoch in ("first_epoch", "last_epoch") for part in parts)
    for tag in tags:
        # Every second rollout is logged, against environment steps.
        assert [event.step for event in found.Histograms(tag)] == [48, 144], tag
    moves = found.Histograms("first_epoch/actions/move")[-1].histogram_value
    assert moves.num == 48
    assert moves.sum == rollouts[3].actions["move"].sum()
    advantages = found.Histograms("last_epoch/advantages")[-1].histogram_value
    assert advantages.sum == pytest.approx(0, abs=1e-4)
    assert advantages.sum_squares == pytest.approx(47, rel=1e-4)
    weight = found.Histograms("last_epoch/parameters/value_head.weight")[-1].histogram_value
    assert weight.sum == pytest.approx(model.policy.value_head.weight.sum().item(), rel=1e-4)


@pytest.mark.parametrize("fast_paths", ["auto", "compiled", "none"])
def test_gradient_norms_of_parameters_are_logged_in_any_logger(fast_paths, monkeypatch):
    """Before clipping: their squares add up to the square of the global norm."""
    monkeypatch.setattr(fast.programs, "Compiled", lambda function, *_: function)  # programs run, without compiling
    torch.manual_seed(0)
    options = {"num_epochs": 1, "num_minibatches": 1, "optimizer": {"max_grad_norm": 1e-3}}
    debug = {"gradient_norms": True, "fast_paths": fast_paths}
    model = PPO(VECTOR, spaces.Discrete(3), policy={"hidden_sizes": (4,)}, debug=debug, **options)
    logger = MemoryLogger()
    rollouts = FixedRollouts([random_rollout(model.policy)], model)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, rollouts)
    ((logged, step),) = logger.calls
    norms = {name: x for name, x in logged.items() if name.startswith("train/grad_norm/")}
    assert {*norms} == {f"train/grad_norm/{name}" for name, _ in model.policy.named_parameters()}
    assert sum(x**2 for x in norms.values()) == pytest.approx(logged["train/grad_norm"] ** 2, rel=1e-5)
    assert step == 48 and logged["train/grad_norm"] > 1e-2


def test_gradient_norms_are_means_over_minibatches_of_each_optimizer():
    torch.manual_seed(0)
    policy, optimizer = {"hidden_sizes": (4,)}, {"critic": {"learning_rate": 1e-3}}
    model = PPO(VECTOR, spaces.Discrete(3), policy=policy, optimizer=optimizer, debug={"gradient_norms": True}).double()
    norms: list[dict[str, float]] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            parameters = pl_module.policy.named_parameters()
            norms.append({name: x.grad.norm().item() for name, x in parameters if name.startswith("value_head")})

    recorder = Recorder()
    rollouts = FixedRollouts([random_rollout(model.policy)], model)
    model.steps.max_grad_norm = None
    make_trainer(callbacks=[Watch(), recorder], precision="64-true").fit(model, rollouts)
    norms = norms[::2]  # without the steps of the critic's own optimizer
    assert len(norms) == model.num_epochs * model.num_minibatches
    for name in norms[0]:
        mean = sum(x[name] for x in norms) / len(norms)
        assert recorder.rows[0][f"grad_norm/{name}"] == pytest.approx(mean, rel=1e-9)


def test_histograms_are_not_of_own_rows_without_advantages(tmp_path):
    class TwoPasses(PPO):
        def update(self, rollout):
            assert len(list(self.minibatches(Batch({"rewards": rollout.rewards.flatten()}), 2, 4))) == 8
            super().update(rollout)

    model = TwoPasses(VECTOR, spaces.Discrete(3), policy={"hidden_sizes": (4,)}, debug={"histograms": True})
    logger: Any = TensorBoardLogger(tmp_path)
    rollouts = FixedRollouts([random_rollout(model.policy)], model)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, rollouts)
    logger.experiment.flush()
    found = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload()
    assert len(found.Histograms("first_epoch/advantages")) == 1


def test_histograms_need_a_tensorboard_logger(tmp_path):
    data = make_data()
    with pytest.raises(ConfigurationError, match=r"debug.histograms=True .* a TensorBoardLogger"):
        make_trainer(logger=CSVLogger(tmp_path)).fit(make_model(data, debug={"histograms": True}), data)


def test_a_rank_without_episodes_has_the_names_of_the_others():
    windows = [RolloutMetrics(), RolloutMetrics()]
    episode = Episode(episode_return=1.0, length=2, terminated=True, infos={"level": np.array([1.0, np.nan])})
    for window, episodes in zip(windows, [[episode], []], strict=True):
        window.add_evaluation(episodes, ["level"])
    assert windows[0].evaluation.means.keys() == windows[1].evaluation.means.keys()
    assert windows[0].evaluation.compute()["rollout/level"] == 1
    assert "rollout/level_last" not in windows[0].evaluation.compute()
