"""Memory of rollouts, and that training does not accumulate memory."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.helpers import PIXELS, make_data, make_model, make_trainer
from tests.torch_environments import ID

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import memory


class Stored(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.stored, self.data = memory.storage(batch)
        self.rows = batch.shape[0] * batch.shape[1]


# Per step: observation, action (int64, or float32 of a number), reward, two flags, log-probability, two values.
@pytest.mark.parametrize(
    ("env_id", "backend", "bytes_per_step"),
    [
        ("CartPole-v1", "sync", 16 + 8 + 4 + 2 + 12),
        ("CartPole-v1", "native", 16 + 8 + 4 + 2 + 12),
        (PIXELS, "sync", 7 * 7 * 3 + 8 + 4 + 2 + 12),
        (ID, "torch", 8 + 4 + 4 + 2 + 12),
    ],
)
def test_rollouts_need_at_most_20_percent_more_memory_than_their_data(env_id, backend, bytes_per_step):
    data, stored = make_data(env_id, backend=backend, rollout_length=64, rollouts_per_epoch=1), Stored()
    make_trainer(callbacks=[stored]).fit(make_model(data), data)
    assert stored.data == stored.rows * bytes_per_step
    assert stored.data < stored.stored <= 1.2 * stored.data


class LiveTensors(Callback):
    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in (19, 59):
            gc.collect()
            self.counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))


def test_training_keeps_no_tensors_of_earlier_rollouts():
    data, live = make_data(rollout_length=4, rollouts_per_epoch=60), LiveTensors()
    model = make_model(data, num_epochs=1, num_minibatches=1)
    make_trainer(callbacks=[live], log_every_n_steps=10).fit(model, data)
    before, after = live.counts
    assert after - before < 20, "one that is kept of each rollout would be 40 more"


@pytest.mark.slow
def test_resident_memory_does_not_grow_with_rollouts():
    grown = memory.growth(2000)
    # The data of a rollout is 16 steps of 42 bytes.
    assert grown["bytes_per_rollout"] < 16 * 42 / 2, grown
