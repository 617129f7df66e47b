"""Which histograms are logged, and when."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rl import PPO
from lightning_rl.validation import ConfigurationError
from tests.helpers import VECTOR, FixedRollouts, make_data, make_model, make_trainer, random_rollout

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


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


def test_histograms_need_a_tensorboard_logger(tmp_path):
    data = make_data()
    with pytest.raises(ConfigurationError, match=r"debug.histograms=True .* a TensorBoardLogger"):
        make_trainer(logger=CSVLogger(tmp_path)).fit(make_model(data, debug={"histograms": True}), data)
