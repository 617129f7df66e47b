"""Contract 1 in every precision: a rollout is learned from by exactly the policy that collected it.

Bounds on |ratio - 1| at the first minibatch of each rollout:

* 32-true: 1e-6. Rows are computed in batches of other sizes when acting than when updating, which may change last bits.
* 64-true: 1e-12, likewise.
* 16-mixed, bf16-mixed and bf16-true: 1e-2. A last bit of a bfloat16 feature is 0.4 % of it. Measured: 0 where the
  kernels give a row the same bits in any batch, as they mostly do; where one environment acts alone 3e-6 at first, and
  3e-3 for 17 continuous dimensions with outputs 500 times as large. Acting outside of autocast gives 2e-5 to 3e-3, too,
  which is why the context is tested by itself.
"""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl import CLEAR, PPG, PPO, VMPO, OffPolicyPPG
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    PIXELS,
    MemoryLogger,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    merged,
    parameters_of,
    precision_options,
)

BOUNDS = {"32-true": 1e-6, "64-true": 1e-12, "16-mixed": 1e-2, "bf16-mixed": 1e-2, "bf16-true": 1e-2}
NORMALIZED = {"normalization": {"observations": True, "rewards": True}}
SETTINGS = {
    "discrete": ("CartPole-v1", {}),
    "continuous": ("Pendulum-v1", {}),
    "normalized": ("Pendulum-v1", NORMALIZED),
    "normalized_shared": ("CartPole-v1", merged(NORMALIZED, {"policy": {"shared_encoder": True}})),
    "images": (PIXELS, {"policy": {"hidden_sizes": ()}}),
    "memory": ("CartPole-v1", merged(NORMALIZED, {"policy": {"memory": "lstm", "shared_encoder": True}})),
    "minimal_gru": ("CartPole-v1", {"policy": {"memory": {"kind": "mingru", "num_layers": 2}}}),
    "transformer": ("Pendulum-v1", {"policy": {"memory": {"kind": "gtrxl", "hidden_size": 16, "context_length": 5}}}),
    "memory_of_each": ("Pendulum-v1", {"policy": {"memory": {"kind": "gru", "sequence_length": 8, "burn_in": 4}}}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("precision", BOUNDS)
def test_importance_ratio_is_1_when_a_rollout_arrives(precision, setting):
    env_id, options = SETTINGS[setting]
    data = make_data(env_id, num_envs=4, rollout_length=32, rollouts_per_epoch=3)
    model, recorder = make_model(data, learning_rate=3e-3, **options), Recorder()
    make_trainer(callbacks=[recorder], **precision_options(precision, init_scale=1.0)).fit(model, data)
    assert len(recorder.rows) == 3
    assert max(recorder.column("first_ratio_error")) <= BOUNDS[precision]
    assert min(recorder.column("approx_kl")) > 1e-5  # the policy did move after each


@pytest.mark.parametrize(
    ("precision", "autocast"), [("32-true", False), ("16-mixed", True), ("bf16-mixed", True), ("bf16-true", False)]
)
def test_acting_learning_and_evaluating_happen_in_the_same_context(precision, autocast, monkeypatch):
    data = make_data(rollouts_per_epoch=1)
    model, contexts = make_model(data), {}
    for name in ("act", "log_prob", "value", "forward"):
        original = getattr(model.policy, name)

        def spy(*args, name=name, original=original, **kwargs):
            seen = (torch.is_autocast_enabled("cpu"), torch.get_default_dtype())
            contexts.setdefault(name, set()).add(seen)
            return original(*args, **kwargs)

        monkeypatch.setattr(model.policy, name, spy)
    make_trainer(limit_val_batches=1, **precision_options(precision)).fit(model, data)
    expected = {(autocast, torch.bfloat16 if precision == "bf16-true" else torch.float32)}
    assert contexts == {"act": expected, "log_prob": expected, "value": expected, "forward": expected}


@pytest.mark.parametrize(
    ("precision", "parameters", "rollout"),
    [
        ("32-true", torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64),
        ("16-mixed", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.float32),
    ],
)
def test_rewards_values_and_log_probabilities_are_never_bfloat16(precision, parameters, rollout):
    data = make_data()
    model = make_model(data)
    seen = []

    class Spy(Recorder):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            names = ("observations", "rewards", "values", "next_values", "log_probs")
            seen.append({name: getattr(batch, name).dtype for name in names})
            advantages = pl_module.estimator.gae(batch, 0.95)
            seen.append({"advantages": advantages.dtype, "parameters": next(pl_module.parameters()).dtype})

    make_trainer(callbacks=[Spy()], **precision_options(precision)).fit(model, data)
    assert {dtype for row in seen for name, dtype in row.items() if name != "parameters"} == {rollout}
    assert {row["parameters"] for row in seen if "parameters" in row} == {parameters}


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_statistics_and_counts_are_exact_in_every_precision(precision):
    """CartPole pays 1 a step, so returns equal lengths; 512 steps are more than bfloat16 can count."""
    data = make_data(num_envs=4, rollout_length=64, rollouts_per_epoch=2)
    model = make_model(data, **NORMALIZED)
    trainer = make_trainer(precision=precision, log_every_n_steps=2, limit_val_batches=1)
    trainer.fit(model, data)
    logged = trainer.callback_metrics
    assert model.env_steps == 512
    assert model.policy.observation_normalizer.moments.count.item() == 512
    assert model.reward_normalizer.moments.count.item() == 512
    assert logged["rollout/episodes"] > 10
    assert logged["rollout/episode_return"].item() == logged["rollout/episode_length"].item()
    assert logged["val/episode_return_max"].item() == logged["val/episode_length_max"].item()


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (VMPO, {}, "precision='bf16-true' is not valid: expected bf16-mixed"),
        (PPO, {"normalization": {"values": "popart"}}, "normalization.values='popart' is not valid: expected null"),
    ],
)
def test_what_bfloat16_parameters_would_round_away_is_refused(algorithm, options, message):
    data = make_data()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_trainer(precision="bf16-true").fit(algorithm(data.observation_space, data.action_space, **options), data)


