"""The example scripts run, shortened, and do what they say."""

import ast
import functools
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import optuna
import pytest
import torch
import yaml

from lightning_rl import PPO, PolicyExport
from lightning_rl.cli.main import main
from tests.helpers import make_data, make_model, make_trainer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def importable(in_tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str):
    return importlib.import_module(name)


def test_train_keeps_the_best_checkpoint_and_returns_its_score(in_tmp_path):
    score = example("train").main(max_env_steps=14_336, root="run")
    # An untrained policy gets about 20.
    assert 40 < score <= 500
    assert list(Path("run/checkpoints").glob("best-step=*.ckpt"))


def test_resume_goes_on_from_the_first_half(in_tmp_path):
    first, second = example("resume").main(max_env_steps=6_000, root="run")
    assert (first.env_steps, first.policy_version) == (3072, 3)
    assert (second.env_steps, second.policy_version) == (6144, 6)
    # Moments of the observations of both halves.
    assert second.policy.observation_normalizer.moments.count == 6144


def test_custom_networks_are_used_trained_and_loaded_again(in_tmp_path):
    module = example("custom_network")
    fourier, linear = module.main(max_env_steps=1024)
    for encoder in (fourier.policy.actor_encoder, fourier.policy.critic_encoder):
        assert isinstance(encoder, module.FourierEncoder)
        assert encoder.frequencies.shape == (4, 16)
    assert linear.policy.value_head.weight.shape == (1, 4)
    # Four epochs of four minibatches.
    assert all(linear.optimizers().state[p]["step"] == 16 for p in linear.policy.value_head.parameters())

    # The class path and its arguments are all that a checkpoint needs to hold.
    assert fourier.hparams["policy"]["network"] == {
        "class_path": "custom_network.FourierEncoder",
        "init_args": {"num_frequencies": 16},
    }
    again = PPO(**fourier.hparams)
    again.load_state_dict(fourier.state_dict())
    observations = torch.randn(5, 4)
    assert torch.equal(again.policy(observations)[1], fourier.policy(observations)[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_the_loss_of_ppo(precision):
    returns = example("fabric").main(max_env_steps=20_480, precision=precision)
    assert max(returns[:2]) < 40 and sum(returns[-3:]) / 3 > 80


def test_action_masks_are_obeyed_and_learned_with(in_tmp_path):
    """The game ends the run where a field is taken; two players who move at random are even, up to who moves first."""
    assert example("action_masks").main(max_env_steps=16_384) > 0.6


def without_validation_in_fit(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Leave out the validations of a run but the one before it; the tests look at the evaluation at the end."""
    monkeypatch.setattr(module, "Trainer", functools.partial(module.Trainer, check_val_every_n_epoch=10_000))


def test_a_club_and_a_swing_are_learned_together(in_tmp_path, monkeypatch):
    """At first nearly seven strokes are needed of the ten that there are."""
    module = example("hybrid_actions")
    assert module.main(max_env_steps=1024) > 4
    without_validation_in_fit(monkeypatch, module)
    assert module.main(max_env_steps=12_288) < 3


def test_reinforce_learns_to_balance_the_pole(in_tmp_path):
    """A greedy policy that has learned nothing gets 10 to 340, with this seed 56 after two gradient steps."""
    module = example("reinforce")
    assert module.main(max_env_steps=256) < 150
    assert module.main() > 450


def test_reinforce_has_at_most_forty_lines_of_code():
    text = (EXAMPLES / "reinforce.py").read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    docstrings = [body[0] for body in bodies if isinstance(body[0], ast.Expr)]
    omitted = {line for one in docstrings for line in range(one.lineno, one.end_lineno + 1)}
    lines = [line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in omitted]
    code = [line for line in lines if line and not line.startswith("#")]
    assert 30 < len(code) <= 40


def test_trpo_learns_to_balance_the_pole_within_its_trust_region(in_tmp_path, monkeypatch):
    """No step exceeds the limit, and at least one in three improves the policy."""
    module, divergences = example("trpo"), []
    improve = module.TRPO.improve

    def observed(model: Any, batch: Any) -> None:
        with torch.no_grad():
            old, _ = model.actor_critic(batch)
        improve(model, batch)
        with torch.no_grad():
            divergences.append(float(old.kl(model.actor_critic(batch)[0]).mean()))

    monkeypatch.setattr(module.TRPO, "improve", observed)
    without_validation_in_fit(monkeypatch, module)
    assert module.main(max_env_steps=24_576) > 450
    assert -1e-6 < min(divergences) <= max(divergences) <= 0.01 + 1e-6
    assert sum(x > 1e-4 for x in divergences) > len(divergences) / 3


# Whatever imports PyTorch, or this package, fails.
WITHOUT_TORCH = """
import json, sys
sys.modules |= dict.fromkeys(("torch", "lightning", "lightning_rl"))
sys.path.insert(0, sys.argv[1])
import play_onnx
plain = play_onnx.main("plain/step=64/greedy.onnx", episodes=2)
remembering = play_onnx.main("remembering/greedy.onnx", 2, play_onnx.positions)
print(json.dumps([plain, remembering]))
"""


def played(model: PPO, see: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """What the policy itself gets in the same episodes."""
    env, returns = gymnasium.make("CartPole-v1"), []
    for seed in range(2):
        observation, over, memory, total = env.reset(seed=seed)[0], False, None, 0.0
        while not over:
            if model.policy.memory is None:
                action = model.act(see(observation))
            else:
                action, memory = model.act(see(observation), memory=memory)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def test_exported_policies_play_the_same_episodes_without_pytorch(in_tmp_path, capsys):
    """One written by the callback during a run, one by the command from the checkpoint of a run."""
    wrappers = [{"class_path": "lightning_rl.environments.PartialObservation", "init_args": {"indices": [0, 2]}}]
    data, hidden = make_data(), make_data(env={"wrappers": wrappers})
    plain = make_model(data, normalization={"observations": True})
    callbacks = [PolicyExport(64, "plain", format="onnx", programs=["greedy"])]
    make_trainer(callbacks=callbacks).fit(plain, data)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_model(hidden, policy={"memory": "lstm"}, normalization={"observations": True}), hidden)
    trainer.save_checkpoint("remembering.ckpt")
    arguments = ["--ckpt_path=remembering.ckpt", "--output=remembering", "--programs=greedy", "--episodes=2"]
    main(["export", *arguments])
    assert "checked: actions within 1e-05 of the policy's on 8 steps" in capsys.readouterr().out
    command = [sys.executable, "-c", WITHOUT_TORCH, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    module = example("play_onnx")
    with pytest.raises(SystemExit, match=r"policy/greedy\.onnx does not exist: expected a model .*lightning-rl export"):
        module.main()
    remembering = PPO.load_from_checkpoint("remembering.ckpt")
    assert found == [played(plain, np.asarray), played(remembering, module.positions)]
    about = json.loads(Path("remembering/policy.json").read_text())
    assert about["score"]["episodes"] == 2
    assert [about[name] for name in ("env_id", "env_steps")] == ["CartPole-v1", 64]


def test_tuning_prunes_keeps_trials_and_writes_a_configuration_that_fit_runs(in_tmp_path, monkeypatch, caplog):
    module = example("tune")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    monkeypatch.setattr(module, "DATA", module.DATA | {"evaluation": {"episodes": 2}})
    with caplog.at_level(logging.INFO, "lightning.pytorch"):  # also puts back what the example sets
        study = module.main(num_trials=2, seeds=(0, 1), max_env_steps=512)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("lightning")] == []
    for trial in study.trials:
        # Two validations of each seed and a last one, at the environment steps of this seed after those of the first.
        steps = sorted(trial.intermediate_values)
        assert steps == [256, 512, 1280, 1536]
        assert trial.value == (trial.intermediate_values[512] + trial.intermediate_values[1536]) / 2
    trials = module.main(num_trials=1, seeds=(0,), max_env_steps=256).trials
    assert len({trial.params["learning_rate"] for trial in trials}) == 3, "the study goes on, with other settings"
    config = yaml.safe_load(Path("best.yaml").read_text())
    assert config["model"]["init_args"]["learning_rate"] == study.best_params["learning_rate"]
    quiet = [
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--data.evaluation.episodes=1",
    ]
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    assert main(["fit", "--config=best.yaml", "--max_env_steps=256", *quiet]).model.env_steps == 256

    trial = SimpleNamespace(report=lambda *_: None, should_prune=lambda: True)
    with pytest.raises(optuna.TrialPruned):
        trainer = SimpleNamespace(callback_metrics={module.RETURN: 1.0})
        module.ReportReturn(trial, 0).on_validation_end(trainer, SimpleNamespace(env_steps=3))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert 30 <= len(text.splitlines()) <= 80
    assert f"    python examples/{path.name}\n" in text
    assert text.endswith('if __name__ == "__main__":\n    main()\n')
