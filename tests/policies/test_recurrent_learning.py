"""Runs with memory: a task that needs it, options, evaluation and errors."""

import math
import re
import sys
from typing import Any

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import seed_everything

from lightning_rl import A2C, PPO, FailedUpdate, RolloutDataModule
from lightning_rl.cli.main import main
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.spaces import space_to_dict
from lightning_rl.validation import ConfigurationError
from tests.checkpointing.test_failed_update import BrokenRollouts
from tests.helpers import Recorder, assert_equal_parameters, make_data, make_model, make_trainer, merged, parameters_of

SEQUENCES = {"kind": "gru", "hidden_size": 8, "sequence_length": 8}


def learn_to_repeat(memory: Any, algorithm: type[PPO] | type[A2C] = PPO, **options: Any) -> float:
    """Return the mean return of 40 episodes after training to recall a goal shown at the start."""
    seed_everything(0, verbose=False)
    data = RolloutDataModule(
        "tests.probes:Probe/RepeatFirst-v0", 16, 24, 25, evaluation={"episodes": 40}, env={"kwargs": {"length": 8}}
    )
    common = {"policy": {"memory": memory, "hidden_sizes": (16,)}, "learning_rate": 1e-2, "gamma": 0.9}
    model = algorithm(data.observation_space, data.action_space, **merged(common, options))
    trainer = make_trainer(max_epochs=1, limit_val_batches=1)
    trainer.fit(model, data)
    return trainer.callback_metrics["val/episode_return"].item()


@pytest.mark.parametrize(
    "memory",
    [
        {"kind": "lstm", "hidden_size": 16},
        {"kind": "gru", "hidden_size": 16, "sequence_length": 8, "burn_in": 3},
    ],
    ids=["lstm", "gru"],
)
def test_recurrent_ppo_learns_to_recall_a_cue(memory):
    assert learn_to_repeat(memory, num_minibatches=2) == pytest.approx(1)


def test_ppo_without_memory_cannot_recall_a_cue():
    assert learn_to_repeat(None, num_minibatches=2) < 0.7


def test_recurrent_a2c_learns_to_recall_a_cue():
    memory = {"kind": "gru", "hidden_size": 16}
    assert learn_to_repeat(memory, A2C, optimizer={"name": "torch.optim.Adam"}, policy={"shared_encoder": True}) > 0.95


@pytest.mark.parametrize(
    "options",
    [
        {"policy": {"memory": SEQUENCES | {"kind": "lstm"}}, "normalization": {"observations": True, "rewards": True}},
        {"policy": {"memory": SEQUENCES | {"burn_in": 4, "num_layers": 2}, "shared_encoder": True}},
        {"policy": {"memory": "lstm", "shared_encoder": True}, "num_minibatches": 1},
    ],
    ids=["normalized", "burn_in", "whole"],
)
def test_validation_does_not_change_recurrent_training(options):
    """Recurrent states of running episodes are unchanged too."""

    def train(**trainer_options):
        data = make_data(num_envs=3, rollout_length=16)
        model = make_model(data, **{"num_minibatches": 3} | options)
        make_trainer(max_epochs=2, **trainer_options).fit(model, data)
        return model

    plain = train()
    for trainer_options in ({"limit_val_batches": 1}, {"limit_val_batches": 1, "num_sanity_val_steps": 1}):
        assert_equal_parameters(train(**trainer_options), parameters_of(plain))


def test_evaluation_keeps_memory_within_episodes_only():
    """Acting uses the state of the step before, and zeros at an episode's first observation."""
    data = make_data(
        "tests.probes:Probe/Counter-v0", env={"kwargs": {"lengths": (3, 2)}}, evaluation={"episodes": 4, "num_envs": 2}
    )
    model = make_model(data, policy={"memory": SEQUENCES})
    given, came = [], []
    original = model.policy.act

    def spy(*args, memory, **kwargs):
        output = original(*args, memory=memory, **kwargs)
        given.append(memory["actor"])
        came.append(output.memory["actor"])
        return output

    model.policy.act = spy
    make_trainer(limit_val_batches=1).validate(model, data, verbose=False)
    assert len(given) == 5
    for t, state in enumerate(given):
        assert torch.equal(state, torch.zeros_like(state) if t in (0, 3) else came[t - 1])
    assert all(state.any() for state in came[1:])  # the very first observation is all zeros


def test_module_call_takes_and_returns_memory():
    data = make_data()
    model = make_model(data, policy={"memory": "lstm", "shared_encoder": True})
    observations = torch.rand(2, 4)
    with pytest.raises(ValueError, match="needs memory: initial_memory"):
        model(observations)
    memory = model.policy.initial_memory(2)
    actions, after = model(observations, memory=memory)
    assert actions.shape == (2,) and [x.shape for x in leaves(after)] == [(2, 1, 128)] * 2
    assert not any(map(torch.equal, leaves(memory), leaves(after)))


def test_memory_options_change_the_result():
    def train(**memory):
        data = make_data(num_envs=4, rollout_length=16)
        model = make_model(data, policy={"memory": SEQUENCES | memory, "shared_encoder": True}, learning_rate=1e-2)
        make_trainer().fit(model, data)
        return model

    plain = train()
    assert sum(p.numel() for p in train(hidden_size=9).parameters()) > sum(p.numel() for p in plain.parameters())
    for options in ({"sequence_length": 4}, {"burn_in": 3}, {"kind": "lstm"}, {"separate": True}, {"num_layers": 2}):
        other = train(**options)
        pairs = zip(other.policy.action_head.parameters(), plain.policy.action_head.parameters(), strict=True)
        assert not any(torch.equal(*pair) for pair in pairs), options