def test_monitored_values_are_not_rounded_to_bfloat16():
    data, logger = make_data(num_envs=4, rollout_length=64, rollouts_per_epoch=1), MemoryLogger()
    trainer = make_trainer(precision="bf16-true", log_every_n_steps=1, logger=logger)
    trainer.fit(make_model(data), data)
    ((_, logged),) = logger.rows("rollout/episode_return")
    assert trainer.callback_metrics["rollout/episode_return"].item() == pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_recorded_numbers_are_exact_in_every_precision(precision):
    class Measured(PPO):
        def update(self, rollout):
            super().update(rollout)
            self.steps.observe(cost=12345.678)

    data, recorder = make_data(rollouts_per_epoch=1), Recorder()
    model = Measured(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)})
    make_trainer(precision=precision, callbacks=[recorder]).fit(model, data)
    assert recorder.column("cost") == [12345.678]


@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_a_run_resumes_bit_for_bit(precision, tmp_path):
    """Parameters are not rounded to float32 on the way, and the checkpoint has the loss scale."""

    def fit(num_epochs: int, ckpt_path: Path | None = None) -> tuple[Trainer, PPO]:
        data = make_data(rollouts_per_epoch=1)
        options = precision_options(precision, init_scale=2.0**20, growth_interval=3)
        model, trainer = make_model(data), make_trainer(max_epochs=num_epochs, **options)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        return trainer, model

    trainer, whole = fit(2)
    fit(1)[0].save_checkpoint(tmp_path / "half.ckpt")
    resumed_trainer, resumed = fit(2, tmp_path / "half.ckpt")
    assert_equal_parameters(resumed, parameters_of(whole))
    assert resumed_trainer.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()


@pytest.mark.parametrize("optimizer", [{}, {"name": "torch.optim.SGD", "critic": {"learning_rate": 1e-3}}])
def test_an_overflow_of_the_scaled_gradient_skips_the_step(optimizer):
    """Float16 overflows above 65504; each overflow halves the scale, until steps are taken."""
    data, recorder = make_data(rollouts_per_epoch=6), Recorder()
    model = make_model(data, optimizer=optimizer, debug={"check_numerics": True})
    before = parameters_of(model)
    trainer = make_trainer(
        callbacks=[recorder], limit_train_batches=1, **precision_options("16-mixed", init_scale=2.0**40)
    )
    trainer.fit(model, data)
    assert_equal_parameters(model, before)
    assert recorder.column("skipped_steps") == [1.0] and "grad_norm" not in recorder.rows[0]
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**36
    assert (trainer.global_step, model.env_steps) == (0, 32)

    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder], **precision_options("16-mixed", init_scale=2.0**24))
    trainer.fit(model, data)
    skipped = round(4 * sum(recorder.column("skipped_steps")))
    assert 0 < skipped < 24 and trainer.global_step == 24 - skipped
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (24 - skipped)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_statistics_of_a_rollout_are_logged_although_its_step_was_skipped():
    data, recorder = make_data(rollouts_per_epoch=1), Recorder()
    model = CLEAR(data.observation_space, data.action_space)
    make_trainer(callbacks=[recorder], **precision_options("16-mixed", init_scale=2.0**40)).fit(model, data)
    (row,) = recorder.rows
    assert row["skipped_steps"] == 1 and {"explained_variance", "importance_weight", "replay_unrolls"} <= row.keys()


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
def test_the_divergence_of_an_auxiliary_phase_is_logged_although_its_last_step_was_skipped(algorithm):
    data, recorder = make_data(rollouts_per_epoch=1), Recorder()
    more = {"batch_size": 32} if algorithm is OffPolicyPPG else {}
    model = algorithm(data.observation_space, data.action_space, num_policy_iterations=1, num_aux_epochs=1, **more)
    make_trainer(callbacks=[recorder], **precision_options("16-mixed", init_scale=2.0**40)).fit(model, data)
    (row,) = recorder.rows
    assert row["aux_skipped_steps"] == 1 and row["aux_kl"] == pytest.approx(0, abs=1e-6)


def test_gradients_are_unscaled_before_they_are_clipped_and_logged():
    norms, ends = [], []
    for init_scale in (1.0, 1024.0):
        data, recorder = make_data(rollouts_per_epoch=1), Recorder()
        model = make_model(data, optimizer={"max_grad_norm": 0.1})
        make_trainer(callbacks=[recorder], **precision_options("16-mixed", init_scale=init_scale)).fit(model, data)
        norms += recorder.column("grad_norm")
        ends.append(parameters_of(model))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and norms[0] > 0.1
    for name, parameter in ends[0].items():
        torch.testing.assert_close(parameter, ends[1][name], rtol=0, atol=1e-4)


def test_float16_parameters_are_refused():
    data = make_data()
    with pytest.raises(ConfigurationError, match=r"precision='16-true' .* 16-mixed, .* squares that Adam averages"):
        make_trainer(precision="16-true").fit(make_model(data), data)
