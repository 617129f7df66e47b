"""Times in logs and in Lightning's profilers, and the error for NaN gradients."""

import time

import gymnasium
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import SimpleProfiler

from lightning_rl.data import collector
from lightning_rl.data.collector import profiled
from tests.helpers import make_data, make_model, make_trainer
from tests.torch_environments import ID


class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.002)
        return self.env.step(action)


def test_seconds_in_environments_and_policy_are_logged():
    data = make_data(env={"wrappers": ["tests.data.test_profiling.Slow"]})
    model = make_model(data)
    trainer = make_trainer(log_every_n_steps=1)
    trainer.fit(model, data)
    logged = {key: float(value) for key, value in trainer.logged_metrics.items() if key.startswith("time/")}
    parts = [logged[f"time/{part}_seconds"] for part in ("env", "policy", "transfer")]
    assert parts[0] > 0.9 * 16 * 2 * 0.002  # 16 steps in two environments
    assert parts[1] > 0 and 0 <= parts[2] < parts[0]
    assert sum(parts) <= logged["time/rollout_seconds"]


def test_the_clock_is_read_five_times_a_step(monkeypatch):
    """A reading takes less than 0.1 µs, a step with the smallest environments and policies at least 100 µs."""
    reads = []
    real = time.perf_counter

    class Counted:
        @staticmethod
        def perf_counter():
            reads.append(1)
            return real()

    data = make_data()
    monkeypatch.setattr(collector, "time", Counted)
    make_trainer(limit_train_batches=1).fit(make_model(data), data)
    assert len(reads) == 5 * 16 + 4


def test_profilers_show_rollouts_and_updates_by_name():
    profiler = SimpleProfiler()
    data = make_data()
    make_trainer(profiler=profiler).fit(make_model(data), data)
    found = {name: len(durations) for name, durations in profiler.recorded_durations.items()}
    assert found["rollout"] == found["update"] == 2
    # 16 steps each; the policy also computes the values of all steps at the end of a rollout.
    assert found["rollout.environment"] == found["rollout.transfer"] == 2 * 16
    assert found["rollout.policy"] == 2 * (16 + 1)
    assert sum(
        map(sum, (profiler.recorded_durations[f"rollout.{x}"] for x in ("environment", "policy", "transfer")))
    ) < (sum(profiler.recorded_durations["rollout"]))


def test_profilers_show_the_phases_of_tensor_environments():
    profiler = SimpleProfiler()
    data = make_data(f"tests.torch_environments:{ID}", backend="torch")
    make_trainer(profiler=profiler, limit_train_batches=1).fit(make_model(data), data)
    counts = {name: len(x) for name, x in profiler.recorded_durations.items() if name.startswith("rollout.")}
    assert counts == {"rollout.environment": 16, "rollout.policy": 16 + 1}


def test_functions_are_not_wrapped_without_a_profiler():
    assert profiled(None, "rollout.policy", time.sleep) is time.sleep


class Poison(Callback):
    """Makes the gradient NaN and keeps the loss finite."""

    def on_train_batch_start(self, trainer, module, *_):
        actor_critic = module.actor_critic

        def poisoned(batch):
            distribution, value = actor_critic(batch)
            return distribution, value + (0 * value).sqrt() * 0

        module.actor_critic = poisoned


@pytest.mark.parametrize(
    ("detect", "message"),
    [
        (True, "the gradient of SqrtBackward0 is NaN.*lower learning_rate"),
        (False, "grad_norm is nan.*detect_anomaly=True names the operation"),
    ],
)
def test_nan_gradient_error_suggests_a_remedy(detect, message, in_tmp_path):
    data = make_data()
    trainer = make_trainer(callbacks=[Poison()], detect_anomaly=detect)
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(make_model(data), data)
    assert torch.is_anomaly_enabled() is False