@pytest.mark.parametrize(
    ("memory", "num_minibatches", "message"),
    [
        (SEQUENCES | {"sequence_length": 5}, 2, "^policy.memory.sequence_length=5 is not valid: expected a divisor"),
        (SEQUENCES, 3, "num_minibatches=3 does not divide the 4 sequences"),
        ("lstm", 4, "num_minibatches=4 does not divide the 2 sequences"),
    ],
)
def test_memory_options_that_do_not_fit_the_rollout_raise_before_training(memory, num_minibatches, message):
    data = make_data()
    model = make_model(data, policy={"memory": memory}, num_minibatches=num_minibatches)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(model, data)
    assert not data._sampler.started


def test_memory_on_xla_raises():
    model = make_model(make_data(), policy={"memory": "lstm"})
    model._device = torch.device("xla")
    with pytest.raises(ConfigurationError, match=r"policy.memory='lstm' is not valid: expected None on XLA"):
        model.check_run(make_trainer(), None)


def test_checkpoint_restores_memory_and_other_memory_options_raise(tmp_path):
    data = make_data()
    model = make_model(data, policy={"memory": SEQUENCES})
    trainer = make_trainer()
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "one.ckpt")
    memory = map_leaves(lambda x: x + 0.5, model.policy.initial_memory(2))
    outputs = [one.policy.value(torch.ones(2, 4), memory) for one in (model, loaded)]
    assert torch.equal(*outputs)
    for other in (None, SEQUENCES | {"hidden_size": 9}, SEQUENCES | {"kind": "lstm"}):
        with pytest.raises(ConfigurationError, match=r"does not fit the checkpoint: expected policy.memory="):
            model = make_model(data, policy={"memory": other})
            make_trainer(max_epochs=2).fit(model, data, ckpt_path=tmp_path / "one.ckpt")


def test_recurrent_rollouts_are_on_policy():
    """Over 20 rollouts with episodes that begin and end within sequences."""
    data = make_data(num_envs=4, rollout_length=32, rollouts_per_epoch=20)
    model, recorder = make_model(data, policy={"memory": "lstm"}, learning_rate=3e-3, num_epochs=4), Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-6
    assert max(recorder.column("approx_kl")) > 1e-3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--model.policy.memory=lstm", "lstm"),
        ("--model.policy.memory={kind: gru, hidden_size: 8}", {"kind": "gru", "hidden_size": 8}),
    ],
)
def test_command_line_takes_memory_name_or_options(given, expected, in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    small = [
        "--data.env_id=CartPole-v1",
        "--data.num_envs=4",
        "--data.rollout_length=8",
        "--data.evaluation.episodes=1",
    ]
    cli = main(["fit", "--model=PPO", given, *small, "--max_env_steps=64", "--trainer.accelerator=cpu"])
    assert cli.model.hparams["policy"]["memory"] == expected
    assert cli.model.policy.actor_core.is_lstm == (expected == "lstm")
    stored = torch.load(cli.run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert stored["hyper_parameters"]["policy"]["memory"] == expected
    assert stored["RolloutDataModule"]["ranks"][0]["memory"]["actor"] is not None


def test_memory_with_critic_only_parts_nested_actions_and_normalization():
    aim = space_to_dict(spaces.Dict({"move": spaces.Discrete(3), "arm": spaces.Box(-1, 1, (2,))}))
    for env_id, env_kwargs, options in (
        (
            "tests.nested_probes:Probe/Puzzle-v0",
            {},
            {"policy": {"critic_only": ["answer"]}, "normalization": {"observations": True}},
        ),
        ("tests.probes:Probe/Aim-v0", {"action_space": aim}, {"policy": {"action_distribution": {"arm": "beta"}}}),
    ):
        data = make_data(env_id, env={"kwargs": env_kwargs}, num_envs=4, rollouts_per_epoch=3)
        options = merged({"policy": {"memory": SEQUENCES}}, options)
        model, recorder = make_model(data, learning_rate=3e-3, **options), Recorder()
        make_trainer(callbacks=[recorder], limit_val_batches=1).fit(model, data)
        assert max(recorder.column("first_ratio_error")) <= 1e-6
        assert min(recorder.column("approx_kl")) > 1e-6


def test_failed_recurrent_update_is_replayed(tmp_path):
    data = make_data(num_envs=3)
    torch.manual_seed(0)
    memory = SEQUENCES | {"burn_in": 4}
    model = BrokenRollouts(
        data.observation_space, data.action_space, broken=[1], policy={"memory": memory}, num_minibatches=3
    )
    with pytest.raises(FloatingPointError) as caught:
        make_trainer(default_root_dir=tmp_path).fit(model, data)
    failed = FailedUpdate.load(re.search(r"load\('(.*)'\)", str(caught.value))[1])
    assert all(math.isnan(failed.replay()[term]) for term in ("policy_loss", "grad_norm"))
    assert len(failed.minibatch.sequences) == 2 and failed.minibatch.sequences.burn_in is not None
